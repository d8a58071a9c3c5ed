"""Finds runs that occur twice: unchanged, with other time stamps, or with other last digits.

Measures how similar two runs are: the chance that honest runs share such a stretch of evaluations or durations.

Two seeds give two curves. How close they come by chance was measured on all published pairs of different runs
(benchmarks/copies.py, benchmarks/results/2026-11-23-copies.txt). A curve has a scale: `_ROUGHNESS_SHARE` of its
roughness. Given all values before, the next value is within x times the scale in at most a share x of all cases. The
same holds for durations and `_DURATION_SHARE`. So n consecutive values within x have a chance of at most x to the power
of n.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Generic, TypeVar

from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.rules.base import (
    TRAINING,
    ResultBreaches,
    Rule,
    check_distinct,
    cite,
    render_log_name,
    result_rule,
)
from mlhpc.suite.compliance.rules.package_rules import is_same_submitter
from mlhpc.suite.compliance.ruleset import compute_logs_digest
from mlhpc.suite.files import render_repr
from mlhpc.suite.log import mllog
from mlhpc.suite.log.record import RunRecord, has_many_digits
from mlhpc.suite.log.results_tree import PRUNED, Group, read_system

# Limit of the chance that an honest run is called a copy: the bound above, times the number of all places compared.
FALSE_ALARMS = 1e-5
_ROUGHNESS_SHARE = 0.2  # of a curve's median second difference, as a deviation
_SINGLE_ROUNDING = 3e-7  # of a value in float32 after some operations: its epsilon is 1.2e-7
# Accuracies of few samples lie on a grid, where equal values are no evidence of a copy.
_GRID_CHANCE = 0.01  # the chance that values lie on one of the grids that are tried, each a part of their smallest gap
_MAX_GRID_PARTS = 10_000
_LARGEST_SCALE = 0.02  # of the values: curves with few, wide steps are not judged by those
_DURATION_SHARE = 6e-4  # of a duration
# Durations from 1 s are within 2 ms of each other in at most a fifth of all cases.
_STAMP_S, _SAME_STAMP, _SHORTEST_S = 0.002, 0.2, 1.0
_LONGEST_S = 1e9  # no duration counts for more, whatever a log says
_FEWEST = 3  # values, or durations, that are evidence
_SMALLEST = 1e-300  # no chance is printed as zero
_LIMITS = (0.5, 0.2, 0.05, 0.01, 1e-3, 1e-5, 1e-8)  # of the closeness of a stretch, tried in turn
_WIDTH = 1e-3  # of the hash classes of values, in the logarithm: wider than any change that hides a copy
_LOSS_WIDTH = 2e-2  # of those of losses, which are further apart
# A forged log may have a million evaluations; published runs have at most some hundred.
_MOST_VALUES = 1000  # of a run that are compared: the first ones
_MAX_RUNS_PER_CLASS = 32  # runs remembered for one pair of values: more would make the search quadratic
_MOST_CANDIDATES = 100  # compared value by value: those that share most pairs of values with the run

EVALUATIONS, DURATIONS, LOSSES = "evaluations", "durations between evaluations", "losses of first steps"
SHAPE = "shape of the curve"  # of four evaluations
_FINE_GRAIN = 1e-6  # of a grid that is none
_FEWEST_LOSSES = 8  # the first of them follow from the start of every run
HashClass = tuple[str, int, int]


@dataclass(frozen=True)
class Similarity:
    """A stretch that two runs share: ``count`` evaluations, or durations, each within ``within`` (relative).

    ``p`` is the chance that an honest run shares such a stretch with any of the compared runs.
    """

    what: str
    count: int
    within: float
    p: float

    def text(self) -> str:
        """Render the similarity as a part of a message."""
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
        """The deviation of the values from a smooth curve. A straight line has none, so it is no evidence."""
        return _compute_roughness(self.logs)

    @cached_property
    def grain(self) -> float:
        """The relative step of the grid on which all values lie. Accuracies of few samples are often equal by chance.

        Values in single precision lie on it except for rounding. Zero without a grid, or if it is so fine that
        any values could lie on it by chance.
        """
        rounding = _SINGLE_ROUNDING * max(self.numbers, default=0.0)
        ordered = sorted(self.numbers)
        gaps = [b - a for a, b in pairwise(ordered) if b - a > 2.0 * rounding]
        if not gaps:
            return math.inf
        # Try the smallest gap, its half, its third ... as the step, until a step would fit any values.
        finest, parts, luck = min(gaps), 1, 0.0
        distances = [number - ordered[0] for number in ordered]
        while parts == 1 or (luck < _GRID_CHANCE and parts < _MAX_GRID_PARTS):
            step = finest / parts
            if _is_on_grid(distances, step, rounding):
                return step / ordered[0]
            luck += min(1.0, 8.0 * rounding / step) ** (len(gaps) - 1)
            parts += 1
        return 0.0

    @cached_property
    def step(self) -> float:
        """The step of the time stamps from which durations follow: some codes log whole seconds."""
        return 1.0 if all(abs(number - round(number)) < _STAMP_S for number in self.numbers) else 1e-3

    @cached_property
    def classes(self) -> tuple[tuple[int, HashClass], ...]:
        """(place, class) of every two consecutive values. A copy shares most of its classes with its original."""
        if len(self.numbers) < _FEWEST:
            return ()
        if self.what != DURATIONS:
            marks = [round(log / (_WIDTH if self.what == EVALUATIONS else _LOSS_WIDTH)) for log in self.logs]
        else:  # by 4 ms, longer durations by 2e-4: honest durations are much closer to each other than honest values
            marks = [round(s / 0.004) if s < 20.0 else round(math.log(s / 20.0) / 2e-4) + 5000 for s in self.numbers]
        return tuple((place, (self.what, *pair)) for place, pair in enumerate(pairwise(marks)))

    def scale(self, other: Series) -> float:
        """Return the least deviation of honest evaluations of two such series, in the logarithm."""
        return min(_ROUGHNESS_SHARE * min(self.roughness, other.roughness), _LARGEST_SCALE)

    def overlap(self, other: Series, shift: int) -> range:
        """Return the places of values that have a counterpart in another series, shifted by ``shift`` places."""
        return range(max(0, -shift), min(len(self.numbers), len(other.numbers) - shift))

    def closeness(self, other: Series, shift: int, at: range) -> list[float]:
        """Bound the chance that each value is so close to its counterpart. Above 1 for values that are far apart."""
        here, there = slice(at.start, at.stop), slice(at.start + shift, at.stop + shift)
        if self.what != DURATIONS:
            scale = self.scale(other)
            grain = max(self.grain, other.grain)
            logs = zip(self.logs[here], other.logs[there], strict=True)
            return [max(abs(a - b), grain) / scale if scale > 0.0 else math.inf for a, b in logs]
        pairs, step = zip(self.numbers[here], other.numbers[there], strict=True), max(self.step, other.step)
        return [_compute_duration_distance(a, b, step) for a, b in pairs]

    def may_share_stretch(self, other: Series, shift: int, place: int) -> bool:
        """Return True if a value before or after the two values at ``place`` is close too.

        Most candidates fail this.
        """
        whole = self.overlap(other, shift)
        neighbours = [at for at in (place - 1, place + 2) if at in whole]
        return any(self.closeness(other, shift, range(at, at + 1))[0] <= _LIMITS[0] for at in neighbours)


def _compute_roughness(values: Sequence[float]) -> float:
    bends = [abs(a - 2.0 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return statistics.median(bends) / math.sqrt(6.0) if bends else 0.0


RunSeries = tuple[Series, ...]


# A run is compared with those of its result, then with those of all others.
@lru_cache(4096)
def build_series(run: RunRecord) -> RunSeries:
    """Return the evaluations of a run, the durations between them, and the losses of its first steps."""
    # All runs share the evaluations before any training.
    evals = [item for item in run.evals if item.epoch != 0.0 and item.value != 0.0][:_MOST_VALUES]
    values = tuple(abs(item.value) for item in evals)
    times = [item.time_s for item in evals]
    gaps = tuple(min(max(later - earlier, 1e-3), _LONGEST_S) for earlier, later in pairwise(times))
    losses = tuple(abs(loss) for loss in run.first_losses if loss)
    named = ((EVALUATIONS, values), (DURATIONS, gaps), (LOSSES, losses))
    return tuple(Series(what, numbers) for what, numbers in named)


def find_similarity(series: Series, other: Series, shift: int, places: int) -> Similarity | None:
    """Find the stretch of two series that is least likely by chance. ``places`` counts the pairs of places compared."""
    whole = series.overlap(other, shift)
    close = series.closeness(other, shift, whole)
    best: Similarity | None = None
    for limit in _LIMITS:
        begin, count = _find_longest_stretch(close, limit)
        if count < (_FEWEST_LOSSES if series.what == LOSSES else _FEWEST):
            break
        worst = max(close[begin : begin + count])
        # Bonferroni: a stretch could be anywhere, and under any of the limits.
        p = min(1.0, max(worst**count, _SMALLEST) * places * len(_LIMITS))
        if best is None or p < best.p:
            at = begin + whole.start
            within = max(abs(series.logs[n] - other.logs[n + shift]) for n in range(at, at + count))
            best = Similarity(series.what, count, within, p)
    return best


Owner = TypeVar("Owner")


class RunIndex(Generic[Owner]):
    """An index of runs with their owners. It finds the run that another one copies."""

    def __init__(self) -> None:
        self._seen: list[tuple[Owner, Series]] = []
        self._at: dict[HashClass, list[tuple[int, int]]] = {}
        self._places = {EVALUATIONS: 0, DURATIONS: 0, LOSSES: 0}

    def find_duplicate(
        self, run: RunSeries, is_evidence: Callable[[Owner, str], bool] = lambda owner, what: True
    ) -> tuple[Owner, Similarity] | None:
        """Find the first run to which this one is more similar than chance allows. None if there is none.

        ``is_evidence`` decides whether a similarity to a run, in evaluations or durations, counts.
        """
        for series, number, shift in self.candidates(run):
            owner, other = self._seen[number]
            places = len(series.numbers) * self._places[series.what]
            found = find_similarity(series, other, shift, places)
            if found is not None and found.p < FALSE_ALARMS and is_evidence(owner, series.what):
                return owner, found
        return None

    def candidates(self, run: RunSeries) -> Iterator[tuple[Series, int, int]]:
        """Yield (series, number of an earlier series, shift) for each pair of values that nearly equals one here."""
        for series in run:
            shared: Counter[tuple[int, int]] = Counter()  # in the order in which they are found
            for place, key in series.classes:
                for number, at in self._at.get(key, ()):
                    found = number, at - place
                    if found in shared or series.may_share_stretch(self._seen[number][1], at - place, place):
                        shared[found] += 1
            many = len(shared) > _MOST_CANDIDATES
            best = [found for found, _ in shared.most_common(_MOST_CANDIDATES)] if many else list(shared)
            yield from ((series, number, shift) for number, shift in best)

    def add(self, owner: Owner, run: RunSeries) -> None:
        """Remember a run."""
        for series in run:
            self._places[series.what] += len(series.numbers)
            for place, key in series.classes:
                known = self._at.setdefault(key, [])
                if len(known) < _MAX_RUNS_PER_CLASS:
                    known.append((len(self._seen), place))
            self._seen.append((owner, series))


def _compute_duration_distance(a: float, b: float, step: float) -> float:
    difference, shortest = max(abs(a - b), step), min(a, b)
    if difference > _STAMP_S and difference > _DURATION_SHARE * shortest:
        return math.inf  # most durations: above all limits
    relative = max(abs(math.log(a / b)), step / shortest) / _DURATION_SHARE
    return min(relative, _SAME_STAMP) if difference <= _STAMP_S and shortest >= _SHORTEST_S else relative


def _is_on_grid(distances: Sequence[float], step: float, rounding: float) -> bool:
    """Return True if the ascending distances are multiples of the step. Each multiple makes the step more precise."""
    known = 1  # steps of the longest distance so far: the step is known to the rounding, divided by this
    for distance in distances:
        steps = round(distance / step)
        if abs(distance - steps * step) > 2.0 * rounding * (1.0 + steps / known):
            return False
        if steps > known:
            step, known = distance / steps, steps
    return True


def _find_longest_stretch(close: Sequence[float], limit: float) -> tuple[int, int]:
    """Return (first place, count) of the longest stretch that is within a limit."""
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


# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it


Fingerprint = tuple[str, *tuple[float, ...]]
# Of what a cubic of another run leaves of a run, over its roughness. The least of 8,033 published pairs is 0.055.
_LEAST_MISFIT, _FEWEST_FITTED, _TERMS = 0.02, 7, 4
_FITTED = ("train_loss", mllog.FIRST_LOSSES)  # beside evaluations; what clocks measure is alike in honest runs
_TIMES = (mllog.TRACKED_STATS, mllog.STEP_PHASES)  # what follows from clocks
_NEAR, _NEAR_IN_A_ROW = 1e-4, 8  # numbers so near, relative, are one class; no two published logs have so many alike


@result_rule(
    "run-copied",
    "no run is a copy of another, not even with new time stamps or with other evaluations, kept or pruned",
)
def check_run_copied(result: Result) -> ResultBreaches:
    runs = (*result.runs, *result.pruned)
    copies = dict(check_distinct(runs, _make_time_free_key, lambda run: "has the same durations and evaluations as"))
    yield from copies.items()
    seen: dict[Fingerprint, RunRecord] = {}
    for run in runs:
        prints = [each for each in _list_fingerprints(run) if each[0] not in (EVALUATIONS, SHAPE)]
        found = _find_shared_numbers(run, prints, seen.get, _have_one_seed) if run.path not in copies else None
        if found is not None:
            other, text = found
            yield run.path, f"{text} {render_log_name(other)}"
        for fingerprint in prints:
            seen.setdefault(fingerprint, run)


def _find_smooth_copies(
    run: RunRecord,
    mine: Mapping[str, tuple[float, ...]],
    earlier: Sequence[tuple[RunRecord, Mapping[str, tuple[float, ...]]]],
) -> ResultBreaches:
    """Yield an earlier run of which a smooth function gives a series of this one."""
    for other, theirs in earlier:
        for what in () if _have_one_seed(run, other) else [each for each in mine if each in theirs]:
            if _compute_misfit(theirs[what], mine[what]) < _LEAST_MISFIT:
                yield run.path, f"its {what} are a smooth function of those of {render_log_name(other)}"


def _list_fitted(run: RunRecord) -> dict[str, tuple[float, ...]]:
    """List the logarithms of the series of a run that no smooth function of another run's gives."""
    evaluations = build_series(run)[0]
    found = {EVALUATIONS: evaluations.numbers if evaluations.grain < _FINE_GRAIN else ()} | {
        key: run.measured.get(key, ()) for key in _FITTED
    }
    return {
        what: tuple(math.log(abs(each)) for each in values[:_MOST_VALUES] if each) for what, values in found.items()
    }


