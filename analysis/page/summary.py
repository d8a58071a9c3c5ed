"""Builds the page's first answer, and its tables without a figure.

The first answer is the fastest result of each task, by how much, why, at what cost, and what to take. The tables are
those of results (a section per benchmark, size, mode and division), of systems, settings and logs, and of the
procurement index.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from mlhpc.analysis.drawing.view import (
    FACTORS,
    FIRST,
    INTERVAL_WORDS,
    LONG_DEVICE,
    NOT_RANKED,
    SLOWER,
    are_far_apart,
    count_sessions,
    explain_factors,
    is_sure,
    name_passed,
    render_count,
    render_counts,
    render_interval,
    render_number,
    render_percent,
    render_seconds,
)
from mlhpc.analysis.page.cells import (
    Cell,
    HtmlTable,
    build_html_table,
    build_time_cells,
    build_time_range_cells,
    drop_empty,
    is_absent,
    render_ranges,
    render_spreads,
)
from mlhpc.analysis.published.scores import read_stated_minutes
from mlhpc.analysis.results.index import ANY_TIER, Index, build_index_tables
from mlhpc.analysis.results.machine_size import choose_extent, find_training_units, render_system_units
from mlhpc.analysis.results.names import CLASS_COLUMNS, UNKNOWN_DEVICE, Task, render_heading, render_short_heading
from mlhpc.analysis.study import Study
from mlhpc.analysis.tables.ingest import parse_mapping
from mlhpc.suite.card import FULL
from mlhpc.suite.files import render_duration_range
from mlhpc.suite.log.score import GROUP_MEANINGS, find_round_group

SAME_COST = 1.05  # a cost within 5 % of the least is the least
MOST_LISTED = 3  # results that a sentence names
COLUMNS = ("task", "fastest", "by how much, and is it sure", "why", "size and cost of both", "what to take")
EMPTY_TABLE = pd.DataFrame(
    {name: [] for name in ("class", "label", "against", "verdict", "from", "to", "mode", "shown")}
)


@dataclass(frozen=True)
class BreakEven:
    """Holds at what price the faster result is the cheaper one: an hour of its device in hours of the other's."""

    task: str
    faster: str
    other: str
    devices: tuple[str, str]
    hours: float
    of: tuple[int, ...]


@dataclass(frozen=True)
class Summary:
    """Holds the headline, a row for each task with results to rank, older rounds apart, and sentences about results
    without a comparison.
    """

    headline: str
    table: HtmlTable | None
    history: HtmlTable | None
    sentences: tuple[str, ...]
    breaks: tuple[BreakEven, ...] = ()


def build_summary(study: Study, numbers: Mapping[str, pd.DataFrame], answers: Mapping[str, str]) -> Summary:
    """Summarise a study.

    ``numbers`` and ``answers`` are those of the figures, so that page and summary say the same.
    """
    compared, explained = numbers.get("comparison", EMPTY_TABLE), numbers.get("waterfall", EMPTY_TABLE)
    standing = numbers.get(FIRST, EMPTY_TABLE)
    recent: list[tuple[Any, ...]] = []
    history: list[tuple[Any, ...]] = []
    alone: list[dict[object, object]] = []
    breaks: list[BreakEven] = []
    for task, shown in study.ordered_tasks():
        rows = task.rows[task.rows["score_s"].notna()]
        is_weak = bool((rows["mode"] == "weak").any())
        pair = _find_throughput_pair(rows) if is_weak else _find_pair(task, rows, compared)
        if pair is None:
            alone += rows[rows["same_as"].isna()].to_dict("records")
            continue
        line = (
            _throughput(task, rows, *pair, study) if is_weak else _time(task, rows, *pair, compared, explained, study)
        )
        here = standing[standing["class"] == task.title]
        line = (line[0], line[1] + _name_faster(here), line[2] + name_passed(here), *line[3:])
        (recent if shown else history).append((*line, tuple(rows.index)))
        pair = pair[0], _find_cheapest(rows, *pair, study)
        breaks += [_find_break_even(*pair, study)] if shown and _has_break_even(*pair, study) else []
    table = _table(recent, "Summary")
    sentences = (*_list_assumptions(compared), *_sentences(study, alone, answers, ranked=table is not None))
    headline = write_headline(study, standing)
    return Summary(headline, table, _table(history, "Older rounds"), sentences, tuple(breaks))


def _name_faster(rows: pd.DataFrame) -> str:
    """Name the result of a task that is faster than the fastest ranked one; empty if there is none."""
    faster = rows[(rows["verdict"] == NOT_RANKED) & (rows["ratio"] < 1)].sort_values("ratio")
    return f", of the ranked; {faster['label'].iloc[0]} is faster" if len(faster) else ""


