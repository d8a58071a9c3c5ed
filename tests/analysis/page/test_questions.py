"""A director's questions have their places on the page, and at least twenty have an answer."""

from __future__ import annotations

import re
from html import unescape

import pytest

from analysis.figures import list_views
from analysis.page.report import Report

SUMMARY, TILE, VIEW, SECTION = "summary", "tile", "view", "section"
QUESTIONS = {  # the question: the part of the page with its answer, and the name of a column, tile, view or section there
    "Who is fastest at what?": (SUMMARY, "fastest"),
    "By how much?": (SUMMARY, "by how much, and is it sure"),
    "Is it sure, or luck?": (VIEW, "comparison"),
    "Why is it faster?": (SUMMARY, "why"),
    "How large is each machine, and what does a result cost?": (SUMMARY, "size and cost of both"),
    "What should I take?": (SUMMARY, "what to take"),
    "What if cost counts more than time?": (VIEW, "pareto"),
    "What if the number of nodes counts?": (VIEW, "time_and_units"),
    "What if energy counts?": (VIEW, "energy_front"),
    "What is one number for all that we run?": (SECTION, "index"),
    "Did the machine have other work while it was measured?": (TILE, "Busy machine"),
    "Do the results follow the rules?": (TILE, "Compliance"),
    "Were runs left out?": (TILE, "Scored"),
    "Were the data read from the disk, or from memory?": (TILE, "File cache"),
    "Is that the official score?": (SECTION, "results"),
    "What should I doubt?": (SECTION, "issues"),
    "Where does the time go?": (VIEW, "time_split"),
    "What limits a step?": (VIEW, "extended_roofline"),
    "Does it scale, and what ends it?": (VIEW, "scaling"),
    "How long would it take on another machine?": (VIEW, "what_if"),
    "Where do we stand beside the published systems?": (VIEW, "beside_published"),
    "How much better did machines become?": (VIEW, "progress"),
    "How much do runs differ?": (VIEW, "run_to_run"),
    "How many models an hour does a machine train?": (VIEW, "throughput_mode"),
}
NOT_IN_THIS_REPORT = {  # no run here has energy or is one of many at once, and the command had no --index
    "What if energy counts?",
    "What is one number for all that we run?",
    "How many models an hour does a machine train?",
}


def answers(page: str) -> dict[str, str]:
    """Each question with its answer on a page; without one, it is not in the result."""
    summary = page.partition('<section class="summary"')[2].partition("</section>")[0]
    heads = [text(head) for head in re.findall(r"<th scope=\"col\".*?>(.*?)</th>", summary)]
    cells = [text(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", summary.partition("<tbody>")[2])]
    told = dict(re.findall(r"<dt>([^<]*)</dt>\s*<dd>(.*?)</dd>", page, re.DOTALL))
    tiles = dict(re.findall(r'<span class="what">(.*?)</span>(.*?)</li>', page, re.DOTALL))
    sections = dict(re.findall(r'<h2 id="(\w+)">(.*?)</section>', page, re.DOTALL))
    found = {}
    for question, (part, name) in QUESTIONS.items():
        if part == SUMMARY:
            found[question] = cells[heads.index(name)] if name in heads and cells else ""
        elif part == VIEW:
            found[question] = {unescape(key): text(value) for key, value in told.items()}.get(
                list_views()[name].question.text, ""
            )
        else:
            found[question] = text((tiles if part == TILE else sections).get(name, ""))
    return {question: answer for question, answer in found.items() if answer}


def text(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def test_a_director_finds_the_answers(rich: Report) -> None:
    assert len(QUESTIONS) == 24
    found = answers(rich.html)
    assert set(QUESTIONS) - set(found) == NOT_IN_THIS_REPORT
    assert len(found) >= 20


def test_an_answer_that_is_not_there_is_not_found(rich: Report) -> None:
    assert "Why is it faster?" not in answers(
        re.sub(r'<section class="summary".*?</section>', "", rich.html, flags=re.DOTALL)
    )
    assert "What limits a step?" not in answers(rich.html.replace("<dd>", '<dd class="unanswered">'))


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_has_a_place(question: str) -> None:
    part, name = QUESTIONS[question]
    assert part != VIEW or list_views()[name].question
