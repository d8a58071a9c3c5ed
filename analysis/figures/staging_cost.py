"""Figure: what staging costs, counted in epochs of training."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import ORANGE, bars, beside, clip
from analysis.drawing.scatter import result_table
from analysis.results.names import heading
from analysis.study import NotAnswerableError, Study

TITLE = "Staging in epochs"
CAPTION = (
    "Mean staging time divided by mean seconds per epoch, staging before run_start included. Placeholders below one "
    "second "
    "are no staging, and a result without staging events may have staged all the same, hidden in its first epoch."
)


def table(study: Study) -> pd.DataFrame:
    """Staging, seconds per epoch and their ratio by result."""
    frame = study.distinct[study.distinct["staging_in_epochs"].notna()]
    if frame.empty:
        raise NotAnswerableError("a result that logs at least a second of staging and its epochs")
    return result_table(
        frame,
        ("mode", "label"),
        {
            "n": frame["n_averaged"],
            "staging [s]": frame["staging_s.mean"],
            "of it before the run [s]": frame["staging_before_run_s.mean"],
            "seconds per epoch": frame["tau_s.mean"],
            "staging [epochs]": frame["staging_in_epochs"],
        },
    )


def answer(study: Study) -> str:
    """Least and most."""
    frame = table(study).sort_values("staging [epochs]")
    least, most = frame.iloc[0], frame.iloc[-1]
    if len(frame) == 1:
        return f"{most['staging [epochs]']:.2g} epochs ({most['label']})"
    return (
        f"from {least['staging [epochs]']:.2g} ({least['label']}, {least['benchmark']}) to "
        f"{most['staging [epochs]']:.2g} epochs ({most['label']}, {most['benchmark']})"
    )


def draw(study: Study) -> Figure:
    """Bars by class."""
    classes = list(table(study).groupby(["benchmark", "size", "mode"], sort=True))
    figure, axes = bars([len(rows) for _, rows in classes], 1)
    for (key, unsorted), (axis,) in zip(classes, axes, strict=True):
        rows = unsorted.sort_values("staging [epochs]", ascending=False)
        places = np.arange(len(rows))
        values = rows["staging [epochs]"].to_numpy(float)
        axis.barh(places, values, height=0.72, color=ORANGE)
        for place, (value, spent) in enumerate(zip(values, rows["staging [s]"], strict=True)):
            beside(axis, value, place, f"{value:.2g} ({spent:.3g} s)")
        axis.set_xlim(0, values.max() * 1.22)
        axis.set_yticks(places, [clip(label) for label in rows["label"]])
        axis.set_title(clip(heading(*key), 60))
        axis.set_xlabel("staging [epochs]")
        axis.grid(visible=False, axis="y")
    return figure
