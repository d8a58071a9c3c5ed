"""Chooses between MPI and gloo for torch's collectives on processors, and starts torch.distributed with it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mlhpc.suite.machine.choice.chooser import Candidate, Question, make_measuring_chooser, make_threshold_rule
from mlhpc.suite.machine.choice.mpi_group import MpiGroup, find_mpi_communicator, register_backend
from mlhpc.suite.workload import ChooserProtocol
from mlhpc.suite.world import World

GLOO, MPI = "gloo", "mpi"
MESSAGE_BYTES = 1 << 20  # what DDP sends first, and all that small models have
MAX_TIME_RATIO = (
    0.5  # of gloo's time: gloo's sending hides behind the backward pass where cores are free, MPI's does not
)
_decide = make_threshold_rule(MPI, GLOO, MAX_TIME_RATIO)


def start_collectives(world: World, device: torch.device, chooser: ChooserProtocol) -> None:
    """Start torch.distributed. On CPUs with MPI, a measurement chooses gloo or MPI; elsewhere it is gloo or NCCL.

    Does nothing on one rank or if torch.distributed is started. All ranks call it.
    """
    if world.size == 1 or dist.is_initialized():
        return
    if not all(world.allgather(device.type == "cpu" and find_mpi_communicator(world) is not None)):
        world.init_torch(device)
        return

    def ways() -> Mapping[str, Candidate]:
        message = torch.ones(MESSAGE_BYTES // torch.float32.itemsize)
        world.init_torch(device)
        by = {GLOO: dist.group.WORLD, MPI: MpiGroup(find_mpi_communicator(world).Dup())}
        return {name: partial(_run_mean, group, message) for name, group in by.items()}

    shape = {"bytes": MESSAGE_BYTES, "ranks": world.size, "nodes": world.nodes}
    question = Question(
        name="collectives",
        shape=shape,
        rule=GLOO,
        ways=ways,
        possible=lambda value: value in (GLOO, MPI),
        decide=_decide,
        together=True,
    )
    chosen = chooser.choose(question)
    if chosen == MPI and dist.is_initialized():  # gloo was timed
        dist.destroy_process_group()
    world.init_torch(device, register_backend() if chosen == MPI else GLOO)


def start_measured(world: World, device: torch.device) -> None:
    """Start torch.distributed as a run without settings for it would."""
    start_collectives(world, device, make_measuring_chooser(world, device))


def _run_mean(group: Any, message: torch.Tensor) -> None:
    message.mul_(1 / group.size())
    group.allreduce([message]).wait()
