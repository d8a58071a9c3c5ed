"""Figure: how evenly tokens fall on experts over the training, and what unevenness costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import altair as alt
import numpy as np
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    ORANGE,
    VERMILION,
    Chart,
    compute_chart_height,
    convert_to_long_table,
    draw_panels,
    make_kind_channels,
    make_number_channel,
)
from mlhpc.analysis.drawing.view import UNDERSTAND_TIME, Question, View, join_statements, render_label
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.analysis.tables.ingest import parse_counts

TITLE = "Expert load"


@dataclass(frozen=True)
class ResultLoad:
    """Holds the windows of one result: rows of the experts table. ``step`` is the number of steps done at their end."""

    label: str
    benchmark: str
    size: str
    windows: pd.DataFrame

    @property
    def runs(self) -> int:
        """Return the number of runs that logged it."""
        return int(self.windows["run"].nunique())

    def over_training(self, column: str) -> pd.DataFrame:
        """Compute mean, least and most of a column over layers and runs, by step."""
        return self.windows.groupby("step")[column].agg(["mean", "min", "max"])

    def last_epoch(self) -> tuple[str, list[str], np.ndarray]:
        """Return the first run, its layers, and tokens over the layer's mean: layers x experts, NaN where a layer has
        fewer.
        """
        # One run only: the numbers of experts in two runs mean different experts
        run = self.windows["run"].iloc[0]
        own = self.windows[self.windows["run"] == run]
        last = own[own["epoch_num"] == own["epoch_num"].max()]
        layers = list(dict.fromkeys(last["layer"]))
        sums = [
            np.sum([parse_counts(text) for text in last.loc[last["layer"] == layer, "tokens_per_expert"]], 0)
            for layer in layers
        ]
        shares = np.full((len(layers), max(map(len, sums))), np.nan)
        for place, tokens in enumerate(sums):
            shares[place, : len(tokens)] = tokens / max(tokens.mean(), 1e-300)
        return str(run), layers, shares


def build_table(study: Study) -> pd.DataFrame:
    """Build a row per result and layer: first and last window, and means and extremes over the training."""
    return pd.DataFrame([row for load in _loads(study) for row in _rows(load)])


def render_answer(study: Study) -> str:
    """Name the load of the busiest expert at the beginning and the end, and the tokens dropped."""
    sentences = []
    for load in _loads(study):
        means = load.over_training("imbalance")["mean"]
        dropped = 100 * load.windows["drop_rate"].mean()
        lost = "no token dropped" if dropped == 0 else f"{dropped:.2g} % of tokens dropped"
        runs = f"{load.runs} run" + ("" if load.runs == 1 else "s")
        sentences.append(
            f"{render_label(load.label)} ({load.benchmark} {load.size}, {runs}): the busiest expert has"
            f" {means.iloc[0]:.2f} times the mean at first, {means.iloc[-1]:.2f} times in the end; {lost}"
        )
    return join_statements(sentences)


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw a row per layer: the busiest expert over the mean at first, in the end and at its largest."""
    columns = {"imbalance at first": "at first", "imbalance at last": "in the end", "largest imbalance": "largest"}
    long = convert_to_long_table(table.rename(columns=columns), list(columns.values()), "_when", "_imbalance")
    kinds = make_kind_channels("_when", dict(zip(columns.values(), (ORANGE, BLUE, VERMILION), strict=True)))

    def draw(rows: pd.DataFrame) -> Chart:
        layers = alt.Y("layer:N", title=None, sort=list(dict.fromkeys(rows["layer"])))
        marks = alt.Chart(rows).mark_point(size=80, filled=True, opacity=0.85)
        x = make_number_channel(alt.X, "_imbalance", "tokens of the busiest expert / mean", domainMin=1)
        return marks.encode(x=x, y=layers, **kinds).properties(height=compute_chart_height(rows["layer"].nunique()))

    return draw_panels(long, ["benchmark", "size", "label"], draw)


def build_tokens_table(study: Study) -> pd.DataFrame:
    """Build tokens of each expert over the mean of its layer, in the last epoch of the first run of each result."""
    lines = []
    for load in _loads(study):
        run, layers, shares = load.last_epoch()
        head = {"label": load.label, "benchmark": load.benchmark, "size": load.size, "run": PurePosixPath(run).stem}
        for (place, expert), share in np.ndenumerate(shares):
            if not np.isnan(share):
                lines.append(head | {"layer": layers[place], "expert": expert, "tokens / mean": float(share)})
    return pd.DataFrame(lines)


