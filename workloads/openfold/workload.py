"""The harness's interface to OpenFold: data, model, optimizer, loss, metric, logged hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig
from mlhpc.suite.errors import InputError
from mlhpc.suite.workload import Optimization, Work, Workload
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.checkpoint import compute_loaded_sha256, load_checkpoint
from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.data import OpenFoldData, compute_batch_work
from mlhpc.workloads.openfold.losses import compute_losses
from mlhpc.workloads.openfold.metric import compute_sample_lddt_ca
from mlhpc.workloads.openfold.model import OpenFoldNet
from mlhpc.workloads.openfold.public.selection import Dates
from mlhpc.workloads.openfold.schedule import learning_rate
from mlhpc.workloads.openfold.work import compute_work

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch


class OpenFold(Workload):
    """Implements `mlhpc.suite.workload.Workload` for OpenFold."""

    def __init__(self, config: RunConfig) -> None:
        if config.channels_last:
            raise InputError("channels_last is true; openfold expects false, because it has no images to lay out")
        self.config = config
        self._settings = cast(OpenFoldConfig, config.hyperparameters)
        self._ranks = 1
        self._work: list[float] = []  # of this rank's batches since the last window

    def dataset(self, split: str, root: Path) -> OpenFoldData:
        """Open one split. InputError if the data are damaged, have other arrays or too long chains."""
        return OpenFoldData(root, split, self._settings, self.config.global_batch_size)

    def build_model(self, world: World) -> nn.Module:
        """Build the network with the weights of ``init_checkpoint``, or random ones from torch's current seed."""
        self._ranks = world.size
        model = OpenFoldNet(self._settings)
        if self._settings.init_checkpoint is not None:
            load_checkpoint(model, self._settings.init_checkpoint)
        return model

    def find_graph_problem(self, model: nn.Module) -> str | None:
        """Recomputed blocks restore the random state of their dropout on the host."""
        return "checkpointing restores the random state within a pass" if self._settings.checkpointing else None

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """Build Adam without weight decay, scheduled by steps. The harness clips gradients and averages weights."""
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
            # 0 switches the averaging off
            ema_decay=settings.swa_decay_rate or None,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean over samples of the weighted terms, each sample times the square root of its length.

        With ``balanced_batches`` ranks have different numbers of samples. The result is scaled so that its mean over
        ranks is the mean over the global batch.
        """
        prediction = model(batch)
        samples, slots, _, length = batch["msa"].shape
        self._work.append(compute_batch_work(self._settings, samples, length, slots - 1))
        loss_N = compute_losses(self._settings, prediction, batch)["total"]
        if not self._settings.balanced_batches:
            return loss_N.mean()
        # the harness divides by ranks and parts
        shares = self._ranks * self.config.gradient_accumulation_steps
        return loss_N.sum() * shares / self.config.global_batch_size

    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sum lDDT-CA and loss over samples and count them. Samples without a known CA do not count."""
        prediction = model(batch)
        true, mask = batch["atoms"][..., residues.CA, :], batch["atom_mask"][..., residues.CA]
        score_N = compute_sample_lddt_ca(prediction.structure.atoms[..., residues.CA, :], true, mask).double()
        known_N = (mask.sum(-1) > 0).double()
        loss_N = compute_losses(self._settings, prediction, batch)["total"].double()
        return {"lddt_ca": (score_N * known_N).sum(), "loss": (loss_N * known_N).sum(), "samples": known_N.sum()}

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Compute ``eval_accuracy``, the mean lDDT-CA of chains, 0 to 1, and the mean loss."""
        return {
            "eval_accuracy": totals["lddt_ca"] / totals["samples"],
            "val_loss": totals["loss"] / totals["samples"],
        }

    def window_stats(self, world: World) -> dict[str, Any]:
        """If ranks' work differs: largest / mean work of a rank, averaged over steps. 1 is perfect balance."""
        mine, self._work = self._work, []
        if world.size == 1 or not (self._settings.num_recycling_iters or self._settings.balanced_batches):
            return {}
        work_RS = np.array(world.allgather(mine))
        return {"imbalance": float((work_RS.max(0) / work_RS.mean(0)).mean())}

    def hyperparameters(self) -> dict[str, Any]:
        """Return what the configuration says, and the digest of the weights that were loaded."""
        digest = compute_loaded_sha256(self._settings.init_checkpoint)
        return self._settings.collect_logged(self.config) | {"init_checkpoint_sha256sum": digest}

    def data_hyperparameters(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the days that the chains were selected by, and the loader's order.

        Empty for data that were not selected.
        """
        return {key: attributes[key] for key in Dates().stated() if key in attributes}

    def work(self) -> Work:
        """Compute the closed forms for a training sample, with activations stored at the run's precision."""
        element_bytes = 2 if self.config.precision == "bfloat16" else 4
        return compute_work(
            self._settings, global_batch_size=self.config.global_batch_size, element_bytes=element_bytes
        )