def write_headline(study: Study, standing: pd.DataFrame) -> str:
    """Write the verdict in one sentence: who is fastest at what and by how much, or why nobody can be."""
    every = [rows for _, rows in standing[standing["mode"] == "strong"].groupby("class", sort=False)]
    shown = [rows for rows in every if rows["shown"].any()]
    ranked = [rows[rows["verdict"] != NOT_RANKED] for rows in shown]
    pairs = [tuple(rows.head(2).to_dict("records")) for rows in ranked if len(rows) > 1]
    if not pairs:
        return _write_headline_of_one(study)
    if len(pairs) == 1:
        ((best, second),) = pairs
        if second["verdict"] != SLOWER:
            return f"The runs do not tell whether {best['label']} or {second['label']} is faster at {best['task']}"
        by = f"{second['ratio']:.3g} times as fast as {second['label']}"
        return f"{best['label']} is {by} at {best['task']} ({second['95 % from']:.3g} to {second['95 % to']:.3g})"
    sure = [(best, second) for best, second in pairs if second["verdict"] == SLOWER]
    wins, tasks = Counter(best["machine"] for best, _ in sure).most_common(), f"{len(pairs)} tasks by time to train"
    if not wins:
        return f"No system is surely the fastest in any of {tasks}"
    (leader, count), *others = wins
    where = "In the newest round of each task " if len(shown) < len(every) else ""
    in_all = "all" if count == len(pairs) else f"{count} of"
    parts = [f"{where}{leader} is the fastest in {in_all} {len(pairs)} tasks by time to train"]
    parts += [f"{who} in {many}" for who, many in others[:MOST_LISTED]]
    undecided = f"; {len(pairs) - len(sure)} undecided" if len(sure) < len(pairs) else ""
    if others:
        return ", ".join(parts) + undecided
    nexts = {second["machine"] for _, second in sure}
    ratios = [f"{each(second['ratio'] for _, second in sure):.3g}" for each in (min, max)]
    passed = any(map(name_passed, shown))
    near = [rows[(rows["verdict"] == NOT_RANKED) & (rows["ratio"] >= 1)] for rows in shown if name_passed(rows)]
    least = pd.concat(near).sort_values("ratio").head(1).to_dict("records") if near else []
    but = "".join(
        f"; at {row['task']} {row['ratio']:.3g} times as fast as {row['label']}, which is not ranked" for row in least
    )
    than = (
        nexts.pop() + ", the next that is ranked" * passed
        if len(nexts) == 1
        else "the next" + " that is ranked" * passed
    )
    return f"{', '.join(parts)}: {' to '.join(dict.fromkeys(ratios))} times as fast as {than}{but}{undecided}"


def _write_headline_of_one(study: Study) -> str:
    """Write the verdict where no two results may be compared."""
    known = study.distinct
    reasons = _list_reasons(study)
    if len(known) > 1:
        kinds = {re.sub(r"\d+", "", reason) for reason in reasons}  # that differ in more than a number
        why = f": {max(reasons)}" if len(kinds) == 1 else ""
        ranked = len(known) - len(reasons)
        if not ranked:
            return f"None of {len(known)} results is ranked{why}"
        if ranked == 1:
            only = known[known["not_ranked"].isna() & known["score_s"].notna()].iloc[0]
            others = _join_labels(list(known.loc[reasons.index, "label"]))
            return f"{others} cannot be ranked{why}; only {only['label']} can"
        reached = {_name_task(row): row["score_s"] for _, row in known.iterrows()}
        if reasons.empty and len(known) == len(reached) <= MOST_LISTED and (known["mode"] == "strong").all():
            said = [f"{task} in {render_seconds(float(time_s))}" for task, time_s in reached.items()]
            return f"{', '.join(said)}: each reached its target"
        one = known.loc[reasons.index[0]] if len(reasons) == 1 else None
        who = len(reasons) if one is None else f"{one['label']}, {_name_task(one)},"
        rest = f"; {who} cannot{why}" if len(reasons) else ""
        return f"{ranked} of {len(known)} results can be ranked, but each alone in its task{rest}"
    row = known.iloc[0]
    task = _name_task(row)
    if pd.isna(row["score_s"]):
        ended = study.runs.loc[study.runs["group"] == row["group"], "outcome"] != "no run_stop"
        met = f"{row['n_reached']:.0f} of {render_count(row['n_started'], 'run')} reached the target"
        if not ended.all():
            met = f"{(~ended).sum()} of {render_count(len(ended), 'run')} cut off, or still running"
        return f"{task} has no score: {row['score_note'] if row['n_reached'] == row['n_started'] else met}"
    low, high = row["score_low_s"], row["score_high_s"]
    ends = (
        f" ({INTERVAL_WORDS}: {render_duration_range(low, high, like_s=row['score_s'])})"
        if pd.notna(low) and row["mode"] == "strong"
        else ""
    )
    verb = "trained all models" if row["mode"] == "weak" else "reached its target"
    on = f" on {row['label']}" if row["published"] else ""
    but = f"; not ranked: {reasons.iloc[0]}" if len(reasons) else ""
    return f"{task} {verb} in {render_seconds(float(row['score_s']))}{on}{ends}{but}"


def _name_task(row: pd.Series) -> str:
    return render_short_heading(row["benchmark"], row["size"], row["mode"])


def _find_disturbed(study: Study) -> set[str]:
    """Find the results (groups) with a run that other programs disturbed."""
    return set(study.runs.loc[study.runs["had_company"], "group"])


def _list_reasons(study: Study) -> pd.Series:
    """List for each result that is not ranked why."""
    rows = study.distinct
    busy = rows["group"].isin(_find_disturbed(study)).map({True: ", made on a busy machine", False: ""})
    why = rows["not_ranked"].where(rows["score_s"].notna(), "no score (" + rows["score_note"].astype(str) + busy + ")")
    return why[rows["not_ranked"].notna() | rows["score_s"].isna()]


def _table(lines: Sequence[tuple[Any, ...]], title: str) -> HtmlTable | None:
    if not lines:
        return None
    *columns, of = zip(*lines, strict=True)
    return build_html_table(dict(zip(COLUMNS, columns, strict=True)), title, of=of)


