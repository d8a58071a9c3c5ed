"""Figure: the share of a run that each thing took, and how long the whole took."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import BLUE, GREEN, GREY, INK, ORANGE, bars, beside, clip, listed, seconds
from analysis.results.names import short_heading
from analysis.study import NotAnswerableError, Study

TITLE = "Where the time went"
CAPTION = (
    "Shares of a run, mean over the scored runs (over all that reached the target where there is no score), with the "
    "time from "
    "run_start to run_stop at the right; the fastest is on top. Staging before run_start is hatched and lies left of "
    "0 (HPC 3.0 "
    "rules do not count it). Evaluation that ran beside a later epoch costs no time here. Other: in no epoch, "
    "evaluation or "
    "staging."
)

PARTS = (
    ("staging_before_run_s", "staging before the run", ORANGE, "///"),
    ("staging_exposed_s", "staging", ORANGE, ""),
    ("train_s", "training", BLUE, ""),
    ("eval_s", "evaluation", GREEN, ""),
    ("other_s", "other", GREY, ""),
)
MENTIONED = 5.0  # per cent: a part that takes less of every run is not worth a sentence


def table(study: Study) -> pd.DataFrame:
    """Mean seconds of each part by result."""
    known = study.distinct[study.distinct["run_s.mean"].notna()]
    if known.empty:
        raise NotAnswerableError("no run reached its target, so there is no time to split")
    frame = known[["benchmark", "size", "mode", "label", "n_averaged", "run_s.mean"]].rename(
        columns={"run_s.mean": "run [s]", "n_averaged": "n"}
    )
    for name, title, _, _ in PARTS:
        frame[f"{title} [s]"] = known[f"{name}.mean"]
    return frame.reset_index(drop=True)


def answer(study: Study) -> str:
    """What training takes, and where each other part takes most; parts of a few per cent are left out."""
    frame = table(study)
    shares = {part: 100 * frame[f"{part} [s]"] / frame["run [s]"] for _, part, _, _ in PARTS}
    train = shares["training"]
    several = len(frame) > 1
    sentences = [f"training {train.min():.0f} to {train.max():.0f} %" if several else f"training {train.max():.0f} %"]
    for part, share in shares.items():
        if part != "training" and share.max() >= MENTIONED:
            row = frame.loc[share.idxmax()]
            where = f" ({row['label']}, {short_heading(row['benchmark'], row['size'], row['mode'])})" if several else ""
            sentences.append(f"{part} {'at most ' if several else ''}{share.max():.0f} %{where}")
    return listed(sentences)


def draw(study: Study) -> Figure:
    """A bar of shares per result, a panel per class."""
    table(study)
    classes = [
        (title, rows[rows["run_s.mean"] > 0].sort_values("run_s.mean", ascending=False))
        for title, rows in study.classes()
        if (rows["run_s.mean"] > 0).any()
    ]
    figure, axes = bars([len(rows) for _, rows in classes], 1, legend=True)
    for (title, rows), (axis,) in zip(classes, axes, strict=True):
        places = np.arange(len(rows))
        run = rows["run_s.mean"].to_numpy(float)
        at = -100 * rows["staging_before_run_s.mean"].fillna(0.0).to_numpy(float) / run
        left = at.min()
        for name, part, colour, hatch in PARTS:
            width = 100 * rows[f"{name}.mean"].fillna(0.0).to_numpy(float) / run
            face: dict[str, Any] = {
                "facecolor": "none" if hatch else colour,
                "edgecolor": colour,
                "hatch": hatch or None,
                "linewidth": 0.8,
            }
            axis.barh(places, width, left=at, height=0.72, label=part, **face)
            at = at + width
        for place, (total, n) in enumerate(zip(run, rows["n_averaged"], strict=True)):
            beside(axis, 100, place, f"{seconds(total)} (n={n})")
        axis.axvline(0, color=INK, linewidth=0.8)
        axis.set_xlim(1.05 * left, 100 + 0.22 * (100 - left))
        axis.set_xticks([tick for tick in range(-400, 101, 25 if left > -100 else 100) if tick >= left], minor=False)
        axis.set_yticks(places, [clip(label) for label in rows["label"]])
        axis.set_title(clip(title, 60))
        axis.set_xlabel("share of the run [%]")
        axis.grid(visible=False, axis="y")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(PARTS))
    return figure
