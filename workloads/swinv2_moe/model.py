"""SwinV2 with dense or MoE FFNs (arXiv:2111.09883, arXiv:2206.03382). Parallelism exists only inside MoE layers.

N samples, R tokens along a side, W windows per sample, L tokens per window. C width, A heads, X width of a head, T = N
* R * R.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.workloads.moe.layer import MoELayer
from mlhpc.workloads.moe.mesh import ExpertMesh
from mlhpc.workloads.moe.router import Router
from mlhpc.workloads.swinv2_moe.config import BIAS_HIDDEN, Block, SwinV2MoEConfig

INIT_STD = 0.02
FIRST_SCALE = 10.0  # of the cosine attention; its bound is 1 / tau with tau >= 0.01
MAX_SCALE = 100.0
MAX_BIAS = 16.0  # 16 sigmoid(.) keeps the position bias in the range of the scores
LEAST_NORM = 1e-12  # norm of a query or key
LOG_RANGE = 8.0  # offsets are scaled to 8 at the window's edge before the logarithm


class SwinV2MoE(nn.Module):
    """Maps images of bytes, (N, P, P) or (N, channels, P, P), to logits (N, classes) and the auxiliary loss."""

    def __init__(self, config: SwinV2MoEConfig, mesh: ExpertMesh | None = None) -> None:
        super().__init__()
        self.patches = nn.Conv2d(config.channels, config.embed, config.patch, stride=config.patch)
        self.patch_norm = nn.LayerNorm(config.embed)
        blocks = list(config.blocks())
        rates = [config.drop_path * number / max(1, len(blocks) - 1) for number in range(len(blocks))]
        self.stages = nn.ModuleList(
            nn.ModuleList(
                SwinBlock(block, rate, mesh) for block, rate in zip(blocks, rates, strict=True) if block.stage == stage
            )
            for stage in range(len(config.depths))
        )
        self.merges = nn.ModuleList(PatchMerging(config.embed << stage) for stage in range(len(config.depths) - 1))
        self.norm = nn.LayerNorm(config.final_width)
        self.head = nn.Linear(config.final_width, len(config.classes))
        for module in self.modules():
            _initialise(module)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits and auxiliary loss."""
        x_NRRC = self.patches(convert_images(images, self.patches.weight.dtype)).permute(0, 2, 3, 1)
        x_NRRC = self.patch_norm(x_NRRC)
        auxiliary = torch.zeros((), device=x_NRRC.device)
        for number, stage in enumerate(self.stages):
            if number:
                x_NRRC = self.merges[number - 1](x_NRRC)
            for block in stage.children():
                x_NRRC, loss = block(x_NRRC)
                auxiliary = auxiliary + loss
        return self.head(self.norm(x_NRRC).mean(dim=(1, 2))), auxiliary

    def moe_layers(self) -> dict[str, MoELayer]:
        """Return the MoE layers by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, MoELayer)}


class SwinBlock(nn.Module):
    """Window attention and FFN; the output of each is normalised, then added to the stream (residual post-norm)."""

    def __init__(self, shape: Block, drop_path: float, mesh: ExpertMesh | None) -> None:
        super().__init__()
        self.attention = WindowAttention(shape.width, shape.heads, shape.resolution, shape.window, shape.shift)
        self.attention_norm, self.ffn_norm = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.ffn: DenseFFN | MoELayer
        if shape.experts is None:
            self.ffn = DenseFFN(shape.width, shape.hidden)
        else:
            self.ffn = MoELayer(shape.width, shape.experts, mesh)
        self.drop_path = drop_path

    def forward(self, x_NRRC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new stream and the auxiliary loss (0 without experts)."""
        x_NRRC = x_NRRC + self._dropped(self.attention_norm(self.attention(x_NRRC)))
        if isinstance(self.ffn, MoELayer):
            out = self.ffn(x_NRRC.flatten(0, 2))
            y_NRRC, loss = out.y_TD.view_as(x_NRRC), out.auxiliary_loss
        else:
            y_NRRC, loss = self.ffn(x_NRRC), x_NRRC.new_zeros(())
        return x_NRRC + self._dropped(self.ffn_norm(y_NRRC)), loss

    def _dropped(self, x_NRRC: Tensor) -> Tensor:
        """Apply stochastic depth, arXiv:1603.09382: drop the branch of a whole sample and scale the others up."""
        if not self.training or not self.drop_path:
            return x_NRRC
        kept = torch.rand(len(x_NRRC), 1, 1, 1, device=x_NRRC.device) >= self.drop_path
        return x_NRRC * (kept.to(x_NRRC.dtype) / (1 - self.drop_path))


