"""The positions around a rank's part of a tensor: fetched for a layer and given back, before its computing or during
it.

Steps say what a layer's input needs: positions of other ranks, fewer of its own, padding at the border of the sample.
What is computed during the exchange needs none of that: outputs of held positions, and gradients of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from suite.training.parallel.exchange import Axis
from suite.training.parallel.mesh import Fetch, Interval

LEAST_INNER = 0.5  # of a rank's outputs: with fewer that need no other rank, too much is computed twice


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


@dataclass(frozen=True)
class Border:
    """Outputs that need other ranks: positions of the input that `extend` gives, and of the output."""

    inputs: tuple[Interval, ...]
    outputs: tuple[Interval, ...]


@dataclass(frozen=True)
class Beside:
    """How a convolution computes during its exchange: with its own padding, then the borders again from what was
    fetched.
    """

    steps: Steps
    axis: Axis
    padding: tuple[int, ...]
    extents: tuple[int, ...]  # of this rank's output
    borders: tuple[Border, ...]


def convolve(layer: _ConvNd, x: Tensor, weight: Tensor, bias: Tensor | None, how: Beside) -> Tensor:
    """The layer's output for this rank, computed while other ranks' positions are on their way; differentiable.

    The gradient of the input is given back while that of the weights is computed. Under autocast products are in its
    type.
    """
    kind, dtype = x.device.type, x.dtype
    available = dtype != torch.float64 and torch.amp.is_autocast_available(kind)  # autocast leaves float64 alone
    narrow = available and torch.is_autocast_enabled(kind)
    if narrow:
        dtype = torch.get_autocast_dtype(kind)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False) if narrow else nullcontext():
        result: Tensor = _Convolved.apply(x, weight, bias, layer, how, dtype)  # type: ignore[no-untyped-call]
    return result


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _ConvNd, how: Beside, dtype: torch.dtype
    ) -> Tensor:
        fetched = how.axis.beside(lambda: _forward(x, how.steps).to(dtype))
        out = _convolution(x.to(dtype), weight, bias, layer, how.padding)
        for d, extent in enumerate(how.extents, 2):
            if out.shape[d] != extent:
                out = out.narrow(d, 0, extent)
        extended = fetched.result()
        for border in how.borders:
            part = _convolution(_cut(extended, border.inputs), weight, bias, layer, layer.padding)  # type: ignore[arg-type]
            _cut(out, border.outputs).copy_(part)
        ctx.save_for_backward(extended, weight)
        ctx.how = layer, how, x.dtype, None if bias is None else list(bias.shape)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        layer, how, given_dtype, bias_shape = ctx.how
        extended, weight = ctx.saved_tensors

        def gradients(*wanted: bool) -> tuple[Tensor | None, ...]:
            found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
                grad, extended, weight, bias_shape, layer.stride, layer.padding, layer.dilation, False,
                [0] * len(layer.padding), layer.groups, wanted,
            )  # fmt: skip
            return found

        x_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad[:3]
        given = None
        if x_wanted:
            inner = gradients(True, False, False)[0]
            assert inner is not None
            given = how.axis.beside(lambda: _backward(inner.to(given_dtype), how.steps))
        of_weight, of_bias = None, None
        if weight_wanted or bias_wanted:
            _, of_weight, of_bias = gradients(False, weight_wanted, bias_wanted)
        return None if given is None else given.result(), of_weight, of_bias, None, None, None


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, layer: _ConvNd, padding: Sequence[int]) -> Tensor:
    return torch.convolution(
        x, weight, bias, layer.stride, padding, layer.dilation, False, [0] * len(padding), layer.groups
    )


def _cut(x: Tensor, intervals: Sequence[Interval]) -> Tensor:
    for d, (low, high) in enumerate(intervals, 2):
        x = x.narrow(d, low, high - low)
    return x


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
