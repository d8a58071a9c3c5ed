"""Answers what a change of the deployment costs: a model is trained as set and evaluated under each change.

The changes are those of SysNoise (MLSys 2023) that can act on these models, and others that their data have. A change
that leaves every output the same bits does not apply.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mlhpc.plugins.numerics.results import Deployed
from mlhpc.suite.config import RunConfig
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.statistics import CONFIDENCE
from mlhpc.suite.statistics.sessions import compute_mean_interval
from mlhpc.suite.training.agreement import StopAgreement
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.devices import choose_device
from mlhpc.suite.training.loop import Trainer
from mlhpc.suite.training.state import TrainingState
from mlhpc.suite.training.statement import TrialPlan
from mlhpc.suite.workload import Dataset, load_workload
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch

    Form = Callable[[Batch], Batch]


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm)
OTHER_EPSILON = 1e-3  # Keras has it for batch normalisation, torch 1e-5


@dataclass(frozen=True)
class Deployment:
    """A change of the deployment. ``alter`` changes the model and says whether it found anything to change.

    ``form`` is the form of the data in place of that of the training; ``data`` changes them after that.
    """

    group: str
    alter: Callable[[nn.Module], bool] = lambda model: True
    form: Form | None = None
    data: Form = lambda batch: batch
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def _round_weights(model: nn.Module, bits: int) -> bool:
    """Round weights of products to signed integers of ``bits`` with a scale for each output."""
    most = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                scale = weight.flatten(1).abs().amax(1).clamp(min=1e-30).view(-1, *[1] * (weight.ndim - 1)) / most
                weight.copy_((weight / scale).round() * scale)
    return True


def _round_activations(model: nn.Module, dtype: torch.dtype) -> bool:
    """Round weights, and the outputs of all innermost modules, to a shorter type. Sums stay in float32."""

    def shorten(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output.to(dtype).to(output.dtype) if isinstance(output, Tensor) else output

    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(dtype))
    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(shorten)
    return True


def _pad(model: nn.Module, mode: str) -> bool:
    chosen = [
        module
        for module in model.modules()
        if isinstance(module, CONVOLUTIONS) and any(module._reversed_padding_repeated_twice)
    ]
    for module in chosen:
        module.padding_mode = mode  # type: ignore[assignment]
    return bool(chosen)


def _change_epsilon(model: nn.Module) -> bool:
    norms = [module for module in model.modules() if isinstance(module, NORMS)]
    for norm in norms:
        norm.eps = OTHER_EPSILON
    return bool(norms)


def _use_batch_statistics(model: nn.Module) -> bool:
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
    return bool(norms)


def _shift_upsampling(model: nn.Module) -> bool:
    """Give the extra row and column of transposed convolutions to the other side."""

    def shift(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.roll((1, 1), (-2, -1))

    chosen = [module for module in model.modules() if isinstance(module, nn.ConvTranspose2d)]
    for module in chosen[-1:]:
        module.register_forward_hook(shift)
    return bool(chosen)


def _renormalise(model: nn.Module, digits: int) -> bool:
    """Round the constants of input normalisation that a model holds."""
    constants = [buffer for name, buffer in model.named_buffers() if name.startswith("input_")]
    for buffer in constants:
        buffer.copy_(torch.tensor([float(f"{value:.{digits}g}") for value in buffer.tolist()]))
    return bool(constants)


def _convert_inputs(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Change the inputs of a batch: all that are images, volumes or fields."""
    return {
        name: change(value) if value.ndim > 2 and name in ("x", "image") else value for name, value in batch.items()
    }


