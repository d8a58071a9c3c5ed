"""The ranking of a tournament: verdict, strengths, ratios to the leader and the Pareto front, as data and as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.page.cells import count_text
from analysis.page.digits import with_interval
from analysis.results.prices import Prices
from analysis.tournament.bradley_terry import Strength, fit
from analysis.tournament.folder import CPU, Tournament, read_tournament
from analysis.tournament.inspection import Finding, inspect
from analysis.tournament.intervals import Ratio, compute_ratio, find_front
from analysis.tournament.journal import read_journal
from analysis.tournament.outcome import Outcome, read_outcome
from analysis.tournament.race import Dropped, Race, Times, Turn, replay
from suite.documents import plain
from suite.errors import InputError

VERSION = 1
KIND = "tournament"
WINNER, LEFT, OUT = "winner", "in the race", "dropped"
HOUR_S = 3600.0


@dataclass(frozen=True)
class Place:
    """An entry as it is ranked. ``mean_s`` is the geometric mean of its finished runs in complete blocks, ``factor`` their spread.

    ``factor``: the standard deviation of log time as a factor, NaN below two. ``ratio`` is to the leader, whose own is None.
    """

    name: str
    state: str
    dropped: Dropped | None
    runs: int
    finished: int
    mean_s: float
    factor: float
    strength: Strength
    ratio: Ratio | None
    front: str


@dataclass(frozen=True)
class Ranking:
    """A tournament as it stands. While there are findings, nothing that is ranked may be trusted."""

    tournament: Tournament
    race: Race
    places: tuple[Place, ...]
    findings: tuple[Finding, ...]
    outcomes: Mapping[Turn, Outcome]
    objectives: Mapping[str, Sequence[Times]]

    @property
    def verdict(self) -> str:
        """One sentence: who won, that nobody can tell, that it goes on, or that it cannot be trusted."""
        if self.findings:
            many = f"{len(self.findings)} finding{'s' * (len(self.findings) > 1)}"
            return f"no verdict: {many}; the runs are not those of a fair tournament"
        error = f"{100 * self.race.plan.error:g} %"
        if self.race.winner is not None:
            return f"{self.race.winner} wins; the chance that the best entry was dropped is at most {error}"
        left = ", ".join(self.race.survivors)
        if self.race.over:
            return f"no winner: {count_text(len(self.race.blocks), 'block')} cannot tell {left} apart at an error of {error}"
        return f"not over: {len(self.race.blocks)} of at most {self.race.plan.blocks} blocks; in the race: {left}"


def read_ranking(root: Path, prices: Prices | None = None) -> Ranking:
    """Read and judge a tournament. InputError for a folder that is none, and for a price of another system."""
    tournament = read_tournament(root)
    journal = read_journal(tournament.journal)
    outcomes = {turn: read_outcome(tournament, turn) for turn in journal.finished()}
    race, _ = replay(tournament.plan, {turn: outcome.value for turn, outcome in outcomes.items()})
    objectives = _objectives(tournament, race, outcomes, prices)
    places = _places(tournament, race, objectives)
    return Ranking(tournament, race, places, tuple(inspect(tournament, journal, outcomes)), outcomes, objectives)


def _objectives(
    tournament: Tournament, race: Race, outcomes: Mapping[Turn, Outcome], prices: Prices | None
) -> dict[str, Sequence[Times]]:
    """What entries are compared by, per complete block: the objective, energy where every finished run has it, and cost."""
    found: dict[str, Sequence[Times]] = {objective_name(tournament): race.blocks}
    finished = [outcome for outcome in outcomes.values() if outcome.finished]
    counters = set.intersection(*(set(outcome.joules) for outcome in finished)) if finished else set()
    for counter in sorted(counters):
        found[f"{counter}, J"] = _each(race, outcomes, lambda outcome, counter=counter: outcome.joules[counter])
    if prices is not None:
        for line in prices.without_result([tournament.settings.system]):
            raise InputError(line)
        price = next(iter(prices.per_unit_hour.values()))

        def cost(outcome: Outcome) -> float:
            record = outcome.record
            assert record is not None
            return price * (record.time_to_train_s or 0.0) / HOUR_S * (record.compute_units or 1)

        found[f"cost, {prices.unit}"] = _each(race, outcomes, cost)
    return found


def _each(race: Race, outcomes: Mapping[Turn, Outcome], value: Any) -> list[Times]:
    turns = [{name: outcomes[Turn(number, name)] for name in times} for number, times in enumerate(race.blocks, 1)]
    return [{name: value(each) if each.finished else math.inf for name, each in block.items()} for block in turns]


def _places(tournament: Tournament, race: Race, objectives: Mapping[str, Sequence[Times]]) -> tuple[Place, ...]:
    names = [entry.name for entry in tournament.entries]
    strengths, front = fit(names, race.blocks), find_front(names, objectives)

    def last(name: str) -> int:
        return race.dropped[name].block if name in race.dropped else len(race.blocks) + 1

    ranked = sorted(names, key=lambda name: (-last(name), -strengths[name].value, name))
    return tuple(_place(name, ranked[0], race, strengths[name], front[name]) for name in ranked)


def _place(name: str, leader: str, race: Race, strength: Strength, front: str) -> Place:
    times = [block[name] for block in race.blocks if name in block]
    logs = [math.log(seconds) for seconds in times if math.isfinite(seconds)]
    dropped = race.dropped.get(name)
    return Place(
        name=name,
        state=OUT if dropped else WINNER if race.winner == name else LEFT,
        dropped=dropped,
        runs=len(times),
        finished=len(logs),
        mean_s=math.exp(statistics.fmean(logs)) if logs else math.nan,
        factor=math.exp(statistics.stdev(logs)) if len(logs) > 1 else math.nan,
        strength=strength,
        ratio=None if name == leader else compute_ratio(name, leader, race.blocks),
        front=front,
    )


def objective_name(tournament: Tournament) -> str:
    """The objective and its unit."""
    return "CPU time of the ranks, s" if tournament.settings.objective == CPU else "time to train, s"


def lines(ranking: Ranking) -> list[str]:
    """The ranking as text."""
    settings, race = ranking.tournament.settings, ranking.race
    count = len(ranking.outcomes)
    text = [
        f"{settings.workload} {settings.size} on {settings.system}: {len(race.plan.entries)} entries, "
        f"{len(race.blocks)} complete blocks, {count} run{'s' * (count != 1)} ended; {objective_name(ranking.tournament)}",
        ranking.verdict,
        *(f"  {finding}" for finding in ranking.findings),
        "",
        f"{'entry':<24} {'state':<34} {'finished':>8} {'mean':>8} {'spread':>7}  "
        f"{'time / leader [95 %]':<24} {'faster than the mean entry [95 %]':<34} front",
    ]
    return (
        text
        + [
            f"{place.name:<24} {_state(place):<34} {place.finished:>3} of {place.runs:<2} {_number(place.mean_s):>7} "
            f"{_number(place.factor):>7}  {_ratio_text(place.ratio):<24} {_strength_text(place.strength):<34} {place.front}"
            for place in ranking.places
        ]
        + [f"front over {'; '.join(ranking.objectives)}"]
    )


def _state(place: Place) -> str:
    if place.dropped is None:
        return place.state
    return f"dropped after {place.dropped.block} (p {place.dropped.p:.2g})"


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "–"


def _ratio_text(ratio: Ratio | None) -> str:
    if ratio is None:
        return "1"
    if not math.isfinite(ratio.value):
        return "–"
    if ratio.low <= 0.0 or not math.isfinite(ratio.high):
        return f"{ratio.value:.3g} [unknown]"
    return with_interval(ratio.value, ratio.low, ratio.high)


def _strength_text(strength: Strength) -> str:
    value, low, high = (100 * Strength.chance(odds) for odds in (strength.value, strength.low, strength.high))
    return f"{value:.0f} % [{math.floor(low)}, {math.ceil(high)}]"


def as_data(ranking: Ranking) -> dict[str, Any]:
    """The ranking as the JSON document that `mlhpc report` reads. Numbers that are not finite are null."""
    settings, race = ranking.tournament.settings, ranking.race
    return {
        "version": VERSION,
        "kind": KIND,
        "name": ranking.tournament.root.resolve().name,
        "settings": {key: value for key, value in plain(settings).items() if key not in ("version", "data")},
        "objective": objective_name(ranking.tournament),
        "verdict": ranking.verdict,
        "winner": None if ranking.findings else race.winner,
        "over": race.over,
        "error": race.plan.error,
        "blocks": len(race.blocks),
        "runs": len(ranking.outcomes),
        "findings": [vars(finding) for finding in ranking.findings],
        "objectives": list(ranking.objectives),
        "entries": [_place_data(place) for place in ranking.places],
    }


def _place_data(place: Place) -> dict[str, Any]:
    strength = {name: getattr(place.strength, name) for name in ("value", "low", "high")}
    return {
        "entry": place.name,
        "state": place.state,
        "dropped_after_block": place.dropped.block if place.dropped else None,
        "dropped_p": place.dropped.p if place.dropped else None,
        "runs": place.runs,
        "finished": place.finished,
        "mean": _finite(place.mean_s),
        "spread_factor": _finite(place.factor),
        "ratio_to_leader": None
        if place.ratio is None
        else {name: _finite(value) for name, value in vars(place.ratio).items()},
        "log_strength": strength,
        "front": place.front,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
