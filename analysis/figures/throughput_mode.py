"""Figure: throughput mode, models per minute of the whole system and how busy it was with them."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import BLUE, GREY, bars, beside, clip, listed
from analysis.drawing.scatter import PROBLEM, result_table
from analysis.results.names import short_heading, tasks
from analysis.study import NotAnswerableError, Study

TITLE = "Throughput mode"
CAPTION = (
    "Left: models that reached the target per minute, between the first run_start and the last run_stop, with the "
    "size of the "
    "whole system and of one instance. Right: the share of that time that an instance ran, mean as a bar and from the "
    "shortest "
    "to the longest as a line: below 100 % the system waited for its last instances. Pruned instances are left out."
)


def table(study: Study) -> pd.DataFrame:
    """Models per minute, the most first, and how busy the machine was."""
    frame = _shown(study)
    return result_table(
        frame,
        ("label", "division", "models"),
        {
            "models/min": frame["models_per_min"],
            "compute units of the system": frame["units_described"],
            "models/min per 1000 units": 1000 * frame["models_per_min"] / frame["units_described"],
            "compute units of an instance": frame["units"],
            "time to train all [min]": frame["score_s"] / 60,
            "mean time of one [min]": frame["run_s.mean"] / 60,
            "an instance ran, mean share [%]": 100 * frame["run_s.mean"] / frame["score_s"],
        },
    )


def answer(study: Study) -> str:
    """The most models per minute of each task."""
    sentences = []
    for _, short, rows in tasks(_shown(study)):
        best = rows.iloc[0]
        of = f" on {best['units_described']:,.0f} compute units" if pd.notna(best["units_described"]) else ""
        sentences.append(f"{short}: {best['models_per_min']:.3g} models/min{of} ({best['label']})")
    return listed(sentences)


def draw(study: Study) -> Figure:
    """A bar per result, a pair of panels per benchmark and size."""
    classes = list(_shown(study).groupby(PROBLEM, sort=True))
    figure, axes = bars([len(rows) for _, rows in classes], 2, width_ratios=[3, 2])
    for ((benchmark, size), rows), (left, right) in zip(classes, axes, strict=True):
        places = np.arange(len(rows))
        values = rows["models_per_min"].to_numpy(float)[::-1]
        left.barh(places, values, color=BLUE, height=0.6)
        for place, row in enumerate(rows.iloc[::-1].to_dict("records")):
            system = f"{row['units_described']:,.0f}" if pd.notna(row["units_described"]) else "?"
            beside(left, row["models_per_min"], place, f"{row['models_per_min']:.3g} (of {system} units)")
            shares = _shares(study, row["group"], float(row["score_s"]))
            right.barh([place], [shares.mean()], color=GREY, height=0.6)
            right.plot([shares.min(), shares.max()], [place, place], color=BLUE, linewidth=3)
        left.set_yticks(places, [_name(row) for row in rows.iloc[::-1].to_dict("records")])
        right.set_yticks(places, [""] * len(rows))
        left.set_xlim(0, values.max() * 1.5)
        right.set_xlim(0, 100)
        left.set_xlabel("models/min")
        right.set_xlabel("time that an instance ran [%]")
        left.set_title(clip(short_heading(str(benchmark), str(size), "weak"), 40))
        for axis in (left, right):
            axis.grid(visible=False, axis="y")
    return figure


def _name(row: dict[str, object]) -> str:
    units = f"{row['units']:g} units each" if pd.notna(row["units"]) else "units unknown"
    return f"{clip(row['label'], 44)}, {row['models']:g} × {units}"


def _shares(study: Study, group: str, whole_s: float) -> np.ndarray:
    """The share of the whole time that each instance which reached the target ran, in per cent."""
    runs = study.runs_of(group)
    lengths = runs.loc[~runs["pruned"] & runs["converged"], "run_s"].dropna().to_numpy(float)
    return np.asarray(100 * lengths / whole_s)


def _shown(study: Study) -> pd.DataFrame:
    """Results with models per minute, the most first in each benchmark and size."""
    frame = study.distinct[(study.distinct["models_per_min"] > 0) & (study.distinct["score_s"] > 0)]
    if frame.empty:
        raise NotAnswerableError("a throughput-mode result (several instances at once) with a score")
    return frame.sort_values([*PROBLEM, "models_per_min"], ascending=[True, True, False])
