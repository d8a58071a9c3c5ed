"""Figure: each rank's own time and its wait at the gradient exchange. The slow rank waits least."""

from __future__ import annotations

import json
from dataclasses import dataclass

import altair as alt
import numpy as np
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    ORANGE,
    VERMILION,
    Chart,
    convert_to_long_table,
    draw_panels,
    layer_charts,
)
from mlhpc.analysis.drawing.view import UNDERSTAND_TIME, Question, View, join_statements, render_percent
from mlhpc.analysis.roofline.bounds import render_si
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.suite.performance.stragglers import SIGNIFICANCE_LEVEL, StragglerTest, find_straggler

TITLE = "Ranks: who computes, who waits"
QUESTION = Question(
    UNDERSTAND_TIME,
    "Is a rank or node slower than the others?",
    ("step_forward_backward_s", "step_exposed_communication_s"),
    needs="runs of this suite on several ranks",
    decision="the rank that waits least exceeds the median by more than 1 % of the step beyond luck, p < 0.05",
)
CAPTION = (
    "Milliseconds per training step of each rank, mean over epochs and scored runs: its own time (loading, "
    "computing, updating) and its wait at the gradient exchange. All ranks share one step time, so the slow "
    "rank is the one that waits least. Its gap is its own time over the median rank's; dealing the ranks' times "
    "anew within each epoch says how large a gap luck gives equal ranks, and only the excess over that has a "
    "culprit. A triangle marks a slow rank: its excess is above 1 % of the step, and p < 0.05."
)
LEAST_RANKS = 4  # of a result with a chart
MOST_STRETCHES = 4  # of epochs that are listed
WAIT = "exposed_communication_s"
STEP = "step_s"


@dataclass(frozen=True)
class ResultRanks:
    """Holds the test for a slow rank of one result."""

    label: str
    benchmark: str
    size: str
    straggling: StragglerTest


def build_table(study: Study) -> pd.DataFrame:
    """Build a row per result and rank."""
    return pd.DataFrame(
        [
            {
                "label": item.label,
                "benchmark": item.benchmark,
                "size": item.size,
                "rank": rank,
                "own [s/step]": own,
                "wait [s/step]": wait,
                "epochs": item.straggling.blocks,
                "slow rank": item.straggling.slow,
                "gap [s/step]": item.straggling.gap_s,
                "gap by luck [s/step]": item.straggling.luck_s,
                "excess [s/step]": item.straggling.excess_s,
                "excess / step": item.straggling.excess_s / item.straggling.step_s,
                "p": item.straggling.p,
                "named": "yes" if item.straggling.is_slow and rank == item.straggling.slow else "no",
            }
            for item in _list_results(study)
            for rank, (own, wait) in enumerate(zip(item.straggling.own_s, item.straggling.wait_s, strict=True))
        ]
    )