def _store(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Store and read as another type; integers are clipped to its range."""
    if not dtype.is_floating_point:
        if value.is_floating_point():
            return (value * 255).round().clamp(0, 255) / 255
        value = value.clamp(0, min(torch.iinfo(dtype).max, torch.iinfo(value.dtype).max))
    return value.to(dtype).to(value.dtype)


def _rescale(value: Tensor) -> Tensor:
    """Scale each channel of fields by the range of this batch, in place of that of the training data."""
    if not value.is_floating_point():
        return value
    low, high = value.amin((0, 1, 2)), value.amax((0, 1, 2))
    return (value - low) / (high - low)


DEPLOYMENTS: Mapping[str, Deployment] = {
    "float16": Deployment("precision", partial(_round_activations, dtype=torch.float16)),
    "bfloat16": Deployment("precision", context=partial(torch.autocast, "cpu", torch.bfloat16)),
    "int8 weights": Deployment("quantisation", partial(_round_weights, bits=8)),
    "int4 weights": Deployment("quantisation", partial(_round_weights, bits=4)),
    "stored as uint16": Deployment(
        "storage", data=partial(_convert_inputs, change=partial(_store, dtype=torch.uint16))
    ),
    "stored as uint8": Deployment("storage", data=partial(_convert_inputs, change=partial(_store, dtype=torch.uint8))),
    "stored as float16": Deployment(
        "storage", data=partial(_convert_inputs, change=partial(_store, dtype=torch.float16))
    ),
    "constants of 1 digit": Deployment("normalisation", partial(_renormalise, digits=1)),
    "constants of the batch": Deployment("normalisation", data=partial(_convert_inputs, change=_rescale)),
    "padding circular": Deployment("padding", partial(_pad, mode="circular")),
    "padding reflect": Deployment("padding", partial(_pad, mode="reflect")),
    "padding replicate": Deployment("padding", partial(_pad, mode="replicate")),
    "epsilon 1e-3": Deployment("epsilon", _change_epsilon),
    "statistics of the batch": Deployment("statistics", _use_batch_statistics),
    "upsampling by one pixel": Deployment("upsampling", _shift_upsampling),
}


class Shown:
    """A data set whose batches are changed as they are loaded."""

    def __init__(self, data: Dataset, change: Callable[[Batch], Batch]) -> None:
        self._data, self._change = data, change

    def __len__(self) -> int:
        return len(self._data)

    def load(self, indices: Any, *, seed: int, epoch: int) -> Batch:
        """Load samples and change them."""
        return self._change(self._data.load(indices, seed=seed, epoch=epoch))


@dataclass(frozen=True)
class _Splits:
    training: Dataset
    evaluation: Dataset

    def train(self, block: int) -> Dataset:
        return self.training

    def validation(self, block: int) -> Dataset:
        return self.evaluation


@dataclass(frozen=True)
class Trained:
    """A model that one seed trained to its target, or for all epochs. ``form`` is that of its data."""

    trainer: Trainer
    stored: Dataset
    form: Form

    @cached_property
    def value(self) -> float:
        """The metric as set."""
        return self._metric(self._totals)

    @cached_property
    def _totals(self) -> dict[str, float]:
        return self._sum(Deployment(""))

    def evaluate(self, change: Deployment) -> float | None:
        """Evaluate a copy of the model under a change. None if it has nothing to change, or changes no bit."""
        totals = self._sum(change)
        return None if totals in ({}, self._totals) else self._metric(totals)

    def _metric(self, totals: Mapping[str, float]) -> float:
        return self.trainer.workload.metrics(totals)[self.trainer.target.metric]

    def _sum(self, change: Deployment) -> dict[str, float]:
        with self.trainer.state.evaluated() as trained:
            model = copy.deepcopy(trained).eval()
        if not change.alter(model):
            return {}
        form, totals = change.form or self.form, dict[str, float]()
        size, count = self.trainer.config.eval_batch_size, len(self.stored)
        with torch.no_grad(), change.context():
            for first in range(0, count, size):
                stored = self.stored.load(range(first, min(first + size, count)), seed=0, epoch=0)
                for name, value in self.trainer.workload.eval_stats(model, change.data(form(stored))).items():
                    totals[name] = totals.get(name, 0.0) + float(value)
        return totals


def train(
    descriptor: Descriptor,
    config: RunConfig,
    world: World,
    root: Path,
    seed: int,
    form: Form = lambda batch: batch,
) -> Trained:
    """Train a model from a seed until it meets its target, or for all epochs. ``form``: of the data, for both splits."""
    workload = load_workload(descriptor)(config)
    device = choose_device("cpu", world)
    stored = workload.dataset("validation", root)
    splits = _Splits(Shown(workload.dataset("train", root), form), Shown(stored, form))
    torch.manual_seed(seed)
    model = workload.build_model(world).to(device)
    state = TrainingState.create(workload, model, len(splits.training) // config.global_batch_size, seed)
    plan = TrialPlan(descriptor, config, RunFolder(Path("never-written")), trial=0)
    trainer = Trainer(
        plan=plan,
        workload=workload,
        world=world,
        device=device,
        state=state,
        data=splits,
        log=EventLog(None),
        checkpoint=Checkpoint(plan.folder.checkpoint(0), {}),
        stop_signal=lambda: None,
        say=lambda text: None,
    )
    watch = StopAgreement(world, lambda: None)
    for epoch in range(1, config.max_epochs + 1):
        trainer.train_block(epoch, 0, watch)
        if trainer.target.reached(trainer.evaluate_block(epoch)):
            break
    return Trained(trainer, stored, form)


def list_rows(
    trained: Sequence[Trained], changes: Mapping[str, Deployment], tell: Callable[[str], None]
) -> Iterator[Deployed]:
    """Yield a row for each change: the metric's difference of every seed, positive if better."""
    sign = 1.0 if trained[0].trainer.target.direction == "max" else -1.0
    for name, change in changes.items():
        tell(name)
        values = [each.evaluate(change) for each in trained]
        pairs = [(after, each.value) for after, each in zip(values, trained, strict=True) if after is not None]
        if not pairs:
            yield Deployed(change=name, group=change.group, why="no bit of the evaluation changes")
            continue
        deltas = tuple(sign * (after - before) for after, before in pairs)
        mean = statistics.fmean(deltas)
        low = high = None
        if len(deltas) > 1:
            _, half = compute_mean_interval(deltas, CONFIDENCE)
            low, high = mean - half, mean + half
        yield Deployed(change=name, group=change.group, deltas=deltas, mean=mean, low=low, high=high)
