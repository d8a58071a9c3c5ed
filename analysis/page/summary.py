"""Builds the page's first answer: the fastest result of each task, by how much, why, at what cost, and what to take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from mlhpc.analysis.drawing.digits import render_count, render_number, render_seconds
from mlhpc.analysis.page.cells import HtmlTable, build_html_table, is_absent
from mlhpc.analysis.results.extent import find_system_units
from mlhpc.analysis.results.names import Task
from mlhpc.analysis.study import Study
from mlhpc.suite.files import render_duration_range

SAME_COST = 1.05  # a cost within 5 % of the least is the least
MOST_LISTED = 3  # results that a sentence names
FACTOR_WORDS = {  # words for the columns of the table of factors (figure waterfall)
    "size": "machine size",
    "speed/size": "speed of each part",
    "epochs": "fewer epochs",
    "staging": "less staging",
    "other": "less other time",
}
COLUMNS = ("task", "fastest", "by how much, and is it sure", "why", "size and cost of both", "what to take")
EMPTY_TABLE = pd.DataFrame({name: [] for name in ("class", "label", "against", "verdict", "from", "to")})


@dataclass(frozen=True)
class Summary:
    """Holds a row for each task with results to rank, older rounds apart, and sentences about results without a
    comparison.
    """

    table: HtmlTable | None
    history: HtmlTable | None
    sentences: tuple[str, ...]


def build_summary(study: Study, numbers: Mapping[str, pd.DataFrame], answers: Mapping[str, str]) -> Summary:
    """Summarise a study.

    ``numbers`` and ``answers`` are those of the figures, so that page and summary say the same.
    """
    compared, explained = numbers.get("comparison", EMPTY_TABLE), numbers.get("waterfall", EMPTY_TABLE)
    newest = _newest_rounds(study)
    own: list[tuple[str, ...]] = []
    recent: list[tuple[str, ...]] = []
    history: list[tuple[str, ...]] = []
    alone: list[dict[object, object]] = []
    for task in study.tasks():
        rows = task.rows[task.rows["score_s"].notna()]
        is_weak = bool((rows["mode"] == "weak").any())
        line = _throughput(task, rows, study) if is_weak else _time(task, rows, compared, explained, study)
        if line is None:
            alone += rows.to_dict("records")
        # A reader looks for own results first
        elif not rows["published"].all():
            own.append(line)
        else:
            (recent if _is_newest(rows, newest) else history).append(line)
    table = _table([*own, *recent], "Summary")
    if table is None:
        # Only older rounds in the report: they are the summary
        table, history = _table(history, "Summary"), []
    older = _table(history, "Older rounds")
    return Summary(table, older, tuple(_sentences(study, alone, answers, ranked=table is not None)))


def _newest_rounds(study: Study) -> dict[tuple[str, str, str], str]:
    """Find the newest round of the published results of each benchmark, size and mode."""
    published = study.distinct[study.distinct["published"]]
    groups = published.groupby(["benchmark", "size", "mode"])["round"].max()
    return {key: str(newest) for key, newest in groups.items()}


def _is_newest(rows: pd.DataFrame, newest: Mapping[tuple[str, str, str], str]) -> bool:
    row = rows.iloc[0]
    return newest.get((row["benchmark"], row["size"], row["mode"])) in set(rows["round"])


def _table(lines: Sequence[tuple[str, ...]], title: str) -> HtmlTable | None:
    columns = dict(zip(COLUMNS, zip(*lines, strict=True), strict=True)) if lines else {}
    return build_html_table(columns, title) if lines else None


def _time(
    task: Task, rows: pd.DataFrame, compared: pd.DataFrame, explained: pd.DataFrame, study: Study
) -> tuple[str, ...] | None:
    """Compare the fastest of a task by time to train with the next: a row of COLUMNS; None if nothing is compared.

    The tables are those of comparisons and of factors.
    """
    others = compared[(compared["class"] == task.title) & compared["label"].isin(rows["label"])]
    # The table of comparisons lacks results with a single run; without one there is nothing to say
    if others.empty or others["against"].iloc[0] not in set(rows["label"]):
        return None
    best = str(others["against"].iloc[0])
    next_one = others.iloc[0]
    close = list(others.loc[others["verdict"] != "slower", "label"])
    times = f"{next_one['label']} takes {next_one['ratio of times']:.3g} times as long"
    if not close:
        interval = f"95 %: {next_one['95 % from']:.3g} to {next_one['95 % to']:.3g}"
        by = f"{times} ({interval}); sure, by {next_one['n of the other']:g} and {next_one['n']:g} runs"
    else:
        by = f"{times}; inconclusive: {_join_labels(close)} may be as fast"
    who = best if not close else f"{best}, or {_join_labels(close)}"
    why = (
        _explain_difference(explained, str(next_one["label"]), best)
        if not close
        else "inconclusive differences are not explained"
    )
    a, b = (rows[rows["label"] == label].iloc[0] for label in (best, str(next_one["label"])))
    by += _describe_other_processes(rows, study)
    return task.short, who, by, why, _costs(a, b, study), _advice(a, b, next_one, close, study)


def _explain_difference(explained: pd.DataFrame, other: str, best: str) -> str:
    """Explain a difference by its largest factor, and by the one that works most against it, with their intervals."""
    pairs = explained[(explained["from"] == other) & (explained["to"] == best)]
    if pairs.empty:
        return "not known: machine size or epochs are not logged"
    row = pairs.iloc[0]
    sizes = {name: math.log(row[name]) for name in FACTOR_WORDS if row[name] > 0}
    most, least = max(sizes, key=lambda name: sizes[name]), min(sizes, key=lambda name: sizes[name])
    text = f"{FACTOR_WORDS[most]} × {row[most]:.3g}{_interval(row, most)}"
    # One per cent, as a logarithm; less is not worth words
    if sizes[least] < -0.01:
        against = FACTOR_WORDS[least].replace("fewer", "more").replace("less", "more")
        text += f", against {against} × {row[least]:.3g}{_interval(row, least)}"
    return text


def _interval(row: pd.Series, name: str) -> str:
    low, high = row.get(f"{name} from", math.nan), row.get(f"{name} to", math.nan)
    # NaN: too few runs for an interval of this factor
    return f" [{low:.3g}, {high:.3g}]" if low == low else ""


def _describe_other_processes(rows: pd.DataFrame, study: Study) -> str:
    """Name the results whose runs shared their CPUs. Empty if none had."""
    counted = [(str(row["label"]), study.converged_of(str(row["group"]))["had_company"]) for _, row in rows.iterrows()]
    shared = [f"{int(beside.sum())} of {len(beside)} runs of {label}" for label, beside in counted if beside.any()]
    return f"; {_join_labels(shared)} shared the CPUs with other programs" if shared else ""


def _throughput(task: Task, rows: pd.DataFrame, study: Study) -> tuple[str, ...] | None:
    """Compare the most models per minute of a task with the next: a row of COLUMNS.

    Each is one measurement, so it is never sure.
    """
    if len(rows) < 2:
        return None
    a, b = (row for _, row in rows.sort_values("models_per_min", ascending=False).head(2).iterrows())
    rate, other = (f"{row['models_per_min']:.3g} models/min" for row in (a, b))
    by = f"{rate} against {other} of {_machine(b)}; inconclusive: one measurement of each machine"
    return task.short, _machine(a), by, "–", _costs(a, b, study), "inconclusive"


def _machine(row: pd.Series) -> str:
    """Name a result in throughput mode, with the size of its instances."""
    return f"{row['label']}" + ("" if is_absent(row["units"]) else f" (instances of {row['units']:g})")


def _costs(a: pd.Series, b: pd.Series, study: Study) -> str:
    """Describe machine size and cost of two results.

    Without prices the cost is unit hours, which differ between devices.
    """
    units = find_system_units(pd.DataFrame([a, b]))
    parts = [f"{each:.0f} {row['device']}" for each, row in zip(units, (a, b), strict=True) if not is_absent(each)]
    costs = [_cost(row, study) for row in (a, b)]
    sizes = " against ".join(parts)
    if None in costs:
        missing = [str(row["device"]) for row, cost in zip((a, b), costs, strict=True) if cost is None]
        return f"{sizes}; cost not known of {', '.join(dict.fromkeys(missing))}"
    unit = study.prices.unit if study.prices else "unit hours"
    each = " a model" if a["mode"] == "weak" else ""
    return f"{sizes}; {render_number(costs[0])} against {render_number(costs[1])} {unit}{each}"


def _cost(row: pd.Series, study: Study) -> float | None:
    """Compute what a result costs, by the user's prices or in unit hours; in throughput mode, of one model."""
    cost = row["cost"] if study.prices else row["unit_hours"]
    return None if is_absent(cost) else float(cost) / (float(row["models"]) if row["mode"] == "weak" else 1.0)


