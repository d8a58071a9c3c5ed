"""Figure: throughput mode, models per minute and when each instance ran."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.page.drawing import BLUE, VERMILION, beside, clip, listed, panels
from analysis.page.scatter import PROBLEM, result_table
from analysis.study import NotAnswerableError, Study

TITLE = "Throughput mode"
CAPTION = (
    "Left: models that reached the target per minute, between the first run_start and the last run_stop. Right: every "
    "instance from start to stop, sorted by start; the orange ones did not reach the target. Pruned instances are left out."
)
ORDER = 36


def table(study: Study) -> pd.DataFrame:
    """Models per minute and how full the machine was."""
    frame = study.results[study.results["models_per_min"].notna()]
    if frame.empty:
        raise NotAnswerableError("a throughput-mode result (several instances at once) with a score")
    return result_table(
        frame,
        ("label", "models"),
        {
            "models/min": frame["models_per_min"],
            "time to train all [min]": frame["score_s"] / 60,
            "mean time of one [min]": frame["run_s.mean"] / 60,
            "units of the system": frame["units_described"],
            "units of an instance": frame["units"],
            "models/min per 1000 units": 1000 * frame["models_per_min"] / frame["units_described"],
            "instances running, mean share [%]": 100 * frame["run_s.mean"] / frame["score_s"],
        },
    )


def answer(study: Study) -> str:
    """The most models per minute of each benchmark."""
    rows = table(study).sort_values("models/min", ascending=False).groupby(PROBLEM, sort=True).head(1)
    return listed(
        [
            f"{r['benchmark']} {r['size']}: {r['models/min']:.3g} models/min ({r['label']})"
            for r in rows.to_dict("records")
        ]
    )


def draw(study: Study) -> Figure:
    """Bars over all results, then a Gantt panel per result."""
    frame = table(study)
    rows = study.results[study.results["models_per_min"].notna()].to_dict("records")
    figure, axes = panels(2 * len(rows), 2, 2.4)
    for row, (left, right) in zip(rows, zip(axes[::2], axes[1::2], strict=True), strict=True):
        same = frame[(frame["benchmark"] == row["benchmark"]) & (frame["size"] == row["size"])]
        places = np.arange(len(same))
        values = same["models/min"].to_numpy(float)
        mine = same["label"] == row["label"]
        left.barh(places, values, color=[BLUE if here else "#8A8A8A" for here in mine], height=0.6)
        for place, value in enumerate(values):
            beside(left, value, place, f"{value:.3g}")
        left.set_yticks(places, [clip(label, 30) for label in same["label"]])
        left.set_xlim(0, values.max() * 1.25)
        left.set_xlabel("models/min")
        left.set_title(clip(f"{row['benchmark']} · size {row['size']}", 40))
        runs = study.runs_of(row["group"])
        runs = runs[~runs["pruned"] & runs["run_s"].notna() & runs["run_start_ms"].notna()].sort_values(
            ["run_start_ms", "run_s"]
        )
        begin = ((runs["run_start_ms"] - runs["run_start_ms"].min()) / 60e3).to_numpy(float)
        length = (runs["run_s"] / 60).to_numpy(float)
        for done, colour in ((True, BLUE), (False, VERMILION)):
            chosen = (runs["converged"] == done).to_numpy(bool)
            right.hlines(np.flatnonzero(chosen), begin[chosen], (begin + length)[chosen], color=colour, alpha=0.9 if done else 0.5,
                         linewidth=max(0.6, min(5.0, 130 / len(runs))))  # fmt: skip
        right.set_xlim(left=0)
        right.set_ylabel("instance")
        right.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        right.set_xlabel("minutes from the first run_start")
        right.set_title(clip(row["label"], 40))
    return figure
