"""The language model as the harness sees it: data, model, optimizer, loss, bits per byte, logged hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suite.config import RunConfig
from suite.distributed import World
from suite.timing import CudaClock, HostClock
from suite.workload import Optimization, Work, Workload
from workloads.moe.autotune import Autotuner
from workloads.moe.config import ranks_per_expert
from workloads.moe.parallel import MoEMonitor, expert_mesh, expert_parameters, logged, tune
from workloads.moe_lm.baselines import baselines
from workloads.moe_lm.config import MoELMConfig, learning_rate, work
from workloads.moe_lm.data import TextData
from workloads.moe_lm.model import MoELanguageModel

if TYPE_CHECKING:
    from suite.workload import Batch


class MoELM(Workload):
    """MoELM for the harness."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._own = cast(MoELMConfig, config.hyperparameters)
        self._monitor: MoEMonitor | None = None
        self._tuner: Autotuner | None = None
        self._ranks = 1

    def dataset(self, split: str, root: Path) -> TextData:
        """One split; ValueError if the rows are not the config's."""
        return TextData(root, split, self._own)

    def build_model(self, world: World) -> nn.Module:
        """The model from torch's current seed; with expert parallelism this rank's share of the experts."""
        mesh, moe = None, self._own.moe
        cuda = self.config.device != "cpu" and torch.cuda.is_available()
        if moe.expert_parallel and not self._own.dense and world.size > 1:
            ranks_per_expert(moe.experts, world.size)
            mesh = expert_mesh(moe, world, cuda=cuda)
            self._ranks = world.size
        model = MoELanguageModel(self._own, mesh)
        if self.config.instrumentation:
            self._monitor = MoEMonitor(model.moe_layers(), CudaClock() if cuda else HostClock())
        return model

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """AdamW; decay for matrices only. After each step the aux-loss-free bias moves, where it is in use."""
        own = self._own
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": own.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=own.learning_rate, betas=own.adam_betas)
        layers = list(cast(MoELanguageModel, model).moe_layers().values())
        if layers and own.moe.balance == "bias":
            optimizer.register_step_post_hook(lambda *_: [layer.update_bias() for layer in layers])
        return Optimization(optimizer, lambda step, epoch: learning_rate(own, step))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy in nats, plus the routers' auxiliary losses in training."""
        text_NS = batch["bytes"]
        if self._own.moe.autotune and self._tuner is None and self._ranks > 1 and model.training:
            self._tuner = tune(model, tokens=text_NS[:, 1:].numel())
        logits_NSV, auxiliary = model(text_NS[:, :-1])
        return F.cross_entropy(logits_NSV.flatten(0, 1).float(), text_NS[:, 1:].long().flatten()) + auxiliary

    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sum of nats, and of the bytes predicted."""
        text_NS = batch["bytes"]
        logits_NSV, _ = model(text_NS[:, :-1])
        target_T = text_NS[:, 1:].long().flatten()
        nats = F.cross_entropy(logits_NSV.flatten(0, 1).float(), target_T, reduction="none").double().sum()
        return {"nats": nats, "bytes": nats.new_tensor(float(target_T.numel()))}

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """``eval_error``: bits per byte."""
        nats = totals["nats"] / totals["bytes"]
        return {"eval_error": nats / math.log(2), "nats_per_byte": nats}

    def hyperparameters(self) -> dict[str, Any]:
        """The keys of the MoE layers are `workloads.moe.parallel.logged`."""
        own = self._own
        return {
            "global_batch_size": self.config.global_batch_size,
            "max_sequence_length": own.context,
            "opt_name": "adamw",
            "opt_base_learning_rate": own.learning_rate,
            "opt_learning_rate_warmup_steps": own.warmup_steps,
            "opt_learning_rate_decay_steps": own.schedule_steps,
            "opt_end_learning_rate": own.learning_rate * own.final_fraction,
            "opt_adamw_beta_1": own.adam_betas[0],
            "opt_adamw_beta_2": own.adam_betas[1],
            "opt_adamw_weight_decay": own.weight_decay,
            **logged(own.moe, dense=own.dense, precision=self.config.precision, ranks=self._ranks),
        }

    def work(self) -> Work:
        """Closed forms."""
        element_bytes = {"float32": 4, "bfloat16": 2}[self.config.precision]
        return work(self._own, global_batch_size=self.config.global_batch_size, element_bytes=element_bytes)

    def baselines(self, root: Path) -> dict[str, float]:
        """Bits per byte of counts after the last 0, 2 and 4 bytes."""
        return baselines(root)

    def sharded_parameters(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """The experts, if they are spread over the ranks."""
        return expert_parameters(model)

    def window_stats(self, world: World) -> dict[str, Any]:
        """Phases, load and efficiency of the MoE layers since the last call; every rank calls, at the end of every window."""
        if self._monitor is None:
            return {}
        stats = self._monitor.flush(world)
        if self._tuner is not None:
            stats["autotuned"] = [decision.event() for decision in self._tuner.decisions.values()]
        return stats