def render_tokens_answer(study: Study) -> str:
    """Name the busiest and the idlest expert of each result."""
    sentences = []
    for (label, benchmark, size), rows in build_tokens_table(study).groupby(["label", "benchmark", "size"], sort=False):
        most, least = (rows.loc[at] for at in (rows["tokens / mean"].idxmax(), rows["tokens / mean"].idxmin()))
        sentences.append(
            f"{render_label(label)} ({benchmark} {size}): most tokens has expert {most['expert']} of {most['layer']} "
            f"({most['tokens / mean']:.2f} times the mean), fewest expert {least['expert']} of {least['layer']} "
            f"({least['tokens / mean']:.2f} times)"
        )
    return join_statements(sentences)


def draw_tokens_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per result: layers and experts, coloured by their tokens; white is the mean."""

    def draw(rows: pd.DataFrame) -> Chart:
        # The same distance on both sides of 1, so that the middle colour is the mean; at least 10 %, or noise looks
        # like an uneven load
        far = max(0.1, float((rows["tokens / mean"] - 1.0).abs().max()))
        scale = alt.Scale(domain=[1 - far, 1, 1 + far], range=[BLUE, "#F7F7F7", VERMILION])
        cells = alt.Chart(rows).mark_rect().encode(
            x=alt.X("expert:O", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("layer:N", title=None, sort=list(dict.fromkeys(rows["layer"]))),
            color=alt.Color("tokens / mean:Q", scale=scale, legend=alt.Legend(title="tokens / mean of the layer", columns=1)),
        )  # fmt: skip
        return cells.properties(height=compute_chart_height(rows["layer"].nunique(), 26))

    # Panels differ in their range of loads: with shared colours the even ones would be white
    return draw_panels(table, ["benchmark", "size", "label"], draw, colours="independent")


def _loads(study: Study) -> list[ResultLoad]:
    loads = list(_find_loads(study))
    if not loads:
        raise NotAnswerableError(
            "window_stats events with the load of experts; the workloads moe_lm and swinv2_moe log them"
        )
    return loads


def _find_loads(study: Study) -> Iterator[ResultLoad]:
    windows = study.tables.experts
    # The busiest expert cannot have less than the mean: such a row is damaged
    windows = windows[windows["imbalance"].ge(1.0) & windows["steps"].ge(1.0) & windows["tokens_per_expert"].notna()]
    for row in study.distinct.to_dict("records"):
        averaged = study.selections[row["group"]].averaged
        runs = averaged or list(study.runs_of(row["group"])["run"])
        own = windows[windows["run"].isin(runs)].copy()
        if not own.empty:
            spans = own.drop_duplicates(["run", "epoch_num", "first_step"])
            # Windows repeat for each layer, so steps are counted over distinct windows
            done = spans.groupby("run")["steps"].cumsum()
            keys = ["run", "epoch_num", "first_step"]
            own = own.merge(spans[keys].assign(step=done), on=keys)
            yield ResultLoad(str(row["label"]), str(row["benchmark"]), str(row["size"]), own)


def _rows(load: ResultLoad) -> Iterator[dict[str, object]]:
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


VIEWS = (
    View(
        "expert_load", "Expert load",
        Question(
            UNDERSTAND_TIME,
            "Is the work spread evenly over the experts, and what does unevenness cost?",
            ("expert_imbalance", "expert_drop_rate", "expert_padding_waste", "exposed_all_to_all_s"),
            needs="runs of a mixture of experts",
            decision=(
                "the time of a layer with expert parallelism follows the busiest expert; a balance loss or capacity "
                "is due where it stays high"
            ),
        ),
        "Tokens of the busiest expert of a layer over the mean, as the router asked, before any was dropped: in the "
        "first and the last logging window, and the largest of any window. 1 is even. The table has dropped tokens, "
        "the capacity that would have been needed, padding, and the all-to-all that was not hidden.",
        build_table, render_answer, draw_chart,
    ),
    View(
        "expert_tokens", "Tokens of each expert",
        Question(
            UNDERSTAND_TIME,
            "Which experts get the tokens?",
            ("tokens / mean",),
            needs="runs of a mixture of experts",
        ),
        "Tokens of each expert over the mean of its layer, in the last epoch of one run of each result, each panel "
        "with its own colours. Experts of two runs cannot be averaged, since an expert's number means nothing.",
        build_tokens_table, render_tokens_answer, draw_tokens_chart,
    ),
)  # fmt: skip
