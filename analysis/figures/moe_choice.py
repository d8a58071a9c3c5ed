"""Figure: which r, overlap degree and all-to-all the fitted machine asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.drawing.axes import BLUE, GREEN, GREY, INK, ORANGE, clip, panels
from analysis.network.fit import Fit, best_choice
from analysis.network.intervals import Interval, bounded_ranks, gain_interval, layer_interval
from analysis.study import Study
from suite.performance.cost_model import layer_s

TITLE = "MoE layer: which r, degree and all-to-all win"
CAPTION = (
    "The fastest way to execute the measured layer by the fitted model, for ranks (experts grow with them) and for "
    "the rows "
    "each token becomes, k·f: top-k times the capacity that the load needs. r = 0 (blue) gathers all weights, r = 1 "
    "(green) "
    "moves each row once, r > 1 (orange) moves copies instead of weights; d is the overlap degree; below, the gain "
    "over r = 1, "
    "d = 1, linear. Rows marked * are extrapolated to twice the measured ranks; their gains have 90 % intervals, which "
    "hold if no switch level begins there."
)
LOADS = (0.25, 1.0, 2.0, 4.0, 8.0, 16.0)


def table(study: Study) -> pd.DataFrame:
    """The choice and its gain by ranks and load."""
    return pd.DataFrame([row for fit in study.fitted_networks() for row in _rows(fit)])


def answer(study: Study) -> str:
    """How often each r wins on the measured grids and beyond."""
    frame = table(study)
    sentences = []
    for name, rows in frame.groupby("sweep", sort=False):
        counts = Counter(rows["r"])
        wins = ", ".join(f"r {r} in {count}" for r, count in sorted(counts.items()))
        flat = (rows["degree"] == 1).sum()
        sentences.append(
            f"{clip(name)}: of {len(rows)} cases {wins}; no overlap is best in {flat}; 2DH in "
            f"{(rows['algorithm'] == '2dh').sum()}"
        )
    return "; ".join(sentences)


def draw(study: Study) -> Figure:
    """A grid of words per sweep."""
    frame = table(study)
    groups = list(frame.groupby("sweep", sort=False))
    most = max(rows["ranks"].nunique() for _, rows in groups)
    figure, axes = panels(len(groups), 1, 1.0 + 0.5 * most)
    for (name, rows), axis in zip(groups, axes, strict=True):
        ranks = sorted(rows["ranks"].unique())
        for row in rows.to_dict("records"):
            x, y = LOADS.index(row["k f"]), ranks.index(row["ranks"])
            colour = BLUE if row["r"] == 0 else GREEN if row["r"] == 1 else ORANGE
            axis.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, alpha=0.28, edgecolor=GREY, linewidth=0.6)
            )
            how = f"r {row['r']}" if row["r"] == 0 else f"r {row['r']} · d {row['degree']} · {row['algorithm']}"
            axis.text(x, y, f"{how}\n{_gain(row)}", ha="center", va="center", color=INK, linespacing=1.15)
        axis.set_xlim(-0.5, len(LOADS) - 0.5)
        axis.set_ylim(-0.5, len(ranks) - 0.5)
        axis.grid(visible=False)
        axis.set_xticks(range(len(LOADS)), [f"{load:g}" for load in LOADS])
        beyond = dict(zip(rows["ranks"], rows["extrapolated"], strict=True))
        axis.set_yticks(range(len(ranks)), [f"{n:,}{' *' if beyond[n] else ''}" for n in ranks])
        axis.set_title(clip(name, 50))
        axis.set_xlabel("rows per token, k·f")
        axis.set_ylabel("ranks")
    return figure


def _gain(row: Mapping[Hashable, Any]) -> str:
    return (
        Interval(row["gain"], row["gain low"], row["gain high"]).words("x")
        if row["extrapolated"]
        else f"{row['gain']:.2f}x"
    )


def _rows(fit: Fit) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for ranks in sorted({layer.ranks for layer in fit.sweep.layers} | set(bounded_ranks(fit))):
        base = fit.layer_shape(ranks)
        for load in LOADS:
            shape = replace(base, capacity_factor=load / base.top_k)
            best = best_choice(fit, shape, ranks)
            interval = layer_interval(fit, ranks, best.seconds)
            plain = layer_s(shape, fit.network, ranks, fit.flops_per_s, r=1, degree=1, algorithm="linear")
            gain = gain_interval(fit, ranks, plain, best.seconds)
            rows.append(
                {
                    "sweep": fit.sweep.name,
                    "ranks": ranks,
                    "extrapolated": ranks > fit.sweep.ranks,
                    "k f": load,
                    "r": best.r,
                    "degree": best.degree,
                    "algorithm": best.algorithm,
                    "model [s]": best.seconds,
                    "low [s]": interval.low if ranks > fit.sweep.ranks else None,
                    "high [s]": interval.high if ranks > fit.sweep.ranks else None,
                    "gain": gain.value,
                    "gain low": gain.low if ranks > fit.sweep.ranks else None,
                    "gain high": gain.high if ranks > fit.sweep.ranks else None,
                }
            )
    return rows
