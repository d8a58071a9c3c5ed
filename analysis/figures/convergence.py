"""Figure: the epochs that runs take to the target, beside those of the reference; the metric over epochs for few
results.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import MaxNLocator

from analysis.drawing.axes import BAR_IN, BLUE, FRAME_IN, GREEN, GREY, INK, VERMILION, WIDTH_IN, clip
from analysis.drawing.scatter import result_table
from analysis.results.convergence import reference_limit
from analysis.study import NotAnswerableError, Study
from analysis.tables.epochs import LARGEST_PLAUSIBLE
from analysis.tables.ingest import parsed
from suite.compliance.rcp_limit import Limit

TITLE = "Convergence"
CAPTION = (
    "Epochs to target, the first evaluation that meets it. With few results, or for own results beside many: a panel "
    "each with "
    "the metric of every run that logged one, up to run_stop; above 50 runs the median and the band from the 5th to "
    "the 95th "
    "percentile. A dot is where a run reached the target (dashed line), a cross the end of one that never did; dotted "
    "lines are "
    "what trivial and analytic predictors reach. With many results: a row each, a dot per run (above 50 runs a line "
    "from first "
    "to last), a diamond at their mean. Green: mean epochs of the reference at this batch size, and the band from the "
    "least "
    "mean that the rules allow to as far above."
)
COLUMNS = 3
CURVES = 12  # results that get a panel of curves
BANDED = 50  # runs of a result above which they are one band
NAME_HIGH = 0.13  # of a panel: baselines closer than a line of text are named once, the table has all

Row = Mapping[Hashable, Any]


def table(study: Study) -> pd.DataFrame:
    """Epochs to target and the metric reached, by result."""
    frame = study.distinct[study.distinct["group"].isin(_curves(study)["group"].unique())]
    if frame.empty:
        raise NotAnswerableError("no log has an evaluation with a metric value and an epoch number")
    bounds = [_reference(row) for row in frame.to_dict("records")]
    return result_table(
        frame,
        ("label",),
        {
            "runs started": frame["n_started"],
            "runs that reached the target": frame["n_reached"],
            "n averaged": frame["n_averaged"],
            "epochs to target, mean": frame["epochs_to_target.mean"],
            "epochs to target, std": frame["epochs_to_target.std"],
            "reference mean [epochs]": [bound.mean if bound else None for bound in bounds],
            "least allowed mean [epochs]": [bound.minimum if bound else None for bound in bounds],
            "target": frame["target"],
            "metric at target, mean": frame["reached_value.mean"],
        },
    )


def answer(study: Study) -> str:
    """How many results need no more epochs than the rules expect of the reference, and the mean epochs of the first
    ones.
    """
    rows = table(study)
    bounds = rows[rows["reference mean [epochs]"].notna() & rows["epochs to target, mean"].notna()]
    mean, reference = bounds["epochs to target, mean"], bounds["reference mean [epochs]"]
    within = int((mean <= 2 * reference - bounds["least allowed mean [epochs]"]).sum())
    sentences = []
    if len(bounds):
        sentences.append(f"{within} of {len(bounds)} results take no more epochs than the reference's band allows")
    for row in rows.head(CURVES // 2).to_dict("records"):
        if pd.notna(row["epochs to target, mean"]):
            bound = row["reference mean [epochs]"]
            against = f" (reference {bound:.3g})" if pd.notna(bound) else ""
            sentences.append(f"{row['label']} {row['benchmark']} {row['epochs to target, mean']:.3g}{against}")
    more = len(rows) - CURVES // 2
    return "; ".join(sentences) + (f"; {more} more in the figure" if more > 0 and sentences else "")


def draw(study: Study) -> Figure:
    """Curves of the first results, own ones first, and rows of all where they are many."""
    table(study)
    curves = _curves(study)
    known = curves["group"].unique()
    shown = [(title, rows[rows["group"].isin(known)]) for title, rows in study.classes()]
    shown = [(title, rows) for title, rows in shown if len(rows)]
    everything = [row for _, rows in shown for row in rows.to_dict("records")]
    many = len(everything) > CURVES
    panels = [row for row in everything if not row["published"]][:CURVES] if many else everything
    columns = min(COLUMNS, max(1, len(panels)))
    heights = [2.5 * -(-len(panels) // columns), sum(FRAME_IN + BAR_IN * len(rows) for _, rows in shown) * many]
    figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
    above, below = (
        np.asarray(figure.subfigures(2, 1, height_ratios=heights), object) if all(heights) else (figure, figure)
    )
    if panels:
        _draw_panels(above, panels, curves, columns)
    if many:
        _draw_rows(below, study, shown)
    return figure


def _draw_panels(figure: FigureBase, results: Sequence[Row], curves: pd.DataFrame, columns: int) -> None:
    """A panel of curves per result; those of one benchmark and size share the axis of the metric."""
    limits = {key: _limits(part) for key, part in curves.groupby(["benchmark", "size"])}
    axes = list(figure.subplots(-(-len(results) // columns), columns, squeeze=False).flat)
    for axis in axes[len(results) :]:
        axis.set_axis_off()
    for position, (row, axis) in enumerate(zip(results, axes, strict=False)):
        _panel(axis, row, curves[curves["group"] == row["group"]], limits[(row["benchmark"], row["size"])])
        left = results[position - 1]["metric_name"] if position % columns else None
        if row["metric_name"] != left:  # a row of panels names a metric once
            axis.set_ylabel(fill(clip(row["metric_name"] or "metric", 60), 24))
        if position + columns >= len(results):
            axis.set_xlabel("epochs trained")


def _draw_rows(figure: FigureBase, study: Study, classes: Sequence[tuple[str, pd.DataFrame]]) -> None:
    """A panel per class and a row per result, the fewest epochs on top: its runs, and the reference's epochs."""
    heights = [len(rows) + FRAME_IN / BAR_IN for _, rows in classes]
    axes = figure.subplots(len(classes), 1, squeeze=False, height_ratios=heights)
    for (title, rows), axis in zip(classes, axes.flat, strict=True):
        ordered = rows.sort_values(["epochs_to_target.mean", "label"], ascending=False).to_dict("records")
        for place, row in enumerate(ordered):
            _draw_row(axis, place, row, study.runs_of(row["group"]))
        axis.set_ylim(-0.6, len(rows) - 0.4)
        axis.set_yticks(range(len(rows)), [clip(row["label"]) for row in ordered])
        axis.set_xlim(left=0)
        axis.set_title(clip(title, 60))
        axis.set_xlabel("epochs to target")
        axis.grid(visible=False, axis="y")


