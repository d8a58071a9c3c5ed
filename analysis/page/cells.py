"""Builds table cells of the page, and the tables that the template receives."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Any

import pandas as pd

from mlhpc.analysis.drawing.view import render_number
from mlhpc.suite.files import render_duration, render_duration_range

MINUTES_SUFFIX = " [min]"  # the end of a column's name whose cells have a unit each: "42.2 s"


@dataclass(frozen=True)
class Cell:
    """Holds a table cell: its text, the key it is sorted by, and whether it is a number."""

    text: str
    key: str
    number: bool = False

    @property
    def long(self) -> bool:
        """Return True if it may take several lines."""
        return len(self.text) > 24


@dataclass(frozen=True)
class HtmlTable:
    """Holds a table of the page. The first column has row headings; columns in ``strong`` are printed bold.

    ``of`` has for each row the results that it is about (places in the study's results), by which it is filtered.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    strong: frozenset[str] = frozenset()
    of: tuple[tuple[int, ...], ...] = ()

    @property
    def body(self) -> str:
        """Render the rows as HTML."""
        # Rendered here and not by the template, which takes ten times as long for thousands of rows
        about = self.of or ((),) * len(self.rows)
        return "\n".join(self._row(cells, of) for cells, of in zip(self.rows, about, strict=True))

    def _row(self, cells: Sequence[Cell], of: Sequence[int]) -> str:
        parts = []
        for place, cell in enumerate(cells):
            classes = ["long"] * cell.long + ["strong"] * (self.columns[place] in self.strong)
            # The page's script sorts by the text where no key is given
            key = f' data-key="{escape(cell.key)}"' if cell.key != cell.text else ""
            kind = f' class="{" ".join(classes)}"' if classes else ""
            tag, head = ("th", ' scope="row"') if place == 0 else ("td", "")
            parts.append(f"<{tag}{head}{key}{kind}>{escape(cell.text)}</{tag}>")
        results = f' data-of="{" ".join(map(str, of))}"' if of else ""
        return f"<tr{results}>{''.join(parts)}</tr>"

    @property
    def classes(self) -> str:
        """Return the classes that align columns right, of the table: of every cell they would be a tenth of a page."""
        return " ".join(f"n{place}" for place, is_number in enumerate(self.numeric, start=1) if is_number and place > 1)

    @cached_property
    def numeric(self) -> tuple[bool, ...]:
        """Return for each column whether all its cells are numbers or empty, so that it is aligned right."""
        return tuple(
            any(cell.number for cell in cells) and all(cell.number or not cell.key for cell in cells)
            for cells in zip(*self.rows, strict=True)
        ) or (False,) * len(self.columns)


def build_html_table(
    columns: Mapping[str, Sequence[Any]], caption: str, strong: Iterable[str] = (), of: Iterable[Sequence[int]] = ()
) -> HtmlTable:
    """Build a table from equally long columns."""
    cells = [
        [_minutes(v) if name.endswith(MINUTES_SUFFIX) else _cell(v) for v in values] for name, values in columns.items()
    ]
    rows = tuple(zip(*cells, strict=True))
    return HtmlTable(tuple(columns), rows, caption, frozenset(strong), tuple(tuple(results) for results in of))


def _minutes(value: Any) -> Cell:
    """Build the cell of a number of minutes as people read it: in seconds below two minutes."""
    cell = _cell(value)
    return replace(cell, text=render_duration(60 * float(value))) if cell.number else cell


def _cell(value: Any) -> Cell:
    if isinstance(value, Cell):
        return value
    if is_absent(value):
        return Cell("–", "")
    # True is an int in Python, and would be shown as 1
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(render_number(value), f"{value:.9g}", number=True)
    text = str(value)
    leading = re.match(r"-?\d+(\.\d+)?(?= [±–] )", text)  # "4.2 ± 0.1" and "3 – 5" sort by their first number
    return Cell(text, leading.group() if leading else text, number=leading is not None)


def build_time_cells(seconds: Iterable[float | None]) -> list[Cell | None]:
    """Build cells of times as people read them, sorted by their seconds; None where one is missing."""
    return [None if is_absent(each) else _time_cell(render_duration(float(each)), each) for each in seconds]  # type: ignore[arg-type]


def build_time_range_cells(low: pd.Series, high: pd.Series, like: pd.Series) -> list[Cell | None]:
    """Build cells of ranges of times, "8.96 – 9.96 s", sorted by the lower end; None where one is missing.

    Each has the unit of the time ``like`` it.
    """
    return [
        _time_cell(render_duration_range(a, b, "–", like_s=c), a) if pd.notna(a) and pd.notna(b) else None
        for a, b, c in zip(low, high, like, strict=True)
    ]


def _time_cell(text: str, seconds: float) -> Cell:
    return Cell(text, f"{seconds:.9g}", number=True)


def render_ranges(low: pd.Series, high: pd.Series) -> list[str | None]:
    """Render ranges "low – high", with the decimals that give ``high`` four significant digits; None where one is
    missing.
    """
    return [
        f"{_fixed(a, b, 4)} – {_fixed(b, b, 4)}" if pd.notna(a) and pd.notna(b) else None
        for a, b in zip(low, high, strict=True)
    ]


def render_spreads(mean: pd.Series, std: pd.Series) -> list[str | float | None]:
    """Render "mean ± std", with the decimals that give the standard deviation two significant digits.

    Without a standard deviation the mean stays a number.
    """
    return [
        (f"{_fixed(m, s, 2)} ± {_fixed(s, s, 2)}" if s else f"{render_number(m)} ± 0") if pd.notna(s) else m
        for m, s in zip(mean, std, strict=True)
    ]


def _fixed(value: float, like: float, digits: int) -> str:
    """Write ``value`` with as many decimals as ``like`` has at ``digits`` significant digits."""
    # log10 of 0 or infinity does not exist; from 1e15 on floats have no decimals
    if not math.isfinite(value) or not math.isfinite(like) or not like or abs(value) >= 1e15:
        return render_number(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(like))))
    return f"{value:.{min(decimals, 12)}f}"


def drop_empty(columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the columns that have at least one value."""
    return {name: values for name, values in columns.items() if any(not is_absent(value) for value in values)}


def is_absent(value: Any) -> bool:
    """Return True for None, "", NaN and pandas' NA."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value)) or value is pd.NA
