"""Measures the phases of an MoE layer, forward and backward, and counts its load."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from mlhpc.suite.training.graphs import after_pass, is_captured
from mlhpc.suite.training.timing import Clock

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
KEPT_STEPS = 512  # a load that nobody reads adds up its steps


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


class ExpertLoad:
    """What the steps of a window routed: ``assigned_E`` counts the router's choices.

    A step keeps its counts as they are and launches no kernel. They are added up when they are read or numerous; only
    reading waits for the device.
    """

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._sums: Tensor | None = None  # of each expert, and of the rows that were kept
        self._needed: Tensor | None = None
        self.rows = 0

    def add(self, assigned_E: Tensor, kept: Tensor, rows: int) -> None:
        """One step of one layer: ``kept`` rows hold a token, ``rows`` were computed."""
        self._steps.append((assigned_E, kept))
        self.rows += rows
        if len(self._steps) >= KEPT_STEPS:
            self._fold()

    def read(self) -> LoadTotals:
        """Return the totals; waits for the device."""
        self._fold()
        if self._sums is None or self._needed is None:
            return LoadTotals([0.0] * self._experts, 0.0, 0.0, 0.0)
        *assigned, kept = map(float, self._sums.tolist())
        return LoadTotals(assigned, kept, float(self.rows), float(self._needed))

    def _fold(self) -> None:
        if not self._steps:
            return
        counts_SE, kept_S = (torch.stack(list(each)) for each in zip(*self._steps, strict=True))
        needed = (counts_SE.amax(1).double() * self._experts / counts_SE.sum(1).clamp(min=1)).amax()
        sums = torch.cat((counts_SE.sum(0), kept_S.sum()[None]))
        self._sums = sums if self._sums is None else self._sums + sums
        self._needed = needed if self._needed is None else torch.maximum(self._needed, needed)
        self._steps.clear()


@dataclass(frozen=True)
class LoadTotals:
    """Sums over the steps of a window, of one rank or of all. ``needed_factor`` is the largest of a step."""

    assigned_E: list[float]
    kept: float
    rows: float
    needed_factor: float

    def report(self) -> dict[str, Any]:
        """Compute the logged load: ``imbalance`` is max / mean, ``needed_capacity`` the largest of a step."""
        assigned = math.fsum(self.assigned_E)
        mean = assigned / len(self.assigned_E)
        return {
            "tokens_per_expert": [round(value) for value in self.assigned_E],
            "imbalance": max(self.assigned_E) / mean if assigned else 1.0,
            "drop_rate": 1 - self.kept / assigned if assigned else 0.0,
            "needed_capacity": self.needed_factor,
            "padding_waste": 1 - self.kept / self.rows if self.rows else 0.0,
        }
