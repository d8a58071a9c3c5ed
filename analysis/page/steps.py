"""The steps of `mlhpc demo` that failed, as issues of the report: a page says what is not on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from analysis.page.issues import Issue
from analysis.roofline.inputs import kind_of, validated

LONGEST = 300  # characters of a reason


class _Lenient(Struct, frozen=True, kw_only=True):
    """The base class of the parts of the document."""


class Step(_Lenient, frozen=True, kw_only=True):
    """A step, and one line about its failure; "" if it went well."""

    title: str
    command: str
    exit_code: int | None
    reason: str


class Steps(_Lenient, frozen=True, kw_only=True):
    """A file of steps, as the demo writes it."""

    version: Literal[1]
    kind: Literal["steps"]
    steps: tuple[Step, ...]


def is_steps(path: Path) -> bool:
    """True for a JSON file of steps. ValueError for a JSON file that is none."""
    return path.is_file() and path.suffix == ".json" and kind_of(path) == "steps"


def read_failures(paths: Sequence[Path]) -> Iterator[Issue]:
    """An issue for each step that failed or was left out. ValueError, one line, for a file that is damaged."""
    for path in paths:
        for step in validated(path, "steps", Steps).steps:
            if step.reason:
                yield Issue("problem", f"step {step.title!r} ({step.command})", step.reason[:LONGEST])
