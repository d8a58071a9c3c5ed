"""Reads measurements of nodes, and what shows whether all nodes are slow: earlier measurements, and ceilings of one
machine.

A file has a JSON object per node and metric in each line. Or it has results of SuperBench (microsoft/superbenchmark):
one JSON object per node and line, with ``node`` and a number for each ``benchmark[:annotation]/metric[:rank]``.
SuperBench's rule files are not read: their criteria are Python code.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from mlhpc.suite.documents import read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import decode_table, read_bytes, render_repr
from mlhpc.suite.log.reader import convert_to_float, read_limits
from mlhpc.suite.machine.facts import Better, Sample, parse_samples
from mlhpc.suite.performance.ceilings_file import Ceilings, Curve

# Metrics with such names are better when less, as in SuperBench's own rule files.
_LESS_IS_BETTER = re.compile(r"time|latency|overhead|cost|_s\b|_ms\b|_us\b", re.IGNORECASE)
_RANK = re.compile(r":(\d+)$")


def parse_results(path: Path, content: bytes) -> dict[str, dict[str, float]]:
    """Parse the content of results.jsonl: metrics by node. InputError names a wrong line, or a node given twice."""
    nodes: dict[str, dict[str, float]] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(
                f"{path}:{number}: {render_repr(line.decode('utf-8', 'replace'))}: expected a JSON object"
            ) from None
        node = row.pop("node", None) if isinstance(row, dict) else None
        if not isinstance(node, str) or not node:
            raise InputError(f"{path}:{number}: field `node` is missing or not text; expected the name of the node")
        if node in nodes:
            raise InputError(f"{path}:{number}: node {node!r} occurs twice; expected one line for each node")
        numbers = {name: convert_to_float(value) for name, value in row.items()}
        nodes[node] = {name: math.nan if value is None else value for name, value in numbers.items()}
    if not nodes:
        raise InputError(f"{path}: the file has no node; expected a JSON object with the field `node` in each line")
    return nodes


def convert_to_samples(nodes: Mapping[str, Mapping[str, float]]) -> list[Sample]:
    """Convert results to samples.

    The ranks of a node are its repetitions. A return code other than 0 is a failure. Of a node with a value that is no
    number above 0 the metric is left out: if others have it, the node is not judged by the ranks that are left.
    """
    found = []
    failed = {name for row in nodes.values() for name, value in row.items() if name.endswith("return_code") and value}
    for node, row in nodes.items():
        ranks: dict[str, list[float]] = {}
        for name, value in row.items():
            metric = _RANK.sub("", name)
            if metric in failed:
                why = "" if not value else "it is no number" if math.isnan(value) else f"it is {value:g}"
                known = () if why else (1.0,)
                found.append(Sample(node=node, metric=metric, better="less", values=known, failed=why, bound=1.0))
            elif not metric.endswith("return_code"):
                ranks.setdefault(metric, []).append(value)
        for metric, values in ranks.items():
            if not all(value > 0.0 for value in values):  # node values are logarithms; NaN is not above 0 either
                continue
            better: Better = "less" if _LESS_IS_BETTER.search(metric) else "more"
            found.append(Sample(node=node, metric=metric, better=better, values=tuple(values)))
    return found


@dataclass(frozen=True)
class Metric:
    """Holds one metric of the nodes of one hardware: samples, or the reason for a failure, by node.

    ``bound`` is the worst value allowed. ``severity`` has nodes that computed something wrong.
    """

    name: str
    hardware: str
    unit: str
    better: Better
    samples: dict[str, tuple[float, ...]]
    failed: dict[str, str] = field(default_factory=dict)
    severity: dict[str, str] = field(default_factory=dict)
    bound: float | None = None


_SEPARATORS = ",;\t|"


def read_table(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Read a CSV file with a head: each row by column, with its place, ``file:line``. InputError names a wrong line.

    The separator is the one that the head has most of. Blanks around cells and the byte order mark are left out.
    """
    try:
        content = read_bytes(path, read_limits().file, given=True)
    except IsADirectoryError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    text = decode_table(path, content, errors="replace")
    lines = text.splitlines(keepends=True)
    above = next((at for at, line in enumerate(lines) if line.strip()), 0)
    head = "".join(lines[above : above + 1])
    rows = csv.reader(lines[above:], delimiter=max(_SEPARATORS, key=head.count), skipinitialspace=True)
    names = [name.strip() for name in next(rows, [])]
    missing = [name for name in columns if name not in names]
    if missing:
        raise InputError(
            f"{path}:{above + 1}: column {', '.join(missing)} is missing; the head is"
            f" {render_repr(head.strip(), longest=120)}; expected the columns {', '.join(columns)}, separated by commas"
        )
    try:
        for cells in rows:
            where = f"{path}:{above + rows.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(names):
                raise InputError(
                    f"{where}: the row has more or fewer cells than the header has columns; expected as many"
                )
            yield where, {name: cell.strip() for name, cell in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise InputError(f"{path}:{above + rows.line_num}: is no row of a CSV file: {error}") from None


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
            f"{path}: the file has no sample; expected a JSON object in each line, as `mlhpc preflight node`"
            " writes them"
        )
    try:
        first = msgspec.json.decode(lines[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if not lines[0].lstrip().startswith(b"{"):
            raise InputError(
                f"{path}:1: {render_repr(lines[0].decode('utf-8', 'replace'), longest=60)} is no JSON object; expected one in each "
                "line, as `mlhpc preflight node` or SuperBench writes them (docs/fleet.md)"
            ) from None
        first = None  # parse_samples names the line and the fault
    # SuperBench has a key for each metric, our samples an object for each metric
    if isinstance(first, dict) and "node" in first and "metric" not in first and "values" not in first:
        if samples := convert_to_samples(parse_results(path, content)):
            return samples
        raise InputError(f"{path}: no node has a metric; expected numbers, as in SuperBench's results.jsonl")
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
                f"another node of this hardware has unit {metric.unit!r} and better = {metric.better}; expected"
                " the same"
            )
        if sample.node in metric.samples or sample.node in metric.failed:
            raise InputError(
                f"node {sample.node}: {sample.metric} occurs twice; expected one line for each node and metric "
                "(`mlhpc preflight judge --again` takes a second measurement)"
            )
        # A node may have failed in a metric that others measured: both are kept apart
        if sample.failed:
            metric.failed[sample.node] = sample.failed
            if sample.severity:
                metric.severity[sample.node] = sample.severity
        else:
            metric.samples[sample.node] = sample.values
    return [found[key] for key in sorted(found)]


def compute_node_value(values: Sequence[float], better: str) -> float:
    """Compute the median logarithm, with the sign that makes more worse."""
    middle = float(np.median(np.log(values)))
    return -middle if better == "more" else middle


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
