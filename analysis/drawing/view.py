"""Defines the views that a figure of the report is made of. Each answers one question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from mlhpc.analysis.study import Study

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
