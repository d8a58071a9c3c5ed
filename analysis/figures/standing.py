"""Figure: every result against the fastest of its task, on top of the page: who is fastest, by how much, is it sure."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Chart,
    draw_panels,
    layer_charts,
    make_number_channel,
    make_span_channels,
)
from mlhpc.analysis.drawing.view import (
    CHOOSE_SYSTEMS,
    FASTEST,
    FIRST,
    INCONCLUSIVE,
    NOT_RANKED,
    ONE_EACH,
    SLOWER,
    Answer,
    Question,
    View,
    join_statements,
    list_timed_runs,
    name_passed,
    render_count,
    render_label,
    render_seconds,
)
from mlhpc.analysis.figures import comparison
from mlhpc.analysis.results.names import CLASS_COLUMNS, Task
from mlhpc.analysis.study import NotAnswerableError, Study, build_once
from mlhpc.suite.log.score import find_round_group
from mlhpc.suite.statistics import Outcome

TITLE = "Time beside the fastest"
QUESTION = Question(
    CHOOSE_SYSTEMS,
    "How does every result stand beside the fastest of its task?",
    ("score_s", "models_per_min"),
    needs="a second result of the same benchmark and size",
)
CAPTION = (
    "Time to train over that of the fastest ranked result of the task, on a logarithmic axis; in throughput mode the "
    "fastest's models per minute over those of each. Bars are 95 % intervals. A task has results of one benchmark, "
    "size and division, of rounds whose times mean the same. Slower: surely so. Inconclusive: the runs do not tell. A mark "
    "that is not ranked has the reason beside it."
)
COLOURS = {FASTEST: GREEN, SLOWER: BLUE, INCONCLUSIVE: GREY, ONE_EACH: GREY, NOT_RANKED: ORANGE}
FILLS = COLOURS | {ONE_EACH: "transparent", NOT_RANKED: "transparent"}  # hollow: no test stands behind it
RATIOS_DIFFER = 0.01  # relative: from then on a name says the ratio of scores too
KEY = ["Ratios, 95 % intervals: of the means of all runs", "Times beside names: scores"]  # lines as wide as a phone
MOST_ROWS = 6  # of a task on the page; one's own are always shown
ROW_HEIGHT, LETTER = 22, 6.5  # pixels
WIDTH, PHONE = 1250, 330  # pixels of the axis on a wide page and on a phone
FROM_COMPARISON = ("95 % from", "95 % to", "p (Holm)", "smallest detectable ratio", "to tell")


@build_once
def build_table(study: Study) -> pd.DataFrame:
    """Build a row for each result of a task with several: those not ranked have the reason, and come last."""
    try:
        compared = comparison.build_table(study)
    except NotAnswerableError:
        compared = pd.DataFrame(columns=["class", "label", "against"])
    known = {(row["class"], row["label"]): row for row in compared.to_dict("records")}
    tasks = []
    for task, shown in study.ordered_tasks():
        lines = list(_list_rows(study, task, known))
        others = _list_unranked(study, task)
        if lines and len(lines) + len(others) > 1:
            best = task.rows[task.rows["label"] == lines[0]["label"]].iloc[0]
            lines += [_describe_unranked(row, best, study) for row in others.to_dict("records")]
            near = [each for place, each in enumerate(lines) if place < MOST_ROWS or not each["published"]]
            head = {"task": task.short, "class": task.title, "results": len(lines)}
            tasks += [head | each | {"shown": shown and each in near} for each in lines]
    if not tasks:
        raise NotAnswerableError("two results of one benchmark and size, one of which may be ranked")
    return pd.DataFrame(tasks).drop(columns="published")


def _list_rows(
    study: Study, task: Task, known: Mapping[tuple[str, str], Mapping[Any, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the ranked results of a task, the fastest first."""
    rows = task.rows
    if rows["mode"].iloc[0] == "weak":
        scored = rows[rows["models_per_min"] > 0].sort_values(["models_per_min", "label"], ascending=[False, True])
        for row in scored.to_dict("records"):
            ratio = scored["models_per_min"].iloc[0] / row["models_per_min"]
            verdict = ONE_EACH if row["group"] != scored["group"].iloc[0] else FASTEST
            yield _describe(row, row["score_s"]) | {"ratio": ratio, "verdict": verdict, "runs": row["n_reached"]}
        return
    timed = rows[(rows["run_s.mean"] > 0) & rows["score_s"].notna()].sort_values(["run_s.mean", "label"])
    # The comparison may have chosen a result without a score as the fastest
    of_class = [row for (title, _), row in known.items() if title == task.title]
    best = of_class[0]["against"] if of_class and of_class[0]["against"] in set(timed["label"]) else None
    timed = timed.assign(first=timed["label"] != best).sort_values(["first", "run_s.mean"], kind="stable")
    for place, row in enumerate(timed.to_dict("records")):
        pair = known.get((task.title, row["label"]), {}) if place else {}
        ratio = pair.get("ratio of times", row["run_s.mean"] / timed["run_s.mean"].iloc[0])
        verdict = FASTEST if not place else SLOWER if pair.get("verdict") == Outcome.SLOWER else INCONCLUSIVE
        more = {name: pair.get(name) for name in FROM_COMPARISON}
        yield _describe(row, row["score_s"]) | {"ratio": ratio, "verdict": verdict, "runs": row["n_averaged"]} | more


