"""Figure: how much runs of one result differ, and whether epochs or speed differ."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing.axes import BLUE, GREEN, INK, VERMILION, bars, clip
from analysis.drawing.digits import percent_text
from analysis.drawing.tips import remember_runs
from analysis.results.spread import run_spread
from analysis.study import NotAnswerableError, Study

TITLE = "Run to run"
CAPTION = (
    "Every run that reached the target, divided by the mean of its result: time to train, epochs, and seconds per "
    "epoch. Where epochs spread as wide as time, runs differ by convergence (the seed); where seconds per epoch do, by "
    "the machine. The table splits the variance of log time into both and their covariance; the share from "
    "epochs is that of the two variances, which the covariance is no part of."
)

PARTS = (
    ("run_s", "time to train", BLUE, "o"),
    ("epochs", "epochs", VERMILION, "^"),
    ("tau_s", "seconds per epoch", GREEN, "s"),
)


def table(study: Study) -> pd.DataFrame:
    """Relative spread and the variance of log(epochs x seconds per epoch) by part."""
    rows = []
    for row in study.distinct.to_dict("records"):
        runs = study.converged_of(row["group"])
        spread = run_spread(runs["epochs"], runs["tau_s"])
        if spread is None:
            continue
        total = spread.variance_epochs + spread.variance_epoch_time
        line = {name: row[name] for name in ("benchmark", "size", "mode", "label", "group")} | {"n": spread.n}
        for name, title, _, _ in PARTS:
            values = runs[name].astype(float)
            line[f"{title}, std/mean [%]"] = 100 * float(values.std(ddof=1) / values.mean())
        line["variance of log(epochs)"] = spread.variance_epochs
        line["variance of log(seconds per epoch)"] = spread.variance_epoch_time
        line["2 x covariance"] = spread.covariance_twice
        line["from epochs [%]"] = 100 * spread.variance_epochs / total if total else np.nan
        rows.append(line)
    if not rows:
        raise NotAnswerableError("a result with at least two runs that reached the target")
    return pd.DataFrame(rows).drop(columns="group")


def answer(study: Study) -> str:
    """Median spread, and where it comes from."""
    frame = table(study)
    spread, share = frame["time to train, std/mean [%]"].median(), frame["from epochs [%]"].median()
    return (
        f"std/mean of time {percent_text(spread)} (median over results); of the variances of epochs and of seconds "
        "per epoch, "
        f"{share:.0f} % is that of epochs"
    )


def draw(study: Study) -> Figure:
    """A row of three panels per class, one dot per run."""
    table(study)
    classes = []
    for title, rows in study.classes():
        results = [row for row in rows.to_dict("records") if study.runs_of(row["group"])["converged"].sum() > 1]
        if results:
            classes.append((title, results))
    figure, axes = bars([len(rows) for _, rows in classes], 3, sharey="row")
    for (title, rows), panels in zip(classes, axes, strict=True):
        for axis, (name, part, colour, marker) in zip(panels, PARTS, strict=True):
            for place, row in enumerate(rows):
                runs = study.converged_of(row["group"])[name].astype(float).dropna()
                ratio = (runs / runs.mean()).to_numpy(float)
                (dots,) = axis.plot(
                    ratio, np.full(len(ratio), place), marker, color=colour, alpha=0.55, markersize=5, mew=0
                )
                remember_runs(dots, runs.index)
            axis.axvline(1.0, color=INK, linewidth=0.8)
            axis.set_xlabel(f"{part} / mean")
        widest = max(abs(limit - 1.0) for axis in panels for limit in axis.get_xlim())
        for axis in panels:
            axis.set_xlim(1 - widest, 1 + widest)
        panels[0].set_yticks(range(len(rows)), [clip(row["label"], 36) for row in rows])
        panels[0].set_title(clip(title, 60))
    return figure