def _compute_misfit(theirs: tuple[float, ...], mine: tuple[float, ...]) -> float:
    """Return the deviation of a series from the cubic of another that fits best, over its roughness."""
    count = min(len(theirs), len(mine))
    if count < _FEWEST_FITTED or not (roughness := _compute_roughness(mine[:count])):
        return math.inf
    rest: Sequence[float] = mine[:count]
    for column in _list_powers(theirs[:count]):
        rest = _remove(rest, column)
    return math.sqrt(math.fsum(map(operator.mul, rest, rest)) / (count - _TERMS)) / roughness


@lru_cache(1024)  # many runs are compared with the same earlier ones
def _list_powers(series: tuple[float, ...]) -> tuple[Sequence[float], ...]:
    """Return an orthonormal basis of the cubics of a series, but for powers that add nothing."""
    basis: list[Sequence[float]] = []
    middle = math.fsum(series) / len(series)
    for power in range(_TERMS):
        column: Sequence[float] = [(each - middle) ** power for each in series]
        for known in basis:
            column = _remove(column, known)
        if norm := math.sqrt(math.fsum(map(operator.mul, column, column))):
            basis.append([each / norm for each in column])
    return tuple(basis)


def _remove(series: Sequence[float], unit: Sequence[float]) -> list[float]:
    """Return what is left of a series beside its part along a unit vector."""
    share = math.fsum(map(operator.mul, series, unit))
    return [one - share * each for one, each in zip(series, unit, strict=True)]


