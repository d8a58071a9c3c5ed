"""A folder of MLflow's file store: an experiment for each benchmark and size, a run for each log. MLflow is not needed.

MLflow from 3.7 on reads such folders with MLFLOW_ALLOW_FILE_STORE=true, or moves them into its database with
`mlflow migrate-filestore`. The ids are made of names and content, so that a log that was exported once is not exported again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from suite.errors import InputError
from suite.files import opened, printable, write_whole
from suite.log.export.series import RunSeries, clean
from suite.log.limits import limits

_FINISHED, _FAILED = 3, 4  # mlflow.entities.RunStatus
_LOCAL = 4  # mlflow.entities.SourceType
_LONGEST_PARAMETER = 6000


def write_mlflow(run: RunSeries, folder: Path) -> Path:
    """Write the run of one log and return its folder. InputError if that exists. The run's meta.yaml is written last."""
    record = run.record
    experiment = "-".join(filter(None, (record.benchmark or "unknown", record.size)))
    number = str(int(hashlib.sha256(experiment.encode()).hexdigest()[:14], 16))
    home = folder / number
    with opened(run.path, limits().file) as file:
        identity = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    root = home / identity
    if (root / "meta.yaml").exists():
        raise InputError(f"{root}: exists already: {run.path} was exported to this folder before")
    _write_experiment(home, number, experiment, round((record.run_start_s or 0.0) * 1e3))
    for name, points in run.series.items():
        lines = [f"{point.time_ms} {point.value!r} {point.step}\n" for point in points]
        write_whole(root / "metrics" / name, "".join(lines))
    for name, value in _parameters(run).items():
        write_whole(root / "params" / clean(name), printable(str(value))[:_LONGEST_PARAMETER])
    for name, value in _tags(run).items():
        write_whole(root / "tags" / name, printable(str(value)))
    for name in ("metrics", "params", "tags", "artifacts"):
        (root / name).mkdir(exist_ok=True)
    _write_meta(root, identity, number, run)
    return root


def _write_experiment(home: Path, number: str, name: str, created_ms: int) -> None:
    if (home / "meta.yaml").exists():
        return
    meta = {
        "artifact_location": home.absolute().as_uri(),
        "creation_time": created_ms,
        "experiment_id": number,
        "last_update_time": created_ms,
        "lifecycle_stage": "active",
        "name": printable(name),
    }
    write_whole(home / "meta.yaml", yaml.safe_dump(meta))


def _write_meta(root: Path, identity: str, number: str, run: RunSeries) -> None:
    record = run.record
    meta: dict[str, Any] = {
        "artifact_uri": (root / "artifacts").absolute().as_uri(),
        "end_time": None if record.run_stop_s is None else round(record.run_stop_s * 1e3),
        "entry_point_name": "",
        "experiment_id": number,
        "lifecycle_stage": "active",
        "run_id": identity,
        "run_name": run.label,
        "source_name": "",
        "source_type": _LOCAL,
        "source_version": "",
        "start_time": round((record.run_start_s or 0.0) * 1e3),
        "status": _FINISHED if record.status == "success" else _FAILED,
        "tags": [],
        "user_id": "",
    }
    write_whole(root / "meta.yaml", yaml.safe_dump(meta))


def _parameters(run: RunSeries) -> Mapping[str, Any]:
    record = run.record
    counts = {"number_of_nodes": record.nodes, "number_of_ranks": record.ranks, "seed": record.seed}
    return {**record.hyperparameters, **{name: value for name, value in counts.items() if value is not None}}


def _tags(run: RunSeries) -> Mapping[str, Any]:
    record = run.record
    found = {
        "mlflow.runName": run.label,
        "mlhpc.suite_version": record.suite_version,
        "mlhpc.ruleset": record.ruleset,
        "mlhpc.division": record.division,
        "mlhpc.system": record.platform,
        "mlhpc.data_manifest": record.data_manifest,
        "mlhpc.time_to_train_s": record.time_to_train_s,
    }
    return {name: value for name, value in found.items() if value is not None}
