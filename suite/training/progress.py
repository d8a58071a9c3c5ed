"""Marks what a rank is doing, for the watchdog. A mark costs a few assignments and waits for nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mlhpc.suite.transport import ObservedTransport, Transport

RETURNED_PREFIX = "after "  # begins the label of what has returned
TRAINING, STAGING = "training", "staging"  # both go on at the same time where staging overlaps


class ProgressMarks:
    """Holds the last mark of this rank: what it was doing, and when.

    ``counts`` has the number of marks for training and for staging. Every rank makes the same marks in the same order, so
    the rank with the lowest count is the one that the others wait for.
    """

    def __init__(self) -> None:
        self.counts = {TRAINING: 0, STAGING: 0}
        self._label = ""  # of a call; empty: in no call, `label` names the part of the trial
        self._where: tuple[str, int | None] = ("start", None)
        self._last = time.monotonic()

    @property
    def label(self) -> str:
        """What this rank is doing."""
        return self._label or self._place()

    @property
    def silent_s(self) -> float:
        """Seconds since the last mark."""
        return time.monotonic() - self._last

    @property
    def waits(self) -> bool:
        """True in a call or a part of the trial.

        False after a call has returned: the others may no longer need this rank.
        """
        return not self.label.startswith(RETURNED_PREFIX)

    def enter(self, where: str, number: int | None = None) -> None:
        """Mark the beginning of a part of the trial (name, number). Every rank begins the parts in the same order."""
        self._where = where, number
        self._mark("", TRAINING)

    def call(self, what: str, channel: str = TRAINING) -> None:
        """Mark a call that all ranks make in one order."""
        self._mark(f"{what} in {self._place()}", channel)

    def collective(self, kind: str) -> None:
        """Mark a collective of the model. All ranks make them in the same order on the main thread."""
        if threading.current_thread() is threading.main_thread():
            self.call(kind)

    def tick(self) -> None:
        """Mark that work is still going on."""
        self._last = time.monotonic()

    def returned(self) -> None:
        """Mark that the last call has returned."""
        self._label = f"{RETURNED_PREFIX}{self.label.removeprefix(RETURNED_PREFIX)}"
        self._last = time.monotonic()

    def _mark(self, label: str, channel: str) -> None:
        self.counts[channel] += 1
        self._label = label
        self._last = time.monotonic()

    def _place(self) -> str:
        where, number = self._where
        return where if number is None else f"{where} {number}"


def make_marking_transport(
    transport: Transport, progress: ProgressMarks, channel: str = TRAINING, *, counted: bool = True
) -> ObservedTransport:
    """Return a transport that marks its calls. ``counted``: all ranks of the run make them in the same order."""

    @contextmanager
    def mark(name: str, payload: int) -> Iterator[None]:
        if counted:
            progress.call(name, channel)
        else:
            progress.tick()
        yield
        if name != "split":
            progress.returned()

    def mark_part(part: Transport) -> ObservedTransport:
        # Only staging splits, and it may go on beside the training: its marks are counted apart.
        return make_marking_transport(part, progress, STAGING, counted=part.size == transport.size)

    return ObservedTransport(transport, mark, mark_part)
