"""The harness's interface to the language model: data, model, optimizer, loss, bits per byte, hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig
from mlhpc.suite.workload import Optimization, Work
from mlhpc.suite.world import World
from mlhpc.workloads.moe.workload import HasMoELayers, MoEWorkload
from mlhpc.workloads.moe_lm.config import MoELMConfig, compute_work
from mlhpc.workloads.moe_lm.data import TextData
from mlhpc.workloads.moe_lm.model import MoELanguageModel

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch


class MoELM(MoEWorkload):
    """Implements `mlhpc.suite.workload.Workload` for the language model."""

    initialises_by_operators = True

    def __init__(self, config: RunConfig) -> None:
        self._settings = cast(MoELMConfig, config.hyperparameters)
        super().__init__(config, self._settings)

    def dataset(self, split: str, root: Path) -> TextData:
        """Open one split. ValueError if the rows do not fit the config."""
        return TextData(root, split, self._settings)

    def build_model(self, world: World) -> nn.Module:
        """Build the model from torch's current seed; with expert parallelism only this rank's share of the experts."""
        with self.offloading(world):
            model = MoELanguageModel(self._settings, self.mesh(world))
        self.watch(model)
        return model

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """Build AdamW with weight decay of matrices only."""
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        return self.adamw(cast(MoELanguageModel, model), matrices, vectors, clip_norm=None)

    def tokens_of_layers(self, model: HasMoELayers) -> Sequence[int]:
        """Every layer sees each byte of the context."""
        return [self._settings.context] * len(model.moe_layers())

    def example(self, samples: int) -> Batch | None:
        """Make bytes without an order. None if experts are spread over ranks."""
        if self._settings.moe.expert_parallel:
            return None
        size, generator = (samples, self._settings.context + 1), torch.Generator().manual_seed(0)
        return {"bytes": torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)}

    def model_input(self, batch: Batch) -> Tensor:
        """Return all bytes but the last, which is only a target."""
        return batch["bytes"][:, :-1]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean cross entropy in nats, in training plus the routers' auxiliary losses."""
        text_NS = batch["bytes"]
        self.tune_once(model, tokens=text_NS[:, 1:].numel())
        logits_NSV, auxiliary = model(self.model_input(batch))
        result: Tensor = F.cross_entropy(logits_NSV.flatten(0, 1).float(), text_NS[:, 1:].long().flatten()) + auxiliary
        return result

    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sum cross entropies in nats and count predicted bytes."""
        text_NS = batch["bytes"]
        logits_NSV, _ = model(self.model_input(batch))
        target_T = text_NS[:, 1:].long().flatten()
        nats = F.cross_entropy(logits_NSV.flatten(0, 1).float(), target_T, reduction="none").double().sum()
        return {"nats": nats, "bytes": nats.new_full((), target_T.numel())}

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Compute ``eval_error``, bits per byte."""
        nats = totals["nats"] / totals["bytes"]
        return {"eval_error": nats / math.log(2), "nats_per_byte": nats}

    def hyperparameters(self) -> dict[str, Any]:
        """Return what the configuration says."""
        return self._settings.collect_logged(self.config, self.layout.spread)

    def work(self) -> Work:
        """Compute the closed forms for the ranks the model was built for."""
        batch = self.config.global_batch_size
        return compute_work(
            self._settings, global_batch_size=batch, element_bytes=self.element_bytes, layout=self.layout
        )
