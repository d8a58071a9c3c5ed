"""Figure: a search for the fastest settings (`mlhpc tune`): its course, what each tunable is worth, and what goes
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    GREY,
    Chart,
    compute_chart_height,
    draw_panels,
    encode_column,
    layer_charts,
    make_number_channel,
)
from mlhpc.analysis.drawing.view import UNDERSTAND_TIME, Question, View, join_statements, render_label
from mlhpc.analysis.study import NotAnswerableError, Study
from mlhpc.plugins.tune.space import KIND, TuneResult, key_of, render_point
from mlhpc.suite.files import render_duration
from mlhpc.suite.statistics import Outcome

TITLE = "Search for the fastest settings"
NEEDS = "the tune.json of a search (mlhpc tune)"
SEARCH = ("workload", "size", "processor")  # the columns of a panel
RATIO, BEST = "time / default's", "best so far"
MOST_TUNABLES = 8  # axes side by side
LONGEST_VALUE = 18  # characters beside a point


def build_course_table(study: Study) -> pd.DataFrame:
    """Build a row per measured configuration, in order: its time over the default's, and the best until then."""
    rows = []
    for search in _list_searches(study):
        best = 1.0  # the default's
        for number, trial in enumerate(search.trials, 1):
            best = min(best, trial.ratio or best)
            rows.append(
                {
                    **_name(search),
                    "evaluation": number,
                    "configuration": render_point(trial.point, search.default),
                    RATIO: trial.ratio,
                    BEST: best,
                    "took [s]": trial.seconds,
                    "error of the gradient": trial.error,
                    "cannot run": trial.why,
                }
            )
    return pd.DataFrame(rows)


def render_course_answer(study: Study) -> str:
    """State the answer of each search, by fresh pairs, and what the search took."""
    return join_statements([_render_answer(search) for search in _list_searches(study)])


def _render_answer(search: TuneResult) -> str:
    effort = (
        f"after {len(search.trials)} of {search.configurations} configurations in {render_duration(search.search_s)}"
    )
    named = f"{search.workload} {search.size}"
    ratio = search.ratio
    if search.outcome != Outcome.FASTER or ratio is None or ratio.value is None:
        return f"{named}: {search.describe_silence()}, {effort}"
    ends = f"{ratio.low:.3g} to {ratio.high:.3g}" if ratio.low and ratio.high else "unknown"
    return (
        f"{named}: {render_point(search.best, search.default)} takes {ratio.value:.3g} of the default's "
        f"{search.objective.replace('-', ' ').replace('cpu', 'CPU')} (95 % interval {ends}, {search.pairs}"
        f" fresh pairs), {effort}"
    )


def draw_course_chart(table: pd.DataFrame) -> Chart:
    """Draw a point per evaluation, and the best until then as a line."""

    def draw(rows: pd.DataFrame) -> Chart:
        x = make_number_channel(alt.X, "evaluation")
        base = alt.Chart(rows).encode(x=x)
        best = base.mark_line(interpolate="step-after", color=GREEN).encode(
            y=make_number_channel(alt.Y, BEST, RATIO, log=True)
        )
        points = base.mark_point(color=BLUE, filled=True, size=50).encode(y=make_number_channel(alt.Y, RATIO, log=True))
        default = alt.Chart().mark_rule(strokeDash=[3, 3]).encode(y=alt.datum(1.0))
        return layer_charts(best, points, default, height=240)

    return draw_panels(table[table[RATIO].notna()], SEARCH, draw, zoom=True)


def build_importance_table(study: Study) -> pd.DataFrame:
    """Build a row per tunable: the part of the variance of log time that it explains among the measured ones."""
    rows = [
        {**_name(search), "label": name, "part of variance": part, "n": sum(t.ratio is not None for t in search.trials)}
        for search in _list_searches(study)
        for name, part in search.importance.items()
    ]
    if not rows:
        raise NotAnswerableError("a search of at least 8 configurations")
    return pd.DataFrame(rows)


def render_importance_answer(study: Study) -> str:
    """Name the tunable that matters most in each search."""
    table = build_importance_table(study)
    first = table.loc[table.groupby(list(SEARCH), sort=False)["part of variance"].idxmax()]
    return join_statements(
        [
            f"{row['workload']} {row['size']}: {row['label']} explains "
            f"{100 * row['part of variance']:.0f} % of the variance of log time"
            for row in first.to_dict("records")
        ]
    )


def draw_importance_chart(table: pd.DataFrame) -> Chart:
    """Draw a bar per tunable."""

    def draw(rows: pd.DataFrame) -> Chart:
        y = alt.Y("label:N", title=None, sort=list(rows["label"]))
        bars = alt.Chart(rows).mark_bar(color=BLUE)
        x = make_number_channel(alt.X, "part of variance", "part of the variance of log time", zero=True)
        return bars.encode(x=x, y=y).properties(height=compute_chart_height(len(rows)))

    return draw_panels(table, SEARCH, draw)


def build_values_table(study: Study) -> pd.DataFrame:
    """Build a row per measured configuration and tunable with several values: the value, and the time over the
    default's.
    """
    return pd.DataFrame([row for search in _list_searches(study) for row in _value_rows(search)])


