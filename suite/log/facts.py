"""Says what a row of the table of facts is. The table is the fields of mlhpc.suite.log.record.RunRecord.

A row says how a fact is read from a log, its columns in the table of runs (docs/tables.md), and which cause it is if two
runs differ in it (mlhpc.suite.package.reproduction.judge).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

from mlhpc.suite.log.reader import Log, parse_int64
from mlhpc.suite.log.timeline import Timeline, TimeParts, compute_staging_seconds, find_time_parts

T = TypeVar("T")
Columns = Mapping[str, Callable[[Any], object]]  # the value of each column from the value of the fact
ROW = "row"  # of a field's metadata


@dataclass(frozen=True)
class Reading:
    """What a fact is read from: the events up to run_stop, their times, and what several facts need."""

    run: Log
    line: Timeline
    metric_key: str | None
    hyperparameters: Mapping[str, Any]

    def value(self, key: str) -> Any:
        """Return the value of the first event of a key. None without one."""
        event = self.run.first(key)
        return None if event is None else event.value

    def about(self, key: str) -> Mapping[str, Any]:
        """Return the metadata of the first event of a key. Empty without one."""
        event = self.run.first(key)
        return {} if event is None else event.metadata

    def time_s(self, key: str) -> float | None:
        """Return the Unix time of the first event of a key."""
        event = self.run.first(key)
        return None if event is None else event.time_ms / 1e3

    @cached_property
    def parts(self) -> TimeParts | None:
        """When each part of the run was. None for a run without run_stop."""
        return find_time_parts(self.line)

    @cached_property
    def staging_s(self) -> tuple[float | None, float]:
        """Seconds of staging, and how many of them were before run_start."""
        return compute_staging_seconds(self.line)


@dataclass(frozen=True)
class Fact:
    """A row of the table.

    ``limited``: a number in its columns that is below 0 or above 1e12 is implausible. ``cause``: the kind of the cause,
    and the name that people read.
    """

    read: Callable[[Reading], Any]
    columns: Columns
    limited: bool
    cause: tuple[str, str] | None


def derived(
    read: Callable[[Reading], T],
    *,
    empty: Callable[[], T] | None = None,
    column: str | None = None,
    columns: Columns | None = None,
    limited: bool = False,
    cause: tuple[str, str] | None = None,
) -> T:
    """Make a row whose value a function reads. ``empty`` makes the value of a record without log; default: None.

    ``column``: the column that shows the value as it is.
    """
    own: Columns = {column: lambda value: value} if column is not None else {}
    fact = Fact(read, {**own, **(columns or {})}, limited, cause)
    return field(default_factory=empty or (lambda: cast("T", None)), metadata={ROW: fact})


def stated(key: str, parse: Callable[[object], T], *, about: str | None = None, **row: Any) -> T:
    """Make the row of what the first event of a key states, or its metadata ``about``. The rest is as for `derived`."""
    if about is not None:
        return derived(lambda log: parse(log.about(key).get(about)), empty=lambda: parse(None), **row)
    return derived(lambda log: parse(log.value(key)), empty=lambda: parse(None), **row)


def stated_count(key: str, column: str, cause: tuple[str, str] | None = None) -> int | None:
    """Make the row of a number that an event states."""
    return stated(key, parse_int64, column=column, limited=True, cause=cause)


def parse_text(value: object) -> str | None:
    """Return a text; None for anything else."""
    return value if isinstance(value, str) else None


def parse_mapping(value: object) -> Mapping[str, Any] | None:
    """Return a JSON object; None for anything else."""
    return value if isinstance(value, dict) else None


render_json = json.JSONEncoder(sort_keys=True).encode  # json.dumps makes an encoder at each call


def render_text(value: Any) -> str | None:
    """Render a value as text; None if it says nothing."""
    if value is None or value == "" or value == {} or value == []:
        return None
    return value if isinstance(value, str) else render_json(value)