@result_rule(
    "run-repeated",
    "no two runs are more alike than one pair of honest runs in 100,000: a run that is another with other seed, "
    "last digits or time stamps, its beginning, its end or a smooth function of it",
)
def check_run_repeated(result: Result) -> ResultBreaches:
    seen: RunIndex[RunRecord] = RunIndex()
    exact: set[object] = set()
    pairs: dict[Fingerprint, RunRecord] = {}
    earlier: list[tuple[RunRecord, Mapping[str, tuple[float, ...]]]] = []
    for run in (*result.runs, *result.pruned):
        course = _make_time_free_key(run)
        if course is not None and course in exact:
            continue  # rule run-copied reports it
        exact.add(course)
        curves = build_series(run)
        found = seen.find_duplicate(curves, partial(_is_evidence_of_copy, run, _have_one_seed))
        prints = [each for each in _list_fingerprints(run) if each[0] in (EVALUATIONS, SHAPE)]
        shared = _find_shared_numbers(run, prints, pairs.get, _have_one_seed)
        pairs |= dict.fromkeys(prints, run)
        fitted = _list_fitted(run)
        if shared is not None and found is None:
            yield run.path, f"{shared[1]} {render_log_name(shared[0])}"
        elif found is None:
            yield from islice(_find_smooth_copies(run, fitted, earlier[-_MAX_RUNS_PER_CLASS:]), 1)
        earlier.append((run, fitted))
        if found is not None:
            other, similarity = found
            seed = "no seed is logged" if run.seed is None else f"its seed is {render_repr(run.seed)}"
            pruned = other.path is not None and other.path.parent.name == PRUNED
            place = f"{PRUNED}/{render_log_name(other)}" if pruned else render_log_name(other)
            yield run.path, f"{seed}, but of {place} it has {similarity.text()}"
        seen.add(run, curves)


