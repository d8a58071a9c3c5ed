"""Repeated measurement on all ranks at once: medians, spreads, the slowest rank, and the roof they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from suite.performance.ceilings.document import Resource, Roof, Unit
from suite.world import World


@dataclass(frozen=True)
class Effort:
    """How long to measure. ``sustained_s`` is the uninterrupted run at the best GEMM size.

    ``sample_s`` is the least length of one repetition: many short ones, since the best of them is what finds memory levels
    on a machine that others use too. ``points_per_octave`` of the memory sweep, ``largest_message_bytes`` of the collectives,
    ``storage_bytes`` per rank.
    """

    repetitions: int
    sample_s: float
    sustained_s: float
    points_per_octave: int
    largest_message_bytes: int
    storage_bytes: int


QUICK = Effort(
    repetitions=11,
    sample_s=0.0015,
    sustained_s=1.0,
    points_per_octave=3,
    largest_message_bytes=16 << 20,
    storage_bytes=64 << 20,
)
FULL = Effort(
    repetitions=31,
    sample_s=0.004,
    sustained_s=5.0,
    points_per_octave=4,
    largest_message_bytes=128 << 20,
    storage_bytes=1 << 30,
)


@dataclass(frozen=True)
class Samples:
    """Rates of each rank's repetitions; ranks that took no part have none."""

    by_rank: tuple[tuple[float, ...], ...]

    @property
    def n(self) -> int:
        """Repetitions per rank."""
        return min(len(rates) for rates in self.by_rank)

    @property
    def value(self) -> float:
        """Median over ranks of each rank's median."""
        return float(np.median([np.median(rates) for rates in self.by_rank]))

    @property
    def slowest(self) -> float:
        """The smallest median of a rank."""
        return float(min(np.median(rates) for rates in self.by_rank))

    @property
    def best(self) -> float:
        """Median over ranks of each rank's best repetition: what other load on the machine lowers least."""
        return float(np.median([max(rates) for rates in self.by_rank]))

    @property
    def spread(self) -> float:
        """Interquartile range over median, the largest of all ranks."""
        ranges = [np.subtract(*np.percentile(rates, [75, 25])) / np.median(rates) for rates in self.by_rank]
        return float(max(ranges))

    def roof(self, resource: Resource, name: str, mode: str, unit: Unit, **where: Any) -> Roof:
        """The ceiling that these rates are; ``where`` are the fields of `Roof` that rates do not know."""
        return Roof(
            resource,
            name,
            mode,
            self.value,
            unit,
            slowest=self.slowest,
            best=self.best,
            n=self.n,
            spread=self.spread,
            **where,
        )


def repeat(world: World, rate: Callable[[], float], n: int, *, member: bool = True) -> Samples:
    """Call ``rate`` n times on every member rank, all starting together; a collective of all ranks."""
    mine = []
    for _ in range(n):
        world.barrier()
        if member:
            mine.append(rate())
    return Samples(tuple(tuple(rates) for rates in world.allgather(mine) if rates))


def agree(world: World, numbers: Sequence[float]) -> list[float]:
    """The largest of each number over ranks: so that all make the same number of calls."""
    return [max(column) for column in zip(*world.allgather(list(numbers)), strict=True)]


def calls_for(seconds: float, one_call_s: float) -> int:
    """How many calls fill so many seconds; at least one."""
    return max(1, math.ceil(seconds / max(one_call_s, 1e-9)))
