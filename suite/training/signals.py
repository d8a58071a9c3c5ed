"""Stop signals of a trial: deferred while it trains, so that it ends between two steps with a checkpoint."""

from __future__ import annotations

import signal
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

SAME_S = 2.0


class InterruptedTrialError(Exception):
    """A signal asked the trial to stop while there was nothing to save."""


class StopSignals:
    """Handle stop signals: during training the first one is remembered; at other times, or the second time, it interrupts.

    A signal that comes within `SAME_S` of the first is the same request: Linux tells mpiexec of its parent's death once for
    each thread that the parent had, and mpiexec passes each on.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._asked_s = 0.0
        self.deferred = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.deferred and self.name is not None and time.monotonic() - self._asked_s < SAME_S:
            return
        if not self.deferred or self.name is not None:
            raise InterruptedTrialError(f"stopped by {name}")
        self.name, self._asked_s = name, time.monotonic()

    def ignore(self) -> None:
        """Ignore stop signals from now to the end of the process.

        The launcher may answer the first rank's exit code with a signal to all ranks. Python restores default handlers while
        it shuts down, but leaves an ignored signal ignored.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
