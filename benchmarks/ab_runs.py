"""How often contests of whole runs are wrong: simulated ones with known truth, and real runs of a contest's folder drawn anew.

    python benchmarks/ab_runs.py simulate --contests 1000 > benchmarks/results/DATE-ab_runs.txt
    python benchmarks/ab_runs.py real --folder FOLDER --contests 20

`real` draws whole blocks of real runs, with replacement; for equal entries it permutes the times within each block. Both go
through `mlhpc.plugins.tune.race.run_race`, as `mlhpc ab runs run` does; only what makes a run differs.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlhpc.plugins.tune.race import Race, RaceRules, Turn, compute_median_ratio, make_random_order, run_race

ENTRIES = tuple("abcdefgh")
BLOCKS, ERROR = 16, 0.05
Noise = Callable[[random.Random, int, int], float]
"""Log of the factor on a time, for a block and the run's place in the whole contest."""


def normal(chance: random.Random, block: int, place: int) -> float:
    """Normal, 10 %."""
    return chance.gauss(0.0, 0.1)


def heavy(chance: random.Random, block: int, place: int) -> float:
    """Cauchy: the 10 % that others' work adds may be a factor of ten, in either direction."""
    return max(-3.0, min(3.0, 0.1 * math.tan(math.pi * (chance.random() - 0.5))))


def drifting(chance: random.Random, block: int, place: int) -> float:
    """A machine that becomes slower by 2 % a run and is restarted every 24 runs; normal noise of 5 %."""
    return 0.02 * (place % 24) + chance.gauss(0.0, 0.05)