def _find_pair(task: Task, rows: pd.DataFrame, compared: pd.DataFrame) -> tuple[pd.Series, pd.Series] | None:
    """Find the fastest of a task by time to train and the next; None if nothing is compared."""
    others = compared[(compared["class"] == task.title) & compared["label"].isin(rows["label"])]
    # The table of comparisons lacks results with a single run; without one there is nothing to say
    if others.empty or others["against"].iloc[0] not in set(rows["label"]):
        return None
    best, second = (rows[rows["label"] == others[end].iloc[0]].iloc[0] for end in ("against", "label"))
    return best, second


def _time(
    task: Task, rows: pd.DataFrame, a: pd.Series, b: pd.Series, compared: pd.DataFrame, explained: pd.DataFrame, study: Study
) -> tuple[str, ...]:  # fmt: skip
    """Compare the fastest of a task by time to train with the next: a row of COLUMNS.

    The tables are those of comparisons and of factors.
    """
    others = compared[(compared["class"] == task.title) & compared["label"].isin(rows["label"])]
    best, next_one = str(a["label"]), others.iloc[0]
    close = list(others.loc[others["verdict"] != "slower", "label"])
    interval = f"95 %: {next_one['95 % from']:.3g} to {next_one['95 % to']:.3g}"
    by = f"{next_one['label']} takes {next_one['ratio of times']:.3g} times as long ({interval})"
    scores = next_one["ratio of scores"]
    if are_far_apart(scores / next_one["ratio of times"]):
        by += f"; {scores:.3g} times by scores, without the fastest run and the slowest or a failed one"
    if not close:
        by += f"; sure, {render_counts(next_one)}"
    else:
        by += f", {render_counts(next_one)}; inconclusive: {_join_labels(close)} may be as fast"
    staged = next_one["ratio with staging"]
    if are_far_apart(staged / scores):
        said = f"{staged:.3g} with" if "by scores" in by else f"{scores:.3g} times by scores, {staged:.3g} with"
        by += f"; {said} the staging before the runs"
    if missed := int(sum(row["n_started"] - row["n_reached"] for row in (a, b))):
        by += f"; the times are without {render_count(missed, 'run')} that missed the target"
    who = best if not close else f"{best}, or {_join_labels(close)}"
    why = _explain_difference(explained, b, a, sure=not close) + _name_settings(a, b, study)
    if (batches := [row["global_batch_size"] for row in (a, b)])[0] != batches[1] and not any(map(is_absent, batches)):
        why += f"; batch {batches[0]:,.0f} against {batches[1]:,.0f}"
    both = pd.DataFrame([a, b])
    rest = pd.to_numeric(both["units"]) - find_training_units(both)  # NaN: the units are not known
    for row, count in zip((a, b), rest, strict=True):
        if count > 0:
            why += f"; {count:,.0f} of {row['units']:,.0f} accelerators of {row['label']} only evaluate"
    if len(formats := dict.fromkeys(row["precision"] for row in (a, b) if isinstance(row["precision"], str))) > 1:
        why += f"; precision: {' against '.join(formats)}"
    by += _describe_other_processes(rows, study)
    return task.short, who, by, why, _costs(a, b, study), _advice(rows, a, b, next_one, close, study)


def _explain_difference(explained: pd.DataFrame, other: pd.Series, best: pd.Series, *, sure: bool) -> str:
    """Explain a difference by its factors, also one that is not sure if some factors are."""
    # Two systems may have results of several benchmarks, with the same labels
    title = render_heading(*(best[name] for name in CLASS_COLUMNS))
    pairs = explained[
        (explained["class"] == title) & (explained["from"] == other["label"]) & (explained["to"] == best["label"])
    ]
    if pairs.empty:
        return "not known: machine size or epochs are not logged"
    row = pairs.iloc[0]
    if sure:
        return explain_factors(row) or "no factor differs by more than its runs do"
    known = any(is_sure(row, name) for name in FACTORS)
    return f"the total is inconclusive, but not each part: {explain_factors(row)}" if known else "no part of it is sure"


def _name_settings(a: pd.Series, b: pd.Series, study: Study) -> str:
    """Name the settings in which two results of one's own differ. Empty if none does, or if one of them is
    published.
    """
    if a["published"] or b["published"]:
        return ""
    one, other = (_settings(study.runs[study.runs["group"] == row["group"]]).get(row["group"], {}) for row in (a, b))
    names = sorted(
        name
        for name in one.keys() & other.keys()
        if one[name] != other[name] and not name.startswith(("data", "staging.", "submission."))
    )
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    said = ", ".join(f"{name} ({one[name]} against {other[name]})" for name in names[:MOST_LISTED])
    return f"; settings that differ: {said}{more}" if names else ""


def _describe_other_processes(rows: pd.DataFrame, study: Study) -> str:
    """Name the results whose runs shared their CPUs. Empty if none had."""
    counted = [(str(row["label"]), study.converged_of(str(row["group"]))["had_company"]) for _, row in rows.iterrows()]
    shared = [f"{int(beside.sum())} of {len(beside)} runs of {label}" for label, beside in counted if beside.any()]
    return f"; {_join_labels(shared)} shared the CPUs with other programs" if shared else ""


def _find_throughput_pair(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series] | None:
    """Find the results with the most models per minute of a task; None for a single one."""
    ordered = rows.sort_values(["models_per_min", "label"], ascending=[False, True])
    return (ordered.iloc[0], ordered.iloc[1]) if len(ordered) > 1 else None


