"""Hyperparameters of OpenFold. Defaults are the MLPerf HPC benchmark's. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from mlhpc.suite.config import Hyperparameters, RunConfig
from mlhpc.suite.errors import InputError
from mlhpc.workloads.openfold import DESCRIPTOR


class OpenFoldConfig(Hyperparameters, frozen=True, kw_only=True):
    """Sample shape, widths and depths, loss weights and schedule.

    One class for all sizes: ``max_templates`` 0 omits the template stack; all else is only smaller.
    """

    crop_size: Annotated[int, Meta(ge=4), "residues of a training sample; longer chains are cropped at random"] = 256
    val_max_sequence_length: Annotated[int, Meta(ge=4), "a longer validation chain is refused"] = 700
    max_msa_clusters: Annotated[int, Meta(ge=1), "rows of the main alignment, the sequence itself first"] = 124
    max_extra_msa: Annotated[int, Meta(ge=1), "rows of the extra alignment"] = 1024
    max_templates: Annotated[int, Meta(ge=0), "0: no template stack"] = 4
    num_recycling_iters: Annotated[
        int, Meta(ge=0), "training draws 0 to this for each sample, evaluation uses this"
    ] = 3

    msa_channels: Annotated[int, Meta(ge=1)] = 256
    pair_channels: Annotated[int, Meta(ge=1)] = 128
    single_channels: Annotated[int, Meta(ge=1)] = 384
    extra_msa_channels: Annotated[int, Meta(ge=1)] = 64
    template_channels: Annotated[int, Meta(ge=1)] = 64
    msa_heads: Annotated[int, Meta(ge=1)] = 8
    msa_head_channels: Annotated[int, Meta(ge=1)] = 32
    extra_msa_head_channels: Annotated[int, Meta(ge=1)] = 8
    pair_heads: Annotated[int, Meta(ge=1)] = 4
    pair_head_channels: Annotated[int, Meta(ge=1)] = 32
    template_head_channels: Annotated[int, Meta(ge=1)] = 16
    outer_channels: Annotated[int, Meta(ge=1), "of the outer product mean"] = 32
    transition_factor: Annotated[int, Meta(ge=1)] = 4
    template_transition_factor: Annotated[int, Meta(ge=1)] = 2
    evoformer_blocks: Annotated[int, Meta(ge=1, le=1000)] = 48
    extra_msa_blocks: Annotated[int, Meta(ge=1, le=1000)] = 4
    template_blocks: Annotated[int, Meta(ge=1, le=1000)] = 2
    structure_iterations: Annotated[int, Meta(ge=1, le=1000)] = 8
    ipa_heads: Annotated[int, Meta(ge=1)] = 12
    ipa_channels: Annotated[int, Meta(ge=1)] = 16
    ipa_query_points: Annotated[int, Meta(ge=1)] = 4
    ipa_value_points: Annotated[int, Meta(ge=1)] = 8
    angle_channels: Annotated[int, Meta(ge=1)] = 128
    plddt_channels: Annotated[int, Meta(ge=1)] = 128
    msa_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.15
    pair_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.25
    structure_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    checkpointing: Annotated[bool, "recompute each block in the backward pass instead of storing it"] = False

    balanced_batches: Annotated[
        bool, "split each global batch over the ranks by work, and make a batch as long as its longest crop"
    ] = False

    masked_msa_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.15
    fape_loss_weight: Annotated[float, Meta(ge=0)] = 1.0
    fape_backbone_weight: Annotated[float, Meta(ge=0)] = 0.5
    fape_sidechain_weight: Annotated[float, Meta(ge=0)] = 0.5
    fape_clamp_probability: Annotated[
        float, Meta(ge=0, le=1), "of clamping a sample's backbone FAPE at 10 angstrom"
    ] = 0.9
    supervised_chi_loss_weight: Annotated[float, Meta(ge=0)] = 1.0
    chi_weight: Annotated[float, Meta(ge=0)] = 0.5
    angle_norm_weight: Annotated[float, Meta(ge=0)] = 0.01
    distogram_loss_weight: Annotated[float, Meta(ge=0)] = 0.3
    masked_msa_loss_weight: Annotated[float, Meta(ge=0)] = 2.0
    plddt_loss_weight: Annotated[float, Meta(ge=0)] = 0.01

    learning_rate: Annotated[float, Meta(gt=0)] = 1e-3
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    warmup_init: Annotated[float, Meta(ge=0), "rate of the first step if there is a warm-up"] = 1e-5
    decay_steps: Annotated[tuple[int, ...], "the rate falls by decay_factor at each of these steps"] = ()
    decay_factor: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    adam_beta_1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    adam_beta_2: Annotated[float, Meta(ge=0, lt=1)] = 0.999
    adam_eps: Annotated[float, Meta(gt=0)] = 1e-6
    gradient_clip_norm: Annotated[float, Meta(gt=0)] = 0.1
    swa_decay_rate: Annotated[float, Meta(ge=0, lt=1), "decay of the averaged weights, which are evaluated"] = 0.9
    init_checkpoint: Annotated[
        str | None, "file of the first weights, in workloads/openfold or by an absolute path; null: random weights"
    ] = None

    def __post_init__(self) -> None:
        steps = list(self.decay_steps)
        if steps != sorted(set(steps)) or any(step < self.warmup_steps for step in steps):
            raise InputError(
                f"decay_steps is {steps}, expected increasing steps, none before warmup_steps {self.warmup_steps}"
            )

    def collect_logged(self, config: RunConfig, ranks: int = 1) -> dict[str, Any]:
        """Collect what the log states.

        Keys are the reference's. Target, samples and evaluation interval come from the card.
        """
        card = DESCRIPTOR.card().size(config.size)
        return {
            "global_batch_size": config.global_batch_size,
            "target_avg_lddt_ca_value": card.threshold,
            "val_max_sequence_length": self.val_max_sequence_length,
            "val_every_iters": card.eval_every_steps or 0,
            "model_parameters_count": card.model_parameters,
            "init_checkpoint_sha256sum": compute_checkpoint_sha256(self.init_checkpoint),
            "train_sequence_crop_size": self.crop_size,
            "num_recycling_iters": self.num_recycling_iters,
            "max_msa_clusters": self.max_msa_clusters,
            "max_extra_msa": self.max_extra_msa,
            "templates_enabled": self.max_templates > 0,
            "max_templates": self.max_templates,
            "fape_loss_weight": self.fape_loss_weight,
            "fape_loss_backbone_weight": self.fape_backbone_weight,
            "fape_loss_sidechain_weight": self.fape_sidechain_weight,
            "supervised_chi_loss_weight": self.supervised_chi_loss_weight,
            "distogram_loss_weight": self.distogram_loss_weight,
            "masked_msa_loss_weight": self.masked_msa_loss_weight,
            "plddt_loss_weight": self.plddt_loss_weight,
            "opt_name": "Adam",
            "opt_base_learning_rate": self.learning_rate,
            "opt_learning_rate_warmup_init": self.warmup_init,
            "opt_learning_rate_warmup_steps": self.warmup_steps,
            "opt_learning_rate_decay_boundary_steps": list(self.decay_steps),
            "opt_learning_rate_decay_factor": self.decay_factor,
            "opt_adam_beta_1": self.adam_beta_1,
            "opt_adam_beta_2": self.adam_beta_2,
            "opt_adam_epsilon": self.adam_eps,
            "opt_weight_decay": 0,
            "opt_amsgrad": False,
            "opt_gradient_clipping": True,
            "opt_gradient_clip_norm": self.gradient_clip_norm,
            "swa_enabled": self.swa_decay_rate > 0,
            "swa_decay_rate": self.swa_decay_rate,
            "balanced_batches": self.balanced_batches,
        }


def find_checkpoint(name: str) -> Path:
    """Return the path of a checkpoint: a file in this package, or an absolute path."""
    return Path(__file__).parent / name


def compute_checkpoint_sha256(name: str | None) -> str:
    """Compute the sum of the file, hexadecimal; empty without a file."""
    return hashlib.sha256(find_checkpoint(name).read_bytes()).hexdigest() if name is not None else ""
