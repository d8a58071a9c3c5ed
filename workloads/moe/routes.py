"""Plans which rows go to which rank.

It cuts the buffer into messages, and finds their sizes and the hops of each chunk.

The host needs the sizes of messages. It computes them where they follow from the capacities of the ranks. Otherwise it
reads the exchanged counts once. This is the only place where it waits for the device.

E experts, L experts per rank, J chunks. W ranks = nodes x devices (node-major), N nodes, D devices of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mlhpc.workloads.moe.all_to_all import Hop, Reorder, Route
from mlhpc.workloads.moe.config import Algorithm
from mlhpc.workloads.moe.mesh import DryRunGroup, ExpertMesh, Group


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
