"""Runs comparisons in blocks, and races of entries over blocks, which end at a given chance of a wrong answer.

Every entry has one turn in each block, so a drift between blocks affects all equally.

The best entry is the one that no other beats in more than half of the blocks. Before each block the leader of the
earlier blocks is named. Against the hypothesis "this entry is the best" a wealth of 1 is bet, block after block, on
"the leader is faster". If the entry is the best, the wealth does not grow on average. Then the chance that it ever
reaches w is at most 1/w (Ville, 1939). This holds for any number of blocks and any distribution of times. An entry is
dropped when the bets against it reach the threshold.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mlhpc.suite.errors import InputError
from mlhpc.suite.statistics.power import POWER, find_smallest_effect

Result = TypeVar("Result")


@dataclass(frozen=True)
class Turn:
    """One entry in one block. Blocks count from 1."""

    block: int
    entry: str


def make_alternating_order(block: int, entries: Sequence[str]) -> list[str]:
    """Return the order of a block of two sides, reversed in every second one.

    A drift within a block then cancels out.
    """
    return list(entries) if block % 2 else list(reversed(entries))


def make_random_order(block: int, entries: Sequence[str], seed: int) -> list[str]:
    """Draw the order of a block.

    Orders are independent and not balanced. Only then can times of equal entries be exchanged within each block,
    whatever the machine does. The stated error of a race rests on that.
    """
    drawn = sorted(entries)
    random.Random(f"{seed}/{block}").shuffle(drawn)  # noqa: S311  no secret
    return drawn


def make_balanced_order(block: int, entries: Sequence[str], seed: int) -> list[str]:
    """Draw the order of a block of two sides; every second block has the reverse of the one before.

    A drift then cancels out, and no disturbance of the machine is in step with one side.
    """
    drawn = make_random_order((block + 1) // 2, entries, seed)
    return drawn if block % 2 else drawn[::-1]


def run_block(
    block: int, order: Sequence[str], run: Callable[[Turn], Result], known: Mapping[Turn, Result] | None = None
) -> dict[str, Result]:
    """Run all turns of a block, one after the other. The ``known`` turns are not run again."""
    known = known or {}
    turns = [Turn(block, entry) for entry in order]
    return {turn.entry: known[turn] if turn in known else run(turn) for turn in turns}


# (stake, part): each part of the initial wealth bets this share of itself. A large stake is fast if an entry loses
# every block, a small one survives an entry that loses 6 of 10. The parts sum to 1.
STAKES = ((1.0, 0.4), (0.9, 0.15), (0.8, 0.1), (0.6, 0.15), (0.4, 0.1), (0.2, 0.1))
MOST_NEEDED_PAIRS = 400  # a race of more is not proposed
FEWEST_SPREAD = 4  # ratios that say how much they spread
CLIP = 3.7  # median deviations, 2.5 standard deviations of normal noise: an outlier counts as much
INTERVAL_ALPHA = 0.05  # chance that the interval of a median ratio misses it


@dataclass
class BettingTest:
    """The wealth that is bet against one entry, part by part of `STAKES`."""

    parts: list[float] = field(default_factory=lambda: [part for _, part in STAKES])

    @property
    def wealth(self) -> float:
        """The evidence against the entry; 1 at the beginning."""
        return math.fsum(self.parts)

    def settle(self, lost: float) -> None:
        """Settle the bets of a block.

        ``lost`` is 1 if the entry lost, -1 if it won. A mean over rivals lies in between.
        """
        self.parts = [part * (1.0 + stake * lost) for (stake, _), part in zip(STAKES, self.parts, strict=True)]


def compute_sign(mine: float, its: float) -> int:
    """Return 1 if I was slower, -1 if I was faster, 0 for a tie. Two runs that did not finish (infinite) tie."""
    return (mine > its) - (mine < its)


def compute_e_value(lost: int, won: int) -> float:
    """Compute the wealth after blocks ``lost`` to and ``won`` against one rival that was named beforehand."""
    return math.fsum(part * (1.0 + stake) ** lost * (1.0 - stake) ** won for stake, part in STAKES)


@dataclass(frozen=True)
class MedianRatio:
    """The median ratio of two entries' times, and its 95 % interval. None: infinite, or no bound yet."""

    value: float | None
    low: float | None
    high: float | None
    blocks: int


