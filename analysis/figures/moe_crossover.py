"""Figure: where the two-level all-to-all overtakes the linear one."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import CYCLE, INK, MARKERS, clip, loglog, panels
from analysis.network.fit import Fit
from analysis.network.intervals import all_to_all_band, bounded_ranks, crossover
from analysis.network.sweep import KIB
from analysis.study import Study

TITLE = "2DH against the linear all-to-all"
CAPTION = (
    "Time of the linear all-to-all divided by that of 2DH: above 1, 2DH wins. Signs are medians of the sweep, solid "
    "lines the "
    "fitted model on the measured ranks, dashed lines the model on twice as many; bands are 90 % intervals. Those of the "
    "dashed lines hold if no switch level begins beyond the measured ranks."
)
POINTS = 60


def table(study: Study) -> pd.DataFrame:
    """The ratio by ranks and bytes, of the model and, where it was measured, of the sweep."""
    return pd.DataFrame([row for fit in study.fitted_networks() for row in _rows(fit)])


def answer(study: Study) -> str:
    """Up to which size 2DH wins."""
    return "; ".join(
        f"{clip(fit.sweep.name)}: "
        + ", ".join(
            f"{ranks:,} ranks{' (extrapolated)' if ranks > fit.sweep.ranks else ''} {crossover(fit, ranks).words()}"
            for ranks in (fit.sweep.ranks, *bounded_ranks(fit))
        )
        + f"; on more than {(fit.sweep.ranks, *bounded_ranks(fit))[-1]:,} ranks: inconclusive"
        for fit in study.fitted_networks()
    )


def draw(study: Study) -> Figure:
    """A panel per sweep."""
    frame = table(study)
    fits = study.fitted_networks()
    figure, axes = panels(len(fits), min(2, len(fits)), 4.2)
    for fit, axis in zip(fits, axes, strict=True):
        rows = frame[frame["sweep"] == fit.sweep.name]
        gains = pd.concat([rows["model, linear / 2DH"], rows["measured, linear / 2DH"], pd.Series([1.0])]).dropna()
        loglog(axis, [rows["bytes per rank"].min() / KIB, rows["bytes per rank"].max() / KIB], gains.tolist())
        axis.axhline(1.0, color=INK, linewidth=0.9, linestyle=":")
        for (ranks, own), colour, marker in zip(rows.groupby("ranks", sort=True), CYCLE * 3, MARKERS * 3, strict=False):
            beyond = bool(own["extrapolated"].iloc[0])
            own = own.sort_values("bytes per rank")
            axis.plot(
                own["bytes per rank"] / KIB, own["model, linear / 2DH"], "--" if beyond else "-",
                color=colour, linewidth=1.4, label=f"{ranks:,} ranks" + (", extrapolated" if beyond else ""),
            )  # fmt: skip
            axis.fill_between(
                own["bytes per rank"] / KIB, own["low"], own["high"], color=colour, alpha=0.12, linewidth=0
            )
            axis.plot(
                own["bytes per rank"] / KIB,
                own["measured, linear / 2DH"],
                marker,
                color=colour,
                linestyle="none",
                markersize=6,
            )
        axis.set_title(clip(fit.sweep.name, 50))
        axis.set_xlabel("sent by each rank [KiB]")
        axis.set_ylabel("linear / 2DH")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return figure


def _rows(fit: Fit) -> list[dict[str, object]]:
    medians = {(m.ranks, m.size_bytes, m.algorithm): m.seconds for m in fit.sweep.measurements}
    across = {m.ranks for m in fit.sweep.measurements if m.ranks > m.ranks_per_node}
    rows: list[dict[str, object]] = []
    bytes_measured = sorted({m.size_bytes for m in fit.sweep.measurements})
    for ranks in sorted(across | set(bounded_ranks(fit))):
        measured = {size: seconds for (n, size, name), seconds in medians.items() if n == ranks and name == "linear"}
        largest = bytes_measured[-1] * max(1.0, ranks / fit.sweep.ranks)
        sizes = np.array(sorted({*np.geomspace(bytes_measured[0], largest, POINTS).tolist(), *measured}))
        band = all_to_all_band(fit, ranks, sizes, "ratio")
        for i, size in enumerate(sizes.tolist()):
            other = medians.get((ranks, size, "2dh"))
            rows.append(
                {
                    "sweep": fit.sweep.name,
                    "ranks": ranks,
                    "extrapolated": ranks > fit.sweep.ranks,
                    "bytes per rank": size,
                    "model, linear / 2DH": float(band.value[i]),
                    "low": float(band.low[i]),
                    "high": float(band.high[i]),
                    "measured, linear / 2DH": measured[size] / other if other and size in measured else None,
                }
            )
    return rows
