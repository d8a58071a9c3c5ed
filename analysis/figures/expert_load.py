"""Figure: how evenly tokens fall on experts over the training, and what unevenness costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure

from analysis.drawing.axes import BLUE, VERMILION, WIDTH_IN, clip, listed, readable_on
from analysis.study import NotAnswerableError, Study
from analysis.tables.ingest import counts

TITLE = "Expert load"
CAPTION = (
    "Left and middle: every logging window; the line is the mean over layers and runs, the band reaches from the "
    "least to "
    "the most of them. 1 is even: the busiest expert of a layer has as many tokens as the mean, as the router asked, "
    "before "
    "any was dropped. Right: one run, tokens of each expert over the mean of its layer, each panel with its own "
    "colours; "
    "experts of two runs cannot be averaged, since an expert's number means nothing."
)
MOST_LABELLED = 8  # experts whose cells have room for a number


@dataclass(frozen=True)
class Load:
    """The windows of one result: rows of the experts table with ``step``, the training steps done at their end."""

    label: str
    benchmark: str
    size: str
    windows: pd.DataFrame

    @property
    def runs(self) -> int:
        """Runs that logged it."""
        return int(self.windows["run"].nunique())

    def over_training(self, column: str) -> pd.DataFrame:
        """Mean, least and most of a column over layers and runs, by step."""
        return self.windows.groupby("step")[column].agg(["mean", "min", "max"])

    def last_epoch(self) -> tuple[str, list[str], np.ndarray]:
        """The first run, its layers, and tokens over the layer's mean, layers x experts (NaN where a layer has fewer)."""
        run = self.windows["run"].iloc[0]
        own = self.windows[self.windows["run"] == run]
        last = own[own["epoch_num"] == own["epoch_num"].max()]
        layers = list(dict.fromkeys(last["layer"]))
        sums = [
            np.sum([counts(text) for text in last.loc[last["layer"] == layer, "tokens_per_expert"]], 0)
            for layer in layers
        ]
        shares = np.full((len(layers), max(map(len, sums))), np.nan)
        for place, tokens in enumerate(sums):
            shares[place, : len(tokens)] = tokens / max(tokens.mean(), 1e-300)
        return str(run), layers, shares


def table(study: Study) -> pd.DataFrame:
    """A row per result and layer: its first and last window, and the means and extremes over the training."""
    return pd.DataFrame([row for load in _loads(study) for row in _rows(load)])


def answer(study: Study) -> str:
    """The busiest expert at the beginning and the end, and the tokens dropped."""
    sentences = []
    for load in _loads(study):
        course = load.over_training("imbalance")["mean"]
        dropped = 100 * load.windows["drop_rate"].mean()
        lost = "no token dropped" if dropped == 0 else f"{dropped:.2g} % of tokens dropped"
        runs = f"{load.runs} run" + ("" if load.runs == 1 else "s")
        sentences.append(
            f"{clip(load.label)} ({load.benchmark} {load.size}, {runs}): the busiest expert has {course.iloc[0]:.2f} "
            "times "
            f"the mean at first, {course.iloc[-1]:.2f} times in the end; {lost}"
        )
    return listed(sentences)


def draw(study: Study) -> Figure:
    """A row of panels per result: imbalance, drop rate, experts of the last epoch."""
    loads = _loads(study)
    heights = [max(2.6, 1.2 + 0.3 * load.windows["layer"].nunique()) for load in loads]
    figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
    axes = figure.subplots(len(loads), 3, squeeze=False, height_ratios=heights, width_ratios=[3, 3, 4])
    for load, (left, middle, right) in zip(loads, axes, strict=True):
        _course(left, load.over_training("imbalance"), BLUE, "busiest expert ÷ mean")
        left.axhline(1.0, color=BLUE, linewidth=0.8, linestyle=":")
        left.set_title(f"{load.benchmark} {load.size}\n{clip(load.label, 34)}")
        _course(middle, 100 * load.over_training("drop_rate"), VERMILION, "tokens dropped [%]")
        middle.set_ylim(0, max(1.0, middle.get_ylim()[1]))
        if not load.windows["drop_rate"].gt(0).any():
            middle.text(0.5, 0.5, "no token dropped", transform=middle.transAxes, ha="center", va="center")
        _experts(figure, right, load)
    return figure