def _throughput(task: Task, rows: pd.DataFrame, a: pd.Series, b: pd.Series, study: Study) -> tuple[str, ...]:
    """Compare the most models per minute of a task with the next: a row of COLUMNS.

    Each is one measurement, so it is never sure.
    """
    rate, other = (f"{row['models_per_min']:.3g} models/min" for row in (a, b))
    ratio = a["models_per_min"] / b["models_per_min"]
    vary = max((each["run_s.std"] / each["run_s.mean"] for each in (a, b)), default=math.nan)
    spread = f"; instances vary by {render_percent(100 * vary)}" if vary == vary else ""
    by = (
        f"{ratio:.3g} times{_add_staging(ratio, a, b)}: {rate} against {other} of {_machine(b)}; one "
        f"measurement of each, whose error is not known{spread}"
    )
    advice = _advise_by_cost(a, _find_cheapest(rows, a, b, study), study)
    return task.short, _machine(a), by, "–", _costs(a, b, study), advice


def _add_staging(ratio: float, a: pd.Series, b: pd.Series) -> str:
    """Say how many times as fast, or as cheap, A is if the staging before the runs counts; empty if it is as many."""
    share, other = (row["score_s"] / row["score_with_staging_s"] for row in (a, b))
    return f" ({ratio * share / other:.3g} with the staging before the runs)" if are_far_apart(share / other) else ""


def _machine(row: pd.Series) -> str:
    """Name a result in throughput mode, with the size of its instances."""
    return f"{row['label']}" + ("" if is_absent(row["units"]) else f" (instances of {row['units']:g})")


def _costs(a: pd.Series, b: pd.Series, study: Study) -> str:
    """Describe machine size and cost of two results.

    Without prices the cost is hours of the device.
    """
    units = [render_system_units(row) for row in (a, b)]
    parts = [f"{each} {row['device']}" for each, row in zip(units, (a, b), strict=True) if each]
    costs = [_cost(row, study) for row in (a, b)]
    sizes = " against ".join(parts)
    if None in costs:
        missing = [str(row["device"]) for row, cost in zip((a, b), costs, strict=True) if cost is None]
        return f"{sizes}; cost not known of {', '.join(dict.fromkeys(missing))}"
    each = " a model" if a["mode"] == "weak" else ""
    first, second = map(render_number, costs)
    if study.prices is None and a["device"] != b["device"]:
        return f"{sizes}; {first} {name_hours(a)} against {second} {name_hours(b)}{each}"
    return f"{sizes}; {first} against {second} {study.prices.unit if study.prices else name_hours(a)}{each}"


def name_hours(row: pd.Series) -> str:
    """Name an hour of one compute unit by its device, "H100 hours"; a device with a long name by what it is."""
    device = str(row["device"])
    is_known = device != UNKNOWN_DEVICE and len(device) <= LONG_DEVICE
    one = row["unit"] if isinstance(row["unit"], str) else "unit"
    return f"{device if is_known else one} hours"


def _find_cheapest(rows: pd.DataFrame, best: pd.Series, other: pd.Series, study: Study) -> pd.Series:
    """Find the cheapest result that costs the same money as the second, without the fastest."""
    costs = {
        place: _cost(row, study)
        for place, row in rows.iterrows()
        if place != best.name and (study.prices is not None or row["device"] == other["device"])
    }
    known = {place: cost for place, cost in costs.items() if cost is not None}
    return rows.loc[min(known, key=known.__getitem__)] if known and _cost(other, study) is not None else other


def _cost(row: pd.Series, study: Study) -> float | None:
    """Compute what a result costs, by the user's prices or in unit hours; in throughput mode, of one model."""
    cost = row["cost"] if study.prices else row["unit_hours"]
    return None if is_absent(cost) else float(cost) / (float(row["models"]) if row["mode"] == "weak" else 1.0)


def _advice(
    rows: pd.DataFrame, a: pd.Series, b: pd.Series, compared: pd.Series, close: Sequence[str], study: Study
) -> str:
    """Advise: the faster one if it costs no more; else what each is better for, or what would show more."""
    if not close:
        return _advise_by_cost(a, _find_cheapest(rows, a, b, study), study)
    first, second = _cost(a, study), _cost(b, study)
    needed = compared.get("to tell")
    more = "more runs would hardly tell" if is_absent(needed) else str(needed)
    if first is None or second is None or not _is_alike(a, b, study):
        return f"neither: {more}"
    cheap = a if first <= second else b
    return f"{cheap['label']}, the cheaper of two that may be as fast; {more}"


def _advise_by_cost(a: pd.Series, b: pd.Series, study: Study) -> str:
    """Advise by the cost of the fastest result and of the cheapest other one."""
    first, second = _cost(a, study), _cost(b, study)
    if first is None or second is None:
        return f"{a['label']} where time counts; the cost of one of them is not known"
    if not _is_alike(a, b, study):
        even, (one, other) = _find_break_even(a, b, study), (name_hours(row).removesuffix("s") for row in (a, b))
        than = f"{even.hours:.3g} {other}{'' if even.hours == 1 else 's'}"
        staged = _add_staging(even.hours, a, b)
        article = "an" if one[:1] in "AEFHILMNORSXaeiou" and not one.startswith("unit") else "a"
        return f"{a['label']}: faster; cheaper than {b['label']} only if {article} {one} costs less than {than}{staged}"
    if first <= SAME_COST * second:
        return f"{a['label']}: faster, and {'cheaper' if SAME_COST * first < second else 'it costs no more'}"
    share = f"{first / second:.3g} times the cost"
    return f"{a['label']} where time counts, for {share}; {b['label']} where cost or the number of nodes does"


