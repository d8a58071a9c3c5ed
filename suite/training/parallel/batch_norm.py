"""Batch normalisation over the batches of a group of ranks, on any device of torch.distributed, CPU included.

torch's SyncBatchNorm needs CUDA. Here the forward pass gathers the counts, means and variances of the group, and the
backward pass sums two numbers per channel. The result is that of one batch with the values of all ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.suite.training.parallel.exchange import Axis


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