class _UnitVectors(torch.autograd.Function):
    """`F.normalize` of the last dimension, with half the passes over memory in the backward pass."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        inverse = x.norm(dim=-1, keepdim=True).clamp_min_(LEAST_NORM).reciprocal_()
        return x * inverse, inverse

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        context.save_for_backward(*output)
        context.mark_non_differentiable(output[1])

    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Any) -> Tensor:
        y, inverse = context.saved_tensors
        along = torch.linalg.vecdot(gradient, y).unsqueeze(-1)
        # the derivative of x / |x|: what is perpendicular to y, over |x|
        return torch.addcmul(gradient, y, along, value=-1).mul_(inverse)


def compute_unit_vectors(x: Tensor) -> Tensor:
    """Return x over the norm of its last dimension; vectors shorter than 1e-12 stay shorter than 1."""
    return _UnitVectors.apply(x)[0]  # type: ignore[no-any-return, no-untyped-call]


def compute_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Compute the attention of queries (N, B, L, d) with a bias (B, L, L) that is trained, unscaled.

    On a CPU torch has no fused kernel with such a bias. Its general kernel also looks for rows without a key.
    """
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, bias, scale=1.0)
    return (q @ k.transpose(-1, -2)).add_(bias).softmax(-1) @ v


class WindowAttention(nn.Module):
    """Self-attention inside windows of a (shifted) grid: (N, R, R, C) to (N, R, R, C).

    Scores are cosines times a learned scale per head, plus a position bias. Tokens on both sides of the shift's seam
    are masked.
    """

    mask_WLL: Tensor | None

    def __init__(self, width: int, heads: int, resolution: int, window: int, shift: int) -> None:
        super().__init__()
        self.head_width, self.window, self.shift = width // heads, window, shift
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.log_scale_A11 = nn.Parameter(torch.full((heads, 1, 1), math.log(FIRST_SCALE)))
        self.position_bias = PositionBias(heads, window)
        self.out = nn.Linear(width, width)
        self.register_buffer(
            "mask_WLL", compute_shift_mask(resolution, window, shift) if shift else None, persistent=False
        )

    def forward(self, x_NRRC: Tensor) -> Tensor:
        """Compute the update of the stream."""
        n, resolution = x_NRRC.shape[:2]
        windows = (resolution // self.window) ** 2
        x_NWLC = split_windows(x_NRRC.roll((-self.shift, -self.shift), (1, 2)) if self.shift else x_NRRC, self.window)
        # keys have no bias (SwinV2)
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        qkv = F.linear(x_NWLC, self.qkv.weight, bias)  # with as many heads as qkv has
        qkv = qkv.view(n, windows, self.window**2, 3, -1, self.head_width)
        # windows and heads are one dimension, so that the bias of a window and head is not repeated for every sample
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).flatten(2, 3).unbind(0)
        scale_A11 = self.log_scale_A11.clamp(max=math.log(MAX_SCALE)).exp()
        q = compute_unit_vectors(q) * scale_A11.repeat(windows, 1, 1)
        # the scale and the position bias are float32 and promote bfloat16: attention needs one type
        y = compute_attention(q.to(v.dtype), compute_unit_vectors(k).to(v.dtype), v, self._bias(windows).to(v.dtype))
        y_NWLC = y.view(n, windows, -1, self.window**2, self.head_width).transpose(2, 3).flatten(3)
        y_NRRC = join_windows(self.out(y_NWLC), resolution)
        return y_NRRC.roll((self.shift, self.shift), (1, 2)) if self.shift else y_NRRC

    def _bias(self, windows: int) -> Tensor:
        """Compute the position bias plus the shift's mask of every window and head, (W * A, L, L)."""
        bias_ALL: Tensor = self.position_bias()
        if self.mask_WLL is None:
            return torch.tile(bias_ALL, (windows, 1, 1))
        mask_WLL: Tensor = self.mask_WLL
        return torch.flatten(mask_WLL[:, None] + bias_ALL, 0, 1)


