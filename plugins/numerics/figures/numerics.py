"""Figure: what changes of the system and of the deployment do, and epochs to target by framework."""

from __future__ import annotations

import re
import statistics
from typing import Any, cast

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    ORANGE,
    Chart,
    draw_intervals,
    draw_panels,
    layer_charts,
    make_span_channels,
)
from mlhpc.analysis.drawing.view import UNDERSTAND_CONVERGENCE, Answer, Question, View, join_statements, render_label
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.plugins.numerics.results import KIND, Numerics
from mlhpc.suite.log.score import find_round_group
from mlhpc.suite.statistics.sessions import compute_log_interval

TITLE = "Numerics"
PANEL = ["workload", "size"]
LOST = "metric, after - before"
NEEDS = "a file of `mlhpc numerics deploy -o FILE`"
KEYS = ["benchmark", "size", "mode", "division", "rounds"]
FRAMEWORKS = ("TensorFlow", "PyTorch", "MXNet")


def build_deployed_table(study: Study) -> pd.DataFrame:
    """Build the metric's difference after each change of a deployment, the largest loss first."""
    missing = f"{NEEDS} among the report's paths"
    results = [each for each in cast("tuple[Numerics, ...]", study.documents_of(KIND, missing)) if each.values]
    if not results:
        raise NotAnswerableError(missing)
    return pd.DataFrame(
        [
            {
                "workload": result.workload,
                "size": result.size,
                "metric": result.metric,
                "change": row.change,
                "kind": row.group,
                "seeds": len(row.deltas),
                LOST: row.mean,
                "low": row.low,
                "high": row.high,
                "spread of seeds": statistics.stdev(result.values),
            }
            for result in results
            for row in result.measured
        ]
    )


def render_deployed_answer(study: Study) -> Answer:
    """Name the change that costs most, and count those that cost less than seeds differ."""
    table, parts = build_deployed_table(study), []
    for (workload, size), rows in table.groupby(PANEL, sort=False):
        first = rows.iloc[0]
        small = int((rows[LOST].abs() < rows["spread of seeds"]).sum())
        text = (
            f"{workload} {size}: {render_label(first['change'])} changes {first['metric']} most, by {first[LOST]:+.2g} "
            f"[{first['low']:+.2g}, {first['high']:+.2g}]; {small} of {len(rows)} changes by less than seeds differ"
        )
        parts.append(Answer(text, [int(rows.index[0])]))
    return join_statements(parts)


def draw_deployed_chart(table: pd.DataFrame) -> Chart:
    """Draw a point with interval per change, and the spread of seeds as a band."""

    def draw(rows: pd.DataFrame) -> Chart:
        rows = rows.assign(label=rows["change"], _low=-rows["spread of seeds"], _high=rows["spread of seeds"])
        kinds = list(dict.fromkeys(rows["kind"]))
        band = alt.Chart(rows.head(1)).mark_rect(color=GREEN, opacity=0.2)
        band = band.encode(**make_span_channels("x", "_low", "_high", LOST))
        return layer_charts(band, draw_intervals(rows, LOST, ("low", "high"), LOST, "kind", alt.Scale(domain=kinds)))

    return draw_panels(table, PANEL, draw, columns=1)


def build_frameworks_table(study: Study) -> pd.DataFrame:
    """Build the geometric mean of epochs to target by benchmark and framework, with its 95 % interval over results.

    The unit is a ranked result of different courses. Frameworks differ in batch size too, which the table states.
    """
    rows = study.sampled
    stated = rows["system_key"].map(study.tables.systems.set_index("system_key")["framework"]).fillna("")
    rows = rows.assign(framework=[_find_framework(each) for each in stated])
    rows = rows[(rows["framework"] != "") & rows["epochs_to_target.mean"].notna()]
    rounds = rows["round"].map(find_round_group, na_action="ignore").fillna("")
    rows = rows.assign(rounds=rounds, division=rows["division"].fillna(""))
    found: list[dict[str, Any]] = []
    for key, results in rows.groupby([*KEYS, "framework"]):
        epochs = [float(each) for each in results["epochs_to_target.mean"]]
        # Two results say too little of how much results differ
        low, high = (len(epochs) > 2 and compute_log_interval(epochs)) or (None, None)
        found.append(
            dict(zip((*KEYS, "framework"), key, strict=True))
            | {"results": len(epochs), "epochs": statistics.geometric_mean(epochs), "low": low, "high": high}
            | {"median batch": results["global_batch_size"].median()}
        )
    table = pd.DataFrame(found)
    if not table.empty:
        table = table[table.groupby(KEYS)["framework"].transform("nunique") > 1]
    if table.empty:
        raise NotAnswerableError("results of two frameworks (system descriptions state them)")
    return table


def _find_framework(text: str) -> str:
    return next((name for name in FRAMEWORKS if re.search(name, text, re.IGNORECASE)), "")


def render_frameworks_answer(study: Study) -> Answer:
    """State the epochs of each framework by benchmark."""
    table, parts = build_frameworks_table(study), []
    for (benchmark, size, mode, division, rounds), rows in table.groupby(KEYS, sort=False):
        each = ", ".join(
            f"{row['framework']} {row['epochs']:.3g}"
            + (f" [{row['low']:.3g}, {row['high']:.3g}]" if pd.notna(row["low"]) else "")
            + f" (n = {row['results']}, median batch {row['median batch']:g})"
            for _, row in rows.iterrows()
        )
        kind = " throughput" * (mode == "weak") + " (open)" * (division == "open")
        text = f"{benchmark} {size}{kind} {rounds}: {each}"
        parts.append(Answer(text, [*map(int, rows.index)]))
    return join_statements(parts)


def draw_frameworks_chart(table: pd.DataFrame) -> Chart:
    """Draw a point with interval for each framework."""
    colours = alt.Scale(domain=list(FRAMEWORKS), range=[ORANGE, BLUE, GREEN])

    def draw(rows: pd.DataFrame) -> Chart:
        rows = rows.assign(label=rows["framework"])
        return draw_intervals(rows, "epochs", ("low", "high"), "epochs to target", "framework", colours)

    return draw_panels(table, KEYS, draw, columns=1)


VIEWS = (
    View(
        "numerics_deployed", "What a change of the deployment costs",
        Question(UNDERSTAND_CONVERGENCE, "What does a change of the deployment cost?", (LOST,), needs=NEEDS),
        "A point per change: the metric after it minus before, of the same trained models; positive is better. Line: "
        "95 % interval of the mean over seeds. Band: how much seeds differ. A change without a point leaves every "
        "bit.",
        build_deployed_table, render_deployed_answer, draw_deployed_chart,
    ),
    View(
        "numerics_frameworks", "Epochs by framework",
        Question(
            UNDERSTAND_CONVERGENCE, "Do implementations of one benchmark need as many epochs?", ("epochs", "median batch"),
            needs="results of two frameworks",
        ),
        "A point per framework: the geometric mean of the epochs to target over results that are ranked and not all "
        "of one course, with its 95 % interval. Nobody chose them at random: batch sizes and years differ too, and a "
        "larger batch needs more epochs.",
        build_frameworks_table, render_frameworks_answer, draw_frameworks_chart,
    ),
)  # fmt: skip
