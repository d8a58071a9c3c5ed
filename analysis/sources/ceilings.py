"""Defines ceilings and counters files, and finds those of the systems of a report. Formats: docs/ceilings.md.

A file belongs to a result if its system id is one of the names of the result's system. If the files name one system
only, it is used for every result, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlhpc.suite.documents import NotNegative, Positive
from mlhpc.suite.performance.tune.result import TuneResult


class MeasuredRoof(Struct, frozen=True, kw_only=True):
    """Holds one roof of a file: FLOP/s or bytes/s of one rank while all ranks are active."""

    resource: str
    name: str
    mode: str | None = None
    dtype: str | None = None
    value: Positive
    unit: Literal["FLOP/s", "B/s", "s"]
    n: Annotated[int, Meta(ge=1)]
    spread: Annotated[float, Meta(ge=0)] | None = None
    size_bytes: float | None = None
    shape: tuple[int, ...] | None = None
    capacity_bytes: float | None = None
    ranks: int | None = None
    nodes: int | None = None
    library: str | None = None

    @property
    def source(self) -> str:
        """Say how it was measured: repetitions, spread, and the library."""
        spread = "" if self.spread is None else f", IQR {100 * self.spread:.2g} %"
        by = f", {self.library}" if self.library else ""
        return f"measured, n={self.n}{spread}{by}"


class CurvePoint(Struct, frozen=True, kw_only=True):
    """Holds one size of a curve. ``seconds`` is the time of one call."""

    x: Positive
    value: Positive
    seconds: Positive | None = None


class Curve(Struct, frozen=True, kw_only=True):
    """Holds measured values over ascending sizes."""

    resource: str
    name: str
    mode: str | None = None
    dtype: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    points: tuple[CurvePoint, ...]


class Device(Struct, frozen=True, kw_only=True):
    """Describes the device of one rank."""

    type: str
    name: str
    threads: int | None = None
    cores_allowed: int | None = None
    memory_bytes: float | None = None


class NotMeasured(Struct, frozen=True, kw_only=True):
    """Names a resource without a roof, and says why."""

    resource: str
    reason: str


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
    roofs: tuple[MeasuredRoof, ...]
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

    def of(self, resource: str) -> list[MeasuredRoof]:
        """List the roofs of one resource."""
        return [roof for roof in self.roofs if roof.resource == resource]

    def why_not(self, resource: str) -> str:
        """Say why there is no roof of a resource."""
        return next((n.reason for n in self.not_measured if n.resource == resource), "no ceiling measured")


class Kernel(Struct, frozen=True, kw_only=True):
    """Holds all launches of one kernel in the counted steps.

    ``bytes`` is by memory level, named as in the ceilings file.
    """

    name: str
    count: Annotated[float, Meta(ge=0)]
    seconds: Positive
    flops: NotNegative
    bytes: Mapping[str, NotNegative]


class Counters(Struct, frozen=True, kw_only=True):
    """Holds a counters file: hardware counters of one rank over ``steps`` training steps of a workload."""

    version: Literal[1]
    kind: Literal["counters"]
    system: str
    benchmark: str
    size: str
    tool: str
    steps: Annotated[float, Meta(gt=0)]
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Inputs:
    """Holds the files of a report that are not logs. ``what_if`` are the ceilings of machines to predict for.

    ``searches`` are those of `mlhpc tune`.
    """

    ceilings: tuple[Ceilings, ...] = ()
    what_if: tuple[Ceilings, ...] = ()
    counters: tuple[Counters, ...] = ()
    searches: tuple[TuneResult, ...] = ()

    def of_system(self, names: Iterable[str], ranks: float, nodes: float) -> tuple[Ceilings, str] | str:
        """Find the ceilings file of a system that has these names, with a remark for the reader.

        Text says why there is none. Of several files of one system, the one with the nearest number of ranks on a node
        is used.
        """
        # A run names its system by its platform, its system file or its folder, in any spelling
        known = {name.casefold() for name in names if name}
        systems = sorted({file.system for file in self.ceilings})
        matching = [system for system in systems if system.casefold() in known]
        # Two machines under one name: a guess would judge the run by the wrong one
        if len(matching) > 1:
            return f"ceilings of several systems go by this system's names: {', '.join(matching)}"
        remark = ""
        if not matching:
            if len(systems) != 1:
                return f"no ceilings of this system; there are those of {', '.join(systems)}" if systems else NONE_GIVEN
            # One machine and files of one system: most likely the same one, but the reader must know
            remark = f"The ceilings are those of {systems[0]!r}, the only ones given: no system here has that name"
            matching = systems
        files = [file for file in self.ceilings if file.system == matching[0]]
        per_node = ranks / nodes
        # By ratio of ranks per node, because they share the node's bandwidth; then ranks, then the oldest file
        best = min(files, key=lambda f: (abs(math.log(f.ranks_per_node / per_node)), abs(f.ranks - ranks), f.date))
        return best, remark


NONE_GIVEN = (
    "no ceilings given: `mlhpc ceilings -o ceilings.json` measures them, and the file goes among the report's paths"
)
