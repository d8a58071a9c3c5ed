"""Says what a row of the table of facts is. The table is the fields of mlhpc.suite.log.record.RunRecord.

A row says how a fact is read from a log, its columns in the table of runs (docs/tables.md), and which cause it is if
two runs differ in it (mlhpc.suite.package.reproduction.judge).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from mlhpc.suite.log.reader import Log, parse_int64
from mlhpc.suite.log.timeline import Timeline, TimeParts

T = TypeVar("T")
Columns = Mapping[str, Callable[[Any], object]]  # the value of each column from the value of the fact
ROW = "row"  # of a field's metadata


@dataclass(frozen=True)
class Reading:
    """What a fact is read from: the events up to run_stop, their times, and what several facts need.

    ``parts`` is None for a run without run_stop. ``staging_s``: seconds of staging, and those before run_start.
    """

    run: Log
    line: Timeline
    parts: TimeParts | None
    staging_s: tuple[float | None, float]
    metric_key: str | None
    hyperparameters: Mapping[str, Any]

    def value(self, key: str, about: str | None = None) -> Any:
        """Return the value of the first event of a key, or a name of its metadata. None without one."""
        event = self.run.first(key)
        return None if event is None else event.value if about is None else event.metadata.get(about)

    def time_s(self, key: str) -> float | None:
        """Return the Unix time of the first event of a key."""
        event = self.run.first(key)
        return None if event is None else event.time_ms / 1e3


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
    columns: str | Columns = "",
    limited: bool = False,
    cause: tuple[str, str] | None = None,
) -> T:
    """Make a row whose value a function reads. ``empty`` makes the value of a record without log; default: None.

    ``columns``: the name of one column shows the value as it is.
    """
    if isinstance(columns, str):
        columns = {columns: lambda value: value} if columns else {}
    fact = Fact(read, columns, limited, cause)
    return field(default_factory=empty or (lambda: cast("T", None)), metadata={ROW: fact})


def stated(key: str, parse: Callable[[object], T], *, about: str | None = None, **row: Any) -> T:
    """Make the row of what the first event of a key states, or its metadata ``about``. The rest is as for `derived`."""
    return derived(lambda log: parse(log.value(key, about)), empty=lambda: parse(None), **row)


def stated_count(key: str, column: str, cause: tuple[str, str] | None = None) -> int | None:
    """Make the row of a number that an event states."""
    return stated(key, parse_int64, columns=column, limited=True, cause=cause)


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
