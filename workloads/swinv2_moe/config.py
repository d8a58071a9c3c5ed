"""Hyperparameters of SwinV2-MoE, and its parameters, FLOPs and bytes in closed form. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, structs

from mlhpc.suite.config import RunConfig
from mlhpc.suite.errors import InputError
from mlhpc.suite.workload import GRADIENT_BYTES, UPDATE_FLOPS, Work
from mlhpc.workloads.moe.config import Beta, Layout, MoEConfig, Training

# regimes of Gray-Scott, named as Pearson did, in the order of the labels
CLASSES = ("delta", "theta", "kappa", "mu", "lambda")
BIAS_HIDDEN = 512  # hidden width of the position bias's network, arXiv:2111.09883
COSINE_WIDTH = 256  # of the cosine router, workloads/moe/router.py (which needs torch)


@dataclass(frozen=True)
class Block:
    """Shape of one transformer block. ``resolution`` and ``window``: tokens along a side; no ``experts``: dense FFN."""

    stage: int
    index: int
    width: int
    heads: int
    resolution: int
    window: int
    shift: int
    hidden: int
    experts: MoEConfig | None

    @property
    def tokens(self) -> int:
        """Number of tokens per sample."""
        return self.resolution**2


class SwinV2MoEConfig(Training, frozen=True, kw_only=True):
    """SwinV2 (arXiv:2111.09883) with experts in the FFN of every second block of ``moe_stages``, as Tutel's SwinV2-MoE.

    ``moe.hidden`` is the hidden width in the first of ``moe_stages``; it doubles with the width in later ones. ``dense:
    true`` is the dense model. A window never exceeds its stage's resolution; where it is equal, windows do not shift.
    """

    pixels: Annotated[int, Meta(ge=8)]
    patch: Annotated[int, Meta(ge=1)] = 4
    window: Annotated[int, Meta(ge=2)]
    embed: Annotated[int, Meta(ge=8)]
    depths: Annotated[tuple[Annotated[int, Meta(ge=1, le=1000)], ...], Meta(min_length=1)]
    heads: Annotated[tuple[int, ...], Meta(min_length=1)]
    mlp_ratio: Annotated[int, Meta(ge=1)] = 4
    channels: Annotated[int, Meta(ge=1)] = 1
    classes: Annotated[tuple[str, ...], Meta(min_length=2), "their names in the order of the labels"] = CLASSES
    moe_stages: Annotated[tuple[int, ...], "1-based stages whose second, fourth, ... block has experts"] = (3, 4)
    drop_path: Annotated[float, Meta(ge=0, lt=1), "of the last block; grows linearly from 0 at the first"] = 0.0
    label_smoothing: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    augmentation: Annotated[bool, "a symmetry of the square and a periodic shift per sample and epoch"] = True
    final_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.01
    weight_decay: Annotated[float, Meta(ge=0), "of matrices; not of biases, norms, scales and position biases"] = 0.05
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    clip_norm: Annotated[float, Meta(gt=0)] = 5.0

    def __post_init__(self) -> None:
        stages = len(self.depths)
        if len(self.heads) != stages:
            raise InputError(
                f"heads has {len(self.heads)} numbers, depths has {stages}: expected one of each per stage"
            )
        if self.pixels % (self.patch << (stages - 1)):
            raise InputError(
                f"pixels is {self.pixels}, expected a multiple of {self.patch << (stages - 1)}: "
                f"patch {self.patch} times 2 for each of the {stages - 1} merges between stages"
            )
        for stage in range(stages):
            resolution, window = self.resolution(stage), min(self.window, self.resolution(stage))
            if resolution % window:
                raise InputError(
                    f"window is {window} tokens, expected a divisor of the {resolution} along a side of "
                    f"stage {stage + 1}"
                )
            if (self.embed << stage) % self.heads[stage]:
                raise InputError(
                    f"heads: the width {self.embed << stage} of stage {stage + 1} is not a multiple of its "
                    f"{self.heads[stage]} heads; change heads or embed"
                )
        if not self.dense and not any(block.experts for block in self.blocks()):
            raise InputError(
                f"moe_stages is {list(self.moe_stages)}, which gives no block experts; name a stage with two blocks "
                "or more, or set dense: true for a model without experts"
            )

    def resolution(self, stage: int) -> int:
        """Return the tokens along a side of a 0-based stage."""
        return self.pixels // self.patch >> stage

    def blocks(self) -> Iterator[Block]:
        """Return all blocks in order."""
        first = min(self.moe_stages, default=1)
        for stage, depth in enumerate(self.depths):
            width, resolution = self.embed << stage, self.resolution(stage)
            window = min(self.window, resolution)
            for index in range(depth):
                experts = None
                if not self.dense and stage + 1 in self.moe_stages and index % 2:
                    experts = structs.replace(self.moe, hidden=self.moe.hidden << (stage + 1 - first))
                # a window as large as the grid has nothing to shift
                shift = window // 2 if index % 2 and window < resolution else 0
                hidden = self.mlp_ratio * width
                yield Block(stage, index, width, self.heads[stage], resolution, window, shift, hidden, experts)

    @property
    def final_width(self) -> int:
        """Return the width of the last stage."""
        return self.embed << (len(self.depths) - 1)

    def collect_logged(self, config: RunConfig, ranks: int = 1) -> dict[str, Any]:
        """Collect the hyperparameters that the log states: those of the model; MoE layers and training have their
        own.
        """
        return {
            "global_batch_size": config.global_batch_size,
            "image_size": self.pixels,
            "opt_gradient_clip_norm": self.clip_norm,
            "label_smoothing": self.label_smoothing,
            "drop_path": self.drop_path,
            "augmentation": self.augmentation,
            **self.collect_training(config, ranks),
        }


def parameter_count(config: SwinV2MoEConfig, *, active: bool = False) -> int:
    """Count trainable parameters of the whole model, or with ``active`` the parameters one token uses."""
    # patch embedding: weights, bias and a norm's two vectors
    total = config.patch**2 * config.channels * config.embed + 3 * config.embed
    for stage in range(len(config.depths) - 1):
        width = config.embed << stage
        # patch merging: 4 C to 2 C without bias, and a norm over 2 C
        total += 8 * width**2 + 4 * width
    for block in config.blocks():
        width = block.width
        # query, key, value and output; biases of three of them (keys have none); a scale per head; the position bias
        attention = 4 * width**2 + 3 * width + block.heads + BIAS_HIDDEN * (3 + block.heads)
        # two norms
        total += attention + 4 * width + _ffn_parameters(block, active=active)
    # the last norm and the classifier
    return total + config.final_width * (2 + len(config.classes)) + len(config.classes)


def compute_work(
    config: SwinV2MoEConfig, *, global_batch_size: int, element_bytes: int, layout: Layout | None = None
) -> Work:
    """Compute FLOPs and compulsory bytes of training on one sample (docs/swinv2_moe.md lists what is counted).

    Without ``layout``: one rank. Executed beyond the model's FLOPs are the position biases, once per batch. With a
    capacity factor the empty rows of the experts are too.
    """
    traffic: float = (
        config.resolution(0) ** 2 * (config.patch**2 * config.channels + 3 * config.embed) + 2 * config.final_width
    )
    for stage in range(1, len(config.depths)):
        traffic += 6 * config.resolution(stage) ** 2 * (config.embed << stage)
    layout = Layout(global_batch_size) if layout is None else layout
    extra = forward_extra = sent = 0.0
    shares = 0
    for block in config.blocks():
        entries = (2 * block.window - 1) ** 2 / global_batch_size
        extra += entries * BIAS_HIDDEN * (2 * 4.0 + 3 * 2.0 * block.heads)  # offsets need no gradient
        forward_extra += entries * BIAS_HIDDEN * (4.0 + 2.0 * block.heads)
        traffic += block.tokens * _count_moved_elements(block)
        if block.experts is not None:
            empty = layout.computed_rows(block.experts, block.tokens) - block.tokens * block.experts.top_k
            extra += 3 * 2.0 * empty * _count_expert_weights(block)
            forward_extra += 2.0 * empty * _count_expert_weights(block)
            sums = 2.0 * block.tokens * block.experts.top_k * block.width  # of each token's rows, weighted
            extra += sums * (2 if block.experts.dispatch == "capacity" else 1)  # there gradients are masked, too
            forward_extra += sums
            sent += layout.sent_rows(block.experts, block.tokens) * block.width
            shares += _ffn_parameters(block, active=False) - _router(block)
    model = 3 * forward_flops(config) - _patch_flops(config)  # images need no gradient
    parameters = parameter_count(config)
    optimizer = parameters * 4.0 * 9  # read w twice, g, m, v; write g, w, m, v
    return Work(
        model_flops=model,
        executed_flops=model + extra,
        algorithmic_bytes=3.0 * element_bytes * traffic + optimizer / global_batch_size,
        forward_flops=forward_flops(config),
        forward_bytes=element_bytes * traffic,
        optimizer_flops_per_step=UPDATE_FLOPS["AdamW"] * parameters,
        optimizer_bytes_per_step=optimizer,
        all_reduce_bytes_per_step=GRADIENT_BYTES * (parameters - shares + layout.summed_parameters(shares)),
        all_to_all_bytes=4.0 * element_bytes * sent,  # to the experts and back, values and gradients
        forward_extra_flops=forward_extra,
    )


def forward_flops(config: SwinV2MoEConfig) -> float:
    """Compute the FLOPs of inference on one sample, 2 per multiply-add."""
    flops = _patch_flops(config) + 2.0 * config.final_width * len(config.classes)
    for stage in range(1, len(config.depths)):
        # patch merging: 2 W inputs to W outputs, 2 FLOPs per multiply-add
        flops += 4.0 * config.resolution(stage) ** 2 * (config.embed << stage) ** 2
    return flops + sum(
        # scores and their product with the values
        block.tokens * (_matrix_flops(block) + 4.0 * block.window**2 * block.width)
        for block in config.blocks()
    )


def _patch_flops(config: SwinV2MoEConfig) -> float:
    return 2.0 * config.resolution(0) ** 2 * config.patch**2 * config.channels * config.embed


def _count_expert_weights(block: Block) -> int:
    """Count the weights of one expert's matrices."""
    assert block.experts is not None
    return (3 if block.experts.activation == "swiglu" else 2) * block.width * block.experts.hidden


def _ffn_parameters(block: Block, *, active: bool) -> int:
    moe, width = block.experts, block.width
    if moe is None:
        return 2 * width * block.hidden + block.hidden + width
    biases = moe.hidden + width if moe.bias else 0
    return (moe.top_k if active else moe.experts) * (_count_expert_weights(block) + biases) + _router(block)


def _router(block: Block) -> int:
    assert block.experts is not None
    if block.experts.router == "cosine":
        return COSINE_WIDTH * (block.width + block.experts.experts) + 1
    return block.width * block.experts.experts


def _matrix_flops(block: Block) -> float:
    """Compute the FLOPs per token of projections, FFN and router."""
    moe, width = block.experts, block.width
    ffn = 2 * width * block.hidden if moe is None else moe.top_k * _count_expert_weights(block) + _router(block)
    return 2.0 * (4 * width**2 + ffn)


def _count_moved_elements(block: Block) -> float:
    """Count elements moved per token: operators read inputs and write outputs once; scores stay on the chip."""
    moe, width = block.experts, block.width
    attention = 15 * width
    if moe is None:
        return attention + 7 * width + 4 * block.hidden
    return attention + moe.experts + width * (7 + 5 * moe.top_k) + 4 * moe.top_k * moe.hidden
