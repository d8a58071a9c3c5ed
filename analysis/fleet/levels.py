"""Reads what shows whether all nodes are slow: earlier measurements, and the ceilings of one machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlhpc.analysis.fleet.one_metric import compute_node_value
from mlhpc.analysis.fleet.samples import Metric, read_samples
from mlhpc.suite.documents import read_json_document
from mlhpc.suite.machine.facts import Sample
from mlhpc.suite.performance.ceilings_file import Ceilings, Curve

ORDERS = {"cpu": 512, "cuda": 4096}  # of the products that `preflight node` times
KERNELS = {"cpu": "update", "cuda": "triad"}  # that it times on main memory


def read_history(files: Sequence[Path]) -> Mapping[tuple[str, str], Sequence[Sequence[float]]]:
    """Read earlier node values by (hardware, metric): one list for each measurement.

    A file or folder begins a new measurement if it has a (node, metric) again. A folder without samples is an empty
    history.
    """
    sessions: list[list[Sample]] = []
    seen: set[tuple[str, str]] = set()
    for path in files:
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else (path,):
            samples = [sample for sample in read_samples(file) if sample.values]
            # The files of one measurement have different nodes: `preflight node` writes one for each node
            keys = {(sample.node, sample.metric) for sample in samples}
            if not sessions or keys & seen:
                sessions.append([])
                seen = set()
            sessions[-1] += samples
            seen |= keys
    found: dict[tuple[str, str], list[list[float]]] = {}
    for session in sessions:
        values: dict[tuple[str, str], list[float]] = {}
        for sample in session:
            # With "less" the sign stays, and exp gives the median in the metric's own unit
            value = math.exp(compute_node_value(sample.values, "less"))
            values.setdefault((sample.hardware, sample.metric), []).append(value)
        for key, of_session in values.items():
            found.setdefault(key, []).append(of_session)
    return found


def read_ceilings(path: Path, metrics: Sequence[Metric]) -> tuple[Mapping[tuple[str, str], float], str]:
    """Read from a file of `mlhpc ceilings` the rates that nodes must come near, by (hardware, metric), and a remark.

    The rates are of the same kernels at the same sizes. They hold for hardware of the same name, with as many ranks on
    a node and threads of a rank. If there is no such hardware, the remark says so.
    """
    file = read_json_document(path, Ceilings, "ceilings", 1)
    ranks = f"{file.ranks // file.nodes} ranks of {file.device.threads} threads"
    found = {
        (metric.hardware, metric.name): ceiling
        for metric in metrics
        # The text of `hardware` in a sample contains device, ranks and threads: a node with other ones has other rates
        if ranks in metric.hardware and file.device.name in metric.hardware
        if (ceiling := _ceiling(file, metric.name)) is not None
    }
    return found, "" if found else f"{path}: no node is {file.device.name}, {ranks}: the ceilings were not used"


def _ceiling(file: Ceilings, metric: str) -> float | None:
    """Find the rate of one rank with the kernel and size of a metric.

    Several libraries may have been measured: the slowest counts.
    """
    rates = []
    kind = file.device.type
    for curve in file.curves:
        if metric == f"gemm/{curve.dtype}" and curve.resource == "compute":
            rates += [point.value for point in curve.points if point.x == ORDERS.get(kind)]
        elif metric == "memory/main" and curve.resource == "memory" and curve.mode == KERNELS.get(kind):
            rates.append(_largest(curve))
    return min(rates, default=None)


def _largest(curve: Curve) -> float:
    # At the largest size, which no cache holds
    return max(curve.points, key=lambda point: point.x).value
