"""Answers what a change of the deployment costs: a model is trained as set and evaluated under each change.

The changes are those of SysNoise (MLSys 2023) that can act on these models, and others that their data have. A change
that leaves every output the same bits does not apply.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mlhpc.plugins.numerics.results import Deployed
from mlhpc.suite.config import RunConfig
from mlhpc.suite.data.build import find_data
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import print_progress, render_error
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
    """A change of the deployment. ``alter`` changes the model.

    ``form`` is the form of the data in place of that of the training; ``data`` changes them after that.
    """

    group: str
    alter: Callable[[nn.Module], object] = lambda model: None
    form: Form | None = None
    data: Form = lambda batch: batch


def _round_weights(model: nn.Module, bits: int) -> None:
    """Round weights of products to signed integers of ``bits`` with a scale for each output."""
    most = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                scale = weight.flatten(1).abs().amax(1).clamp(min=1e-30).view(-1, *[1] * (weight.ndim - 1)) / most
                weight.copy_((weight / scale).round() * scale)


def _round_activations(model: nn.Module, dtype: torch.dtype) -> None:
    """Round weights, and the outputs of all innermost modules, to a shorter type. Sums stay in float32."""

    def shorten(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output.to(dtype).to(output.dtype) if isinstance(output, Tensor) else output

    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(dtype))
    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(shorten)


def _set(model: nn.Module, kinds: Any, name: str, value: object) -> None:
    """Set an attribute of all layers of some kinds."""
    for module in model.modules():
        if isinstance(module, kinds):
            setattr(module, name, value)


def _shift_upsampling(model: nn.Module) -> None:
    """Give the extra row and column of the last transposed convolution to the other side."""
    for module in [module for module in model.modules() if isinstance(module, nn.ConvTranspose2d)][-1:]:
        module.register_forward_hook(lambda module, inputs, output: output.roll((1, 1), (-2, -1)))


def _renormalise(model: nn.Module) -> None:
    """Round the constants of input normalisation that a model holds to one digit."""
    for name, buffer in model.named_buffers():
        if name.startswith("input_"):
            buffer.copy_(torch.tensor([float(f"{value:.1g}") for value in buffer.tolist()]))


def _convert_inputs(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Change the inputs of a batch: all that are images, volumes or fields."""
    return {
        name: change(value) if value.ndim > 2 and name in ("x", "image") else value for name, value in batch.items()
    }


