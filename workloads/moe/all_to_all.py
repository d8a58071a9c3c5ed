"""Moves rows between ranks: variable-split all-to-all, linear and two-level, asynchronous forward and backward.

A `Route` says which rows of one chunk go where and in what order they arrive; a `Journey` is one set of rows in transfer.
Beginning and ending a transfer are two autograd nodes. The backward pass walks the graph in reverse, so transfers that
overlap in the forward pass also overlap in the backward pass.

W ranks = nodes x devices (node-major), L experts per rank, J chunks. Counts are on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from suite.errors import InputError
from workloads.moe.config import Algorithm

# torch 2.13 renamed these functions and warns about the old names; torch 2.11 has only the old ones. Looked up by name at
# each call, because the harness counts calls by replacing the functions of torch.distributed
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@dataclass(frozen=True)
class ExpertMesh:
    """The ranks that share the experts as a grid of nodes and devices, and the process groups of its parts.

    ``blocks`` maps a size to this rank's group of that many consecutive ranks: those that gather slices of an expert.
    """

    rank: int
    nodes: int
    devices: int
    world: dist.ProcessGroup
    within_node: dist.ProcessGroup
    across_nodes: dist.ProcessGroup
    blocks: dict[int, dist.ProcessGroup]

    @property
    def size(self) -> int:
        """Number of ranks in the mesh."""
        return self.nodes * self.devices

    @property
    def has_me(self) -> bool:
        """False on ranks of torch.distributed that are not in the mesh."""
        return self.rank < self.size

    @staticmethod
    def create(
        device_type: str, *, ranks_per_node: int, block_sizes: Sequence[int] = (), ranks: int | None = None
    ) -> ExpertMesh:
        """Create the mesh of the first ``ranks`` ranks of torch.distributed, by default all. Every rank of torch.distributed calls.

        InputError if the nodes are not equally large.
        """
        size, rank = dist.get_world_size() if ranks is None else ranks, dist.get_rank()
        if size % ranks_per_node:
            raise InputError(f"{size} ranks are not a grid of nodes with {ranks_per_node} ranks each")
        shape = (size // ranks_per_node, ranks_per_node)
        mesh = DeviceMesh(device_type, torch.arange(size).view(shape), mesh_dim_names=("node", "device"))
        world: Any = dist.new_group(range(size)) if size < dist.get_world_size() else dist.group.WORLD
        blocks = {1: world, size: world}  # a block of one rank never communicates
        for block_size in sorted(set(block_sizes) - {1, size}):
            groups = [dist.new_group(range(first, first + block_size)) for first in range(0, size, block_size)]
            blocks[block_size] = groups[rank // block_size % len(groups)]
        if rank >= size:
            return ExpertMesh(rank, *shape, world, world, world, blocks)
        return ExpertMesh(rank, *shape, world, mesh.get_group("device"), mesh.get_group("node"), blocks)


@dataclass(frozen=True)
class Reorder:
    """A permutation of rows: output row i is input row ``index[i]``; ``inverse`` undoes it."""

    index: Tensor
    inverse: Tensor

    @staticmethod
    def of_blocks(counts: Tensor, order: Sequence[int]) -> Reorder | None:
        """Compute the permutation of blocks of rows to the order in which the dimensions of ``counts`` are permuted.

        ``counts`` (any dimensions) has the number of rows of each block. None if nothing moves.
        """
        moved = counts.permute(*order)
        if _same_order(counts.shape, order):
            return None
        begins = (counts.reshape(-1).cumsum(0) - counts.reshape(-1)).view(counts.shape).permute(*order)
        index = ranges(begins.reshape(-1), moved.reshape(-1))
        inverse = torch.empty_like(index)
        inverse[index] = torch.arange(len(index))
        return Reorder(index, inverse)

    def reversed(self) -> Reorder:
        """The permutation that undoes this one."""
        return Reorder(self.inverse, self.index)


@dataclass(frozen=True)
class Hop:
    """One all-to-all: rows are reordered (None: unchanged), then split by ``sent`` among the ranks of a group."""

    group: dist.ProcessGroup
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
    """The hops of one chunk to the experts. ``rows_L`` counts the rows that arrive per local expert; they are sorted by expert."""

    hops: tuple[Hop, ...]
    rows_L: Tensor

    @property
    def back(self) -> tuple[Hop, ...]:
        """The hops back from the experts."""
        return tuple(hop.reversed() for hop in reversed(self.hops))


def plan_routes(mesh: ExpertMesh, counts_JWL: Tensor, algorithm: Algorithm, device: torch.device) -> list[Route]:
    """Exchange the counts and plan one route per chunk. Every rank calls; it is the only place where the host waits for the device.

    ``counts_JWL``: rows this rank sends, in that order, on any device; ``device`` is the device of the rows.
    """
    plan = {"linear": _linear, "2dh": _two_level}[algorithm]
    return plan(mesh, counts_JWL.to(device), device)


class Journey:
    """Rows in transfer along hops. Every rank must begin, advance and end its journeys in the same order."""

    def __init__(self, rows: Tensor, hops: Sequence[Hop]) -> None:
        self._left = list(hops)
        self._rows = rows
        self._transfer: _Transfer | None = None
        self._begin()

    def advance(self) -> None:
        """End the current hop and begin the next one, if there is one."""
        if self._left:
            self._land()
            self._begin()

    def end(self) -> Tensor:
        """Finish all hops and return the rows."""
        while self._left:
            self.advance()
        self._land()
        return self._rows

    def _begin(self) -> None:
        hop = self._left.pop(0)
        self._after = hop.after
        rows = reorder(self._rows, hop.before)
        self._transfer = None
        if dist.get_world_size(hop.group) > 1:
            self._transfer = _Transfer(hop)
            rows = _Begin.apply(rows, self._transfer)  # type: ignore[no-untyped-call]
        self._rows = rows

    def _land(self) -> None:
        rows = self._rows if self._transfer is None else _End.apply(self._rows, self._transfer)  # type: ignore[no-untyped-call]
        self._rows = reorder(rows, self._after)
        self._transfer, self._after = None, None


def reorder(rows: Tensor, order: Reorder | None) -> Tensor:
    """Permute rows. The gradient is a gather by the inverse, not an index_add."""
    return rows if order is None else _Reorder.apply(rows, order)  # type: ignore[no-untyped-call]


def ranges(begins_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Concatenate the integers begin, begin + 1, … of each range."""
    shifts_B = begins_B - (lengths_B.cumsum(0) - lengths_B)
    shifts = shifts_B.repeat_interleave(lengths_B)
    return shifts + torch.arange(len(shifts), device=shifts.device)


