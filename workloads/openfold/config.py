"""Hyperparameters of OpenFold. Defaults are the MLPerf HPC benchmark's. No torch."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from suite.config import Hyperparameters
from suite.errors import InputError


class OpenFoldConfig(Hyperparameters):
    """Sample shape, widths and depths, loss weights and schedule.

    One class for all sizes: ``max_templates`` 0 omits the template stack; all else is only smaller.
    """

    crop_size: int = Field(256, ge=4, description="residues of a training sample; longer chains are cropped at random")
    val_max_sequence_length: int = Field(700, ge=4, description="a longer validation chain is refused")
    max_msa_clusters: int = Field(124, ge=1, description="rows of the main alignment, the sequence itself first")
    max_extra_msa: int = Field(1024, ge=1, description="rows of the extra alignment")
    max_templates: int = Field(4, ge=0, description="0: no template stack")
    num_recycling_iters: int = Field(
        3, ge=0, description="training draws 0 to this for each sample, evaluation uses this"
    )

    msa_channels: int = Field(256, ge=1)
    pair_channels: int = Field(128, ge=1)
    single_channels: int = Field(384, ge=1)
    extra_msa_channels: int = Field(64, ge=1)
    template_channels: int = Field(64, ge=1)
    msa_heads: int = Field(8, ge=1)
    msa_head_channels: int = Field(32, ge=1)
    extra_msa_head_channels: int = Field(8, ge=1)
    pair_heads: int = Field(4, ge=1)
    pair_head_channels: int = Field(32, ge=1)
    template_head_channels: int = Field(16, ge=1)
    outer_channels: int = Field(32, ge=1, description="of the outer product mean")
    transition_factor: int = Field(4, ge=1)
    template_transition_factor: int = Field(2, ge=1)
    evoformer_blocks: int = Field(48, ge=1)
    extra_msa_blocks: int = Field(4, ge=1)
    template_blocks: int = Field(2, ge=1)
    structure_iterations: int = Field(8, ge=1)
    ipa_heads: int = Field(12, ge=1)
    ipa_channels: int = Field(16, ge=1)
    ipa_query_points: int = Field(4, ge=1)
    ipa_value_points: int = Field(8, ge=1)
    angle_channels: int = Field(128, ge=1)
    plddt_channels: int = Field(128, ge=1)
    msa_dropout: float = Field(0.15, ge=0, lt=1)
    pair_dropout: float = Field(0.25, ge=0, lt=1)
    structure_dropout: float = Field(0.1, ge=0, lt=1)
    checkpointing: bool = Field(False, description="recompute each block in the backward pass instead of storing it")

    balanced_batches: bool = Field(
        False,
        description="split each global batch over the ranks by work, and make a batch as long as its longest crop",
    )

    masked_msa_fraction: float = Field(0.15, ge=0, lt=1)
    fape_loss_weight: float = Field(1.0, ge=0)
    fape_backbone_weight: float = Field(0.5, ge=0)
    fape_sidechain_weight: float = Field(0.5, ge=0)
    fape_clamp_probability: float = Field(
        0.9, ge=0, le=1, description="of clamping a sample's backbone FAPE at 10 angstrom"
    )
    supervised_chi_loss_weight: float = Field(1.0, ge=0)
    chi_weight: float = Field(0.5, ge=0)
    angle_norm_weight: float = Field(0.01, ge=0)
    distogram_loss_weight: float = Field(0.3, ge=0)
    masked_msa_loss_weight: float = Field(2.0, ge=0)
    plddt_loss_weight: float = Field(0.01, ge=0)

    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(0, ge=0)
    warmup_init: float = Field(1e-5, ge=0, description="rate of the first step if there is a warm-up")
    decay_steps: tuple[int, ...] = Field((), description="the rate falls by decay_factor at each of these steps")
    decay_factor: float = Field(0.5, gt=0, lt=1)
    adam_beta_1: float = Field(0.9, ge=0, lt=1)
    adam_beta_2: float = Field(0.999, ge=0, lt=1)
    adam_eps: float = Field(1e-6, gt=0)
    gradient_clip_norm: float = Field(0.1, gt=0)
    swa_decay_rate: float = Field(0.9, ge=0, lt=1, description="decay of the averaged weights, which are evaluated")
    init_checkpoint_sha256sum: str = Field(
        "", description="of the weights training starts from; empty: own initialisation"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        steps = list(self.decay_steps)
        if steps != sorted(set(steps)) or any(step < self.warmup_steps for step in steps):
            raise InputError("decay_steps must increase and lie behind warmup_steps")
        return self


def learning_rate(config: OpenFoldConfig, step: int) -> float:
    """Compute the rate of a 0-based step: linear warm-up from ``warmup_init``, then constant between decay steps.

    The last step of the warm-up has the base rate, as in the reference; a warm-up of one step has ``warmup_init``.
    """
    if step < config.warmup_steps:
        share = step / max(config.warmup_steps - 1, 1)
        return round(config.warmup_init + share * (config.learning_rate - config.warmup_init), 10)
    return config.learning_rate * config.decay_factor ** sum(step >= boundary for boundary in config.decay_steps)
