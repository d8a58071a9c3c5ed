"""Runs a training step on tensors without memory (a dry run): live bytes, FLOPs and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from suite.config import RunConfig
from suite.training.counts.flops import list_flop_formulas
from suite.training.counts.memory import LiveBytes
from suite.training.parallel.data import Clipping, give_norms
from suite.training.parallel.states import ShardedStates, gathered_bytes, names_of, opened, sharded_modules
from suite.workload import Workload

GATHERED = "gathered"
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


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
) -> Passes | None:
    """Run the loss and its backward pass. None if they need values.

    ``kept_gradients``: parameters with gradients all the time, of an earlier part of the step or DDP's. They count in
    the peak.
    """
    standing = []
    for parameter in (each for each in kept_gradients if each.requires_grad):
        parameter.grad = torch.empty_like(parameter)
        standing.append(parameter.grad)
    live = LiveBytes((*model.parameters(), *model.buffers(), *batch.values(), *standing), list_flop_formulas)
    hooks = _count_gathered(model, live)
    model.train()
    try:
        with live:
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
                loss = workload.loss(model, batch)
            kept = live.now - live.labelled[GATHERED]
            loss.backward()  # type: ignore[no-untyped-call]
    except NEEDS_VALUES:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return Passes(kept, gathered_bytes(model), live.peak + sum(each.nbytes for each in standing), float(live.flops))


def run_prefetch_warm_up(model: nn.Module, workload: Workload, batch: Mapping[str, Tensor], config: RunConfig) -> None:
    """Run both passes once, as the first step of a run does, so that the next ones gather ahead."""
    run_passes(model, workload, batch, config, kept_gradients=())
    for parameter in model.parameters():
        parameter.grad = None


def _count_gathered(model: nn.Module, live: LiveBytes) -> list[torch.utils.hooks.RemovableHandle]:
    """Count separately what is gathered for the whole step, between the wrapper's call and the model's."""
    if not isinstance(model, ShardedStates) or model.by_layer:
        return []

    def label(text: str) -> None:
        live.label = text

    begin = model.register_forward_pre_hook(lambda *_: label(GATHERED))
    return [begin, model.module.register_forward_pre_hook(lambda *_: label(""), prepend=True)]


def gather_and_scatter(model: nn.Module) -> None:
    """Gather all parameters and scatter their gradients, for a step whose layers gather nothing themselves."""
    with opened(model):
        whole = [getattr(module, name) for module in sharded_modules(model) for name in names_of(module)]
        total = torch.stack([tensor.sum() for tensor in whole if tensor.requires_grad]).sum() if whole else None
    if total is not None:
        total.backward()  # type: ignore[no-untyped-call]


def run_update(workload: Workload, model: nn.Module) -> Update | None:
    """Run the optimizer's step on existing gradients. None if it needs values."""
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimization = workload.build_optimizer(model, 1)
    optimizer = optimization.optimizer
    give_norms(optimizer, model)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    live = LiveBytes((*model.parameters(), *model.buffers(), *gradients))
    try:
        with live:
            if optimization.clip_norm is not None:
                with _remove_gradients(workload.sharded_parameters(model)):  # their norm is `predict`'s
                    Clipping(model, (), optimization.clip_norm)()
            optimizer.step()
    except (RuntimeError, TypeError, ValueError):  # an optimizer that looks at values
        return None
    state = sum(
        value.nbytes for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)
    )
    average = 0
    if optimization.ema_decay is not None:
        average = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
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
