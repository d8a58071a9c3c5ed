"""Figure: time to train against compute units, with lines of equal unit hours."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import Diagonals, clip, legend_of, listed, loglog, looks, panels, seconds
from analysis.drawing.labels import name_panels
from analysis.drawing.scatter import (
    PROBLEM,
    label_axes,
    plot_ring,
    plot_sign,
    problems,
    result_table,
    several_per_problem,
)
from analysis.drawing.tips import remember_runs
from analysis.results.extent import PLURAL, with_extent
from analysis.results.names import tasks
from analysis.study import NotAnswerableError, Study

TITLE = "Time and machine size"
CAPTION = (
    "One panel per benchmark and size; the size of a machine is counted in what varies: accelerators, processors, "
    "nodes, cores "
    "or ranks. A small dot is a run that reached the target, the large sign is the score (hollow: the mean, where "
    "there is no "
    "score). A ring marks the open division. Colour and sign tell the accelerator, or the processor where there is "
    "none. Dashed "
    "lines are equal hours of the machine's parts: lower is faster, on a lower dashed line is the same with fewer. "
    "Bold: the "
    "fastest and the one with the fewest hours of a division and of rounds alike, which alone are ranked against each "
    "other. "
    "Names without room are left out, and so is throughput mode, where many runs share a machine."
)


def table(study: Study) -> pd.DataFrame:
    """Score, machine size and hours by result."""
    frame = _shown(study)
    return result_table(
        frame,
        ("label", "division", "device"),
        {
            "machine size": frame["extent"],
            "counts": frame["one"].map(PLURAL),
            "compute units": frame["units"],
            "score [min]": frame["score_s"] / 60,
            "mean of runs [min]": frame["run_s.mean"] / 60,
            "n": frame["n_averaged"],
            "machine hours": frame["hours"],
        },
    )


def answer(study: Study) -> str:
    """The fastest result of each task that has several, and the one with the fewest hours."""
    sentences = []
    for _, short, rows in tasks(_shown(study)):
        if len(rows) < 2:
            continue  # nothing to rank it beside
        scored = rows[rows["score_s"].notna()]
        rows, without = (scored, "") if len(scored) else (rows, ", none with a score")
        fast, few = rows.loc[rows["run_s.mean"].idxmin()], rows.loc[rows["hours"].idxmin()]
        sentences.append(
            f"{short}: fastest {fast['label']} ({seconds(fast['run_s.mean'])}), fewest {few['one']} hours "
            f"{few['label']} ({few['hours']:,.3g} h of {few['device']}){_cheapest(study, rows)}{without}"
        )
    return (
        listed(sentences) or "no two of these results may be ranked against each other: other divisions, rules or data"
    )


def _cheapest(study: Study, rows: pd.DataFrame) -> str:
    """The result that costs least, where the user gave prices."""
    if study.prices is None or rows["cost"].isna().all():
        return ""
    least = rows.loc[rows["cost"].astype(float).idxmin()]
    return f", cheapest {least['label']} ({least['cost']:.3g} {study.prices.unit})"


def draw(study: Study) -> Figure:
    """Log-log panels; the legend is shared."""
    frame = _shown(study)
    signs = looks(frame["device"])
    classes = problems(frame)
    figure, axes = panels(len(classes), min(2, len(classes)), 4.2, extra_in=0.3 * -(-len(signs) // 4))
    named = []
    for (title, rows), axis in zip(classes, axes, strict=True):
        for row in rows.to_dict("records"):
            colour = signs[row["device"]][0]
            runs = study.converged_of(row["group"])["run_s"].astype(float) / 60
            (dots,) = axis.plot(np.full(len(runs), row["extent"]), runs, ".", color=colour, alpha=0.45, markersize=4)
            remember_runs(dots, runs.index)
            plot_sign(axis, row["extent"], _minutes(row), signs[row["device"]], hollow=pd.isna(row["score_s"]))
            if row["division"] == "open":
                plot_ring(axis, row["extent"], _minutes(row), colour, size=15, width=1.0)
        one = rows["one"].iloc[0]
        label_axes(axis, title, PLURAL[one], "time to train [min]")
        loglog(axis, rows["extent"].tolist(), (rows["run_s.mean"] / 60).tolist(), Diagonals("h", 1 / 60))
        best = {part[column].idxmin() for *_, part in tasks(rows) for column in ("run_s.mean", "hours")}
        named.append([(r["extent"], _minutes(r), clip(r["label"], 40), i in best) for i, r in rows.iterrows()])
    legend_of(figure, axes[0], signs)
    name_panels(figure, axes, named)
    return figure


def _minutes(row: Mapping[Hashable, Any] | pd.Series) -> float:
    return float(row["score_s"] if pd.notna(row["score_s"]) else row["run_s.mean"]) / 60


def _shown(study: Study) -> pd.DataFrame:
    frame = study.distinct[study.distinct["mode"] == "strong"]
    frame = several_per_problem(with_extent(frame[frame["run_s.mean"] > 0], PROBLEM))
    if frame.empty:
        raise NotAnswerableError("two time-to-train results of one benchmark and size on machines of known size")
    return frame