class PositionBias(nn.Module):
    """The log-spaced continuous position bias (A, L, L). A small network computes it from the offset between two tokens
    of a window.

    ``trained_window`` scales the offsets to the window the weights were trained with, so that they apply to another
    window.
    """

    offsets_O2: Tensor
    index_LL: Tensor

    def __init__(self, heads: int, window: int, trained_window: int | None = None) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, BIAS_HIDDEN)
        self.out = nn.Linear(BIAS_HIDDEN, heads, bias=False)
        self.register_buffer(
            # they follow from the window, so a checkpoint need not hold them
            "offsets_O2",
            compute_log_offsets(window, trained_window or window).float(),
            persistent=False,
        )
        self.register_buffer("index_LL", compute_offset_index(window), persistent=False)

    def forward(self) -> Tensor:
        """Compute the bias of every pair of tokens."""
        table_OA = MAX_BIAS * self.out(F.relu(self.hidden(self.offsets_O2))).sigmoid()
        result: Tensor = table_OA[self.index_LL].permute(2, 0, 1)
        return result


class PatchMerging(nn.Module):
    """Merges 2 x 2 tokens into one of twice the width; normalised after the reduction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(2 * width)

    def forward(self, x_NRRC: Tensor) -> Tensor:
        """Map (N, R, R, C) to (N, R/2, R/2, 2C)."""
        n, resolution, _, width = x_NRRC.shape
        half = resolution // 2
        square = x_NRRC.view(n, half, 2, half, 2, width).permute(0, 1, 3, 4, 2, 5)
        result: Tensor = self.norm(self.reduction(square.flatten(3)))
        return result


class DenseFFN(nn.Module):
    """The FFN of blocks without experts."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C) to (..., C)."""
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


def convert_images(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale bytes to [-1.73, 1.73], variance 1 if they were uniform, and add a channel dimension."""
    if images.ndim == 3:
        images = images[:, None]
    return (images.to(dtype) - 127.5) * (math.sqrt(12) / 256)


def split_windows(x_NRRC: Tensor, window: int) -> Tensor:
    """Rearrange (N, R, R, C) to (N, W, L, C), windows and their tokens row by row."""
    n, resolution, _, width = x_NRRC.shape
    side = resolution // window
    x = x_NRRC.view(n, side, window, side, window, width).transpose(2, 3)
    return x.reshape(n, side * side, window * window, width)


def join_windows(x_NWLC: Tensor, resolution: int) -> Tensor:
    """Undo `split_windows`."""
    n, windows, tokens, width = x_NWLC.shape
    side, window = math.isqrt(windows), math.isqrt(tokens)
    x = x_NWLC.view(n, side, side, window, window, width).transpose(2, 3)
    return x.reshape(n, resolution, resolution, width)


def compute_shift_mask(resolution: int, window: int, shift: int) -> Tensor:
    """Compute the mask (W, L, L) of the shifted grid: -inf between tokens that only the shift joined, else 0.

    Along each axis the last window has two regions. One has its own tokens, the other has tokens from the opposite
    edge.
    """
    side = torch.arange(resolution)
    region = (side >= resolution - window).long() + (side >= resolution - shift).long()
    both = (3 * region[:, None] + region)[None, :, :, None]
    region_WL = split_windows(both, window)[0, :, :, 0]
    different = region_WL[:, :, None] != region_WL[:, None, :]
    return torch.zeros(different.shape).masked_fill(different, -math.inf)


def compute_log_offsets(window: int, trained_window: int) -> Tensor:
    """Compute ((2 window - 1)^2, 2): offsets along both axes, sign(d) log2(1 + |8 d / (trained_window - 1)|) / 3."""
    side = torch.arange(1 - window, window, dtype=torch.float64) * (LOG_RANGE / max(1, trained_window - 1))
    logs = side.sign() * (1 + side.abs()).log2() / math.log2(LOG_RANGE)
    return torch.stack(torch.meshgrid(logs, logs, indexing="ij"), dim=-1).view(-1, 2)


def compute_offset_index(window: int) -> Tensor:
    """Compute (L, L): the row of `compute_log_offsets` for each pair of tokens."""
    place = torch.arange(window)
    apart = place[:, None] - place[None, :] + window - 1
    rows = apart[:, None, :, None] * (2 * window - 1) + apart[None, :, None, :]
    return rows.reshape(window * window, window * window)


def _initialise(module: nn.Module) -> None:
    """Normal weights and zero biases; a block begins as the identity (arXiv:2111.09883). MoE layers keep their own."""
    for child in module.children():
        if isinstance(child, nn.Linear | nn.Conv2d) and not isinstance(module, Router):
            nn.init.trunc_normal_(child.weight, std=INIT_STD)
            if child.bias is not None:
                nn.init.zeros_(child.bias)
    if isinstance(module, SwinBlock):
        # the norm is the last step of a branch: weight zero makes the branch zero
        nn.init.zeros_(module.attention_norm.weight)
        nn.init.zeros_(module.ffn_norm.weight)
