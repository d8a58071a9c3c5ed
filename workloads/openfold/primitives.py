"""Linear layers with AlphaFold 2's initialisations, gated attention, dropout shared along a dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Init = Literal["lecun", "relu", "glorot", "gating", "normal", "final"]

TRUNCATED_STD = 0.87962566103423978  # standard deviation of a unit normal cut at two


class Linear(nn.Linear):
    """nn.Linear with a zero bias and one of AlphaFold 2's weight initialisations (supplement 1.11.4)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, init: Init = "lecun") -> None:
        self._init: Init = init
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise from torch's current seed."""
        if self.bias is not None:
            nn.init.constant_(self.bias, 1.0 if self._init == "gating" else 0.0)
        if self._init in {"final", "gating"}:
            nn.init.zeros_(self.weight)
        elif self._init == "glorot":
            nn.init.xavier_uniform_(self.weight)
        elif self._init == "normal":
            nn.init.kaiming_normal_(self.weight, nonlinearity="linear")
        else:
            std = math.sqrt((2.0 if self._init == "relu" else 1.0) / self.in_features)
            nn.init.trunc_normal_(self.weight, std=std / TRUNCATED_STD, a=-2 * std, b=2 * std)


class Attention(nn.Module):
    """Multi-head attention (..., Q, c) over (..., K, c) with additive biases and a sigmoid gate of the query."""

    def __init__(self, query: int, key: int, head: int, heads: int, *, gated: bool = True) -> None:
        super().__init__()
        self.heads, self.scale = heads, head**-0.5
        self.linear_q = Linear(query, head * heads, bias=False, init="glorot")
        self.linear_k = Linear(key, head * heads, bias=False, init="glorot")
        self.linear_v = Linear(key, head * heads, bias=False, init="glorot")
        self.linear_o = Linear(head * heads, query, init="final")
        self.linear_g = Linear(query, head * heads, init="gating") if gated else None

    def forward(self, query: Tensor, key: Tensor, biases: list[Tensor]) -> Tensor:
        """``biases`` broadcast to (..., heads, Q, K)."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer, x in ((self.linear_q, query), (self.linear_k, key), (self.linear_v, key))
        )
        scores = (q * self.scale) @ k.transpose(-1, -2)
        for bias in biases:
            scores = scores + bias
        out = (scores.float().softmax(-1).to(v.dtype) @ v).transpose(-2, -3).flatten(-2)
        if self.linear_g is not None:
            out = out * self.linear_g(query).sigmoid()
        return self.linear_o(out)  # type: ignore[no-any-return]


class Transition(nn.Module):
    """Layer norm, dense layer to a multiple of the width, ReLU, dense layer back."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(channels)
        self.linear_1 = Linear(channels, factor * channels, init="relu")
        self.linear_2 = Linear(factor * channels, channels, init="final")

    def forward(self, x: Tensor) -> Tensor:
        """The update of x (..., channels)."""
        return self.linear_2(F.relu(self.linear_1(self.layer_norm(x))))  # type: ignore[no-any-return]


def mask_bias(mask: Tensor) -> Tensor:
    """Compute the bias that attention adds to its scores: 0 where the mask is 1, -1e9 where it is 0."""
    return (mask - 1) * 1e9


class SharedDropout(nn.Module):
    """Dropout with the same mask along one dimension."""

    def __init__(self, rate: float, dim: int) -> None:
        super().__init__()
        self.dim, self.mask = dim, nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        """x with some values zero, the others scaled up."""
        if not self.training or self.mask.p == 0:
            return x
        shape = list(x.shape)
        shape[self.dim] = 1
        return x * self.mask(x.new_ones(shape))  # type: ignore[no-any-return]


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.contiguous()

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def in_order(x: Tensor) -> Tensor:
    """x, and its gradient, as they lie in memory when nothing is transposed.

    torch multiplies batches of matrices whose rows and columns are both strided one by one, each after a copy.
    """
    return _InOrder.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def recomputed(block: Callable[..., Any], *inputs: Tensor, enabled: bool) -> Any:
    """Run a block. If ``enabled``, its activations are recomputed in the backward pass instead of stored."""
    if enabled and torch.is_grad_enabled():
        return checkpoint(block, *inputs, use_reentrant=False)
    return block(*inputs)
