"""The forms in which results go to other tools, each as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from suite.compliance.exchange.merit import figures, render_lines, result_names
from suite.compliance.exchange.result_document import result_documents
from suite.compliance.result import Result


def render_jsonl(scored: Sequence[Result]) -> str:
    """Render one result.schema.json document a line."""
    return "".join(json.dumps(document) + "\n" for document in result_documents(scored))


def render_bencher(scored: Sequence[Result]) -> str:
    """Render as Bencher Metric Format: by result and figure a value with its interval. Numbers that only count runs are left out.

    https://bencher.dev/docs/reference/bencher-metric-format/
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, item in zip(result_names(scored), scored, strict=True):
        measures = found.setdefault(name, {})
        for figure in figures(item):
            if figure.better is not None:
                ends = {"lower_value": figure.low, "upper_value": figure.high}
                measures[figure.key] = {"value": figure.value} | {
                    key: end for key, end in ends.items() if end is not None
                }
    return json.dumps(found, indent=1) + "\n"


def render_superbench(scored: Sequence[Result]) -> str:
    """Render as SuperBench's results.jsonl: a line for each system, as if it were a node, with ``benchmark/figure``."""
    rows: dict[str, dict[str, Any]] = {}
    for name, item in zip(result_names(scored), scored, strict=True):
        system, _, rest = name.partition("/")
        row = rows.setdefault(system, {"node": system})
        row |= {f"mlhpc-{rest.replace('/', '-')}/{figure.key}": figure.value for figure in figures(item)}
    return "".join(json.dumps(row) + "\n" for row in rows.values())


RESULT_FORMS: dict[str, Callable[[Sequence[Result]], str]] = {
    "fom": render_lines,
    "jsonl": render_jsonl,
    "bencher": render_bencher,
    "superbench": render_superbench,
}
