"""The metric that trivial and analytic predictors reach on a data set. Measured once, when the data set is made.

<data root>/baselines.json   {"version": 1, "data_manifest": sha256, "metric": key, "values": {name: value}}
"""

from __future__ import annotations

import json
from pathlib import Path

from suite.config import load_config
from suite.descriptor import Descriptor
from suite.files import write_whole
from suite.workload import load_workload

BASELINES_VERSION = 1
BASELINES_NAME = "baselines.json"


def measure_baselines(descriptor: Descriptor, size: str, root: Path, data_manifest: str) -> dict[str, float]:
    """Compute the workload's baselines on the data set under ``root`` and write them into its folder. Returns name to metric."""
    config = load_config(descriptor, size)
    values: dict[str, float] = load_workload(descriptor)(config).baselines(root)
    metric = descriptor.card().size(size).metric
    content = {"version": BASELINES_VERSION, "data_manifest": data_manifest, "metric": metric, "values": values}
    write_whole(root / BASELINES_NAME, json.dumps(content, indent=1) + "\n")
    return values


def read_baselines(root: Path, data_manifest: str) -> dict[str, float]:
    """Read the baselines of this data set. Empty if there are none, or if they were measured on other data."""
    path = root / BASELINES_NAME
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("data_manifest") != data_manifest:
        return {}
    return {str(name): float(value) for name, value in content["values"].items()}
