"""Figure: training throughput of every run, of the whole machine and of each of its parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from analysis.drawing.axes import BLUE, VERMILION, bars, clip, listed
from analysis.drawing.scatter import PROBLEM, result_table
from analysis.drawing.tips import remember_runs
from analysis.results.extent import PLURAL, with_extent
from analysis.results.names import CLASS, heading
from analysis.study import NotAnswerableError, Study

TITLE = "Training throughput"
CAPTION = (
    "One dot per run that reached the target, or a line from the slowest to the fastest where there are more than 50; "
    "the "
    "diamond is the harmonic mean over the scored runs. Samples per second = epochs × training samples / training time "
    "(evaluation and staging taken out); right: for each accelerator, processor, node, core or rank, whichever "
    "varies. Axes are "
    "logarithmic where systems differ more than tenfold."
)
DOTS = 50  # runs of a result that are drawn one by one


def table(study: Study) -> pd.DataFrame:
    """Mean throughput by result."""
    frame = _shown(study)
    return result_table(
        frame,
        ("mode", "label", "ranks"),
        {
            "machine size": frame["extent"],
            "counts": frame["one"].map(PLURAL),
            "n": frame["n_averaged"],
            "train [samples/s], harmonic mean": frame["train_rate.mean"],
            "train [samples/s], spread": frame["train_rate.std"],
            "train [samples/s per size]": frame["train_rate.mean"] / frame["extent"],
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
    classes = [
        (heading(*key), rows.sort_values("train_rate.mean")) for key, rows in _shown(study).groupby(CLASS, sort=True)
    ]
    figure, axes = bars([len(rows) for _, rows in classes], 2, width_ratios=[3, 2])
    for (title, rows), (left, right) in zip(classes, axes, strict=True):
        for place, row in enumerate(rows.to_dict("records")):
            known = study.converged_of(row["group"])["train_rate"].dropna()
            rates = known.to_numpy(float)
            for axis, scale in ((left, 1.0), (right, row["extent"])):
                if len(rates) > DOTS:
                    axis.plot(
                        [rates.min() / scale, rates.max() / scale], [place, place], color=BLUE, linewidth=5, alpha=0.6
                    )
                else:
                    (dots,) = axis.plot(
                        rates / scale, np.full(len(rates), place), "o", color=BLUE, alpha=0.6, markersize=5, mew=0
                    )
                    remember_runs(dots, known.index)
                axis.plot(
                    [row["train_rate.mean"] / scale], [place], "D", color=VERMILION, markersize=7, mfc="none", mew=1.6
                )
        left.set_yticks(range(len(rows)), [_name(row) for row in rows.to_dict("records")])
        right.set_yticks(range(len(rows)), [""] * len(rows))
        left.set_title(clip(title, 60))
        left.set_xlabel("training samples/s")
        right.set_xlabel(f"samples/s per {rows['one'].iloc[0]}")
        for axis, values in (
            (left, rows["train_rate.mean"]),
            (right, (rows["train_rate.mean"] / rows["extent"]).dropna()),
        ):
            if len(values) and values.max() > 10 * values.min():
                axis.set_xscale("log")
                axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.xaxis.set_minor_formatter(NullFormatter())
            else:
                axis.set_xlim(left=0)
    return figure


def _shown(study: Study) -> pd.DataFrame:
    """Results with a rate; the size is NaN where it is unknown, in throughput mode that of one instance."""
    frame = study.distinct[study.distinct["train_rate.mean"].notna()]
    if frame.empty:
        raise NotAnswerableError("no run has training time, epochs and train_samples")
    known = with_extent(frame, CLASS)
    unknown = frame.drop(known.index).assign(extent=math.nan, one="unit")
    return pd.concat([part for part in (known, unknown) if len(part)]).loc[frame.index]


def _name(row: dict[str, Any]) -> str:
    if pd.isna(row["extent"]):
        return clip(row["label"], 36)
    return f"{clip(row['label'], 36)}, {row['extent']:g} {PLURAL[row['one']] if row['extent'] != 1 else row['one']}"