def _draw_row(axis: Axes, place: int, row: Row, runs: pd.DataFrame) -> None:
    bound = _reference(row)
    if bound:
        width = 2 * (bound.mean - bound.minimum)
        axis.barh([place], [width], left=[bound.minimum], height=0.75, color=GREEN, alpha=0.25)
        axis.plot([bound.mean, bound.mean], [place - 0.38, place + 0.38], color=GREEN, linewidth=1.6)
    reached = runs.loc[runs["converged"], "epochs_to_target"].dropna().astype(float)
    missed = runs.loc[~runs["converged"] & ~runs["pruned"], "epochs_run"].dropna().astype(float)
    missed = missed[missed.between(0, LARGEST_PLAUSIBLE)]
    if len(reached) > BANDED:
        axis.plot([reached.min(), reached.max()], [place, place], color=BLUE, linewidth=4, alpha=0.6)
    else:
        axis.plot(reached, [place] * len(reached), "o", color=BLUE, alpha=0.55, markersize=5, mew=0)
    axis.plot(missed, [place] * len(missed), "x", color=VERMILION, markersize=6)
    if pd.notna(row["epochs_to_target.mean"]):
        axis.plot([row["epochs_to_target.mean"]], [place], "D", color=INK, mfc="none", markersize=7)


def _panel(axis: Axes, row: Row, curves: pd.DataFrame, limits: tuple[float, float]) -> None:
    (low, high), bound = limits, _reference(row)
    last = 1.04 * max(
        float(curves["epochs"].max()), 2 * bound.mean - bound.minimum if bound else 0.0
    )  # where the data end
    if curves["run"].nunique() > BANDED:
        _draw_band(axis, curves)
    else:
        for _, run in curves.groupby("run"):
            _draw_run(axis, run)
    if pd.notna(row["target"]):
        axis.axhline(row["target"], color=INK, linestyle="--", linewidth=1.0)
    if bound:
        axis.axvspan(bound.minimum, 2 * bound.mean - bound.minimum, color=GREEN, alpha=0.18, linewidth=0)
        axis.axvline(bound.mean, color=GREEN, linewidth=1.2)
    _draw_baselines(axis, _baselines(row["baselines"]), last, NAME_HIGH * (high - low))
    axis.set_ylim(low, high)
    axis.set_xlim(0, last)
    if last > 2:
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    problem = f"{clip(row['benchmark'], 14)} {clip(row['size'], 14)} · {clip(row['round'], 12)}"
    axis.set_title(f"{clip(row['name'], 36)}\n{problem}", fontsize=11, fontweight="normal")


