"""reproduction.json, version 1: what was judged of the results of a package. Its data model, writing and reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from suite.documents import plain, read_json_document
from suite.files import write_whole

REPRODUCTION_VERSION: Final = 1
FILE_NAME = "reproduction.json"
LEVELS = ("log", "data", "numerics", "convergence", "time")  # by number


class Verdict(StrEnum):
    """What is said of a level. ``cannot``: the package lacks what it needs; ``inconclusive``: this attempt does not decide it."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    INCONCLUSIVE = "inconclusive"
    CANNOT = "cannot"


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class Difference(_Part, frozen=True, kw_only=True):
    """One fact that differs. ``kind`` is its place in the order of causes (suite.package.reproduction.causes)."""

    kind: str
    what: str
    was: str
    now: str


class LevelVerdict(_Part, frozen=True, kw_only=True):
    """One level: the verdict, one line why, and the numbers that were compared. ``cause``: named where it is not reproduced."""

    level: Annotated[int, Meta(ge=0, le=4)]
    name: str
    verdict: Verdict
    reason: str
    cause: Difference | None = None
    compared: dict[str, Any] = {}


class ResultVerdict(_Part, frozen=True, kw_only=True):
    """One result of the package: ``result`` is the folder of its logs. ``differences`` are ranked, the likeliest cause first."""

    result: str
    workload: str | None
    size: str | None
    levels: tuple[LevelVerdict, ...]
    differences: tuple[Difference, ...] = ()
    against: Annotated[
        str | None, Meta(description="what the package was compared with: a run folder, or this machine")
    ] = None
    left_out: Annotated[
        tuple[str, ...], Meta(description="settings of the package that were not followed, each with the reason")
    ] = ()


class Reproduction(_Part, frozen=True, kw_only=True):
    """The document. ``reproduced`` is true if every level that was asked for, of every result, was reproduced."""

    version: Literal[1] = REPRODUCTION_VERSION
    package: str
    manifest_sha256: str | None
    made: str
    suite_version: str
    asked: tuple[int, ...]
    reproduced: bool
    results: tuple[ResultVerdict, ...]

    def text(self) -> str:
        """The document as it is written."""
        return json.dumps(plain(self), indent=1) + "\n"


def write_reproduction(folder: Path, document: Reproduction) -> Path:
    """Write ``reproduction.json`` into a folder, whole, and return its path."""
    path = folder / FILE_NAME
    write_whole(path, document.text())
    return path


def read_reproduction(path: Path) -> Reproduction:
    """Read a reproduction.json. InputError names the file, what was expected and what it holds."""
    return read_json_document(path, Reproduction, "a reproduction", REPRODUCTION_VERSION)


def verdict_of(
    level: int,
    verdict: Verdict,
    reason: str,
    cause: Difference | None = None,
    compared: Mapping[str, Any] | None = None,
) -> LevelVerdict:
    """One level's verdict by its number."""
    return LevelVerdict(
        level=level, name=LEVELS[level], verdict=verdict, reason=reason, cause=cause, compared=dict(compared or {})
    )


def all_reproduced(results: tuple[ResultVerdict, ...]) -> bool:
    """True if there is a result, and every level of every one was reproduced."""
    levels = [level for result in results for level in result.levels]
    return bool(levels) and all(level.verdict == Verdict.REPRODUCED for level in levels)
