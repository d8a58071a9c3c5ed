"""Writes the numbers of logs as series for MLflow, TensorBoard and Prometheus, with these tools' own libraries.

Names and values in a log are a stranger's, so names are cleaned before a library sees them.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mlhpc.suite.errors import InputError, explain_not_installed
from mlhpc.suite.files import open_regular_file, render_printable, write_file_atomically
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Event, Log, convert_to_float, parse_int64, read_events, read_limits
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.results_tree import find_logs

_LONGEST_NAME = 100
_LARGEST_STEP = 2**62
_LARGEST_FLOAT32 = 3.4028234663852886e38  # TensorBoard keeps single precision
_LONGEST_PARAMETER = 6000  # characters that MLflow takes
_MOST_METRICS = 1000  # of one request to an MLflow server
_LATEST_MS = 253_402_300_799_999  # the last millisecond of the year 9999


class Point(NamedTuple):
    """One value. ``step`` is a number of steps, or an epoch_num; ``time_ms`` is in Unix milliseconds."""

    step: int
    time_ms: int
    value: float


@dataclass(frozen=True)
class RunSeries:
    """The series of one log by name, each in the order of the log.

    ``label`` is a path of clean names without ``..``.
    """

    path: Path
    label: str
    record: RunRecord
    series: Mapping[str, Sequence[Point]]


def read_series(paths: Sequence[Path]) -> Iterator[RunSeries]:
    """Read every log under the paths. InputError for a path without logs, OSError for a log that cannot be read."""
    seen: set[str] = set()
    for found in find_logs(paths)[0]:
        label = "/".join(
            convert_to_safe_name(part)
            for part in Path(found.label).with_suffix("").parts
            if part not in ("/", ".", "..")
        )
        if label in seen:
            raise InputError(f"{found.path}: another log has the name {label} too; export them with separate commands")
        seen.add(label)
        log = read_events(found.path)
        yield RunSeries(found.path, label, summarise_log(log), _collect_series(log))


def convert_to_safe_name(name: str) -> str:
    """Return a name of at most 100 letters, digits and ``_ . -`` that does not begin with a dot."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:_LONGEST_NAME].lstrip(".") or "_"


def _collect_series(log: Log) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for event in log.until(mllog.RUN_STOP).events:
        for name, step, value in _list_numbers(event):
            time_ms = convert_to_float(event.time_ms)
            if value is None or time_ms is None or not 0 <= time_ms <= _LATEST_MS or not 0 <= step < _LARGEST_STEP:
                continue
            found.setdefault(name, []).append(Point(step, int(time_ms), value))
    return found


def _list_numbers(event: Event) -> Iterator[tuple[str, int, float | None]]:
    """Yield name, step and value of each number of an event that is a series; None if the value is no number."""
    key, value, metadata = event.key, event.value, event.metadata
    if key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
        yield key, _read_epoch(metadata), convert_to_float(value)
    elif key == mllog.STEP_PHASES:
        step = (parse_int64(metadata.get("first_step")) or 0) + (parse_int64(metadata.get("steps")) or 0)
        yield "train/loss", step, convert_to_float(metadata.get("loss"))
        yield from (("step_phase_seconds/" + name, step, number) for name, number in _list_items(value))
    elif key == mllog.TRACKED_STATS:
        named = (
            "train/samples_per_second" if name == "throughput" else f"train/{name}" for name, _ in _list_items(value)
        )
        yield from (
            (name, _read_epoch(metadata), number) for name, (_, number) in zip(named, _list_items(value), strict=True)
        )
    elif key == mllog.ENERGY and isinstance(value, Mapping):
        for name, entry in value.items():
            joules = convert_to_float(entry.get("joules")) if isinstance(entry, Mapping) else None
            yield f"energy_joules/{convert_to_safe_name(str(name))}", _read_epoch(metadata), joules


def _list_items(value: object) -> list[tuple[str, float | None]]:
    return (
        [(convert_to_safe_name(str(name)), convert_to_float(each)) for name, each in value.items()]
        if isinstance(value, Mapping)
        else []
    )


def _read_epoch(metadata: Mapping[str, object]) -> int:
    """Return epoch_num as an integer; -1, which no series accepts, if it is no number."""
    number = convert_to_float(metadata.get("epoch_num", metadata.get("samples_count")))
    return -1 if number is None else round(number)


