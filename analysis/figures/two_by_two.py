"""Figure: batch, epochs, throughput and machine size in four panels that share their axes."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.page.drawing import Diagonals, legend_of, listed, loglog, looks, panels
from analysis.page.scatter import PROBLEM, plot_ring, plot_sign, problems, result_table
from analysis.study import NotAnswerableError, Study

TITLE = "Batch, epochs, throughput, units"
CAPTION = (
    "Four views of one benchmark that share axes along rows and columns. Above: batch against units (lines: samples per unit "
    "and step) and against epochs (lines: training steps). Below: training throughput against units (lines: samples/s per "
    "unit) and against epochs (lines: training time). A ring marks the open division."
)
ORDER = 34
AXES = {
    "units": "compute units",
    "global_batch_size": "global batch size",
    "epochs_to_target.mean": "epochs to target",
    "train_rate.mean": "training samples/s",
}


def table(study: Study) -> pd.DataFrame:
    """The four quantities by result."""
    frame = _shown(study)
    steps = frame["epochs_to_target.mean"] * frame["train_samples"] / frame["global_batch_size"]
    return result_table(
        frame,
        ("label", "device"),
        {
            "compute units": frame["units"],
            "global batch": frame["global_batch_size"],
            "batch per unit": frame["global_batch_size"] / frame["units"],
            "epochs to target": frame["epochs_to_target.mean"],
            "training steps": steps,
            "train [samples/s]": frame["train_rate.mean"],
            "train [samples/s/unit]": frame["train_rate_per_unit"],
        },
    )


def answer(study: Study) -> str:
    """What changes from the smallest to the largest machine."""
    sentences = []
    for (benchmark, size), rows in _shown(study).groupby(PROBLEM, sort=True):
        ordered = rows.sort_values("units")
        small, large = ordered.iloc[0], ordered.iloc[-1]
        if small["units"] == large["units"]:
            sentences.append(f"{benchmark} {size}: one machine size only, {small['units']:g}")
            continue
        sentences.append(
            f"{benchmark} {size}: from {small['units']:g} to {large['units']:g} units batch "
            f"{small['global_batch_size']:g} to {large['global_batch_size']:g}, epochs "
            f"{small['epochs_to_target.mean']:.3g} to {large['epochs_to_target.mean']:.3g}, samples/s "
            f"{small['train_rate.mean']:,.0f} to {large['train_rate.mean']:,.0f}"
        )
    return listed(sentences)


def draw(study: Study) -> Figure:
    """Two rows of two panels per benchmark and size."""
    frame = _shown(study)
    signs = looks(frame["device"])
    classes = problems(frame)
    figure, axes = panels(4 * len(classes), 2, 3.3, extra_in=0.4)
    for place, (title, rows) in enumerate(classes):
        samples = float(rows["train_samples"].median())
        views = (
            ("units", "global_batch_size", Diagonals("per unit", power=-1)),
            ("epochs_to_target.mean", "global_batch_size", Diagonals("steps", 1 / samples, power=-1, invert=True)),
            ("units", "train_rate.mean", Diagonals("/s/unit", power=-1)),
            ("epochs_to_target.mean", "train_rate.mean", Diagonals("s", 1 / samples, power=-1, invert=True)),
        )
        for number, ((x, y, lines), axis) in enumerate(zip(views, axes[4 * place : 4 * place + 4], strict=True)):
            for row in rows.to_dict("records"):
                plot_sign(axis, row[x], row[y], signs[row["device"]], size=8)
                if row["division"] == "open":
                    plot_ring(axis, row[x], row[y], signs[row["device"]][0], size=14)
            loglog(axis, rows[x].tolist(), rows[y].tolist(), lines)
            if number == 0:
                axis.set_title(title)
            if number % 2 == 0:
                axis.set_ylabel(AXES[y])
            if number > 1:
                axis.set_xlabel(AXES[x])
    legend_of(figure, axes[0], signs)
    return figure


def _shown(study: Study) -> pd.DataFrame:
    frame = study.results[study.results["mode"] == "strong"]
    needed = ["units", "global_batch_size", "epochs_to_target.mean", "train_rate.mean", "train_samples"]
    frame = frame[(frame[needed].astype(float) > 0).all(axis=1)]
    classes = frame.groupby(PROBLEM)
    several = (classes["units"].transform("nunique") > 1) | (classes["global_batch_size"].transform("nunique") > 1)
    frame = frame[several]
    if frame.empty:
        raise NotAnswerableError(
            "time-to-train results of one benchmark and size on two machine sizes or with two batch sizes"
        )
    return frame
