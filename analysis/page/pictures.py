"""The figures of the page and the questions they answer. A figure without data states what is missing."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd

from analysis.drawing.digits import count_text
from analysis.page.cells import HtmlTable, html_table
from analysis.page.questions import Question, goals, question_of
from analysis.study import NotAnswerableError, Study
from analysis.tables.workers import mapped
from suite.errors import keep_traceback
from suite.files import one_line

POOL_FROM_RESULTS = 8  # with fewer results one process draws the figures faster than a pool starts
TALLEST_PRINTED = 1.8  # height over width: at two thirds of the paper's width, 11 px text is 6 pt


@dataclass(frozen=True)
class Picture:
    """A figure of the page, or why it is missing. ``defect`` says that drawing it failed, and where the traceback was
    kept.

    ``files`` has the figure in the forms that were asked for ("png": bytes).
    """

    name: str
    title: str
    question: str
    caption: str
    svg: str = ""
    table: HtmlTable | None = None
    missing: str = ""
    answer: str = ""
    defect: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def tall(self) -> bool:
        """True if the figure is too tall to be shrunk to one printed page; it is continued on the next."""
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', self.svg)
        return box is not None and float(box[2]) > TALLEST_PRINTED * float(box[1])


@dataclass(frozen=True)
class Answered:
    """A question of questions.yaml with its answer and the figure behind it, or what is missing; ``needs`` in few
    words.
    """

    question: str
    answer: str
    missing: str
    figure: str
    needs: str = ""

    @property
    def why(self) -> str:
        """``missing`` as a phrase for the page."""
        return self.missing if self.missing.startswith(("no ", "needs ")) else f"missing {self.missing}"


@dataclass(frozen=True)
class AnsweredGoal:
    """A goal and its questions."""

    goal: str
    viewpoint: str
    questions: tuple[Answered, ...]

    @property
    def answered(self) -> list[Answered]:
        """The questions that have an answer."""
        return [question for question in self.questions if not question.missing]


@dataclass(frozen=True)
class Waiting:
    """The questions without an answer, and one line that says what would answer how many of them."""

    questions: tuple[Answered, ...]

    @property
    def line(self) -> str:
        """The needs, those of most questions first."""
        counts = Counter(question.needs for question in self.questions)
        needs = " · ".join(f"{need}{f' ({count})' if count > 1 else ''}" for need, count in counts.most_common())
        return f"{count_text(len(self.questions), 'more question')} would be answered by: {needs}"


def cannot_draw() -> str:
    """Why no figure can be drawn; "" if they can."""
    return (
        "" if importlib.util.find_spec("matplotlib") else "matplotlib is not installed (pip install 'mlhpc[analysis]')"
    )


def draw_pictures(
    study: Study, forms: Sequence[str] = (), tell: Callable[[int, int], None] = lambda done, total: None
) -> tuple[list[Picture], dict[str, pd.DataFrame]]:
    """Draw every figure, and return the numbers of those that have data, by name. No figure where none can be drawn.

    ``forms`` are those of files to make of each (svg, png, pdf). ``tell`` is called with figures done and in total.
    """
    if cannot_draw():
        return [], {}
    from analysis.figures import figures

    names = list(figures())
    many = len(study.results) >= POOL_FROM_RESULTS
    drawn = mapped(partial(_picture, study, forms), names, tell=tell, alone=not many)
    return [picture for picture, _ in drawn], {
        picture.name: numbers for picture, numbers in drawn if numbers is not None
    }


def _picture(study: Study, forms: Sequence[str], name: str) -> tuple[Picture, pd.DataFrame | None]:
    from analysis.drawing.axes import style
    from analysis.drawing.vector import save, svg
    from analysis.figures import figures

    module = figures()[name]
    title, caption = module.TITLE, module.CAPTION
    question = ""
    try:
        question = question_of(name)
        with style():
            figure = module.draw(study)
        numbers, answer = module.table(study), module.answer(study)
        picture = svg(figure, name.replace("_", "-"), title, answer)
        table = html_table(numbers.to_dict("list"), f"{title}: the numbers", of=_results_of(study, numbers))
        files = {form: save(figure, form) for form in forms}
    except NotAnswerableError as missing:
        return Picture(name, title, question, caption, missing=str(missing)), None
    except Exception as error:  # one faulty figure must not cost the reader the other ones
        why = f"{type(error).__name__}: {one_line(error)}"
        defect = f"figure {name!r} failed: {why} ({keep_traceback(_authors(module))})"
        return Picture(
            name, title, question, caption, missing=f"a figure that works: it failed with {why}", defect=defect
        ), None
    return Picture(name, title, question, caption, picture, table, answer=answer, files=files), numbers


def _authors(module: Any) -> str:
    package = module.__name__.partition(".")[0]
    return "" if package == "analysis" else f" to the authors of {package}"


def _results_of(study: Study, numbers: pd.DataFrame) -> list[list[int]]:
    """For each row of a figure's table the places of the results it is about: those of its label, benchmark and size."""
    if "label" not in numbers:
        return []
    keys = [name for name in ("label", "benchmark", "size", "mode") if name in numbers]
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, of in enumerate(zip(*(study.results[name] for name in keys), strict=True)):
        places.setdefault(of, []).append(place)
    return [places.get(row, []) for row in zip(*(numbers[name] for name in keys), strict=True)]


def answer_goals(pictures: Sequence[Picture]) -> list[AnsweredGoal]:
    """Every question of questions.yaml with the answer of its figure, or with what is missing."""
    by_name = {picture.name: picture for picture in pictures}

    def answered(question: Question) -> Answered:
        picture = by_name.get(question.figure or "")
        missing = question.missing or cannot_draw() if picture is None else picture.missing
        figure = picture.name if picture and not picture.missing else ""
        needs = missing if picture is None or picture.defect else question.needs or missing
        return Answered(question.question, picture.answer if picture else "", missing, figure, needs)

    return [AnsweredGoal(goal.goal, goal.viewpoint, tuple(answered(q) for q in goal.questions)) for goal in goals()]


def waiting(goals: Sequence[AnsweredGoal]) -> Waiting:
    """The questions of all goals that have no answer."""
    return Waiting(tuple(question for goal in goals for question in goal.questions if question.missing))
