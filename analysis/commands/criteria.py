"""The command `mlhpc preflight criteria`: the most typical node's sample of each metric, and the nodes that are unlike it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from analysis.fleet.criteria import ALPHA, learn
from analysis.fleet.samples import by_metric, read_samples
from suite.cli.options import JSON, format_option
from suite.files import print_line, printable


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--alpha",
    type=click.FloatRange(0.01, 0.9999),
    default=ALPHA,
    show_default=True,
    help="Least similarity to the criterion of a node that is not left out.",
)
@format_option()
def criteria(files: tuple[Path, ...], alpha: float, style: str) -> None:
    """Learn the criterion of each metric from the samples in FILES as Anubis does, with its repeatability.

    No verdict: similarity has no stated rate of false alarms (`mlhpc preflight judge` has).
    """
    metrics = by_metric(sample for path in files for sample in read_samples(path))
    found = [(metric, learn(metric.samples, more_is_better=metric.better == "more", alpha=alpha)) for metric in metrics]
    if style == JSON:
        each = [{"metric": m.name, "hardware": m.hardware} | asdict(c) | {"usable": c.usable} for m, c in found]
        print_line(json.dumps({"version": 1, "criteria": each}, indent=1))
        return
    for metric, criterion in found:
        kind = f" on {metric.hardware}" if metric.hardware else ""
        repeats = "not known of one node" if criterion.repeatability is None else f"{criterion.repeatability:.4f}"
        text = f"{metric.name}{kind}: criterion of {criterion.node}; repeatability {repeats}; {len(criterion.kept)} nodes alike"
        if criterion.left_out:
            text += f"; worse and less similar than {alpha:g}: {', '.join(criterion.left_out)}"
        if not criterion.usable:
            text += "; not usable: most nodes are left out, or those that are kept differ more than that"
        print_line(printable(text))
