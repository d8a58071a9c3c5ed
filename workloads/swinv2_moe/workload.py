"""SwinV2-MoE as the harness sees it: data, model, optimizer, loss, accuracy, logged hyperparameters."""

from __future__ import annotations

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
from workloads.moe.parallel import MoEMonitor, expert_mesh, expert_parameters, logged, tune
from workloads.swinv2_moe.baselines import baselines
from workloads.swinv2_moe.config import CLASSES, SwinV2MoEConfig, learning_rate, work
from workloads.swinv2_moe.data import ImageData
from workloads.swinv2_moe.model import SwinV2MoE

if TYPE_CHECKING:
    from suite.workload import Batch

NOT_DECAYED = ("position_bias", "log_scale", "_bias_E")  # beside what has one dimension, as in the SwinV2 reference


class SwinV2MoEWorkload(Workload):
    """SwinV2-MoE for the harness."""

    def __init__(self, config: RunConfig) -> None:
        if config.channels_last:
            raise ValueError("swinv2_moe: channels_last: the model keeps channels last by itself; leave it false")
        self.config = config
        self._own = cast(SwinV2MoEConfig, config.hyperparameters)
        self._monitor: MoEMonitor | None = None
        self._tuner: Autotuner | None = None
        self._ranks = 1

    def dataset(self, split: str, root: Path) -> ImageData:
        """One split; ValueError if the images are not the config's."""
        return ImageData(root, split, self._own)

    def build_model(self, world: World) -> nn.Module:
        """The model from torch's current seed; with expert parallelism this rank's share of the experts."""
        mesh, moe = None, self._own.moe
        cuda = self.config.device != "cpu" and torch.cuda.is_available()
        if moe.expert_parallel and not self._own.dense and world.size > 1:
            mesh = expert_mesh(moe, world, cuda=cuda)
            self._ranks = world.size
        model = SwinV2MoE(self._own, mesh)
        if self.config.instrumentation:
            self._monitor = MoEMonitor(model.moe_layers(), CudaClock() if cuda else HostClock())
        return model

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """AdamW and clipping. After each step the aux-loss-free bias moves, where it is in use."""
        own = self._own
        groups: dict[float, list[nn.Parameter]] = {own.weight_decay: [], 0.0: []}
        for name, parameter in model.named_parameters():
            decayed = parameter.ndim > 1 and not any(part in name for part in NOT_DECAYED)
            groups[own.weight_decay if decayed else 0.0].append(parameter)
        listed = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
        optimizer = torch.optim.AdamW(listed, lr=own.learning_rate, betas=own.adam_betas)
        layers = list(cast(SwinV2MoE, model).moe_layers().values())
        if layers and own.moe.balance == "bias":
            optimizer.register_step_post_hook(lambda *_: [layer.update_bias() for layer in layers])
        return Optimization(optimizer, lambda step, epoch: learning_rate(own, step), clip_norm=own.clip_norm)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy, plus the routers' auxiliary losses."""
        if self._own.moe.autotune and self._tuner is None and self._ranks > 1 and model.training:
            first = next(block for block in self._own.blocks() if block.experts is not None)
            self._tuner = tune(model, tokens=len(batch["image"]) * first.tokens)
        logits, auxiliary = model(batch["image"])
        return (
            F.cross_entropy(_wide(logits), batch["label"].long(), label_smoothing=self._own.label_smoothing) + auxiliary
        )

    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sum of cross entropies, images, images told right, and both per class."""
        logits, label = _wide(model(batch["image"])[0]), batch["label"].long()
        right = logits.argmax(dim=1) == label
        stats = {
            "nats": F.cross_entropy(logits, label, reduction="none").double().sum(),
            "right": right.double().sum(),
            "images": torch.tensor(float(len(label)), dtype=torch.float64),
        }
        for number in range(self._own.classes):
            stats[f"right_{number}"] = (right & (label == number)).double().sum()
            stats[f"images_{number}"] = (label == number).double().sum()
        return stats

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """``eval_accuracy``: share of images told right; beside it the cross entropy and the share per class."""
        result = {
            "eval_accuracy": totals["right"] / totals["images"],
            "cross_entropy": totals["nats"] / totals["images"],
        }
        for number, name in enumerate(CLASSES[: self._own.classes]):
            if totals[f"images_{number}"]:
                result[f"accuracy_{name}"] = totals[f"right_{number}"] / totals[f"images_{number}"]
        return result

    def hyperparameters(self) -> dict[str, Any]:
        """The keys of the MoE layers are `workloads.moe.parallel.logged`."""
        own = self._own
        return {
            "global_batch_size": self.config.global_batch_size,
            "image_size": own.pixels,
            "opt_name": "adamw",
            "opt_base_learning_rate": own.learning_rate,
            "opt_learning_rate_warmup_steps": own.warmup_steps,
            "opt_learning_rate_decay_steps": own.schedule_steps,
            "opt_end_learning_rate": own.learning_rate * own.final_fraction,
            "opt_adamw_beta_1": own.adam_betas[0],
            "opt_adamw_beta_2": own.adam_betas[1],
            "opt_adamw_weight_decay": own.weight_decay,
            "opt_gradient_clip_norm": own.clip_norm,
            "label_smoothing": own.label_smoothing,
            "drop_path": own.drop_path,
            "augmentation": own.augmentation,
            **logged(own.moe, dense=own.dense, precision=self.config.precision, ranks=self._ranks),
        }

    def work(self) -> Work:
        """Closed forms."""
        element_bytes = {"float32": 4, "bfloat16": 2}[self.config.precision]
        return work(self._own, global_batch_size=self.config.global_batch_size, element_bytes=element_bytes)

    def baselines(self, root: Path) -> dict[str, float]:
        """Accuracy of the commonest class and of linear classifiers on pixels and power spectra."""
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


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
