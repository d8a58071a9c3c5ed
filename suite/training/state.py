"""The state of training: weights, their moving average, optimizer state, seed; and the position reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from suite.workload import Optimization, Workload


@dataclass(frozen=True)
class Position:
    """The next step to take: 0-based within a 1-based block. A block is the training between two evaluations."""

    block: int
    step: int


@dataclass
class TrainingState:
    """What a trial changes while it trains, and its seed.

    ``sharded``: parameters of which this rank holds its own share. ``averaged``: the moving average of the weights, which is
    evaluated in their place; None if the workload asks for none.
    """

    model: nn.Module
    optimization: Optimization
    sharded: Sequence[nn.Parameter]
    averaged: AveragedModel | None
    seed: int

    @staticmethod
    def create(workload: Workload, model: nn.Module, steps_per_epoch: int, seed: int) -> TrainingState:
        """The state before the first step: optimizer and schedule as the workload builds them for this model."""
        optimization = workload.build_optimizer(model, steps_per_epoch)
        return TrainingState(
            model, optimization, workload.sharded_parameters(model), _moving_average(model, optimization), seed
        )

    @property
    def evaluated_model(self) -> nn.Module:
        """The model whose metric counts: the moving average of the weights if there is one."""
        return self.model if self.averaged is None else self.averaged.module

    def split(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the state into the part that is the same on every rank and the part of this rank."""
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for name, module in self._modules():
            names = self._own_names(name)
            state = module.state_dict()
            shared[name] = {key: value for key, value in state.items() if key not in names}
            own[name] = {key: value for key, value in state.items() if key in names}
        state = self.optimization.optimizer.state_dict()
        mine = self._own_positions()
        shared["optimizer"] = state | {"state": {i: value for i, value in state["state"].items() if i not in mine}}
        own["optimizer"] = {i: value for i, value in state["state"].items() if i in mine}
        return shared, own

    def restore(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Load a state that `split` returned."""
        for name, module in self._modules():
            module.load_state_dict(shared[name] | own[name])
        state = shared["optimizer"]
        self.optimization.optimizer.load_state_dict(state | {"state": state["state"] | own["optimizer"]})

    def _modules(self) -> list[tuple[str, nn.Module]]:
        return [("model", self.model)] + ([("averaged", self.averaged)] if self.averaged is not None else [])

    def _own_names(self, part: str) -> set[str]:
        sharded = {id(parameter) for parameter in self.sharded}
        names = {name for name, parameter in self.model.named_parameters() if id(parameter) in sharded}
        names |= {name for name, _ in self.model.named_buffers()}
        return names if part == "model" else {f"module.{name}" for name in names}  # as torch's AveragedModel calls them

    def _own_positions(self) -> set[int]:
        sharded = {id(parameter) for parameter in self.sharded}
        parameters = [parameter for group in self.optimization.optimizer.param_groups for parameter in group["params"]]
        return {position for position, parameter in enumerate(parameters) if id(parameter) in sharded}


class MovingAverage(AveragedModel):
    """The exponential moving average of the weights, with buffers as they are.

    torch's own update sends the number of updates to the GPU, and waits, in every step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self._decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take in the present weights; the first ones as they are."""
        mine: list[torch.Tensor] = [*self.module.parameters()]
        theirs: list[torch.Tensor] = [*model.parameters()]
        if int(self.n_averaged) == 0:  # on the host
            torch._foreach_copy_(mine, theirs)
        else:
            torch._foreach_lerp_(mine, theirs, 1 - self._decay)
        for own, other in zip(self.module.buffers(), model.buffers(), strict=True):
            own.copy_(other)
        self.n_averaged += 1


def _moving_average(model: nn.Module, optimization: Optimization) -> AveragedModel | None:
    return None if optimization.ema_decay is None else MovingAverage(model, optimization.ema_decay)
