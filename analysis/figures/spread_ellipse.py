"""Figure: whether the runs of a result spread along epochs or along seconds per epoch, as an ellipse per result."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.ticker import MaxNLocator

from analysis.drawing.axes import BLUE, INK, VERMILION, clip, panels
from analysis.drawing.digits import percent_text
from analysis.drawing.labels import NamedPoint, name_panels
from analysis.results.names import CLASS, short_heading
from analysis.results.spread import run_spread
from analysis.study import NotAnswerableError, Study

TITLE = "Direction of the spread"
CAPTION = (
    "An ellipse per result around the mean of its scored runs, with half axes of one standard deviation of log10 "
    "epochs and "
    "log10 seconds per epoch along the principal axes, as the first round's joint analysis drew it. Blue and flat: "
    "runs differ "
    "by convergence; orange, dashed and upright: by the speed of the machine. Both axes have one scale, so that "
    "directions are "
    "true. The widest of each kind is named, where there is room. A run is a dot where a panel has at most 50."
)
NAMED = 1  # results of each kind in a panel
DOTS = 50  # runs of a panel that are drawn one by one
KINDS = (
    (True, BLUE, "-", "along epochs: convergence"),
    (False, VERMILION, "--", "along seconds per epoch: the machine"),
)


def table(study: Study) -> pd.DataFrame:
    """Principal axes by result."""
    rows = []
    for row in study.distinct.to_dict("records"):
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
    """How many results spread along epochs, and which spreads most."""
    frame = table(study)
    along = int((frame["axis 1 along epochs [%]"] > 50).sum())
    most = frame.loc[frame["half axis 1 [log10]"].idxmax()]
    spread = 100 * (10 ** most["half axis 1 [log10]"] - 1)
    return (
        f"along epochs in {along} of {len(frame)} results, along seconds per epoch in {len(frame) - along}; widest "
        f"{most['label']} ({short_heading(most['benchmark'], most['size'], most['mode'])}), {percent_text(spread)} "
        "for one "
        f"standard deviation of {most['n']} scored runs"
    )


def draw(study: Study) -> Figure:
    """A panel per class."""
    classes = list(table(study).groupby(CLASS, sort=True))
    figure, axes = panels(len(classes), min(2, len(classes)), 4.0, extra_in=0.4)
    named = []
    for (key, rows), axis in zip(classes, axes, strict=True):
        named.append(_panel(axis, study, rows))
        axis.set_title(clip(short_heading(*key), 30))
        axis.set_xlabel("log10 epochs, from the mean")
        axis.set_ylabel("log10 s per epoch, from the mean")
    for _, colour, line, text in KINDS:
        axes[0].plot([], [], line, color=colour, label=text)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    name_panels(figure, axes, named)
    return figure


def _panel(axis: Axes, study: Study, rows: pd.DataFrame) -> list[NamedPoint]:
    """The ellipses of one class, dots where they are few; the names of the widest."""
    dots = rows["n"].sum() <= DOTS
    tips = []
    for row in rows.to_dict("records"):
        runs = _averaged(study, row["group"])[["epochs", "tau_s"]].dropna()
        logs = np.log10(runs[(runs > 0).all(axis=1)].to_numpy(float))
        logs = logs - logs.mean(axis=0)
        variances, directions = np.linalg.eigh(np.cov(logs.T, ddof=1))
        half = np.sqrt(np.clip(variances, 0, None))
        angle = np.degrees(np.arctan2(directions[1, 1], directions[0, 1]))
        along = row["axis 1 along epochs [%]"] > 50
        colour, line = next((colour, line) for kind, colour, line, _ in KINDS if kind == along)
        axis.add_patch(
            Ellipse((0, 0), 2 * half[1], 2 * half[0], angle=angle, fill=False, edgecolor=colour, linestyle=line)
        )
        if dots:
            axis.plot(logs[:, 0], logs[:, 1], ".", color=colour, alpha=0.5, markersize=4)
        tip = directions[:, 1] * half[1] * (1 if directions[np.abs(directions[:, 1]).argmax(), 1] > 0 else -1)
        tips.append((half[1], along, tip, row["label"]))
    widest = max(1.5 * max(size for size, *_ in tips), 1e-3)
    axis.set_xlim(-widest, widest)
    axis.set_ylim(-widest, widest)
    axis.set_aspect("equal")
    axis.xaxis.set_major_locator(MaxNLocator(5))
    named: list[NamedPoint] = []
    for kind, *_ in KINDS:
        of_kind = sorted((tip for tip in tips if tip[1] == kind), key=lambda tip: -tip[0])[:NAMED]
        named += [(float(at[0]), float(at[1]), clip(label, 36), True) for _, _, at, label in of_kind]
    for x, y, *_ in named:
        axis.plot([x], [y], "o", color=INK, markersize=3)
    return named


def _averaged(study: Study, group: str) -> pd.DataFrame:
    return study.runs[study.runs["run"].isin(study.selections[group].averaged)]
