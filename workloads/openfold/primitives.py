"""Linear layers with AlphaFold 2's initialisations, gated attention, dropout shared along a dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from mlhpc.suite.machine.choice.products import Dense, compute_linear

Init = Literal["lecun", "relu", "glorot", "gating", "normal", "final"]

TRUNCATED_STD = 0.87962566103423978  # standard deviation of a unit normal cut at two


class Linear(Dense):
    """A dense layer with a zero bias and one of AlphaFold 2's weight initialisations (supplement 1.11.4)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, init: Init = "lecun") -> None:
        self._init: Init = init
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise from torch's current seed."""
        if self.bias is not None:
            # with zero weights, a bias of 1 lets a gate begin mostly open
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

    def forward(self, query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
        """``bias`` broadcasts to (heads, ..., K, Q)."""
        batch = query.shape[:-2]
        from_query = [self.linear_q] if self.linear_g is None else [self.linear_q, self.linear_g]
        from_key = [self.linear_k, self.linear_v]
        parts = [(query, [*from_query, *from_key])] if query is key else [(query, from_query), (key, from_key)]
        q, *gate, k, v = (
            each.view(self.heads, len(each) // self.heads, *batch, x.shape[-2])
            for x, layers in parts
            for each in compute_channels_first(x, layers).chunk(len(layers))
        )
        out = _AttentionFunction.apply(q, k, v, bias, self.scale)  # type: ignore[no-untyped-call]
        out = gate[0].sigmoid() * out if gate else out
        out = self.linear_o(out.flatten(2).flatten(0, 1).t())
        return out.unflatten(0, query.shape[:-1])  # type: ignore[no-any-return]


class _AttentionFunction(torch.autograd.Function):
    """v softmax(scale k q + bias) of heads (H, C, ..., L), channels before positions: nothing is transposed in memory.

    Small products are fastest with long rows. A softmax is fastest if it is not along the last dimension. Autograd
    would also keep the scores and their sums with parts of the bias.
    """

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        batch = (q.shape[0], *q.shape[2:-1])
        q_BCQ, k_BCK, v_BCK = (_flatten_to_matrices(each) for each in (q, k, v))
        scores = torch.unflatten(torch.bmm(k_BCK.transpose(1, 2), q_BCQ), 0, batch)
        attention_BKQ = torch.add(bias, scores, alpha=scale).softmax(-2).flatten(0, -3)
        context.save_for_backward(q_BCQ, k_BCK, v_BCK, attention_BKQ)
        context.batch, context.bias, context.scale = batch, bias.shape, scale
        return torch.unflatten(torch.bmm(v_BCK, attention_BKQ.to(v.dtype)), 0, batch).movedim(-2, 1)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q_BCQ, k_BCK, v_BCK, attention_BKQ = context.saved_tensors
        of_out = _flatten_to_matrices(gradient)
        of_v = torch.bmm(of_out, attention_BKQ.to(of_out.dtype).transpose(1, 2))
        of_attention = torch.bmm(v_BCK.transpose(1, 2), of_out).to(attention_BKQ.dtype)
        of_scores = torch._softmax_backward_data(of_attention, attention_BKQ, 1, attention_BKQ.dtype)
        of_bias = None
        if context.needs_input_grad[3]:
            of_bias = torch.unflatten(of_scores, 0, context.batch).sum_to_size(context.bias)
        of_scores = of_scores.to(q_BCQ.dtype)
        of_q, of_k = torch.bmm(k_BCK, of_scores), torch.bmm(q_BCQ, of_scores.transpose(1, 2))
        found = (of_q.mul_(context.scale), of_k.mul_(context.scale), of_v)
        return *(torch.unflatten(each, 0, context.batch).movedim(-2, 1) for each in found), of_bias, None


def _flatten_to_matrices(x: Tensor) -> Tensor:
    """Return (H, C, ..., L) as one matrix (C, L) after the other."""
    return x.movedim(1, -2).flatten(0, -3)


def compute_channels_first(x: Tensor, layers: Sequence[Linear]) -> Tensor:
    """Apply several layers to x (..., c) by one product: outputs below each other, by position (outputs, ...)."""
    weight, bias = _join_layers(layers)
    return compute_linear(weight, x.reshape(-1, x.shape[-1]), None, onednn=layers[0].onednn).add_(bias[:, None])


def compute_channels_last(x: Tensor, layers: Sequence[Linear]) -> Tensor:
    """Apply several layers to x (..., c) by one product: their outputs side by side (..., outputs)."""
    return compute_linear(x, *_join_layers(layers), onednn=layers[0].onednn)


def _join_layers(layers: Sequence[Linear]) -> tuple[Tensor, Tensor]:
    """Return the weights and biases of several layers, one below the other; a layer without a bias has zeros."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [
        layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers
    ]
    return torch.cat(weights), torch.cat(biases)


class Transition(nn.Module):
    """Layer norm, dense layer to a multiple of the width, ReLU, dense layer back."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(channels)
        self.linear_1 = Linear(channels, factor * channels, init="relu")
        self.linear_2 = Linear(factor * channels, channels, init="final")

    def forward(self, x: Tensor) -> Tensor:
        """Return the update of x (..., channels)."""
        return self.linear_2(F.relu(self.linear_1(self.layer_norm(x)), inplace=True))  # type: ignore[no-any-return]


def compute_mask_bias(mask: Tensor) -> Tensor:
    """Compute the bias that attention adds to its scores.

    It is 0 where the mask is 1, and -1e9 where the mask is 0.
    """
    return (mask - 1) * 1e9


class SharedDropout(nn.Module):
    """Adds an update to a map with dropout, whose mask is the same along one dimension."""

    def __init__(self, rate: float, dim: int) -> None:
        super().__init__()
        self.dim, self.mask = dim, nn.Dropout(rate)

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """Return x plus the update. Some values of the update are zero, the others scaled up."""
        if not self.training or self.mask.p == 0:
            return x + update
        shape = list(update.shape)
        shape[self.dim] = 1
        return torch.addcmul(x, update, self.mask(update.new_ones(shape)))


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.contiguous()

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def make_contiguous(x: Tensor) -> Tensor:
    """Return x, and its gradient, as they lie in memory when nothing is transposed.

    torch multiplies batches of matrices whose rows and columns are both strided one by one, each after a copy.
    """
    return _Contiguous.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def run_checkpointed(block: Callable[..., Any], *inputs: Tensor, enabled: bool) -> Any:
    """Run a block. If ``enabled``, its activations are recomputed in the backward pass instead of stored."""
    if enabled and torch.is_grad_enabled():
        return checkpoint(block, *inputs, use_reentrant=False)
    return block(*inputs)
