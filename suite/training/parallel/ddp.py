"""Data parallelism applied to a model from outside: wrapping, clipping and norms over parameters of which ranks have
parts.

Batch normalisation over the batches of a group of ranks, on any device of torch.distributed, CPU included.

torch's SyncBatchNorm needs CUDA. Here the forward pass gathers the counts, means and variances of the group, and the
backward pass sums two numbers per channel. The result is that of one batch with the values of all ranks of the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mlhpc.suite.data.sampling import list_eval_batches
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.fsdp import local, states_of
from mlhpc.suite.training.parallel.layout import find_away, slices
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.world import World


@dataclass(frozen=True)
class Turn:
    """A batch of an evaluation: this rank's samples, and whether they count."""

    indices: NDArray[np.int64]
    counts: bool


EPS = 1e-6  # what torch adds to a norm before it divides by it
Norms = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]

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


class Clipping:
    """Scales gradients down to an L2 norm over the whole model. A call is a collective if ranks have parts of it.

    ``copies``: ranks that hold each of ``sharded``, with equal gradients. The parameters are looked up once: to walk
    through hundreds of small modules takes longer than to scale what they hold.
    """

    def __init__(self, model: nn.Module, sharded: Sequence[nn.Parameter], clip_norm: float, *, copies: int = 1) -> None:
        self._model, self._sharded, self._clip_norm, self._copies = model, sharded, clip_norm, copies
        shares = {id(parameter) for parameter in sharded}
        self._parameters = list(model.parameters())
        self._whole = [each for each in self._parameters if id(each) not in shares]
        self._in_parts = _has_parts(model)
        # torch takes all in one call on a CPU only if asked to, and cannot on meta tensors
        self._at_once = None if any(each.is_meta for each in self._parameters) else True

    def __call__(self) -> None:
        """Clip the gradients that there are now."""
        weights, gradients = [], []
        for weight in self._whole:
            if (gradient := _find_gradient(weight)) is not None:
                weights.append(weight)
                gradients.append(gradient)
        if self._in_parts:
            gradients = norms_of_whole(self._model)(gradients, weights)
        norm = nn.utils.get_total_norm(gradients, foreach=self._at_once)
        if self._sharded:
            square = nn.utils.get_total_norm(
                [local(each) for weight in self._sharded if (each := _find_gradient(weight)) is not None]
            ).square()
            if dist.is_initialized():
                dist.all_reduce(square)
                square /= self._copies
            norm = (norm.square() + square).sqrt()
        found = [local(each.grad) for each in self._parameters if each.grad is not None]
        factor = (self._clip_norm / (norm + EPS)).clamp(max=1.0)  # as torch's own; that takes no parts
        if self._at_once:
            torch._foreach_mul_(found, factor)
        for gradient in () if self._at_once else found:
            gradient.mul_(factor)
        for away in filter(None, map(find_away, self._parameters)):
            away.scale_gradient(factor)


def _find_gradient(weight: Tensor) -> Tensor | None:
    """Return a weight's gradient. Of one that is away its norm, which is a number and so its own norm."""
    away = find_away(weight)
    return weight.grad if away is None else away.gradient_norm()


def norms_of_whole(model: nn.Module) -> Norms:
    """The function that computes L2 norms of whole tensors from pieces. It takes tensors and the parameter that each
    belongs to.

    One collective per call and axis. Every rank calls it with the tensors of the same parameters.
    """
    states, axes = states_of(model), {id(part): slice_.axis for _, part, slice_ in slices(model)}
    if states is not None:
        axes |= {id(each): states.shard for name, each in model.named_parameters() if name in states.shapes}

    def norms(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        found = list(torch._foreach_norm([local(each) for each in tensors]))
        for axis in dict.fromkeys(axes[id(weight)] for weight in weights if id(weight) in axes):
            parts = [position for position, weight in enumerate(weights) if axes.get(id(weight)) is axis]
            squares = axis.sum(torch.stack([found[position] for position in parts]).square())
            for position, whole in zip(parts, squares.sqrt().unbind(), strict=True):
                found[position] = whole
        return found

    return norms


def _has_parts(model: nn.Module) -> bool:
    """True if ranks hold parts of parameters: rows of states, or slices of split products."""
    return states_of(model) is not None or next(slices(model), None) is not None


def adapt_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let an optimizer update parts of parameters.

    One that scales by norms of whole tensors (its attribute ``norms``) gets those. Tensors of a group that lie on
    different meshes, or on none, become groups of their own: torch's fused optimizers refuse them in one.
    """
    if _has_parts(model) and hasattr(optimizer, "norms"):
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


class GroupBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d with training statistics over the ranks of ``axis``; plain BatchNorm2d without one."""

    axis: Axis | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (N, C, H, W); in training also update the running statistics."""
        if self.axis is None or not self.training:
            return super().forward(x)
        y, mean_C, variance_C, count = _GroupNormalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.axis, self.eps
        )
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.momentum is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean_C, self.momentum)
            self.running_var.lerp_(variance_C * (count / (count - 1)), self.momentum)
        return y  # type: ignore[no-any-return]


class _GroupNormalise(torch.autograd.Function):
    """Output, mean, biased variance and number of values per channel, the last three over the group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_C: Tensor, bias_C: Tensor, axis: Axis, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        variance_C, mean_C = torch.var_mean(_wide(x), dim=(0, 2, 3), correction=0)
        local = torch.stack([torch.full_like(mean_C, x.numel() / x.shape[1]), mean_C, variance_C])
        count_GC, mean_GC, variance_GC = torch.stack(axis.all_gather(local), dim=1)
        count_C = count_GC.sum(dim=0)
        mean_C = (count_GC * mean_GC).sum(dim=0) / count_C
        variance_C = (count_GC * (variance_GC + (mean_GC - mean_C).square())).sum(dim=0) / count_C
        y = F.batch_norm(x, mean_C, variance_C, weight_C, bias_C, training=False, eps=eps)
        ctx.save_for_backward(x, weight_C, mean_C, torch.rsqrt(variance_C + eps), count_C)
        ctx.axis = axis
        ctx.mark_non_differentiable(mean_C, variance_C, count_C)
        return y, mean_C, variance_C, count_C

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *unused: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight_C, mean_C, scale_C, count_C = ctx.saved_tensors
        shape = (1, -1, 1, 1)
        grad = _wide(grad_y)
        normalised = (_wide(x) - mean_C.view(shape)) * scale_C.view(shape)
        grad_bias_C = grad.sum(dim=(0, 2, 3))
        grad_weight_C = (grad * normalised).sum(dim=(0, 2, 3))
        mean_grad_C, mean_product_C = ctx.axis.sum(torch.stack([grad_bias_C, grad_weight_C])) / count_C
        factor_C = weight_C * scale_C
        grad_x = (grad - mean_grad_C.view(shape) - normalised * mean_product_C.view(shape)) * factor_C.view(shape)
        return grad_x.to(x.dtype), grad_weight_C, grad_bias_C, None, None


def _wide(x: Tensor) -> Tensor:
    """Convert to at least float32: sums over pixels overflow or lose digits in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