def render_answer(study: Study) -> str:
    """Name the slow rank of each result, or say that chance explains the differences."""
    return join_statements([_describe_result(item) for item in _list_results(study)])


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per result: a bar per rank of its own time and its wait, in milliseconds."""
    parts = {"own": BLUE, "wait": ORANGE}
    shown = table.assign(own=1e3 * table["own [s/step]"], wait=1e3 * table["wait [s/step]"])
    shown["_whole"] = shown["own"] + shown["wait"]
    long = convert_to_long_table(shown, list(parts), "_part", "_ms")

    def draw(rows: pd.DataFrame) -> Chart:
        base = alt.Chart(rows).encode(x=alt.X("rank:O", axis=alt.Axis(labelAngle=0, labelOverlap=True)))
        bars = base.mark_bar().encode(
            y=alt.Y("sum(_ms):Q", title="ms per step"),
            color=alt.Color("_part:N", scale=alt.Scale(domain=list(parts), range=list(parts.values()))),
            order=alt.Order("_part:N"),
        )
        slow = base.transform_filter("datum.named == 'yes' && datum._part == 'own'")
        mark = slow.mark_point(shape="triangle-down", color=VERMILION, filled=True, size=90, yOffset=-8).encode(
            y="_whole:Q"
        )
        return layer_charts(bars, mark, height=200)

    return draw_panels(long, ["benchmark", "size", "label"], draw)


def _describe_result(item: ResultRanks) -> str:
    result = item.straggling
    label = f"{item.label} ({item.benchmark} {item.size})"
    share = f"{render_percent(100 * result.excess_s / result.step_s)} of the step"
    if result.is_slow:
        return (
            f"{label}: rank {result.slow} was slow in this run, {share} beyond luck (p = {result.p:.2g}); the others"
            " waited for it; noise that lasts as long as the run looks the same, so a second run decides"
        )
    some = f"; rank {result.slow} was slow in {_render_blocks(result)}" if result.slow_blocks else ""
    visible = result.find_visible_share()
    if visible is None:
        return (
            f"{label}: rank {result.slow} waits least, {render_si(result.waiting_s)}s a step less than the median; "
            f"{result.blocks} epoch{'s' * (result.blocks > 1)} on {len(result.own_s)} ranks are too few to tell a "
            f"slow rank from luck{some}"
        )
    if result.p < SIGNIFICANCE_LEVEL:
        return (
            f"{label}: no rank costs 1 % of the step; rank {result.slow} waits least, its excess is {share} (p ="
            f" {result.p:.2g}){some}"
        )
    return (
        f"{label}: no rank was slow all the time; a gap of {render_si(result.gap_s)}s a step is chance (p = "
        f"{result.p:.2g}); of ranks slower by {render_percent(100 * visible)} of the step all the time, 8 in 10 would "
        f"have been named{some}"
    )


def _render_blocks(result: StragglerTest) -> str:
    """Render the epochs in which a rank was slow: ``5 of 20 epochs (3 to 7)``."""
    runs: list[list[int]] = []
    for block in result.slow_blocks:
        if runs and runs[-1][-1] == block - 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    shown = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:MOST_STRETCHES]]
    more = ["..."] * (len(runs) > MOST_STRETCHES)
    return f"{len(result.slow_blocks)} of {result.blocks} epochs ({', '.join(shown + more)})"


def _list_results(study: Study) -> list[ResultRanks]:
    items = []
    for row in study.distinct[~study.distinct["published"]].to_dict("records"):
        # Without a score all runs of the result: their ranks were measured too
        runs = set(study.selections[row["group"]].averaged) or set(study.runs_of(row["group"])["run"])
        result = _judge_stragglers(study.tables.ranks[study.tables.ranks["run"].isin(runs)])
        if result is not None:
            items.append(ResultRanks(row["label"], row["benchmark"], row["size"], result))
    if not items:
        raise NotAnswerableError("rank_stats events of a run on 2 to 64 ranks; only this suite logs them")
    return items


def _judge_stragglers(ranks: pd.DataFrame) -> StragglerTest | None:
    """Test all epochs of a result whose log has every rank's values.

    None: there are none, or ranks differ in number.
    """
    own, wait, steps = [], [], []
    known = ranks[ranks["values"].notna() & (ranks["steps"] > 0)]
    for _, block in known.groupby(["run", "epoch_num"], sort=True):
        values = {q: _values(v) for q, v in zip(block["quantity"], block["values"], strict=True) if q in {WAIT, STEP}}
        # Both quantities of an epoch or none: own time is their difference
        if set(values) == {WAIT, STEP} and len(values[WAIT]) == len(values[STEP]):
            own.append(values[STEP] - values[WAIT])
            wait.append(values[WAIT])
            steps.append(block["steps"].iloc[0])
    # A permutation deals times among the ranks, so their number must not change
    if not own or len({len(row) for row in own}) != 1:
        return None
    return find_straggler(np.array(own), np.array(wait), np.array(steps, dtype=float))


def _values(text: str) -> np.ndarray:
    """Parse the JSON list of a table's cell; empty if a log states something else."""
    values = json.loads(text)
    usable = isinstance(values, list) and all(isinstance(v, int | float) and abs(v) < 1e12 for v in values)
    return np.array(values if usable else [], dtype=float)


def _has_many_ranks(table: pd.DataFrame) -> bool:
    """Return True if a result has enough ranks for one to stand out."""
    return bool(table["rank"].max() >= LEAST_RANKS - 1)


VIEWS = (View("stragglers", TITLE, QUESTION, CAPTION, build_table, render_answer, draw_chart, _has_many_ranks),)
