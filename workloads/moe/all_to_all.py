"""Moves rows between ranks: variable-split all-to-all, linear and two-level, asynchronous forward and backward.

A `Route` says which rows of one chunk go where and in what order they arrive. A `MultiHopTransfer` is one set of rows
in transfer. Beginning and ending a transfer are two autograd nodes. The backward pass walks the graph in reverse. So
transfers that overlap in the forward pass overlap there too.

Row indices are computed on the rows' device. `mlhpc.workloads.moe.routes` plans what goes where.

L experts per rank, J chunks. W ranks = nodes x devices (node-major), N nodes, D devices of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlhpc.workloads.moe.dispatch import add_choices
from mlhpc.workloads.moe.mesh import DryRunGroup, Group, count_ranks

# torch 2.13 renamed these functions and warns about the old names; torch 2.11 has only the old ones. They are looked up
# by name at each call, because the harness counts calls by replacing the functions of torch.distributed
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@dataclass(frozen=True)
class Reorder:
    """A permutation of rows: output row i is input row ``index[i]``; ``inverse`` undoes it."""

    index: Tensor
    inverse: Tensor

    @staticmethod
    def of_blocks(counts: Tensor, order: Sequence[int], total: int) -> Reorder | None:
        """Compute the permutation of blocks of rows to the order in which the dimensions of ``counts`` are permuted.

        ``counts`` (any dimensions) has the rows of each block, ``total`` in all. The indices are on its device.
        None if nothing moves.
        """
        if _same_order(counts.shape, order):
            return None
        moved = counts.permute(*order)
        begins = _compute_offsets(counts)
        ends = _compute_offsets(moved).permute(*(order.index(axis) for axis in range(len(order))))
        index = join_ranges(begins.permute(*order).reshape(-1), moved.reshape(-1), total)
        return Reorder(index, join_ranges(ends.reshape(-1), counts.reshape(-1), total))

    def reversed(self) -> Reorder:
        """Return the permutation that undoes this one."""
        return Reorder(self.inverse, self.index)


@dataclass(frozen=True)
class Hop:
    """One all-to-all: rows are reordered (None: unchanged), then split by ``sent`` among the ranks of a group."""

    group: Group
    before: Reorder | None
    sent: tuple[int, ...]
    received: tuple[int, ...]
    after: Reorder | None = None

    def reversed(self) -> Hop:
        """Return the hop that sends the rows back."""
        return Hop(
            self.group,
            None if self.after is None else self.after.reversed(),
            self.received,
            self.sent,
            None if self.before is None else self.before.reversed(),
        )


@dataclass(frozen=True)
class Route:
    """The hops of one chunk to the experts.

    ``rows_L`` counts the rows that arrive for each local expert. ``host_L`` is the same on the host.
    """

    hops: tuple[Hop, ...]
    rows_L: Tensor
    host_L: Tensor

    @property
    def back(self) -> tuple[Hop, ...]:
        """Return the hops back from the experts."""
        return tuple(hop.reversed() for hop in reversed(self.hops))


class MultiHopTransfer:
    """Rows in transfer along hops. Every rank must begin, advance and end its transfers in the same order."""

    def __init__(self, rows: Tensor, hops: Sequence[Hop]) -> None:
        self._left = list(hops)
        self._rows = rows
        self._transfer: _Transfer | None = None
        self._begin()

    def advance(self) -> None:
        """End the current hop and begin the next one, if there is one."""
        if self._left:
            self._finish_hop()
            self._begin()

    def end(self) -> Tensor:
        """Finish all hops and return the rows."""
        while self._left:
            self.advance()
        self._finish_hop()
        return self._rows

    def _begin(self) -> None:
        hop = self._left.pop(0)
        self._after = hop.after
        rows = reorder(self._rows, hop.before)
        self._transfer = None
        if count_ranks(hop.group) > 1:
            self._transfer = _Transfer(hop)
            rows = _Begin.apply(rows, self._transfer)  # type: ignore[no-untyped-call]
        self._rows = rows

    def _finish_hop(self) -> None:
        rows = self._rows
        if self._transfer is not None:
            rows = _End.apply(rows, self._transfer)  # type: ignore[no-untyped-call]
        self._rows = reorder(rows, self._after)
        self._transfer, self._after = None, None


def reorder(rows: Tensor, order: Reorder | None) -> Tensor:
    """Permute rows. The gradient is a gather by the inverse, not an index_add."""
    return rows if order is None else _Reorder.apply(rows, order)  # type: ignore[no-untyped-call]


def join_ranges(begins_B: Tensor, lengths_B: Tensor, total: int) -> Tensor:
    """Concatenate the integers begin, begin + 1, … of each range; ``total`` is the sum of the lengths."""
    shifts_B = begins_B - (lengths_B.cumsum(0) - lengths_B)
    shifts = shifts_B.repeat_interleave(lengths_B, output_size=total)
    return shifts + torch.arange(total, device=shifts.device)


@dataclass(frozen=True)
class Copies:
    """Rows of a buffer that are sent. Row i of M is buffer row ``source_M[i]``. Buffer row n is sent as the rows
    ``place_NR[n]``.
    """

    source_M: Tensor
    place_NR: Tensor

    def spread(self, rows_ND: Tensor) -> Tensor:
        """Copy the rows that are sent. A row's gradient adds up its copies' gradients, in the order of R."""
        return _Spread.apply(rows_ND, self)  # type: ignore[no-any-return, no-untyped-call]

    def join(self, rows_MD: Tensor) -> Tensor:
        """Add the R rows of each place of the buffer, in the order of R."""
        return _Join.apply(rows_MD, self)  # type: ignore[no-any-return, no-untyped-call]


def gather_slices(local: Tensor, group: Group, experts: int, parts: int, dtype: torch.dtype | None = None) -> Tensor:
    """Gather weights (L, H, …) of a group's ranks to (experts * L, parts * H, …).

    They are sent and returned as ``dtype``.

    The gradient is summed over ranks and scattered, in the type of ``local``. Ranks of the group are ordered by expert:
    ``parts`` consecutive ones hold the slices of the same expert.
    """
    dtype = local.dtype if dtype is None else dtype
    if experts * parts == 1:
        return local.to(dtype)
    gathered = _Gather.apply(local, group, experts * parts, dtype)  # type: ignore[no-untyped-call]
    grid = gathered.view(experts, parts, *local.shape).transpose(1, 2)
    result: Tensor = grid.reshape(experts * local.shape[0], parts * local.shape[1], *local.shape[2:])
    return result


def _compute_offsets(counts: Tensor) -> Tensor:
    """Return the number of rows before each block."""
    flat = counts.reshape(-1)
    return (flat.cumsum(0) - flat).view(counts.shape)


def _same_order(shape: Sequence[int], order: Sequence[int]) -> bool:
    # dimensions of length 1 do not change the order of the rows
    long = [axis for axis in order if shape[axis] > 1]
    return long == sorted(long)


class _Transfer:
    """One all-to-all and its reverse in the backward pass."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop
        self._work: Any = None
        self._out: Tensor | None = None

    def begin(self, rows: Tensor, *, backward: bool = False) -> None:
        """Send without waiting."""
        hop = self._hop.reversed() if backward else self._hop
        self._out = rows.new_empty(sum(hop.received), *rows.shape[1:])
        if isinstance(hop.group, DryRunGroup):
            hop.group("all_to_all", rows.nbytes)
            return
        self._work = dist.all_to_all_single(
            self._out, rows.contiguous(), list(hop.received), list(hop.sent), group=hop.group, async_op=True
        )

    def end(self) -> Tensor:
        """Wait for the transfer and return the rows, keeping no reference."""
        assert self._out is not None
        if self._work is not None:
            self._work.wait()
        out, self._out, self._work = self._out, None, None
        return out


