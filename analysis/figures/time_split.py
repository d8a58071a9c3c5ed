"""Figure: the seconds of a run by what they were spent on, absolute and as shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.page.drawing import BLUE, GREEN, GREY, INK, ORANGE, bars, beside, clip, seconds, time_unit
from analysis.study import NotAnswerableError, Study

TITLE = "Where the time went"
CAPTION = (
    "Mean over the scored runs (over all that reached the target where there is no score). The bar ends at the "
    "time from run_start to run_stop; staging before run_start is hatched and lies outside it (HPC 3.0 rules "
    "do not count it). Evaluation that ran beside a later epoch costs no time here. Other: in no epoch, "
    "evaluation or staging."
)
ORDER = 10

PARTS = (
    ("staging_before_run_s", "staging before the run", ORANGE, "///"),
    ("staging_exposed_s", "staging", ORANGE, ""),
    ("train_s", "training", BLUE, ""),
    ("eval_s", "evaluation", GREEN, ""),
    ("other_s", "other", GREY, ""),
)


def table(study: Study) -> pd.DataFrame:
    """Mean seconds of each part by result."""
    known = study.results[study.results["run_s.mean"].notna()]
    if known.empty:
        raise NotAnswerableError("no run reached its target, so there is no time to split")
    frame = known[["benchmark", "size", "mode", "label", "n_averaged", "run_s.mean"]].rename(
        columns={"run_s.mean": "run [s]", "n_averaged": "n"}
    )
    for name, title, _, _ in PARTS:
        frame[f"{title} [s]"] = known[f"{name}.mean"]
    return frame.reset_index(drop=True)


def answer(study: Study) -> str:
    """Shares over all results, least and most."""
    frame = table(study)
    sentences = []
    for _, part, _, hatch in PARTS:
        shares = 100 * frame[f"{part} [s]"] / frame["run [s]"]
        if not hatch and shares.max() > 0:
            sentences.append(
                f"{part} {shares.min():.0f} to {shares.max():.0f} %"
                if len(frame) > 1
                else f"{part} {shares.max():.0f} %"
            )
    return "; ".join(sentences)


def draw(study: Study) -> Figure:
    """One row of panels per class: seconds on the left, shares of the run on the right."""
    table(study)
    classes = [
        (title, rows[rows["run_s.mean"].notna()].sort_values("run_s.mean", ascending=False))
        for title, rows in study.classes()
        if rows["run_s.mean"].notna().any()
    ]
    figure, axes = bars([len(rows) for _, rows in classes], 2, width_ratios=[3, 2], legend=True)
    for (title, rows), (left, right) in zip(classes, axes, strict=True):
        places = np.arange(len(rows))
        scale, unit = time_unit(rows["run_s.mean"].max())
        run = rows["run_s.mean"].to_numpy(float) / scale
        starts = -rows["staging_before_run_s.mean"].to_numpy(float) / scale
        at = starts.copy()
        for name, part, colour, hatch in PARTS:
            width = rows[f"{name}.mean"].to_numpy(float) / scale
            face: dict[str, Any] = {
                "facecolor": "none" if hatch else colour,
                "edgecolor": colour,
                "hatch": hatch or None,
                "linewidth": 0.8,
            }
            left.barh(places, width, left=at, height=0.72, label=part, **face)
            right.barh(places, 100 * width / run, left=100 * at / run, height=0.72, **face)
            at = at + width
        for place, (total, n) in enumerate(zip(run, rows["n_averaged"], strict=True)):
            beside(left, total, place, f"{seconds(total * scale)} (n={n})")
        left.axvline(0, color=INK, linewidth=0.8)
        left.set_xlim(starts.min() * 1.05, run.max() * 1.28)
        left.set_yticks(places, [clip(label) for label in rows["label"]])
        left.set_title(clip(title, 60))
        left.set_xlabel(f"{unit} from run_start")
        left.xaxis.set_major_locator(MaxNLocator(7))
        right.axvline(0, color=INK, linewidth=0.8)
        right.set_xlim(105 * (starts / run).min(), 100)
        right.set_yticks(places, [""] * len(places))
        right.set_xlabel("share of the run [%]")
        for axis in (left, right):
            axis.grid(visible=False, axis="y")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(PARTS))
    return figure
