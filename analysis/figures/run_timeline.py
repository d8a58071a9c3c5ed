"""Figure: when each part of a run was: start-up, staging, epochs, evaluations, checkpoints; and what others used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    Chart,
    compute_chart_height,
    draw_panels,
    layer_charts,
    make_names_axis,
)
from mlhpc.analysis.drawing.view import UNDERSTAND_TIME, Answer, Question, View, render_count, render_seconds
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.suite.log.other_work import render_percent
from mlhpc.suite.log.record import RunRecord

TITLE = "Timeline of each run"
QUESTION = Question(
    UNDERSTAND_TIME,
    "What happened when in each run, and were other programs beside it?",
    ("run_start_ms", "run_s", "other_work_share"),
    needs="runs of this suite",
)
CAPTION = (
    "A row per run, from the start of its processes; 0 is run_start. Each epoch is a block of its own. At the right is "
    "the time of the run and, if the log has it, what share of the CPUs other programs used. A checkpoint is where "
    "training waited for it. The first "
)
START, STAGING, TRAINING, EVALUATION, CHECKPOINT, OTHER = (
    "start-up", "staging", "training", "evaluation", "checkpoint", "other",
)  # fmt: skip
COLOURS = {START: PURPLE, STAGING: ORANGE, TRAINING: BLUE, EVALUATION: GREEN, CHECKPOINT: VERMILION, OTHER: GREY}
MOST_RESULTS, MOST_RUNS, MOST_BLOCKS = 6, 10, 60  # of a page; runs of a result; epochs that are blocks of their own
GAP = 0.002  # of a run: between two blocks


def build_table(study: Study) -> pd.DataFrame:
    """Build a row for each stretch of each run."""
    lines = [line for row in _list_results(study) for line in _list_stretches(study, row)]
    if not lines:
        raise NotAnswerableError("a run of yours that ended")
    return pd.DataFrame(lines)


def _list_results(study: Study) -> list[dict[str, object]]:
    own = study.distinct[~study.distinct["published"] & (study.distinct["mode"] == "strong")]
    return list(own.head(MOST_RESULTS).to_dict("records"))


def _list_stretches(study: Study, row: dict[str, object]) -> Iterator[dict[str, object]]:
    runs = study.runs_of(str(row["group"]))
    runs = runs[runs["run_s"] > 0].sort_values(["run_start_ms", "run"]).head(MOST_RUNS)
    for number, run in enumerate(runs.to_dict("records"), start=1):
        record = study.tables.records[run["run"]]
        head = {name: row[name] for name in ("benchmark", "size", "label")}
        head |= {"run": run["run"], "number": number}
        share = run["other_work_share"]
        others = math.nan if pd.isna(share) else 100 * float(share)
        tail = {"run [s]": run["run_s"], "other programs [% of CPUs]": others}
        for part, begin_s, end_s in _list_parts(record):
            yield head | {"part": part, "from [s]": begin_s, "to [s]": end_s} | tail


def _list_parts(record: RunRecord) -> Iterator[tuple[str, float, float]]:
    """Yield part, begin and end of a run's stretches, in seconds from run_start."""
    if record.init_s:
        yield START, -record.init_s, 0.0
    for name, spans in record.stretches.items():
        part = STAGING if name.startswith(STAGING) else name
        ends = [edge for epoch in record.epochs for edge in (epoch.start_s, epoch.stop_s)]
        for begin_s, end_s in spans:
            # Spans of training are merged; an epoch's end begins a new block
            inside = sorted({edge for edge in ends if begin_s < edge < end_s}) if name == TRAINING else []
            edges = [begin_s, *inside, end_s] if len(inside) < MOST_BLOCKS else [begin_s, end_s]
            yield from ((part, a, b) for a, b in itertools.pairwise(edges))
    for begin_s, end_s in record.checkpoints:
        yield CHECKPOINT, begin_s, end_s


def render_answer(study: Study) -> Answer:
    """Count the runs, and name the shortest and the longest, and the one with most other work."""
    table = build_table(study)
    runs = table.drop_duplicates(["label", "benchmark", "size", "run"])
    seconds, others = runs["run [s]"], runs["other programs [% of CPUs]"]
    span = " to ".join(dict.fromkeys(render_seconds(each) for each in (seconds.min(), seconds.max())))
    beside = (
        "no log says whether other programs ran"
        if others.isna().all()
        else (f"other programs used at most {render_percent(others.max() / 100)} of the CPUs")
    )
    return Answer(f"{render_count(len(runs), 'run')} of {span}; {beside}", runs.index)


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per result, a row per run, a block per stretch."""
    shown = table.assign(
        _name="run " + table["number"].astype(str),
        _begin=table["from [s]"] + GAP * table["run [s]"] * (table["part"] == TRAINING),
        _end=[_render_end(row) for _, row in table.iterrows()],
        _last=table["run [s]"],
    )
    known = [part for part in COLOURS if part in set(table["part"])]
    colours = alt.Scale(domain=known, range=[COLOURS[part] for part in known])

    def draw(rows: pd.DataFrame) -> Chart:
        rows = rows.assign(label=rows["_name"], _first=~rows.duplicated("run"))
        base = alt.Chart(rows).encode(y=make_names_axis(rows))
        blocks = base.mark_bar(height={"band": 0.7}).encode(
            x=alt.X("_begin:Q", title="seconds from run_start"), x2=alt.X2("to \\[s\\]"),
            color=alt.Color("part:N", scale=colours),
        )  # fmt: skip
        ends = base.transform_filter("datum._first").mark_text(align="left", dx=5).encode(x="_last:Q", text="_end:N")
        return layer_charts(blocks, ends, height=compute_chart_height(rows["run"].nunique()))

    return draw_panels(shown, ["benchmark", "size", "label"], draw)


def _render_end(row: pd.Series) -> str:
    share = row["other programs [% of CPUs]"]
    return render_seconds(row["run [s]"]) + ("" if pd.isna(share) else f" · others {share:.0f} %")


VIEWS = (
    View(
        "run_timeline", TITLE, QUESTION,
        f"{CAPTION}{MOST_RUNS} runs of the first {MOST_RESULTS} results of yours are shown.",
        build_table, render_answer, draw_chart,
    ),
)  # fmt: skip