def export_mlflow(paths: Sequence[Path], folder: Path | None) -> Iterator[str]:
    """Log each run with MLflow's client and yield its id: into a folder, else to MLFLOW_TRACKING_URI.

    InputError if a log was exported there before.
    """
    if folder is not None:
        # Newer releases of MLflow refuse to write folders unless this is set.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise InputError(f"--form mlflow: {explain_not_installed('mlflow')}") from None
    client = MlflowClient(None if folder is None else folder.absolute().as_uri())
    for run in read_series(paths):
        record = run.record
        name = render_printable("-".join(filter(None, (record.benchmark or "unknown", record.size))))
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        with open_regular_file(run.path, read_limits().file) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if client.search_runs([experiment], f"tags.`mlhpc.log_sha256` = '{digest}'"):
            raise InputError(f"{run.path}: was exported before, to experiment {name}; leave this run out")
        tags = {
            "mlhpc.log_sha256": digest,
            "mlhpc.suite_version": record.suite_version,
            "mlhpc.ruleset": record.ruleset,
            "mlhpc.division": record.division,
            "mlhpc.system": record.platform,
            "mlhpc.data_manifest": record.data_manifest,
            "mlhpc.time_to_train_s": record.time_to_train_s,
        }
        counts = {"number_of_nodes": record.nodes, "number_of_ranks": record.ranks, "seed": record.seed}
        known_counts = {key: value for key, value in counts.items() if value is not None}
        # Two names that are equal once cleaned would be refused as two values of one parameter.
        parameters = {
            convert_to_safe_name(key): render_printable(str(value))[:_LONGEST_PARAMETER]
            for key, value in {**record.hyperparameters, **known_counts}.items()
        }
        created = client.create_run(experiment, start_time=round((record.run_start_s or 0.0) * 1e3), run_name=run.label)
        identity = created.info.run_id
        client.log_batch(
            identity,
            params=[Param(key, value) for key, value in parameters.items()],
            tags=[RunTag(key, render_printable(str(value))) for key, value in tags.items() if value is not None],
        )
        metrics = [
            Metric(key, point.value, point.time_ms, point.step)
            for key, points in run.series.items()
            for point in points
        ]
        for begin in range(0, len(metrics), _MOST_METRICS):
            client.log_batch(identity, metrics=metrics[begin : begin + _MOST_METRICS])
        stop = None if record.run_stop_s is None else round(record.run_stop_s * 1e3)
        client.set_terminated(identity, "FINISHED" if record.status == "success" else "FAILED", stop)
        yield f"{run.path}: run {identity}"


def export_tensorboard(paths: Sequence[Path], folder: Path | None) -> Iterator[str]:
    """Write an event file for each run, in a folder of the run's name, and yield that. InputError if it exists."""
    try:
        from tensorboard.summary import Writer
    except ImportError:
        raise InputError(f"--form tensorboard: {explain_not_installed('tensorboard')}") from None
    for run in read_series(paths):
        target = (folder or Path("tensorboard")) / run.label
        if target.exists():
            raise InputError(f"{target}: exists already; choose another folder with -o")
        # The writer has a thread of its own, which prints a traceback where the disk is full.
        with tempfile.TemporaryDirectory(prefix="mlhpc-") as scratch:
            writer = Writer(scratch)
            for name, points in run.series.items():
                for point in points:
                    value = max(min(point.value, _LARGEST_FLOAT32), -_LARGEST_FLOAT32)
                    writer.add_scalar(name, value, point.step, wall_time=point.time_ms / 1e3)
            writer.close()
            for path in Path(scratch).iterdir():
                write_file_atomically(target / path.name, path.read_bytes())
        yield str(target)


def export_prometheus(paths: Sequence[Path], file: Path | None) -> Iterator[str]:
    """Write the last value of each series as gauges, for the node exporter's textfile collector. Without a file, yield
    them.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, generate_latest
    except ImportError:
        raise InputError(f"--form prometheus: {explain_not_installed('prometheus_client')}") from None
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for run in read_series(paths):
        record = run.record
        last = {re.sub(r"[^a-zA-Z0-9_]", "_", name): points[-1].value for name, points in run.series.items()}
        last["target_reached"] = float(record.status == "success")
        if record.time_to_train_s is not None:
            last["time_to_train_seconds"] = record.time_to_train_s
        labels = {"benchmark": record.benchmark, "size": record.size, "system": record.platform, "run": run.label}
        for name, value in last.items():
            if name not in gauges:
                about = f"Last value of {name} in the log."
                gauges[name] = Gauge(f"mlhpc_run_{name}", about, list(labels), registry=registry)
            gauges[name].labels(**{key: render_printable(text or "") for key, text in labels.items()}).set(value)
    text = generate_latest(registry).decode()
    if file is None:
        yield text.rstrip("\n")
    else:
        write_file_atomically(file, text)
        yield str(file)
