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
        self._settings = cast(OpenFoldConfig, config.hyperparameters)
        self._ranks = 1
        self._work: list[float] = []  # of this rank's batches since the last window
        if self._settings.init_checkpoint_sha256sum:
            raise ValueError(
                "openfold: hyperparameters.init_checkpoint_sha256sum: starting from the official checkpoint is not "
                "supported; leave it empty for the suite's own initialisation (open division)"
            )

    def dataset(self, split: str, root: Path) -> OpenFoldData:
        """One split; ValueError if the data are damaged, have another form or chains that are too long."""
        return OpenFoldData(root, split, self._settings, self.config.global_batch_size)

    def build_model(self, world: World) -> nn.Module:
        """The network, from torch's current seed."""
        self._ranks = world.size
        return OpenFoldNet(self._settings)

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """Adam without weight decay; the harness clips the gradient's norm and averages the weights. Schedule by steps."""
        settings = self._settings
        optimizer = torch.optim.Adam(
            model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.adam_beta_1, settings.adam_beta_2),
            eps=settings.adam_eps,
            fused=True,
        )
        return Optimization(
            optimizer,
            lambda step, epoch: learning_rate(settings, step),
            clip_norm=settings.gradient_clip_norm,
            ema_decay=settings.swa_decay_rate or None,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean over samples of the weighted terms, each sample times the square root of its length.

        With ``balanced_batches`` ranks hold different numbers of samples: the mean over the global batch is then the mean over
        ranks of what this gives.
        """
        prediction = model(batch)
        samples, slots, _, length = batch["msa"].shape
        self._work.append(batch_work(self._settings, samples, length, slots - 1))
        loss_N = losses(self._settings, prediction, batch)["total"]
        if not self._settings.balanced_batches:
            return loss_N.mean()
        shares = self._ranks * self.config.gradient_accumulation_steps
        return loss_N.sum() * shares / self.config.global_batch_size

    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums of lDDT-CA and of the loss over samples, and their number; samples of which no CA is known do not count."""
        prediction = model(batch)
        true, mask = batch["atoms"][..., residues.CA, :], batch["atom_mask"][..., residues.CA]
        score_N = sample_lddt_ca(prediction.structure.atoms[..., residues.CA, :], true, mask).double()
        known_N = (mask.sum(-1) > 0).double()
        loss_N = losses(self._settings, prediction, batch)["total"].double()
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
        if world.size == 1 or not (self._settings.num_recycling_iters or self._settings.balanced_batches):
            return {}
        work_RS = np.array(world.allgather(mine))
        return {"imbalance": float((work_RS.max(0) / work_RS.mean(0)).mean())}

    def hyperparameters(self) -> dict[str, Any]:
        """Keys of the reference. What the card says of a size (target, samples, evaluation interval) comes from the card."""
        settings, card = self._settings, DESCRIPTOR.card().size(self.config.size)
        return {
            "global_batch_size": self.config.global_batch_size,
            "target_avg_lddt_ca_value": card.threshold,
            "train_max_pdb_release_date": settings.train_max_pdb_release_date,
            "val_min_cameo_submission_date": settings.val_min_cameo_submission_date,
            "val_max_cameo_submission_date": settings.val_max_cameo_submission_date,
            "val_max_sequence_length": settings.val_max_sequence_length,
            "val_every_iters": card.eval_every_steps or 0,
            "model_parameters_count": card.model_parameters,
            "init_checkpoint_sha256sum": settings.init_checkpoint_sha256sum,
            "train_sequence_crop_size": settings.crop_size,
            "num_recycling_iters": settings.num_recycling_iters,
            "max_msa_clusters": settings.max_msa_clusters,
            "max_extra_msa": settings.max_extra_msa,
            "templates_enabled": settings.max_templates > 0,
            "max_templates": settings.max_templates,
            "fape_loss_weight": settings.fape_loss_weight,
            "fape_loss_backbone_weight": settings.fape_backbone_weight,
            "fape_loss_sidechain_weight": settings.fape_sidechain_weight,
            "supervised_chi_loss_weight": settings.supervised_chi_loss_weight,
            "distogram_loss_weight": settings.distogram_loss_weight,
            "masked_msa_loss_weight": settings.masked_msa_loss_weight,
            "plddt_loss_weight": settings.plddt_loss_weight,
            "opt_name": "Adam",
            "opt_base_learning_rate": settings.learning_rate,
            "opt_learning_rate_warmup_init": settings.warmup_init,
            "opt_learning_rate_warmup_steps": settings.warmup_steps,
            "opt_learning_rate_decay_boundary_steps": list(settings.decay_steps),
            "opt_learning_rate_decay_factor": settings.decay_factor,
            "opt_adam_beta_1": settings.adam_beta_1,
            "opt_adam_beta_2": settings.adam_beta_2,
            "opt_adam_epsilon": settings.adam_eps,
            "opt_weight_decay": 0,
            "opt_amsgrad": False,
            "opt_gradient_clipping": True,
            "opt_gradient_clip_norm": settings.gradient_clip_norm,
            "swa_enabled": settings.swa_decay_rate > 0,
            "swa_decay_rate": settings.swa_decay_rate,
            "initial_training_dataloader_type": settings.dataloader_type,
            "balanced_batches": settings.balanced_batches,
        }

    def work(self) -> Work:
        """Closed forms for a training sample; bytes at the width activations are stored in."""
        element_bytes = {"float32": 4, "bfloat16": 2}[self.config.precision]
        return work(self._settings, global_batch_size=self.config.global_batch_size, element_bytes=element_bytes)

    def baselines(self, root: Path) -> dict[str, float]:
        """lDDT-CA of chains that are all helix, all strand, and of secondary structure read from the alignment."""
        return baselines(root)
