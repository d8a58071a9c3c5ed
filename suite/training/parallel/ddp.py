"""Data parallelism applied to a model from outside: wrapping, the optimizer, and the batches of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mlhpc.suite.data.sampling import list_eval_batches
from mlhpc.suite.training.parallel.clipping import has_parts, norms_of_whole
from mlhpc.suite.training.parallel.fsdp import states_of
from mlhpc.suite.training.parallel.layout import find_away, slices
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.world import World


@dataclass(frozen=True)
class Turn:
    """A batch of an evaluation: this rank's samples, and whether they count."""

    indices: NDArray[np.int64]
    counts: bool


# Buffers are each rank's own while training and averaged before an evaluation; torch renamed the switch in 2.13
NO_BUFFER_BROADCAST: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}  # fmt: skip


def wrap(model: nn.Module, sharded: Sequence[nn.Parameter], world: World, device: torch.device) -> nn.Module:
    """Wrap a model for data parallelism over all ranks. On one rank, return the model itself.

    After a backward pass all gradients are means over ranks. Those of ``sharded`` parameters arrive as sums and are
    divided. FSDP2 and the tensor axis have means already; if there are no other parameters, the model itself is
    returned. Parameters and buffers are copied from rank 0, except parts; so load a checkpoint after this call.
    """
    if world.size == 1:
        return model
    for parameter in sharded:
        parameter.register_hook(lambda gradient: gradient / world.size)  # type: ignore[no-untyped-call]
    states = states_of(model)
    names = {name for name, _, _ in slices(model)} | set(states.shapes if states is not None else ())
    shares = {id(parameter) for parameter in sharded}
    names |= {name for name, each in model.named_parameters() if id(each) in shares or find_away(each) is not None}
    if not any(parameter.requires_grad and name not in names for name, parameter in model.named_parameters()):
        return model
    # torch has no public way to say so (pytorch#43690)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(names))  # type: ignore[no-untyped-call]
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **NO_BUFFER_BROADCAST,
    )


def adapt_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let an optimizer update parts of parameters.

    One that scales by norms of whole tensors (its attribute ``norms``) gets those. Tensors of a group that lie on
    different meshes, or on none, become groups of their own: torch's fused optimizers refuse them in one.
    """
    if has_parts(model) and hasattr(optimizer, "norms"):
        optimizer.norms = norms_of_whole(model)
    for group in list(optimizer.param_groups):
        meshes: dict[object, list[Tensor]] = {}
        for each in group["params"]:
            meshes.setdefault(getattr(each, "device_mesh", None), []).append(each)
        group["params"], *others = meshes.values()
        for params in others:
            optimizer.add_param_group({**group, "params": params})


def eval_turns(samples: int, batch_size: int, shared: Parallel) -> Iterator[Turn]:
    """This rank's batches of an evaluation.

    Where ranks take every forward pass together, all have as many: some do not count.
    """
    mesh, taken = shared.mesh, 0
    for indices in list_eval_batches(samples, batch_size, rank=mesh.data_rank, size=mesh.data_size):
        taken += 1
        yield Turn(indices, counts=True)
    most = math.ceil(math.ceil(samples / mesh.data_size) / batch_size)
    for _ in range(most - taken if shared.in_step else 0):
        yield Turn(np.zeros(1, dtype=np.int64), counts=False)
