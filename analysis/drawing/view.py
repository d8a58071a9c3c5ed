"""Defines the views that a figure of the report is made of. Each answers one question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from analysis.study import Study

if TYPE_CHECKING:
    import altair as alt


@dataclass(frozen=True)
class View:
    """Holds one question of a figure: a table, the answer in words, and a chart of the table.

    ``table`` and ``answer`` raise NotAnswerableError if the data are missing. ``table`` has units in the names of its
    columns. ``chart`` draws the table and nothing else; it may use ``label``, ``benchmark`` and ``size`` of a row.
    """

    name: str  # of its file of numbers, and of its place on the page
    title: str
    caption: str
    table: Callable[[Study], pd.DataFrame]
    answer: Callable[[Study], str]
    chart: Callable[[pd.DataFrame], alt.TopLevelMixin]
    fewest_rows: int = 1  # of the table: with fewer the answer says it all, and the page has no chart
