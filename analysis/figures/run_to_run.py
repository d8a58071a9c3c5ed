"""Figure: how much runs of one result differ, and whether epochs or speed differ."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from analysis.drawing.charts import (
    BLUE,
    GREEN,
    VERMILION,
    Chart,
    names_axis,
    number,
    points,
    result_panels,
    row_pixels,
    stack,
)
from analysis.drawing.digits import percent_text
from analysis.drawing.view import View
from analysis.results.names import short_heading
from analysis.results.spread import run_spread
from analysis.study import NotAnswerableError, Study

TITLE = "Run to run"
PARTS = (("run_s", "time to train", BLUE), ("epochs", "epochs", VERMILION), ("tau_s", "seconds per epoch", GREEN))


def spread_table(study: Study) -> pd.DataFrame:
    """Relative spread and the variance of log(epochs x seconds per epoch) by part."""
    rows = []
    for row in study.distinct.to_dict("records"):
        runs = study.converged_of(row["group"])
        spread = run_spread(runs["epochs"], runs["tau_s"])
        if spread is None:
            continue
        total = spread.variance_epochs + spread.variance_epoch_time
        line = {name: row[name] for name in ("benchmark", "size", "mode", "label", "group")} | {"n": spread.n}
        for name, title, _ in PARTS:
            values = runs[name].astype(float)
            line[f"{title}, std/mean [%]"] = 100 * float(values.std(ddof=1) / values.mean())
        line["variance of log(epochs)"] = spread.variance_epochs
        line["variance of log(seconds per epoch)"] = spread.variance_epoch_time
        line["2 x covariance"] = spread.covariance_twice
        line["from epochs [%]"] = 100 * spread.variance_epochs / total if total else np.nan
        rows.append(line)
    if not rows:
        raise NotAnswerableError("a result with at least two runs that reached the target")
    return pd.DataFrame(rows).drop(columns="group")


def spread_answer(study: Study) -> str:
    """Median spread, and where it comes from."""
    frame = spread_table(study)
    spread, share = frame["time to train, std/mean [%]"].median(), frame["from epochs [%]"].median()
    return (
        f"std/mean of time {percent_text(spread)} (median over results); of the variances of epochs and of seconds "
        "per epoch, "
        f"{share:.0f} % is that of epochs"
    )


def spread_chart(table: pd.DataFrame) -> Chart:
    """A row per result: the relative spread of time, epochs and seconds per epoch."""
    columns = {f"{title}, std/mean [%]": title for _, title, _ in PARTS}
    long = stack(table.rename(columns=columns), list(columns.values()), "_of_what", "_spread")
    colours = alt.Scale(domain=[title for _, title, _ in PARTS], range=[colour for *_, colour in PARTS])

    def draw(rows: pd.DataFrame) -> Chart:
        rows = rows.sort_values(["_spread", "label"])
        marks = alt.Chart(rows).mark_point(size=80, filled=True, opacity=0.85)
        return marks.encode(
            y=names_axis(rows), x=number(alt.X, "_spread", "standard deviation / mean [%]", zero=True),
            color=alt.Color("_of_what:N", scale=colours), shape=alt.Shape("_of_what:N", scale=alt.Scale(domain=colours.domain)),
        ).properties(height=row_pixels(rows["label"].nunique()))  # fmt: skip

    return result_panels(long, draw, columns=1)


def direction_table(study: Study) -> pd.DataFrame:
    """Principal axes by result."""
    rows = []
    for row in study.distinct.to_dict("records"):
        runs = _averaged(study, row["group"])
        spread = run_spread(runs["epochs"], runs["tau_s"])
        if spread is not None and spread.n > 2:
            rows.append(
                {
                    "benchmark": row["benchmark"],
                    "size": row["size"],
                    "mode": row["mode"],
                    "label": row["label"],
                    "group": row["group"],
                    "n": spread.n,
                    "half axis 1 [log10]": spread.axis_1**0.5,
                    "half axis 2 [log10]": spread.axis_2**0.5,
                    "variance along axis 1 [%]": 100 * spread.axis_1_share,
                    "axis 1 along epochs [%]": 100 * spread.along_epochs,
                    "correlation of the logs": spread.correlation,
                }
            )
    if not rows:
        raise NotAnswerableError("a result with at least three scored runs")
    return pd.DataFrame(rows)


def direction_answer(study: Study) -> str:
    """How many results spread along epochs, and which spreads most."""
    frame = direction_table(study)
    along = int((frame["axis 1 along epochs [%]"] > 50).sum())
    most = frame.loc[frame["half axis 1 [log10]"].idxmax()]
    spread = 100 * (10 ** most["half axis 1 [log10]"] - 1)
    return (
        f"along epochs in {along} of {len(frame)} results, along seconds per epoch in {len(frame) - along}; widest "
        f"{most['label']} ({short_heading(most['benchmark'], most['size'], most['mode'])}), {percent_text(spread)} "
        "for one "
        f"standard deviation of {most['n']} scored runs"
    )


def direction_chart(table: pd.DataFrame) -> Chart:
    """A point per result: how far its runs spread, and how much of that lies along epochs."""
    along = table["axis 1 along epochs [%]"] > 50
    names = ["along epochs: convergence", "along seconds per epoch: the machine"]
    shown = table.assign(
        _sign=along.map({True: names[0], False: names[1]}), _percent=100 * (10 ** table["half axis 1 [log10]"] - 1)
    )

    def draw(rows: pd.DataFrame) -> Chart:
        x = number(
            alt.X, "axis 1 along epochs [%]", "direction: 0 = seconds per epoch, 100 = epochs [%]", domain=[0, 100]
        )
        return points(rows, x, number(alt.Y, "_percent", "one standard deviation [%]", zero=True), names)

    return result_panels(shown, draw, zoom=True)


def _averaged(study: Study, group: str) -> pd.DataFrame:
    return study.runs[study.runs["run"].isin(study.selections[group].averaged)]


VIEWS = (
    View(
        "run_to_run", "How much runs differ",
        "Standard deviation over mean of time to train, epochs and seconds per epoch, over the runs that reached the "
        "target. Where epochs spread as wide as time, runs differ by convergence (the seed); where seconds per epoch "
        "do, by the machine. The table splits the variance of log time into both and their covariance; the share from "
        "epochs is that of the two variances, which the covariance is no part of.",
        spread_table, spread_answer, spread_chart, 2,
    ),
    View(
        "spread_ellipse", "Direction of the spread",
        "A point per result: the largest spread of its scored runs on log axes of epochs and seconds per epoch (the "
        "principal axis), one standard deviation in per cent, and the direction of that axis. At the right runs differ "
        "by convergence, at the left by the speed of the machine.",
        direction_table, direction_answer, direction_chart, 2,
    ),
)  # fmt: skip
