"""Measures what trivial and analytic predictors reach on a data set, once, when the data set is made.

<data root>/baselines.json   {"version": 1, "data_manifest": sha256, "metric": key, "values": {name: value},
                             "standard_errors": {name: of the value, over evaluation samples, or null},
                             "attainable": {name: value of an oracle that knows the rule that made the data}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.documents import read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import write_file_atomically
from mlhpc.suite.workload import Baseline, load_workload

BASELINES_VERSION: Final = 1
BASELINES_NAME = "baselines.json"
# Parameters that every workload's boosting gives to LightGBM. One thread and one seed, so that its trees repeat.
LIGHTGBM: Final = {
    "learning_rate": 0.05,
    "num_leaves": 15,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "feature_fraction": 0.3,
    "num_threads": 1,
    "verbose": -1,
    "seed": 0,
}


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of baselines.json."""

    version: Literal[1]
    data_manifest: str
    metric: str
    values: dict[str, float]
    standard_errors: dict[str, float | None] = {}
    attainable: dict[str, float] = {}


def measure_baselines(descriptor: Descriptor, size: str, root: Path, data_manifest: str) -> Mapping[str, float]:
    """Compute the workload's baselines on the data set under ``root`` and write them into its folder.

    Returns name to metric. The result includes oracles (`is_oracle`); the file stores them separately.
    """
    config = load_config(descriptor, size)
    values: Mapping[str, float] = load_workload(descriptor)(config).baselines(root)
    content = {
        "version": BASELINES_VERSION,
        "data_manifest": data_manifest,
        "metric": descriptor.card().size(size).metric,
        "values": {name: float(value) for name, value in values.items() if not is_oracle(value)},
        # JSON has no number for "unknown": null.
        "standard_errors": {name: find_standard_error(value) for name, value in values.items()},
        "attainable": {name: float(value) for name, value in values.items() if is_oracle(value)},
    }
    # Beside the manifest, not in it: the sha256 of the manifest names the data, whatever predictors reach on them.
    write_file_atomically(root / BASELINES_NAME, json.dumps(content, indent=1) + "\n")
    return values


def find_standard_error(value: float) -> float | None:
    """Return the standard error of a baseline over evaluation samples. None if it is unknown, or for one sample."""
    error = value.standard_error if isinstance(value, Baseline) else math.nan
    return error if math.isfinite(error) else None


def is_oracle(value: float) -> bool:
    """Return True for the value of a predictor that knows the rule of the data.

    It bounds learning and is no baseline.
    """
    return isinstance(value, Baseline) and value.told


def render_baselines(values: Mapping[str, float], attainable: Mapping[str, float]) -> list[str]:
    """Render the lines under a result: one for baselines, one for oracles, none for an empty mapping."""
    heads = {
        "simple predictors reach": values,
        "best possible, by solvers that know how the data were made": attainable,
    }
    lines = []
    for head, numbers in heads.items():
        if numbers:
            lines.append(f"{head}: {', '.join(f'{name} {value:.4f}' for name, value in numbers.items())}")
    return lines


def read_baselines(root: Path, data_manifest: str) -> tuple[dict[str, float], dict[str, float]]:
    """Read the baselines and the oracles of this data set.

    Empty if `find_baselines_problem` says why there are none.
    """
    try:
        content = _read_file(root, data_manifest)
    # A run without baselines is complete; `find_baselines_problem` prints the reason at its end.
    except InputError:
        return {}, {}
    return dict(content.values), dict(content.attainable)


def find_baselines_problem(root: Path, data_manifest: str) -> str | None:
    """Return in one line why this data set has no baselines: never measured, on other data, or a damaged file."""
    try:
        _read_file(root, data_manifest)
    except InputError as error:
        return f"{error}; the log states no baselines"
    return None


def _read_file(root: Path, data_manifest: str) -> _File:
    path = root / BASELINES_NAME
    content = read_json_document(path, _File, "baselines", BASELINES_VERSION)
    if content.data_manifest != data_manifest:
        raise InputError(
            f"{path}: field data_manifest differs: the baselines are those of another data set; remove the file"
        )
    return content
