"""What was measured of nodes: one JSON object per node and metric in each line, versioned; SuperBench's results are read too."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from analysis.fleet.superbench import Row, parse_results
from suite.errors import InputError
from suite.files import brief, read_bytes
from suite.log.limits import limits
from suite.machine.node_samples import Better, Sample

_LESS = re.compile(r"time|latency|overhead|cost|_s\b|_ms\b|_us\b", re.IGNORECASE)
_RANK = re.compile(r":(\d+)$")


@dataclass(frozen=True)
class Metric:
    """One metric of the nodes of one hardware: samples by node, and why nodes have none. ``bound``: the worst value allowed."""

    name: str
    hardware: str
    unit: str
    better: Better
    samples: dict[str, tuple[float, ...]]
    failed: dict[str, str] = field(default_factory=dict)
    bound: float | None = None


def read_samples(path: Path) -> list[Sample]:
    """Read a file of samples, all *.jsonl of a folder, or SuperBench's results.jsonl. InputError names the line and the field."""
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise InputError(f"{path}: no *.jsonl in it: expected what mlhpc preflight node wrote")
        return [sample for file in files for sample in read_samples(file)]
    content = read_bytes(path, limits().events)
    lines = [(number, line) for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
    if not lines:
        raise InputError(f"{path}: no sample: expected a JSON object in each line")
    try:
        first = json.loads(lines[0][1])
    except (ValueError, RecursionError):
        first = None
    if isinstance(first, dict) and "node" in first and "metric" not in first and "values" not in first:
        return from_superbench(parse_results(path, content))
    found = []
    for number, line in lines:
        try:
            found.append(Sample.model_validate_json(line))
        except ValidationError as error:
            problem = error.errors()[0]
            field = ".".join(map(str, problem["loc"])) or "the line"
            raise InputError(f"{path}:{number}: {field} = {brief(problem['input'])}: {problem['msg']}") from None
    return found


def from_superbench(nodes: dict[str, dict[str, float]]) -> list[Sample]:
    """SuperBench's results as samples: the ranks of a node are its repetitions. Return codes and what is not positive is left out.

    Names with time, latency, overhead or cost are better when less, as in its rule files.
    """
    return [sample for node, row in nodes.items() for sample in _of_row(node, row)]


def by_metric(samples: Iterable[Sample]) -> list[Metric]:
    """Group samples by hardware and metric. InputError if a node has a metric twice, or units or directions differ."""
    found: dict[tuple[str, str], Metric] = {}
    for sample in samples:
        key = sample.hardware, sample.metric
        fresh = Metric(sample.metric, sample.hardware, sample.unit, sample.better, {}, bound=sample.bound)
        metric = found.setdefault(key, fresh)
        if (metric.unit, metric.better) != (sample.unit, sample.better):
            raise InputError(
                f"{sample.node}: {sample.metric} in {sample.unit!r}, {sample.better} is better; "
                f"another node has {metric.unit!r}, {metric.better}"
            )
        if sample.node in metric.samples or sample.node in metric.failed:
            raise InputError(f"{sample.node}: {sample.metric} is there twice")
        if sample.failed:
            metric.failed[sample.node] = sample.failed
        else:
            metric.samples[sample.node] = sample.values
    return [found[key] for key in sorted(found)]


def _of_row(node: str, row: Row) -> list[Sample]:
    ranks: dict[str, list[float]] = {}
    for name, value in row.items():
        short = _RANK.sub("", name)
        if not short.endswith("return_code") and math.isfinite(value) and value > 0.0:
            ranks.setdefault(short, []).append(value)
    return [
        Sample(node=node, metric=name, better="less" if _LESS.search(name) else "more", values=tuple(values))
        for name, values in ranks.items()
    ]
