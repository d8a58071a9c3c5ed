"""How alike two runs are: the chance that two honest runs share a stretch of evaluations, or of times between them.

Two seeds give two curves. How close they come by chance was measured on all published pairs of runs that differ
(benchmarks/copies.py, benchmarks/results/2026-11-23-copies.txt): given all values before, the next value is within a share x of
`_OF_ROUGHNESS` of the curve's roughness in at most a share x of all cases, and the same holds for durations and
`_OF_DURATION`. So n consecutive values, each within x, have a chance of at most x to the power of n.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Generic, TypeVar

from suite.log.record import RunRecord

FALSE_ALARMS = 1e-5
"""The chance that an honest run is called a copy. It is below this by the bound above, times all places that are compared."""
_OF_ROUGHNESS = 0.2  # of a curve's median second difference, as a deviation
_SINGLE_ROUNDING = 3e-7  # of a value in float32 after some operations: its epsilon is 1.2e-7
_LUCK = 0.01  # the chance that values lie on one of the grids that are tried, each a part of their smallest gap
_MOST_PARTS = 10_000
_LARGEST_SCALE = 0.02  # of the values: curves with few, wide steps are not judged by those
_OF_DURATION = 6e-4  # of a duration
_STAMP_S, _SAME_STAMP, _SHORTEST_S = (
    0.002,
    0.2,
    1.0,
)  # durations from 1 s are within 2 ms in at most a fifth of all cases
_LONGEST_S = 1e9  # no duration counts for more, whatever a log says
_FEWEST = 3  # values, or durations, that are evidence
_SMALLEST = 1e-300  # no chance is printed as zero
_LIMITS = (0.5, 0.2, 0.05, 0.01, 1e-3, 1e-5, 1e-8)  # closeness of the stretches that are looked at
_WIDTH = 1e-3  # of the classes by which candidates are found, in the logarithm: wider than any change that hides a copy
_CROWD = 32  # runs with one pair of values beyond which it finds no further candidates: keeps the search linear


Class = tuple[str, int, int]


@dataclass(frozen=True)
class Likeness:
    """A stretch that two runs share: ``count`` evaluations, or durations, each within ``within`` (relative).

    ``p`` is the chance that an honest run has such a stretch in common with any of the runs it is compared with.
    """

    what: str
    count: int
    within: float
    p: float

    def text(self) -> str:
        """The likeness as a part of a message."""
        within = f"within {self.within:.1g}" if self.within > 0.0 else "equal"
        return f"{self.count} consecutive {self.what} {within} (p = {self.p:.0e})"


@dataclass(frozen=True)
class Series:
    """The evaluations of a run, or the seconds between them, as positive numbers."""

    what: str
    numbers: tuple[float, ...]

    @cached_property
    def logs(self) -> tuple[float, ...]:
        """The natural logarithms, in which equal differences are equal ratios."""
        return tuple(map(math.log, self.numbers))

    @cached_property
    def roughness(self) -> float:
        """The deviation of the values from a smooth curve: a curve that is a straight line has none and is no evidence."""
        logs = self.logs
        bends = [abs(a - 2.0 * b + c) for a, b, c in zip(logs, logs[1:], logs[2:], strict=False)]
        return statistics.median(bends) / math.sqrt(6.0) if bends else 0.0

    @cached_property
    def grain(self) -> float:
        """The step of the grid that all values lie on, as a share of them: accuracies of few samples are often equal.

        Values in single precision lie on it but for their rounding. Zero if there is no grid, or so fine a one that any values
        could lie on it by chance.
        """
        rounding = _SINGLE_ROUNDING * max(self.numbers)
        ordered = sorted(self.numbers)
        gaps = [b - a for a, b in pairwise(ordered) if b - a > 2.0 * rounding]
        if not gaps:
            return math.inf
        finest, parts, luck = min(gaps), 1, 0.0
        while parts == 1 or (luck < _LUCK and parts < _MOST_PARTS):
            step = finest / parts
            if _on_grid([number - ordered[0] for number in ordered], step, rounding):
                return step / ordered[0]
            luck += min(1.0, 8.0 * rounding / step) ** (len(gaps) - 1)
            parts += 1
        return 0.0

    @cached_property
    def classes(self) -> tuple[tuple[int, Class], ...]:
        """(place, class) of every two consecutive values: a copy has most of its classes in common with its original."""
        if len(self.numbers) < _FEWEST:
            return ()
        if self.what == EVALUATIONS:
            marks = [round(log / _WIDTH) for log in self.logs]
        else:  # by 4 ms, longer durations by 2e-4: honest durations are much closer to each other than honest values
            marks = [round(s / 0.004) if s < 20.0 else round(math.log(s / 20.0) / 2e-4) + 5000 for s in self.numbers]
        return tuple((place, (self.what, *pair)) for place, pair in enumerate(pairwise(marks)))

    def scale(self, other: Series) -> float:
        """The deviation, in the logarithm, by which honest evaluations of two such series differ at least."""
        return min(_OF_ROUGHNESS * min(self.roughness, other.roughness), _LARGEST_SCALE)

    def overlap(self, other: Series, shift: int) -> range:
        """The places of values that have a counterpart in a series ``shift`` places on."""
        return range(max(0, -shift), min(len(self.numbers), len(other.numbers) - shift))

    def closeness(self, other: Series, shift: int, at: range) -> list[float]:
        """The closeness of values to those of a series ``shift`` places on: a bound of the chance of it, above 1 if far."""
        mine, its = slice(at.start, at.stop), slice(at.start + shift, at.stop + shift)
        if self.what == EVALUATIONS:
            scale = self.scale(other)
            grain = max(self.grain, other.grain)
            logs = zip(self.logs[mine], other.logs[its], strict=True)
            return [max(abs(a - b), grain) / scale if scale > 0.0 else math.inf for a, b in logs]
        return [_duration_closeness(a, b) for a, b in zip(self.numbers[mine], other.numbers[its], strict=True)]

    def maybe_alike(self, other: Series, shift: int, place: int) -> bool:
        """False if the two values at ``place`` are all of a stretch that two series share: nearly all candidates are chance."""
        whole = self.overlap(other, shift)
        return any(
            self.closeness(other, shift, range(at, at + 1))[0] <= _LIMITS[0]
            for at in (place - 1, place + 2)
            if at in whole
        )


Curves = tuple[Series, Series]
EVALUATIONS, DURATIONS = "evaluations", "durations between evaluations"


def series_of(run: RunRecord) -> Curves:
    """The evaluations of a run, without those before any training, which all runs share, and the durations between them."""
    evals = [item for item in run.evals if item.epoch != 0.0 and item.value != 0.0]
    values = tuple(abs(item.value) for item in evals)
    times = [item.time_s for item in evals]
    gaps = tuple(min(max(later - earlier, 1e-3), _LONGEST_S) for earlier, later in pairwise(times))
    return _series(EVALUATIONS, values), _series(DURATIONS, gaps)


_series = lru_cache(4096)(Series)  # a run is compared with those of its result, then with those of all others


def likeness(series: Series, other: Series, shift: int, places: int) -> Likeness | None:
    """The stretch of two series that is least likely by chance, if any is; ``places`` is the number of pairs of places compared."""
    whole = series.overlap(other, shift)
    close = series.closeness(other, shift, whole)
    best: Likeness | None = None
    for limit in _LIMITS:
        begin, count = _longest(close, limit)
        if count < _FEWEST:
            break
        worst = max(close[begin : begin + count])
        p = min(1.0, max(worst**count, _SMALLEST) * places * len(_LIMITS))
        if best is None or p < best.p:
            at = begin + whole.start
            within = max(abs(series.logs[n] - other.logs[n + shift]) for n in range(at, at + count))
            best = Likeness(series.what, count, within, p)
    return best


Owner = TypeVar("Owner")


class Runs(Generic[Owner]):
    """The runs seen so far (as `series_of` gives them), each with its owner, and which of them a further run is too much like."""

    def __init__(self) -> None:
        self._seen: list[tuple[Owner, Series]] = []
        self._at: dict[Class, list[tuple[int, int]]] = {}
        self._places = {EVALUATIONS: 0, DURATIONS: 0}

    def find(
        self, run: Curves, telling: Callable[[Owner, str], bool] = lambda owner, what: True
    ) -> tuple[Owner, Likeness] | None:
        """The first run that this one is more like than chance allows, or None.

        ``telling`` is asked whether a likeness to a run, in evaluations or durations, says anything.
        """
        for series, number, shift in self.candidates(run):
            owner, other = self._seen[number]
            places = len(series.numbers) * self._places[series.what]
            found = likeness(series, other, shift, places)
            if found is not None and found.p < FALSE_ALARMS and telling(owner, series.what):
                return owner, found
        return None

    def candidates(self, run: Curves) -> Iterator[tuple[Series, int, int]]:
        """(series, number of a series seen, shift) wherever two consecutive values are nearly those of this run."""
        for series in run:
            tried: set[tuple[int, int]] = set()
            for place, key in series.classes:
                for number, at in self._at.get(key, ()):
                    shift = at - place
                    if (number, shift) not in tried and series.maybe_alike(self._seen[number][1], shift, place):
                        tried.add((number, shift))
                        yield series, number, shift

    def add(self, owner: Owner, run: Curves) -> None:
        """Remember a run."""
        for series in run:
            self._places[series.what] += len(series.numbers)
            for place, key in series.classes:
                known = self._at.setdefault(key, [])
                if len(known) < _CROWD:
                    known.append((len(self._seen), place))
            self._seen.append((owner, series))


def _duration_closeness(a: float, b: float) -> float:
    difference, shortest = abs(a - b), min(a, b)
    if difference > _STAMP_S and difference > _OF_DURATION * shortest:
        return math.inf  # as nearly all are: it is above all limits
    relative = max(abs(math.log(a / b)), 1e-3 / shortest) / _OF_DURATION
    return min(relative, _SAME_STAMP) if difference <= _STAMP_S and shortest >= _SHORTEST_S else relative


def _on_grid(distances: Sequence[float], step: float, rounding: float) -> bool:
    """True if the distances (ascending) are multiples of the step, which each distance that is one makes more precise."""
    known = 1  # steps of the longest distance so far: the step is known to the rounding, divided by this
    for distance in distances:
        steps = round(distance / step)
        if abs(distance - steps * step) > 2.0 * rounding * (1.0 + steps / known):
            return False
        if steps > known:
            step, known = distance / steps, steps
    return True


def _longest(close: Sequence[float], limit: float) -> tuple[int, int]:
    """(first place, count) of the longest stretch that is within a limit."""
    best = begin = 0
    count = 0
    for place, value in enumerate((*close, math.inf)):
        if value <= limit:
            count += 1
            continue
        if count > best:
            begin, best = place - count, count
        count = 0
    return begin, best
