"""Measures the phases of an MoE layer, forward and backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from mlhpc.suite.training.cuda_graphs import after_pass, is_captured
from mlhpc.suite.training.step_timing import Clock

GATE = "gate"
PERMUTE = "permute"
COUNTS = "counts_exchange"
GATHER = "weight_gather"
DISPATCH = "a2a_dispatch"
EXPERTS = "experts"
COMBINE = "a2a_combine"
UNPERMUTE = "unpermute"
FORWARD = (GATE, PERMUTE, COUNTS, GATHER, DISPATCH, EXPERTS, COMBINE, UNPERMUTE)
BACKWARD = tuple(f"{name}_backward" for name in (UNPERMUTE, COMBINE, EXPERTS, DISPATCH, GATHER, PERMUTE, GATE))
PHASES = FORWARD + BACKWARD
COMMUNICATION = (COUNTS, *(name + way for name in (GATHER, DISPATCH, COMBINE) for way in ("", "_backward")))
MAX_MARKS = 200_000  # a timer that nobody reads drops its oldest marks


class Marker(Protocol):
    """Receives the ends of phases from the layer. Phase None: the time since the last mark was outside the layer."""

    def mark(self, phase: str | None) -> None:
        """Count the time since the last mark as spent in ``phase``."""
        ...

    def boundary(self, x: Tensor, before: str | None, after: str | None) -> Tensor:
        """Return ``x``. Phase ``before`` ends here in the forward pass, the backward of ``after`` in the backward pass.

        None begins a measurement.
        """
        ...


class NoMarker:
    """Measures nothing."""

    def mark(self, phase: str | None) -> None:
        """Ignored."""

    def boundary(self, x: Tensor, before: str | None, after: str | None) -> Tensor:
        """Ignored."""
        return x


class LayerTimer:
    """Seconds per phase over all layers that share it, since the last flush.

    Communication counts the time that the layer waited for it, so overlapped transfers do not count.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._stamp = clock, clock.stamp
        self._marks: deque[tuple[str | None, Any]] = deque(maxlen=MAX_MARKS)
        self._ends = {phase: self._end_of(phase and f"{phase}_backward") for phase in (None, *FORWARD)}
        self.complete = True  # False: since the last flush a CUDA graph was replayed, in which nothing can be timed

    def mark(self, phase: str | None) -> None:
        """End ``phase`` here."""
        if not is_captured():
            self._marks.append((phase, self._stamp()))

    def boundary(self, x: Tensor, before: str | None, after: str | None) -> Tensor:
        """Mark now, and again when the gradient of ``x`` is complete. Evaluation is not measured."""
        if not torch.is_grad_enabled():
            return x
        if is_captured():
            after_pass(self._miss)
            return x
        if before in (None, GATE):
            x = x.view_as(x)  # x is used elsewhere too; a view has only the gradient of this use
        self._marks.append((before, self._stamp()))
        if x.requires_grad:
            # a hook costs half of an autograd function
            x.register_hook(self._ends[after])  # type: ignore[no-untyped-call]
        return x

    def flush(self) -> dict[str, float]:
        """Return the seconds of every phase, and reset them."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for (_, begin), (phase, end) in pairwise(self._marks):
            if phase is not None:
                seconds[phase] += self._clock.seconds(begin, end)
        self._marks.clear()
        self.complete = True
        return seconds

    def _miss(self) -> None:
        self.complete = False

    def _end_of(self, phase: str | None) -> Callable[[Tensor], None]:
        return lambda gradient: self._marks.append((phase, self._stamp()))