REUSE_RULES: tuple[Rule, ...] = (  # `SeenRuns` applies them
    Rule("run-reused", "no run, nor a copy of it with other time stamps or last digits, counts in two results"),
    Rule(
        "carried-over",
        "a result is not also in another round; it may be, by the same submitter and with the same system description, "
        "and from v5.1 of Training on only if it was announced",
        cite(TRAINING, "10"),
    ),
)


class SeenRuns:
    """Remembers the runs of every result judged so far, to find runs that occur again. One instance per check."""

    def __init__(self) -> None:
        # The first result of each package that has the run: a package that carries results over may also use one run
        # twice.
        self._exact: dict[object, dict[Path | None, tuple[Group, RunRecord]]] = defaultdict(dict)
        self._similar: dict[object, RunIndex[RunRecord]] = defaultdict(RunIndex)  # by benchmark and size
        self._measured: dict[Fingerprint, RunRecord] = {}
        self.readings: dict[Path, dict[int, Path]] = defaultdict(dict)  # by package

    def compare(self, group: Group, runs: Sequence[RunRecord]) -> Iterator[tuple[str, Path, str]]:
        """Yield (rule, path, message) for runs that an earlier result has too, then remember the new ones."""
        carried: list[Group] = []
        excuse = _excuses(group)
        problems: dict[Path, str | None] = {}  # by the folder of the other result
        courses = [_make_time_free_key(run) for run in runs]
        # New runs are remembered at the end: rules run-copied and run-repeated report copies within one result.
        new: list[tuple[RunRecord, RunSeries]] = []
        for run, course in zip(runs, courses, strict=True):
            where = run.path or group.folder
            by_package = self._exact.get(course, {})
            earlier = by_package.get(group.package) or next(iter(by_package.values()), None)
            if earlier is None:
                curves = build_series(run)
                new.append((run, curves))
                found = self._similar[run.benchmark, run.size].find_duplicate(
                    curves, partial(_is_evidence_of_copy, run, excuse)
                )
                shared = _find_shared_numbers(run, _list_fingerprints(run), self._measured.get, excuse)
                if shared is not None:
                    yield "run-reused", where, f"{shared[1]} {shared[0].path}"
                elif found is not None:
                    other, similarity = found
                    yield "run-reused", where, f"has {similarity.text()} of {other.path}"
                continue
            other_group, other = earlier
            same_time = other.run_start_s == run.run_start_s
            problem: str | None = ""
            if same_time and other_group.package != group.package:
                if other_group.folder not in problems:
                    problems[other_group.folder] = _find_resubmission_problem(group, other_group)
                problem = problems[other_group.folder]
            if problem is None:
                carried.append(other_group)
            else:
                # Only an unchanged copy keeps its time stamps.
                again = "is also" if same_time else "has the durations and evaluations of"
                # A published exception is of equal bytes: a run that says something else is a copy.
                inside = same_time and other_group.package == group.package is not None
                changed = inside and compute_logs_digest([run]) != compute_logs_digest([other])
                yield "run-copied" if changed else "run-reused", where, f"{again} {other.path}{problem}"
        if carried:
            yield "carried-over", group.folder, f"{len(carried)} of {len(runs)} runs are those of {carried[0].folder}"
        for run, course in zip(runs, courses, strict=True):
            if course is not None:
                self._exact[course].setdefault(group.package, (group, run))
        for run, curves in new:
            self._similar[run.benchmark, run.size].add(run, curves)
            for fingerprint in _list_fingerprints(run):
                self._measured.setdefault(fingerprint, run)


