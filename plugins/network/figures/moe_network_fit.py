"""Figure: measured all-to-alls, and the two-level model fitted to them."""

from __future__ import annotations

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    TEXT_COLOUR,
    Chart,
    draw_panels,
    draw_points,
    layer_charts,
    make_number_channel,
)
from mlhpc.analysis.drawing.view import RUN_EXPERTS, Question, View, render_label
from mlhpc.analysis.study import Study
from mlhpc.plugins.network.figures import list_fits
from mlhpc.plugins.network.fit import compute_median_max_error

TITLE = "All-to-all: measured and fitted"
QUESTION = Question(
    RUN_EXPERTS,
    "How well does a two-level model describe the machine's all-to-alls?",
    ("measured [s]", "model [s]", "error [%]"),
    needs="an all-to-all sweep",
    decision="the errors that count are those of sizes and ranks that the fit did not see",
)
CAPTION = (
    "Median seconds of the slowest rank by the bytes each rank sends. Full markers went into the fit, hollow ones "
    "were left out of it; the lines join what the model says of them. Latency and bandwidth inside and across "
    "nodes are fitted in log seconds; the bandwidth of copies is measured."
)


def build_table(study: Study) -> pd.DataFrame:
    """Build measured and predicted seconds, and whether the fit used the measurement."""
    return pd.DataFrame(
        [
            {
                "sweep": fit.sweep.name,
                "ranks": item.measurement.ranks,
                "ranks per node": item.measurement.ranks_per_node,
                "algorithm": item.measurement.algorithm,
                "bytes per rank": item.measurement.size_bytes,
                "n": item.measurement.repeats,
                "measured [s]": item.measurement.seconds,
                "fastest [s]": item.measurement.fastest_s,
                "slowest [s]": item.measurement.slowest_s,
                "model [s]": item.model_s,
                "error [%]": 100 * item.error,
                "in the fit": fitted,
            }
            for fit in list_fits(study)
            for items, fitted in ((fit.fitted, True), (fit.held_out, False))
            for item in items
        ]
    )


def render_answer(study: Study) -> str:
    """State the error on measurements that the fit did not use."""
    sentences = []
    for fit in list_fits(study):
        middle, worst = compute_median_max_error(fit.held_out)
        further = compute_median_max_error(fit.next_grid)[0]
        sentences.append(
            f"{render_label(fit.sweep.description, 90)}: sizes left out of the fit are missed by {100 * middle:.0f} % "
            "(median; largest "
            f"{100 * worst:.0f} %)"
            + (f", the largest grid by {100 * further:.0f} % when fitted to smaller ones" if fit.next_grid else "")
        )
    return "; ".join(sentences)


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per sweep: measured times as markers, the model as lines."""
    # Each grid and algorithm has a line and a marker of its own
    grids = table["ranks"].astype(str) + " ranks, " + table["algorithm"]

    def draw(rows: pd.DataFrame) -> Chart:
        x, y = (
            make_number_channel(alt.X, "bytes per rank", log=True, prefix=True),
            make_number_channel(alt.Y, "measured [s]", "all-to-all [s]", log=True, prefix=True),
        )
        line = (
            alt.Chart(rows)
            .mark_line(color=TEXT_COLOUR, strokeWidth=1)
            .encode(
                x=x,
                y=make_number_channel(alt.Y, "model [s]", "all-to-all [s]", log=True, prefix=True),
                detail="_sign:N",
            )
        )
        return layer_charts(line, draw_points(rows, x, y, grids, hollow="_hollow"), height=320)

    return draw_panels(table.assign(_sign=grids, _hollow=~table["in the fit"]), ["sweep"], draw, zoom=True)


VIEWS = (View("moe_network_fit", TITLE, QUESTION, CAPTION, build_table, render_answer, draw_chart),)
