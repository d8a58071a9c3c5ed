"""Differentiable exchanges between the ranks that share a sample: neighbours' positions, all parts, sums.

The loss of a step is the sum of the losses of all ranks, so each backward pass here is the exact transpose of its forward pass.
An axis without a process group sends nothing: what it would send is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from suite.training.parallel.mesh import Fetch, Interval, part_of

Note = Callable[[str, str, int, int], None]  # axis, kind of collective, bytes that this rank gives, ranks

# torch 2.13 renamed these functions and warns about the old names; torch 2.11 has only the old ones. Looked up by name at
# each call, because the harness counts calls by replacing the functions of torch.distributed
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@dataclass(eq=False)
class Axis:
    """Ranks that exchange with each other, and this rank's number among them. Without ``group`` nothing is sent."""

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    note: Note = field(default=lambda *_: None)

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

    def gather_flat(self, mine: Tensor) -> Tensor:
        """Every rank's vector, one after another; all have one length."""
        every = mine.new_empty(self.size * len(mine))
        if self.group is None:
            self.note(self.name, "all_gather", mine.nbytes, self.size)
        else:
            getattr(dist, _ALL_GATHER)(every, mine, group=self.group)
        return every

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


def fetch(x: Tensor, dimension: int, axis: Axis, plan: Fetch) -> Tensor:
    """The positions of a dimension that this rank needs, from the ranks that hold them. All ranks of the axis call it."""
    result: Tensor = _Fetched.apply(x, dimension, axis, plan)  # type: ignore[no-untyped-call]
    return result


class _Fetched(torch.autograd.Function):
    """Own positions and those of other ranks, in order. The backward pass gives the gradients back and adds them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dimension: int, axis: Axis, plan: Fetch) -> Tensor:
        ctx.how = dimension, axis, plan, x.shape
        given = [_piece(x, dimension, plan, axis.rank, other, axis.rank) for other in range(axis.size)]
        shapes = [_shape(x, dimension, plan.sent(other, axis.rank), other != axis.rank) for other in range(axis.size)]
        got = axis.all_to_all(given, shapes)
        own = plan.sent(axis.rank, axis.rank)
        got[axis.rank] = x.narrow(dimension, own[0] - plan.held[axis.rank][0], own[1] - own[0])
        return torch.cat([part for part in got if part.shape[dimension]], dimension)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        dimension, axis, plan, shape = ctx.how
        me = axis.rank
        extents = [_length(plan.sent(other, me)) for other in range(axis.size)]
        parts = list(torch.split(grad, extents, dimension))
        own, parts[me] = parts[me], grad.narrow(dimension, 0, 0)
        shapes = [_shape(grad, dimension, plan.sent(me, other), other != me) for other in range(axis.size)]
        got = axis.all_to_all(parts, shapes)
        total = grad.new_zeros(shape)
        got[me] = own
        for other in range(axis.size):
            low, high = plan.sent(me, other)
            if high > low:
                total.narrow(dimension, low - plan.held[me][0], high - low).add_(got[other])
        return total, None, None, None


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


def _piece(x: Tensor, dimension: int, plan: Fetch, me: int, other: int, skipped: int) -> Tensor:
    low, high = plan.sent(me, other)
    if other == skipped or high == low:
        return x.narrow(dimension, 0, 0)
    return x.narrow(dimension, low - plan.held[me][0], high - low)


def _shape(x: Tensor, dimension: int, interval: Interval, wanted: bool) -> list[int]:
    shape = list(x.shape)
    shape[dimension] = _length(interval) if wanted else 0
    return shape


def gather(x: Tensor, dimensions: Sequence[int], extents: Sequence[int], parts: Sequence[int], axis: Axis) -> Tensor:
    """The whole of a tensor whose ``dimensions`` are split in ``parts``, on all ranks of the axis, which go on alike.

    ``extents`` are those of the whole. The gradients of all ranks are equal then, and each takes its part of their sum.
    """
    result: Tensor = _Gathered.apply(x, tuple(dimensions), tuple(extents), tuple(parts), axis)  # type: ignore[no-untyped-call]
    return result


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dimensions: tuple[int, ...], extents: tuple[int, ...], parts: tuple[int, ...], axis: Axis
    ) -> Tensor:
        boxes = [
            [part_of(n, p, i) for n, p, i in zip(extents, parts, place, strict=True)]
            for place in product(*map(range, parts))
        ]
        ctx.how = dimensions, boxes[axis.rank], axis.size
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