def compute_median_ratio(pairs: Sequence[tuple[float, float]]) -> MedianRatio | None:
    """Compute my time over its time from pairs of times.

    A run that did not finish is infinite. None without a ratio.
    """
    ratios = sorted(mine / its if math.isfinite(its) else 0.0 for mine, its in pairs if math.isfinite(min(mine, its)))
    if not ratios:
        return None
    count = len(ratios)
    cut = 0  # the number of ratios at each end that lie outside of the interval
    while cut < count and compute_e_value(count - cut, cut) >= 2.0 / INTERVAL_ALPHA:
        cut += 1
    low, high = (ratios[cut - 1], ratios[count - cut]) if 0 < cut <= (count + 1) // 2 else (0.0, math.inf)
    bounded = high if math.isfinite(high) else None
    middle = statistics.median(ratios)
    return MedianRatio(middle if math.isfinite(middle) else None, low or None, bounded, count)


@dataclass(frozen=True)
class PairPower:
    """What a race of two, of ``pairs`` pairs, could find, if the logs of its ratios have this ``spread``.

    ``error`` is that of its rules.
    """

    spread: float
    pairs: int
    error: float

    def find_visible(self) -> float | None:
        """Find by which part a faster entry must be faster to win in 8 of 10 races. None: above 95 %."""
        return find_smallest_effect(lambda part: self._compute_wins(part, self.pairs)[-1], 0.95)

    def count_needed(self, part: float) -> int | None:
        """Count the pairs that an entry, faster by this part, needs to win in 8 of 10 races. None: above 400."""
        wins = self._compute_wins(part, MOST_NEEDED_PAIRS)
        return next((number for number, share in enumerate(wins, 1) if share >= POWER), None)

    def _compute_wins(self, part: float, pairs: int) -> list[float]:
        """Compute how often an entry, faster by this part, has won after each number of pairs: over all races."""
        better = statistics.NormalDist().cdf(-math.log1p(-part) / self.spread) if self.spread > 0 else float(part > 0)
        threshold = RaceRules(("a", "b"), self.error, pairs, 0).threshold
        chances, won, shares = {0: 1.0}, 0.0, []  # of races that go on, by pairs that it won
        for number in range(1, pairs + 1):
            following: dict[int, float] = {}
            for wins, chance in chances.items():
                following[wins + 1] = following.get(wins + 1, 0.0) + chance * better
                following[wins] = following.get(wins, 0.0) + chance * (1.0 - better)
            ends = {n for n in following if compute_e_value(n, number - n) >= threshold}
            won += math.fsum(following[n] for n in ends)
            chances = {
                n: chance
                for n, chance in following.items()
                if n not in ends and chance > 1e-12 and compute_e_value(number - n, n) < threshold
            }
            shares.append(won)
        return shares


