"""The ranks that share the experts: grid of nodes and devices, process groups, copies of the mesh. Moves no rows.

Measures the phases of an MoE layer, forward and backward, and counts its load.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.graphs import after_pass, is_captured
from mlhpc.suite.training.parallel.exchange import Note
from mlhpc.suite.training.timing import Clock

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


GATE = "gate"
PERMUTE = "permute"
COUNTS = "counts_exchange"
GATHER = "weight_gather"
DISPATCH = "a2a_dispatch"
EXPERTS = "experts"
COMBINE = "a2a_combine"
UNPERMUTE = "unpermute"
FORWARD = (GATE, PERMUTE, COUNTS, GATHER, DISPATCH, EXPERTS, COMBINE, UNPERMUTE)
BACKWARD = tuple(f"{name}_backward" for name in (UNPERMUTE, COMBINE, EXPERTS, DISPATCH, GATHER, PERMUTE, GATE))
PHASES = FORWARD + BACKWARD
COMMUNICATION = (COUNTS, *(name + way for name in (GATHER, DISPATCH, COMBINE) for way in ("", "_backward")))
MAX_MARKS = 200_000  # a timer that nobody reads drops its oldest marks
KEPT_STEPS = 512  # a load that nobody reads adds up its steps


class Marker(Protocol):
    """Receives the ends of phases from the layer. Phase None: the time since the last mark was outside the layer."""

    def mark(self, phase: str | None) -> None:
        """Count the time since the last mark as spent in ``phase``."""
        ...

    def boundary(self, x: Tensor, before: str | None, after: str | None) -> Tensor:
        """Return ``x``. Phase ``before`` ends here in the forward pass, the backward of ``after`` in the backward pass.

        None begins a measurement.
        """
        ...


class NoMarker:
    """Measures nothing."""

    def mark(self, phase: str | None) -> None:
        """Ignored."""

    def boundary(self, x: Tensor, before: str | None, after: str | None) -> Tensor:
        """Ignored."""
        return x


class LayerTimer:
    """Seconds per phase over all layers that share it, since the last flush.

    Communication counts the time that the layer waited for it, so overlapped transfers do not count.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._stamp = clock, clock.stamp
        self._marks: deque[tuple[str | None, Any]] = deque(maxlen=MAX_MARKS)
        self._ends = {phase: self._end_of(phase and f"{phase}_backward") for phase in (None, *FORWARD)}
        self.complete = True  # False: since the last flush a CUDA graph was replayed, in which nothing can be timed

    def mark(self, phase: str | None) -> None:
        """End ``phase`` here."""
        if not is_captured():
            self._marks.append((phase, self._stamp()))

    def boundary(self, x: Tensor, before: str | None, after: str | None) -> Tensor:
        """Mark now, and again when the gradient of ``x`` is complete. Evaluation is not measured."""
        if not torch.is_grad_enabled():
            return x
        if is_captured():
            after_pass(self._miss)
            return x
        if before in (None, GATE):
            x = x.view_as(x)  # x is used elsewhere too; a view has only the gradient of this use
        self._marks.append((before, self._stamp()))
        if x.requires_grad:
            # a hook costs half of an autograd function
            x.register_hook(self._ends[after])  # type: ignore[no-untyped-call]
        return x

    def flush(self) -> dict[str, float]:
        """Return the seconds of every phase, and reset them."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for (_, begin), (phase, end) in pairwise(self._marks):
            if phase is not None:
                seconds[phase] += self._clock.seconds(begin, end)
        self._marks.clear()
        self.complete = True
        return seconds

    def _miss(self) -> None:
        self.complete = False

    def _end_of(self, phase: str | None) -> Callable[[Tensor], None]:
        return lambda gradient: self._marks.append((phase, self._stamp()))


class ExpertLoad:
    """What the steps of a window routed: ``assigned_E`` counts the router's choices.

    A step keeps its counts as they are and launches no kernel. They are added up when they are read or numerous; only
    reading waits for the device.
    """

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._sums: Tensor | None = None  # of each expert, and of the rows that were kept
        self._needed: Tensor | None = None
        self.rows = 0

    def add(self, assigned_E: Tensor, kept: Tensor, rows: int) -> None:
        """One step of one layer: ``kept`` rows hold a token, ``rows`` were computed."""
        self._steps.append((assigned_E, kept))
        self.rows += rows
        if len(self._steps) >= KEPT_STEPS:
            self._fold()

    def read(self) -> LoadTotals:
        """Return the totals; waits for the device."""
        self._fold()
        if self._sums is None or self._needed is None:
            return LoadTotals([0.0] * self._experts, 0.0, 0.0, 0.0)
        *assigned, kept = map(float, self._sums.tolist())
        return LoadTotals(assigned, kept, float(self.rows), float(self._needed))

    def _fold(self) -> None:
        if not self._steps:
            return
        counts_SE, kept_S = (torch.stack(list(each)) for each in zip(*self._steps, strict=True))
        needed = (counts_SE.amax(1).double() * self._experts / counts_SE.sum(1).clamp(min=1)).amax()
        sums = torch.cat((counts_SE.sum(0), kept_S.sum()[None]))
        self._sums = sums if self._sums is None else self._sums + sums
        self._needed = needed if self._needed is None else torch.maximum(self._needed, needed)
        self._steps.clear()


@dataclass(frozen=True)
class LoadTotals:
    """Sums over the steps of a window, of one rank or of all. ``needed_factor`` is the largest of a step."""

    assigned_E: list[float]
    kept: float
    rows: float
    needed_factor: float

    def report(self) -> dict[str, Any]:
        """Compute the logged load: ``imbalance`` is max / mean, ``needed_capacity`` the largest of a step."""
        assigned = math.fsum(self.assigned_E)
        mean = assigned / len(self.assigned_E)
        return {
            "tokens_per_expert": [round(value) for value in self.assigned_E],
            "imbalance": max(self.assigned_E) / mean if assigned else 1.0,
            "drop_rate": 1 - self.kept / assigned if assigned else 0.0,
            "needed_capacity": self.needed_factor,
            "padding_waste": 1 - self.kept / self.rows if self.rows else 0.0,
        }
