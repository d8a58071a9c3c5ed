"""Plans which rows go to which rank.

It cuts the buffer into messages, and finds their sizes and the hops of each chunk.

The host needs the sizes of messages. It computes them where they follow from the capacities of the ranks. Otherwise it
reads the exchanged counts once. This is the only place where it waits for the device.

E experts, L experts per rank, J chunks. W ranks = nodes x devices (node-major), N nodes, D devices of a node.

Moves rows between ranks: variable-split all-to-all, linear and two-level, asynchronous forward and backward.

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

from mlhpc.workloads.moe.config import Algorithm
from mlhpc.workloads.moe.mesh import DryRunGroup, ExpertMesh, Group, count_ranks
from mlhpc.workloads.moe.router import add_choices

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


@dataclass(frozen=True)
class Counts:
    """Numbers of rows on the host, and on the device of the rows."""

    host: Tensor
    here: Tensor

    @staticmethod
    def known(host: Tensor, device: torch.device) -> Counts:
        """Return the counts from the host, which does not wait."""
        return Counts(host, host.to(device, non_blocking=True))

    def chunk(self, j: int) -> Counts:
        """Return the counts of one chunk, dimension -2."""
        return Counts(self.host[..., j, :], self.here[..., j, :])

    @property
    def total(self) -> int:
        """Return all rows."""
        return int(self.host.sum())


@dataclass(frozen=True)
class Traffic:
    """Rows in all messages of a layer: ``sent`` (W, J, L) by receiver, ``received`` (W, J, L) by sender.

    For 2dh it also holds ``passed`` (D, N, J, L), by destination. These rows each device of this node gives this rank
    in the first hop.
    """

    sent: Counts
    received: Counts
    passed: Counts | None = None


def split_buffer(rows_E: Tensor, ranks: int, sharers: int, r: int, degree: int) -> tuple[Tensor, Tensor]:
    """Cut the buffer into ranges of rows by chunk, receiving rank and local expert. Return begins and counts (J, W, L).

    The s ranks of an expert form r classes of s / r ranks. A class holds 1 / r of the hidden width and receives every
    row once. Its ranks receive equal parts of the rows. Each part is cut into ``degree`` chunks.
    """
    device, parts = rows_E.device, sharers // r
    ends_E = rows_E.cumsum(0)
    rank_W = torch.arange(ranks, device=device)
    each = max(1, len(rows_E) // ranks)
    expert_WL = (rank_W // sharers * each)[:, None] + torch.arange(each, device=device)
    part_W1 = (rank_W % sharers % parts)[:, None]
    rows_WL, first_WL = rows_E[expert_WL], (ends_E - rows_E)[expert_WL]
    cut_J11 = torch.arange(degree + 1, device=device)[:, None, None]
    pieces = parts * degree
    # cut as integers, so that parts and chunks differ by one row at most
    cuts_JWL = (part_W1 * degree + cut_J11) * rows_WL // pieces
    return first_WL + cuts_JWL[:-1], cuts_JWL[1:] - cuts_JWL[:-1]


def gather_counts(mesh: ExpertMesh, counts_JWL: Tensor, algorithm: Algorithm) -> Traffic:
    """Exchange the counts of rows that each rank sends. Every rank calls; the host waits for the device only here."""
    sent_WJL = counts_JWL.transpose(0, 1).contiguous()
    tables = [sent_WJL]
    if algorithm == "linear":
        tables.append(_exchange(sent_WJL, mesh.world))
    else:
        sent_NDJL = sent_WJL.view(mesh.nodes, mesh.devices, *sent_WJL.shape[1:])
        passed_DNJL = _exchange(sent_NDJL.transpose(0, 1), mesh.within_node)  # [source device, destination node]
        received_NDJL = _exchange(passed_DNJL.transpose(0, 1), mesh.across_nodes)  # [source node, source device]
        tables += [received_NDJL.view_as(sent_WJL), passed_DNJL]
    # one copy to the host for all tables
    host = torch.cat([table.view(-1) for table in tables]).cpu()
    parts = torch.split(host, [table.numel() for table in tables])
    return Traffic(*(Counts(part.view_as(table), table) for part, table in zip(parts, tables, strict=True)))


def compute_known_traffic(
    mesh: ExpertMesh,
    capacity_W: Tensor,
    experts: int,
    sharers: int,
    r: int,
    degree: int,
    algorithm: Algorithm,
    device: torch.device,
) -> Traffic:
    """Compute the rows of all messages where every rank has ``capacity_W`` rows (on the host) for each expert.

    What ranks send is what `split_buffer` gives them, without any exchange.
    """
    each, parts = max(1, experts // mesh.size), sharers // r
    pieces = parts * degree

    def between(sources: Tensor, destinations: Tensor) -> Counts:
        """Return the rows from each source to each destination, (..., J, L)."""
        part = destinations % sharers % parts
        cut_J = torch.arange(degree + 1)
        cuts = (part[..., None] * degree + cut_J) * capacity_W[sources][..., None] // pieces
        counts = (cuts[..., 1:] - cuts[..., :-1])[..., None].expand(*cuts.shape[:-1], degree, each)
        return Counts.known(counts.contiguous(), device)

    rank_W = torch.arange(mesh.size)
    me = torch.full_like(rank_W, mesh.rank)
    sent, received = between(me, rank_W), between(rank_W, me)
    if algorithm == "linear":
        return Traffic(sent, received)
    node, here = divmod(mesh.rank, mesh.devices)
    of_node_D1 = node * mesh.devices + torch.arange(mesh.devices)[:, None]
    to_N = torch.arange(mesh.nodes) * mesh.devices + here
    return Traffic(sent, received, between(of_node_D1.expand(-1, mesh.nodes), to_N.expand(mesh.devices, -1)))


def compute_even_traffic(mesh: ExpertMesh, counts_JWL: Tensor, algorithm: Algorithm, *, exchanged: bool) -> Traffic:
    """Compute the rows of all messages of a rehearsal. ``exchanged``: a run would exchange the counts."""
    sent_WJL = counts_JWL.transpose(0, 1).contiguous()
    received_WJL = sent_WJL[mesh.rank].expand_as(sent_WJL).contiguous()
    two_levels = algorithm == "2dh"
    for group in (mesh.within_node, mesh.across_nodes) if two_levels else (mesh.world,):
        assert isinstance(group, DryRunGroup)
        if exchanged:
            group("all_to_all", sent_WJL.nbytes)
    tables = [sent_WJL, received_WJL]
    if two_levels:
        to_N = torch.arange(mesh.nodes) * mesh.devices + mesh.rank % mesh.devices
        tables.append(sent_WJL[to_N].expand(mesh.devices, -1, -1, -1).contiguous())
    return Traffic(*(Counts(table, table) for table in tables))


def plan_routes(mesh: ExpertMesh, traffic: Traffic, algorithm: Algorithm) -> list[Route]:
    """Plan one route per chunk. The host waits for nothing."""
    plan = {"linear": _linear, "2dh": _two_level}[algorithm]
    return [plan(mesh, traffic, j) for j in range(traffic.sent.host.shape[1])]


def _linear(mesh: ExpertMesh, traffic: Traffic, j: int) -> Route:
    sent, received = traffic.sent.chunk(j), traffic.received.chunk(j)
    hop = Hop(mesh.world, None, _splits(sent.host), _splits(received.host), _reorder(received, (1, 0)))
    return Route((hop,), received.here.sum(0), received.host.sum(0))


def _two_level(mesh: ExpertMesh, traffic: Traffic, j: int) -> Route:
    """Send first to the device of this node that has the destination's local rank, then across nodes.

    With m devices per node, there are m times fewer messages across nodes than in the linear form. Each is m times
    larger.
    """
    assert traffic.passed is not None
    sent_WL, passed_DNL, received_WL = traffic.sent.chunk(j), traffic.passed.chunk(j), traffic.received.chunk(j)
    grid = (mesh.nodes, mesh.devices, -1)
    sent_NDL = Counts(sent_WL.host.reshape(grid), sent_WL.here.reshape(grid))
    first = Hop(
        mesh.within_node,
        _reorder(sent_NDL, (1, 0, 2)),
        _splits(sent_NDL.host.transpose(0, 1)),
        _splits(passed_DNL.host),
    )
    second = Hop(
        mesh.across_nodes,
        _reorder(passed_DNL, (1, 0, 2)),
        _splits(passed_DNL.host.transpose(0, 1)),
        _splits(received_WL.host.reshape(grid)),
        _reorder(received_WL, (1, 0)),
    )
    return Route((first, second), received_WL.here.sum(0), received_WL.host.sum(0))


def _reorder(counts: Counts, order: Sequence[int]) -> Reorder | None:
    return Reorder.of_blocks(counts.here, order, counts.total)


def _splits(counts: Tensor) -> tuple[int, ...]:
    """Sum the counts per first index."""
    return tuple(counts.reshape(len(counts), -1).sum(1).tolist())


def _exchange(counts: Tensor, group: Group) -> Tensor:
    """Exchange counts. The first index is the rank of the group: the receiver on entry, the sender on return."""
    counts = counts.contiguous()
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received
