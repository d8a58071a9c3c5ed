"""The harness's interface to DeepCAM: data, model, optimizer, loss, metric, logged hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig
from mlhpc.suite.machine.choice.layout import choose_layout
from mlhpc.suite.workload import ChooserProtocol, Optimization, Work, Workload
from mlhpc.suite.world import World
from mlhpc.workloads.deepcam import metric
from mlhpc.workloads.deepcam.config import CHANNELS, LOSS_WEIGHTS, DeepCamConfig
from mlhpc.workloads.deepcam.data import DeepCamData
from mlhpc.workloads.deepcam.model import DeepLabV3Plus, join_groups
from mlhpc.workloads.deepcam.optimizer import build_optimizer
from mlhpc.workloads.deepcam.schedule import learning_rate
from mlhpc.workloads.deepcam.work import compute_work

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch


class DeepCam(Workload):
    """Implements `mlhpc.suite.workload.Workload` for DeepCAM."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._settings = cast(DeepCamConfig, config.hyperparameters)
        self._loss_weights = torch.tensor(LOSS_WEIGHTS, dtype=torch.float64)

    def dataset(self, split: str, root: Path) -> DeepCamData:
        """Open one split. ValueError if the data are damaged or do not fit the config."""
        return DeepCamData(root, split, self._settings)

    def build_model(self, world: World) -> nn.Module:
        """Build the network from torch's current seed; its normalisation spans groups of ranks.

        Each group keeps its own running statistics in training. The harness averages them before an evaluation, as the
        reference does.
        """
        model = DeepLabV3Plus(self._settings, channels_last=bool(self.config.channels_last))
        join_groups(model, world, self._settings.batchnorm_group_size)
        return model

    def example(self, samples: int) -> Batch | None:
        """Make fields like those of a training pass. None where ranks normalise together."""
        if self._settings.batchnorm_group_size > 1:
            return None
        size = samples, self._settings.height, self._settings.width
        fields = torch.rand(*size, len(CHANNELS), generator=torch.Generator().manual_seed(0))
        return {"x": fields, "y": torch.zeros(size, dtype=torch.uint8)}

    def choose(self, model: nn.Module, chooser: ChooserProtocol) -> None:
        """Choose memory format, convolutions and threads on an example.

        Where ranks normalise together, which a rank alone cannot do, the rule is followed.
        """
        batch = self.example(self.config.samples_per_pass(chooser.ranks))
        if batch is not None:
            choose_layout(chooser, model, self.loss, batch, self.config)

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """Build Adam, AdamW or LAMB. The rate depends on the global step only."""
        optimizer = build_optimizer(model.parameters(), self._settings)
        return Optimization(optimizer, lambda step, epoch: learning_rate(self._settings, step))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the cross entropy of each pixel times its class weight, averaged over pixels (not over weights)."""
        logits = model(batch["x"])
        # bfloat16 logits become float32, float64 ones stay
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # the device of the logits is not known before the first batch
        self._loss_weights = self._loss_weights.to(logits)
        y = batch["y"].long()
        return F.cross_entropy(logits, y, self._loss_weights, reduction="sum") / y.numel()

    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sum the samples' IoU, count samples, and count pixels per pair of true and predicted class."""
        return metric.compute_statistics(model(batch["x"]).argmax(dim=1), batch["y"])

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Compute ``eval_accuracy``, mean IoU per sample (absent classes count 1), and each class's IoU over pixels."""
        return metric.compute_metrics(totals)

    def hyperparameters(self) -> dict[str, Any]:
        """Return what the configuration says."""
        return self._settings.collect_logged(self.config)

    def work(self) -> Work:
        """Compute the closed forms, with activations stored at the run's precision."""
        element_bytes = 2 if self.config.precision == "bfloat16" else 4
        return compute_work(
            self._settings, global_batch_size=self.config.global_batch_size, element_bytes=element_bytes
        )