class _Begin(torch.autograd.Function):
    """Begins a transfer. Returns an empty token: the rows have not arrived, and their number may differ."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.begin(rows)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.end(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.end()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.begin(gradient, backward=True)
        return gradient.new_empty(0), None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Reorder) -> Tensor:
        ctx.order = order
        return rows.index_select(0, order.index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.order.inverse), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return rows.index_select(0, copies.source_M)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _add_copies(gradient, ctx.copies), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return _add_copies(rows, copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.copies.source_M), None


def _add_copies(rows_MD: Tensor, copies: Copies) -> Tensor:
    if copies.place_NR.shape[1] == 1:
        return rows_MD.index_select(0, copies.place_NR[:, 0])
    return add_choices(rows_MD, copies.place_NR, None)


class _Gather(torch.autograd.Function):
    """Sends weights in the type they are computed in. Their gradients are added up in the type of the parameters."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Group, size: int, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.size, ctx.dtype = group, size, local.dtype
        local = local.to(dtype).contiguous()
        out = local.new_empty(size * local.shape[0], *local.shape[1:])
        if isinstance(group, DryRunGroup):
            group("all_gather", local.nbytes)
        else:
            getattr(dist, _ALL_GATHER)(out, local, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradient.to(ctx.dtype).contiguous()
        out = gradient.new_empty(gradient.shape[0] // ctx.size, *gradient.shape[1:])
        if isinstance(ctx.group, DryRunGroup):
            ctx.group("reduce_scatter", gradient.nbytes)
        else:
            getattr(dist, _REDUCE_SCATTER)(out, gradient, group=ctx.group)
        return out, None, None, None


class SumOverReplicas(torch.autograd.Function):
    """Passes weights on. Sums their gradients over the ranks that hold the same weights, all in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, twins: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return the weights."""
        ctx.twins = twins
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the gradients."""
        # one message instead of one per weight: small ones cost mostly latency
        total = torch.cat([gradient.reshape(-1) for gradient in gradients])
        if isinstance(ctx.twins, DryRunGroup):
            ctx.twins("all_reduce", total.nbytes)
        else:
            dist.all_reduce(total, group=ctx.twins)
        parts = torch.split(total, [gradient.numel() for gradient in gradients])
        return None, *(part.view(each.shape) for part, each in zip(parts, gradients, strict=True))
