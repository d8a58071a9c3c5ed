"""Decides, about once a second, what all ranks do before their next step: stop, or save a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mlhpc.suite.training.checkpoint import DUE, CheckpointSaver
from mlhpc.suite.world import World

# A stop signal or a due checkpoint waits at most about this long; each check costs one small sum over all ranks.
CHECK_INTERVAL_S = 1.0
DIVERGED = "divergence"
# If ranks got different signals, the first of these is the stated reason.
SIGNAL_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")


@dataclass(frozen=True)
class StepDecision:
    """The common decision, equal on all ranks.

    ``stop``: why training stops before the next step, or None. ``save``: a checkpoint is due.
    """

    stop: str | None
    save: bool


class StopAgreement:
    """Lets all ranks agree what to do before the next step, by one small sum every ``interval_s`` seconds."""

    def __init__(
        self,
        world: World,
        stop_signal: Callable[[], str | None],
        saver: CheckpointSaver | None = None,
        interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        self._world, self._stop_signal, self._saver, self._interval_s = world, stop_signal, saver, interval_s
        # The first check is at the first step, because no rate of steps is known yet.
        self._countdown = 1
        self._since = time.perf_counter()
        self._steps = 0
        self.diverged = False

    def check(self, *, now: bool = False) -> StepDecision | None:
        """Count one step and return what ranks agreed on, or None if there is nothing to do.

        Every rank calls it before every step. It is a collective at steps that all ranks know, and always with ``now``.
        """
        # Not by this rank's clock: ranks must enter the sum at the same step, and their clocks differ.
        self._steps += not now
        if self._steps < self._countdown and not now:
            return None
        time_s = time.perf_counter()
        mine = self._stop_signal()
        votes = {name: float(name == mine) for name in SIGNAL_NAMES}
        votes |= {DIVERGED: float(self.diverged), "rate": self._steps / (time_s - self._since)}
        if self._saver is not None:
            votes |= self._saver.votes()
        agreed = self._world.sum(votes)
        if not now:
            # From the mean rate of all ranks, so that every rank counts to the same step.
            self._countdown = max(1, round(agreed["rate"] / self._world.size * self._interval_s))
            self._since, self._steps = time_s, 0
        if self._saver is not None:
            self._saver.settle(agreed)
        stop = DIVERGED if agreed[DIVERGED] else next((name for name in SIGNAL_NAMES if agreed[name]), None)
        save = self._saver is not None and agreed[DUE] > 0
        return StepDecision(stop, save) if stop or save else None