def gather_slices(local: Tensor, group: dist.ProcessGroup, experts: int, parts: int) -> Tensor:
    """Gather weights (L, H, …) of a group's ranks to (experts * L, parts * H, …). The gradient is summed and scattered.

    Ranks of the group are ordered by expert: ``parts`` consecutive ones hold the slices of the same expert.
    """
    if experts * parts == 1:
        return local
    gathered = _Gather.apply(local, group, experts * parts)  # type: ignore[no-untyped-call]
    grid = gathered.view(experts, parts, *local.shape).transpose(1, 2)
    result: Tensor = grid.reshape(experts * local.shape[0], parts * local.shape[1], *local.shape[2:])
    return result


def _linear(mesh: ExpertMesh, counts_JWL: Tensor, device: torch.device) -> list[Route]:
    sent_WJL = counts_JWL.transpose(0, 1)
    received_WJL = _exchange(sent_WJL, mesh.world)
    sent, received = sent_WJL.cpu(), received_WJL.cpu()
    routes = []
    for j in range(len(counts_JWL)):
        hop = Hop(mesh.world, None, _splits(sent[:, j]), _splits(received[:, j]), _by_expert(received[:, j], device))
        routes.append(Route((hop,), received[:, j].sum(0)))
    return routes


def _two_level(mesh: ExpertMesh, counts_JWL: Tensor, device: torch.device) -> list[Route]:
    """Send first to the device of this node that has the destination's local rank, then across nodes.

    With m devices per node, every message across nodes is m times larger than in the linear form, and there are m times
    fewer.
    """
    chunks, _, experts = counts_JWL.shape
    nodes, devices = mesh.nodes, mesh.devices
    sent_NDJL = counts_JWL.transpose(0, 1).reshape(nodes, devices, chunks, experts)
    mine_DNJL = _exchange(sent_NDJL.transpose(0, 1), mesh.within_node)  # [source device, destination node]
    across_NDJL = _exchange(mine_DNJL.transpose(0, 1), mesh.across_nodes)  # [source node, source device]
    sent, mine, across = sent_NDJL.cpu(), mine_DNJL.cpu(), across_NDJL.cpu()
    routes = []
    for j in range(chunks):
        sent_NDL, mine_DNL, across_NDL = sent[:, :, j], mine[:, :, j], across[:, :, j]
        first = Hop(
            mesh.within_node,
            _to(Reorder.of_blocks(sent_NDL, (1, 0, 2)), device),
            _splits(sent_NDL.transpose(0, 1)),
            _splits(mine_DNL),
        )
        arrived_WL = across_NDL.reshape(mesh.size, experts)
        second = Hop(
            mesh.across_nodes,
            _to(Reorder.of_blocks(mine_DNL, (1, 0, 2)), device),
            _splits(mine_DNL.transpose(0, 1)),
            _splits(across_NDL),
            _by_expert(arrived_WL, device),
        )
        routes.append(Route((first, second), arrived_WL.sum(0)))
    return routes


def _by_expert(received_WL: Tensor, device: torch.device) -> Reorder | None:
    return _to(Reorder.of_blocks(received_WL, (1, 0)), device)


def _to(order: Reorder | None, device: torch.device) -> Reorder | None:
    return None if order is None else Reorder(order.index.to(device), order.inverse.to(device))


def _splits(counts: Tensor) -> tuple[int, ...]:
    """Sum the counts per first index."""
    return tuple(counts.reshape(len(counts), -1).sum(1).tolist())


def _exchange(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange counts. The first index is the rank of the group: the receiver on entry, the sender on return."""
    counts = counts.contiguous()
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received


def _same_order(shape: Sequence[int], order: Sequence[int]) -> bool:
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
        self._work = dist.all_to_all_single(
            self._out, rows.contiguous(), list(hop.received), list(hop.sent), group=hop.group, async_op=True
        )

    def end(self) -> Tensor:
        """Wait for the transfer and return the rows, keeping no reference."""
        assert self._out is not None
        self._work.wait()
        out, self._out, self._work = self._out, None, None
        return out


class _Begin(torch.autograd.Function):
    """Begins a transfer. Returns an empty token, because the rows have not arrived and may differ in number from those sent."""

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


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        out = local.new_empty(size * local.shape[0], *local.shape[1:])
        getattr(dist, _ALL_GATHER)(out, local.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        out = gradient.new_empty(gradient.shape[0] // ctx.size, *gradient.shape[1:])
        getattr(dist, _REDUCE_SCATTER)(out, gradient.contiguous(), group=ctx.group)
        return out, None, None
