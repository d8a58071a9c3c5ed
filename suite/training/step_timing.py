"""Times the phases of training steps by marks on one time line per rank. The phases sum to the step.

A clock returns stamps and the seconds between two stamps. On a GPU stamps are events in the stream: marking does not
synchronise. Only `PhaseTimer.flush` waits, for the last one.

Marks what a rank is doing, for the watchdog. A mark costs a few assignments and waits for nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from mlhpc.suite.log.reader import Span, merge_spans, remove_holes, sum_lengths
from mlhpc.suite.transport import ObservedTransport, Transport

if TYPE_CHECKING:
    import torch


DATA_WAIT = "data_wait"
FORWARD_BACKWARD = "forward_backward"
EXPOSED_COMMUNICATION = "exposed_communication"
OPTIMIZER = "optimizer"
OTHER = "other"
PHASES = (DATA_WAIT, FORWARD_BACKWARD, EXPOSED_COMMUNICATION, OPTIMIZER, OTHER)
# Part of forward_backward, so it is not one of the phases that sum to the step.
OVERLAPPED_COMMUNICATION = "overlapped_communication"


class Clock(Protocol):
    """Gives stamps on one time line."""

    def stamp(self) -> Any:
        """Return a stamp of the moment when all work issued so far is done."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two stamps. Waits until both have happened."""
        ...


class HostClock:
    """The host's monotonic clock, in seconds. It is right if work is done when calls return."""

    stamp = staticmethod(time.perf_counter)

    def seconds(self, begin: float, end: float) -> float:
        """Return the difference in seconds."""
        return end - begin


class CudaClock:
    """Stamps are events in the current CUDA stream."""

    def stamp(self) -> Any:
        """Record an event and return it."""
        # Here, so that the names of the phases can be imported without torch.
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the elapsed seconds. Waits for ``end``."""
        # elapsed_time raises an error for an event that has not happened, and returns milliseconds.
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def make_device_clock(device: torch.device) -> Clock:
    """Return the clock that times work on this device."""
    return CudaClock() if device.type == "cuda" else HostClock()


class PhaseTimer:
    """Assigns every moment to the phase whose mark ends it. `mark` may be called from autograd's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[tuple[str, Any]] = []
        self._transfers: list[tuple[Any, Any]] = []
        self._lock = threading.Lock()
        self._start = clock.stamp()

    @property
    def last(self) -> Any:
        """The stamp of the last mark, or of the start."""
        return self._marks[-1][1] if self._marks else self._start

    def restart(self) -> None:
        """Discard all marks and start a new time line now, for example after an evaluation."""
        with self._lock:
            self._marks, self._transfers = [], []
            self._start = self._clock.stamp()

    def mark(self, phase: str, stamp: Any = None) -> Any:
        """End ``phase`` now, or at the given earlier stamp. Returns the stamp.

        The time since the last mark counts as this phase.
        """
        stamp = self._clock.stamp() if stamp is None else stamp
        # Without the lock: while autograd's thread marks, the main thread waits in backward().
        self._marks.append((phase, stamp))
        return stamp

    @contextmanager
    def other(self) -> Iterator[None]:
        """Run a body that belongs to no phase."""
        yield
        self.mark(OTHER)

    def stamp(self) -> Any:
        """Return a stamp of this timer's clock, for `transfer`."""
        return self._clock.stamp()

    def transfer(self, begin: Any, end: Any) -> None:
        """Record one collective, from its launch to its end."""
        with self._lock:
            self._transfers.append((begin, end))

    def flush(self) -> dict[str, float]:
        """Return the seconds per phase since the last flush, their sum ``step``, and overlapped communication. Starts
        over.
        """
        with self._lock:
            marks, transfers, start = self._marks, self._transfers, self._start
            self._marks, self._transfers = [], []
        seconds = dict.fromkeys(PHASES, 0.0)
        computing: list[Span] = []
        last, now = start, 0.0
        for phase, stamp in marks:
            elapsed = self._clock.seconds(last, stamp)
            seconds[phase] += elapsed
            if phase == FORWARD_BACKWARD:
                computing.append((now, now + elapsed))
            now += elapsed
            last = stamp
        # Not now: the next window continues where this one's last mark ended, so no time is lost between them.
        self._start = last
        moving = merge_spans((self._clock.seconds(start, b), self._clock.seconds(start, e)) for b, e in transfers)
        alone = remove_holes(computing, moving)
        hidden = sum_lengths(computing) - sum_lengths(alone)
        # Rounding of event times can make the difference slightly negative.
        return seconds | {"step": sum(seconds.values()), OVERLAPPED_COMMUNICATION: max(hidden, 0.0)}


class NoTimer:
    """A timer that measures nothing."""

    last = None

    def restart(self) -> None:
        """Do nothing."""

    def mark(self, phase: str, stamp: Any = None) -> None:
        """Do nothing."""

    def flush(self) -> dict[str, float]:
        """Return no phases."""
        return {}


RETURNED_PREFIX = "after "  # begins the label of what has returned
TRAINING, STAGING = "training", "staging"  # both go on at the same time where staging overlaps


class ProgressMarks:
    """Holds the last mark of this rank: what it was doing, and when.

    ``counts`` has the number of marks for training and for staging. Every rank makes the same marks in the same order,
    so the rank with the lowest count is the one that the others wait for.
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
