"""Differentiable exchanges between the ranks that share a sample: all parts of a tensor, and sums.

The loss of a step is the sum of the losses of all ranks, so each backward pass here is the exact transpose of its
forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.mesh import Interval, part_of


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


def gather(x: Tensor, dimensions: Sequence[int], extents: Sequence[int], parts: Sequence[int], axis: Axis) -> Tensor:
    """The whole of a tensor whose ``dimensions`` are split in ``parts``, on all ranks of the axis, which go on alike.

    ``extents`` are those of the whole. The gradients of all ranks are equal then, and each takes its part of their sum.
    """
    result: Tensor = _Gathered.apply(x, tuple(dimensions), tuple(extents), tuple(parts), axis)  # type: ignore[no-untyped-call]
    return result


def _assemble(
    x: Tensor, dimensions: tuple[int, ...], extents: tuple[int, ...], parts: tuple[int, ...], axis: Axis
) -> tuple[Tensor, list[Interval]]:
    """The whole of all ranks' parts, and this rank's positions."""
    boxes = [
        [part_of(n, p, i) for n, p, i in zip(extents, parts, place, strict=True)]
        for place in product(*map(range, parts))
    ]
    shapes = [_boxed(x, dimensions, box) for box in boxes]
    longest = max(torch.Size(shape).numel() for shape in shapes)
    mine = x.new_zeros(longest)
    mine[: x.numel()] = x.reshape(-1)
    whole_shape = list(x.shape)
    for dimension, n in zip(dimensions, extents, strict=True):
        whole_shape[dimension] = n
    whole = x.new_empty(whole_shape)
    for got, shape, box in zip(axis.all_gather(mine), shapes, boxes, strict=True):
        _view(whole, dimensions, box).copy_(got[: torch.Size(shape).numel()].view(shape))
    return whole, boxes[axis.rank]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dimensions: tuple[int, ...], extents: tuple[int, ...], parts: tuple[int, ...], axis: Axis
    ) -> Tensor:
        whole, box = _assemble(x, dimensions, extents, parts, axis)
        ctx.how = dimensions, box, axis.size
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        dimensions, box, size = ctx.how
        return _view(grad, dimensions, box) * size, None, None, None, None


def _boxed(x: Tensor, dimensions: Sequence[int], box: Sequence[Interval]) -> list[int]:
    shape = list(x.shape)
    for dimension, interval in zip(dimensions, box, strict=True):
        shape[dimension] = _length(interval)
    return shape


def _view(x: Tensor, dimensions: Sequence[int], box: Sequence[Interval]) -> Tensor:
    for dimension, (low, high) in zip(dimensions, box, strict=True):
        x = x.narrow(dimension, low, high - low)
    return x


def add_up(x: Tensor, axis: Axis) -> Tensor:
    """The sum of every rank's tensor, on all of them. All ranks of the axis call it."""
    result: Tensor = _Sum.apply(x, axis)  # type: ignore[no-untyped-call]
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.sum(grad), None


def _summed(whole: Tensor, dimension: int, length: int, axis: Axis) -> Tensor:
    """This rank's part of the sum over ranks of a tensor, along a dimension."""
    places = [part_of(length, axis.size, rank) for rank in range(axis.size)]
    rest = whole.numel() // length
    most = max(high - low for low, high in places) * rest
    rows = [whole.narrow(dimension, low, high - low).reshape(-1) for low, high in places]
    mine = axis.scatter_sum(torch.cat([F.pad(row, (0, most - row.numel())) for row in rows]))
    shape = list(whole.shape)
    low, high = places[axis.rank]
    shape[dimension] = high - low
    return mine[: (high - low) * rest].view(shape)


class Whole(torch.autograd.Function):
    """The parts of all ranks of an axis, of which each uses the whole for its own part.

    The gradients of all are summed.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, dimension: int, length: int, axis: Axis) -> Tensor:
        """All-gather."""
        ctx.how = dimension, length, axis
        return _assemble(mine, (dimension,), (length,), (axis.size,), axis)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Reduce-scatter."""
        return _summed(gradient, *ctx.how), None, None, None
