"""`mlhpc moe fit`: fits a machine's links to all-to-all sweeps and renders the fits as text or JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mlhpc.plugins.network.fit import (
    CONFIDENCE,
    Fit,
    choose_execution,
    compute_median_max_error,
    fit_sweep,
    predict_layer_s,
)
from mlhpc.plugins.network.intervals import (
    BOUNDED_GROWTH,
    compute_layer_interval,
    find_crossover,
    list_supported_ranks,
    predict_all_to_all_band,
)
from mlhpc.plugins.network.sweep import KIB, MIB, Layer, LayerRun, read_sweep
from mlhpc.suite.cli.options import JSON
from mlhpc.suite.files import print_line, print_progress
from mlhpc.suite.performance.cost_model import ALGORITHMS

CONDITION = (
    "if a switch level begins beyond the measured ranks, times are longer: lower ends of times still hold; "
    "upper ends, ratios and crossovers do not"
)


def print_fits(sweeps: Sequence[Path], style: str) -> None:
    """Fit each sweep and print the fits."""
    fits = []
    for number, path in enumerate(sweeps, start=1):
        sweep = read_sweep(path)
        print_progress(f"{path}: fitting, {number} of {len(sweeps)}", error=True)
        fits.append(fit_sweep(sweep))
    if style == JSON:
        print_line(json.dumps({"version": 1, "fits": [convert_fit_to_dict(fit) for fit in fits]}, indent=1))
        return
    for fit in fits:
        print_line("\n".join(render_fit(fit)))


def convert_fit_to_dict(fit: Fit) -> dict[str, Any]:
    """Render a fit as data: parameters in s and B/s, relative errors by algorithm, extrapolated seconds and bytes."""
    links = asdict(fit.network)
    return {
        "sweep": fit.sweep.description,
        "ranks": fit.sweep.ranks,
        # Without a switch of protocols its size is infinite, which JSON cannot hold
        "network": links | {"rendezvous_from": links["rendezvous_from"] if fit.network.rendezvous_s else None},
        "r_squared": fit.r_squared if math.isfinite(fit.r_squared) else None,
        "errors": [
            {"of": title, "algorithm": algorithm, "median": median, "largest": largest, "n": n}
            for title, algorithm, median, largest, n in _errors(fit)
        ],
        "confidence": CONFIDENCE,
        "condition": CONDITION,
        "extrapolated": [_convert_extrapolation(fit, ranks) for ranks in list_supported_ranks(fit)],
    }


def _convert_extrapolation(fit: Fit, ranks: int) -> dict[str, Any]:
    """Render the best choice on ``ranks`` ranks, each number with its interval. An end that is not known is null."""
    # JSON has no infinity and no NaN: a bound that is not known is null
    best, limit = choose_execution(fit, fit.layer_shape(ranks), ranks), asdict(find_crossover(fit, ranks))
    limit |= {key: None for key in ("value", "low", "high") if not math.isfinite(limit[key])}
    size = fit.layer_shape(ranks).dispatch_bytes
    bands = {name: predict_all_to_all_band(fit, ranks, np.array([size]), name).at(0) for name in ALGORITHMS}
    return {
        "ranks": ranks,
        "crossover_bytes": limit,
        "all_to_all": {"bytes": size} | {name: interval.data() for name, interval in bands.items()},
        "best": asdict(best) | {"seconds": compute_layer_interval(fit, ranks, best.seconds).data()},
    }


def render_fit(fit: Fit) -> list[str]:
    """Render a fit: parameters, errors by algorithm, the layer measured and predicted, and the extrapolation."""
    return [
        fit.sweep.description,
        *_parameter_lines(fit),
        *_error_lines(fit),
        *(f"  {_layer_line(layer, fit)}" for layer in fit.sweep.layers),
        *_extrapolation_lines(fit),
    ]


def _parameter_lines(fit: Fit) -> list[str]:
    links = fit.network
    return [
        f"  launch {1e6 * links.launch_s:.1f} us; inside a node {1e6 * links.intra_latency_s:.1f} us per message, "
        f"{links.intra_bandwidth / 1e9:.3g} GB/s; across {1e6 * links.inter_latency_s:.1f} us, "
        f"{links.inter_bandwidth / 1e9:.3g} GB/s, in 2DH {1e6 * links.two_level_latency_s:.1f} us; "
        f"copies {links.memory_bandwidth / 1e9:.3g} GB/s (measured)",
        f"  {_describe_rendezvous(fit)}; {_describe_congestion(fit)}",
        f"  R2 of log seconds {fit.r_squared:.3f} over {len(fit.fitted)} fitted all-to-alls",
    ]


def _error_lines(fit: Fit) -> list[str]:
    return [
        f"  error, {title}, {algorithm:6s}: median {100 * median:.0f} %, largest {100 * largest:.0f} % (n = {n})"
        for title, algorithm, median, largest, n in _errors(fit)
    ]


def _errors(fit: Fit) -> Iterator[tuple[str, str, float, float, int]]:
    """Yield what was compared, the algorithm, the median and the largest relative error, and their number."""
    for title, compared in (
        ("fitted", fit.fitted),
        ("sizes left out", fit.held_out),
        ("largest grid from smaller ones", fit.next_grid),
    ):
        for algorithm in ALGORITHMS:
            chosen = [item for item in compared if item.measurement.algorithm == algorithm]
            if chosen:
                median, largest = compute_median_max_error(chosen)
                yield title, algorithm, median, largest, len(chosen)


def _layer_line(layer: Layer, fit: Fit) -> str:
    # A grid with fewer ranks than a node has runs inside one node
    links = fit.grid_network(layer.ranks)
    pairs = [
        (run, predict_layer_s(layer, links, run.r, run.degree, run.algorithm)) for run in layer.runs if run.seconds
    ]
    errors = [abs(model / run.seconds - 1) for run, model in pairs]
    # The choice matters more than the time: how slow is what the model would have chosen?
    fastest, predicted = min(pairs, key=lambda pair: pair[0].seconds)[0], min(pairs, key=lambda pair: pair[1])[0]
    return (
        f"layer on {layer.ranks} ranks, predicted against measured, {len(pairs)} ways: error median "
        f"{100 * statistics.median(errors):.0f} %, largest {100 * max(errors):.0f} %; fastest measured "
        f"{_settings(fastest)} ({1e3 * fastest.seconds:.1f} ms), the predicted best {_settings(predicted)} took "
        f"{1e3 * predicted.seconds:.1f} ms"
    )


def _settings(run: LayerRun) -> str:
    return f"r {run.r}, degree {run.degree}, {run.algorithm}"


def _describe_rendezvous(fit: Fit) -> str:
    links = fit.network
    if not links.rendezvous_s:
        return "no switch of protocols seen"
    return (
        f"messages of {links.rendezvous_from / KIB:.3g} KiB and more take {1e6 * links.rendezvous_s:+.1f} us each "
        "(switch of protocols)"
    )


def _describe_congestion(fit: Fit) -> str:
    links = fit.network
    lost = [(links.congestion, "linear"), (links.two_level_congestion, "2DH")]
    seen = " and ".join(f"{name} loses {100 * share:.0f} %" for share, name in lost if share)
    if not seen:
        return "no congestion that two grids agree on"
    return f"congestion: {seen} per doubling above {links.congestion_from} ranks"


def _extrapolation_lines(fit: Fit) -> list[str]:
    measured, carried = fit.sweep.ranks, list_supported_ranks(fit)
    if not carried:
        return [
            f"  more than {measured:,} ranks: inconclusive: no grid with several nodes could be predicted from a "
            f"smaller one, so how the error grows is not known; sweep more nodes"
        ]
    return [
        f"  extrapolated from {measured:,} ranks, not measured, with {100 * CONFIDENCE:.0f} % intervals; "
        f"beyond {BOUNDED_GROWTH * measured:,} ranks times have lower ends only",
        f"  {CONDITION}",
        *(line for ranks in carried for line in _ranks_lines(fit, ranks)),
        f"    more than {carried[-1]:,} ranks: inconclusive: "
        f"the data carry {carried[-1] // measured} times the measured ranks",
    ]


def _ranks_lines(fit: Fit, ranks: int) -> list[str]:
    shape = fit.layer_shape(ranks)
    best, size = choose_execution(fit, shape, ranks), np.array([shape.dispatch_bytes])
    linear, two_level = (predict_all_to_all_band(fit, ranks, size, name).at(0) for name in ALGORITHMS)
    ratio = predict_all_to_all_band(fit, ranks, size, "ratio").at(0)
    # Beyond twice the measured ranks a ratio has no interval
    compared = f", linear / 2DH {ratio.words()}" if ratio.low else ""
    return [
        f"    {ranks:,} ranks: {find_crossover(fit, ranks).words()}",
        f"      all-to-all of {size[0] / MIB:.3g} MiB per rank: linear {linear.words(' ms', 1e3)}, "
        f"2DH {two_level.words(' ms', 1e3)}{compared}",
        f"      layer, fastest by the model with r {best.r}, degree {best.degree}, {best.algorithm}: "
        f"{compute_layer_interval(fit, ranks, best.seconds).words(' ms', 1e3)}",
    ]
