"""The harness's interface to CosmoFlow: data, model, optimizer, loss, metric, logged hyperparameters."""

from __future__ import annotations

import math
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
from mlhpc.workloads.cosmoflow.config import TARGETS, CosmoFlowConfig
from mlhpc.workloads.cosmoflow.data import CosmoFlowData
from mlhpc.workloads.cosmoflow.model import CHANNELS, CosmoFlowNet, KerasSGD, compute_work, list_regularised_weights
from mlhpc.workloads.cosmoflow.schedule import learning_rate

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch


class CosmoFlow(Workload):
    """Implements `mlhpc.suite.workload.Workload` for CosmoFlow."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._settings = cast(CosmoFlowConfig, config.hyperparameters)

    def dataset(self, split: str, root: Path) -> CosmoFlowData:
        """Open one split. ValueError if the data are damaged or do not fit the config."""
        return CosmoFlowData(root, split, self._settings)

    def build_model(self, world: World) -> nn.Module:
        """Build the network, initialised from torch's current seed."""
        return CosmoFlowNet(self._settings, channels_last=bool(self.config.channels_last))

    def example(self, samples: int) -> Batch:
        """Make counts like those of a training pass."""
        side, generator = self._settings.input_size, torch.Generator().manual_seed(0)
        counts = torch.randint(0, 16, (samples, side, side, side, CHANNELS), generator=generator, dtype=torch.int16)
        return {"x": counts, "y": torch.zeros(samples, len(TARGETS))}

    def choose(self, model: nn.Module, chooser: ChooserProtocol) -> None:
        """Choose memory format, convolutions and threads on an example."""
        batch = self.example(self.config.samples_per_pass(chooser.ranks))
        choose_layout(chooser, model, self.loss, batch, self.config)

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """Build SGD as in Keras. The rate is constant within an epoch, so it does not depend on the step."""
        optimizer = KerasSGD(model.parameters(), lr=self._rate(1), momentum=self._settings.momentum)
        return Optimization(optimizer, lambda step, epoch: self._rate(epoch))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean squared error plus l2 * sum(w^2) of the two hidden dense kernels, as Keras defines L2."""
        found, right = model(batch["x"]), batch["y"]
        dtype = torch.promote_types(found.dtype, right.dtype)
        loss = F.mse_loss(found.to(dtype), right.to(dtype))  # torch before 2.13 has no gradient of two types
        if self._settings.l2:
            loss = loss + self._settings.l2 * sum(weight.square().sum() for weight in list_regularised_weights(model))
        return loss

    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sum absolute and squared errors per target, and each sample's squared mean absolute error; count samples."""
        # float64: these sums are added over batches and ranks
        error_NT = model(batch["x"]).double() - batch["y"].double()
        absolute_NT = error_NT.abs()
        count = error_NT.new_full((), len(error_NT))
        stats = {"samples": count, "of_samples_squared": absolute_NT.mean(dim=1).square().sum()}
        for name, absolute_N in zip(TARGETS, absolute_NT.unbind(dim=1), strict=True):
            stats |= {f"absolute_{name}": absolute_N.sum(), f"squared_{name}": absolute_N.square().sum()}
        return stats

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Compute ``eval_error``, the mean absolute error over all targets and samples, and its uncertainty.

        ``eval_error_se`` is its standard error over samples. Each target has its own ``mae_`` and its standard error
        ``mae_se_``. Its ``rmse_``, the root mean square error, is the uncertainty of one prediction. ``mse`` is over
        all targets.
        """
        samples = totals["samples"]
        found = {}
        for name in TARGETS:
            mean, square = totals[f"absolute_{name}"] / samples, totals[f"squared_{name}"] / samples
            found[f"mae_{name}"] = mean
            found[f"rmse_{name}"] = math.sqrt(square)
            found[f"mae_se_{name}"] = _standard_error(mean, square, samples)
        error = sum(found[f"mae_{name}"] for name in TARGETS) / len(TARGETS)
        spread = _standard_error(error, totals["of_samples_squared"] / samples, samples)
        mse = sum(found[f"rmse_{name}"] ** 2 for name in TARGETS) / len(TARGETS)
        return {"eval_error": error, "eval_error_se": spread, **found, "mse": mse}

    def hyperparameters(self) -> dict[str, Any]:
        """Return what the configuration says."""
        return self._settings.collect_logged(self.config)

    def work(self) -> Work:
        """Compute the closed forms, with activations stored at the run's precision."""
        element_bytes = 2 if self.config.precision == "bfloat16" else 4
        return compute_work(
            self._settings, global_batch_size=self.config.global_batch_size, element_bytes=element_bytes
        )

    def _rate(self, epoch: int) -> float:
        return learning_rate(self._settings, self.config.global_batch_size, epoch)


def _standard_error(mean: float, mean_square: float, samples: float) -> float:
    """Compute the standard error of a mean over samples from the mean of squares. nan for one sample."""
    variance = max(mean_square - mean**2, 0.0)  # rounding may leave less than nothing
    return math.sqrt(variance / (samples - 1)) if samples > 1 else math.nan