def _advice(a: pd.Series, b: pd.Series, compared: pd.Series, close: Sequence[str], study: Study) -> str:
    """Advise: the faster one if it costs no more; else what each is better for, or what would show more."""
    first, second = _cost(a, study), _cost(b, study)
    # Unit hours of different devices are not the same money
    comparable = study.prices is not None or a["device"] == b["device"]
    if close:
        runs = compared.get("runs to tell")
        more = "more runs would hardly tell" if is_absent(runs) else f"about {runs:g} runs of each would tell"
        if first is None or second is None or not comparable:
            return f"neither: {more}"
        cheap = a if first <= second else b
        return f"{cheap['label']}, the cheaper of two that may be as fast; {more}"
    if first is None or second is None or not comparable:
        return f"{a['label']} where time counts; state prices (--price) to compare their cost"
    if first <= SAME_COST * second:
        return f"{a['label']}: faster, and it costs no more"
    share = f"{first / second:.3g} times the cost"
    return f"{a['label']} where time counts, for {share}; {b['label']} where cost or the number of nodes does"


def _join_labels(labels: Sequence[str]) -> str:
    more = len(labels) - MOST_LISTED
    return ", ".join(labels[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _sentences(
    study: Study, alone: Sequence[Mapping[object, object]], answers: Mapping[str, str], *, ranked: bool
) -> Iterable[str]:
    """Say what is known of results that nothing can be ranked with, and what would make a comparison."""
    without = study.distinct[study.distinct["score_s"].isna()]
    # Own results first
    shown = sorted(alone, key=lambda row: bool(row["published"]))
    yield from (_describe_result(row, study) for row in shown[:MOST_LISTED])
    if len(shown) > MOST_LISTED:
        yield f"{render_count(len(shown) - MOST_LISTED, 'more result')} with nothing to be ranked beside."
    for row in without.head(MOST_LISTED).to_dict("records"):
        time = f"; its runs took {render_seconds(row['run_s.mean'])} on average" if pd.notna(row["run_s.mean"]) else ""
        yield f"{row['label']} ({row['benchmark']} {row['size']}) has no score: {row['score_note']}{time}."
    if len(without) > MOST_LISTED:
        yield f"{render_count(len(without) - MOST_LISTED, 'more result')} without a score."
    if not ranked:
        if answers.get("extended_roofline"):
            yield f"Against its ceilings: {answers['extended_roofline']}."
        elif not study.distinct["published"].all():
            yield (
                "How good that is for its machine is not known: `mlhpc ceilings -o ceilings.json` measures the ceilings; "
                "give the file among the report's paths."
            )
        if answers.get("beside_published"):
            yield f"In the published field: {answers['beside_published']}."
        yield "Nothing to rank yet: add the runs or packages of a second system, of the same benchmark and size."


def _describe_result(row: Mapping[object, object], study: Study) -> str:
    """Describe time and spread of one result, and how many runs shared their CPUs."""
    score, low, high = (row[name] for name in ("score_s", "score_low_s", "score_high_s"))
    interval = ""
    if row["mode"] != "weak" and not is_absent(low) and not is_absent(high):
        interval = f" (95 %: {render_duration_range(float(low), float(high))})"  # type: ignore[arg-type]
    verb = "trains all models" if row["mode"] == "weak" else "trains to the target"
    run, train = row["run_s.mean"], row["train_s.mean"]
    share = f"; {100 * float(train) / float(run):.0f} % of that is training" if run and not is_absent(train) else ""  # type: ignore[arg-type]
    return (
        f"{row['label']} {verb} of {row['benchmark']} ({row['size']}) in {render_seconds(float(score))}{interval}{share}; "  # type: ignore[arg-type]
        f"{row['n_reached']} of {row['n_started']} runs reached it{_describe_other_processes(pd.DataFrame([row]), study)}."
    )
