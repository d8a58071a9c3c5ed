"""Figure: samples per second, and many models at once."""

from __future__ import annotations

import math

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import BLUE, Chart, draw_intervals, draw_result_panels, draw_stacked_bars
from mlhpc.analysis.drawing.view import (
    SCALE,
    UNDERSTAND_TIME,
    Answer,
    Question,
    View,
    join_statements,
    rankable,
)
from mlhpc.analysis.results.selection import (
    CLASS_COLUMNS,
    PLURAL,
    PROBLEM_COLUMNS,
    add_extent,
    build_result_table,
    group_tasks,
    render_short_heading,
)
from mlhpc.analysis.study import NotAnswerableError, Study

TITLE = "Throughput"
RATE = "train [samples/s], harmonic mean"


def build_rate_table(study: Study) -> pd.DataFrame:
    """Build the mean throughput by result."""
    frame = _with_rate(study)
    return build_result_table(
        frame,
        ("mode", "label", "ranks"),
        {
            "machine size": frame["extent"],
            "counts": frame["one"].map(PLURAL),
            "n": frame["n_averaged"],
            RATE: frame["train_rate.mean"],
            "train [samples/s], spread": frame["train_rate.std"],
            "train [samples/s per size]": frame["train_rate.mean"] / frame["extent"],
            "evaluation [samples/s], harmonic mean": frame["eval_rate.mean"],
        },
    )


def render_rate_answer(study: Study) -> Answer:
    """Name the most samples per second of each class."""
    rows = build_rate_table(study).sort_values([RATE, "label"], ascending=[False, True])
    first = rows.groupby(CLASS_COLUMNS, sort=True).head(1).sort_values(CLASS_COLUMNS)
    return join_statements(
        [
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
    """Draw a row per result, the fastest on top: mean and standard deviation over the runs."""
    spread = table["train [samples/s], spread"].astype(float).fillna(0.0)
    shown = table.assign(
        # A standard deviation above the mean would put the lower end below 0, which no logarithmic axis has
        _low=(table[RATE] - spread).clip(lower=table[RATE] / 100), _high=table[RATE] + spread,
        _counts=table["counts"].fillna("unknown"),
    ).sort_values(RATE, ascending=False)  # fmt: skip

    def draw(rows: pd.DataFrame) -> Chart:
        # On a linear axis rates more than tenfold apart would press the slow ones together
        wide = rows[RATE].max() > 10 * rows[RATE].min()
        colours = alt.Scale(range=[BLUE])
        return draw_intervals(rows, RATE, ("_low", "_high"), "training samples/s", "_counts", colours, log=wide)

    return draw_result_panels(shown, draw, columns=1)


def build_models_table(study: Study) -> pd.DataFrame:
    """Build models per minute, the most first, and how busy the machine was."""
    frame = _select_with_models(study)
    return build_result_table(
        frame,
        ("label", "division", "models"),
        {
            "models/min": frame["models_per_min"],
            "compute units of the system": frame["units_described"],
            "models/min per 1000 units": 1000 * frame["models_per_min"] / frame["units_described"],
            "compute units of an instance": frame["units"],
            "time to train all [min]": frame["score_s"] / 60,
            "mean time of one [min]": frame["run_s.mean"] / 60,
            "an instance ran, mean share [%]": 100 * frame["run_s.mean"] / frame["score_s"],
        },
    )


def render_models_answer(study: Study) -> Answer:
    """Name the most models per minute of each task."""
    sentences = []
    frame = _select_with_models(study).reset_index(drop=True)  # the rows of the table
    for _, short, rows in group_tasks(frame):
        best = rows.iloc[0]
        of = f" on {best['units_described']:,.0f} compute units" if pd.notna(best["units_described"]) else ""
        said = f"{short}: {best['models_per_min']:.3g} models/min{of} ({best['label']})"
        sentences.append(Answer(said, [best.name]))
    return join_statements(sentences)


def draw_models_chart(table: pd.DataFrame) -> Chart:
    """Draw models per minute, with the share of the time that an instance ran at the bar's end."""
    shares = table["an instance ran, mean share [%]"].map("ran {:.0f} % of the time".format)
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
    known = add_extent(frame, CLASS_COLUMNS)
    unknown = frame.drop(known.index).assign(extent=math.nan, one="unit")
    return pd.concat([part for part in (known, unknown) if len(part)]).loc[frame.index]


def _select_with_models(study: Study) -> pd.DataFrame:
    """Select results with models per minute, the most first in each benchmark and size."""
    frame = study.ranked
    frame = frame[(frame["models_per_min"] > 0) & (frame["score_s"] > 0)]
    if frame.empty:
        raise NotAnswerableError("a throughput-mode result (several instances at once) with a score")
    order = [*PROBLEM_COLUMNS, "models_per_min", "label"]
    return frame.sort_values(order, ascending=[True, True, False, True])


VIEWS = (
    View(
        "throughput", "Training throughput",
        Question(
            UNDERSTAND_TIME,
            "How many samples per second does a system train, in total and for each accelerator, processor, "
            "node, core or rank?",
            ("train_rate.mean", "train_rate_per_unit"),
        ),
        "Harmonic mean over the scored runs and standard deviation. Samples per second = epochs × training samples / "
        "training time (evaluation and staging taken out). The table has samples per second of each accelerator, "
        "processor, node, core or rank, whichever varies. The axis is logarithmic where systems differ more than "
        "tenfold.",
        build_rate_table, render_rate_answer, draw_rate_chart, 2,
    ),
    View(
        "throughput_mode", "Many models at once",
        Question(
            SCALE,
            "How many models per minute does a machine train, and do the instances run together?",
            ("models_per_min", "units_described"),
            needs="runs in throughput mode",
        ),
        "Models that reached the target per minute, between the first run_start and the last run_stop of the whole "
        "system. Below 100 % of the time the system waited for its last instances. Pruned instances are left out.",
        build_models_table, render_models_answer, draw_models_chart, 2,
    ),
)  # fmt: skip
