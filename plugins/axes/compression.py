"""Compresses gradients before data-parallel ranks exchange them, by DDP's communication hooks. Open division only.

fp16, bf16 and PowerSGD are torch's own hooks. Top-k sends the largest values of each bucket and adds the others to the
next step's gradients (error feedback), so that nothing is lost: what was sent and what is left sum to all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # what torch.distributed.GradBucket is, for type checkers
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from mlhpc.suite.training.parallel.plan import Compression

WHOLE_STEPS = 2  # DDP arranges its buckets anew after the first step: what is remembered of a bucket must come later
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
INDEX_BYTES = 4


def compress_gradients(wrapped: DistributedDataParallel, plan: Compression) -> TopK | None:
    """Let DDP compress gradients as a plan says. Returns the state of top-k."""
    group = wrapped.process_group
    if plan.kind in HALVES:
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook if plan.kind == "fp16" else _send_bfloat16)
    elif plan.kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, plan.rank, start_powerSGD_iter=WHOLE_STEPS)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        top = TopK(group, plan.part)
        wrapped.register_comm_hook(top, _send_top)
        return top
    return None


class TopK:
    """Sends the values of largest magnitude and remembers the others, for each bucket."""

    def __init__(self, group: dist.ProcessGroup, part: float) -> None:
        self.group, self.part, self.steps = group, part, 0
        self.residuals: dict[int, Tensor] = {}

    def split(self, bucket: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions and values to send of a gradient and what was left of it before; remember the others."""
        whole = gradient + self.residuals[bucket] if bucket in self.residuals else gradient.clone()
        places = whole.abs().topk(count_sent(len(whole), self.part), sorted=False).indices
        values = whole[places]
        whole[places] = 0
        self.residuals[bucket] = whole
        return places, values

    def average(self, bucket: int, gradient: Tensor) -> None:
        """Replace a gradient by the mean of what all ranks send of it."""
        ranks = dist.get_world_size(self.group)
        places, values = self.split(bucket, gradient)
        every_place = places.new_empty(ranks * len(places), dtype=torch.int32)
        every_value = values.new_empty(ranks * len(values))
        dist.all_gather_into_tensor(every_place, places.int(), group=self.group)
        dist.all_gather_into_tensor(every_value, values, group=self.group)
        gradient.zero_().index_add_(0, every_place.long(), every_value / ranks)


def _send_bfloat16(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's hook, which DDP refuses by its name on processors, where gloo takes bfloat16."""
    return default_hooks.bf16_compress_hook(group, bucket)


def _send_top(state: TopK, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket by top-k (DDP communication hook)."""
    if state.steps < WHOLE_STEPS:
        state.steps += bucket.is_last()
        return default_hooks.allreduce_hook(state.group, bucket)
    state.average(bucket.index(), bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# DDP compares a hook's annotations with its types by identity; with postponed evaluation they would be text
for _hook in (_send_bfloat16, _send_top):
    _hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


def count_sent(values: int, part: float) -> int:
    """Return how many values top-k sends of a bucket."""
    return max(1, math.ceil(values * part))


def count_bytes(plan: Compression, parameters: Sequence[nn.Parameter]) -> Mapping[str, int]:
    """Return the bytes that a rank gives in a step, by kind of collective. Top-k: as if there were one bucket."""
    if plan.kind in HALVES:
        return {"all_reduce": sum(each.numel() for each in parameters) * HALVES[plan.kind].itemsize}
    if plan.kind == "top_k":
        sent = count_sent(sum(each.numel() for each in parameters), plan.part)
        return {"all_gather": sent * (INDEX_BYTES + parameters[0].element_size())}
    total = 0
    for each in parameters:
        rows = each.shape[0] if each.dim() else 1
        columns = each.numel() // rows
        rank = min(rows, columns, plan.rank)
        small = (rows + columns) * rank
        total += (small if 2 * small < each.numel() else each.numel()) * each.element_size()
    return {"all_reduce": total}
