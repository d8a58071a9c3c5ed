"""Defines the ceilings file (docs/ceilings.md) and its types: roofs, curves, what was not measured. Torch-free."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import write_file_atomically

# Of the file's format; readers refuse other versions.
VERSION = 1

Resource = Literal["compute", "memory", "host_link", "storage_read", "storage_write", "all_reduce", "all_to_all"]
Unit = Literal["FLOP/s", "B/s"]


@dataclass(frozen=True)
class Ceiling:
    """One measured ceiling, per rank while all ranks are active. docs/ceilings.md explains the fields."""

    resource: Resource
    name: str
    mode: str
    value: float
    unit: Unit
    slowest: float
    best: float
    n: int
    spread: float
    ranks: int
    nodes: int
    library: str
    dtype: str | None = None
    size_bytes: int | None = None
    shape: tuple[int, int, int] | None = None
    capacity_bytes: int | None = None
    system_capacity_bytes: int | None = None


@dataclass(frozen=True)
class Point:
    """One point of a curve. ``value``: median rate of ``n`` repetitions at ``x``. ``seconds``: median of one call."""

    x: int
    value: float
    n: int
    spread: float
    seconds: float | None = None


@dataclass(frozen=True)
class Curve:
    """Rates over sizes, from which roofs were taken."""

    resource: Resource
    name: str
    mode: str
    x: Literal["working_set_bytes", "message_bytes", "order"]
    unit: Unit
    ranks: int
    nodes: int
    points: tuple[Point, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class NotMeasured:
    """A resource, or one name of it, without a ceiling, and the reason."""

    resource: Resource
    reason: str
    name: str | None = None


@dataclass
class Findings:
    """The results of one or more measuring modules."""

    roofs: list[Ceiling] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    not_measured: list[NotMeasured] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add the results of another module."""
        self.roofs += other.roofs
        self.curves += other.curves
        self.not_measured += other.not_measured


def render_json(header: dict[str, Any], findings: Findings) -> str:
    """Render the text of the file. InputError for a number that is not finite."""
    body = {"version": VERSION, "kind": "ceilings", **header, **asdict(findings)}
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


def refuse_existing(path: Path) -> None:
    """Raise InputError if the file exists or its folder is not writable. Called before minutes of measuring."""
    if path.exists():
        raise InputError(f"{path}: exists already and is not overwritten; choose another file with -o")
    folder = path.parent
    if not folder.is_dir():
        raise InputError(
            f"{path}: its folder {folder} does not exist; create the folder, or choose another file with -o"
        )
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: its folder {folder} is not writable; choose another file with -o")


def write(path: Path, text: str) -> None:
    """Write a new file. InputError if one has appeared there meanwhile."""
    try:
        # Another run may have chosen the same name during the minutes of measuring.
        write_file_atomically(path, text, overwrite=False)
    except FileExistsError:
        raise InputError(f"{path}: exists already and is not overwritten; choose another file with -o") from None