def _list_unranked(study: Study, task: Task) -> pd.DataFrame:
    """List the results that would be in a task but may not be ranked, or have no score."""
    rows, first = study.in_rounds, task.rows.iloc[0]
    rows = rows[rows["not_ranked"].notna() | rows["score_s"].isna()]
    alike = (rows[[*CLASS_COLUMNS, "division"]] == first[[*CLASS_COLUMNS, "division"]]).all(axis=1)
    alike &= rows["round"].map(find_round_group) == find_round_group(first["round"])
    return rows[alike & (rows["run_s.mean"] > 0) & ((rows["mode"] == "strong") | (rows["models_per_min"] > 0))]


def _compute_mean_s(row: Mapping[Any, Any] | pd.Series, study: Study) -> float:
    """Compute the geometric mean of the runs that reached the target, as comparisons do; without any, of all."""
    times = [run.time_s for run in list_timed_runs(study, str(row["group"]))]
    return statistics.geometric_mean(times) if times else float(row["run_s.mean"])


def _describe_unranked(row: Mapping[Any, Any], best: pd.Series, study: Study) -> dict[str, Any]:
    time_s = row["run_s.mean"] if pd.isna(row["score_s"]) else row["score_s"]
    if row["mode"] == "weak":
        ratio = best["models_per_min"] / row["models_per_min"]
    else:
        ratio = _compute_mean_s(row, study) / _compute_mean_s(best, study)
    why = f"no score: {row['score_note']}" if pd.isna(row["not_ranked"]) else row["not_ranked"]
    found = {"ratio": ratio, "verdict": NOT_RANKED, "runs": row["n_averaged"], "why not": why}
    return _describe(row, time_s) | found


def _describe(row: Mapping[Any, Any], time_s: float) -> dict[str, Any]:
    # As find_system_units, which takes a table
    units = row["units_described" if row["mode"] == "weak" and pd.notna(row["units_described"]) else "units"]
    names = {name: row[name] for name in ("benchmark", "size", "mode", "label", "name", "device", "published")}
    names["machine"] = row["machine"] if row["published"] else row["name"]
    numbers = {
        "time to train [min]": time_s / 60,
        "models/min": row["models_per_min"],
        "carried over from": row["carried"],
    }
    # What a score becomes with the staging before its runs
    return names | {"devices": units} | numbers | {"with staging": row["score_with_staging_s"] / row["score_s"]}


def render_answer(study: Study) -> Answer:
    """Name the fastest of each task, and how far the next one is."""
    sentences = []
    for _, rows in build_table(study).groupby("class", sort=False):
        best, *others = rows[rows["verdict"] != NOT_RANKED].to_dict("records")
        said = f"{best['task']}: {_name(best)}"
        if others:
            label, times, verdict = _name(others[0]), f"{others[0]['ratio']:.3g} times", others[0]["verdict"]
            if verdict == ONE_EACH:
                said += f" trains {times} as many as {label}"
            else:
                said += f"; {label} takes {times} as long{'' if verdict == SLOWER else f', {verdict}'}"
        said += name_passed(rows)
        sentences.append(Answer(said, rows.index))
    return join_statements(sentences)


