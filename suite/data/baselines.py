"""The metric that trivial and analytic predictors reach on a data set. Measured once, when the data set is made.

<data root>/baselines.json   {"version": 1, "data_manifest": sha256, "metric": key, "values": {name: value},
                             "standard_errors": {name: of the value, over evaluation samples, or null},
                             "attainable": {name: value of a predictor that is told the rule that made the data}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from suite.config import load_config
from suite.descriptor import Descriptor
from suite.files import write_whole
from suite.workload import Baseline, load_workload

BASELINES_VERSION = 1
BASELINES_NAME = "baselines.json"


def measure_baselines(descriptor: Descriptor, size: str, root: Path, data_manifest: str) -> Mapping[str, float]:
    """Compute the workload's baselines on the data set under ``root`` and write them into its folder. Returns name to metric.

    Those that are told the rule of the data (`told`) are among what is returned, but the file has them apart.
    """
    config = load_config(descriptor, size)
    values: Mapping[str, float] = load_workload(descriptor)(config).baselines(root)
    content = {
        "version": BASELINES_VERSION,
        "data_manifest": data_manifest,
        "metric": descriptor.card().size(size).metric,
        "values": {name: float(value) for name, value in values.items() if not told(value)},
        "standard_errors": {name: standard_error(value) for name, value in values.items()},
        "attainable": {name: float(value) for name, value in values.items() if told(value)},
    }
    write_whole(root / BASELINES_NAME, json.dumps(content, indent=1) + "\n")
    return values


def standard_error(value: float) -> float | None:
    """The standard error of a baseline over evaluation samples. None if the workload does not state it, or for one sample."""
    error = value.standard_error if isinstance(value, Baseline) else math.nan
    return error if math.isfinite(error) else None


def told(value: float) -> bool:
    """True for what a predictor reaches that is told the rule of the data: it is attainable, and no baseline."""
    return isinstance(value, Baseline) and value.told


def beside(values: Mapping[str, float], attainable: Mapping[str, float]) -> list[str]:
    """Render the lines under a result: it is worth what it is beyond the baselines. ``attainable`` is none and stands apart."""
    heads = {"without learning": values, "attainable, told the rule of the data": attainable}
    return [
        f"{head}: {', '.join(f'{name} {value:.4f}' for name, value in each.items())}"
        for head, each in heads.items()
        if each
    ]


def read_baselines(root: Path, data_manifest: str) -> tuple[dict[str, float], dict[str, float]]:
    """Read the baselines of this data set, and what is attainable. Empty if they were never measured, or on other data."""
    path = root / BASELINES_NAME
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}, {}
    if not isinstance(content, dict) or content.get("data_manifest") != data_manifest:
        return {}, {}
    values, attainable = (
        {str(name): float(value) for name, value in content.get(part, {}).items()} for part in ("values", "attainable")
    )
    return values, attainable
