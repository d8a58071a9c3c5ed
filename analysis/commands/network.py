"""The command `mlhpc network`: fit a machine's links to all-to-all sweeps and render the fit as text."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from analysis.network.fit import (
    EXTRAPOLATED_RANKS,
    Fit,
    best_choice,
    crossover_bytes,
    fit_sweep,
    predicted_layer_s,
    typical_error,
)
from analysis.network.paper import paper_rows
from analysis.network.sweep import MIB, Layer, LayerRun, read_sweep
from suite.cli.options import JSON, format_option
from suite.files import print_line, print_progress
from suite.performance.cost_model import ALGORITHMS

HELP_GROUP = "Machine"
HELP_ORDER = 5


@click.command(
    epilog="""\b
Examples:
  srun -n 64 mlhpc moe --sweep-network -o sweep.json
  mlhpc network sweep.json
  mlhpc network --paper
  mlhpc report runs/mine sweep.json
""",
)
@click.argument("sweeps", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--paper", is_flag=True, help="What the model says of the numbers of Tutel's paper.")
@format_option()
def network(sweeps: tuple[Path, ...], paper: bool, style: str) -> None:
    """Fit a machine's links to all-to-all sweeps, say how wrong the fit is, and extrapolate the MoE layer to many ranks."""
    if not sweeps and not paper:
        raise click.UsageError("give a sweep (mlhpc moe --sweep-network -o FILE) or --paper")
    fits = []
    for number, path in enumerate(sweeps, start=1):
        sweep = read_sweep(path)
        print_progress(f"{path}: fitting, {number} of {len(sweeps)}", error=True)
        fits.append(fit_sweep(sweep))
    if style == JSON:
        document = {"version": 1, "fits": [fit_data(fit) for fit in fits]}
        document |= {"paper": [asdict(row) for row in paper_rows()]} if paper else {}
        print_line(json.dumps(document, indent=1))
        return
    for fit in fits:
        print_line("\n".join(fit_lines(fit)))
    if paper:
        print_line("\n".join(paper_lines()))


def fit_data(fit: Fit) -> dict[str, Any]:
    """A fit as data: parameters in s and B/s, relative errors by algorithm, and what is extrapolated (seconds, bytes)."""
    best = {ranks: best_choice(fit, fit.layer_shape(ranks), ranks) for ranks in EXTRAPOLATED_RANKS}
    return {
        "sweep": fit.sweep.describe(),
        "ranks": fit.sweep.ranks,
        "network": asdict(fit.network),
        "r_squared": fit.r_squared,
        "errors": [
            {"of": title, "algorithm": algorithm, "median": median, "largest": largest, "n": n}
            for title, algorithm, median, largest, n in _errors(fit)
        ],
        "extrapolated": [
            {"ranks": ranks, "crossover_bytes": crossover_bytes(fit.network, ranks)} | asdict(best[ranks])
            for ranks in EXTRAPOLATED_RANKS
        ],
    }


def fit_lines(fit: Fit) -> list[str]:
    """Render a fit: parameters, errors by algorithm, the layer measured and predicted, and the extrapolation."""
    return [
        fit.sweep.describe(),
        *_parameter_lines(fit),
        *_error_lines(fit),
        *(f"  {_layer_line(layer, fit)}" for layer in fit.sweep.layers),
        f"  extrapolated from {fit.sweep.ranks} ranks, not measured:",
        *(f"    {_extrapolation_line(fit, ranks)}" for ranks in EXTRAPOLATED_RANKS),
    ]


def _parameter_lines(fit: Fit) -> list[str]:
    links = fit.network
    return [
        f"  launch {1e6 * links.launch_s:.1f} us; inside a node {1e6 * links.intra_latency_s:.1f} us per message, "
        f"{links.intra_bandwidth / 1e9:.3g} GB/s; across {1e6 * links.inter_latency_s:.1f} us, "
        f"{links.inter_bandwidth / 1e9:.3g} GB/s, in 2DH {1e6 * links.two_level_latency_s:.1f} us; "
        f"copies {links.memory_bandwidth / 1e9:.3g} GB/s (measured); a linear all-to-all loses {100 * links.congestion:.0f} % "
        f"per doubling above {links.congestion_from} ranks" + ("" if links.congestion else " (not seen on so few)"),
        f"  R2 of log seconds {fit.r_squared:.3f} over {len(fit.fitted)} fitted all-to-alls",
    ]


def _error_lines(fit: Fit) -> list[str]:
    return [
        f"  error, {title}, {algorithm:6s}: median {100 * median:.0f} %, largest {100 * largest:.0f} % (n = {n})"
        for title, algorithm, median, largest, n in _errors(fit)
    ]


def _errors(fit: Fit) -> Iterator[tuple[str, str, float, float, int]]:
    """What was compared, the algorithm, the median and largest relative error, and of how many."""
    for title, compared in (
        ("fitted", fit.fitted),
        ("sizes left out", fit.held_out),
        ("largest grid from smaller ones", fit.next_grid),
    ):
        for algorithm in ALGORITHMS:
            chosen = [item for item in compared if item.measurement.algorithm == algorithm]
            if chosen:
                median, largest = typical_error(chosen)
                yield title, algorithm, median, largest, len(chosen)


def _layer_line(layer: Layer, fit: Fit) -> str:
    links = fit.grid_network(layer.ranks)
    pairs = [
        (run, predicted_layer_s(layer, links, run.r, run.degree, run.algorithm)) for run in layer.runs if run.seconds
    ]
    errors = [abs(model / run.seconds - 1) for run, model in pairs]
    fastest, predicted = min(pairs, key=lambda pair: pair[0].seconds)[0], min(pairs, key=lambda pair: pair[1])[0]
    return (
        f"layer on {layer.ranks} ranks, predicted against measured, {len(pairs)} ways: error median "
        f"{100 * statistics.median(errors):.0f} %, largest {100 * max(errors):.0f} %; fastest measured {_settings(fastest)} "
        f"({1e3 * fastest.seconds:.1f} ms), the predicted best {_settings(predicted)} took {1e3 * predicted.seconds:.1f} ms"
    )


def _settings(run: LayerRun) -> str:
    return f"r {run.r}, degree {run.degree}, {run.algorithm}"


def _extrapolation_line(fit: Fit, ranks: int) -> str:
    best = best_choice(fit, fit.layer_shape(ranks), ranks)
    limit = crossover_bytes(fit.network, ranks)
    wins = "2DH never wins" if limit is None else f"2DH wins up to {limit / MIB:.3g} MiB per rank"
    return (
        f"{ranks:,} ranks: {wins}; the layer fastest with r {best.r}, degree {best.degree}, {best.algorithm}: "
        f"{best.seconds:.3g} s"
    )


def paper_lines() -> list[str]:
    """Render the paper's numbers beside the model's as a table."""
    lines = [f"{'Tutel, arXiv:2206.03382':56s} {'paper':>8s} {'model':>8s} {'error':>7s}"]
    for row in paper_rows():
        paper, model = ("–" if value is None else f"{value:.4g}" for value in (row.paper, row.model))
        error = "" if row.error is None else f"{100 * row.error:+.0f} %"
        lines.append(f"{row.claim:56s} {paper:>8s} {model:>8s} {error:>7s} {row.kind:8s} {row.remark}".rstrip())
    return lines
