"""The ranks that share the experts: grid of nodes and devices, process groups, copies of the mesh. Moves no rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.exchange import Note

# torch 2.13 renamed this function and warns about the old name; torch 2.11 has only the old one. It is looked up by
# name at each call, because the harness counts calls by replacing the functions of torch.distributed
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
# NCCL (2.26 and later) then runs the kernels of a process's communicators in the order of their launches
_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


@dataclass(frozen=True)
class DryRunGroup:
    """A group whose ranks send nothing: what each would give is noted, in a rehearsal on tensors without memory."""

    axis: str
    size: int
    note: Note

    def __call__(self, kind: str, given: int) -> None:
        """Note a collective and the bytes that this rank would give."""
        self.note(self.axis, kind, given, self.size)


Group = dist.ProcessGroup | DryRunGroup


@dataclass(frozen=True)
class ExpertMesh:
    """The ranks that share the experts, as a grid of nodes and devices, with the process groups of its parts.

    The groups are the experts' own, so that their all-to-alls do not queue behind DDP's all-reduces. ``blocks`` maps a
    size to this rank's group of that many consecutive ranks, which gather slices of an expert. ``even``: all ranks have
    equally many tokens in every training step, so that they need not ask each other.

    A run may have ``copies`` such meshes with the same experts; this is number ``copy``. ``twins`` are the ranks with
    the same experts in each copy; None: one copy. Where ranks share samples, each copy is several parallel meshes whose
    parts of the experts differ. ``everyone``: the ranks of all meshes; None: one mesh.
    """

    rank: int
    nodes: int
    devices: int
    world: Group
    within_node: Group
    across_nodes: Group
    blocks: dict[int, Group]
    even: bool = False
    copy: int = 0
    copies: int = 1
    twins: Group | None = None
    everyone: Group | None = None

    @property
    def size(self) -> int:
        """Number of ranks in the mesh."""
        return self.nodes * self.devices

    @property
    def is_rehearsed(self) -> bool:
        """Return True if nothing is sent."""
        return isinstance(self.world, DryRunGroup)

    @property
    def all_ranks(self) -> Group:
        """Return the ranks of all meshes of the run."""
        return self.world if self.everyone is None else self.everyone

    @property
    def has_me(self) -> bool:
        """Return False on ranks of torch.distributed that are not in the mesh."""
        return self.rank < self.size

    @staticmethod
    def create(
        device_type: str,
        *,
        ranks_per_node: int,
        block_sizes: Sequence[int] = (),
        ranks: int | None = None,
        even: bool = False,
        copies: int = 1,
        sharing: int = 1,
    ) -> ExpertMesh:
        """Create the mesh of the first ``ranks`` ranks of torch.distributed, by default all. All of its ranks call.

        With ``copies`` all ranks are that many meshes, each of consecutive ranks. With ``sharing`` each copy is that
        many parallel meshes, whose ranks take turns. ``ranks_per_node``: of one mesh.

        The kernels of its communicators run in the order of their launches, which is the same on all ranks. Otherwise
        two of them could wait for each other on two GPUs. InputError if the nodes are not equally large.
        """
        size, rank = dist.get_world_size() if ranks is None else ranks, dist.get_rank()
        if size // (copies * sharing) % ranks_per_node:
            raise InputError(
                f"{size} ranks cannot be divided into nodes of {ranks_per_node}: give another --ranks-per-node"
            )
        if device_type == "cuda":
            os.environ.setdefault(_LAUNCH_ORDER, "1")
        if copies * sharing > 1:
            each = size // (copies * sharing)
            return _create_copy(device_type, each, ranks_per_node, block_sizes, copies, sharing, even=even)
        shape = (size // ranks_per_node, ranks_per_node)
        mesh = DeviceMesh(device_type, torch.arange(size).view(shape), mesh_dim_names=("node", "device"))
        world: Any = dist.new_group(range(size))
        blocks: dict[int, Group] = {1: world, size: world}  # a block of one rank never communicates
        for block_size in sorted(set(block_sizes) - {1, size}):
            # new_group is collective: every rank must create every group, also those without it
            groups = [dist.new_group(range(first, first + block_size)) for first in range(0, size, block_size)]
            blocks[block_size] = groups[rank // block_size % len(groups)]
        if rank >= size:
            return ExpertMesh(rank, *shape, world, world, world, blocks, even)
        return ExpertMesh(rank, *shape, world, mesh.get_group("device"), mesh.get_group("node"), blocks, even)

    def every(self, value: int) -> Tensor:
        """Return the ``value`` of every rank, on the host (W,). Even ranks and ranks with gloo wait for no device."""
        if self.even or isinstance(self.world, DryRunGroup):
            return torch.full((self.size,), value)
        device = "cpu" if "cpu:" in dist.get_backend_config(self.world) else "cuda"
        values_W = torch.empty(self.size, dtype=torch.int64, device=device)
        getattr(dist, _ALL_GATHER)(values_W, torch.full((1,), value, device=device), group=self.world)
        return values_W.cpu()

    def maximum(self, value: Tensor) -> Tensor:
        """Compute the largest ``value`` of all ranks, where it is."""
        largest = value.clone()
        if isinstance(self.world, DryRunGroup):
            self.world("all_reduce", value.nbytes)
            return largest
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.world)
        return largest


def _create_copy(
    device_type: str,
    size: int,
    ranks_per_node: int,
    block_sizes: Sequence[int],
    copies: int,
    sharing: int,
    *,
    even: bool,
) -> ExpertMesh:
    """Create this rank's mesh of ``size`` ranks, one of ``copies``, each of them ``sharing`` parallel meshes."""
    nodes, (place, beside) = size // ranks_per_node, divmod(dist.get_rank(), sharing)
    grid = torch.arange(copies * size * sharing).view(copies, nodes, ranks_per_node, sharing)
    mesh = DeviceMesh(device_type, grid, mesh_dim_names=("copy", "node", "device", "beside"))
    lines_CS = grid.view(copies * size, sharing)  # of each mesh and its copies the ranks in order
    blocks: dict[int, Group] = {}
    for block_size in sorted({*block_sizes, size} - {1}):
        # new_group is collective: every rank must create every group, also those without it
        groups = {
            (first // block_size, line): dist.new_group(lines_CS[first : first + block_size, line].tolist())
            for first in range(0, copies * size, block_size)
            for line in range(sharing)
        }
        blocks[block_size] = groups[place // block_size, beside]
    world = blocks[size]
    return ExpertMesh(
        place % size,
        nodes,
        ranks_per_node,
        world,
        mesh.get_group("device"),
        mesh.get_group("node"),
        {1: world, **blocks},  # a block of one rank never communicates
        even,
        place // size,
        copies,
        mesh.get_group("copy") if copies > 1 else None,
        dist.new_group(range(copies * size * sharing)),
    )


def make_dry_run_mesh(size: int, ranks_per_node: int, copies: int, note: Note, sharing: int = 1) -> ExpertMesh:
    """Make a mesh of ``size`` ranks, one of ``copies``, that sends nothing.

    ``note`` gets what its first rank would send.
    """
    nodes = size // ranks_per_node
    blocks: dict[int, Group] = {
        each: DryRunGroup("expert", each, note) for each in range(1, size + 1) if size % each == 0
    }
    world, within, across = (DryRunGroup("expert", each, note) for each in (size, ranks_per_node, nodes))
    twins, everyone = DryRunGroup("twins", copies, note), DryRunGroup("all", copies * size * sharing, note)
    beside = twins if copies > 1 else None, everyone if copies * sharing > 1 else None
    return ExpertMesh(0, nodes, ranks_per_node, world, within, across, blocks, True, 0, copies, *beside)


def resolve_process_group(group: Group) -> dist.ProcessGroup:
    """Return the group, in a run."""
    assert not isinstance(group, DryRunGroup)
    return group


def count_ranks(group: Group) -> int:
    """Return the number of ranks of a group."""
    return group.size if isinstance(group, DryRunGroup) else dist.get_world_size(group)
