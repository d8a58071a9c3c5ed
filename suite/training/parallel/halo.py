"""The positions around a rank's part of a tensor: fetched for a layer and given back.

Steps say what a layer's input needs: positions of other ranks, fewer of its own, padding at the border of the sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.mesh import Fetch, Interval


@dataclass(frozen=True)
class Take:
    """Own positions of a dimension and those of other ranks, in order. All ranks of the axis do it."""

    dimension: int
    axis: Axis
    plan: Fetch

    def forward(self, x: Tensor) -> Tensor:
        """Fetch what this rank needs."""
        dimension, axis, plan = self.dimension, self.axis, self.plan
        me = axis.rank
        given = [_piece(x, dimension, plan, me, other) for other in range(axis.size)]
        shapes = [_shape(x, dimension, plan.sent(other, me), other != me) for other in range(axis.size)]
        got = axis.all_to_all(given, shapes)
        own = plan.sent(me, me)
        got[me] = x.narrow(dimension, own[0] - plan.held[me][0], own[1] - own[0])
        return torch.cat([part for part in got if part.shape[dimension]], dimension)

    def backward(self, grad: Tensor) -> Tensor:
        """Give gradients back to where the positions are from, and add up those of the own part."""
        dimension, axis, plan = self.dimension, self.axis, self.plan
        me = axis.rank
        extents = [_length(plan.sent(other, me)) for other in range(axis.size)]
        parts = list(torch.split(grad, extents, dimension))
        own, parts[me] = parts[me], grad.narrow(dimension, 0, 0)
        shapes = [_shape(grad, dimension, plan.sent(me, other), other != me) for other in range(axis.size)]
        got = axis.all_to_all(parts, shapes)
        shape = list(grad.shape)
        shape[dimension] = _length(plan.held[me])
        total = grad.new_zeros(shape)
        got[me] = own
        for other in range(axis.size):
            low, high = plan.sent(me, other)
            if high > low:
                total.narrow(dimension, low - plan.held[me][0], high - low).add_(got[other])
        return total


@dataclass(frozen=True)
class Keep:
    """Some of ``whole`` positions of a dimension."""

    dimension: int
    begin: int
    length: int
    whole: int

    def forward(self, x: Tensor) -> Tensor:
        """Leave the others out."""
        return x.narrow(self.dimension, self.begin, self.length)

    def backward(self, grad: Tensor) -> Tensor:
        """Zeros for the others."""
        after = (grad.dim() - 1 - self.dimension) * (0, 0)
        return F.pad(grad, (*after, self.begin, self.whole - self.begin - self.length))


@dataclass(frozen=True)
class Pad:
    """Positions beyond the sample, as `torch.nn.functional.pad` counts them."""

    pads: tuple[int, ...]
    value: float

    def forward(self, x: Tensor) -> Tensor:
        """Add them."""
        return F.pad(x, self.pads, value=self.value)

    def backward(self, grad: Tensor) -> Tensor:
        """Leave them out."""
        return F.pad(grad, [-each for each in self.pads])


Steps = tuple[Take | Keep | Pad, ...]


def extend(x: Tensor, steps: Steps) -> Tensor:
    """Take all steps; differentiable. All ranks call it that have an exchange in common."""
    result: Tensor = _Extended.apply(x, steps) if steps else x  # type: ignore[no-untyped-call]
    return result


def _forward(x: Tensor, steps: Steps) -> Tensor:
    with torch.no_grad():
        for step in steps:
            x = step.forward(x)
        return x


def _backward(grad: Tensor, steps: Steps) -> Tensor:
    with torch.no_grad():
        for step in reversed(steps):
            grad = step.backward(grad)
        return grad


class _Extended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Steps) -> Tensor:
        ctx.steps = steps
        return _forward(x, steps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _backward(grad, ctx.steps), None


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


def _piece(x: Tensor, dimension: int, plan: Fetch, me: int, other: int) -> Tensor:
    low, high = plan.sent(me, other)
    if other == me or high == low:
        return x.narrow(dimension, 0, 0)
    return x.narrow(dimension, low - plan.held[me][0], high - low)


def _shape(x: Tensor, dimension: int, interval: Interval, wanted: bool) -> list[int]:
    shape = list(x.shape)
    shape[dimension] = _length(interval) if wanted else 0
    return shape
