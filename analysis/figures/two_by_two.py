"""Figure: what a larger machine gives and takes: batch, epochs and throughput in four panels that share their axes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.axes import INK, Diagonals, clip, legend_of, listed, loglog, looks, panels
from analysis.drawing.labels import NamedPoint, name_panels
from analysis.drawing.scatter import PROBLEM, label_axes, plot_ring, plot_sign, result_table
from analysis.results.extent import PLURAL, with_extent
from analysis.results.names import short_heading
from analysis.study import NotAnswerableError, Study

TITLE = "What a larger machine gives and takes"
CAPTION = (
    "Four views of one benchmark. Above: the batch against the machine's size (lines: samples of a step for each of "
    "its parts) "
    "and against epochs (lines: training steps). Below: training throughput against the machine's size (lines: "
    "samples/s of "
    "each part) and against epochs (lines: training time). The arrow joins the smallest and the largest size of one "
    "machine in "
    "one round and division, named in bold: along a dashed line below left it scales perfectly; the further it goes "
    "to the "
    "right above right, the more epochs its larger batch costs. A ring marks the open division. Names without room "
    "are left "
    "out."
)
Row = Mapping[Hashable, Any]


def table(study: Study) -> pd.DataFrame:
    """The four quantities by result."""
    frame = _shown(study)
    steps = frame["epochs_to_target.mean"] * frame["train_samples"] / frame["global_batch_size"]
    return result_table(
        frame,
        ("label", "device"),
        {
            "machine size": frame["extent"],
            "counts": frame["one"].map(PLURAL),
            "global batch": frame["global_batch_size"],
            "batch per size": frame["global_batch_size"] / frame["extent"],
            "epochs to target": frame["epochs_to_target.mean"],
            "training steps": steps,
            "train [samples/s]": frame["train_rate.mean"],
            "train [samples/s per size]": frame["train_rate.mean"] / frame["extent"],
        },
    )


def answer(study: Study) -> str:
    """What the machine that was run at the most different sizes gained and paid, by benchmark."""
    return listed(
        [
            f"{short_heading(benchmark, size, 'strong')}: {_sentence(rows)}"
            for (benchmark, size), rows in _shown(study).groupby(PROBLEM, sort=True)
        ]
    )


def draw(study: Study) -> Figure:
    """Two rows of two panels per benchmark and size."""
    frame = _shown(study)
    signs = looks(frame["device"])
    classes = list(frame.groupby(PROBLEM, sort=True))
    figure, axes = panels(4 * len(classes), 2, 3.4, extra_in=0.3 * -(-len(signs) // 4))
    named: list[list[NamedPoint]] = []
    for place, (key, rows) in enumerate(classes):
        named += _views(axes[4 * place : 4 * place + 4], str(key[0]), str(key[1]), rows, signs)
    legend_of(figure, axes[0], signs)
    name_panels(figure, axes, named)
    return figure


def _views(
    axes: list[Axes], benchmark: str, size: str, rows: pd.DataFrame, signs: Mapping[str, tuple[str, str]]
) -> list[list[NamedPoint]]:
    """Draw the four views of one benchmark; the names of their points."""
    samples, one = float(rows["train_samples"].median()), str(rows["one"].iloc[0])
    epochs, batch, rate = "epochs_to_target.mean", "global_batch_size", "train_rate.mean"
    heading = clip(short_heading(benchmark, size, "strong"), 30)
    views = (
        ("extent", batch, Diagonals("each", power=-1), f"{heading}: machine and batch"),
        (epochs, batch, Diagonals("steps", 1 / samples, power=-1, invert=True), "batch costs epochs"),
        ("extent", rate, Diagonals("/s each", power=-1), "machine gives samples/s"),
        (epochs, rate, Diagonals("s", 1 / samples, power=-1, invert=True), "both make the time"),
    )
    names = {"extent": PLURAL[one], batch: "global batch size", epochs: "epochs to target", rate: "training samples/s"}
    records = rows.to_dict("records")
    ends = _ends(rows)
    bold = [] if ends is None else [ends[0]["group"], ends[1]["group"]]
    named: list[list[NamedPoint]] = []
    for (x, y, lines, title), axis in zip(views, axes, strict=True):
        for row in records:
            plot_sign(axis, row[x], row[y], signs[row["device"]], size=8)
            if row["division"] == "open":
                plot_ring(axis, row[x], row[y], signs[row["device"]][0], size=14)
        label_axes(axis, title, names[x], names[y])
        loglog(axis, rows[x].tolist(), rows[y].tolist(), lines)
        if ends is not None:
            small, large = ends
            axis.plot([small[x], large[x]], [small[y], large[y]], color=INK, linewidth=1.4, zorder=1)
            axis.annotate(
                "", (large[x], large[y]), (small[x], small[y]), arrowprops={"arrowstyle": "-|>", "color": INK}
            )
        named.append([(r[x], r[y], clip(r["label"], 40), r["group"] in bold) for r in records])
    return named


def _sentence(rows: pd.DataFrame) -> str:
    ends = _ends(rows)
    if ends is None:
        return (
            f"no machine was run at two sizes in one round; {len(rows)} results of {rows['device'].nunique()} devices"
        )
    small, large = ends
    times = {name: large[name] / small[name] for name in ("extent", "train_rate.mean", "epochs_to_target.mean")}
    return (
        f"{times['extent']:.3g} times the {PLURAL[small['one']]} ({small['label']} to {large['name']}) gave "
        f"{times['train_rate.mean']:.3g} times the samples/s and took {times['epochs_to_target.mean']:.3g} times the "
        "epochs "
        f"({_batches(small['global_batch_size'], large['global_batch_size'])})"
    )


def _batches(small: float, large: float) -> str:
    return f"batch {small:g}" + ("" if small == large else f" to {large:g}")


def _ends(rows: pd.DataFrame) -> tuple[Row, Row] | None:
    """The smallest and largest size of the machine with the widest range of sizes in one round and division; None
    without.
    """
    widest: tuple[float, int, int] | None = None
    ordered = rows.sort_values(["round", "division", "machine", "device", "extent", "run_s.mean"])
    extents = ordered["extent"].to_numpy()
    for places in ordered.groupby(["round", "division", "machine", "device"], sort=True).indices.values():
        first, last = int(places[0]), int(places[-1])
        ratio = extents[last] / extents[first]
        if ratio > 1 and (widest is None or ratio > widest[0]):
            widest = (ratio, first, last)
    if widest is None:
        return None
    small, large = ordered.iloc[[*widest[1:]]].to_dict("records")
    return small, large


def _shown(study: Study) -> pd.DataFrame:
    frame = study.distinct[study.distinct["mode"] == "strong"]
    needed = ["global_batch_size", "epochs_to_target.mean", "train_rate.mean", "train_samples"]
    frame = with_extent(frame[(frame[needed].astype(float) > 0).all(axis=1)], PROBLEM)
    classes = frame.groupby(PROBLEM)
    several = (classes["extent"].transform("nunique") > 1) | (classes["global_batch_size"].transform("nunique") > 1)
    frame = frame[several]
    if frame.empty:
        raise NotAnswerableError(
            "time-to-train results of one benchmark and size on two machine sizes or with two batch sizes"
        )
    return frame
