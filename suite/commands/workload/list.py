"""`mlhpc workload list`: prints the installed workloads with their sizes and targets. Reads cards only."""

from __future__ import annotations

import json
from typing import Any

import click

from mlhpc.suite.card import read_reference_points
from mlhpc.suite.cli.options import JSON, card_option, format_option
from mlhpc.suite.descriptor import Descriptor, load_descriptor, load_descriptors
from mlhpc.suite.files import print_line, render_bytes


@click.command(
    name="list",
    epilog="""\b
Examples:
  mlhpc workload list
  mlhpc workload list cosmoflow --format json
""",
)
@click.argument("workload", required=False)
@card_option
@format_option()
def list_(workload: str | None, style: str) -> None:
    """List workloads: sizes, targets, required runs, data sizes.

    WORKLOAD shows only that one. Reads cards (metric, target and rules of a workload); imports no training code.
    """
    chosen = [load_descriptor(workload)] if workload else list(load_descriptors().values())
    if style == JSON:
        print_line(json.dumps([convert_to_data(item) for item in chosen], indent=2))
        return
    for number, item in enumerate(chosen):
        print_line("\n" * (number > 0) + "\n".join(render_workload(item)))


def list_configs(item: Descriptor) -> list[str]:
    """List the names of the configs that a workload ships."""
    return sorted(path.stem for path in (item.folder / "config").glob("*.yaml"))


def convert_to_data(item: Descriptor) -> dict[str, Any]:
    """Convert one workload to data for --format json."""
    card = item.card()
    return {
        "workload": card.workload,
        "mlperf_name": card.mlperf_name,
        "title": card.title,
        "domain": card.domain,
        "reference": card.reference,
        "configs": list_configs(item),
        "sizes": {
            name: {
                "description": size_card.description,
                "metric": size_card.metric_name,
                "threshold": size_card.threshold,
                "direction": size_card.direction,
                "required_runs": size_card.required_runs,
                "train_samples": size_card.train_samples,
                "eval_samples": size_card.eval_samples,
                "model_parameters": size_card.model_parameters,
                "training_flops_per_sample": size_card.training_flops_per_sample,
                "data_bytes": size_card.data_bytes,
                "reference_epochs": [point.mean for point in _read_points(item, name)],
            }
            for name, size_card in card.sizes.items()
        },
    }


def render_workload(item: Descriptor) -> list[str]:
    """Render one workload as lines."""
    card = item.card()
    rows = [("size", "target", "runs", "samples", "parameters", "data", "what it is for")]
    for name, size_card in card.sizes.items():
        relation = "<=" if size_card.direction == "min" else ">="
        rows.append(
            (
                name,
                f"{relation} {size_card.threshold:g}",
                str(size_card.required_runs),
                f"{size_card.train_samples:,}",
                f"{size_card.model_parameters:,}",
                render_bytes(size_card.data_bytes),
                size_card.description,
            )
        )
    # The seventh column is a sentence and needs no padding.
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    table = [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True)).rstrip()
        for row in rows
    ]
    # All sizes have one metric as a rule; each is named once.
    metrics = "; ".join(dict.fromkeys(size_card.metric_name for size_card in card.sizes.values()))
    title = f"{card.workload}  {card.title} ({card.domain}), measured by {metrics}"
    return [title, *table] if item.implementation else [title, *table, f"  card only: {item.card_path}"]


def _read_points(item: Descriptor, size: str) -> list[Any]:
    points = read_reference_points(item.folder, size)
    return [point for point in points.points if point.epochs] if points else []
