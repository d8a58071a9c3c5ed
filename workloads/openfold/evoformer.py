"""The blocks that exchange information between alignment and pair map: Evoformer, extra MSA stack, template stack.

Algorithms 6 to 17 of AlphaFold 2's supplement. Dimensions are N samples, S rows of the alignment, L (I, J) residues and
H heads. M, Z and T are channels of alignment, pair map and template. Masks have the shape without channels.

Linear layers with AlphaFold 2's initialisations, gated attention, dropout shared along a dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from mlhpc.workloads.openfold.config import OpenFoldConfig

Init = Literal["lecun", "relu", "glorot", "gating", "normal", "final"]

TRUNCATED_STD = 0.87962566103423978  # standard deviation of a unit normal cut at two


class Linear(nn.Linear):
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
    return F.linear(weight, x.reshape(-1, x.shape[-1])).add_(bias[:, None])


def compute_channels_last(x: Tensor, layers: Sequence[Linear]) -> Tensor:
    """Apply several layers to x (..., c) by one product: their outputs side by side (..., outputs)."""
    return F.linear(x, *_join_layers(layers))


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


class MsaRowAttention(nn.Module):
    """Attention along the residues of each row, biased by the pair map."""

    def __init__(self, msa: int, pair: int, head: int, heads: int) -> None:
        super().__init__()
        self.layer_norm_m, self.layer_norm_z = nn.LayerNorm(msa), nn.LayerNorm(pair)
        self.linear_z = Linear(pair, heads, bias=False, init="normal")
        self.mha = Attention(msa, msa, head, heads)

    def forward(self, m_NSLM: Tensor, z_NIJZ: Tensor, mask_NSL: Tensor) -> Tensor:
        """Return the update of m."""
        m = self.layer_norm_m(m_NSLM)
        bias_HNJI = self.linear_z(self.layer_norm_z(z_NIJZ)).permute(3, 0, 2, 1)
        return self.mha(m, m, bias_HNJI[:, :, None] + compute_mask_bias(mask_NSL)[..., None])  # type: ignore[no-any-return]


class MsaColumnAttention(nn.Module):
    """Attention along the rows of each residue."""

    def __init__(self, msa: int, head: int, heads: int) -> None:
        super().__init__()
        self.layer_norm_m = nn.LayerNorm(msa)
        self.mha = Attention(msa, msa, head, heads)

    def forward(self, m_NSLM: Tensor, mask_NSL: Tensor) -> Tensor:
        """Return the update of m."""
        m = self.layer_norm_m(m_NSLM.transpose(1, 2))
        out = self.mha(m, m, compute_mask_bias(mask_NSL.transpose(1, 2))[..., None])
        return out.transpose(1, 2)  # type: ignore[no-any-return]


class MsaColumnGlobalAttention(nn.Module):
    """Attention along the rows of each residue, the mean as only query (algorithm 19). Heads share keys and values."""

    def __init__(self, msa: int, head: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, head**-0.5
        self.layer_norm_m = nn.LayerNorm(msa)
        self.linear_q = Linear(msa, head * heads, bias=False, init="glorot")
        self.linear_k = Linear(msa, head, bias=False, init="glorot")
        self.linear_v = Linear(msa, head, bias=False, init="glorot")
        self.linear_g = Linear(msa, head * heads, init="gating")
        self.linear_o = Linear(head * heads, msa, init="final")

    def forward(self, m_NSLM: Tensor, mask_NSL: Tensor) -> Tensor:
        """Return the update of m."""
        m = self.layer_norm_m(m_NSLM.transpose(1, 2))
        mask = mask_NSL.transpose(1, 2)
        mean = (m * mask[..., None]).sum(-2) / (mask.sum(-1, keepdim=True) + 1e-5)
        q = self.linear_q(mean).unflatten(-1, (self.heads, -1)) * self.scale
        # masked rows get -1e9, so their attention is zero
        scores = q @ self.linear_k(m).transpose(-1, -2) + compute_mask_bias(mask)[..., None, :]
        out = scores.float().softmax(-1).to(m.dtype) @ self.linear_v(m)  # (N, L, H, head)
        gated = self.linear_g(m).sigmoid().unflatten(-1, (self.heads, -1)) * out[:, :, None]
        return self.linear_o(gated.flatten(-2)).transpose(1, 2)  # type: ignore[no-any-return]


class OuterProduct(nn.Module):
    """The outer products of two residues, summed over the rows that have both."""

    def forward(self, a_NSIC: Tensor, b_NSJC: Tensor, mask_NSI: Tensor, mask_NSJ: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the products (N, I, J, C C) and the numbers of rows (N, I, J)."""
        a, b = a_NSIC * mask_NSI[..., None], b_NSJC * mask_NSJ[..., None]
        (N, _, L, C), J = a.shape, b.shape[2]
        flat = a.flatten(2).transpose(1, 2) @ b.flatten(2)  # one matrix product instead of one per pair
        outer = flat.reshape(N, L, C, J, C).permute(0, 1, 3, 2, 4).flatten(-2)
        return outer, mask_NSI.transpose(1, 2) @ mask_NSJ


