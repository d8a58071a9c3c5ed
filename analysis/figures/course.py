"""Figure: losses and metrics of runs over the range of the healthy runs of their size."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    VERMILION,
    Chart,
    draw_panels,
    layer_charts,
    make_number_channel,
    make_span_channels,
)
from mlhpc.analysis.drawing.view import (
    UNDERSTAND_CONVERGENCE,
    Answer,
    Question,
    View,
    join_statements,
    render_count,
)
from mlhpc.analysis.study import NotAnswerableError, Study, build_once
from mlhpc.suite import RULESET
from mlhpc.suite.card import ReferenceCourse
from mlhpc.suite.compliance.ruleset import read_ruleset
from mlhpc.suite.log.reference_course import find_reference_course, judge_run_course

TITLE = "The course of a run"
QUESTION = Question(
    UNDERSTAND_CONVERGENCE,
    "Did the runs train as healthy runs of these settings do?",
    ("value", "median of healthy runs", "unlike healthy runs"),
    needs="runs of settings with a reference course (mlhpc workload rcp show)",
)
CAPTION = (
    "Green: the lowest, the median and the highest of the healthy runs of the reference course. Blue: a line per run. A"
    " red point is a number that the test of the rule course-reference finds unlike healthy runs; of all healthy results"
    " it calls 1 in 100 unlike. It compares more numbers than are drawn: norms, shares of weights, the first losses. The"
    " first "
)
MOST_RESULTS, MOST_RUNS = 3, 10  # with a course, and runs of each
WINDOW = re.compile(r"loss of epoch (\d+), steps \d+ to (\d+)")
METRIC = re.compile(r"(?:eval_error|eval_accuracy) after epoch (\d+)")
LOSS, EVALUATION = "training loss", "metric"


@build_once
def build_table(study: Study) -> pd.DataFrame:
    """Build a row for each loss of a window and each metric: of a run, and of the healthy runs."""
    rows, results = [], 0
    for result in study.distinct[~study.distinct["published"]].to_dict("records"):
        found = list(_list_numbers(study, result))
        rows += found
        results += bool(found)
        if results == MOST_RESULTS:
            break
    if not rows:
        raise NotAnswerableError("a result of yours whose settings have a reference course")
    return pd.DataFrame(rows)


def _list_numbers(study: Study, result: Mapping[Any, Any]) -> Iterator[dict[str, object]]:
    benchmark = read_ruleset(RULESET).benchmark(result["benchmark"], result["size"])
    courses = () if benchmark is None else benchmark.reference_courses
    runs = study.runs_of(result["group"]).sort_values(["run_start_ms", "run"])["run"] if courses else ()
    for number, run in enumerate(runs):
        record = study.tables.records[run]
        deviations = judge_run_course(record, courses, together=len(runs))
        course = find_reference_course(record, courses)
        if deviations is None or course is None or number >= MOST_RUNS:
            continue
        unlike = {each.name for each in deviations}
        head = {name: result[name] for name in ("benchmark", "size", "label")} | {"run": run}
        for name, (what, epochs) in _place_numbers(course).items():
            if name in record.course:
                healthy = pd.Series(course.values[name])
                yield head | {
                    "what": what if what == LOSS else result["metric_name"] or what,
                    "number": name,
                    "epochs": epochs,
                    "value": record.course[name],
                    "lowest of healthy runs": healthy.min(),
                    "median of healthy runs": healthy.median(),
                    "highest of healthy runs": healthy.max(),
                    "healthy runs": len(healthy),
                    "unlike healthy runs": name in unlike,
                    "numbers of the run unlike healthy runs": len(unlike),
                }


def _place_numbers(course: ReferenceCourse) -> dict[str, tuple[str, float]]:
    """Return what each number that is drawn is, and after how many epochs it is."""
    windows = {name: match for name in course.values if (match := WINDOW.fullmatch(name))}
    last: dict[str, int] = defaultdict(int)
    for match in windows.values():
        last[match[1]] = max(last[match[1]], int(match[2]))
    found = {
        name: (LOSS, int(match[1]) - 1 + (int(match[2]) + 1) / (last[match[1]] + 1)) for name, match in windows.items()
    }
    metrics = {name: match for name in course.values if (match := METRIC.fullmatch(name))}
    return found | {name: (EVALUATION, float(match[1])) for name, match in metrics.items()}


def render_answer(study: Study) -> Answer:
    """Count the runs that no number calls unlike healthy ones, of each result."""
    said = []
    for (benchmark, size, label), rows in build_table(study).groupby(["benchmark", "size", "label"], sort=False):
        unlike = rows.drop_duplicates("run")["numbers of the run unlike healthy runs"] > 0
        of = f"{rows['healthy runs'].iloc[0]} healthy runs of {benchmark} {size}"
        how = f"{int((~unlike).sum())} of {render_count(len(unlike), 'run')} trained as {of}"
        said.append(Answer(f"{label}: {how}", rows.index))
    return join_statements(said)


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw two panels per result: losses and metrics, over the band of the healthy runs."""

    def draw(rows: pd.DataFrame) -> Chart:
        x = make_number_channel(alt.X, "epochs", "epochs trained")
        y = make_number_channel(alt.Y, "value", str(rows["what"].iloc[0]))
        healthy = alt.Chart(rows.drop_duplicates("number")).encode(x=x)
        ends = make_span_channels("y", "lowest of healthy runs", "highest of healthy runs", "")
        band = healthy.mark_area(color=GREEN, opacity=0.25).encode(**ends)
        middle = healthy.mark_line(color=GREEN, strokeDash=[5, 3]).encode(y="median of healthy runs:Q")
        base = alt.Chart(rows).encode(x=x, y=y)
        lines = base.mark_line(color=BLUE, opacity=0.6, point={"size": 18, "color": BLUE}).encode(detail="run:N")
        unlike = base.transform_filter("datum['unlike healthy runs']").mark_point(
            color=VERMILION, filled=True, size=70, opacity=1
        )
        return layer_charts(lines, band, middle, unlike, height=180)

    return draw_panels(table, ["benchmark", "size", "label", "what"], draw, columns=1, sort=False)


VIEWS = (
    View(
        "course", TITLE, QUESTION,
        f"{CAPTION}{MOST_RESULTS} results with a course, and the first {MOST_RUNS} runs of each, are shown.",
        build_table, render_answer, draw_chart,
    ),
)  # fmt: skip