def loaded(chance: random.Random, block: int, place: int) -> float:
    """A neighbour that comes and goes every seven runs and takes half of the machine; normal noise of 5 %."""
    return math.log(2.0) * (place // 7 % 2) + chance.gauss(0.0, 0.05)


def late(chance: random.Random, block: int, place: int) -> float:
    """Exponential delays of 20 % on top of 2 %."""
    return math.log1p(chance.expovariate(5.0)) + chance.gauss(0.0, 0.02)


NOISES: Mapping[str, Noise] = {
    "normal": normal,
    "cauchy": heavy,
    "drift": drifting,
    "neighbour": loaded,
    "delays": late,
}


@dataclass
class World:
    """Makes runs with known log times. ``fails``: the chance of each entry not to finish. ``spreads``: its own further noise.

    ``interrupted``: the chance that a run is lost because the contest was killed.
    """

    levels: Mapping[str, float]
    noise: Noise
    seed: int
    fails: Mapping[str, float] | None = None
    spreads: Mapping[str, float] | None = None
    interrupted: float = 0.0

    def __post_init__(self) -> None:
        self.chance = random.Random(f"world {self.seed}")
        self.runs = 0

    def __call__(self, turn: Turn) -> float:
        self.runs += 1
        own = (self.spreads or {}).get(turn.entry, 0.0)
        value = (
            self.levels[turn.entry] + self.noise(self.chance, turn.block, self.runs) + self.chance.gauss(0.0, 1.0) * own
        )
        lost = self.chance.random() < 1.0 - (1.0 - (self.fails or {}).get(turn.entry, 0.0)) * (1.0 - self.interrupted)
        return math.inf if lost else math.exp(value)


def plan(seed: int, blocks: int = BLOCKS, entries: tuple[str, ...] = ENTRIES, error: float = ERROR) -> RaceRules:
    """The plan of one contest."""
    return RaceRules(entries, error, blocks, 1000 * seed)


def levels(gap: float, entries: Sequence[str] = ENTRIES) -> dict[str, float]:
    """Log times: the first entry is faster than all others by a factor of 1 + ``gap``."""
    return {name: 0.0 if name == entries[0] else math.log1p(gap) for name in entries}


@dataclass(frozen=True)
class Rates:
    """Shares of contests: the best won, the best was dropped, somebody won; mean number of runs and of blocks."""

    won: float
    dropped: float
    winner: float
    runs: float
    blocks: float


def rates(races: Sequence[Race], best: str = ENTRIES[0]) -> Rates:
    """Count outcomes. ``best`` is the entry that is best in truth, or any of equal ones."""
    return Rates(
        statistics.fmean(race.winner == best for race in races),
        statistics.fmean(best in race.dropped for race in races),
        statistics.fmean(race.winner is not None for race in races),
        statistics.fmean(sum(map(len, race.blocks)) for race in races),
        statistics.fmean(len(race.blocks) for race in races),
    )


def simulate(count: int, **world: object) -> Rates:
    """Run simulated contests, each with its own seed."""
    given = dict(world)
    blocks = given.pop("blocks", BLOCKS)
    entries = given.pop("entries", ENTRIES)
    return rates([run_race(plan(seed, blocks, entries), {}, World(seed=seed, **given)) for seed in range(count)])  # type: ignore[arg-type]


def table(count: int) -> None:
    """Print the table of simulated contests."""
    print(f"{count} contests a row, 8 entries, error {ERROR:g}, at most {BLOCKS} blocks; shares in %")
    print(f"{'noise':<12}{'truth':<40}{'best wins':>10}{'best dropped':>14}{'any winner':>12}{'runs':>7}{'blocks':>8}")
    cases: list[tuple[str, dict[str, object]]] = [
        ("all equal", {"levels": levels(0.0)}),
        ("all equal, 5 % of runs interrupted", {"levels": levels(0.0), "interrupted": 0.05}),
        ("all equal, up to 64 blocks", {"levels": levels(0.0), "blocks": 64}),
        ("two entries, equal, up to 64 blocks", {"levels": levels(0.0, "ab"), "blocks": 64, "entries": ("a", "b")}),
        ("best by 10 %", {"levels": levels(0.1)}),
        ("best by 30 %", {"levels": levels(0.3)}),
        ("best by 30 %, 5 % of runs interrupted", {"levels": levels(0.3), "interrupted": 0.05}),
        ("best by 100 %", {"levels": levels(1.0)}),
        ("best by 1 %, others spread 30 % more", {"levels": levels(0.01), "spreads": dict.fromkeys(ENTRIES[1:], 0.3)}),
        ("best by 1 %, itself spread 30 % more", {"levels": levels(0.01), "spreads": {"a": 0.3}}),
        ("equal, but one fails in half of its runs", {"levels": levels(0.0), "fails": {"h": 0.5}}),
        ("first twice as fast, fails in half", {"levels": levels(1.0), "fails": {"a": 0.5}}),
    ]
    for name, noise in NOISES.items():
        for truth, world in cases:
            found = simulate(count, noise=noise, **world)
            shares = f"{100 * found.won:>10.1f}{100 * found.dropped:>14.1f}{100 * found.winner:>12.1f}"
            print(f"{name:<12}{truth:<40}{shares}{found.runs:>7.0f}{found.blocks:>8.1f}", flush=True)


def coverage(count: int, blocks: int) -> None:
    """Print how often the 95 % intervals of ratios hold the truth, of four entries over so many complete blocks."""
    true = {"a": 0.0, "b": 0.05, "c": 0.1, "d": 0.3}
    print(
        f"\ncoverage of 95 % intervals, {count} contests of 4 entries (log times {tuple(true.values())}), {blocks} blocks each"
    )
    for name, noise in NOISES.items():
        held = 0
        for seed in range(count):
            world = World(true, noise, seed)
            made = [
                {n: world(Turn(b, n)) for n in make_random_order(b, tuple(true), seed)} for b in range(1, blocks + 1)
            ]
            for n in ("b", "c", "d"):
                ratio = compute_median_ratio([(block[n], block["a"]) for block in made])
                if ratio is not None:
                    held += (ratio.low or 0.0) <= math.exp(true[n]) <= (ratio.high or math.inf)
        print(f"  {name:<12} ratio to the best {100 * held / (3 * count):5.1f} %", flush=True)


def real(folder: Path, without: Sequence[str], count: int) -> None:
    """Print what contests on blocks drawn from the real runs of a folder give, as they are and with the entries permuted."""
    from mlhpc.plugins.tune.contest import read_contest, read_result
    from mlhpc.plugins.tune.race import build_race
    from mlhpc.plugins.tune.ranking import read_ranking

    contest, ranking = read_contest(folder), read_ranking(folder)
    settings, names = contest.settings, [name for name in contest.rules.entries if name not in without]
    known = {noted.turn: read_result(contest, noted.turn).value for noted in contest.read_journal().runs}
    blocks = build_race(contest.rules, known)[0].blocks
    whole = [{name: block[name] for name in names} for block in blocks if len(block) == len(contest.rules.entries)]
    print(
        f"{settings.workload} {settings.size}, {settings.objective}: {len(whole)} blocks of {len(names)} real runs, findings: ",
        end="",
    )
    print(len(ranking.findings), f"(left out: {', '.join(without) or 'none'})")
    for block in whole:
        print("  " + "  ".join(f"{name} {seconds:.3g} s" for name, seconds in sorted(block.items())))
    leader = next(place.entry for place in ranking.entries if place.entry in names)
    for shuffled, kind in (
        (False, f"as they are: {leader} leads"),
        (True, "entries permuted in each block: all are equal"),
    ):
        races = [_redrawn(whole, names, seed, shuffled=shuffled) for seed in range(count)]
        found = rates(races, leader)
        won, winner = round(count * found.won), round(count * found.winner)
        print(f"  {count} contests on these blocks, drawn with replacement, {kind}: at most {BLOCKS} blocks")
        print(f"    {leader} wins in {won}, anybody in {winner}; mean {found.runs:.0f} runs, {found.blocks:.1f} blocks")


def _redrawn(blocks: Sequence[Mapping[str, float]], entries: Sequence[str], seed: int, *, shuffled: bool) -> Race:
    """A contest whose blocks are real ones, drawn with replacement; ``shuffled``: with the entries permuted."""
    chance, drawn = random.Random(f"redrawn {seed}"), {}

    def run(turn: Turn) -> float:
        if turn.block not in drawn:
            times = dict(chance.choice(blocks))
            names = list(times)
            order = chance.sample(names, len(names)) if shuffled else names
            drawn[turn.block] = {name: times[other] for name, other in zip(names, order, strict=True)}
        return drawn[turn.block][turn.entry]

    return run_race(RaceRules(tuple(entries), ERROR, BLOCKS, seed), {}, run)


def main() -> None:
    """Read the arguments and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["simulate", "real"])
    parser.add_argument("--contests", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="of a contest that ran here")
    parser.add_argument("--without", action="append", default=[], help="an entry to leave out")
    given = parser.parse_args()
    if given.what == "real":
        real(given.folder, given.without, given.contests)
        return
    table(given.contests)
    for blocks in (7, 16, 32):
        coverage(max(1, given.contests // 5), blocks)


if __name__ == "__main__":
    main()
