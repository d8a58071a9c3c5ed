"""Figure: the metric of every run against epochs, with the target."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.page.drawing import BLUE, GREEN, GREY, INK, VERMILION, clip, listed, panels
from analysis.page.scatter import result_table
from analysis.results.convergence import reference_limit
from analysis.study import NotAnswerableError, Study
from analysis.tables.epochs import LARGEST_PLAUSIBLE
from analysis.tables.ingest import parsed
from suite.compliance.convergence import Limit

TITLE = "Convergence"
CAPTION = (
    "Every run that logged an evaluation, scored or not, up to run_stop; a cross marks a run that never "
    "reached the target. The dot is the first evaluation that meets the target (dashed line): the epochs to "
    "target. Green: mean epochs of the reference at this batch size, and the band from the least mean that the rules "
    "allow to as far above. Dotted lines are what trivial and analytic predictors reach. Panels of one benchmark and size "
    "share their axes."
)
ORDER = 20
COLUMNS = 3
NAME_HIGH = 0.11  # of a panel: baselines closer than a line of text are named once, the table has all

Row = Mapping[Hashable, Any]


def table(study: Study) -> pd.DataFrame:
    """Epochs to target and the metric reached, by result."""
    frame = study.results[study.results["group"].isin(_curves(study)["group"])]
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
    """Mean epochs of each result, and the reference's where there is one."""
    sentences = []
    for row in table(study).to_dict("records"):
        if pd.notna(row["epochs to target, mean"]):
            bound = row["reference mean [epochs]"]
            against = f" (reference {bound:.3g})" if pd.notna(bound) else ""
            sentences.append(f"{row['label']} {row['benchmark']} {row['epochs to target, mean']:.3g}{against}")
    return listed(sentences)


def draw(study: Study) -> Figure:
    """A panel per result, rows filled class by class."""
    table(study)
    curves = _curves(study)
    results = [
        row for _, rows in study.classes() for row in rows[rows["group"].isin(curves["group"])].to_dict("records")
    ]
    columns = min(COLUMNS, len(results))
    figure, axes = panels(len(results), columns, 2.5)
    limits = {key: _limits(part) for key, part in curves.groupby(["benchmark", "size"])}
    for position, (row, axis) in enumerate(zip(results, axes, strict=True)):
        _panel(axis, row, curves[curves["group"] == row["group"]], limits[(row["benchmark"], row["size"])])
        left = results[position - 1]["metric_name"] if position % columns else None
        if row["metric_name"] != left:  # a row of panels names a metric once
            axis.set_ylabel(fill(clip(row["metric_name"] or "metric", 60), 24))
        if position + columns >= len(results):
            axis.set_xlabel("epochs trained")
    return figure


def _panel(axis: Axes, row: Row, curves: pd.DataFrame, limits: tuple[float, float, float]) -> None:
    low, high, last = limits
    for _, run in curves.groupby("run"):
        _draw_run(axis, run)
    if pd.notna(row["target"]):
        axis.axhline(row["target"], color=INK, linestyle="--", linewidth=1.0)
    bound = _reference(row)
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


def _limits(part: pd.DataFrame) -> tuple[float, float, float]:
    """Lowest and highest metric to show (early outliers are cut), target and baselines included, and the last epoch."""
    values = [*part["value"].quantile([0.0, 0.98]), *part["target"].dropna().unique()]
    for text in part["baselines"].dropna().unique():
        values += _baselines(text).values()
    low, high = min(values), max(values)
    pad = 0.06 * (high - low or abs(high) or 1.0)
    return low - pad, high + pad, part["epochs"].max() * 1.04


def _baselines(text: object) -> dict[str, float]:
    return {name: value for name, value in parsed(text).items() if abs(value) < LARGEST_PLAUSIBLE}


def _curves(study: Study) -> pd.DataFrame:
    evals = study.tables.evals
    evals = evals[~evals["after_run_stop"].astype(bool)].dropna(subset=["epochs", "value"])
    evals = evals[(evals["value"].abs() < LARGEST_PLAUSIBLE) & evals["epochs"].between(0, LARGEST_PLAUSIBLE)]
    columns = ["run", "group", "benchmark", "size", "target", "baselines"]
    return evals.merge(study.runs[columns], on="run")
