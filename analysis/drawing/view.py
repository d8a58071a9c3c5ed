"""Defines the views that a figure of the report is made of. Each answers one question.

Renders numbers, times, names and lists as text for people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from mlhpc.analysis.results.selection import make_timed_runs
from mlhpc.analysis.study import Study
from mlhpc.suite.files import render_duration
from mlhpc.suite.statistics.sessions import TimedRun, find_sessions, render_sessions

if TYPE_CHECKING:
    import altair as alt


@dataclass(frozen=True)
class Goal:
    """Holds a heading of the report's questions: what somebody wants to do, and who."""

    name: str
    viewpoint: str


# Each is a section of the page
CHOOSE_SYSTEMS = Goal("Compare systems", "procurement")
UNDERSTAND_TIME = Goal("Where the time goes", "performance engineering")
UNDERSTAND_CONVERGENCE = Goal("Convergence", "science")
RUN_EXPERTS = Goal("Choose how to run experts", "mixture of experts")
# In the order of the page, before those of other packages
GOALS = (CHOOSE_SYSTEMS, UNDERSTAND_TIME, UNDERSTAND_CONVERGENCE, RUN_EXPERTS)


@dataclass(frozen=True)
class Question:
    """Holds a question under its goal.

    ``metrics`` are columns of the table of results or runs, or of the view's own. ``needs`` says in few words what
    would answer it, for a page where it has no answer. ``decision`` is the rule for deciding by the answer.
    """

    goal: Goal
    text: str
    metrics: tuple[str, ...]
    needs: str = ""
    decision: str = ""


class Answer(str):
    """Words whose numbers are all in the view's table. ``parts`` has each statement with the rows it is about.

    Rows are places in the table; none stands for all of them.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]

    def __new__(cls, text: str, rows: Iterable[int] = ()) -> Answer:
        """Make an answer of one statement; `join_statements` makes those of several."""
        answer = super().__new__(cls, text)
        answer.parts = ((text, tuple(rows)),)
        return answer

    def add(self, end: str) -> Answer:
        """Add words that are about no row of the table."""
        answer = Answer(f"{self}{end}")
        answer.parts = self.parts
        return answer


def has_rows(table: pd.DataFrame) -> bool:
    """Return True if a table has a row."""
    return len(table) > 0


def has_several_rows(table: pd.DataFrame) -> bool:
    """Return True if a table has several rows; of one the answer says it all."""
    return len(table) > 1


def varies(table: pd.DataFrame, column: str, by: Sequence[str]) -> bool:
    """Return True if a column has several values among the rows that are alike in ``by``."""
    return bool((table.groupby(list(by), dropna=False)[column].nunique() > 1).any())


@dataclass(frozen=True)
class View:
    """Holds one question of a figure, with a table, the answer in words, and a chart of the table.

    An `Answer` says which rows of the table its numbers are of. ``table`` and ``answer`` raise NotAnswerableError if
    the data are missing. ``table`` has units in the names of its columns. ``chart`` draws the table and nothing else;
    it may use ``label``, ``benchmark`` and ``size`` of a row.
    """

    name: str  # of its file of numbers, and of its place on the page
    title: str
    question: Question
    caption: str
    table: Callable[[Study], pd.DataFrame]
    answer: Callable[[Study], str]
    chart: Callable[[pd.DataFrame], alt.TopLevelMixin]
    worth: Callable[[pd.DataFrame], bool] = has_rows  # whether there is a chart of the table


# Of a result in its task
FASTEST, SLOWER, INCONCLUSIVE = "fastest ranked", "slower", "inconclusive"
MOST_PASSED = 3  # results that a sentence names
ONE_EACH, NOT_RANKED = "one measurement each", "not ranked"
FIRST = "standing"  # the view on top of the page
TOP_OF_ONE = "time_split"  # that of a page without two results to compare


FAR_APART = 1.05  # one ratio over another: from then on a reader should see both
MACHINE = "size × speed"
STAGED_BEFORE = "staging before the run [s]"
FACTORS = ("size", "speed/size", "evaluation", "epochs", "staging", "other")  # columns of the table of factors
# Differences from 1 of a factor that is named: of one that is sure, and of one that may be chance
LEAST_SURE, LEAST_NAMED = 0.005, 0.02
LONG_DEVICE = 16  # letters: a longer name of a device is not repeated in sentences
INTERVAL_WORDS = "interval of the mean of all runs"  # what the interval of a score is called
SECONDS_UNITS = (  # from which upper end on, seconds per unit, its name
    (36000.0, 3600.0, "h"), (600.0, 60.0, "min"), (1.0, 1.0, "s"),
    (1e-3, 1e-3, "ms"), (1e-6, 1e-6, "µs"), (0.0, 1e-9, "ns"),
)  # fmt: skip


def render_interval(value: float, low: float, high: float, unit: str = "") -> str:
    """Render a value and its interval: "12 s [9, 16]". The interval's half width decides the digits (1 to 3).

    The interval is rounded outwards, so it never becomes narrower. Its ends get one more digit than the value if
    rounding would add more than a fifth of the width. Without a finite interval the value has one digit, and the text
    says so.
    """
    tail = f" {unit}" if unit else ""
    if not all(math.isfinite(number) for number in (value, low, high)):
        return f"{value:.1g}{tail} [unknown]" if math.isfinite(value) else f"–{tail}"
    half = (high - low) / 2
    if half <= 0:
        return f"{value:.6g}{tail}"
    step = 10.0 ** math.floor(math.log10(half))
    if value:
        first = 10.0 ** math.floor(math.log10(abs(value)))
        step = min(max(step, first / 100), first)  # one to three digits
    outer = step if _round_outwards(low, high, step) <= 1.2 * (high - low) else step / 10
    # 1e-9: an end that is a multiple of the step already may lie just beside it as a float
    below, above = math.floor(low / outer + 1e-9) * outer, math.ceil(high / outer - 1e-9) * outer
    ends = f"[{_render_rounded(below, outer)}, {_render_rounded(above, outer)}]"
    # A rounded value outside of its own interval would look wrong: it gets the digits of the ends
    if not low <= round(value / step) * step <= high:
        step = outer
    return f"{_render_rounded(round(value / step) * step, step)}{tail} {ends}"


def render_seconds_interval(value_s: float, low_s: float, high_s: float) -> str:
    """Render a time and its interval in the largest unit that suits the upper end: "300 ms [300, 980]"."""
    scale, unit = next((scale, unit) for least, scale, unit in SECONDS_UNITS if abs(high_s) >= least or not least)
    return render_interval(value_s / scale, low_s / scale, high_s / scale, unit)


def _round_outwards(low: float, high: float, step: float) -> float:
    """Compute the width of an interval whose ends are rounded outwards to multiples of ``step``."""
    return (math.ceil(high / step - 1e-9) - math.floor(low / step + 1e-9)) * step


def _render_rounded(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{decimals}f}"


def render_number(value: float | None) -> str:
    """Render a number with four significant digits; whole numbers in full, with thousands separators from five digits
    on.
    """
    if value is None or not math.isfinite(value):
        return "–"
    # Beyond 1e15 floats have no fractions any more, so being whole says nothing
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}" if abs(value) >= 10000 else str(int(value))
    if abs(value) >= 10000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def render_percent(value: float) -> str:
    """Render a percentage with two significant digits; from 100 on in full: "0.31 %", "510 %"."""
    return f"{value:.0f} %" if abs(value) >= 100 else f"{value:.2g} %"


def render_count(count: int, noun: str) -> str:
    """Render a count with its noun in the singular or plural."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def render_label(text: object, length: int = 44) -> str:
    """Render a label of at most ``length`` printable characters.

    Longer ones are cut in the middle, because names differ at both ends.
    """
    line = str(text)
    if not line.isprintable():
        line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    if len(line) <= length:
        return line
    head = length * 2 // 3
    return f"{line[:head]}…{line[-(length - head - 1) :]}"


