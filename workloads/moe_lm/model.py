"""The decoder: RMS norms, causal attention with rotary positions, dense or MoE FFNs. Only MoE layers are parallel.

N samples, S positions, V bytes, D width, A heads, T = N * S tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.workloads.moe.experts import compute_activation
from mlhpc.workloads.moe.layer import MoELayer
from mlhpc.workloads.moe.mesh import ExpertMesh
from mlhpc.workloads.moe_lm.config import VOCABULARY, MoELMConfig

ROTARY_BASE = 10_000.0  # arXiv:2104.09864
INIT_STD = 0.02


class MoELanguageModel(nn.Module):
    """Maps bytes (N, S) to logits of the next byte (N, S, V). Also returns the sum of the routers' auxiliary losses.

    A stage of a pipeline lacks some modules, which are None. Without the embedding it takes what the stage before
    returns; without the head it returns the stream (N, S, D) in place of logits.
    """

    embedding: nn.Embedding | None
    norm: nn.RMSNorm | None
    head: nn.Linear | None

    def __init__(self, config: MoELMConfig, mesh: ExpertMesh | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config, layer, mesh) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for module in (self.embedding, self.head):
            nn.init.normal_(module.weight, std=INIT_STD)

    def forward(self, x: Tensor, auxiliary: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute logits and auxiliary loss, from bytes or from the stream and the loss of the blocks before."""
        x_NSD = x if self.embedding is None else self.embedding(x.long())
        auxiliary = torch.zeros((), device=x_NSD.device) if auxiliary is None else auxiliary
        for block in self.blocks:
            if block is not None:
                x_NSD, loss = block(x_NSD)
                auxiliary = auxiliary + loss
        if self.head is None or self.norm is None:
            return x_NSD, auxiliary
        return self.head(self.norm(x_NSD)), auxiliary

    def moe_layers(self) -> dict[str, MoELayer]:
        """Return the MoE layers by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, MoELayer)}


class Block(nn.Module):
    """Attention and FFN, each after a norm and added to the stream."""

    def __init__(self, config: MoELMConfig, layer: int, mesh: ExpertMesh | None) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = Attention(config.width, config.heads, config.layers)
        self.ffn = MoELayer(config.width, config.moe, mesh) if config.has_experts(layer) else DenseFFN(config)

    def forward(self, x_NSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new stream and the auxiliary loss (0 without experts)."""
        x_NSD = x_NSD + self.attention(self.attention_norm(x_NSD))
        normed_NSD = self.ffn_norm(x_NSD)
        if isinstance(self.ffn, MoELayer):
            out = self.ffn(normed_NSD.flatten(0, 1))
            return x_NSD + out.y_TD.view_as(x_NSD), out.auxiliary_loss
        return x_NSD + self.ffn(normed_NSD), x_NSD.new_zeros(())


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.qkv.weight, std=INIT_STD)
        # as in GPT-2: each of the 2 x layers branches adds to the stream, whose variance must not grow with depth
        nn.init.normal_(self.out.weight, std=INIT_STD / math.sqrt(2 * layers))

    def forward(self, x_NSD: Tensor) -> Tensor:
        """Map (N, S, D) to (N, S, D)."""
        n, s, _ = x_NSD.shape
        qkv = self.qkv(x_NSD).view(n, s, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)  # with as many heads as qkv has
        q_NASX, k_NASX, v_NASX = qkv.unbind(0)
        out_NASX = F.scaled_dot_product_attention(
            add_rotary_positions(q_NASX), add_rotary_positions(k_NASX), v_NASX, is_causal=True
        )
        result: Tensor = self.out(out_NASX.transpose(1, 2).flatten(2))
        return result


class DenseFFN(nn.Module):
    """The FFN of blocks without experts, and of the dense twin."""

    def __init__(self, config: MoELMConfig) -> None:
        super().__init__()
        self.activation = config.moe.activation
        self.up = nn.Linear(config.width, config.dense_hidden, bias=False)
        self.gate = nn.Linear(config.width, config.dense_hidden, bias=False) if self.activation == "swiglu" else None
        self.down = nn.Linear(config.dense_hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        gate = None if self.gate is None else self.gate(x)
        result: Tensor = self.down(compute_activation(self.up(x), gate, self.activation))
        return result


def add_rotary_positions(x_NASX: Tensor) -> Tensor:
    """Apply rotary positions: rotate each pair (i, i + X/2) by position * base^(-2i/X)."""
    s, x = x_NASX.shape[-2:]
    frequency = ROTARY_BASE ** (-torch.arange(0, x, 2, device=x_NASX.device, dtype=torch.float32) / x)
    # float32: bfloat16 has 8 bits and would round positions above 256
    angle_SX = torch.arange(s, device=x_NASX.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle_SX.cos().to(x_NASX.dtype), angle_SX.sin().to(x_NASX.dtype)
    first, second = x_NASX.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
