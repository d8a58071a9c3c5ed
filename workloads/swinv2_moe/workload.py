"""The harness's interface to SwinV2-MoE: data, model, optimizer, loss, accuracy, logged hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig
from mlhpc.suite.errors import InputError
from mlhpc.suite.workload import Optimization, Work
from mlhpc.suite.world import World
from mlhpc.workloads.moe.workload import HasMoELayers, MoEWorkload
from mlhpc.workloads.swinv2_moe.config import SwinV2MoEConfig, compute_work
from mlhpc.workloads.swinv2_moe.data import ImageData
from mlhpc.workloads.swinv2_moe.model import SwinV2MoE

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch

# and all parameters of one dimension, as in the SwinV2 reference
NOT_DECAYED = ("position_bias", "log_scale", "_bias_E")


class SwinV2MoEWorkload(MoEWorkload):
    """Implements `mlhpc.suite.workload.Workload` for SwinV2-MoE."""

    def __init__(self, config: RunConfig) -> None:
        if config.channels_last:
            raise InputError(
                "channels_last is true; swinv2_moe expects false, because its model always keeps channels last"
            )
        self._settings = cast(SwinV2MoEConfig, config.hyperparameters)
        super().__init__(config, self._settings)

    def dataset(self, split: str, root: Path) -> ImageData:
        """Open one split. InputError if the images do not fit the config."""
        return ImageData(root, split, self._settings)

    def build_model(self, world: World) -> nn.Module:
        """Build the model from torch's current seed; with expert parallelism only this rank's share of the experts."""
        with self.offloading(world):
            model = SwinV2MoE(self._settings, self.mesh(world))
        self.watch(model)
        return model

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """Build AdamW with gradient clipping."""
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            matrix = parameter.ndim > 1 and not any(part in name for part in NOT_DECAYED)
            (decayed if matrix else others).append(parameter)
        return self.adamw(cast(SwinV2MoE, model), decayed, others, clip_norm=self._settings.clip_norm)

    def tokens_of_layers(self, model: HasMoELayers) -> Sequence[int]:
        """Return the tokens of the blocks with experts."""
        return [block.tokens for block in self._settings.blocks() if block.experts is not None]

    def example(self, samples: int) -> Batch | None:
        """Make images of noise. None if experts are spread over ranks."""
        if self._settings.moe.expert_parallel:
            return None
        size, generator = (samples, *2 * [self._settings.pixels]), torch.Generator().manual_seed(0)
        image = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        return {"image": image, "label": torch.arange(samples) % len(self._settings.classes)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean cross entropy plus the routers' auxiliary losses."""
        # the back end is tuned once, for the first block with experts
        tokens = next((block.tokens for block in self._settings.blocks() if block.experts is not None), 0)
        self.tune_once(model, tokens=len(batch["image"]) * tokens)
        logits, auxiliary = model(batch["image"])
        label, smoothing = batch["label"].long(), self._settings.label_smoothing
        total: Tensor = F.cross_entropy(_promote_to_float32(logits), label, label_smoothing=smoothing) + auxiliary
        return total

    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sum cross entropies; count images and correct ones, in all and per class."""
        logits, label = _promote_to_float32(model(batch["image"])[0]), batch["label"].long()
        right = logits.argmax(dim=1) == label
        stats = {
            "nats": F.cross_entropy(logits, label, reduction="none").double().sum(),
            "right": right.double().sum(),
            "images": torch.tensor(float(len(label)), dtype=torch.float64),
        }
        for number in range(len(self._settings.classes)):
            stats[f"right_{number}"] = (right & (label == number)).double().sum()
            stats[f"images_{number}"] = (label == number).double().sum()
        return stats

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Compute ``eval_accuracy``, the share of correct images, that share per class, and the cross entropy."""
        result = {
            "eval_accuracy": totals["right"] / totals["images"],
            "cross_entropy": totals["nats"] / totals["images"],
        }
        for number, name in enumerate(self._settings.classes):
            if totals[f"images_{number}"]:
                result[f"accuracy_{name}"] = totals[f"right_{number}"] / totals[f"images_{number}"]
        return result

    def hyperparameters(self) -> dict[str, Any]:
        """Return what the configuration says."""
        return self._settings.collect_logged(self.config, self.layout.spread)

    def work(self) -> Work:
        """Compute the closed forms for the ranks the model was built for."""
        batch = self.config.global_batch_size
        return compute_work(
            self._settings, global_batch_size=batch, element_bytes=self.element_bytes, layout=self.layout
        )


def _promote_to_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