def _name(row: Mapping[Hashable, Any]) -> str:
    first = row["carried over from"]
    return f"{row['label']} (carried over from {first})" if pd.notna(first) else str(row["label"])


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel for each task, with a mark, its interval and its name for each result; one axis for all."""
    shown, low, high = _place_names(table[table["shown"]])
    shown = shown.assign(
        _sign=shown["verdict"], _place=range(len(shown)),
        _title=[_render_title(row) for row in shown.to_dict("records")],
    )  # fmt: skip
    last = shown["_title"].iloc[-1]

    def draw(rows: pd.DataFrame) -> Chart:
        title = "times behind the fastest that is ranked"
        x = make_number_channel(alt.X, "ratio", title, log=True, domain=[low, high])
        ends = make_span_channels("x", "95 % from", "95 % to", title)
        names_at = make_number_channel(alt.X, "_at", title, log=True, domain=[low, high])
        is_last = rows["_title"].iloc[0] == last  # its axis is that of all
        for channel in (x, ends["x"], names_at):
            # A label that reached beyond the axis would make this panel narrower than the others
            channel.axis = alt.Axis(
                format=".3~g", tickCount=6, labels=is_last, ticks=is_last, domain=is_last, labelBound=True
            )
            channel.title = title if is_last else None
        found = [name for name in COLOURS if name in set(shown["_sign"])]
        legend = (
            alt.Legend(orient="bottom", title=KEY, titleLimit=0, values=found, symbolOpacity=1, labelLimit=0)
            if is_last
            else None
        )
        colour, fill = (
            kind("_sign:N", scale=alt.Scale(domain=list(of), range=list(of.values())), legend=legend)
            for kind, of in ((alt.Stroke, COLOURS), (alt.Fill, FILLS))
        )
        y = alt.Y("_place:O", axis=None)
        base = alt.Chart(rows).encode(y=y)
        rule = base.mark_rule(strokeWidth=4, opacity=0.35).encode(stroke=colour, **ends)
        point = base.mark_point(size=90, strokeWidth=1.8).encode(x=x, stroke=colour, fill=fill)
        names = base.mark_text(align=alt.expr("datum._align"), dx=alt.expr("datum._dx")).encode(
            x=names_at, text="_said:N"
        )
        layers = [*([rule] if rows.get("95 % to", pd.Series(dtype=float)).notna().any() else []), point, names]
        return layer_charts(*layers, height=ROW_HEIGHT * len(rows))

    return draw_panels(shown, ["_title"], draw, columns=1, sort=False)


def _place_names(shown: pd.DataFrame) -> tuple[pd.DataFrame, float, float]:
    """Choose on which side of its mark each name stands. Return the rows, and the ends of the axis."""
    ends = shown[["ratio", *(name for name in FROM_COMPARISON[:2] if name in shown)]].astype(float)
    low, high = min(0.96, ends.min(axis=None) * 0.97), ends.max(axis=None) * 1.03
    # A name stands beyond the interval, on the side with more room
    begins, reaches = (
        ends.reindex(columns=[name])[name].where(lambda end: end.notna(), ends["ratio"]) for name in FROM_COMPARISON[:2]
    )
    best = shown["time to train [min]"].where(shown["verdict"] == FASTEST).groupby(shown["class"]).transform("max")
    by_scores = shown["time to train [min]"] / best
    said = [_render_mark(row) for row in shown.assign(_by_scores=by_scores).to_dict("records")]
    short = [f"{render_label(row['name'], 16)} · {row['ratio']:.3g}×" for row in shown.to_dict("records")]
    # Where a name fits on neither side, its short form on a phone included, the axis gets longer
    wide, narrow = (np.array([len(text) for text in texts]) * LETTER for texts in (said, short))
    room = np.minimum(np.maximum(wide / WIDTH, (narrow + 12) / PHONE), 0.7)
    tight = (np.log(begins / low) < room * np.log(high / low)) & (np.log(high / reaches) < room * np.log(high / low))
    high = max([high, *np.exp((np.log(reaches) - room * np.log(low)) / (1.0 - room))[tight]])
    sides = [np.log(begins / low) / np.log(high / low), np.log(high / reaches) / np.log(high / low)]
    lacks = [
        # Pixels that a name lacks beside its mark: on a phone, or on a wide page
        np.maximum(narrow - share * PHONE, wide - share * WIDTH)
        for share in sides
    ]
    right = pd.Series(lacks[0] < lacks[1], index=shown.index)  # of the name's end: it stands left of the mark
    placed = shown.assign(
        _said=said, _short=short, _align=right.map({True: "right", False: "left"}),
        _dx=right.map({True: -9, False: 9}), _at=begins.where(right, reaches),
        _side=sides[0].where(right, sides[1]),  # the share of the axis that a name may take
    )  # fmt: skip
    return placed, low, high


def _render_title(row: Mapping[Any, Any]) -> str:
    more = int(row["results"]) - MOST_ROWS
    return str(row["task"]) + (f" · {render_count(more, 'more result')} in the table" if more > 0 else "")


def _render_mark(row: Mapping[Any, Any]) -> str:
    """Say at a mark what it is: name, time, machine, ratio, and why it is not sure or not ranked."""
    device = "" if pd.isna(row["devices"]) else f" on {row['devices']:.0f} {render_label(row['device'], 24)}"
    speed = (
        render_seconds(60 * row["time to train [min]"])
        if pd.isna(row["models/min"])
        else f"{row['models/min']:.3g} models/min"
    )
    said = f"{render_label(row['name'], 36)} · {speed}{device}"
    if row["verdict"] == FASTEST:
        return said
    times = f"{row['ratio']:.3g} times as long"
    # A reader who divides the times beside the names would think of a mistake
    if abs(row["_by_scores"] / row["ratio"] - 1) > RATIOS_DIFFER:
        times += f" ({row['_by_scores']:.3g} by scores)"
    if row["verdict"] == ONE_EACH:
        return f"{said} · the fastest trains {row['ratio']:.3g} times as many"
    if row["verdict"] == SLOWER:
        return f"{said} · {times}"
    if row["verdict"] == NOT_RANKED:
        return f"{said} · not ranked: {render_label(row['why not'], 60)}"
    return f"{said} · {times}, {row['verdict']}"


VIEWS = (View(FIRST, TITLE, QUESTION, CAPTION, build_table, render_answer, draw_chart),)
