"""Reads the questions of the report from the questions.yaml of each package of figures."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

from msgspec import Struct, structs

import analysis.figures as figure_package
from analysis.figures import load_figure_packages
from suite.documents import convert, parse_yaml
from suite.plugins import explain_unusable, print_skipped


class _DocumentPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serves as the base class of the parts of the document."""


class Question(_DocumentPart, frozen=True, kw_only=True):
    """Holds one question.

    ``missing`` says why no figure answers it yet. ``decision`` is the rule for deciding by the answer. ``needs`` says
    in few words what would answer it, for a page where it has no answer.
    """

    id: str
    question: str
    metrics: tuple[str, ...]
    figure: str | None = None
    missing: str | None = None
    decision: str | None = None
    needs: str | None = None


class Goal(_DocumentPart, frozen=True, kw_only=True):
    """Holds a goal, whose goal it is, and the questions that lead to it."""

    goal: str
    viewpoint: str
    questions: tuple[Question, ...]


class _Document(_DocumentPart, frozen=True, kw_only=True):
    version: Literal[1]
    goals: tuple[Goal, ...]


@cache
def read_goals() -> tuple[Goal, ...]:
    """Read every goal, in the order of the page. Questions of other packages under the same goal follow ours."""
    merged: dict[str, Goal] = {}
    for name, package in load_figure_packages().items():
        try:
            text = (files(package) / "questions.yaml").read_text("utf-8")
            document = convert(parse_yaml(text), _Document)
        except Exception as error:
            # A fault in our own file is a defect; one of another package costs only its questions
            if package.__name__ == figure_package.__name__:
                raise
            print_skipped("questions.yaml", name, package.__name__, explain_unusable(error))
            continue
        for goal in document.goals:
            first = merged.setdefault(goal.goal, goal)
            if first is not goal:
                merged[goal.goal] = structs.replace(first, questions=first.questions + goal.questions)
    return tuple(merged.values())


def find_question(figure: str) -> str:
    """Find the question that a figure answers. ValueError if no questions.yaml has one."""
    question = next((q.question for goal in read_goals() for q in goal.questions if q.figure == figure), None)
    if question is None:
        raise ValueError(f"figure {figure!r} answers no question of a questions.yaml")
    return question