def join_statements(statements: Sequence[str], most: int = 6) -> Answer:
    """Join the first ``most`` texts by "; " in one line. If there are more, it ends with "and N more"."""
    more = f"; and {len(statements) - most} more" if len(statements) > most else ""
    answer = Answer("; ".join(statements[:most]) + more)
    shown = [each if isinstance(each, Answer) else Answer(each) for each in statements[:most]]
    answer.parts = tuple(part for each in shown for part in each.parts)
    return answer


def rankable(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the results that may be fastest, cheapest or advised; ``not_ranked`` says why another may not."""
    return rows[rows["not_ranked"].isna()] if "not_ranked" in rows else rows


def list_timed_runs(study: Study, group: str, column: str = "run_s") -> tuple[TimedRun, ...]:
    """List a time of the runs of a result that reached the target, in order."""
    return make_timed_runs(list_ordered_runs(study, group), column)


def list_ordered_runs(study: Study, group: str) -> pd.DataFrame:
    """List the runs of a result that reached the target, in the order of their start, ``begin_s``."""
    if (list_ordered_runs, group) not in study.made:
        runs = study.converged_of(group)
        known = runs[(runs["run_s"] > 0) & (runs["run_s"] < math.inf)]
        ordered = known.assign(begin_s=known["run_start_ms"].fillna(0.0) / 1e3).sort_values(["begin_s", "run_s"])
        study.made[list_ordered_runs, group] = ordered
    return study.made[list_ordered_runs, group]


def number_sessions(study: Study, group: str) -> list[int]:
    """Number the session of each run of a result, in order."""
    sessions = find_sessions(list_timed_runs(study, group))
    return [number for number, session in enumerate(sessions) for _ in session]


def count_sessions(study: Study, group: str) -> int:
    """Count the sessions of a result's runs."""
    return len(set(number_sessions(study, group)))


def render_counts(row: pd.Series) -> str:
    """Render the runs and sessions of both sides of a comparison, those of the fastest first."""
    first, other = (render_sessions(row[f"n{of}"], row[f"sessions{of}"]) for of in (" of the other", ""))
    return f"by {first.removesuffix(' runs')} and {other}"


def name_passed(rows: pd.DataFrame) -> str:
    """Name the results of a task that are not ranked and faster than its second: a reader would miss them."""
    ranked, others = (rows[(rows["verdict"] == NOT_RANKED) == left] for left in (False, True))
    passed = others[others["ratio"] < ranked["ratio"].iloc[1]] if len(ranked) > 1 else others.head(0)
    best = ranked.head(1).to_dict("records")
    named = [_render_lead(row, best[0]) for row in passed.head(MOST_PASSED).to_dict("records")]
    return f"; faster than that, but not ranked: {', '.join(named)}" if named else ""


def _render_lead(row: Mapping[Hashable, Any], best: Mapping[Hashable, Any]) -> str:
    """Say how far a result is from the fastest ranked one; models also with the staging before the runs."""
    ratio = float(row["ratio"])
    if row["mode"] != "weak":
        return f"{row['label']} ({ratio:.3g} times as long)"
    staged = ratio * row["with staging"] / best["with staging"]
    by_staging = f", {1 / staged:.3g} with the staging before the runs" if are_far_apart(staged / ratio) else ""
    return f"{row['label']} ({1 / ratio:.3g} times as many models{by_staging})"


def are_far_apart(ratio: float) -> bool:
    """Return True for a ratio of two ratios that a reader should see; False if it is not known."""
    return ratio > 0 and not 1 / FAR_APART < ratio < FAR_APART


def explain_factors(row: pd.Series) -> str:
    """Say which factors of a row of the table make its second result faster, then which work against it.

    A factor is named if its interval excludes 1 or it is not small.
    """
    named = sorted(filter(partial(_differs, row), FACTORS), key=lambda name: -abs(math.log(row[name])))
    sides = [[_explain_factor(row, name) for name in named if (row[name] < 1) == against] for against in (False, True)]
    return "; against it: ".join(", ".join(side) for side in sides if side)


def _explain_factor(row: pd.Series, name: str) -> str:
    value, one, devices = f"{row[name]:.3g}", row["counts"].removesuffix("s"), (row["device from"], row["device to"])
    ends = _render_ends(row, name)
    if name == "size":
        return f"{value} times as many {row['counts']}"
    if name == "speed/size":
        each, other = (f"each {device}" for device in reversed(devices))
        if row["counts"] not in ("accelerators", "processors", "compute units") or max(map(len, devices)) > LONG_DEVICE:
            each, other = f"each {one}", f"one of {devices[0]}"
        if devices[0] == devices[1]:
            return f"{each} does {value} times the work in the same time{ends}"
        sizes = f"{row['extent to']:,.0f} against {row['extent from']:,.0f} of them"
        return f"{each} does {value} times the work of {other}, {sizes}{ends}"
    words = {
        "evaluation": ("less", "evaluation"),
        "epochs": ("fewer", "epochs"),
        "staging": ("less", "staging in the run or its first epoch"),
        "other": ("less", "other time"),
    }
    less, what = words[name]
    a_s, b_s = row[f"{STAGED_BEFORE} from"], row[f"{STAGED_BEFORE} to"]
    if name == "staging" and abs(b_s - a_s) > 1 and (row[name] > 1) == (b_s > a_s):  # moved, not saved
        what += f", but {render_seconds(b_s)} against {render_seconds(a_s)} before it"
    again = [str(row[end]) for end in ("from", "to") if name == "epochs" and row[f"repeats {end}"]]
    but = f"; runs of {' and '.join(again)} repeat courses, which the interval does not know" if again else ""
    return f"{less if row[name] > 1 else 'more'} {what}: {value} times as fast{ends}{but}"


def is_sure(row: pd.Series, name: str) -> bool:
    """Return True if the interval of a factor of the table excludes 1."""
    low, high = row.get(f"{name} from", math.nan), row.get(f"{name} to", math.nan)
    return bool(high < 1 or low > 1)


def _render_ends(row: pd.Series, name: str) -> str:
    low, high = row.get(f"{name} from", math.nan), row.get(f"{name} to", math.nan)
    if low != low:  # too few runs for an interval
        return ""
    return f" ({low:.3g} to {high:.3g}{'' if is_sure(row, name) else ': may be chance'})"


def _differs(row: pd.Series, name: str) -> bool:
    least = LEAST_SURE if name == "size" or is_sure(row, name) else LEAST_NAMED
    return bool(row[name] > 0 and abs(row[name] - 1) > least)


def render_seconds(value: float) -> str:
    """Render seconds as text for people, as the commands print them; a dash for NaN."""
    return "–" if value != value else render_duration(value)
