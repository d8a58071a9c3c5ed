"""Groups of ranks whose batches are normalised as one: the layout of the reference's ``batchnorm_group_size``."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.batch_norm import GroupBatchNorm2d
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.world import World


def group_ranks(ranks: int, size: int) -> list[list[int]]:
    """Split all ranks into groups of ``size`` consecutive ones. InputError if size does not divide the ranks."""
    if ranks % size:
        raise InputError(f"batchnorm_group_size is {size}, expected a divisor of the {ranks} ranks of this run")
    return [list(range(begin, begin + size)) for begin in range(0, ranks, size)]


def join_groups(model: nn.Module, world: World, size: int) -> None:
    """Give every GroupBatchNorm2d a group of ``size`` consecutive ranks. All ranks of torch.distributed call."""
    members = group_ranks(world.size, size)
    if size == 1:
        return
    groups = [dist.new_group(ranks) for ranks in members]  # collective: every rank must create every group
    axis = Axis("batch norm", world.rank % size, size, groups[world.rank // size])
    for module in model.modules():
        if isinstance(module, GroupBatchNorm2d):
            module.axis = axis
