"""Reads the results of SuperBench (microsoft/superbenchmark): one JSON object per node and line.

An object has ``node`` and a number for each ``benchmark[:annotation]/metric[:rank]``. SuperBench's rule files are not
read: their criteria are Python code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_repr
from mlhpc.suite.log.reader import convert_to_float
from mlhpc.suite.machine.facts import Better, Sample

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
        # Values that are no numbers are no metrics
        numbers = {name: convert_to_float(value) for name, value in row.items()}
        nodes[node] = {name: value for name, value in numbers.items() if value is not None}
    if not nodes:
        raise InputError(f"{path}: the file has no node; expected a JSON object with the field `node` in each line")
    return nodes


def convert_to_samples(nodes: Mapping[str, Mapping[str, float]]) -> list[Sample]:
    """Convert results to samples.

    The ranks of a node are its repetitions. Return codes and values <= 0 are left out.
    """
    found = []
    for node, row in nodes.items():
        ranks: dict[str, list[float]] = {}
        for name, value in row.items():
            metric = _RANK.sub("", name)
            # Node values are logarithms, which values up to 0 do not have
            if value > 0.0 and not metric.endswith("return_code"):
                ranks.setdefault(metric, []).append(value)
        for metric, values in ranks.items():
            better: Better = "less" if _LESS_IS_BETTER.search(metric) else "more"
            found.append(Sample(node=node, metric=metric, better=better, values=tuple(values)))
    return found
