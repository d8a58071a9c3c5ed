"""The questions of the report, read from questions.yaml: goals, questions, metrics, and the figure that answers each."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Question(_Frozen):
    """One question. ``missing`` says why no figure answers it yet; ``decision`` is the rule for deciding on the answer."""

    id: str
    question: str
    metrics: tuple[str, ...]
    figure: str | None = None
    missing: str | None = None
    decision: str | None = None


class Goal(_Frozen):
    """A goal, whose goal it is, and the questions that lead to it."""

    goal: str
    viewpoint: str
    questions: tuple[Question, ...]


class _Document(_Frozen):
    version: Literal[1]
    goals: tuple[Goal, ...]


@cache
def goals() -> tuple[Goal, ...]:
    """Every goal, in the order of the page."""
    text = (files("analysis.page") / "questions.yaml").read_text("utf-8")
    return _Document.model_validate(yaml.safe_load(text)).goals


def question_of(figure: str) -> str:
    """The question that a figure answers. Raises ValueError if questions.yaml has none."""
    question = next((q.question for goal in goals() for q in goal.questions if q.figure == figure), None)
    if question is None:
        raise ValueError(f"figure {figure!r} answers no question of questions.yaml")
    return question
