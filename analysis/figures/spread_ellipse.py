"""Figure: principal axes of run-to-run spread in the plane of log epochs and log seconds per epoch."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

from analysis.page.drawing import BLUE, INK, clip, panels
from analysis.statistics.spread import run_spread
from analysis.study import NotAnswerableError, Study

TITLE = "Direction of the spread"
CAPTION = (
    "Every scored run as a dot, log10 of epochs and of seconds per epoch around the mean of its result; an ellipse per result "
    "with half axes of one standard deviation along the principal axes, as the first round's joint analysis drew it. Flat "
    "ellipses: the spread is convergence; upright ones: it is the machine."
)
ORDER = 26


def table(study: Study) -> pd.DataFrame:
    """Principal axes by result."""
    rows = []
    for row in study.results.to_dict("records"):
        runs = _averaged(study, row["group"])
        spread = run_spread(runs["epochs"], runs["tau_s"])
        if spread is not None and spread.n > 2:
            rows.append(
                {
                    "benchmark": row["benchmark"],
                    "size": row["size"],
                    "mode": row["mode"],
                    "label": row["label"],
                    "group": row["group"],
                    "n": spread.n,
                    "half axis 1 [log10]": spread.axis_1**0.5,
                    "half axis 2 [log10]": spread.axis_2**0.5,
                    "variance along axis 1 [%]": 100 * spread.axis_1_share,
                    "axis 1 along epochs [%]": 100 * spread.along_epochs,
                    "correlation of the logs": spread.correlation,
                }
            )
    if not rows:
        raise NotAnswerableError("a result with at least three scored runs")
    return pd.DataFrame(rows)


def answer(study: Study) -> str:
    """How many results spread along epochs."""
    frame = table(study)
    along = int((frame["axis 1 along epochs [%]"] > 50).sum())
    return f"along epochs in {along} of {len(frame)} results, along seconds per epoch in {len(frame) - along}"


def draw(study: Study) -> Figure:
    """A panel per class."""
    classes = list(table(study).groupby(["benchmark", "size", "mode"], sort=True))
    figure, axes = panels(len(classes), min(3, len(classes)), 3.2)
    for (key, rows), axis in zip(classes, axes, strict=True):
        for group in rows["group"]:
            runs = _averaged(study, group)[["epochs", "tau_s"]].dropna()
            logs = np.log10(runs[(runs > 0).all(axis=1)].to_numpy(float))
            logs = logs - logs.mean(axis=0)
            variances, directions = np.linalg.eigh(np.cov(logs.T, ddof=1))
            half = np.sqrt(np.clip(variances, 0, None))
            angle = np.degrees(np.arctan2(directions[1, 1], directions[0, 1]))
            axis.add_patch(
                Ellipse((0, 0), 2 * half[1], 2 * half[0], angle=angle, fill=False, edgecolor=BLUE, alpha=0.8)
            )
            axis.plot(logs[:, 0], logs[:, 1], ".", color=BLUE, alpha=0.35, markersize=4)
        widest = max(*(abs(limit) for limit in (*axis.get_xlim(), *axis.get_ylim())), 1e-3)
        axis.set_xlim(-widest, widest)
        axis.set_ylim(-widest, widest)
        axis.axhline(0, color=INK, linewidth=0.6)
        axis.axvline(0, color=INK, linewidth=0.6)
        kind = "throughput" if key[2] == "weak" else "time to train"
        axis.set_title(f"{clip(key[0], 14)} {clip(key[1], 10)} · {kind}")
        axis.set_xlabel("log10 epochs, from the mean")
        axis.set_ylabel("log10 s per epoch, from the mean")
    return figure


def _averaged(study: Study, group: str) -> pd.DataFrame:
    return study.runs[study.runs["run"].isin(study.selections[group].averaged)]
