"""Figure: where the two-level all-to-all overtakes the linear one."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.network.fit import EXTRAPOLATED_RANKS, Fit, crossover_bytes
from analysis.network.sweep import KIB, MIB
from analysis.page.drawing import CYCLE, INK, MARKERS, clip, loglog, panels
from analysis.study import Study
from suite.performance.cost_model import all_to_all

TITLE = "2DH against the linear all-to-all"
CAPTION = (
    "Time of the linear all-to-all divided by that of 2DH: above 1, 2DH wins. Signs are medians of the sweep, solid lines the "
    "fitted model on the measured ranks, dashed lines the model on more ranks than were measured."
)
ORDER = 83
SIZES = np.geomspace(2.0**10, 2.0**28, 60)


def table(study: Study) -> pd.DataFrame:
    """The ratio by ranks and bytes, of the model and, where it was measured, of the sweep."""
    return pd.DataFrame([row for fit in study.fitted_networks() for row in _rows(fit)])


def answer(study: Study) -> str:
    """Up to which size 2DH wins."""
    return "; ".join(
        f"{clip(fit.sweep.name)}: "
        + ", ".join(
            f"{ranks:,} ranks{' (extrapolated)' if ranks > fit.sweep.ranks else ''} {_edge(fit, ranks)}"
            for ranks in (fit.sweep.ranks, EXTRAPOLATED_RANKS[-1])
        )
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
        loglog(axis, [SIZES[0] / KIB, SIZES[-1] / KIB], gains.tolist())
        axis.axhline(1.0, color=INK, linewidth=0.9, linestyle=":")
        for (ranks, own), colour, marker in zip(rows.groupby("ranks", sort=True), CYCLE * 3, MARKERS * 3, strict=False):
            beyond = bool(own["extrapolated"].iloc[0])
            own = own.sort_values("bytes per rank")
            axis.plot(
                own["bytes per rank"] / KIB, own["model, linear / 2DH"], "--" if beyond else "-",
                color=colour, linewidth=1.4, label=f"{ranks:,} ranks" + (", extrapolated" if beyond else ""),
            )  # fmt: skip
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


def _edge(fit: Fit, ranks: int) -> str:
    edge = crossover_bytes(fit.network, ranks)
    return (
        "2DH never wins"
        if edge is None
        else f"2DH wins up to {_digits(edge / MIB, 2 if ranks > fit.sweep.ranks else 3)} MiB per rank"
    )


def _digits(value: float, digits: int) -> str:
    return f"{float(f'{value:.{digits}g}'):,g}"


def _rows(fit: Fit) -> list[dict[str, object]]:
    medians = {(m.ranks, m.size_bytes, m.algorithm): m.seconds for m in fit.sweep.measurements}
    across = {m.ranks for m in fit.sweep.measurements if m.ranks > m.ranks_per_node}
    rows: list[dict[str, object]] = []
    for ranks in sorted(across | set(EXTRAPOLATED_RANKS)):
        measured = {size: seconds for (n, size, name), seconds in medians.items() if n == ranks and name == "linear"}
        for size in sorted({*SIZES.tolist(), *measured}):
            linear, two_level = (all_to_all(fit.network, ranks, size, name).total_s for name in ("linear", "2dh"))
            other = medians.get((ranks, size, "2dh"))
            rows.append(
                {
                    "sweep": fit.sweep.name,
                    "ranks": ranks,
                    "extrapolated": ranks > fit.sweep.ranks,
                    "bytes per rank": size,
                    "model, linear / 2DH": linear / two_level,
                    "measured, linear / 2DH": measured[size] / other if other and size in measured else None,
                }
            )
    return rows
