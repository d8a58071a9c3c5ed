"""Figure: an MoE layer's time against ranks, one idea of Tutel after the other."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import CYCLE, GREY, INK, MARKERS, clip, loglog, panels
from analysis.network.fit import IDEAS, Fit, ideas_s, measured_ideas_s
from analysis.network.intervals import carried_ranks, layer_interval
from analysis.study import Study

TITLE = "MoE layer: time by idea"
CAPTION = (
    "Forward and backward of the measured layer, tokens and experts growing with the ranks: one-hot masks; rows "
    "sorted by "
    "expert; 2DH where it is faster; the best r; the best overlap degree. Each line keeps what came before. Lines are "
    "the "
    "fitted model's, signs are measured. Right of the dotted line is extrapolation, as far as the data carry, with its "
    "90 % interval; beyond twice the measured ranks the time has a lower end only. Upper ends hold if no switch level "
    "begins beyond the measured ranks."
)


def table(study: Study) -> pd.DataFrame:
    """Predicted and measured seconds by ranks and idea."""
    return pd.DataFrame([row for fit in study.fitted_networks() for row in _rows(fit)])


def answer(study: Study) -> str:
    """What the ideas are worth where it was measured, and what the model says of twice the ranks."""
    sentences = []
    for fit in study.fitted_networks():
        layer = fit.sweep.layers[-1]
        measured = measured_ideas_s(layer)
        gain = measured[IDEAS[1]].seconds / measured[IDEAS[-1]].seconds
        sentences.append(
            f"{clip(fit.sweep.name)}: {gain:.2f}x over linear with r 1 on {layer.ranks} ranks (measured), {_far(fit)}"
        )
    return "; ".join(sentences)


def draw(study: Study) -> Figure:
    """A panel per sweep."""
    frame = table(study)
    fits = study.fitted_networks()
    figure, axes = panels(len(fits), min(2, len(fits)), 4.2)
    for fit, axis in zip(fits, axes, strict=True):
        rows = frame[frame["sweep"] == fit.sweep.name]
        times = pd.concat([rows["model [s]"], rows["measured [s]"]]).dropna()
        loglog(axis, rows["ranks"].tolist(), (1e3 * times).tolist())
        for idea, colour, marker in zip(IDEAS, CYCLE, MARKERS, strict=False):
            own = rows[rows["idea"] == idea]
            axis.plot(own["ranks"], 1e3 * own["model [s]"], color=colour, linewidth=1.4, label=idea)
            beyond = own[own["extrapolated"]]
            low, high = (1e3 * beyond[end].astype(float) for end in ("low [s]", "high [s]"))
            axis.fill_between(beyond["ranks"], low, high, color=colour, alpha=0.15, linewidth=0)
            axis.plot(own["ranks"], 1e3 * own["measured [s]"], marker, color=colour, linestyle="none", markersize=7)
        edge = fit.sweep.ranks * 1.2
        axis.axvline(edge, color=GREY, linestyle=":")
        axis.annotate(
            "extrapolated",
            (edge, 1),
            xycoords=("data", "axes fraction"),
            xytext=(5, -14),
            textcoords="offset points",
            color=INK,
        )
        axis.set_title(clip(fit.sweep.name, 50))
        axis.set_xlabel("ranks")
        axis.set_ylabel("layer, forward and backward [ms]")
        axis.legend()
    return figure


def _far(fit: Fit) -> str:
    carried = carried_ranks(fit)
    if not carried:
        return f"on more than {fit.sweep.ranks:,}: inconclusive"
    ranks = carried[0]  # twice the measured ones: beyond, a time has a lower end only
    fastest = layer_interval(fit, ranks, ideas_s(fit, ranks)[IDEAS[-1]])
    return (
        f"on {ranks:,} the layer takes {fastest.words(' ms', 1e3)} "
        "(extrapolated, 90 %, if no switch level begins there)"
    )


def _rows(fit: Fit) -> list[dict[str, object]]:
    measured = {layer.ranks: measured_ideas_s(layer) for layer in fit.sweep.layers}
    rows: list[dict[str, object]] = []
    for ranks in sorted(set(carried_ranks(fit)) | set(measured)):
        for idea, seconds in ideas_s(fit, ranks).items():
            run = measured.get(ranks, {}).get(idea)
            ends = layer_interval(fit, ranks, seconds).data() if ranks > fit.sweep.ranks else {}
            rows.append(
                {
                    "sweep": fit.sweep.name,
                    "ranks": ranks,
                    "extrapolated": ranks > fit.sweep.ranks,
                    "idea": idea,
                    "model [s]": seconds,
                    "low [s]": ends.get("low"),
                    "high [s]": ends.get("high"),
                    "measured [s]": run.seconds if run else None,
                    "n": run.repeats if run else 0,
                    "error [%]": 100 * (seconds / run.seconds - 1) if run else None,
                }
            )
    return rows
