"""The search for runs that occur twice: as they are, with other time stamps, or with other last digits."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from suite.compliance.forensics.likeness import DURATIONS, Curves, Runs, series_of
from suite.compliance.result import Result
from suite.compliance.rules.base import OURS, ResultBreach, ResultRule, Rule, name_of, repeats, result_rule
from suite.files import brief
from suite.log.record import RunRecord
from suite.log.results_tree import PRUNED, Group


@result_rule("run-copied", "no run is a copy of another, not even with new time stamps, kept or pruned", OURS)
def run_copied(result: Result) -> Iterator[ResultBreach]:
    yield from repeats((*result.runs, *result.pruned), _course, lambda run: "has the same durations and evaluations as")


@result_rule(
    "run-repeated",
    "no two runs are more alike than one pair of honest runs in 100,000: a run that is another with other seed, last digits "
    "or time stamps, its beginning or its end",
    OURS,
)
def run_repeated(result: Result) -> Iterator[ResultBreach]:
    seen: Runs[RunRecord] = Runs()
    exact: set[object] = set()
    for run in (*result.runs, *result.pruned):
        course = _course(run)
        if course is not None and course in exact:
            continue  # rule run-copied reports it
        exact.add(course)
        curves = series_of(run)
        found = seen.find(curves, lambda other, what, run=run: _telling(run, other, what))  # type: ignore[misc]
        if found is not None:
            other, likeness = found
            yield run.path, f"{_seed(run)}, but of {_place(other)} it has {likeness.text()}"
        seen.add(run, curves)


REUSE_RULES: tuple[Rule, ...] = (  # of `SeenRuns`
    Rule("run-reused", "no run, nor a copy of it with other time stamps or last digits, counts in two results", OURS),
    Rule("carried-over", "a result is not also in an earlier package", OURS),
)


class SeenRuns:
    """Remembers the runs of every result judged so far, to find runs that occur again. One instance per check."""

    def __init__(self) -> None:
        self._exact: dict[object, tuple[Group, RunRecord]] = {}
        self._alike: dict[object, Runs[RunRecord]] = {}

    def compare(self, group: Group, runs: Sequence[RunRecord]) -> Iterator[tuple[str, Path, str]]:
        """Yield (rule, path, message) for runs that an earlier result has too, then remember the new ones."""
        carried: list[Group] = []
        fresh: list[
            tuple[RunRecord, Curves]
        ] = []  # remembered at the end: copies within one result are for other rules
        for run in runs:
            earlier = self._exact.get(_course(run))
            if earlier is None:
                fresh.append((run, series_of(run)))
                yield from self._copy(group, *fresh[-1])
            elif earlier[0].package != group.package and earlier[1].run_start_s == run.run_start_s:
                carried.append(earlier[0])
            else:
                again = (
                    "is also" if earlier[1].run_start_s == run.run_start_s else "has the durations and evaluations of"
                )
                yield "run-reused", run.path or group.folder, f"{again} {earlier[1].path}"
        if carried:
            yield "carried-over", group.folder, f"{len(carried)} of {len(runs)} runs are those of {carried[0].folder}"
        for run, curves in fresh:
            if (course := _course(run)) is not None:
                self._exact.setdefault(course, (group, run))
            self._alike.setdefault(_task(run), Runs()).add(run, curves)

    def _copy(self, group: Group, run: RunRecord, curves: Curves) -> Iterator[tuple[str, Path, str]]:
        """A run of an earlier result that this one is more like than chance allows."""
        seen = self._alike.get(_task(run))
        found = seen.find(curves, lambda other, what: _telling(run, other, what)) if seen is not None else None
        if found is not None:
            other, likeness = found
            yield "run-reused", run.path or group.folder, f"has {likeness.text()} of {other.path}"


def _task(run: RunRecord) -> tuple[object, ...]:
    return run.benchmark, run.size


def _telling(run: RunRecord, other: RunRecord, what: str) -> bool:
    """True if a likeness of two runs says that one is a copy. Runs with one seed may have equal values, never equal durations."""
    return what == DURATIONS or run.seed is None or run.seed != other.seed


def _seed(run: RunRecord) -> str:
    return "no seed is logged" if run.seed is None else f"its seed is {brief(run.seed)}"


def _place(run: RunRecord) -> str:
    pruned = run.path is not None and run.path.parent.name == PRUNED
    return f"{PRUNED}/{name_of(run)}" if pruned else name_of(run)


def _course(run: RunRecord) -> object:
    """What a copy with new time stamps keeps: values of the evaluations and their times since run_start."""
    if not run.evals or run.time_to_train_s is None:
        return None
    return tuple((item.value, round(item.time_s, 3)) for item in run.evals), round(run.time_to_train_s, 3)


RULES: tuple[ResultRule, ...] = (
    run_copied,
    run_repeated,
)
