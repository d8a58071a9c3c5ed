"""Counts sentences that are too long and words that are read twice, in docs, help texts and docstrings.

A count above its allowance fails and prints the places. To lower an allowance: mend what the failure prints (set the
allowance to 0 to see it all), then write the new count below. An allowance never rises: write a shorter sentence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from mlhpc.suite.cli.main import group

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 35  # words of a sentence
REFUSED = (  # each made a sentence hard to read at first sight
    *("so many", "of which", "of these", "of those", "told", "what is said", "beside", "such as it", "those that"),
    *("that which", "what lives", "in vain", "as nearly always", "the one that holds", "is none of", "whoever"),
)
# Of each area, as on 27 November 2026: sentences of more than `LONGEST` words, and refused words.
ALLOWED = {
    "docs": (0, 0),
    "README.md": (0, 0),
    "help": (0, 3),
    "suite": (1, 25),
    "workloads": (0, 0),
    "analysis": (0, 0),
}


def sentences(text: str) -> list[str]:
    """Split Markdown or a docstring into sentences. Code, tables, headings and pictures are left out."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\||    |#|!\[|<)", line)]
    plain = re.sub(r"`[^`]*`", "X", " ".join(lines))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    return [found for found in re.split(r"(?<=[.!?])\s+", plain) if len(found.split()) > 2]


def texts(area: str) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of everything that people read in an area."""
    if area == "docs":
        yield from ((str(page.relative_to(ROOT)), page.read_text("utf-8")) for page in (ROOT / "docs").glob("*.md"))
    elif area == "README.md":
        yield area, (ROOT / area).read_text("utf-8")
    elif area == "help":
        yield from help_texts("mlhpc", group)
    else:
        for path in sorted((ROOT / area).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                    yield place, ast.get_docstring(node) or ""


def help_texts(name: str, command: click.Command) -> Iterator[tuple[str, str]]:
    """Yield the help of a command, of its options and of its subcommands."""
    yield name, command.help or ""
    for option in command.params:
        yield f"{name} {option.opts[0]}", getattr(option, "help", None) or ""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            found = command.get_command(context, word)
            assert found is not None
            yield from help_texts(f"{name} {word}", found)


@cache
def found_in(area: str) -> tuple[list[str], list[str]]:
    """List the sentences of an area that are too long, the longest first, and its refused words."""
    written = [(place, sentence) for place, text in texts(area) for sentence in sentences(text)]
    counted = sorted(((len(sentence.split()), place, sentence) for place, sentence in written), reverse=True)
    long = [f"{words} words, {place}: {sentence[:150]}" for words, place, sentence in counted if words > LONGEST]
    refused = [
        f"{word!r}, {place}: {sentence[:150]}"
        for place, sentence in written
        for word in REFUSED
        if re.search(rf"\b{word}\b", sentence, re.IGNORECASE)
    ]
    return long, refused


@pytest.mark.parametrize("area", ALLOWED)
def test_no_area_gets_longer_sentences(area: str) -> None:
    long, _ = found_in(area)
    assert len(long) <= ALLOWED[area][0], "\n".join([f"{len(long)} long sentences", *long[:20]])


@pytest.mark.parametrize("area", ALLOWED)
def test_no_area_gets_more_words_that_are_read_twice(area: str) -> None:
    _, refused = found_in(area)
    assert len(refused) <= ALLOWED[area][1], "\n".join([f"{len(refused)} refused words", *refused[:20]])


def test_the_help_of_every_option_is_read() -> None:
    places = {place for place, text in texts("help") if text}
    assert {"mlhpc", "mlhpc check --ruleset", "mlhpc data generate"} <= places
    assert len(places) > 200


def test_sentences_are_those_of_the_prose() -> None:
    page = "# One two three four\n\nWrite `a b c` in [a short line](x.md). Then stop here!\n\n| a b | c d |\n\n    mlhpc run x y\n"
    assert [sentence.strip() for sentence in sentences(page)] == ["Write X in a short line.", "Then stop here!"]
