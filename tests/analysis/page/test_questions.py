"""A director's questions have their places on the page, and at least twenty have an answer: of systems, and of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import unescape
from pathlib import Path

import pytest

from mlhpc.analysis.drawing.view import INTERVAL_WORDS
from mlhpc.analysis.figures import list_views
from mlhpc.analysis.page.issues import check_path
from mlhpc.analysis.page.report import Report, render_report
from mlhpc.analysis.study import read_study
from mlhpc.suite.card import Card

SUMMARY, TILE, VIEW, SECTION, COLUMN, HEAD = "summary", "tile", "view", "section", "column", "head"
QUESTIONS = {  # the question: the part of the page with its answer, and the name of a column, tile, view or section there
    "Who is fastest at what?": (SUMMARY, "fastest"),
    "By how much?": (SUMMARY, "by how much, and is it sure"),
    "Is it sure, or chance?": (VIEW, "standing"),
    "Why is it faster?": (SUMMARY, "why"),
    "How large is each machine, and what does a result cost?": (SUMMARY, "size and cost of both"),
    "What should I take?": (SUMMARY, "what to take"),
    "What if cost counts more than time?": (VIEW, "pareto"),
    "What if the number of nodes counts?": (VIEW, "time_and_units"),
    "What if energy counts?": (VIEW, "energy_front"),
    "What is one number for all that we run?": (SECTION, "index"),
    "Did the machine have other work while it was measured?": (TILE, "Busy machine"),
    "Do the results follow the rules?": (TILE, "Compliance"),
    "Were runs left out?": (TILE, "With a score"),
    "Were the data read from the disk, or from memory?": (TILE, "File cache"),
    "Is that the official score?": (SECTION, "results"),
    "What should I doubt?": (SECTION, "issues"),
    "Where does the time go?": (VIEW, "time_split"),
    "What limits a step?": (VIEW, "extended_roofline"),
    "Does it scale, and what ends it?": (VIEW, "scaling"),
    "How long would it take on another machine?": (VIEW, "what_if"),
    "On what hardware and software was it?": (SECTION, "provenance"),
    "How much better did machines become?": (VIEW, "progress"),
    "How much do runs differ?": (VIEW, "run_to_run"),
    "How many models an hour does a machine train?": (VIEW, "throughput_mode"),
}
NOT_IN_THIS_REPORT = {  # no run here has energy or is one of many at once, and the command had no --index
    "What if energy counts?",
    "What is one number for all that we run?",
    "How many models an hour does a machine train?",
}
QUESTIONS_OF_ONE = {  # of a director who has one result, such as that of the demo
    "What was measured, and when?": (HEAD, "lead"),
    "Is that an official result?": (HEAD, "notice"),
    "How long does it take to the target?": (COLUMN, "score by the rules"),
    "How sure is that time?": (COLUMN, INTERVAL_WORDS),
    "How large was the machine?": (COLUMN, "compute units"),
    "How many hours of the machine does a run take?": (COLUMN, "unit hours"),
    "Did all runs reach the target?": (TILE, "With a score"),
    "Did other programs disturb the runs?": (TILE, "Busy machine"),
    "Do the runs follow the rules?": (TILE, "Compliance"),
    "Were the data read from the disk, or from memory?": (TILE, "File cache"),
    "Was a run continued from a checkpoint?": (TILE, "Resumed"),
    "Where does the time go?": (VIEW, "time_split"),
    "What does a step wait for?": (VIEW, "phases"),
    "How long until a job trains?": (VIEW, "startup"),
    "How many samples a second does it train?": (COLUMN, "training [samples/s]"),
    "How good is it against the ceilings of the machine?": (VIEW, "extended_roofline"),
    "Where does it stand beside the published systems?": (VIEW, "beside_published"),
    "Is a rank slower than the others?": (VIEW, "stragglers"),
    "How many epochs does it take, and is that usual?": (VIEW, "convergence"),
    "Does every run learn?": (VIEW, "learning_curves"),
    "How much do runs differ, and why?": (VIEW, "run_to_run"),
    "What should I doubt?": (SECTION, "issues"),
    "On what hardware and software was it?": (SECTION, "provenance"),
    "How is a number computed?": (SECTION, "formulas"),
}
NOT_OF_ONE = {"How good is it against the ceilings of the machine?"}  # the report got no ceilings


def answers(page: str, questions: Mapping[str, tuple[str, str]] = QUESTIONS) -> dict[str, str]:
    """Each question with its answer on a page; without one, it is not in the result."""

    def row(place: str) -> dict[str, str]:
        """The first row of the first table after a place."""
        part = page.partition(place)[2].partition("</section>")[0]
        heads = [text(head) for head in re.findall(r"<th scope=\"col\".*?>(.*?)</th>", part.partition("</thead>")[0])]
        cells = [text(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", part.partition("<tbody>")[2])]
        return dict(zip(heads, cells, strict=False))

    rows = {SUMMARY: row('aria-label="Summary"'), COLUMN: row('<h2 id="results">')}
    header = page.partition("<header>")[2].partition("</header>")[0]
    told_above = dict(re.findall(r'<p class="(\w+)">(.*?)</p>', header, re.DOTALL))
    told = dict(re.findall(r"<dt>([^<]*)</dt>\s*<dd>(.*?)</dd>", page, re.DOTALL))
    shown = dict(
        re.findall(r'<article class="view[^"]*" id="(\w+)".*?<p class="answer[^"]*">(.*?)</p>', page, re.DOTALL)
    )
    tiles = dict(re.findall(r'<span class="what">(.*?)</span>(.*?)</li>', page, re.DOTALL))
    sections = {
        name: re.split("<h[23] ", page.partition(f' id="{name}"')[2].partition(">")[2])[0]
        for _, name in questions.values()
    }
    found = {}
    for question, (part, name) in questions.items():
        if part in rows:
            found[question] = rows[part].get(name, "")
        elif part == VIEW:
            without = {unescape(key): text(value) for key, value in told.items()}.get(
                list_views()[name].question.text, ""
            )
            found[question] = text(shown[name]) if name in shown else without
        else:
            found[question] = text({TILE: tiles, SECTION: sections, HEAD: told_above}[part].get(name, ""))
    return {question: answer for question, answer in found.items() if answer}


def text(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def test_a_director_finds_the_answers(rich: Report) -> None:
    assert len(QUESTIONS) == 24
    found = answers(rich.html)
    assert set(QUESTIONS) - set(found) == NOT_IN_THIS_REPORT
    assert len(found) >= 20


def test_an_answer_that_is_not_there_is_not_found(rich: Report) -> None:
    assert "What should I take?" not in answers(
        re.sub(r'<section class="summary".*?</section>', "", rich.html, flags=re.DOTALL)
    )
    assert "What limits a step?" not in answers(rich.html.replace('id="extended_roofline"', 'id="another"'))


def test_a_director_with_one_result_finds_the_answers(
    tmp_path: Path, run_folder: Callable[..., Path], cards: dict[str, Card]
) -> None:
    folder = run_folder(tmp_path, "alone")
    report = render_report(read_study([folder], cards), [check_path(folder)])
    assert len(QUESTIONS_OF_ONE) == 24
    found = answers(report.html, QUESTIONS_OF_ONE)
    assert set(QUESTIONS_OF_ONE) - set(found) == NOT_OF_ONE


@pytest.mark.parametrize(("part", "name"), [*QUESTIONS.values(), *QUESTIONS_OF_ONE.values()])
def test_every_question_has_a_place(part: str, name: str) -> None:
    assert part != VIEW or list_views()[name].question
