"""Published fleets: how often their nodes have incidents, and which checks find what. Every value with its source and its mark."""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from scipy import optimize

from suite.documents import YamlSource

FILE = Path(__file__).with_name("fleets.yaml")
Mark = Literal["read", "quoted", "fitted", "derived", "assumed"]


class _Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class Sourced(_Model, frozen=True, kw_only=True):
    """A number, where it is from and how sure that is (the marks are explained in fleets.yaml)."""

    value: float
    source: str
    mark: Mark


class Start(_Model, frozen=True, kw_only=True):
    """The share of degraded nodes at the start; None: as many as in the long run without checks."""

    value: float | None
    source: str
    mark: Mark


class Measured(_Model, frozen=True, kw_only=True):
    """What was measured of jobs of ``nodes`` nodes: mean ``hours`` to a failure."""

    nodes: int
    hours: float
    source: str


class Fleet(_Model, frozen=True, kw_only=True):
    """A fleet. ``mtbi_h``: mean hours to the first incident of a node, which fall as (1 + incidents)^-``ages``.

    ``shape``: of the Weibull distribution of the time until a node degrades.
    """

    about: str
    mtbi_h: Sourced
    ages: Sourced
    shape: Sourced
    defective: Start
    measured_h: Measured | None = None

    @property
    def is_constant(self) -> bool:
        """Whether the rates depend on nothing: closed forms hold then."""
        return self.ages.value == 0.0 and self.shape.value == 1.0


class Assumed(_Model, frozen=True, kw_only=True):
    """Where a table without numbers of its own is from."""

    source: str
    mark: Mark


class Found(_Model, frozen=True, kw_only=True):
    """Which share of nodes each check found, of the share ``defective`` that any found; they overlap."""

    source: str
    mark: Mark
    defective: float
    shares: dict[str, float]
    minutes: Assumed
    minutes_of: Annotated[dict[str, float], Meta(min_length=1)]

    @property
    def names(self) -> tuple[str, ...]:
        """The checks, in the order of the bits of `draw_defects`."""
        return tuple(self.shares)

    @property
    def all_minutes(self) -> float:
        """Minutes of all checks."""
        return math.fsum(self.minutes_of[name] for name in self.names)

    def chances(self) -> NDArray[np.float64]:
        """Probability (K,) that a check finds a defect, were it independent of others and could all miss it.

        Solved so that of defects that at least one finds, each finds the published share.
        """
        each = np.array(list(self.shares.values())) / self.defective
        any_of = optimize.brentq(lambda u: 1.0 - float(np.prod(1.0 - u * each)) - u, 1e-6, 1.0)
        return np.asarray(each * any_of)


class Published(_Model, frozen=True, kw_only=True):
    """The file of fleets."""

    version: Literal[1]
    fleets: dict[str, Fleet]
    checks: Found


@cache
def published() -> Published:
    """Read what ships."""
    return YamlSource.read(FILE).convert(Published)


@cache
def defect_table() -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Every set of checks that can find a defect, as bits (2^K - 1,), and how likely just these or a former set find a defect."""
    chances = published().checks.chances()
    sets = np.array(list(itertools.product((0, 1), repeat=len(chances))))[
        :, ::-1
    ]  # bit j of number n is column j of row n
    likely = np.where(sets == 1, chances, 1.0 - chances).prod(axis=1)[1:]
    below = np.cumsum(likely / likely.sum())
    below[-1] = 1.0
    return np.arange(1, 2 ** len(chances)), below