def _value_rows(search: TuneResult) -> Iterator[dict[str, Any]]:
    measured = [trial for trial in search.trials if trial.ratio is not None]
    names = list(dict.fromkeys(name for trial in measured for name in trial.point))
    values = {name: _order_values([trial.point[name] for trial in measured if name in trial.point]) for name in names}
    # The tunables that matter most come first, where there is room for some only
    ordered = [*search.importance, *(name for name in names if name not in search.importance)]
    shown = [name for name in ordered if len(values.get(name, ())) > 1][:MOST_TUNABLES]
    for number, trial in enumerate(measured, 1):
        for name in shown:
            if name in trial.point:
                value = key_of(trial.point[name])
                place = values[name].index(value) / (len(values[name]) - 1)
                own = trial.point[name]
                shown_value = render_label(own if isinstance(own, str) else value, LONGEST_VALUE)
                about = {"trial": number, "tunable": name.rpartition(".")[2], "value": shown_value, RATIO: trial.ratio}
                yield {**_name(search), **about, "_place": place}


def _order_values(values: list[Any]) -> list[str]:
    """Order different values: numbers by size, then the others."""
    different = {key_of(value): value for value in values}
    numbers = {
        key: value for key, value in different.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return [*sorted(numbers, key=lambda key: numbers[key]), *sorted(key for key in different if key not in numbers)]


def render_values_answer(study: Study) -> str:
    """Say what the fastest configurations have in common."""
    statements = []
    for search in _list_searches(study):
        fastest = search.list_fastest(3)
        common = {
            name: value
            for name, value in (fastest[0].items() if fastest else ())
            if all(name in each and each[name] == value for each in fastest)
        }
        changed = any(search.default.get(name) != value for name, value in common.items())
        same = render_point(common, search.default) if changed else "no change of the default"
        statements.append(f"{search.workload} {search.size}: the {len(fastest)} fastest have {same} in common")
    return join_statements(statements)


def draw_values_chart(table: pd.DataFrame) -> Chart:
    """Draw parallel coordinates: a line per configuration over the tunables, coloured by its time."""

    def draw(rows: pd.DataFrame) -> Chart:
        x = alt.X("tunable:N", title=None, sort=list(dict.fromkeys(rows["tunable"])), axis=alt.Axis(labelAngle=0))
        y = alt.Y("_place:Q", title=None, axis=None)
        scale = alt.Scale(scheme="viridis", type="log", reverse=True)
        legend = alt.Legend(title=RATIO, type="gradient")
        colour = alt.Color(field=encode_column(RATIO), type="quantitative", scale=scale, legend=legend)
        lines = alt.Chart(rows).mark_line(strokeWidth=1.5, opacity=0.7).encode(x=x, y=y, detail="trial:N", color=colour)
        named = rows.drop_duplicates(["tunable", "value"])
        ticks = alt.Chart(named).mark_point(filled=True, size=30, color=GREY).encode(x=x, y=y)
        words = alt.Chart(named).mark_text(align="left", dx=6, dy=-6).encode(x=x, y=y, text="value:N")
        return layer_charts(lines, ticks, words, height=260)

    return draw_panels(table, SEARCH, draw, columns=1)


def _list_searches(study: Study) -> tuple[TuneResult, ...]:
    missing = f"{NEEDS} among the report's paths"
    searches = cast(tuple[TuneResult, ...], study.documents_of(KIND, missing))
    found = tuple(search for search in searches if any(trial.ratio is not None for trial in search.trials))
    if not found:
        raise NotAnswerableError(missing)
    return found


def _name(search: TuneResult) -> dict[str, str]:
    return {"workload": search.workload, "size": search.size, "processor": search.processor}


VIEWS = (
    View(
        "tuning_course", "Course of the search",
        Question(
            UNDERSTAND_TIME, "Which settings are the fastest here, and how sure is that?", (RATIO, BEST), needs=NEEDS,
            decision="the interval of fresh pairs decides: the best of many measured ones looks faster than it is",
        ),
        "A point per measured configuration, in order: its time over the default's in the same blocks. The green "
        "line is the best until then. Fresh pairs of the best and the default, in the answer, do not count the "
        "search.",
        build_course_table, render_course_answer, draw_course_chart,
    ),
    View(
        "tuning_importance", "What a tunable is worth",
        Question(UNDERSTAND_TIME, "Which tunables matter on this machine?", ("part of variance",), needs=NEEDS),
        "The part of the variance of log time that a tunable explains (functional analysis of variance of random "
        "trees) among the measured configurations. A search measures good ones more often, so parts are rough.",
        build_importance_table, render_importance_answer, draw_importance_chart,
    ),
    View(
        "tuning_values", "Parallel coordinates",
        Question(UNDERSTAND_TIME, "Which values go together in fast configurations?", ("value", RATIO), needs=NEEDS),
        "A line per measured configuration over the tunables, coloured by its time over the default's.",
        build_values_table, render_values_answer, draw_values_chart,
    ),
)  # fmt: skip
