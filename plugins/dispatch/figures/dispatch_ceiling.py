"""Figure: how long a computation must be, so that a controller does not slow it, beside the steps of the results."""

from __future__ import annotations

from typing import cast

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import BLUE, GREEN, ORANGE, VERMILION, Chart, draw_intervals, draw_panels
from mlhpc.analysis.drawing.view import UNDERSTAND_TIME, Question, View, join_statements
from mlhpc.analysis.figures.time_split import STEP_PARTS, build_step_table
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.plugins.dispatch.results import KIND, Dispatch

TITLE = "Dispatch ceiling"
NEEDS = "what mlhpc dispatch -o FILE wrote"
COLOURS = {"sync": VERMILION, "ahead": ORANGE, "chained": GREEN, "gang": BLUE}
LIMIT, ENDS = "95 % of SPMD from [ms]", ("95 % from [ms]", "95 % to [ms]")
STEP = "shortest step of the results [ms]"


def build_table(study: Study) -> pd.DataFrame:
    """Build a row per controller and mode. Without a limit every length is long enough, or it is not known."""
    files = cast("tuple[Dispatch, ...]", study.documents_of(KIND, f"{NEEDS} among the report's paths"))
    step_ms = _find_shortest_step(study)
    rows = [
        {
            "machine": f"{file.system}, {file.cpu}, {file.ranks} ranks",
            "label": f"{row.controller} {row.mode}",
            "mode": row.mode,
            "version": row.version,
            "n": row.n,
            "SPMD [us]": 1e6 * row.spmd_s,
            "overhead [us]": 1e6 * row.overhead_s.value,
            "time / SPMD": row.ratio.value,
            LIMIT: 1e3 * row.break_even_s.value if row.break_even_s else None,
            ENDS[0]: 1e3 * row.break_even_s.low if row.break_even_s else None,
            ENDS[1]: 1e3 * (row.break_even_s.high or 0.0) if row.break_even_s else None,
            "closed form [ms]": None if row.predicted_s is None else 1e3 * row.predicted_s,
            "limit": row.render_limit(),
            STEP: step_ms,
            "doubt": file.doubt,
        }
        for file in files
        for row in file.rows
    ]
    if not rows:
        raise NotAnswerableError("a controller that was measured")
    return pd.DataFrame(rows)


def _find_shortest_step(study: Study) -> float | None:
    try:
        return float(build_step_table(study)[[f"{title} [ms/step]" for _, title, _ in STEP_PARTS]].sum(axis=1).min())
    except NotAnswerableError:
        return None


def render_answer(study: Study) -> str:
    """State each machine's longest limit, which are longer than a step or not known, and whether it was busy."""
    table = build_table(study)
    said = []
    for machine, rows in table.groupby("machine", sort=False):
        known = rows.dropna(subset=[LIMIT]).sort_values(LIMIT)
        unknown = rows.loc[rows["limit"] == "inconclusive", "label"]
        texts = [
            f"from {known['limit'].iloc[-1]} on ({known['label'].iloc[-1]}) no measured mode costs a computation 5 %"
            if len(known)
            else "no controller is seen to cost a computation 5 %"
        ]
        if len(known) and (step := rows[STEP].iloc[0]) is not None:
            low, high = (known[end] > step for end in ENDS)
            names = {
                "is too short for": known.loc[low, "label"],
                "may be too short for": known.loc[~low & high, "label"],
            }
            parts = [f"{verb} {', '.join(labels)}" for verb, labels in names.items() if len(labels)]
            texts.append(f"a step of {step:.3g} ms " + (" and ".join(parts) or "is long enough for all"))
        texts += [f"inconclusive: {', '.join(unknown)}"] if len(unknown) else []
        texts += [rows["doubt"].iloc[0]] if rows["doubt"].iloc[0] else []
        said.append(f"{machine}: " + "; ".join(texts))
    return join_statements(said)


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw the limit of each controller and mode, with its interval, and a line at the shortest step."""
    step = table[STEP].iloc[0]
    colours = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    return draw_panels(
        table.dropna(subset=[LIMIT]),
        ["machine"],
        lambda rows: draw_intervals(rows, LIMIT, ENDS, LIMIT, "mode", colours, log=True, at=step),
        columns=1,
    )


VIEWS = (
    View(
        "dispatch_ceiling", TITLE,
        Question(
            UNDERSTAND_TIME, "How long must a computation be, so that a controller does not slow it?", (LIMIT,), needs=NEEDS,
            decision="a step that is longer than the limit loses at most 5 % to the controller",
        ),
        "The shortest computation, its all-reduce included, with 95 % of the throughput of ranks without a "
        "controller, with its 95 % interval. Dashed: the shortest step of the results. Modes: acknowledged commands "
        "(sync), commands ahead, chains, several programs in one order (gang). Not drawn: modes that slow no length "
        "by 5 %, and inconclusive ones.",
        build_table, render_answer, draw_chart, lambda table: bool(table[LIMIT].notna().any()),
    ),
)  # fmt: skip
