"""Figure: time to train against compute units, with lines of equal cost."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.drawing import CYCLE, GREY, INK, MARKERS, clip, panels
from analysis.study import NotAnswerableError, Study

TITLE = "Time and machine size"
QUESTION = "How fast is a result for the machine it took, and what did it cost?"
CAPTION = (
    "One panel per benchmark and size. A small dot is a run that reached the target, the large sign is the score "
    "(the mean, drawn hollow, where there is no score). Colour and sign tell the accelerator, or the processor where "
    "there is none. Dashed lines are equal cost in unit hours. Throughput mode, where many runs share a machine, is "
    "left out. Rounds with other rules or data stand in one panel but are not ranked."
)
ORDER = 15


def table(study: Study) -> pd.DataFrame:
    """Score, units and cost by result."""
    frame = _shown(study)
    return pd.DataFrame(
        {
            "benchmark": frame["benchmark"],
            "size": frame["size"],
            "label": frame["label"],
            "division": frame["division"],
            "device": frame["device"],
            "compute units": frame["units"],
            "score [min]": frame["score_s"] / 60,
            "mean of runs [min]": frame["run_s.mean"] / 60,
            "n": frame["n_averaged"],
            "cost [unit hours]": frame["unit_hours"],
        }
    ).reset_index(drop=True)


def draw(study: Study) -> Figure:
    """Log-log panels; the legend is shared."""
    frame = _shown(study)
    looks = {
        device: (CYCLE[place % len(CYCLE)], MARKERS[place % len(MARKERS)])
        for place, device in enumerate(sorted(frame["device"].unique()))
    }
    classes = list(frame.groupby(["benchmark", "size"], sort=True))
    figure, axes = panels(len(classes), min(2, len(classes)), 4.2, extra_in=0.3 * -(-len(looks) // 3))
    for (key, rows), axis in zip(classes, axes, strict=True):
        for row in rows.to_dict("records"):
            colour, marker = looks[row["device"]]
            runs = study.runs_of(row["group"]).query("converged")["run_s"].to_numpy(float) / 60
            axis.plot(np.full(len(runs), row["units"]), runs, ".", color=colour, alpha=0.45, markersize=4)
            scored = pd.notna(row["score_s"])
            axis.plot(
                [row["units"]],
                [(row["score_s"] if scored else row["run_s.mean"]) / 60],
                marker,
                color=colour,
                markersize=9,
                markerfacecolor=colour if scored else "none",
                linestyle="none",
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        _frame(axis, rows)
        axis.set_title(clip(f"{key[0]} · size {key[1]}", 50))
        axis.set_xlabel("compute units")
        axis.set_ylabel("time to train [min]")
    for device, (colour, marker) in looks.items():
        axes[0].plot([], [], marker, color=colour, linestyle="none", markersize=9, label=clip(device, 40))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(looks)))
    return figure


def _frame(axis: Axes, rows: pd.DataFrame) -> None:
    """Limits around the data, plain numbers on the axes, and the lines of equal cost that cross the frame."""
    units, minutes = rows["units"].to_numpy(float), rows["run_s.mean"].to_numpy(float) / 60
    left, right = units.min() / 1.6, units.max() * 1.6
    low, high = minutes.min() / 1.9, minutes.max() * 1.9
    axis.set_xlim(left, right)
    axis.set_ylim(low, high)
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 200 else (1.0, 2.0, 5.0)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    for formatted in (axis.xaxis, axis.yaxis):
        formatted.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for power in range(-9, 12):
        cost = 10.0**power  # unit hours
        if left * low < cost * 60 < right * high:
            axis.plot([left, right], [cost * 60 / left, cost * 60 / right], "--", color=GREY, linewidth=0.8, zorder=0)
            at = min(right, cost * 60 / low) / 1.05
            axis.text(
                at, max(cost * 60 / at, low), f"{cost:g} unit h ", color=INK, ha="right", va="bottom", fontsize=11
            )


def _shown(study: Study) -> pd.DataFrame:
    frame = study.results[(study.results["mode"] == "strong") & study.results["units"].notna()]
    frame = frame[frame["run_s.mean"].notna()]
    frame = frame[frame.groupby(["benchmark", "size"])["group"].transform("size") > 1]
    if frame.empty:
        raise NotAnswerableError("two time-to-train results of one benchmark and size with known compute units")
    return frame