def _is_alike(a: pd.Series, b: pd.Series, study: Study) -> bool:
    """Return True if the costs of two results are the same money; hours of different devices are not."""
    return study.prices is not None or a["device"] == b["device"]


def _has_break_even(a: pd.Series, b: pd.Series, study: Study) -> bool:
    return not _is_alike(a, b, study) and None not in (_cost(a, study), _cost(b, study))


def _find_break_even(a: pd.Series, b: pd.Series, study: Study) -> BreakEven:
    """Find at what price of its device's hour the faster result of two costs as much as the other."""
    hours = (_cost(b, study) or math.nan) / (_cost(a, study) or math.nan)
    return BreakEven(
        task=render_short_heading(a["benchmark"], a["size"], a["mode"]),
        faster=str(a["label"]),
        other=str(b["label"]),
        devices=(str(a["device"]), str(b["device"])),
        hours=hours,
        of=tuple(int(str(row.name)) for row in (a, b)),
    )


def _join_labels(labels: Sequence[str]) -> str:
    more = len(labels) - MOST_LISTED
    return ", ".join(labels[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _sentences(
    study: Study, alone: Sequence[Mapping[object, object]], answers: Mapping[str, str], *, ranked: bool
) -> Iterable[str]:
    """Say what is known of results that nothing can be ranked with, and what would make a comparison."""
    yield from _describe_unranked(study)
    without = study.distinct[study.distinct["score_s"].isna()]
    # Own results first
    shown = sorted(alone, key=lambda row: bool(row["published"]))
    yield from (_describe_result(row, study) for row in shown[:MOST_LISTED])
    more = len(shown) - MOST_LISTED
    if more > 0:
        yield f"{render_count(more, 'more result')} {'has' if more == 1 else 'have'} nothing to be compared with."
    for row in without.head(MOST_LISTED).to_dict("records"):
        time = (
            f"; it took {render_seconds(row['run_s.mean'])}{' on average' * (row['n_started'] > 1)}"
            if pd.notna(row["run_s.mean"])
            else ""
        )
        yield f"{row['label']} ({row['benchmark']} {row['size']}) has no score: {row['score_note']}{time}{_resume(row, study)}."
    if len(without) > MOST_LISTED:
        yield f"{render_count(len(without) - MOST_LISTED, 'more result')} without a score."
    if not ranked:
        if answers.get("extended_roofline"):
            yield f"Against its ceilings: {answers['extended_roofline']}."
        elif not study.distinct["published"].all() and study.distinct["score_s"].notna().any():
            yield (
                "How near that is to what the machine can do is not known: `mlhpc ceilings -o ceilings.json` measures its"
                " peak rates; give that file to `mlhpc report` too."
            )
        if answers.get("beside_published") and (study.distinct["size"] == FULL).any():
            yield f"In the published field: {answers['beside_published']}."
        reasons = _list_reasons(study)
        if any("other programs" in reason for reason in reasons):
            yield "`mlhpc run --wait-for-quiet` repeats runs when other programs leave the CPUs idle."
        if reasons.empty or (
            len(reasons) < len(study.distinct) and not study.distinct.duplicated(list(CLASS_COLUMNS)).any()
        ):
            yield "Nothing to rank yet: add the runs or packages of a second system, of the same benchmark and size."


def _list_assumptions(compared: pd.DataFrame) -> Iterable[str]:
    """Say what sure differences rest on, as `mlhpc compare` does."""
    assumed = compared["assumes"].dropna() if "assumes" in compared else EMPTY_TABLE["label"]
    texts = [
        text for text, _ in Counter(text for each in assumed for text in each.split("; ")).most_common(MOST_LISTED)
    ]
    if texts:
        yield f"A sure difference assumes that {'; that '.join(texts)}."


def _resume(row: Mapping[Any, Any], study: Study) -> str:
    """Say how to make the runs that a result of one's own lacks; all of them again if other programs slowed some."""
    needed = row["required_runs"]
    if row["published"] or pd.isna(needed) or row["n_started"] >= needed:
        return ""
    if row["group"] in _find_disturbed(study):
        again = f"`mlhpc run {row['benchmark']} -o NEW --runs {needed:.0f} --wait-for-quiet`"
        return f", on a busy machine; {again} makes all of them again when it is quiet"
    return f"; `mlhpc run {row['benchmark']} -o FOLDER --resume --runs {needed:.0f}` completes them"


def _describe_unranked(study: Study) -> Iterable[str]:
    """Say which results with a score are not ranked, and why."""
    reasons = study.distinct.loc[study.distinct["score_s"].notna(), "not_ranked"].dropna()
    for place, reason in reasons.head(MOST_LISTED).items():
        row = study.distinct.loc[place]
        but = "; MLCommons' review accepted it" if row["published"] else ""
        yield f"{row['label']} ({row['benchmark']} {row['size']}) is not ranked: {reason}{but}."
    if len(reasons) > MOST_LISTED:
        yield f"{render_count(len(reasons) - MOST_LISTED, 'more result')} not ranked."


def _describe_result(row: Mapping[object, object], study: Study) -> str:
    """Describe time and spread of one result, and how many runs shared their CPUs."""
    score, low, high = (row[name] for name in ("score_s", "score_low_s", "score_high_s"))
    interval = ""
    if row["mode"] != "weak" and not is_absent(low) and not is_absent(high):
        interval = f" ({INTERVAL_WORDS}: {render_duration_range(float(low), float(high), like_s=float(score))})"  # type: ignore[arg-type]
    if row["mode"] != "weak" and row["n_reached"] > 1:  # type: ignore[operator]
        ends = render_duration_range(float(row["fastest_s"]), float(row["slowest_s"]), like_s=float(score))  # type: ignore[arg-type]
        interval += f"; its runs took {ends}"
    verb = "trains all models" if row["mode"] == "weak" else "trains to the target"
    run, train = row["run_s.mean"], row["train_s.mean"]
    known = run and not is_absent(train)
    share = f"; {100 * float(train) / float(run):.0f} % of a run is training" if known else ""  # type: ignore[arg-type]
    return (
        f"{row['label']} {verb} of {row['benchmark']} ({row['size']}) in {render_seconds(float(score))}{interval}{share}; "  # type: ignore[arg-type]
        f"{row['n_reached']} of {row['n_started']} runs reached"
        f" it{_in_sessions(row, study)}{_describe_other_processes(pd.DataFrame([row]), study)}."
    )


def _in_sessions(row: Mapping[Any, Any], study: Study) -> str:
    """Say in how many sessions the runs of a result were, if in several."""
    sessions = count_sessions(study, str(row["group"])) if row["mode"] == "strong" else 1
    return f" in {sessions} sessions" if sessions > 1 else ""


@dataclass(frozen=True)
class ScoreSection:
    """Holds the results of one class and division: heading, main table, further columns and remarks."""

    title: str
    table: HtmlTable
    details: HtmlTable
    remarks: tuple[str, ...] = field(default=())


def build_score_sections(study: Study) -> list[ScoreSection]:
    """Build one section per benchmark, size, mode and division.

    Rounds whose times mean different things are kept apart.
    """
    sections = []
    for key, rows in study.in_rounds.groupby([*CLASS_COLUMNS, "division"], sort=True):
        ordered = _sort_rows(rows)
        title = f"{render_heading(*key[:3])} · {key[3]} division"
        sections.append(
            ScoreSection(
                title, _headline_table(ordered, title, study), _details_table(ordered, title), tuple(_remarks(ordered))
            )
        )
    return sections


def _sort_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Sort by rounds whose times mean the same, then by the bold column: most models/min or shortest score first.

    Results that are not ranked come last.
    """
    rank = -rows["models_per_min"] if rows["mode"].iloc[0] == "weak" else rows["score_s"]
    last = rows["not_ranked"].notna() if "not_ranked" in rows else False
    keyed = rows.assign(last=last, era=rows["round"].map(find_round_group), rank=rank)
    keys = ["last", "era", "rank"]
    return keyed.sort_values([*keys, "label"], na_position="last").drop(columns=keys)


def _remarks(rows: pd.DataFrame) -> Iterable[str]:
    first = rows.iloc[0]
    if pd.notna(first["target"]):
        sign = "≤" if first["target_direction"] == "min" else "≥"
        yield f"Target: {first['metric_name']} {sign} {first['target']:g}."
    if rows["round"].nunique() > 1:
        yield "Rounds differ in rules and data; rows are ordered within rounds whose times mean the same."
        for name in sorted(set(rows["round"].map(find_round_group)) & set(GROUP_MEANINGS)):
            yield f"{name}: {GROUP_MEANINGS[name]}."
    if first["size"] != FULL:
        yield f"Compare {first['size']} results only with {first['size']} results: it is not the MLPerf problem."
        yield "A smaller problem has other limits, such as overhead: a difference in speed here may be another one at full size."


def _headline_table(rows: pd.DataFrame, caption: str, study: Study) -> HtmlTable:
    """Build the columns that fit a screen: every score with its definition, scale, convergence and cost."""
    weak = rows["mode"].iloc[0] == "weak"
    columns: dict[str, list[Any]] = {"system": list(rows["name"])}
    if rows["rounds"].nunique() > 1:
        columns["round"] = list(rows["rounds"])
    columns["remark"] = _list_remarks(rows)
    if weak:
        columns["models/min"] = list(rows["models_per_min"])
    columns["time to train all" if weak else "score by the rules"] = [
        time or f"no score: {note}"
        for time, note in zip(build_time_cells(rows["score_s"]), rows["score_note"], strict=True)
    ]
    if rows["published"].any():
        columns["official tool prints"] = build_time_cells(
            rows["score_tool_s"].where(rows["published"] & (rows["round"] != "v0.7"))  # no tool for that round
        )
        stated = read_stated_minutes()
        columns["submitter stated"] = build_time_cells(
            60.0 * stated[group][0] if group in stated else None for group in rows["group"]
        )
    if (rows["staging_before_run_s.mean"] > 0).any():
        columns["with staging"] = build_time_cells(rows["score_with_staging_s"])
    if not weak:
        columns[INTERVAL_WORDS] = build_time_range_cells(rows["score_low_s"], rows["score_high_s"], rows["score_s"])
    # A score is a mean already, so this column is only for results without one, and for instances
    columns["mean run"] = build_time_cells(rows["run_s.mean"].where(rows["score_s"].isna() | weak))
    columns["runs: averaged / reached / started"] = [
        f"{row['n_averaged']} / {row['n_reached']} / {row['n_started']}{_in_sessions(row, study)}"
        for row in rows.to_dict("records")
    ]
    columns |= _build_machine_columns(rows, weak=weak)
    columns["global batch"] = list(rows["global_batch_size"])
    columns["epochs to target"] = render_spreads(rows["epochs_to_target.mean"], rows["epochs_to_target.std"])
    columns["training [samples/s]"] = list(rows["train_rate.mean"])
    columns |= _build_hours(rows)
    if "energy_j" in rows:
        columns["energy [MJ]"] = list(rows["energy_j"] / 1e6)
        columns["energy: 95 % interval [MJ]"] = render_ranges(rows["energy_low_j"] / 1e6, rows["energy_high_j"] / 1e6)
        columns["energy of"] = list(rows["energy_kind"])
        columns["no score of energy"] = list(rows["energy_note"])
    of = [(place,) for place in rows.index]
    return build_html_table(drop_empty(columns), caption, strong={"score by the rules", "models/min"}, of=of)


def _list_remarks(rows: pd.DataFrame) -> list[str | None]:
    """List why a result is not ranked, and which round had it first."""
    reasons = rows.get("not_ranked", pd.Series(index=rows.index, dtype=object))
    remarks = [
        (f"not ranked: {reason}" if pd.notna(reason) else "", f"carried over from {first}" if pd.notna(first) else "")
        for reason, first in zip(reasons, rows["carried"], strict=True)
    ]
    return ["; ".join(filter(None, parts)) or None for parts in remarks]


def _build_hours(rows: pd.DataFrame) -> dict[str, list[Any]]:
    """Build the column of unit hours. Those of unlike devices name the device and are sorted by it first."""
    if rows["device"].nunique() < 2:
        return {name_hours(rows.iloc[0]): list(rows["unit_hours"])}
    cells = [
        None if is_absent(hours) else Cell(f"{render_number(hours)} of {device}", f"{device} {hours:015.3f}")
        for hours, device in zip(rows["unit_hours"], rows["device"], strict=True)
    ]
    return {"device hours": cells}


def _build_machine_columns(rows: pd.DataFrame, *, weak: bool) -> dict[str, list[Any]]:
    """Build the columns of the machine's size: compute units, and what varies.

    In throughput mode: the units of the whole system, the ones that trained models at once, and those of one instance.
    """
    if weak:
        names = {
            "units of the system": "units_described",
            "units at once": "units_busy",
            "units of an instance": "units",
        }
        return {title: list(rows[column]) for title, column in names.items()}
    found = choose_extent(rows)
    varies = {found.count: list(found.sizes)} if found.one in ("node", "core", "rank") else {}
    return {"compute units": list(rows["units"])} | varies


def _details_table(rows: pd.DataFrame, caption: str) -> HtmlTable:
    """Build the columns that do not fit into the main table."""
    columns: dict[str, list[Any]] = {
        "system": list(rows["name"]),
        "round": list(rows["rounds"]),
        "submitter": list(rows["submitter"]),
        "folder": list(rows["system"]),
        "device": list(rows["device"]),
        "nodes": list(rows["nodes"]),
        "ranks": list(rows["ranks"]),
        "precision": list(rows["precision"]),
        "runs, fastest – slowest": build_time_range_cells(rows["fastest_s"], rows["slowest_s"], rows["run_s.mean"]),
        "models trained": list(rows["models"]),
        "metric reached": list(rows["reached_value.mean"]),
        "target": list(rows["target"]),
        "trivial baselines": [_baselines(text) for text in rows["baselines"]],
        "oracle baselines (know how the data were made)": [_baselines(text) for text in rows["oracle_baselines"]],
        "scaling factor shipped": list(rows["scaling_factor"]),
        "the stated score's source": [read_stated_minutes().get(group, (0.0, ""))[1] for group in rows["group"]],
    }
    return build_html_table(drop_empty(columns), f"{caption}: more", of=[(place,) for place in rows.index])


def _baselines(text: object) -> str | None:
    return "; ".join(f"{name} {render_number(value)}" for name, value in parse_mapping(text).items()) or None


SYSTEM_FIELDS = (
    "system", "round", "submitter", "name", "nodes", "accelerators_per_node", "accelerator", "accelerator_memory",
    "processors_per_node", "processor", "memory", "storage", "network", "topology", "framework",
    "operating_system", "described_by", "problem",
)  # fmt: skip
SHOWN_DIGITS = 8  # of a checksum: a page of 3,000 logs would grow by 0.2 MB


def build_systems_table(study: Study) -> HtmlTable:
    """Build the table of every system, with the fields that any of them has."""
    table = study.tables.systems
    columns = {name.replace("_", " "): list(table[name]) for name in SYSTEM_FIELDS if table[name].notna().any()}
    return build_html_table(columns, "Systems as described by their packages, or as the run collected them")


def build_system_differences(study: Study) -> list[HtmlTable]:
    """Build for each class with several results a table of the description's fields that differ."""
    # Without names and sources, which always differ
    systems = study.tables.systems.set_index("system_key")[list(SYSTEM_FIELDS[4:-2])]
    systems.columns = systems.columns.str.replace("_", " ")
    described = {row["group"]: dict(systems.loc[row["system_key"]]) for _, row in study.distinct.iterrows()}
    return _build_differences(study, described, "descriptions that differ")


def _build_differences(study: Study, known: Mapping[str, Mapping[str, Any]], what: str) -> list[HtmlTable]:
    """Build for each class with several results a table of what differs of ``known``.

    It has the same names, with their values, for each group.
    """
    tables = []
    for title, rows in study.classes():
        of_results = [known[group] for group in rows["group"]]
        columns: dict[str, list[Any]] = {"system": list(rows["label"])}
        for name in of_results[0]:
            values = [of_result[name] for of_result in of_results]
            if len({str(value) for value in values}) > 1:
                columns[name] = values
        if len(columns) > 1:
            of = [(place,) for place in rows.index]
            tables.append(build_html_table(drop_empty(columns), f"{title}: {what}", of=of))
    return tables


def _settings(runs: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Collect hyperparameters and run_config of each result (by group), flat.

    Settings that differ between runs say so.
    """
    by_group: dict[str, dict[str, Any]] = {}
    for group, of_group in runs.groupby("group", sort=True):
        flat = [
            _flatten(parse_mapping(hyperparameters)) | _flatten(parse_mapping(config))
            for hyperparameters, config in zip(of_group["hyperparameters"], of_group["config"], strict=True)
        ]
        names = sorted({name for settings in flat for name in settings})
        by_group[str(group)] = {
            name: values.pop() if len(values) == 1 else "differs between runs"
            for name in names
            # As JSON, because lists and mappings cannot be members of a set
            if (values := {json.dumps(settings.get(name)) for settings in flat})
        }
    return by_group


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def build_setting_differences(study: Study) -> list[HtmlTable]:
    """Build for each class with several results a table of the settings in which they differ."""
    settings = _settings(study.runs)
    names = sorted({name for of_result in settings.values() for name in of_result})
    known = {group: {name: of_result.get(name) for name in names} for group, of_result in settings.items()}
    return _build_differences(study, known, "settings that differ")


def build_settings_tables(study: Study) -> list[tuple[str, HtmlTable]]:
    """Build a table of the settings of every result that logs some, each with a heading."""
    labels = study.results.set_index("group")["label"]
    return [
        (
            f"{labels[group]} ({group})",
            build_html_table({"setting": list(s), "value": list(s.values())}, f"Settings of {labels[group]}"),
        )
        for group, s in _settings(study.runs).items()
        if s
    ]


def build_logs_table(study: Study) -> HtmlTable:
    """Build the table of every log: outcome, part in the score, beginning of its checksum.

    tables/runs has all columns.
    """
    runs = study.runs
    columns = {
        "log": list(runs["run"]),
        "outcome": list(runs["outcome"]),
        "in the score": list(runs["fate"]),
        "run": build_time_cells(runs["run_s"]),
        "epochs to target": list(runs["epochs_to_target"]),
        "seed": list(runs["seed"]),
        "sha256": [str(digest)[:SHOWN_DIGITS] + "…" for digest in runs["sha256"]],
    }
    place = {group: place for place, group in study.results["group"].items()}
    return build_html_table(columns, "Every log that was read", of=[(place[group],) for group in runs["group"]])


MOST_NAMED = 5  # of results without a tier
CAPTIONS = {
    "index": "Index of each system",
    "index_without_one": "The index with one workload left out",
    "index_ratios": "The ratios behind the index",
}


@dataclass(frozen=True)
class ProcurementSection:
    """Holds the index as the template takes it: an answer, remarks, and its tables."""

    answer: str
    remarks: tuple[str, ...]
    tables: tuple[HtmlTable, ...]


def build_procurement_section(index: Index | None) -> ProcurementSection | None:
    """Build the section of an index; None without one."""
    if index is None:
        return None
    tables = [_build_table(table, CAPTIONS[name]) for name, table in build_index_tables(index).items() if len(table)]
    return ProcurementSection(_answer(index), tuple(_render_procurement_remarks(index)), tuple(tables))


def _build_table(table: pd.DataFrame, caption: str) -> HtmlTable:
    """Build a table of the page. The system heads each row; the tier is left out if no result has one."""
    names = [name for name in table if name != "system" and not (name == "tier" and set(table["tier"]) == {ANY_TIER})]
    return build_html_table(table[["system", *names]].to_dict("list"), caption, strong={"index"})


def _answer(index: Index) -> str:
    others = [each for each in index.systems if each.system != index.reference and each.value is not None]
    if not others:
        return f"No other system than {index.reference} has a result of every workload, so there is no index."
    parts = []
    for tier in dict.fromkeys(each.tier for each in others):
        # Systems are sorted, the best first in each tier
        best = next(each for each in others if each.tier == tier)
        if best.low is None or best.high is None:
            many = render_number(best.value)
        else:
            many = render_interval(best.value or math.nan, best.low, best.high)
        name = "" if tier == ANY_TIER else f"{tier}: "
        parts.append(f"{name}{best.system} is {many} times as fast as {index.reference}")
    return "; ".join(parts) + "."


def _render_procurement_remarks(index: Index) -> list[str]:
    workloads = index.weights.workloads
    weights = ", ".join(f"{each.title} {each.weight:g}" for each in workloads)
    remarks = [
        f"Weighted geometric mean of ratios of speed to {index.reference}, of whole results of any size of machine "
        f"unless the file of weights states units. Weights: {weights}. Intervals: 95 %, over the runs, or over sessions "
        "where a result has several."
    ]
    if any(each.mode == "weak" for each in workloads):
        remarks.append("A throughput is one measurement, so the intervals leave out how much it would vary.")
    if index.without_tier:
        more = f" and {len(index.without_tier) - MOST_NAMED} more" if len(index.without_tier) > MOST_NAMED else ""
        which = ", ".join(index.without_tier[:MOST_NAMED]) + more
        stated = {each.tier for each in index.systems} != {ANY_TIER}
        remarks += [f"Not in any tier, so left out: {which}."] if stated else []
    return remarks
