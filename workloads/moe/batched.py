"""Multiplies all experts in one batched product; the weights' gradient has the layout of the weights.

Letters as in `workloads.moe.experts`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def batched(x_ECD: Tensor, weight_EDH: Tensor, bias_EH: Tensor | None) -> Tensor:
    """Multiply (E, C, D) by (E, D, H) to (E, C, H), and add the bias if there is one."""
    if bias_EH is None:
        return torch.bmm(x_ECD, weight_EDH)
    return torch.baddbmm(bias_EH.unsqueeze(1), x_ECD, weight_EDH)


class Batched(torch.autograd.Function):
    """Rows times each expert's weight transposed, plus its bias. The weight's gradient lies as the weight does.

    Autograd's would lie transposed and be copied: with few rows of many experts that is a quarter of the pass.
    """

    @staticmethod
    def forward(ctx: Any, x_ECD: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None) -> Tensor:
        """Multiply (E, C, D) by weights (E, H, D) to (E, C, H)."""
        ctx.save_for_backward(x_ECD, weight_EHD)
        ctx.biased = bias_EH is not None
        return batched(x_ECD, weight_EHD.transpose(1, 2), bias_EH)

    @staticmethod
    def backward(ctx: Any, d_ECH: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of rows, weights and bias."""
        x_ECD, weight_EHD = ctx.saved_tensors
        d_weight_EHD = torch.bmm(d_ECH.transpose(1, 2), x_ECD)
        return torch.bmm(d_ECH, weight_EHD), d_weight_EHD, d_ECH.sum(1) if ctx.biased else None