class OuterProductMean(nn.Module):
    """Updates the pair map by the mean outer product of two residues over the rows."""

    def __init__(self, msa: int, pair: int, hidden: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(msa)
        self.linear_1, self.linear_2 = Linear(msa, hidden), Linear(msa, hidden)
        self.outer = OuterProduct()
        self.linear_out = Linear(hidden * hidden, pair, init="final")

    def forward(self, m_NSLM: Tensor, mask_NSL: Tensor) -> Tensor:
        """Return the update of z."""
        m = self.layer_norm(m_NSLM)
        a, b = compute_channels_last(m, (self.linear_1, self.linear_2)).chunk(2, -1)
        outer, count = self.outer(a, b, mask_NSL, mask_NSL)
        # two residues may have no row in common
        return self.linear_out(outer) / (count[..., None] + 1e-3)  # type: ignore[no-any-return]


class TriangleProduct(nn.Module):
    """Sums products of edges over the third residue K."""

    def __init__(self, *, outgoing: bool) -> None:
        super().__init__()
        self.outgoing = outgoing

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Sum the products of edges to (C, N, I, J).

        Edges are (C, N, I, K) and (C, N, J, K) if outgoing, else (C, N, K, I) and (C, N, K, J).
        """
        return a @ b.transpose(-1, -2) if self.outgoing else a.transpose(-1, -2) @ b


class TriangleMultiplication(nn.Module):
    """Updates edge ij from edges ik and jk (outgoing) or ki and kj (incoming)."""

    def __init__(self, pair: int, hidden: int, *, outgoing: bool) -> None:
        super().__init__()
        self.product = TriangleProduct(outgoing=outgoing)
        self.layer_norm_in, self.layer_norm_out = nn.LayerNorm(pair), nn.LayerNorm(hidden)
        self.linear_a_p, self.linear_b_p = Linear(pair, hidden), Linear(pair, hidden)
        self.linear_a_g, self.linear_b_g = Linear(pair, hidden, init="gating"), Linear(pair, hidden, init="gating")
        self.linear_g = Linear(pair, pair, init="gating")
        self.linear_z = Linear(hidden, pair, init="final")

    def forward(self, z_NIJZ: Tensor, mask_NIJ: Tensor) -> Tensor:
        """Return the update of z."""
        z = self.layer_norm_in(z_NIJZ)
        edges = F.glu(
            compute_channels_first(z, (self.linear_a_p, self.linear_b_p, self.linear_a_g, self.linear_b_g)), 0
        )
        a_CNIK, b_CNJK = edges.mul_(mask_NIJ.reshape(-1)).view(len(edges), *mask_NIJ.shape).chunk(2)
        product = make_contiguous(self.product(a_CNIK, b_CNJK).flatten(1))  # (C, N I J)
        x = self.linear_z(self.layer_norm_out(product.t())).view_as(z)
        return x * self.linear_g(z).sigmoid()  # type: ignore[no-any-return]


class TriangleAttention(nn.Module):
    """Edge ij attends to the edges ik (starting node); on the transposed map, to kj (ending node)."""

    def __init__(self, pair: int, head: int, heads: int, *, starting: bool) -> None:
        super().__init__()
        self.starting = starting
        self.layer_norm = nn.LayerNorm(pair)
        self.linear_z = Linear(pair, heads, bias=False, init="normal")
        self.mha = Attention(pair, pair, head, heads)

    def forward(self, z_NIJZ: Tensor, mask_NIJ: Tensor) -> Tensor:
        """Return the update of z."""
        if not self.starting:
            z_NIJZ, mask_NIJ = z_NIJZ.transpose(1, 2), mask_NIJ.transpose(1, 2)
        z = self.layer_norm(z_NIJZ)
        bias_HNJI = self.linear_z(z).permute(3, 0, 2, 1)
        out = self.mha(z, z, bias_HNJI[:, :, None] + compute_mask_bias(mask_NIJ)[..., None])
        return out if self.starting else out.transpose(1, 2)  # type: ignore[no-any-return]


class PairBlock(nn.Module):
    """The triangle updates and the transition of a pair map, in all stacks. Only templates have ``attention_first``."""

    def __init__(
        self,
        pair: int,
        hidden: int,
        head: int,
        heads: int,
        factor: int,
        dropout: float,
        *,
        attention_first: bool = False,
    ) -> None:
        super().__init__()
        self.attention_first = attention_first
        # as in AlphaFold 2: one mask for all rows, but for the ending node one for all columns
        self.dropout, self.dropout_end = SharedDropout(dropout, 1), SharedDropout(dropout, 2)
        self.tri_mul_out = TriangleMultiplication(pair, hidden, outgoing=True)
        self.tri_mul_in = TriangleMultiplication(pair, hidden, outgoing=False)
        self.tri_att_start = TriangleAttention(pair, head, heads, starting=True)
        self.tri_att_end = TriangleAttention(pair, head, heads, starting=False)
        self.pair_transition = Transition(pair, factor)

    def forward(self, z_NIJZ: Tensor, mask_NIJ: Tensor) -> Tensor:
        """Return the new z."""
        multiplications = ((self.tri_mul_out, self.dropout), (self.tri_mul_in, self.dropout))
        attentions = ((self.tri_att_start, self.dropout), (self.tri_att_end, self.dropout_end))
        order = (*attentions, *multiplications) if self.attention_first else (*multiplications, *attentions)
        for layer, dropout in order:
            z_NIJZ = dropout(z_NIJZ, layer(z_NIJZ, mask_NIJ))
        return z_NIJZ + self.pair_transition(z_NIJZ)  # type: ignore[no-any-return]


class EvoformerBlock(nn.Module):
    """One Evoformer block; with ``extra`` the narrower one for the extra alignment."""

    def __init__(self, config: OpenFoldConfig, *, extra: bool = False) -> None:
        super().__init__()
        msa = config.extra_msa_channels if extra else config.msa_channels
        head = config.extra_msa_head_channels if extra else config.msa_head_channels
        pair = config.pair_channels
        self.msa_dropout = SharedDropout(config.msa_dropout, 1)
        self.msa_att_row = MsaRowAttention(msa, pair, head, config.msa_heads)
        column = MsaColumnGlobalAttention if extra else MsaColumnAttention
        self.msa_att_col = column(msa, head, config.msa_heads)
        self.msa_transition = Transition(msa, config.transition_factor)
        self.outer_product_mean = OuterProductMean(msa, pair, config.outer_channels)
        self.pair = PairBlock(
            pair, pair, config.pair_head_channels, config.pair_heads, config.transition_factor, config.pair_dropout
        )

    def forward(self, m_NSLM: Tensor, z_NIJZ: Tensor, msa_mask_NSL: Tensor, mask_NIJ: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new m and z."""
        m_NSLM = self.msa_dropout(m_NSLM, self.msa_att_row(m_NSLM, z_NIJZ, msa_mask_NSL))
        m_NSLM = m_NSLM + self.msa_att_col(m_NSLM, msa_mask_NSL)
        m_NSLM = m_NSLM + self.msa_transition(m_NSLM)
        z_NIJZ = z_NIJZ + self.outer_product_mean(m_NSLM, msa_mask_NSL)
        return m_NSLM, self.pair(z_NIJZ, mask_NIJ)


class EvoformerStack(nn.Module):
    """A sequence of blocks. The main stack also computes the single representation from the first row."""

    def __init__(self, config: OpenFoldConfig, *, extra: bool = False) -> None:
        super().__init__()
        self.checkpointing = config.checkpointing
        blocks = config.extra_msa_blocks if extra else config.evoformer_blocks
        self.blocks = nn.ModuleList(EvoformerBlock(config, extra=extra) for _ in range(blocks))
        self.linear = None if extra else Linear(config.msa_channels, config.single_channels)

    def forward(
        self, m_NSLM: Tensor, z_NIJZ: Tensor, msa_mask_NSL: Tensor, mask_NIJ: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the new m, z and the single representation (None for the extra stack)."""
        for block in self.blocks:
            m_NSLM, z_NIJZ = run_checkpointed(block, m_NSLM, z_NIJZ, msa_mask_NSL, mask_NIJ, enabled=self.checkpointing)
        return m_NSLM, z_NIJZ, None if self.linear is None else self.linear(m_NSLM[:, 0])


class TemplateStack(nn.Module):
    """Computes an update of the pair map from templates: blocks, then attention of each pair over the templates."""

    def __init__(self, config: OpenFoldConfig) -> None:
        super().__init__()
        channels = config.template_channels
        self.checkpointing = config.checkpointing
        self.linear = Linear(TEMPLATE_PAIR_FEATURES, channels, init="relu")
        self.pair_stack = nn.ModuleList(
            PairBlock(
                channels,
                channels,
                config.template_head_channels,
                config.pair_heads,
                config.template_transition_factor,
                config.pair_dropout,
                attention_first=True,
            )
            for _ in range(config.template_blocks)
        )
        self.layer_norm = nn.LayerNorm(channels)
        self.pointwise = Attention(
            config.pair_channels, channels, config.template_head_channels, config.pair_heads, gated=False
        )

    def forward(self, features_NTIJ: Tensor, z_NIJZ: Tensor, mask_NIJ: Tensor, template_mask_NT: Tensor) -> Tensor:
        """Return the update of z; zero for samples without a template."""
        N, T = features_NTIJ.shape[:2]
        t = self.linear(features_NTIJ).flatten(0, 1)
        mask = mask_NIJ.repeat_interleave(T, 0)
        for block in self.pair_stack:
            t = run_checkpointed(block, t, mask, enabled=self.checkpointing)
        key = self.layer_norm(t).unflatten(0, (N, T)).permute(0, 2, 3, 1, 4)
        bias_NT = compute_mask_bias(template_mask_NT)[:, None, None, :, None]
        update = self.pointwise(z_NIJZ[..., None, :], key, bias_NT)[..., 0, :]
        has_template_N = (template_mask_NT.sum(-1) > 0).to(update.dtype)
        return update * has_template_N[:, None, None, None]  # type: ignore[no-any-return]


TEMPLATE_PAIR_FEATURES = 88  # 39 distances, pair mask, two residue types of 22, three unused, backbone mask
TEMPLATE_ANGLE_FEATURES = 57  # residue type of 22, seven torsions and their alternatives, seven masks


def compute_pair_mask(mask_NL: Tensor) -> Tensor:
    """Compute the pair mask: 1 where both residues exist."""
    return mask_NL[:, :, None] * mask_NL[:, None, :]


def encode_distances(position_NL3: Tensor, low: float, high: float, bins: int, end: float) -> Tensor:
    """Encode distances one-hot (N, L, L, bins).

    Bin k begins at low + k (high - low) / (bins - 1).

    The last bin ends at ``end``. Distances below ``low`` or beyond ``end`` are in no bin.
    """
    edges = torch.linspace(low, high, bins, device=position_NL3.device).square()
    squared = (position_NL3[:, :, None] - position_NL3[:, None]).square().sum(-1, keepdim=True)
    upper = torch.cat([edges[1:], edges.new_full((1,), end * end)])
    return ((squared > edges) & (squared < upper)).to(position_NL3.dtype)
