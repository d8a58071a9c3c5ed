"""Figure: training throughput of every run, in total and per compute unit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from analysis.page.drawing import BLUE, VERMILION, bars, clip, listed
from analysis.page.scatter import PROBLEM, result_table
from analysis.study import NotAnswerableError, Study

TITLE = "Training throughput"
CAPTION = (
    "One dot per run that reached the target, the diamond is the harmonic mean over the scored runs. Samples "
    "per second = epochs × training samples / training time (evaluation and staging taken out). A compute unit "
    "is an accelerator, or a processor where there is none. Axes are logarithmic where systems differ more "
    "than tenfold."
)
ORDER = 30


def table(study: Study) -> pd.DataFrame:
    """Mean throughput by result."""
    frame = study.results[study.results["train_rate.mean"].notna()]
    if frame.empty:
        raise NotAnswerableError("no run has training time, epochs and train_samples")
    return result_table(
        frame,
        ("mode", "label", "ranks"),
        {
            "compute units": frame["units"],
            "n": frame["n_averaged"],
            "train [samples/s], harmonic mean": frame["train_rate.mean"],
            "train [samples/s], spread": frame["train_rate.std"],
            "train [samples/s/unit]": frame["train_rate_per_unit"],
            "evaluation [samples/s], harmonic mean": frame["eval_rate.mean"],
        },
    )


def answer(study: Study) -> str:
    """The most samples per second of each class."""
    rows = table(study).sort_values("train [samples/s], harmonic mean", ascending=False)
    first = rows.groupby(PROBLEM, sort=True).head(1)
    return listed(
        [
            f"{r['benchmark']} {r['size']}: {r['train [samples/s], harmonic mean']:,.0f} samples/s ({r['label']})"
            for r in first.to_dict("records")
        ]
    )


def draw(study: Study) -> Figure:
    """One row of panels per class: total on the left, per unit on the right."""
    table(study)
    classes = [
        (title, rows[rows["train_rate.mean"].notna()].sort_values("train_rate.mean"))
        for title, rows in study.classes()
        if rows["train_rate.mean"].notna().any()
    ]
    figure, axes = bars([len(rows) for _, rows in classes], 2, width_ratios=[3, 2])
    for (title, rows), (left, right) in zip(classes, axes, strict=True):
        for place, row in enumerate(rows.to_dict("records")):
            rates = study.converged_of(row["group"])["train_rate"].dropna().to_numpy(float)
            units = row["units"]
            for axis, scale in ((left, 1.0), (right, units)):
                axis.plot(rates / scale, np.full(len(rates), place), "o", color=BLUE, alpha=0.6, markersize=5, mew=0)
                axis.plot(
                    [row["train_rate.mean"] / scale], [place], "D", color=VERMILION, markersize=7, mfc="none", mew=1.6
                )
        left.set_yticks(range(len(rows)), [_name(row) for row in rows.to_dict("records")])
        right.set_yticks(range(len(rows)), [""] * len(rows))
        left.set_title(clip(title, 60))
        left.set_xlabel("training samples/s")
        right.set_xlabel("training samples/s per compute unit")
        for axis, values in ((left, rows["train_rate.mean"]), (right, rows["train_rate_per_unit"].dropna())):
            if len(values) and values.max() > 10 * values.min():
                axis.set_xscale("log")
                axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.xaxis.set_minor_formatter(NullFormatter())
            else:
                axis.set_xlim(left=0)
    return figure


def _name(row: dict[str, Any]) -> str:
    scale = [f"{row[name]:g} {name}" for name in ("ranks", "units") if pd.notna(row[name])]
    return ", ".join([clip(row["label"], 36), *scale[:1]])
