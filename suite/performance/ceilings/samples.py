"""Repeats a measurement on all ranks at once. Reduces samples to medians, spreads and a ceiling.

Limits the time of measuring. All ranks get the same answer, so that none measures what another skips.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlhpc.suite.performance.ceilings_file import Ceiling, Resource, Unit
from mlhpc.suite.world import World

PROGRESS_INTERVAL_S = 5.0  # a line of progress about this often


class TimeLimit:
    """Seconds from now on, or None for no limit. The caller lists what does not fit in ``not_measured``."""

    def __init__(
        self,
        world: World,
        seconds: float | None,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock, self.begin = clock, clock()
        self.length = math.inf if seconds is None else seconds
        self._world, self._say = world, say
        self._told = self.begin

    def until(self, seconds: float) -> TimeLimit:
        """Return the part of this budget from now to ``seconds`` after its begin, or to its own earlier end."""
        gone = self.clock() - self.begin
        length = max(0.0, min(seconds, self.length) - gone)
        return TimeLimit(self._world, None if math.isinf(length) else length, self._say, self.clock)

    @property
    def ends(self) -> bool:
        """True if the time has an end."""
        return not math.isinf(self.length)

    def left(self) -> float:
        """Return the seconds left, the same on all ranks; at least 0, infinite without an end. All ranks call it."""
        if not self.ends:
            return math.inf
        # The clocks of ranks differ, so the smallest answer counts on all.
        return max(0.0, float(min(self._world.allgather(self.begin + self.length - self.clock()))))

    def allows(self, seconds: float) -> bool:
        """Return True if this many more seconds fit. All ranks call it, with the same number."""
        return self.left() > seconds

    def tell(self, text: str) -> None:
        """Report the progress of a measurement, at most every `PROGRESS_INTERVAL_S`."""
        if self.clock() - self._told >= PROGRESS_INTERVAL_S:
            self._told = self.clock()
            self._say(f"  {text}")


# A measurement that has begun gets this many repetitions, although the time is over. The median of three leaves a
# disturbed one out.
MIN_REPETITIONS = 3


@dataclass(frozen=True)
class Effort:
    """How long and how much to measure.

    ``sample_s`` is the least length of one repetition. Repetitions are many and short. On a shared machine the best one
    is the least disturbed, and memory levels are found on the best. Repetitions of one order of products take about
    ``order_s`` together, but at least three are made. Orders are left out if a product takes longer than ``slowest_s``.

    ``sustained_s`` is the uninterrupted run at the best GEMM size. ``points_per_octave`` is of the memory sweep.
    ``storage_bytes`` is per rank. With ``sets_per_level`` only the kernel that finds the levels measures all sets. Of
    sets that take longer than ``sample_s`` the others measure this many per level. ``seconds`` bounds all steps
    together; None: no bound.
    """

    repetitions: int
    sample_s: float
    order_s: float
    slowest_s: float
    sustained_s: float
    points_per_octave: int
    largest_message_bytes: int
    storage_bytes: int
    sets_per_level: int | None = None
    seconds: float | None = None


# For `--quick`: all resources in under a minute, for a first look or a preflight.
QUICK = Effort(
    repetitions=11,
    sample_s=0.0015,
    order_s=0.15,
    slowest_s=0.1,
    sustained_s=1.0,
    points_per_octave=3,
    largest_message_bytes=16 << 20,
    storage_bytes=64 << 20,
    sets_per_level=3,
    seconds=50.0,
)
FULL = Effort(
    repetitions=31,
    sample_s=0.004,
    order_s=0.5,
    slowest_s=0.5,
    sustained_s=5.0,
    points_per_octave=4,
    largest_message_bytes=128 << 20,
    storage_bytes=1 << 30,
)


@dataclass(frozen=True)
class Samples:
    """The rates of each rank's repetitions, without ranks that took no part."""

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
        """The smallest of the ranks' medians."""
        return float(min(np.median(rates) for rates in self.by_rank))

    @property
    def best(self) -> float:
        """Median over ranks of each rank's best repetition: other load on the machine lowers it least."""
        return float(np.median([max(rates) for rates in self.by_rank]))

    @property
    def spread(self) -> float:
        """Interquartile range over median, the largest of all ranks."""
        # Quartiles, because a single disturbed repetition would decide a standard deviation.
        ranges = [np.subtract(*np.percentile(rates, [75, 25])) / np.median(rates) for rates in self.by_rank]
        return float(max(ranges))

    def roof(self, resource: Resource, name: str, mode: str, unit: Unit, **where: Any) -> Ceiling:
        """Make a ceiling of the rates. ``where``: the fields of `Ceiling` that do not follow from rates."""
        return Ceiling(
            resource=resource,
            name=name,
            mode=mode,
            value=self.value,
            unit=unit,
            slowest=self.slowest,
            best=self.best,
            n=self.n,
            spread=self.spread,
            **where,
        )


def measure_on_all_ranks(
    world: World, rate: Callable[[], float], n: int, *, member: bool = True, budget: TimeLimit | None = None
) -> Samples:
    """Call ``rate`` n times on every member rank; each time all start together. All ranks call it.

    When the time of ``budget`` is over, `MIN_REPETITIONS` repetitions are enough; ``n`` of the result counts them.
    """
    mine = []  # empty on ranks that take no part; they still meet the others at each barrier
    for done in range(n):
        # left() is the same on all ranks, so all stop after the same repetition.
        if budget is not None and done >= MIN_REPETITIONS and not budget.left():
            break
        world.barrier()
        if member:
            mine.append(rate())
    return Samples(tuple(tuple(rates) for rates in world.allgather(mine) if rates))


def gather_maxima(world: World, numbers: Sequence[float]) -> list[float]:
    """Return the largest of each number over ranks. So all ranks choose the same number of calls."""
    return [max(column) for column in zip(*world.allgather(list(numbers)), strict=True)]


def count_calls_for(seconds: float, one_call_s: float) -> int:
    """Return the number of calls that take at least ``seconds``; at least one."""
    # A clock may show 0 s for one short call.
    return max(1, math.ceil(seconds / max(one_call_s, 1e-9)))