def estimate_spread(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Estimate the standard deviation of logs of ratios, without the weight of outliers. None: fewer than four.

    It is somewhat larger than that of these ratios: few leave larger ones open, which cost more than smaller ones save.
    """
    logs = [math.log(mine / its) for mine, its in pairs if 0 < mine < math.inf and 0 < its < math.inf]
    if len(logs) < FEWEST_SPREAD:
        return None
    middle = statistics.median(logs)
    most = CLIP * statistics.median(abs(each - middle) for each in logs)
    spread = statistics.stdev(min(max(each, middle - most), middle + most) for each in logs)
    return spread * math.sqrt(len(logs) / (len(logs) - 2))


Times = Mapping[str, float]  # of a block, by entry; infinite: did not finish within its budget


@dataclass(frozen=True)
class RaceRules:
    """The rules of a race. ``error``: chance of a wrong answer. ``blocks``: at most. ``seed``: of orders and runs."""

    entries: tuple[str, ...]
    error: float
    blocks: int
    seed: int

    @property
    def threshold(self) -> float:
        """The wealth that drops an entry.

        If all k entries are equal, k - 1 of them are dropped with a chance of at most ``error``.
        """
        count = len(self.entries)
        return count / (self.error * (count - 1))


@dataclass(frozen=True)
class DroppedEntry:
    """An entry that left the race after a block. ``p``: the chance that the best entry ever looks as bad."""

    block: int
    p: float


@dataclass
class Race:
    """The state of a race. `add` takes its blocks one after the other."""

    rules: RaceRules
    survivors: list[str] = field(init=False)
    dropped: dict[str, DroppedEntry] = field(default_factory=dict)
    blocks: list[Times] = field(default_factory=list)
    points: dict[str, float] = field(init=False)  # mean over rivals of blocks won less blocks lost
    bets: dict[str, BettingTest] = field(init=False)

    def __post_init__(self) -> None:
        if len(set(self.rules.entries)) < 2 or len(set(self.rules.entries)) < len(self.rules.entries):
            raise InputError(
                "a contest needs at least two entries, each with its own name; "
                f"it has {', '.join(self.rules.entries) or 'none'}"
            )
        self.survivors = sorted(self.rules.entries)
        self.points = dict.fromkeys(self.survivors, 0.0)
        self.bets = {name: BettingTest() for name in self.survivors}

    @property
    def winner(self) -> str | None:
        """The only entry left; None if there are several."""
        return self.survivors[0] if len(self.survivors) == 1 else None

    @property
    def over(self) -> bool:
        """True if there is a winner or no block left."""
        return self.winner is not None or len(self.blocks) >= self.rules.blocks

    def next_turns(self) -> list[Turn]:
        """List the turns of the next block in their drawn order; none if the race is over."""
        block = len(self.blocks) + 1
        return (
            []
            if self.over
            else [Turn(block, name) for name in make_random_order(block, self.survivors, self.rules.seed)]
        )

    def add(self, times: Times) -> None:
        """Add a block's times (seconds) of all entries still in the race. Drop entries with wealth above the threshold.

        One entry always stays.
        """
        assert sorted(times) == self.survivors, (sorted(times), self.survivors)
        rivals = {name: [each for each in self.survivors if each != name] for name in self.survivors}
        for name, others in rivals.items():
            # The leader is that of the earlier blocks: a bet must not know its block. In the first one all are bet on
            bet_on = [max(others, key=lambda each: self.points[each])] if self.blocks else others
            self.bets[name].settle(_compute_mean_losses(times, name, bet_on))
        for name, others in rivals.items():
            self.points[name] -= _compute_mean_losses(times, name, others)
        self.blocks.append(times)
        for name in sorted(self.survivors, key=lambda each: self.bets[each].wealth, reverse=True):
            wealth = self.bets[name].wealth
            if len(self.survivors) > 1 and wealth >= self.rules.threshold:
                self.survivors.remove(name)
                self.dropped[name] = DroppedEntry(len(self.blocks), 1.0 / wealth)


def _compute_mean_losses(times: Times, name: str, rivals: Sequence[str]) -> float:
    """Compute the mean over rivals of 1 for a block lost, -1 for one won."""
    return sum(compute_sign(times[name], times[each]) for each in rivals) / len(rivals)


def run_race(rules: RaceRules, known: Mapping[Turn, float], run: Callable[[Turn], float]) -> Race:
    """Run a race to its end: the turns that are ``known`` already are not run again.

    ``run`` makes one run and returns its time, infinite if it did not finish within its budget. All turns of a block
    are run before an entry is dropped. An exception of ``run`` ends the race, and a later call goes on.
    """
    race = Race(rules)
    while turns := race.next_turns():
        race.add(run_block(turns[0].block, [turn.entry for turn in turns], run, known))
    return race


def build_race(rules: RaceRules, known: Mapping[Turn, float]) -> tuple[Race, list[Turn]]:
    """Return the race up to its last complete block, and all turns that it demands. These include the next block's."""
    race = Race(rules)
    demanded: list[Turn] = []
    while turns := race.next_turns():
        demanded += turns
        if not all(turn in known for turn in turns):
            break
        race.add({turn.entry: known[turn] for turn in turns})
    return race, demanded
