"""Exchanges between the ranks of an axis, and differentiable ones of all parts and of sums. Neighbours' positions:
`halo`.

The loss of a step is the sum of the losses of all ranks, so each backward pass here is the exact transpose of its
forward pass. An axis without a process group sends nothing: what it would send is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mlhpc.suite.training.parallel.mesh import Interval, part_of

Note = Callable[[str, str, int, int], None]  # axis, kind of collective, bytes that this rank gives, ranks

# torch 2.13 renamed this function and warns about the old name; torch 2.11 has only the old one. Looked up by name at
# each call, because the harness counts calls by replacing the functions of torch.distributed
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@dataclass(eq=False)
class Axis:
    """Ranks that exchange with each other, and this rank's number among them. Without ``group`` nothing is sent."""

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    note: Note = field(default=lambda *_: None)

    def __deepcopy__(self, memo: object) -> Axis:
        return self  # a copy of a model (moving average) is on the same ranks

    def all_to_all(self, given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Give each rank a tensor and get one of each, of the shapes that are known."""
        flat = torch.cat([each.reshape(-1) for each in given])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        got = flat.new_empty(sum(sizes))
        if self.group is None:
            self.note(self.name, "all_to_all", flat.nbytes, self.size)
        else:
            dist.all_to_all_single(got, flat, sizes, [each.numel() for each in given], group=self.group)
        return [part.view(*shape) for part, shape in zip(torch.split(got, sizes), shapes, strict=True)]

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor; all have one shape."""
        got = [torch.empty_like(mine) for _ in range(self.size)]
        if self.group is None:
            self.note(self.name, "all_gather", mine.nbytes, self.size)
        else:
            dist.all_gather(got, mine, group=self.group)
        return got

    def scatter_sum(self, every: Tensor) -> Tensor:
        """This rank's part of the sum over ranks of a vector, which has a part for each rank."""
        mine = every.new_empty(len(every) // self.size)
        if self.group is None:
            self.note(self.name, "reduce_scatter", every.nbytes, self.size)
        else:
            getattr(dist, _REDUCE_SCATTER)(mine, every, group=self.group)
        return mine

    def sum(self, mine: Tensor) -> Tensor:
        """The sum over ranks, in a new tensor."""
        total = mine.clone(memory_format=torch.contiguous_format)
        if self.group is None:
            self.note(self.name, "all_reduce", mine.nbytes, self.size)
        else:
            dist.all_reduce(total, group=self.group)
        return total


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
