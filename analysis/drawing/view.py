"""Defines the views that a figure of the report is made of. Each answers one question.

Renders numbers, times, names and lists as text for people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from mlhpc.analysis.study import Study
from mlhpc.suite.files import render_duration

if TYPE_CHECKING:
    import altair as alt


@dataclass(frozen=True)
class Goal:
    """Holds a heading of the report's questions: what somebody wants to do, and who."""

    name: str
    viewpoint: str


CHOOSE_SYSTEMS = Goal("Choose between systems", "procurement")
UNDERSTAND_TIME = Goal("Understand one system's time", "performance engineering")
UNDERSTAND_CONVERGENCE = Goal("Understand convergence", "science")
SCALE = Goal("Scale", "operations")
RUN_EXPERTS = Goal("Choose how to run experts", "mixture of experts")
# In the order of the page, before those of other packages
GOALS = (CHOOSE_SYSTEMS, UNDERSTAND_TIME, UNDERSTAND_CONVERGENCE, SCALE, RUN_EXPERTS)


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


@dataclass(frozen=True)
class View:
    """Holds one question of a figure, with a table, the answer in words, and a chart of the table.

    ``table`` and ``answer`` raise NotAnswerableError if the data are missing. ``table`` has units in the names of its
    columns. ``chart`` draws the table and nothing else; it may use ``label``, ``benchmark`` and ``size`` of a row.
    """

    name: str  # of its file of numbers, and of its place on the page
    title: str
    question: Question
    caption: str
    table: Callable[[Study], pd.DataFrame]
    answer: Callable[[Study], str]
    chart: Callable[[pd.DataFrame], alt.TopLevelMixin]
    fewest_rows: int = 1  # of the table: with fewer the answer says it all, and the page has no chart


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


def join_statements(statements: Sequence[str], most: int = 6) -> str:
    """Join the first ``most`` texts by "; " in one line. If there are more, it ends with "and N more"."""
    more = f"; and {len(statements) - most} more" if len(statements) > most else ""
    return "; ".join(statements[:most]) + more


def render_seconds(value: float) -> str:
    """Render seconds as text for people, as the commands print them; a dash for NaN."""
    return "–" if value != value else render_duration(value)
