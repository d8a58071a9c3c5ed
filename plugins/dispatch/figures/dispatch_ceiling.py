"""Figure: how long a computation must be, so that a controller does not slow it, beside the steps of the results."""

from __future__ import annotations

from typing import cast

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import BLUE, GREEN, ORANGE, VERMILION, Chart, draw_intervals, draw_panels
from mlhpc.analysis.drawing.view import UNDERSTAND_TIME, Question, View, join_statements
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.plugins.dispatch.results import KIND, Dispatch

TITLE = "Dispatch ceiling"
NEEDS = "what mlhpc dispatch -o FILE wrote"
COLOURS = {"sync": VERMILION, "ahead": ORANGE, "chained": GREEN, "gang": BLUE}
LIMIT, ENDS = "95 % of SPMD from [ms]", ("95 % from [ms]", "95 % to [ms]")


def build_table(study: Study) -> pd.DataFrame:
    """Build a row per controller and mode. Without a limit every length is long enough, or it is not known."""
    files = cast("tuple[Dispatch, ...]", study.documents_of(KIND, f"{NEEDS} among the report's paths"))
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
            "doubt": file.doubt,
        }
        for file in files
        for row in file.rows
    ]
    if not rows:
        raise NotAnswerableError("a controller that was measured")
    return pd.DataFrame(rows)


def render_answer(study: Study) -> str:
    """State the longest limit of each machine, and whether it was busy."""
    table = build_table(study)
    said = []
    for machine, rows in table.groupby("machine", sort=False):
        known = rows.dropna(subset=[LIMIT])
        first = known.loc[known[LIMIT].idxmax()] if len(known) else None
        most = (
            "no controller slows any computation by 5 %"
            if first is None
            else f"a computation of {first[LIMIT]:.3g} ms or more is not slowed by 5 % by any mode, {first['label']} included"
        )
        said.append(f"{machine}: {most}" + (f" ({rows['doubt'].iloc[0]})" if rows["doubt"].iloc[0] else ""))
    return join_statements(said)


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw the limit of each controller and mode, with its interval."""
    colours = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    return draw_panels(
        table.dropna(subset=[LIMIT]),
        ["machine"],
        lambda rows: draw_intervals(rows, LIMIT, ENDS, LIMIT, "mode", colours, log=True),
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
        "controller, with its 95 % interval. Modes: acknowledged commands (sync), commands ahead, chains, several "
        "programs in one order (gang).",
        build_table, render_answer, draw_chart, lambda table: bool(table[LIMIT].notna().any()),
    ),
)  # fmt: skip
