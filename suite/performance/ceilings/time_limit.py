"""Limits the time of measuring. All ranks get the same answer, so that none measures what another skips."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

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
