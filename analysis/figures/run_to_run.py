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
from mlhpc.analysis.drawing.view import (
    UNDERSTAND_CONVERGENCE,
    Answer,
    Question,
    View,
    count_sessions,
    has_several_rows,
    render_count,
    render_percent,
)
from mlhpc.analysis.results.decompose import compute_run_spread
from mlhpc.analysis.results.names import render_short_heading
from mlhpc.analysis.study import NotAnswerableError, Study, build_once
from mlhpc.suite.statistics import compute_t_quantile
from mlhpc.suite.statistics.sessions import fit_slope, render_sessions

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
    " by the machine. What a part explains is its slope over log time, of log epochs, log seconds per epoch and the"
    " rest, which is staging, the first epoch and other time; the answer names a cause only where its 95 % interval is"
    " above 50 %. The table also splits the variance of log (epochs × seconds per epoch) into both and their"
    " covariance, and has the direction of the largest spread on log axes (the principal axis): 100 % is along epochs,"
    " 0 % along seconds per epoch."
)
PARTS = (("run_s", "time to train", BLUE), ("epochs", "epochs", VERMILION), ("tau_s", "seconds per epoch", GREEN))
CAUSES = ("epochs", "seconds per epoch", "staging and other time")
CAUSE = "runs differ mostly by"  # column; None: the runs cannot tell


@build_once
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
        line = {name: row[name] for name in ("benchmark", "size", "mode", "label")} | {"n": spread.n}
        line["sessions"] = count_sessions(study, row["group"]) if row["mode"] == "strong" else 1
        for name, title, _ in PARTS:
            values = runs[name].astype(float)
            line[f"{title}, std/mean [%]"] = 100 * float(values.std(ddof=1) / values.mean())
        line["variance of log(epochs)"] = spread.variance_epochs
        line["variance of log(seconds per epoch)"] = spread.variance_epoch_time
        line["2 x covariance"] = spread.covariance_twice
        line["from epochs [%]"] = 100 * spread.variance_epochs / total if total else np.nan
        line["direction, along epochs [%]"] = 100 * spread.along_epochs
        line |= _explain(runs[["epochs", "tau_s", "run_s"]].astype(float))
        rows.append(line)
    if not rows:
        raise NotAnswerableError("a result with at least two runs that reached the target")
    return pd.DataFrame(rows)


def _explain(runs: pd.DataFrame) -> dict[str, float | str | None]:
    """Compute the per cent of the spread of log time that comes with each cause, its 95 % interval, and the cause.

    It is the slope of the part's log over log time, so the covariance counts. NaN for fewer than three runs.
    """
    logs = np.log(runs.where((runs > 0) & np.isfinite(runs)).dropna())
    times = logs["run_s"]
    found: dict[str, float | str | None] = {CAUSE: None}
    can_tell = len(logs) >= 3 and np.ptp(times) > 0
    parts = (logs["epochs"], logs["tau_s"], times - logs["epochs"] - logs["tau_s"])
    for name, part in zip(CAUSES, parts, strict=True):
        slope, error = fit_slope([list(times)], [list(part)]) if can_tell else (np.nan, np.nan)
        half = compute_t_quantile(0.975, len(logs) - 2) * error if can_tell else np.nan
        ends = {f"{name}, 95 % {end} [%]": 100 * at for end, at in (("from", slope - half), ("to", slope + half))}
        found |= {f"explained by {name} [%]": 100 * slope, **ends}
        if slope - half > 0.5:
            found[CAUSE] = name
    return found


def render_answer(study: Study) -> Answer:
    """State the median spread, what it comes from where the runs can tell, and which result's runs differ most."""
    frame = build_table(study)
    spread = frame["time to train, std/mean [%]"]
    causes = frame[CAUSE].value_counts()
    if len(frame) == 1:
        runs = render_sessions(frame["n"].iloc[0], frame["sessions"].iloc[0])
        cause = (
            f"mostly by {frame[CAUSE].iloc[0]}"
            if len(causes)
            else f"whether by epochs or by seconds per epoch cannot be told from {runs}"
        )
        return Answer(f"times of runs vary by {render_percent(spread.max())} (standard deviation / mean), {cause}")
    most = frame.sort_values(["time to train, std/mean [%]", "label"]).iloc[-1]
    problem = render_short_heading(most["benchmark"], most["size"], most["mode"])
    return Answer(
        f"times of runs vary by {render_percent(spread.median())} (standard deviation / mean, median over results); "
        f"runs differ mostly by epochs in {causes.get(CAUSES[0], 0)} of {render_count(len(frame), 'result')}, by "
        f"{CAUSES[1]} in {causes.get(CAUSES[1], 0)}, by {CAUSES[2]} in {causes.get(CAUSES[2], 0)}, and the runs of "
        f"{frame[CAUSE].isna().sum()} cannot tell; "
        f"most: {most['label']} ({problem}), {render_percent(most['time to train, std/mean [%]'])} of "
        f"{render_sessions(most['n'], most['sessions'])}"
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


VIEWS = (View("run_to_run", TITLE, QUESTION, CAPTION, build_table, render_answer, draw_chart, has_several_rows),)