def _find_resubmission_problem(group: Group, other: Group) -> str | None:
    """Return why a result may not be carried over, as the end of a message. None if it may.

    It may by the same submitter, of the same system, in another round. A run folder is submitted nowhere: its package
    holds the same runs.
    """
    if group.package is None or other.package is None:
        return None
    if not is_same_submitter(group.submitter or "", other.submitter or ""):
        return " (of another submitter)"
    if group.round is not None and group.round == other.round:
        return " (of the same round)"
    if group.system != other.system:
        return " (of another system)"
    if _read_description(group.package, group) != _read_description(other.package, other):
        return " (with another system description)"
    return None


def _read_description(package: Path, group: Group) -> Mapping[str, object]:
    """Return the fields of a result's system description but for the submitter, who may be joined by another."""
    fields = read_system(package / "systems" / f"{group.system}.json").fields
    return {name: value for name, value in fields.items() if name != "submitter"}


Excuse = Callable[[RunRecord, RunRecord], bool]


def _have_one_seed(run: RunRecord, other: RunRecord) -> bool:
    return run.seed is not None and run.seed == other.seed


def _excuses(group: Group) -> Excuse:
    """Return the question whether runs of two results may have equal values: of one seed, in one package of ours."""

    def may_be_equal(run: RunRecord, other: RunRecord) -> bool:
        ours, at = run.size is not None and other.size is not None, group.package
        together = at is None or (other.path is not None and other.path.is_relative_to(at))
        return ours and together and _have_one_seed(run, other)

    return may_be_equal


