"""Reads measurements of nodes: a JSON object per node and metric in each line, or SuperBench's results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import DecodeError, json

from mlhpc.analysis.fleet.superbench import convert_to_samples, parse_results
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_bytes
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.machine.facts import Better, Sample, parse_samples


@dataclass(frozen=True)
class Metric:
    """Holds one metric of the nodes of one hardware: samples, or the reason for a failure, by node.

    ``bound`` is the worst value allowed.
    """

    name: str
    hardware: str
    unit: str
    better: Better
    samples: dict[str, tuple[float, ...]]
    failed: dict[str, str] = field(default_factory=dict)
    bound: float | None = None


def read_samples(path: Path) -> list[Sample]:
    """Read a file of samples, all *.jsonl of a folder, or SuperBench's results.jsonl.

    InputError names the line and the field.
    """
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise InputError(
                f"{path}: the folder has no *.jsonl file; `mlhpc preflight node -o FOLDER` writes one for each node"
            )
        return [sample for file in files for sample in read_samples(file)]
    # One read for both formats: the first line tells which it is
    content = read_bytes(path, read_limits().events)
    lines = [line for line in content.splitlines() if line.strip()]
    if not lines:
        raise InputError(
            f"{path}: the file has no sample; expected a JSON object in each line, as `mlhpc preflight node` writes them"
        )
    try:
        first = json.decode(lines[0])
    except (DecodeError, UnicodeDecodeError, RecursionError):
        # parse_samples names the line and the fault
        first = None
    # SuperBench has a key for each metric, our samples an object for each metric
    if isinstance(first, dict) and "node" in first and "metric" not in first and "values" not in first:
        return convert_to_samples(parse_results(path, content))
    return parse_samples(path, content)


def group_by_metric(samples: Iterable[Sample]) -> list[Metric]:
    """Group samples by hardware and metric. InputError if a node has a metric twice, or units or directions differ."""
    found: dict[tuple[str, str], Metric] = {}
    for sample in samples:
        key = sample.hardware, sample.metric
        fresh = Metric(sample.metric, sample.hardware, sample.unit, sample.better, {}, bound=sample.bound)
        metric = found.setdefault(key, fresh)
        if (metric.unit, metric.better) != (sample.unit, sample.better):
            raise InputError(
                f"node {sample.node}: {sample.metric} has unit {sample.unit!r} and better = {sample.better}; "
                f"another node of this hardware has unit {metric.unit!r} and better = {metric.better}; expected the same"
            )
        if sample.node in metric.samples or sample.node in metric.failed:
            raise InputError(
                f"node {sample.node}: {sample.metric} occurs twice; expected one line for each node and metric "
                "(`mlhpc preflight judge --again` takes a second measurement)"
            )
        # A node may have failed in a metric that others measured: both are kept apart
        if sample.failed:
            metric.failed[sample.node] = sample.failed
        else:
            metric.samples[sample.node] = sample.values
    return [found[key] for key in sorted(found)]