def _course(axis: Axes, course: pd.DataFrame, colour: str, label: str) -> None:
    steps = course.index.to_numpy(float)
    axis.fill_between(steps, course["min"], course["max"], color=colour, alpha=0.2, linewidth=0)
    axis.plot(steps, course["mean"], "o-", color=colour, linewidth=1.4, markersize=4)
    axis.set_xlim(0, steps.max() * 1.05)
    axis.set_xlabel("training steps")
    axis.set_ylabel(label)


def _experts(figure: Figure, axis: Axes, load: Load) -> None:
    """Layers x experts of one run's last epoch, with the numbers where they fit."""
    run, layers, shares = load.last_epoch()
    far = max(0.1, float(np.nanmax(np.abs(shares - 1.0))))
    colours = LinearSegmentedColormap.from_list(
        "load", [BLUE, "#F7F7F7", VERMILION], N=15
    )  # few enough to stay vectors
    norm = TwoSlopeNorm(1.0, 1.0 - far, 1.0 + far)
    cells = axis.pcolormesh(shares, cmap=colours, norm=norm, edgecolor="#FFFFFF")
    for (row, column), share in np.ndenumerate(shares) if shares.shape[1] <= MOST_LABELLED else ():
        if not np.isnan(share):
            ink = readable_on(colours(norm(share))[:3])
            axis.text(column + 0.5, row + 0.5, f"{share:.2f}", ha="center", va="center", color=ink)
    axis.set_yticks(np.arange(len(layers)) + 0.5, [clip(name, 18) for name in layers])
    ticks = np.arange(0, shares.shape[1], 1 if shares.shape[1] <= 16 else 8)
    axis.set_xticks(ticks + 0.5, [str(number) for number in ticks])
    axis.invert_yaxis()
    axis.grid(visible=False)
    axis.set_xlabel("expert")
    axis.set_title(clip(f"last epoch of {PurePosixPath(run).stem}", 34))
    figure.colorbar(cells, ax=axis, label="tokens ÷ mean of the layer")


def _loads(study: Study) -> list[Load]:
    loads = list(_found(study))
    if not loads:
        raise NotAnswerableError(
            "window_stats events with the load of experts; the workloads moe_lm and swinv2_moe log them"
        )
    return loads


def _found(study: Study) -> Iterator[Load]:
    windows = study.tables.experts
    windows = windows[windows["imbalance"].ge(1.0) & windows["steps"].ge(1.0) & windows["tokens_per_expert"].notna()]
    for row in study.distinct.to_dict("records"):
        averaged = study.selections[row["group"]].averaged
        runs = averaged or list(study.runs_of(row["group"])["run"])
        own = windows[windows["run"].isin(runs)].copy()
        if not own.empty:
            spans = own.drop_duplicates(["run", "epoch_num", "first_step"])
            done = spans.groupby("run")["steps"].cumsum()
            keys = ["run", "epoch_num", "first_step"]
            own = own.merge(spans[keys].assign(step=done), on=keys)
            yield Load(str(row["label"]), str(row["benchmark"]), str(row["size"]), own)


def _rows(load: Load) -> Iterator[dict[str, object]]:
    for layer, own in load.windows.groupby("layer", sort=False):
        by_step = own.groupby("step")["imbalance"].mean()
        yield {
            "label": load.label,
            "benchmark": load.benchmark,
            "size": load.size,
            "layer": layer,
            "experts": int(own["experts"].max()),
            "n": load.runs,
            "windows": len(own),
            "imbalance at first": by_step.iloc[0],
            "imbalance at last": by_step.iloc[-1],
            "largest imbalance": own["imbalance"].max(),
            "dropped [%]": 100 * own["drop_rate"].mean(),
            "capacity needed": own["needed_capacity"].max(),
            "padding waste [%]": 100 * own["padding_waste"].mean(),
            "exposed all-to-all, all layers [ms/step]": 1e3 * own["exposed_communication_s"].sum() / own["steps"].sum(),
        }
