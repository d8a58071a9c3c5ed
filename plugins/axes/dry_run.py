"""Runs a training step on tensors without memory (a dry run): live bytes, FLOPs and optimizer state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from mlhpc.suite.config import RunConfig
from mlhpc.suite.training.counts.flops import list_flop_formulas
from mlhpc.suite.training.counts.memory import LiveBytes
from mlhpc.suite.training.parallel.clipping import Clipping
from mlhpc.suite.training.parallel.ddp import adapt_optimizer
from mlhpc.suite.training.parallel.fsdp import Group, States, local, states_of
from mlhpc.suite.training.parallel.mesh import Mesh
from mlhpc.suite.training.parallel.recompute import is_computed_again
from mlhpc.suite.workload import Workload

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@contextmanager
def pretended_ranks(mesh: Mesh) -> Iterator[None]:
    """Let torch.distributed have, in the body, the ranks of the tensor axis that share a sample. They send nothing."""
    if mesh.tensor == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=mesh.part, world_size=mesh.tensor)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Passes:
    """Forward and backward pass. None: the loss cannot run on tensors without memory.

    ``activations``: kept for the backward pass, without gathered parameters. ``gathered``: parameters gathered at once.
    ``peak``: the largest sum of activations, gathered parameters, gradients and temporary tensors at any moment.
    """

    activations: int | None
    gathered: int
    peak: int | None
    flops: float


@dataclass(frozen=True)
class Update:
    """The optimizer's step: bytes of its state, with the weights' moving average, and of temporary tensors.

    ``clips``: gradients are clipped first.
    """

    state: int
    temporary: int
    clips: bool


def run_passes(
    model: nn.Module,
    workload: Workload,
    batch: Mapping[str, Tensor],
    config: RunConfig,
    *,
    kept_gradients: Sequence[nn.Parameter],
    in_stages: bool = False,
) -> Passes | None:
    """Run the loss and its backward pass. None if they need values.

    ``kept_gradients``: parameters with gradients all the time, of an earlier part of the step or DDP's. They count in
    the peak. ``in_stages``: of a pipeline, which scatters gradients after its last microbatch.
    """
    standing = []
    for parameter in (each for each in kept_gradients if each.requires_grad):
        parameter.grad = torch.empty_like(parameter)
        standing.append(local(parameter.grad))
    parameters = map(local, model.parameters())
    live = LiveBytes((*parameters, *model.buffers(), *batch.values(), *standing), list_flop_formulas)
    states = states_of(model)
    calls: Counter[nn.Module] = Counter()
    hooks = _follow(model, states, calls) if states is not None and not in_stages else []
    model.train()
    try:
        with live:
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
                loss = workload.loss(model, batch)
            kept = live.now
            loss.backward()  # type: ignore[no-untyped-call]
    except NEEDS_VALUES:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    gathered = 0
    if states is not None:
        gathered = count_gathered_bytes(states, in_stages=in_stages)
        if not in_stages:
            note_sharded_exchanges(states, calls)
    peak = live.peak + gathered + sum(each.nbytes for each in standing)
    return Passes(kept, gathered, peak, float(live.flops))


def count_given_bytes(group: Group, ranks: int) -> int:
    """What one rank gives to an all-gather. Rows of a tensor are padded to equal numbers."""
    values = sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in group.shapes.values())
    return values * group.value_bytes


def count_gathered_bytes(states: States, *, in_stages: bool = False) -> int:
    """The most bytes of whole parameters at once: groups that stay, and two of the others that follow each other.

    FSDP2 gathers the next group while a backward pass computes. ``in_stages``: a pipeline frees no group after a
    backward pass.
    """
    sizes = [
        (count_given_bytes(group, states.shard.size) * states.shard.size, group.resharded and not in_stages)
        for group in states.groups
    ]
    freed = [size for size, resharded in sizes if resharded]
    pairs = [first + second for first, second in pairwise(freed)] or freed
    return sum(size for size, resharded in sizes if not resharded) + max(pairs, default=0)


def note_sharded_exchanges(states: States, calls: Mapping[nn.Module, int], *, microbatches: int = 0) -> None:
    """Note what a forward and a backward pass exchange. ``calls``: of the forward passes of the groups' modules.

    ``microbatches``: of a pipeline of one stage per rank. A group is then gathered for each forward pass that
    follows another, for each backward pass that follows a forward pass, and scattered once.
    """
    ranks = states.shard.size
    for group in states.groups:
        given, times = count_given_bytes(group, ranks), 2 * max(1, calls.get(group.module, 1))
        for _ in range((microbatches + 1 if microbatches else times) if group.resharded else 1):
            states.shard.note(states.shard.name, "all_gather", given, ranks)
        summed = given // group.value_bytes * group.sum_bytes
        states.shard.note(states.shard.name, "reduce_scatter", summed * ranks, ranks)
        if states.replicas is not None:
            states.replicas.note(states.replicas.name, "all_reduce", summed, states.replicas.size)


def _follow(model: nn.Module, states: States, calls: Counter[nn.Module]) -> list[torch.utils.hooks.RemovableHandle]:
    """Count the calls of the modules that FSDP2 gathers for; scatter the gradients of a group as soon as it has all."""

    def count(module: nn.Module, _: object) -> None:
        calls[module] += not is_computed_again()

    named, hooks = dict(model.named_parameters()), []
    for group in states.groups:
        hooks.append(group.module.register_forward_pre_hook(count))
        scatter = _Scatter(group, [named[name] for name in group.shapes], states.shard.size)
        hooks += [_after_gradient(each, scatter) for each in scatter.parameters]
    return hooks


def _after_gradient(parameter: nn.Parameter, call: _Scatter) -> torch.utils.hooks.RemovableHandle:
    return parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call,no-any-return]


class _Scatter:
    """Makes of a group's whole gradients what FSDP2 makes: a vector of all, then this rank's part of it."""

    def __init__(self, group: Group, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        self.parameters = [each for each in parameters if each.requires_grad]
        self._values, self._ranks = count_given_bytes(group, ranks) // group.value_bytes, ranks
        self._mine: Tensor | None = None

    def __call__(self, parameter: Tensor) -> None:
        if all(each.grad is not None for each in self.parameters):
            whole = parameter.new_empty(self._values * self._ranks)
            for each in self.parameters:
                each.grad = None
            self._mine = whole.new_empty(self._values)


def scatter_parameters(model: nn.Module) -> int:
    """Put this rank's rows in the place of the parameters whose states are split, without memory. Returns their
    bytes.
    """
    states, size = states_of(model), 0
    for name in states.shapes if states is not None else ():
        assert states is not None
        path, _, last = name.rpartition(".")
        module, (low, high) = model.get_submodule(path), states.rows(name)
        whole = module._parameters[last]
        assert whole is not None
        mine = module._parameters[last] = nn.Parameter(whole.detach()[low:high].clone(), whole.requires_grad)
        size += mine.nbytes
    return size


def run_update(workload: Workload, model: nn.Module) -> Update | None:
    """Run the optimizer's step on existing gradients. None if it needs values."""
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimization = workload.build_optimizer(model, 1)
    optimizer = optimization.optimizer
    adapt_optimizer(optimizer, model)
    parameters = [local(parameter) for parameter in model.parameters()]
    gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    live = LiveBytes((*parameters, *model.buffers(), *gradients))
    try:
        with live:
            if optimization.clip_norm is not None:
                with _remove_gradients(workload.sharded_parameters(model)):  # their norm is `predict`'s
                    Clipping(model, (), optimization.clip_norm)()
            optimizer.step()
    except (RuntimeError, TypeError, ValueError):  # an optimizer that looks at values
        return None
    state = sum(
        local(value).nbytes for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)
    )
    average = 0
    if optimization.ema_decay is not None:
        average = sum(each.nbytes for each in (*parameters, *model.buffers()))
    return Update(state + average, max(live.peak - live.now, 0), optimization.clip_norm is not None)


@contextmanager
def _remove_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Remove the parameters' gradients in the body."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
