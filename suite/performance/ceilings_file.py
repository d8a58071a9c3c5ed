"""Defines the ceilings file (docs/ceilings.md) and its types: roofs, curves, what was not measured. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins

from mlhpc.suite.documents import Positive
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import write_file_atomically

# Of the file's format; readers refuse other versions.
VERSION = 1

Resource = Literal["compute", "memory", "host_link", "storage_read", "storage_write", "all_reduce", "all_to_all"]
Unit = Literal["FLOP/s", "B/s"]


class Ceiling(Struct, frozen=True, kw_only=True):
    """One measured ceiling, per rank while all ranks are active. docs/ceilings.md explains the fields.

    A file written by hand may leave out those with a default.
    """

    resource: str
    name: str
    mode: str | None = None
    value: Positive
    unit: Literal["FLOP/s", "B/s", "s"]
    slowest: Positive | None = None
    best: Positive | None = None
    n: Annotated[int, Meta(ge=1)]
    spread: Annotated[float, Meta(ge=0)] | None = None
    ranks: int | None = None
    nodes: int | None = None
    library: str | None = None
    dtype: str | None = None
    size_bytes: float | None = None
    shape: tuple[int, ...] | None = None
    capacity_bytes: float | None = None
    system_capacity_bytes: float | None = None

    @property
    def source(self) -> str:
        """Say how it was measured: repetitions, spread, and the library."""
        spread = "" if self.spread is None else f", IQR {100 * self.spread:.2g} %"
        by = f", {self.library}" if self.library else ""
        return f"measured, n={self.n}{spread}{by}"


class Point(Struct, frozen=True):
    """One point of a curve. ``value``: median rate of ``n`` repetitions at ``x``. ``seconds``: median of one call.

    ``error``: the largest relative error of a product, which is exact for the numbers that are multiplied.
    """

    x: Positive
    value: Positive
    n: int | None = None
    spread: float | None = None
    seconds: Positive | None = None
    error: float | None = None


class Curve(Struct, frozen=True, kw_only=True):
    """Rates over ascending sizes, from which roofs were taken. ``x`` is working_set_bytes, message_bytes or order."""

    resource: str
    name: str
    mode: str | None = None
    x: str | None = None
    unit: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    points: tuple[Point, ...]
    dtype: str | None = None


class NotMeasured(Struct, frozen=True):
    """A resource, or one name of it, without a ceiling, and the reason."""

    resource: str
    reason: str
    name: str | None = None


class Device(Struct, frozen=True, kw_only=True):
    """Describes the device of one rank."""

    type: str
    name: str
    threads: int | None = None
    cores_allowed: int | None = None
    memory_bytes: float | None = None


class Ceilings(Struct, frozen=True, kw_only=True):
    """Holds a ceilings file."""

    version: Literal[1]
    kind: Literal["ceilings"]
    system: str
    date: str
    ranks: Annotated[int, Meta(ge=1)]
    nodes: Annotated[int, Meta(ge=1)]
    quick: bool = False
    device: Device
    versions: Mapping[str, Any] = {}
    roofs: tuple[Ceiling, ...]
    curves: tuple[Curve, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()

    @property
    def ranks_per_node(self) -> float:
        """Return the ranks that share a node."""
        return self.ranks / self.nodes

    @property
    def title(self) -> str:
        """Render system, date, ranks, device and torch version in one line."""
        torch = self.versions.get("torch")
        counted = f"{self.ranks} rank{'s' * (self.ranks > 1)} on {self.nodes} node{'s' * (self.nodes > 1)}"
        return f"{self.system}, {self.date[:10]}, {counted}, {self.device.name}" + (f", torch {torch}" if torch else "")

    def of(self, resource: str) -> list[Ceiling]:
        """List the roofs of one resource."""
        return [roof for roof in self.roofs if roof.resource == resource]

    def why_not(self, resource: str) -> str:
        """Say why there is no roof of a resource."""
        return next((n.reason for n in self.not_measured if n.resource == resource), "no ceiling measured")


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
    body = {"version": VERSION, "kind": "ceilings", **header, **to_builtins(findings)}
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
