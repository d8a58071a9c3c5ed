"""The page's first answer, for who decides: who is faster, by how much, is it sure, at what cost, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.drawing.digits import count_text, number_text
from analysis.page.cells import HtmlTable, html_table, is_absent
from analysis.results.names import Task
from analysis.study import Study
from suite.files import duration_text

SAME_COST = 1.05  # a cost within 5 % of the least is the least
LISTED = 3


@dataclass(frozen=True)
class Summary:
    """A row per task with results to rank, or None, and sentences about what stands alone."""

    table: HtmlTable | None
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class _Line:
    """The answers for one task, each a phrase."""

    task: str
    who: str
    by: str
    sure: str
    cost: str
    advice: str


def summary(study: Study, numbers: Mapping[str, pd.DataFrame]) -> Summary:
    """Summarise a study. ``numbers`` are the tables of the figures by name, so that page and summary say the same."""
    compared = numbers.get("comparison", pd.DataFrame({"class": [], "label": [], "against": [], "verdict": []}))
    lines, alone = [], []
    for task in study.tasks():
        rows = task.rows[task.rows["score_s"].notna()]
        line = _throughput(task, rows, study) if _is_weak(rows) else _time(task, rows, compared, study)
        if line is not None:
            lines.append((bool(rows["published"].all()), line))
        else:
            alone += rows.to_dict("records")
    ordered = [line for _, line in sorted(lines, key=lambda item: item[0])]  # tasks with results of one's own first
    columns = {
        "task": [line.task for line in ordered],
        "who is faster": [line.who for line in ordered],
        "by how much": [line.by for line in ordered],
        "is it sure": [line.sure for line in ordered],
        "at what cost": [line.cost for line in ordered],
        "what to do": [line.advice for line in ordered],
    }
    return Summary(html_table(columns, "Summary") if lines else None, tuple(_sentences(study, alone, bool(lines))))


def _is_weak(rows: pd.DataFrame) -> bool:
    return bool((rows["mode"] == "weak").any())


def _time(task: Task, rows: pd.DataFrame, compared: pd.DataFrame, study: Study) -> _Line | None:
    """The fastest of a task by time to train against the others, as the figure of comparisons has it."""
    others = compared[(compared["class"] == task.title) & compared["label"].isin(rows["label"])]
    if others.empty or others["against"].iloc[0] not in set(rows["label"]):
        return None
    best = str(others["against"].iloc[0])
    first = others.iloc[0]
    alike = list(others.loc[others["verdict"] != "slower", "label"])
    by = (
        f"{first['ratio of times']:.3g} times as fast as {first['label']}"
        f" (95 %: {first['95 % from']:.3g} to {first['95 % to']:.3g})"
        if not alike
        else f"{first['label']} takes {first['ratio of times']:.3g} times as long"
    )
    sure = (
        f"yes, by {first['n of the other']:g} and {first['n']:g} runs"
        if not alike
        else f"no: {_some(alike)} may be as fast; so few runs that differ so much show "
        f"only a ratio of {first['smallest detectable ratio']:.3g} or more"
    )
    cost, advice = _cost(best, alike, rows, study)
    return _Line(task.short, best, by, sure + _company(rows, study), cost, advice)


def _company(rows: pd.DataFrame, study: Study) -> str:
    """Which of some results had other work beside their runs. Empty if none had."""
    counted = [(str(row["label"]), study.converged_of(str(row["group"]))["had_company"]) for _, row in rows.iterrows()]
    told = [f"{int(beside.sum())} of {len(beside)} runs of {label}" for label, beside in counted if beside.any()]
    return f"; beside other work were {_some(told)}" if told else ""


def _throughput(task: Task, rows: pd.DataFrame, study: Study) -> _Line | None:
    """The most models per minute of a task.

    Each is one measurement of a whole machine, so nothing says how sure it is.
    """
    if len(rows) < 2:
        return None
    ordered = rows.sort_values("models_per_min", ascending=False)
    best, second = ordered.iloc[0], ordered.iloc[1]
    rate, other = float(best["models_per_min"]), float(second["models_per_min"])
    by = f"{rate:.3g} models/min against {other:.3g} of {second['label']}"
    cost, advice = _cost(str(best["label"]), [], rows, study)
    return _Line(task.short, str(best["label"]), by, "inconclusive: one measurement of each machine", cost, advice)


def _cost(best: str, alike: Sequence[str], rows: pd.DataFrame, study: Study) -> tuple[str, str]:
    """What the fastest costs, and what follows. Without prices unit hours are stated, and nothing follows from them."""
    of_best = rows[rows["label"] == best].iloc[0]
    if study.prices is None:
        hours = of_best["unit_hours"] / (of_best["models"] if of_best["mode"] == "weak" else 1)
        each = " a model" if of_best["mode"] == "weak" else ""
        known = (
            f"{number_text(float(hours))} unit hours of {of_best['device']}{each}" if pd.notna(hours) else "not known"
        )
        return (
            known,
            f"choose {best}" if not alike else f"the cheaper of {_some([best, *alike])}: none is measurably faster",
        )
    unit = study.prices.unit
    if of_best["mode"] == "weak":  # instances differ in number, so the cost is that of a model
        unit, rows = f"{unit} a model", rows.assign(cost=rows["cost"] / rows["models"])
        of_best = rows.loc[of_best.name]
    priced = rows[rows["cost"].notna()]
    if priced.empty:
        return f"no price for {of_best['device']}", f"give the price of {of_best['device']}"
    least = priced.loc[priced["cost"].astype(float).idxmin()]
    if is_absent(of_best["cost"]):
        return (
            f"no price for {of_best['device']}; least {_money(least, unit)}",
            f"give the price of {of_best['device']}",
        )
    if float(of_best["cost"]) <= SAME_COST * float(least["cost"]):
        return f"{_money(of_best, unit)}, the least", f"choose {best}"
    cost = f"{_money(of_best, unit)}; least {_money(least, unit)}"
    if least["label"] in alike:
        return cost, f"choose {least['label']}: perhaps as fast, and costs less"
    times = float(least["score_s"]) / float(of_best["score_s"])
    longer = "" if of_best["mode"] == "weak" else f": {times:.3g} times the time"
    return cost, f"{best} where time counts; {least['label']} where cost does{longer}"


def _money(row: pd.Series, unit: str) -> str:
    return f"{number_text(float(row['cost']))} {unit} ({row['label']})"


def _some(labels: Sequence[str]) -> str:
    more = len(labels) - LISTED
    return ", ".join(labels[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _sentences(study: Study, alone: Sequence[Mapping[object, object]], ranked: bool) -> list[str]:
    """What is known of results without another to rank them beside, and what would make a comparison."""
    results = study.distinct
    without = results[results["score_s"].isna()]
    said = [_of_one(row, study) for row in alone[:LISTED]]
    if len(alone) > LISTED:
        said.append(f"{count_text(len(alone) - LISTED, 'more result')} with nothing to be ranked beside.")
    for row in without.head(LISTED).to_dict("records"):
        mean = f"; its runs took {duration_text(row['run_s.mean'])} on average" if pd.notna(row["run_s.mean"]) else ""
        said.append(f"{row['label']} ({row['benchmark']} {row['size']}) has no score: {row['score_note']}{mean}.")
    if len(without) > LISTED:
        said.append(f"{count_text(len(without) - LISTED, 'more result')} without a score.")
    if ranked and study.prices is None:
        said.append(
            "Unit hours of unlike devices are not the same money: --price states what an hour costs, and then what is "
            "cheapest."
        )
    if not ranked:
        said.append("Nothing to rank yet: add the runs or packages of a second system, of the same benchmark and size.")
    return said


def _of_one(row: Mapping[object, object], study: Study) -> str:
    """Time and spread of one result, and how many runs had other work beside them."""
    score, low, high = (row[name] for name in ("score_s", "score_low_s", "score_high_s"))
    interval = (
        f" (95 %: {duration_text(float(low))} to {duration_text(float(high))})"  # type: ignore[arg-type]
        if row["mode"] != "weak" and not is_absent(low) and not is_absent(high)
        else ""
    )
    verb = "trains all models" if row["mode"] == "weak" else "trains to the target"
    run, train = row["run_s.mean"], row["train_s.mean"]
    share = f"; {100 * float(train) / float(run):.0f} % of that is training" if run and not is_absent(train) else ""  # type: ignore[arg-type]
    return (
        f"{row['label']} {verb} of {row['benchmark']} ({row['size']}) in {duration_text(float(score))}{interval}{share}; "  # type: ignore[arg-type]
        f"{row['n_reached']} of {row['n_started']} runs reached it"
        f"{_company(pd.DataFrame([row]), study)}."
    )
