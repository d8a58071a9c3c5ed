"""Measures the phases of an MoE layer, forward and backward, and counts its load."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from suite.training.timing import Clock

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
        """The time since the last mark was spent in ``phase``."""
        ...

    def boundary(self, x: Tensor, before: str | None, after: str | None) -> Tensor:
        """Return ``x``. Phase ``before`` ends here in the forward pass, the backward of phase ``after`` in the backward pass.

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

    def mark(self, phase: str | None) -> None:
        """End ``phase`` here."""
        self._marks.append((phase, self._stamp()))

    def boundary(self, x: Tensor, before: str | None, after: str | None) -> Tensor:
        """Mark now, and again when the gradient of ``x`` is complete. Evaluation is not measured."""
        if not torch.is_grad_enabled():
            return x
        if before in (None, GATE):
            x = x.view_as(x)  # x is used elsewhere too; a view has only the gradient of this use
        self._marks.append((before, self._stamp()))
        if x.requires_grad:
            x.register_hook(self._ends[after])  # type: ignore[no-untyped-call]  # half the cost of an autograd function, forward and backward
        return x

    def flush(self) -> dict[str, float]:
        """Return the seconds of every phase, and reset them."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for (_, begin), (phase, end) in pairwise(self._marks):
            if phase is not None:
                seconds[phase] += self._clock.seconds(begin, end)
        self._marks.clear()
        return seconds

    def _end_of(self, phase: str | None) -> Callable[[Tensor], None]:
        return lambda gradient: self._marks.append((phase, self._stamp()))


@dataclass
class Load:
    """Sums over the steps of a window, on the device until `report`. ``assigned_E`` counts the router's choices."""

    assigned_E: Tensor
    kept: Tensor
    rows: Tensor
    needed_factor: Tensor
    steps: int = 0

    @staticmethod
    def empty(experts: int, device: torch.device) -> Load:
        """Nothing yet."""
        assigned_E, kept, rows, needed = (
            torch.zeros(n, dtype=torch.float64, device=device) for n in (experts, 1, 1, 1)
        )
        return Load(assigned_E, kept, rows, needed)

    def add(self, assigned_E: Tensor, kept: Tensor, rows: int) -> None:
        """One step of one layer: ``kept`` rows hold a token, ``rows`` were computed."""
        assigned_E = assigned_E.double()
        self.assigned_E += assigned_E
        self.kept += kept
        self.rows += rows
        total = assigned_E.sum().clamp(min=1)
        self.needed_factor = torch.maximum(self.needed_factor, assigned_E.max() * len(assigned_E) / total)
        self.steps += 1

    def report(self) -> dict[str, Any]:
        """Compute tokens_per_expert; imbalance (max / mean); drop_rate; needed_capacity (the largest of a step); padding_waste."""
        assigned, kept, rows = float(self.assigned_E.sum()), float(self.kept), float(self.rows)
        mean = assigned / len(self.assigned_E)
        return {
            "tokens_per_expert": [round(value) for value in self.assigned_E.tolist()],
            "imbalance": float(self.assigned_E.max()) / mean if assigned else 1.0,
            "drop_rate": 1 - kept / assigned if assigned else 0.0,
            "needed_capacity": float(self.needed_factor),
            "padding_waste": 1 - kept / rows if rows else 0.0,
        }
