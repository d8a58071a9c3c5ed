"""Data parallelism applied to a model from outside: wrapping, and clipping over sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from suite.world import World

# Buffers are each rank's own while training and averaged before an evaluation; torch renamed the switch in 2.13
_NO_BUFFER_BROADCAST: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}  # fmt: skip


def wrap(model: nn.Module, sharded: Sequence[nn.Parameter], world: World, device: torch.device) -> nn.Module:
    """Wrap a model for data parallelism over all ranks. On one rank, return the model itself.

    After a backward pass all gradients are means over ranks. Those of ``sharded`` parameters arrive as sums and are divided.
    Parameters and buffers are copied from rank 0, except sharded ones; so load a checkpoint after this call.
    """
    if world.size == 1:
        return model
    shares = {id(parameter) for parameter in sharded}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in shares]
    # torch has no public way to say so (pytorch#43690)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
    for parameter in sharded:
        parameter.register_hook(lambda gradient: gradient / world.size)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **_NO_BUFFER_BROADCAST,
    )


def clip_gradients(model: nn.Module, sharded: Sequence[nn.Parameter], clip_norm: float) -> None:
    """Scale the gradients down to this L2 norm over the whole model. A collective if there are sharded parameters."""
    shares = {id(parameter) for parameter in sharded}
    gradients = [parameter.grad for parameter in model.parameters() if id(parameter) not in shares]
    norm = nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None], foreach=True)
    if sharded:
        square = nn.utils.get_total_norm([share.grad for share in sharded if share.grad is not None]).square()
        if dist.is_initialized():
            dist.all_reduce(square)
        norm = (norm.square() + square).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), clip_norm, norm, foreach=True)
