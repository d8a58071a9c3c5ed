"""Figure: samples per second of one accelerator, and many models at once."""

from __future__ import annotations

import math

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    PANEL_HEIGHT,
    Chart,
    draw_points,
    draw_result_panels,
    draw_stacked_bars,
    layer_charts,
    make_colour_channel,
    make_number_channel,
)
from mlhpc.analysis.drawing.view import (
    CHOOSE_SYSTEMS,
    MOST_PASSED,
    Answer,
    Question,
    View,
    has_several_rows,
    join_statements,
    rankable,
)
from mlhpc.analysis.results.machine_size import PLURAL, add_extent, render_system_units
from mlhpc.analysis.results.names import (
    CLASS_COLUMNS,
    PROBLEM_COLUMNS,
    build_result_table,
    group_tasks,
    render_short_heading,
)
from mlhpc.analysis.study import NotAnswerableError, Study

TITLE = "Throughput"
RATE, EACH = "train [samples/s], harmonic mean", "train [samples/s per size]"


def build_rate_table(study: Study) -> pd.DataFrame:
    """Build the mean throughput by result."""
    frame = _with_rate(study)
    return build_result_table(
        frame,
        ("mode", "label", "ranks", "machine", "device", "rounds", "division"),
        {
            "machine size": frame["extent"],
            "counts": frame["one"].map(PLURAL),
            "n": frame["n_averaged"],
            RATE: frame["train_rate.mean"],
            "train [samples/s], spread": frame["train_rate.std"],
            EACH: frame["train_rate.mean"] / frame["extent"],
            "evaluation [samples/s], harmonic mean": frame["eval_rate.mean"],
        },
    )


def render_rate_answer(study: Study) -> Answer:
    """Name the fastest and the slowest part of each problem that was trained on several sizes, else the most
    samples.
    """
    table = build_rate_table(study)
    sentences = []
    for (benchmark, size), rows in (
        _select_sizes(table).sort_values([EACH, "label"]).groupby(PROBLEM_COLUMNS, sort=True)
    ):
        low, high = rows.iloc[0], rows.iloc[-1]
        ends = [f"{_render_rate(row[EACH])} samples/s on {row['label']}" for row in (high, low)]
        one = high["counts"].removesuffix("s")
        problem = render_short_heading(benchmark, size, "")
        sentences.append(Answer(f"{problem}: per {one} that trains {', '.join(ends)}", [high.name, low.name]))
    rows = table.sort_values([RATE, "label"], ascending=[False, True])
    first = rows.groupby(CLASS_COLUMNS, sort=True).head(1).sort_values(CLASS_COLUMNS)
    return join_statements(
        sentences
        or [
            Answer(
                f"{render_short_heading(*(r[name] for name in CLASS_COLUMNS))}: {_render_rate(r[RATE])} samples/s "
                f"({r['label']}, n = {r['n']})",
                [at],
            )
            for at, r in first.iterrows()
        ]
    )


def _render_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def draw_rate_chart(table: pd.DataFrame) -> Chart:
    """Draw log-log panels of the speed of one part over the size of the machine; a line joins the sizes of a
    machine.
    """
    shown = _select_sizes(table).assign(_sign=lambda rows: rows["device"])

    def draw(rows: pd.DataFrame) -> Chart:
        # The largest first: its name matters most
        rows = rows.sort_values("machine size", ascending=False)
        one = str(rows["counts"].iloc[0]).removesuffix("s")
        x = make_number_channel(alt.X, "machine size", str(rows["counts"].iloc[0]), log=True)
        y = make_number_channel(alt.Y, EACH, f"samples/s of one {one}", log=True)
        line = (
            alt.Chart(rows)
            .mark_line(strokeWidth=1.5, opacity=0.6)
            .encode(
                x=x,
                y=y,
                color=make_colour_channel(alt.Color, shown["device"]),
                detail=["machine:N", "rounds:N", "division:N"],
            )
        )
        return layer_charts(line, draw_points(rows, x, y, shown["device"], names="label"), height=PANEL_HEIGHT)

    return draw_result_panels(shown, draw, zoom=True)


def _select_sizes(table: pd.DataFrame) -> pd.DataFrame:
    """Select the results by time to train whose problem was trained on machines of several sizes."""
    known = table[(table["mode"] == "strong") & (table["machine size"] > 0) & (table[EACH] > 0)]
    return known[known.groupby(PROBLEM_COLUMNS)["machine size"].transform("nunique") > 1]


def _has_sizes(table: pd.DataFrame) -> bool:
    return len(_select_sizes(table)) > 0


