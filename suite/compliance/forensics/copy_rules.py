"""Finds runs that occur twice: unchanged, with other time stamps, or with other last digits."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from suite.compliance.forensics.similarity import DURATIONS, RunIndex, SeriesPair, build_series
from suite.compliance.result import Result
from suite.compliance.rules.base import (
    OURS,
    TRAINING,
    ResultBreach,
    Rule,
    check_distinct,
    cite,
    render_log_name,
    result_rule,
)
from suite.compliance.rules.package_rules import is_same_submitter
from suite.files import render_repr
from suite.log.record import RunRecord
from suite.log.results_tree import PRUNED, Group


@result_rule("run-copied", "no run is a copy of another, not even with new time stamps, kept or pruned", OURS)
def check_run_copied(result: Result) -> Iterator[ResultBreach]:
    yield from check_distinct(
        (*result.runs, *result.pruned), _make_time_free_key, lambda run: "has the same durations and evaluations as"
    )


@result_rule(
    "run-repeated",
    "no two runs are more alike than one pair of honest runs in 100,000: a run that is another with other seed, "
    "last digits or time stamps, its beginning or its end",
    OURS,
)
def check_run_repeated(result: Result) -> Iterator[ResultBreach]:
    seen: RunIndex[RunRecord] = RunIndex()
    exact: set[object] = set()
    for run in (*result.runs, *result.pruned):
        course = _make_time_free_key(run)
        if course is not None and course in exact:
            continue  # rule run-copied reports it
        exact.add(course)
        curves = build_series(run)
        found = seen.find_duplicate(curves, partial(_is_evidence_of_copy, run))
        if found is not None:
            other, similarity = found
            seed = "no seed is logged" if run.seed is None else f"its seed is {render_repr(run.seed)}"
            pruned = other.path is not None and other.path.parent.name == PRUNED
            place = f"{PRUNED}/{render_log_name(other)}" if pruned else render_log_name(other)
            yield run.path, f"{seed}, but of {place} it has {similarity.text()}"
        seen.add(run, curves)


REUSE_RULES: tuple[Rule, ...] = (  # `SeenRuns` applies them
    Rule("run-reused", "no run, nor a copy of it with other time stamps or last digits, counts in two results", OURS),
    Rule(
        "carried-over",
        "a result is not also in another round, there by the same submitter and of the same system",
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

    def compare(self, group: Group, runs: Sequence[RunRecord]) -> Iterator[tuple[str, Path, str]]:
        """Yield (rule, path, message) for runs that an earlier result has too, then remember the new ones."""
        carried: list[Group] = []
        courses = [_make_time_free_key(run) for run in runs]
        # New runs are remembered at the end: rules run-copied and run-repeated report copies within one result.
        new: list[tuple[RunRecord, SeriesPair]] = []
        for run, course in zip(runs, courses, strict=True):
            where = run.path or group.folder
            by_package = self._exact.get(course, {})
            earlier = by_package.get(group.package) or next(iter(by_package.values()), None)
            if earlier is None:
                curves = build_series(run)
                new.append((run, curves))
                found = self._similar[run.benchmark, run.size].find_duplicate(
                    curves, partial(_is_evidence_of_copy, run)
                )
                if found is not None:
                    other, similarity = found
                    yield "run-reused", where, f"has {similarity.text()} of {other.path}"
                continue
            other_group, other = earlier
            same_time = other.run_start_s == run.run_start_s
            if same_time and other_group.package != group.package and _may_be_resubmitted(group, other_group):
                carried.append(other_group)
            else:
                # Only an unchanged copy keeps its time stamps.
                again = "is also" if same_time else "has the durations and evaluations of"
                yield "run-reused", where, f"{again} {other.path}"
        if carried:
            yield "carried-over", group.folder, f"{len(carried)} of {len(runs)} runs are those of {carried[0].folder}"
        for run, course in zip(runs, courses, strict=True):
            if course is not None:
                self._exact[course].setdefault(group.package, (group, run))
        for run, curves in new:
            self._similar[run.benchmark, run.size].add(run, curves)


def _may_be_resubmitted(group: Group, other: Group) -> bool:
    """Return True if a result may be carried over: by the same submitter, of the same system, in another round.

    A run folder is submitted nowhere: its package holds the same runs.
    """
    if group.package is None or other.package is None:
        return True
    same_round = group.round is not None and group.round == other.round
    same_system = group.system == other.system
    return same_system and not same_round and is_same_submitter(group.submitter or "", other.submitter or "")


def _is_evidence_of_copy(run: RunRecord, other: RunRecord, what: str) -> bool:
    """Return True if a similarity shows a copy. Runs with one seed may have equal values, but never equal durations."""
    return what == DURATIONS or run.seed is None or run.seed != other.seed


def _make_time_free_key(run: RunRecord) -> object:
    """Return what a copy with new time stamps keeps: the evaluations' values and their times since run_start."""
    if not run.evals or run.time_to_train_s is None:
        return None
    return tuple((item.value, round(item.time_s, 3)) for item in run.evals), round(run.time_to_train_s, 3)
