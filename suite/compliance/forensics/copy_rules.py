"""Finds runs that occur twice: unchanged, with other time stamps, or with other last digits."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from mlhpc.suite.compliance.forensics.similarity import DURATIONS, RunIndex, SeriesPair, build_series
from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.rules.base import (
    OURS,
    TRAINING,
    ResultBreach,
    Rule,
    check_distinct,
    cite,
    render_log_name,
    result_rule,
)
from mlhpc.suite.compliance.rules.package_rules import is_same_submitter
from mlhpc.suite.files import render_repr
from mlhpc.suite.log import mllog
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import PRUNED, Group, read_system

Fingerprint = tuple[str, float, float, float]
_TIMES = (mllog.TRACKED_STATS, mllog.STEP_PHASES)  # what follows from clocks


@result_rule(
    "run-copied",
    "no run is a copy of another, not even with new time stamps or with other evaluations, kept or pruned",
    OURS,
)
def check_run_copied(result: Result) -> Iterator[ResultBreach]:
    runs = (*result.runs, *result.pruned)
    copies = dict(check_distinct(runs, _make_time_free_key, lambda run: "has the same durations and evaluations as"))
    yield from copies.items()
    seen: dict[Fingerprint, RunRecord] = {}
    for run in runs:
        prints = _list_fingerprints(run)
        found = _find_shared_numbers(run, prints, seen.get) if run.path not in copies else None
        if found is not None:
            other, text = found
            yield run.path, f"{text} {render_log_name(other)}"
        for fingerprint in prints:
            seen.setdefault(fingerprint, run)


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

    def compare(self, group: Group, runs: Sequence[RunRecord]) -> Iterator[tuple[str, Path, str]]:
        """Yield (rule, path, message) for runs that an earlier result has too, then remember the new ones."""
        carried: list[Group] = []
        problems: dict[Path, str | None] = {}  # by the folder of the other result
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
                shared = _find_shared_numbers(run, _list_fingerprints(run), self._measured.get)
                if found is not None:
                    other, similarity = found
                    yield "run-reused", where, f"has {similarity.text()} of {other.path}"
                elif shared is not None:
                    yield "run-reused", where, f"{shared[1]} {shared[0].path}"
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
                yield "run-reused", where, f"{again} {other.path}{problem}"
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


def _is_evidence_of_copy(run: RunRecord, other: RunRecord, what: str) -> bool:
    """Return True if a similarity shows a copy. Runs with one seed may have equal values, but never equal durations."""
    return what == DURATIONS or run.seed is None or run.seed != other.seed


def _list_fingerprints(run: RunRecord) -> list[Fingerprint]:
    """List each three measured numbers in a row. Of 6,421 published logs no two different runs have the same."""
    found: list[Fingerprint] = []
    for key, numbers in run.measured.items():
        distinct = list(dict.fromkeys(numbers))
        found += ((key, *three) for three in zip(distinct, distinct[1:], distinct[2:], strict=False))
    return found


def _find_shared_numbers(
    run: RunRecord, prints: Sequence[Fingerprint], find: Callable[[Fingerprint], RunRecord | None]
) -> tuple[RunRecord, str] | None:
    """Return an earlier run that has measured numbers of this one, and the beginning of a message.

    Runs of one seed have the same losses on every machine, but never the same times.
    """
    for fingerprint in prints:
        key, *numbers = fingerprint
        other = find(fingerprint)
        seeds = {run.seed, other.seed} if other is not None else set()
        if other is not None and (key in _TIMES or (None not in seeds and len(seeds) > 1)):
            return other, f"measured {key} {', '.join(map(repr, numbers))}, as"
    return None


def _make_time_free_key(run: RunRecord) -> object:
    """Return what a copy with new time stamps keeps: the evaluations' values and their times since run_start."""
    if not run.evals or run.time_to_train_s is None:
        return None
    return tuple((item.value, round(item.time_s, 3)) for item in run.evals), round(run.time_to_train_s, 3)