def _draw_band(axis: Axes, curves: pd.DataFrame) -> None:
    """Median and 5-95 % band of the metric of many runs, as long as at least half of them still train."""
    by_epoch = curves.groupby("epochs")["value"]
    enough = by_epoch.size() >= curves["run"].nunique() / 2
    low, middle, high = (by_epoch.quantile(share)[enough] for share in (0.05, 0.5, 0.95))
    axis.fill_between(middle.index, low, high, color=BLUE, alpha=0.3, linewidth=0)
    axis.plot(middle.index, middle, color=BLUE, linewidth=1.2)


def _draw_run(axis: Axes, run: pd.DataFrame) -> None:
    """The metric of one run, with a dot where it first reached the target, or a cross at its end."""
    axis.plot(run["epochs"], run["value"], color=BLUE, linewidth=0.9, alpha=0.55)
    hits = run[run["reached"]]
    end = hits.iloc[0] if len(hits) else run.iloc[-1]
    marker, colour = ("o", BLUE) if len(hits) else ("x", VERMILION)
    axis.plot(end["epochs"], end["value"], marker=marker, markersize=5, color=colour, linestyle="none")


def _draw_baselines(axis: Axes, baselines: Mapping[str, float], last: float, name_height: float) -> None:
    """A line per trivial baseline; the name is left out where it would cover another."""
    named: list[float] = []
    for name, value in sorted(baselines.items(), key=lambda item: item[1]):
        axis.axhline(value, color=GREY, linestyle=":", linewidth=1.4)
        if all(abs(value - other) > name_height for other in named):
            axis.text(last, value, clip(name, 24), ha="right", va="bottom", color=INK)
            named.append(value)


def _reference(row: Row) -> Limit | None:
    """The reference's epochs at the batch size of a result."""
    names = ("benchmark", "size", "round", "train_samples", "global_batch_size", "required_runs")
    return reference_limit(*(row[name] for name in names))


def _limits(part: pd.DataFrame) -> tuple[float, float]:
    """Lowest and highest metric to show (early outliers are cut), target and baselines included."""
    values = [*part["value"].quantile([0.0, 0.98]), *part["target"].dropna().unique()]
    for text in part["baselines"].dropna().unique():
        values += _baselines(text).values()
    low, high = min(values), max(values)
    pad = 0.06 * (high - low or abs(high) or 1.0)
    return low - pad, high + pad


def _baselines(text: object) -> dict[str, float]:
    return {name: value for name, value in parsed(text).items() if abs(value) < LARGEST_PLAUSIBLE}


def _curves(study: Study) -> pd.DataFrame:
    evals = study.tables.evals
    evals = evals[~evals["after_run_stop"].astype(bool)].dropna(subset=["epochs", "value"])
    evals = evals[(evals["value"].abs() < LARGEST_PLAUSIBLE) & evals["epochs"].between(0, LARGEST_PLAUSIBLE)]
    columns = ["run", "group", "benchmark", "size", "target", "baselines"]
    return evals.merge(study.runs[columns], on="run")