def _is_evidence_of_copy(run: RunRecord, excuse: Excuse, other: RunRecord, what: str) -> bool:
    """Return True if a similarity shows a copy. Runs with one seed may have equal values, but never equal durations."""
    return what == DURATIONS or not excuse(run, other)


@lru_cache(4096)  # four rules read them
def _list_fingerprints(run: RunRecord) -> Sequence[Fingerprint]:
    """List each three measured numbers in a row, the classes of each eight, and two evaluations and two bends of their
    curve with their place.

    Of 7,176 published logs no two runs with another start have the same, but for two results (docs/checker.md).
    """
    found: list[Fingerprint] = []
    for key, numbers in run.measured.items():
        distinct = list(dict.fromkeys(numbers))
        found += ((key, *three) for three in zip(distinct, distinct[1:], distinct[2:], strict=False))
        classes = [float(round(math.log(abs(number)) / _NEAR)) for number in distinct]
        rows = zip(*(classes[begin:] for begin in range(_NEAR_IN_A_ROW)), strict=False)
        found += ((key, *row) for row in rows)
        ratios = [float(f"{b / a:.7g}") if a else 0.0 for a, b in pairwise(numbers)]
        scaled = enumerate(pairwise(ratios)) if key == mllog.TRACKED_STATS else ()
        found += ((SHAPE, -1.0 - place, *two) for place, two in scaled if not {0.0, 1.0} & {*two})
    values = [item.value for item in run.evals[:_MOST_VALUES]]
    # Errors of few samples lie on a grid, whatever number of digits they have.
    grain = build_series(run)[0].grain
    if grain < _FINE_GRAIN:
        for place, (one, other) in enumerate(pairwise(values)):
            if has_many_digits(one) and has_many_digits(other) and one != other:
                found.append((EVALUATIONS, float(place), one, other))
    # What stays of a curve that was shifted and scaled, or raised to a power.
    for curve in (values, [math.log(value) if value > 0.0 else 0.0 for value in values]):
        steps = [
            b - a if abs(y - x) > 10.0 * grain * abs(x) else 0.0
            for (a, b), (x, y) in zip(pairwise(curve), pairwise(values), strict=True)
        ]
        bends = [float(f"{b / a:.5g}") if a else 0.0 for a, b in pairwise(steps)]
        # Of curves that fall by equal shares all bends are equal.
        bent = ((place, two) for place, two in enumerate(pairwise(bends)) if abs(two[1] - two[0]) > 0.01 * abs(two[0]))
        found += ((SHAPE, float(place), *two) for place, two in bent if 0.0 not in two)
    return found


