"""Exchanges gradients between data-parallel ranks by DDP's communication hooks, and times the exchange.

On GPUs, and where MPI carries collectives, the hooks do the all-reduce. With gloo DDP's own all-reduce does it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket  # what torch.distributed.GradBucket is, for type checkers
from torch.nn.parallel import DistributedDataParallel

from mlhpc.suite.training.instrument import CollectiveCounter, ReducerTimes
from mlhpc.suite.training.step_timing import EXPOSED_COMMUNICATION, FORWARD_BACKWARD, NoTimer, PhaseTimer


def register_exchange_timing(
    wrapped: nn.Module, timer: PhaseTimer | NoTimer, ledger: CollectiveCounter, *, hooked: bool = False
) -> Callable[[], None]:
    """Set up the timing of the gradient exchange; return what to call after each backward pass that exchanges.

    The call marks where computing ended, where waiting for the exchange began, and where it ended. Without data
    parallelism, or in a run that is not measured, it marks only computing. DDP then exchanges as by default.
    ``hooked``: a hook compresses the gradients already, and its collectives count by themselves.
    """
    if not isinstance(timer, PhaseTimer) or not isinstance(wrapped, DistributedDataParallel):
        return partial(timer.mark, FORWARD_BACKWARD)
    on_host = next(wrapped.parameters()).device.type == "cpu"
    if on_host and dist.get_backend() == "gloo":  # DDP's own all-reduce, whose times are read once per step
        return ReducerTimes(wrapped, timer, CollectiveCounter() if hooked else ledger).mark
    if hooked:
        return partial(timer.mark, FORWARD_BACKWARD)
    if not on_host:
        wrapped.register_comm_hook(timer, _all_reduce_on_device)
        return partial(timer.mark, EXPOSED_COMMUNICATION)
    # MPI's collectives end before they return, so each bucket's wait is fully exposed and measured in place.
    wrapped.register_comm_hook(timer, _all_reduce_on_host)
    return partial(timer.mark, FORWARD_BACKWARD)


def _all_reduce_on_device(timer: PhaseTimer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a gradient bucket (DDP communication hook for GPUs, where DDP's own times would wait for the device).

    When the last bucket is ready, only communication is left to wait for.
    """
    if bucket.is_last():
        timer.mark(FORWARD_BACKWARD)
    begin = timer.stamp()
    # Before the sum, as DDP does: the sum of many ranks' float16 gradients could overflow.
    buffer = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(buffer, async_op=True).get_future()

    def done(finished: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        timer.transfer(begin, timer.stamp())
        return finished.value()[0]

    return future.then(done)  # type: ignore[no-any-return]


def _all_reduce_on_host(timer: PhaseTimer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a gradient bucket (DDP communication hook for collectives that are done when they return)."""
    begin = timer.mark(FORWARD_BACKWARD)
    buffer = bucket.buffer().mul_(1 / dist.get_world_size())
    dist.all_reduce(buffer)
    timer.transfer(begin, timer.mark(EXPOSED_COMMUNICATION))
    # DDP expects a future, although the sum is done.
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


# DDP compares a hook's annotations with its types by identity; with postponed evaluation they would be text
for _hook in (_all_reduce_on_device, _all_reduce_on_host):
    _hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
