"""Compares the course of a run with those of healthy runs beside the card, says it in one line, and collects them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache

from mlhpc.suite.card import ReferenceCourse
from mlhpc.suite.log.course import is_share
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.statistics.courses import (
    FEWEST_RUNS,
    FEWEST_SETS,
    RATE,
    Band,
    Deviation,
    build_band,
    judge_course,
)


def find_reference_course(record: RunRecord, courses: Sequence[ReferenceCourse]) -> ReferenceCourse | None:
    """Find the course of the run's batch size, precision and hyperparameters."""
    mine = _describe_settings(record)
    return next(
        (each for each in courses if mine == (each.global_batch_size, each.precision, each.hyperparameters)), None
    )


def judge_run_course(
    record: RunRecord, courses: Sequence[ReferenceCourse], *, together: int = 1
) -> list[Deviation] | None:
    """Find what is unlike healthy runs, the least likely first. None if nothing can be compared.

    ``together``: runs that are judged at once; 1 % of all of them are called unlike, not 1 % of each.
    """
    course = None if record.resumed else find_reference_course(record, courses)
    band = None if course is None else build_reference_band(course)
    return None if band is None or not record.course else judge_course(band, record.course, RATE / max(1, together))


def build_reference_band(course: ReferenceCourse) -> Band | None:
    """Build the band of a course's healthy runs, once. None if there are too few of them."""
    return _build(_Key(course))


def describe_run_course(record: RunRecord, courses: Sequence[ReferenceCourse]) -> str:
    """Describe the comparison in one line."""
    found = judge_run_course(record, courses)
    if found is None:
        return "no reference course of these settings: only the target judges this training"
    if found:
        more = f"; {len(found) - 1} more" if len(found) > 1 else ""
        return f"course unlike healthy runs: {found[0].render()}{more}"
    course = find_reference_course(record, courses)
    return f"course as {len(course.seeds) if course else 0} healthy runs (of healthy runs 1 in 100 is called unlike)"


def collect_courses(logs: Sequence[RunRecord], system: str) -> tuple[ReferenceCourse, ...]:
    """Collect the courses of runs by batch size, precision and hyperparameters. Runs without one are left out.

    It has the numbers that all its runs have: later epochs would be those of slow runs alone.
    """
    groups: list[list[RunRecord]] = []
    for log in logs:
        if log.course and log.run_stop_s is not None and log.evals and log.seed is not None and not log.resumed:
            alike = (group for group in groups if _describe_settings(group[0]) == _describe_settings(log))
            group = next(alike, None)
            groups.append([log]) if group is None else group.append(log)
    return tuple(
        ReferenceCourse(
            global_batch_size=group[0].global_batch_size or 0,
            precision=str(group[0].precision),
            hyperparameters=dict(group[0].hyperparameters),
            seeds=tuple(log.seed or 0 for log in group),
            data_manifests=tuple(log.data_manifest or "unknown" for log in group),
            values={
                name: tuple(float(f"{log.course[name]:.6g}") for log in group)
                for name in max((log.course for log in group), key=len)
                if all(name in log.course for log in group)
            },
            recorded=f"{datetime.fromtimestamp(max(log.run_stop_s or 0.0 for log in group), UTC):%Y-%m-%d}",
            suite_version=group[0].suite_version or "unknown",
            system=system,
        )
        for group in groups
    )


def render_reference_course(course: ReferenceCourse) -> str:
    """Render as ``batch 16, float32: course of 25 healthy runs on 5 data sets, 61 numbers``."""
    sets, runs = len(set(course.data_manifests)), len(course.seeds)
    enough = runs >= FEWEST_RUNS and sets >= FEWEST_SETS
    more = "" if enough else f"; it judges nothing before {FEWEST_RUNS} runs on {FEWEST_SETS} data sets"
    where = f"batch {course.global_batch_size}, {course.precision}"
    return f"{where}: course of {runs} healthy runs on {sets} data sets, {len(course.values)} numbers{more}"


def _describe_settings(log: RunRecord) -> object:
    return log.global_batch_size, log.precision, dict(log.hyperparameters)


class _Key:
    """A course as a key of a cache: by identity, because its mappings have no hash."""

    def __init__(self, course: ReferenceCourse) -> None:
        self.course = course

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.course is self.course

    def __hash__(self) -> int:
        return id(self.course)


@lru_cache(maxsize=16)
def _build(key: _Key) -> Band | None:
    names = list(key.course.values)
    runs = [dict(zip(names, numbers, strict=True)) for numbers in zip(*key.course.values.values(), strict=True)]
    return build_band(runs, key.course.data_manifests, {*filter(is_share, names)})
