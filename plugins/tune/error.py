"""Measures how far the gradients of a side's step are from float64, and how far rounding alone may put them.

The step begins at the side's present weights, without dropout and noise. The truth is the same step of the whole model,
without a plan. The bound of a gradient is `FACTOR` times the largest error of runs whose weights and inputs differ by
one unit in the last place: a plan sums in another order, which such runs do not sample. No bound is below the middle of
all: a single number may be right by luck in every run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mlhpc.plugins.tune.space import StepError
from mlhpc.suite.machine.probes.allowance import find_usable_resources
from mlhpc.suite.plugins import list_missing_wings
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.devices import use_precision
from mlhpc.suite.training.loop import StepWindow, Trainer, make_autocast
from mlhpc.suite.training.state import TrainingState
from mlhpc.suite.workload import load_workload

if TYPE_CHECKING:
    from mlhpc.plugins.numerics.step import Case
    from mlhpc.plugins.tune.sides import Side

RUNS = 5
FACTOR = 10.0
TINY = 1e-300
ROOM = 4  # times the memory of a side: float64, of all ranks that share samples


def measure_error(side: Side, begin: int, memory: float) -> StepError:
    """Measure the error of a step of a side, whose tensors take ``memory`` bytes on a rank. All ranks call it.

    It is the side's step ``begin`` that is taken, without its update. The side's checkpoint is written anew.
    """
    trainer = side.trainer
    why = _find_reason(trainer, memory)
    if why:
        return StepError(why=why)
    from mlhpc.plugins.numerics.step import Case

    side.save()
    side.process.restore()
    use_precision(trainer.config.precision, side.device)
    with _nothing_drawn():
        mine = _take_gradients(side, begin)
    workload = load_workload(trainer.plan.descriptor)(trainer.config)
    whole = workload.build_model(trainer.world)
    state = TrainingState.create(workload, whole, 1, trainer.state.seed)
    Checkpoint(side.checkpoint.path, side.checkpoint.identity).load(trainer.world, state)
    batches = trainer.batches(side.whole, begin, begin + 1)
    parts = tuple({name: value.to("cpu", copy=True) for name, value in batch.items()} for _, batch in batches)
    with _nothing_drawn():
        return _compare(side, Case(workload, whole, parts, 0), mine)


def _compare(side: Side, case: Case, mine: Mapping[str, Tensor]) -> StepError:
    """Compare gradients of which this rank has a part with float64. Returns the one that is farthest over its bound."""
    from mlhpc.plugins.numerics.judge import UNITS
    from mlhpc.plugins.numerics.step import compute_errors, run_step, run_truth

    trainer, device = side.trainer, side.device
    truth = _average(run_truth(case, whole=False), device)
    unit, context = UNITS[trainer.config.precision], partial(make_autocast, trainer.config, device)
    runs = [
        compute_errors(
            _average(run_step(case, device=device, context=context, noise=(unit, seed), whole=False), device), truth
        )
        for seed in range(RUNS)
    ]
    most = {name: max(run[name] for run in runs) for name in truth}
    least, squares = max(unit / 8, statistics.median(most.values())), dict.fromkeys(truth, 0.0)
    held = trainer.state.hold(trainer.world.rank, {name: {"": each} for name, each in mine.items()})
    for name, right in truth.items():
        own = held.get(f"optimizer {name} ")
        for offsets, part in own.parts.items() if own is not None and own.written else ():
            box = tuple(slice(at, at + length) for at, length in zip(offsets, part.shape, strict=True))
            squares[name] += float((part.cpu().double() - right[box]).square().sum())
    squares = trainer.world.sum(squares)
    found = [
        StepError(squares[name] ** 0.5 / max(float(right.norm()), TINY), FACTOR * max(most[name], least), of=name)
        for name, right in truth.items()
        if math.isfinite(most[name])  # a gradient that is 0 in float64 alone
    ]
    return max(found, key=lambda each: (each.error or 0.0) / (each.bound or 1.0))


def _find_reason(trainer: Trainer, memory: float) -> str:
    """Return why a side's step cannot be compared, the same on all ranks; nothing if it can."""
    shared, world = trainer.shared, trainer.world
    if "numerics" in list_missing_wings():
        return "the wing 'numerics' is not installed"
    if trainer.workload.offloads or trainer.state.sharded:
        return "its experts are offloaded, or spread over ranks"
    if trainer.config.graphs is True or trainer.config.compile:
        return "its steps are compiled"
    if shared.plan is not None and shared.plan.compress is not None:
        return "its plan rounds gradients"
    found = find_usable_resources()
    room = found.memory_limit or found.memory_total
    each = ROOM * world.summary(memory)["max"] * shared.mesh.size / shared.mesh.data_size
    if not room or each * world.size / world.nodes > room:
        return "a whole model in float64 takes too much memory"
    return ""


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Drop nothing and add no noise: ranks that share samples, and stages of a pipeline, draw in another order.

    A mode of torch would not reach a forward pass that the backward pass computes again.
    """

    def draw(make: Any) -> Callable[..., Tensor]:
        return lambda *sizes, generator=None, **options: make(*sizes, **options)

    ones, zeros = (
        {"rand": torch.ones, "rand_like": torch.ones_like},
        {"randn": torch.zeros, "randn_like": torch.zeros_like},
    )
    with ExitStack() as stack:
        for name, make in (ones | zeros).items():
            stack.enter_context(patch.object(torch, name, draw(make)))
        stack.enter_context(patch.object(F, "dropout", lambda x, *_, **__: x))
        yield


def _take_gradients(side: Side, begin: int) -> dict[str, Tensor]:
    """Return this rank's part of the gradients of a step, before clipping; the weights stay."""
    trainer, found = side.trainer, dict[str, Tensor]()

    def keep(step: int, epoch: int) -> None:
        weights = trainer.state.model.named_parameters()
        found.update({name: weight.grad for name, weight in weights if weight.grad is not None})

    trainer.wrapped.train()
    trainer.state.update = keep  # type: ignore[method-assign]
    try:
        for item, batch in trainer.batches(side.data, begin, begin + 1):
            trainer.part(batch, item, StepWindow(1, begin))
    finally:
        del trainer.state.update
    return found


def _average(trace: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the gradients of a step, averaged over ranks."""
    found = {name.removeprefix("gradient "): each for name, each in trace.items() if name.startswith("gradient ")}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return found
    for name, each in found.items():
        there = each.to(device)
        dist.all_reduce(there)
        found[name] = there.cpu() / dist.get_world_size()
    return found