def _find_shared_numbers(
    run: RunRecord,
    prints: Sequence[Fingerprint],
    find: Callable[[Fingerprint], RunRecord | None],
    excuse: Excuse,
) -> tuple[RunRecord, str] | None:
    """Return an earlier run that has measured numbers of this one, and the beginning of a message.

    Runs of one seed have the same losses on every machine, but never the same times.
    """
    for fingerprint in prints:
        key, *numbers = fingerprint
        other = find(fingerprint)
        if other is not None and (key in _TIMES or not excuse(run, other)):
            if key == EVALUATIONS:
                return (
                    other,
                    f"evaluations {numbers[0] + 1:g} and {numbers[0] + 2:g} are {numbers[1]!r}, {numbers[2]!r}, as of",
                )
            if key == SHAPE:
                what = "evaluations" if numbers[0] >= 0.0 else mllog.TRACKED_STATS
                return (
                    other,
                    f"{what} from {abs(numbers[0] + 0.5) + 0.5:g} on are, shifted and scaled or to a power, those of",
                )
            if len(numbers) == _NEAR_IN_A_ROW:
                begin = math.exp(numbers[0] * _NEAR)
                return other, f"{len(numbers)} numbers of {key} from {begin:.5g} on are within {_NEAR:g} of those in"
            return other, f"measured {key} {', '.join(map(repr, numbers))}, as"
    return None


def _make_time_free_key(run: RunRecord) -> object:
    """Return what a copy with new time stamps keeps: the evaluations' values and their times since run_start."""
    if not run.evals or run.time_to_train_s is None:
        return None
    return tuple((item.value, round(item.time_s, 3)) for item in run.evals), round(run.time_to_train_s, 3)
