"""OpenFold as the harness sees it: data, model, optimizer, loss, metric, logged hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from suite.config import RunConfig
from suite.workload import Optimization, Work, Workload
from suite.world import World
from workloads.openfold import DESCRIPTOR, residues
from workloads.openfold.baselines import baselines
from workloads.openfold.config import OpenFoldConfig, learning_rate
from workloads.openfold.data import OpenFoldData, batch_work
from workloads.openfold.losses import losses, sample_lddt_ca
from workloads.openfold.model import OpenFoldNet
from workloads.openfold.work import work

if TYPE_CHECKING:
    from suite.workload import Batch


class OpenFold(Workload):
    """OpenFold for the harness."""

    def __init__(self, config: RunConfig) -> None:
        if config.channels_last:
            raise ValueError("openfold: channels_last: there are no images here to lay out; leave it false")
        self.config = config
        self._own = cast(OpenFoldConfig, config.hyperparameters)
        self._ranks = 1
        self._work: list[float] = []  # of this rank's batches since the last window
        if self._own.init_checkpoint_sha256sum:
            raise ValueError(
                "openfold: hyperparameters.init_checkpoint_sha256sum: starting from the official checkpoint is not "
                "supported; leave it empty for the suite's own initialisation (open division)"
            )

    def dataset(self, split: str, root: Path) -> OpenFoldData:
        """One split; ValueError if the data are damaged, have another form or chains that are too long."""
        return OpenFoldData(root, split, self._own, self.config.global_batch_size)

    def build_model(self, world: World) -> nn.Module:
        """The network, from torch's current seed."""
        self._ranks = world.size
        return OpenFoldNet(self._own)

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """Adam without weight decay; the harness clips the gradient's norm and averages the weights. Schedule by steps."""
        own = self._own
        optimizer = torch.optim.Adam(
            model.parameters(),
            lr=own.learning_rate,
            betas=(own.adam_beta_1, own.adam_beta_2),
            eps=own.adam_eps,
            fused=True,
        )
        return Optimization(
            optimizer,
            lambda step, epoch: learning_rate(own, step),
            clip_norm=own.gradient_clip_norm,
            ema_decay=own.swa_decay_rate or None,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean over samples of the weighted terms, each sample times the square root of its length.

        With ``balanced_batches`` ranks hold different numbers of samples: the mean over the global batch is then the mean over
        ranks of what this gives.
        """
        prediction = model(batch)
        samples, slots, _, length = batch["msa"].shape
        self._work.append(batch_work(self._own, samples, length, slots - 1))
        loss_N = losses(self._own, prediction, batch)["total"]
        if not self._own.balanced_batches:
            return loss_N.mean()
        shares = self._ranks * self.config.gradient_accumulation_steps
        return loss_N.sum() * shares / self.config.global_batch_size

    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums of lDDT-CA and of the loss over samples, and their number; samples of which no CA is known do not count."""
        prediction = model(batch)
        true, mask = batch["atoms"][..., residues.CA, :], batch["atom_mask"][..., residues.CA]
        score_N = sample_lddt_ca(prediction.structure.atoms[..., residues.CA, :], true, mask).double()
        known_N = (mask.sum(-1) > 0).double()
        loss_N = losses(self._own, prediction, batch)["total"].double()
        return {"lddt_ca": (score_N * known_N).sum(), "loss": (loss_N * known_N).sum(), "samples": known_N.sum()}

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """``eval_accuracy``: mean over chains of lDDT-CA, 0 to 1; beside it the mean loss."""
        return {
            "eval_accuracy": totals["lddt_ca"] / totals["samples"],
            "val_loss": totals["loss"] / totals["samples"],
        }

    def window_stats(self, world: World) -> dict[str, Any]:
        """Where ranks' work differs, the mean over steps of the most work of a rank over the mean: 1 is a perfect balance."""
        mine, self._work = self._work, []
        if world.size == 1 or not (self._own.num_recycling_iters or self._own.balanced_batches):
            return {}
        work_RS = np.array(world.allgather(mine))
        return {"imbalance": float((work_RS.max(0) / work_RS.mean(0)).mean())}

    def hyperparameters(self) -> dict[str, Any]:
        """Keys of the reference. What the card says of a size (target, samples, evaluation interval) comes from the card."""
        own, card = self._own, DESCRIPTOR.card().size(self.config.size)
        return {
            "global_batch_size": self.config.global_batch_size,
            "target_avg_lddt_ca_value": card.threshold,
            "train_max_pdb_release_date": own.train_max_pdb_release_date,
            "val_min_cameo_submission_date": own.val_min_cameo_submission_date,
            "val_max_cameo_submission_date": own.val_max_cameo_submission_date,
            "val_max_sequence_length": own.val_max_sequence_length,
            "val_every_iters": card.eval_every_steps or 0,
            "model_parameters_count": card.model_parameters,
            "init_checkpoint_sha256sum": own.init_checkpoint_sha256sum,
            "train_sequence_crop_size": own.crop_size,
            "num_recycling_iters": own.num_recycling_iters,
            "max_msa_clusters": own.max_msa_clusters,
            "max_extra_msa": own.max_extra_msa,
            "templates_enabled": own.max_templates > 0,
            "max_templates": own.max_templates,
            "fape_loss_weight": own.fape_loss_weight,
            "fape_loss_backbone_weight": own.fape_backbone_weight,
            "fape_loss_sidechain_weight": own.fape_sidechain_weight,
            "supervised_chi_loss_weight": own.supervised_chi_loss_weight,
            "distogram_loss_weight": own.distogram_loss_weight,
            "masked_msa_loss_weight": own.masked_msa_loss_weight,
            "plddt_loss_weight": own.plddt_loss_weight,
            "opt_name": "Adam",
            "opt_base_learning_rate": own.learning_rate,
            "opt_learning_rate_warmup_init": own.warmup_init,
            "opt_learning_rate_warmup_steps": own.warmup_steps,
            "opt_learning_rate_decay_boundary_steps": list(own.decay_steps),
            "opt_learning_rate_decay_factor": own.decay_factor,
            "opt_adam_beta_1": own.adam_beta_1,
            "opt_adam_beta_2": own.adam_beta_2,
            "opt_adam_epsilon": own.adam_eps,
            "opt_weight_decay": 0,
            "opt_amsgrad": False,
            "opt_gradient_clipping": True,
            "opt_gradient_clip_norm": own.gradient_clip_norm,
            "swa_enabled": own.swa_decay_rate > 0,
            "swa_decay_rate": own.swa_decay_rate,
            "initial_training_dataloader_type": own.dataloader_type,
            "balanced_batches": own.balanced_batches,
        }

    def work(self) -> Work:
        """Closed forms for a training sample; bytes at the width activations are stored in."""
        element_bytes = {"float32": 4, "bfloat16": 2}[self.config.precision]
        return work(self._own, global_batch_size=self.config.global_batch_size, element_bytes=element_bytes)

    def baselines(self, root: Path) -> dict[str, float]:
        """lDDT-CA of chains that are all helix, all strand, and of secondary structure read from the alignment."""
        return baselines(root)
