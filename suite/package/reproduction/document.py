"""Writes, reads and renders reproduction.json, version 1: the verdicts on the results of a package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from mlhpc.suite.documents import convert_to_plain_data, read_json_document
from mlhpc.suite.files import write_file_atomically

REPRODUCTION_VERSION: Final = 1
FILE_NAME = "reproduction.json"
_LISTED = 12  # differences of a result in the table
LEVELS = ("log", "data", "numerics", "convergence", "time")  # by number


class LevelOutcome(StrEnum):
    """The outcome of a level. ``cannot``: the package lacks something. ``inconclusive``: this attempt cannot tell."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    INCONCLUSIVE = "inconclusive"
    CANNOT = "cannot"


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class Difference(_Part, frozen=True, kw_only=True):
    """One fact that differs. ``kind`` is its place in the order of causes (mlhpc.suite.package.reproduction.causes)."""

    kind: str
    what: str
    was: str
    now: str


class LevelVerdict(_Part, frozen=True, kw_only=True):
    """One level: the outcome, one line why, the numbers compared, and the likeliest cause of a difference."""

    level: Annotated[int, Meta(ge=0, le=4)]
    name: str
    verdict: LevelOutcome
    reason: str
    cause: Difference | None = None
    compared: dict[str, Any] = {}


class ResultVerdict(_Part, frozen=True, kw_only=True):
    """One result of the package. ``result`` is the folder of its logs. The likeliest cause comes first."""

    result: str
    workload: str | None
    size: str | None
    levels: tuple[LevelVerdict, ...]
    differences: tuple[Difference, ...] = ()
    against: Annotated[
        str | None, Meta(description="what the package was compared with: a run folder, or this machine")
    ] = None
    settings: Annotated[
        tuple[str, ...], Meta(description="settings in which the compared run differs from the package's")
    ] = ()
    left_out: Annotated[
        tuple[str, ...], Meta(description="settings of the package that were not followed, each with the reason")
    ] = ()


class Reproduction(_Part, frozen=True, kw_only=True):
    """The document. ``reproduced`` is true if every requested level of every result was reproduced.

    No run with other settings reproduces a result.
    """

    version: Literal[1] = REPRODUCTION_VERSION
    package: str
    manifest_sha256: str | None
    made: str
    suite_version: str
    asked: tuple[int, ...]
    reproduced: bool
    results: tuple[ResultVerdict, ...]

    def text(self) -> str:
        """Render the document as JSON."""
        return json.dumps(convert_to_plain_data(self), indent=1) + "\n"


def write_reproduction(folder: Path, document: Reproduction) -> Path:
    """Write ``reproduction.json`` into a folder, whole, and return its path."""
    path = folder / FILE_NAME
    write_file_atomically(path, document.text())
    return path


def read_reproduction(path: Path) -> Reproduction:
    """Read a reproduction.json. InputError names the file, what was expected and what it holds."""
    return read_json_document(path, Reproduction, "a reproduction", REPRODUCTION_VERSION)


def make_level_verdict(
    level: int,
    verdict: LevelOutcome,
    reason: str,
    cause: Difference | None = None,
    compared: Mapping[str, Any] | None = None,
) -> LevelVerdict:
    """Make the verdict of a level by its number."""
    return LevelVerdict(
        level=level, name=LEVELS[level], verdict=verdict, reason=reason, cause=cause, compared=dict(compared or {})
    )


def is_reproduced(results: tuple[ResultVerdict, ...]) -> bool:
    """Return True if runs with the package's settings reproduced all levels of all results. False without results."""
    levels = [level for result in results for level in result.levels]
    settings = any(result.settings for result in results)
    return bool(levels) and not settings and all(level.verdict == LevelOutcome.REPRODUCED for level in levels)


def render_table(document: Reproduction) -> str:
    """Render all results for a terminal, each with a line for each level."""
    return "\n".join(line for result in document.results for line in _render_result(result))


def _render_result(result: ResultVerdict) -> Iterator[str]:
    yield f"{result.result}: {result.workload or 'unknown workload'} {result.size or ''}".rstrip()
    for level in result.levels:
        yield f"  {level.level} {level.name:<12} {level.verdict:<15} {level.reason}"
        if level.cause is not None and level.verdict == LevelOutcome.NOT_REPRODUCED:
            yield f"    first cause: {_render_difference(level.cause)}"
    if result.differences:
        yield f"  what differs from {result.against or 'the package'}, the likeliest cause first:"
        yield from (f"    {_render_difference(each)}" for each in result.differences[:_LISTED])
        if len(result.differences) > _LISTED:
            yield f"    and {len(result.differences) - _LISTED} more"
    if result.settings:
        yield f"  not reproduced with the package's settings, {len(result.settings)} of which differ"
    yield from (f"  not followed: {text}" for text in result.left_out)


def _render_difference(each: Difference) -> str:
    return f"{each.kind}: {each.what}: {each.was} in the package, {each.now} here"
