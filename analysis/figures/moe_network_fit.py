"""Figure: measured all-to-alls beside the two-level model fitted to them."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.axes import CYCLE, clip, loglog, panels
from analysis.network.fit import Compared, Fit, typical_error
from analysis.network.intervals import all_to_all_band
from analysis.network.sweep import KIB
from analysis.study import Study
from suite.performance.cost_model import ALGORITHMS

TITLE = "All-to-all: measured and fitted"
CAPTION = (
    "Median seconds of the slowest rank by the bytes each rank sends. Full signs went into the fit, hollow ones were "
    "left "
    "out of it; solid lines are the model's linear all-to-all, dashed ones its 2DH. Latency and bandwidth inside and "
    "across "
    "nodes are fitted in log seconds; the bandwidth of copies is measured. Bands are 90 % intervals of the time "
    "without noise."
)


def table(study: Study) -> pd.DataFrame:
    """Measured, predicted, and whether the fit saw it."""
    return pd.DataFrame(
        [
            {
                "sweep": fit.sweep.name,
                "ranks": item.measurement.ranks,
                "ranks per node": item.measurement.ranks_per_node,
                "algorithm": item.measurement.algorithm,
                "bytes per rank": item.measurement.size_bytes,
                "n": item.measurement.repeats,
                "measured [s]": item.measurement.seconds,
                "fastest [s]": item.measurement.fastest_s,
                "slowest [s]": item.measurement.slowest_s,
                "model [s]": item.model_s,
                "error [%]": 100 * item.error,
                "in the fit": fitted,
            }
            for fit in study.fitted_networks()
            for items, fitted in ((fit.fitted, True), (fit.held_out, False))
            for item in items
        ]
    )


def answer(study: Study) -> str:
    """The error where the fit did not look."""
    sentences = []
    for fit in study.fitted_networks():
        middle, worst = typical_error(fit.held_out)
        further = typical_error(fit.next_grid)[0]
        sentences.append(
            f"{clip(fit.sweep.description, 90)}: sizes left out of the fit are missed by {100 * middle:.0f} % "
            "(median; largest "
            f"{100 * worst:.0f} %)"
            + (f", the largest grid by {100 * further:.0f} % when fitted to smaller ones" if fit.next_grid else "")
        )
    return "; ".join(sentences)


def draw(study: Study) -> Figure:
    """A panel per sweep."""
    fits = study.fitted_networks()
    figure, axes = panels(len(fits), min(2, len(fits)), 4.2)
    for fit, axis in zip(fits, axes, strict=True):
        _panel(axis, fit)
    return figure


def _panel(axis: Axes, fit: Fit) -> None:
    measured = (*fit.fitted, *fit.held_out)
    sizes = [item.measurement.size_bytes / KIB for item in measured]
    loglog(axis, sizes, [1e3 * item.measurement.seconds for item in measured])
    reach = np.geomspace(min(sizes), max(sizes), 80)
    for (ranks, per_node), colour in zip(_grids(fit), CYCLE * 3, strict=False):
        for items, face in ((fit.fitted, colour), (fit.held_out, "none")):
            for algorithm, marker in zip(ALGORITHMS, ("o", "s"), strict=True):
                chosen = [item.measurement for item in _of(items, ranks, algorithm)]
                axis.plot(
                    [m.size_bytes / KIB for m in chosen], [1e3 * m.seconds for m in chosen],
                    marker, color=colour, mfc=face, linestyle="none", markersize=6,
                )  # fmt: skip
        for algorithm, line in zip(ALGORITHMS, ("-", "--"), strict=True):
            if algorithm == "2dh" and ranks <= per_node:
                continue  # on one node 2DH is the linear all-to-all
            band = all_to_all_band(fit, ranks, reach * KIB, algorithm)
            model, low, high = (1e3 * curve for curve in (band.value, band.low, band.high))
            axis.fill_between(reach, low, high, color=colour, alpha=0.1, linewidth=0)
            label = f"{ranks} ranks" + (", 2DH" if algorithm == "2dh" else "")
            axis.plot(reach, model, line, color=colour, linewidth=1.2, label=label)
    axis.set_title(clip(fit.sweep.name, 50))
    axis.set_xlabel("sent by each rank [KiB]")
    axis.set_ylabel("all-to-all [ms]")
    axis.legend()


def _grids(fit: Fit) -> list[tuple[int, int]]:
    return sorted({(item.measurement.ranks, item.measurement.ranks_per_node) for item in fit.fitted})


def _of(items: tuple[Compared, ...], ranks: int, algorithm: str) -> list[Compared]:
    return [i for i in items if i.measurement.ranks == ranks and i.measurement.algorithm == algorithm]