def build_models_table(study: Study) -> pd.DataFrame:
    """Build models per minute, the most first, and how busy the machine was."""
    frame = _select_with_models(study)
    return build_result_table(
        frame,
        ("label", "division", "models"),
        {
            "models/min": frame["models_per_min"],
            "not ranked": frame["not_ranked"],
            "compute units of the system": frame["units_described"],
            "models/min per 1000 units of the system": 1000 * frame["models_per_min"] / frame["units_described"],
            "compute units that trained these at once": frame["units_busy"],
            "compute units of an instance": frame["units"],
            "time to train all [min]": frame["score_s"] / 60,
            "mean time of one [min]": frame["run_s.mean"] / 60,
            "an instance ran, mean share [%]": 100 * frame["run_s.mean"] / frame["score_s"],
        },
    )


def render_models_answer(study: Study) -> Answer:
    """Name the most models per minute of each task, and what is not ranked but trains more."""
    sentences = []
    frame = _select_with_models(study).reset_index(drop=True)  # the rows of the table
    for _, short, rows in group_tasks(frame):
        ranked = rankable(rows)
        if ranked.empty:
            continue
        best = ranked.iloc[0]
        units = render_system_units(best)
        of = f" on {units} compute units" if units else ""
        first = f", carried over from {best['carried']}" if pd.notna(best["carried"]) else ""
        said = f"{short}: {best['models_per_min']:.3g} models/min{of} ({best['label']}{first})"
        more = rows[(rows["models_per_min"] > best["models_per_min"]) & rows["not_ranked"].notna()]
        named = [f"{row['models_per_min']:.3g} ({row['label']})" for row in more.head(MOST_PASSED).to_dict("records")]
        said += f"; more, but not ranked: {', '.join(named)}" if named else ""
        sentences.append(Answer(said, [best.name, *more.index[:MOST_PASSED]]))
    return join_statements(sentences)


def draw_models_chart(table: pd.DataFrame) -> Chart:
    """Draw models per minute, with the share of the time that an instance ran at the bar's end."""
    shares = table["an instance ran, mean share [%]"].map("ran {:.0f} % of the time".format)
    shares += table["not ranked"].notna().map({True: ", not ranked", False: ""})
    return draw_result_panels(
        table.assign(_end=shares),
        lambda rows: draw_stacked_bars(rows, {"models/min": BLUE}, "models per minute", text="_end"),
        columns=1,
    )


def _with_rate(study: Study) -> pd.DataFrame:
    """Select results with a rate. Their size is NaN if it is unknown; in throughput mode it is that of one instance."""
    frame = rankable(study.distinct)
    frame = frame[frame["train_rate.mean"].notna()]
    if frame.empty:
        raise NotAnswerableError("no run has training time, epochs and train_samples")
    known = add_extent(frame, CLASS_COLUMNS, training=True)
    unknown = frame.drop(known.index).assign(extent=math.nan, one="unit")
    return pd.concat([part for part in (known, unknown) if len(part)]).loc[frame.index]


def _select_with_models(study: Study) -> pd.DataFrame:
    """Select results with models per minute, the most first in each benchmark and size."""
    frame = study.in_rounds
    frame = frame[(frame["models_per_min"] > 0) & (frame["score_s"] > 0)]
    if rankable(frame).empty:
        raise NotAnswerableError("a throughput-mode result (several instances at once) with a score")
    order = [*PROBLEM_COLUMNS, "models_per_min", "label"]
    return frame.sort_values(order, ascending=[True, True, False, True])


VIEWS = (
    View(
        "throughput", "Speed of one accelerator over machine size",
        Question(
            CHOOSE_SYSTEMS,
            "Is a machine fast because it is large, or because each of its parts is?",
            ("train_rate.mean", "train_rate_per_unit"),
            needs="a second machine size",
        ),
        "Samples per second of each accelerator, processor, node, core or rank (whichever varies) over the number of "
        "them that train: epochs × training samples ÷ training time, without evaluation, staging and what the first "
        "epoch trains longer than later ones; harmonic mean over the scored runs. CosmoFlow of v0.7 has smaller "
        "convolutions: a third of the later work per sample. A line joins the sizes of one machine: a horizontal one "
        "is perfect scaling. Higher is a faster part, further right a larger machine. The table has standard "
        "deviations, and throughput mode.",
        build_rate_table, render_rate_answer, draw_rate_chart, _has_sizes,
    ),
    View(
        "throughput_mode", "Many models at once",
        Question(
            CHOOSE_SYSTEMS,
            "How many models per minute does a machine train, and do the instances run together?",
            ("models_per_min", "units_described"),
            needs="runs in throughput mode",
        ),
        "Models that reached the target per minute, between the first run_start and the last run_stop of the whole "
        "system. Below 100 % of the time the system waited for instances that began later or ended last. Pruned "
        "instances are left out. 1,888 of 2,048 compute units: so many trained these models at once.",
        build_models_table, render_models_answer, draw_models_chart, has_several_rows,
    ),
)  # fmt: skip
