"""Stop signals of a trial: deferred while it trains, so that it ends between two steps with a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class InterruptedTrialError(Exception):
    """A signal asked the trial to stop while there was nothing to save."""


class StopSignals:
    """Remembers a stop signal while training; before that, or the second time, it interrupts at once."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.deferred = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self.deferred or self.name is not None:
            raise InterruptedTrialError(f"stopped by {name}")
        self.name = name

    def ignore(self) -> None:
        """From here to the end of the process: the launcher may answer the first rank's exit code with a signal to all.

        Python puts its own handlers back to the default while it shuts down, but leaves an ignored signal ignored.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
