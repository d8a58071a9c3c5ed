"""The numbers of a log as series over time: what every exporter writes. Names and values are a stranger's: names are cleaned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from suite.errors import InputError
from suite.log import mllog
from suite.log.reader import Event, Log, read_events
from suite.log.record import RunRecord, summarise
from suite.log.results_tree import find_logs
from suite.log.values import finite, whole

_LONGEST_NAME = 100
_LARGEST_STEP = 2**62
_LATEST_MS = 253_402_300_799_999  # the last millisecond of the year 9999


class Point(NamedTuple):
    """One value. ``step`` is a number of steps, or an epoch_num; ``time_ms`` Unix milliseconds."""

    step: int
    time_ms: int
    value: float


@dataclass(frozen=True)
class RunSeries:
    """The series of one log, by name, each in the order of the log. ``label`` is a path of clean names without ``..``."""

    path: Path
    label: str
    record: RunRecord
    series: Mapping[str, Sequence[Point]]


def read_series(paths: Sequence[Path]) -> Iterator[RunSeries]:
    """Read every log under the paths. InputError for a path without logs, OSError for a log that cannot be read."""
    seen: set[str] = set()
    for found in find_logs(paths)[0]:
        label = "/".join(
            clean(part) for part in Path(found.label).with_suffix("").parts if part not in ("/", ".", "..")
        )
        if label in seen:
            raise InputError(f"{found.path}: another log is named {label} too; export them apart")
        seen.add(label)
        log = read_events(found.path)
        yield RunSeries(found.path, label, summarise(log), _series(log))


def clean(name: str) -> str:
    """A name of letters, digits and ``_ . -`` that does not begin with a dot, of at most 100 characters."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:_LONGEST_NAME].lstrip(".") or "_"


def _series(log: Log) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for event in log.until(mllog.RUN_STOP).events:
        for name, step, value in _numbers(event):
            time_ms = finite(event.time_ms)
            if value is None or time_ms is None or not 0 <= time_ms <= _LATEST_MS or not 0 <= step < _LARGEST_STEP:
                continue
            found.setdefault(name, []).append(Point(step, int(time_ms), value))
    return found


def _numbers(event: Event) -> Iterator[tuple[str, int, float | None]]:
    """Name, step and value of each number of an event that is a series; None for what is no number."""
    key, value, metadata = event.key, event.value, event.metadata
    if key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
        yield key, _epoch(metadata), finite(value)
    elif key == mllog.STEP_PHASES:
        step = (whole(metadata.get("first_step")) or 0) + (whole(metadata.get("steps")) or 0)
        yield "train/loss", step, finite(metadata.get("loss"))
        yield from (("step_phase_seconds/" + name, step, number) for name, number in _items(value))
    elif key == mllog.TRACKED_STATS:
        named = ("train/samples_per_second" if name == "throughput" else f"train/{name}" for name, _ in _items(value))
        yield from ((name, _epoch(metadata), number) for name, (_, number) in zip(named, _items(value), strict=True))
    elif key == mllog.ENERGY and isinstance(value, Mapping):
        for name, entry in value.items():
            joules = finite(entry.get("joules")) if isinstance(entry, Mapping) else None
            yield f"energy_joules/{clean(str(name))}", _epoch(metadata), joules


def _items(value: object) -> list[tuple[str, float | None]]:
    return [(clean(str(name)), finite(each)) for name, each in value.items()] if isinstance(value, Mapping) else []


def _epoch(metadata: Mapping[str, object]) -> int:
    """epoch_num, whole; -1, which no series takes, for one that is no number."""
    number = finite(metadata.get("epoch_num", metadata.get("samples_count")))
    return -1 if number is None else round(number)