def _store(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Store and read as another type. Integers are clipped to its range, and fields from 0 to 1 fill it."""
    if dtype.is_floating_point:
        return value.to(dtype).to(value.dtype)
    most = torch.iinfo(dtype).max
    if value.is_floating_point():
        return (value * most).round().clamp(0, most) / most
    return value.clamp(0, min(most, torch.iinfo(value.dtype).max))


def _rescale(value: Tensor) -> Tensor:
    """Scale each channel of fields by the range of this batch, in place of that of the training data."""
    if not value.is_floating_point():
        return value
    low, high = value.amin((0, 1, 2)), value.amax((0, 1, 2))
    return (value - low) / (high - low)


DEPLOYMENTS: Mapping[str, Deployment] = {
    "float16": Deployment("precision", partial(_round_activations, dtype=torch.float16)),
    "bfloat16": Deployment("precision", partial(_round_activations, dtype=torch.bfloat16)),
    "int8 weights": Deployment("quantisation", partial(_round_weights, bits=8)),
    "int4 weights": Deployment("quantisation", partial(_round_weights, bits=4)),
    **{
        f"stored as {name}": Deployment(
            "storage", data=partial(_convert_inputs, change=partial(_store, dtype=getattr(torch, name)))
        )
        for name in ("uint16", "uint8", "float16")
    },
    "constants of 1 digit": Deployment("normalisation", _renormalise),
    "constants of the batch": Deployment("normalisation", data=partial(_convert_inputs, change=_rescale)),
    **{
        f"padding {mode}": Deployment("padding", partial(_set, kinds=CONVOLUTIONS, name="padding_mode", value=mode))
        for mode in ("circular", "reflect", "replicate")
    },
    "epsilon 1e-3": Deployment("epsilon", partial(_set, kinds=NORMS, name="eps", value=OTHER_EPSILON)),
    "statistics of the batch": Deployment("statistics", partial(_set, kinds=NORMS, name="training", value=True)),
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
        """Evaluate a copy of the model under a change. None if it changes no bit of the sums."""
        totals = self._sum(change)
        return None if totals == self._totals else self._metric(totals)

    def _metric(self, totals: Mapping[str, float]) -> float:
        return self.trainer.workload.metrics(totals)[self.trainer.target.metric]

    def _sum(self, change: Deployment) -> dict[str, float]:
        with self.trainer.state.evaluated() as trained:
            model = copy.deepcopy(trained).eval()
        change.alter(model)
        form, totals = change.form or self.form, dict[str, float]()
        size, count = self.trainer.config.eval_batch_size, len(self.stored)
        with torch.no_grad():
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
    """Train a model from a seed until it meets its target, or for all epochs. ``form``: of the data, for both
    splits.
    """
    workload = load_workload(descriptor)(config)
    device = choose_device("cpu", world)
    stored = workload.dataset("validation", root)
    training, validation = Shown(workload.dataset("train", root), form), Shown(stored, form)
    torch.manual_seed(seed)
    model = workload.build_model(world).to(device)
    state = TrainingState.create(workload, model, len(training) // config.global_batch_size, seed)
    plan = TrialPlan(descriptor, config, RunFolder(Path("never-written")), trial=0)
    trainer = Trainer(
        plan=plan,
        workload=workload,
        world=world,
        device=device,
        state=state,
        data=SimpleNamespace(train=lambda block: training, validation=lambda block: validation),
        checkpoint=Checkpoint(plan.folder.checkpoint(0), {}),
    )
    watch = StopAgreement(world, lambda: None)
    for epoch in range(1, config.max_epochs + 1):
        trainer.train_block(epoch, 0, watch)
        if trainer.target.reached(trainer.evaluate_block(epoch)):
            break
    return Trained(trainer, stored, form)


def list_rows(trained: Sequence[Trained], changes: Mapping[str, Deployment]) -> Iterator[Deployed]:
    """Yield a row for each change: the metric's difference of every seed, positive if better."""
    sign = 1.0 if trained[0].trainer.target.direction == "max" else -1.0
    for name, change in changes.items():
        print_progress(name)
        after, why = list[float | None](), "no bit of the evaluation changes"
        try:
            after = [each.evaluate(change) for each in trained]
        except RuntimeError as error:  # padding that is wider than a layer's input
            why = render_error(error)
        if all(value is None for value in after):
            yield Deployed(change=name, group=change.group, why=why)
            continue
        deltas = [
            0.0 if value is None else sign * (value - each.value) for value, each in zip(after, trained, strict=True)
        ]
        mean, half = compute_mean_interval(deltas, CONFIDENCE)
        yield Deployed(
            change=name, group=change.group, deltas=tuple(deltas), mean=mean, low=mean - half, high=mean + half
        )


def deploy_all(
    world: World, descriptor: Descriptor, config: RunConfig, root: Path, seeds: range, *, jpeg: bool
) -> dict[str, Any]:
    """Train a model from each seed and evaluate all under each change. Returns fields of `results.Numerics`."""
    find_data(root, config.workload, config.size)
    changes, trained, form = dict(DEPLOYMENTS), [], {}
    if jpeg:
        from mlhpc.plugins.numerics.images import convert, list_forms

        first = load_workload(descriptor)(config).dataset("validation", root).load([0], seed=0, epoch=0)
        if "image" not in first:
            raise InputError(
                f"--jpeg: the samples of {config.workload} are no images; leave it out, or take swinv2_moe"
            )

        changes |= {name: Deployment(group, form=made) for name, group, made in list_forms()}
        form = {"form": convert}
    for seed in seeds:
        print_progress(f"training with seed {seed}")
        trained.append(train(descriptor, config, world, root, seed, **form))
    values = tuple(each.value for each in trained)
    metric = trained[0].trainer.target.metric
    return {"metric": metric, "values": values, "deployed": tuple(list_rows(trained, changes))}
