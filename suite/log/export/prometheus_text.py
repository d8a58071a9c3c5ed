"""Prometheus' text exposition format 0.0.4: of each log the last value of each series, as gauges, for a textfile collector."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from suite.files import printable
from suite.log.export.series import RunSeries

_HELP = {
    "time_to_train_seconds": "Time from run_start to run_stop.",
    "target_reached": "1 if the run says that it reached its target, else 0.",
}


def render_prometheus(runs: Iterable[RunSeries]) -> str:
    """Render the gauges of all logs, those of one name together, as the format asks."""
    gauges: dict[str, list[str]] = {}
    for run in runs:
        labels = ",".join(f'{name}="{_escape(value)}"' for name, value in _labels(run))
        for name, value in _gauges(run):
            gauges.setdefault(name, []).append(f"mlhpc_run_{name}{{{labels}}} {value!r}")
    lines = []
    for name, samples in gauges.items():
        text = _HELP.get(name, f"Last value of {name} in the log.")
        lines += [f"# HELP mlhpc_run_{name} {text}", f"# TYPE mlhpc_run_{name} gauge", *samples]
    return "".join(f"{line}\n" for line in lines)


def _gauges(run: RunSeries) -> Iterator[tuple[str, float]]:
    if run.record.time_to_train_s is not None:
        yield "time_to_train_seconds", run.record.time_to_train_s
    yield "target_reached", float(run.record.status == "success")
    last = {re.sub(r"[^a-zA-Z0-9_]", "_", name): points[-1].value for name, points in run.series.items()}
    yield from last.items()


def _labels(run: RunSeries) -> Iterator[tuple[str, str]]:
    record = run.record
    known = {"benchmark": record.benchmark, "size": record.size, "system": record.platform, "run": run.label}
    return ((name, value) for name, value in known.items() if value is not None)


def _escape(value: str) -> str:
    return printable(value).replace("\\", "\\\\").replace('"', '\\"')
