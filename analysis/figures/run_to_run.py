"""Figure: how much runs of one result differ, and whether epochs or speed differ."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    VERMILION,
    Chart,
    compute_chart_height,
    convert_to_long_table,
    draw_result_panels,
    make_kind_channels,
    make_names_axis,
    make_number_channel,
)
from mlhpc.analysis.drawing.view import UNDERSTAND_CONVERGENCE, Question, View, render_count, render_percent
from mlhpc.analysis.results.selection import compute_run_spread, render_short_heading
from mlhpc.analysis.study import NotAnswerableError, Study

TITLE = "How much runs differ"
QUESTION = Question(
    UNDERSTAND_CONVERGENCE,
    "How much do runs of one system differ, and is it convergence or speed?",
    ("epochs", "tau_s"),
    needs="several runs",
)
CAPTION = (
    "Standard deviation over mean of time to train, epochs and seconds per epoch, over the runs that reached the"
    " target. Where epochs spread as wide as time, runs differ by convergence (the seed); where seconds per epoch do,"
    " by the machine. The table splits the variance of log time into both and their covariance, and has the direction"
    " of the largest spread on log axes (the principal axis): 100 % is along epochs, 0 % along seconds per epoch."
)
PARTS = (("run_s", "time to train", BLUE), ("epochs", "epochs", VERMILION), ("tau_s", "seconds per epoch", GREEN))


def build_table(study: Study) -> pd.DataFrame:
    """Build the relative spread, and the variance of log(epochs x seconds per epoch) by part."""
    rows = []
    for row in study.distinct.to_dict("records"):
        runs = study.converged_of(row["group"])
        spread = compute_run_spread(runs["epochs"], runs["tau_s"])
        if spread is None:
            continue
        # Without the covariance, which belongs to neither and may be negative
        total = spread.variance_epochs + spread.variance_epoch_time
        line = {name: row[name] for name in ("benchmark", "size", "mode", "label", "group")} | {"n": spread.n}
        for name, title, _ in PARTS:
            values = runs[name].astype(float)
            line[f"{title}, std/mean [%]"] = 100 * float(values.std(ddof=1) / values.mean())
        line["variance of log(epochs)"] = spread.variance_epochs
        line["variance of log(seconds per epoch)"] = spread.variance_epoch_time
        line["2 x covariance"] = spread.covariance_twice
        line["from epochs [%]"] = 100 * spread.variance_epochs / total if total else np.nan
        line["direction, along epochs [%]"] = 100 * spread.along_epochs
        rows.append(line)
    if not rows:
        raise NotAnswerableError("a result with at least two runs that reached the target")
    return pd.DataFrame(rows).drop(columns="group")


def render_answer(study: Study) -> str:
    """State the median spread, where it comes from, and which result's runs differ most."""
    frame = build_table(study)
    spread = frame["time to train, std/mean [%]"]
    # More than half of the squared direction: the spread is mostly along epochs
    along = int((frame["direction, along epochs [%]"] > 50).sum())
    if len(frame) == 1:
        cause = "epochs" if along else "seconds per epoch"
        return f"times of runs vary by {render_percent(spread.max())} (standard deviation / mean), mostly by {cause}"
    most = frame.loc[spread.idxmax()]
    problem = render_short_heading(most["benchmark"], most["size"], most["mode"])
    return (
        f"times of runs vary by {render_percent(spread.median())} (standard deviation / mean, median over results); "
        f"runs differ by epochs in {along} of {render_count(len(frame), 'result')}, by seconds per epoch in "
        f"{len(frame) - along}; most: {most['label']} ({problem}), {render_percent(spread.max())}"
    )


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw a row per result: the relative spread of time, epochs and seconds per epoch."""
    columns = {f"{title}, std/mean [%]": title for _, title, _ in PARTS}
    long = convert_to_long_table(table.rename(columns=columns), list(columns.values()), "_of_what", "_spread")
    kinds = make_kind_channels("_of_what", {title: colour for _, title, colour in PARTS})

    def draw(rows: pd.DataFrame) -> Chart:
        rows = rows.sort_values(["_spread", "label"])
        marks = alt.Chart(rows).mark_point(size=80, filled=True, opacity=0.85)
        x = make_number_channel(alt.X, "_spread", "standard deviation / mean [%]", zero=True)
        drawn = marks.encode(x=x, y=make_names_axis(rows), **kinds)
        return drawn.properties(height=compute_chart_height(rows["label"].nunique()))

    return draw_result_panels(long, draw, columns=1)


VIEWS = (View("run_to_run", TITLE, QUESTION, CAPTION, build_table, render_answer, draw_chart, 2),)
