"""Figure: a training step by phase, where the logs have phases."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import BLUE, GREEN, GREY, PURPLE, VERMILION, bars, beside, clip, listed
from analysis.roofline.cases import steps_of
from analysis.study import NotAnswerableError, Study

TITLE = "Inside a training step"
CAPTION = (
    "Mean over ranks and epochs, then over the scored runs. Exposed communication is what remains of the "
    "gradient exchange after the backward pass; the part that overlaps with it lies inside forward + backward "
    "and is given in the table only."
)

PARTS = (
    ("data_wait", "data wait", VERMILION),
    ("forward_backward", "forward + backward", BLUE),
    ("exposed_communication", "exposed communication", PURPLE),
    ("optimizer", "optimizer", GREEN),
    ("other", "other", GREY),
)
OVERLAPPED = ("overlapped_communication", "overlapped communication")


def table(study: Study) -> pd.DataFrame:
    """Milliseconds per training step by phase and result."""
    rows = []
    steps = steps_of(study)
    for row in study.distinct.to_dict("records"):
        chosen = study.runs[study.runs["run"].isin(study.selections[row["group"]].averaged)]
        chosen = chosen[chosen["step_forward_backward_s"].notna() & chosen["run"].isin(steps.index)]
        if chosen.empty:
            continue
        count = chosen["run"].map(steps).to_numpy(float)
        line = {name: row[name] for name in ("benchmark", "size", "mode", "label")} | {"n": len(chosen)}
        for part, title in (*((name, title) for name, title, _ in PARTS), OVERLAPPED):
            spent = pd.to_numeric(chosen[f"step_{part}_s"]).to_numpy(float)
            line[f"{title} [ms/step]"] = float(np.mean(1e3 * spent / count))
        rows.append(line)
    if not rows:
        raise NotAnswerableError("step_phases events; only this suite logs them, published MLPerf HPC logs do not")
    return pd.DataFrame(rows)


def answer(study: Study) -> str:
    """The largest part of a step of each result."""
    columns = [f"{title} [ms/step]" for _, title, _ in PARTS]
    frame = table(study)
    shares = 100 * frame[columns].div(frame[columns].sum(axis=1), axis=0)
    named = (frame["label"] + " (" + frame["benchmark"] + " " + frame["size"] + ")").tolist()
    return listed(
        [
            f"{name}: " + ", ".join(f"{row[c]:.0f} % {c.removesuffix(' [ms/step]')}" for c in row.nlargest(2).index)
            for name, (_, row) in zip(named, shares.iterrows(), strict=True)
        ]
    )


def draw(study: Study) -> Figure:
    """Milliseconds on the left, shares of the step on the right."""
    frame = table(study)
    classes = list(frame.groupby(["benchmark", "size", "mode"], sort=True))
    figure, axes = bars([len(rows) for _, rows in classes], 2, width_ratios=[3, 2], legend=True)
    for (key, rows), (left, right) in zip(classes, axes, strict=True):
        places = np.arange(len(rows))
        columns = [f"{title} [ms/step]" for _, title, _ in PARTS]
        total = rows[columns].sum(axis=1).to_numpy(float)
        at = np.zeros(len(rows))
        for column, (_, title, colour) in zip(columns, PARTS, strict=True):
            width = rows[column].to_numpy(float)
            left.barh(places, width, left=at, height=0.72, color=colour, label=title)
            right.barh(places, 100 * width / total, left=100 * at / total, height=0.72, color=colour)
            at = at + width
        for place, value in enumerate(total):
            beside(left, value, place, f"{value:.3g} ms")
        left.set_xlim(0, total.max() * 1.2)
        left.set_yticks(places, [clip(label) for label in rows["label"]])
        right.set_yticks(places, [""] * len(places))
        left.set_title(clip(f"{key[0]} · size {key[1]}", 60))
        left.set_xlabel("milliseconds per training step")
        right.set_xlabel("share of the step [%]")
        right.set_xlim(0, 100)
        for axis in (left, right):
            axis.grid(visible=False, axis="y")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(PARTS))
    return figure
