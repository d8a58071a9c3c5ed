"""Holds the state of training: weights, moving average, optimizer state, seed, and the position reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from suite.training.parallel.data import Clipping, give_norms
from suite.training.parallel.places import Place
from suite.training.parallel.products import slices
from suite.training.parallel.states import piece_of
from suite.training.parallel.states import pieces as pieces_of
from suite.workload import Optimization, Workload


@dataclass(frozen=True)
class Position:
    """The next step to take: 0-based within a 1-based block. A block is the training between two evaluations."""

    block: int
    step: int


Pieces = dict[
    str, tuple[tuple[int, int, int, int], Tensor]
]  # "<part> <name>", or "optimizer <position> <name>": place, values


@dataclass(frozen=True)
class _HeldTensor:
    """The values of a tensor that this rank holds. ``written``: this rank saves them."""

    place: Place
    written: bool


@dataclass
class TrainingState:
    """Everything that a trial changes while it trains, and its seed.

    ``sharded``: parameters that are split over ranks; this rank holds its own share. ``places``: by name, where a share
    begins in the whole, if the workload says so. ``copy``: this rank's number among the ranks with the same shares, and
    their number. ``averaged``: the moving average of the weights, which is evaluated instead of them, or None.
    """

    model: nn.Module
    optimization: Optimization
    sharded: Sequence[nn.Parameter]
    averaged: AveragedModel | None
    seed: int
    places: Mapping[str, int] = field(default_factory=dict)
    copy: tuple[int, int] = (0, 1)

    @staticmethod
    def create(workload: Workload, model: nn.Module, steps_per_epoch: int, seed: int) -> TrainingState:
        """Build the state before the first step, with the workload's optimizer and schedule."""
        optimization = workload.build_optimizer(model, steps_per_epoch)
        give_norms(optimization.optimizer, model)
        shares, places = workload.sharded_parameters(model), workload.share_places(model)
        averaged, copy = _make_moving_average(model, optimization), workload.share_copy(model)
        return TrainingState(model, optimization, shares, averaged, seed, places, copy)

    def update(self, step: int, epoch: int) -> None:
        """Update the weights, then their moving average, at the learning rate of a step (from 0) and epoch (from 1).

        Gradients are clipped first if the workload asks for it. That is a collective if ranks have parts of the model.
        """
        for group in self.optimization.optimizer.param_groups:
            group["lr"] = self.optimization.learning_rate(step, epoch)
        if self._clipping is not None:
            self._clipping()
        self.optimization.optimizer.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)

    @cached_property
    def _clipping(self) -> Clipping | None:
        """The function that clips the gradients, or None."""
        norm = self.optimization.clip_norm
        return None if norm is None else Clipping(self.model, self.sharded, norm, copies=self.copy[1])

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that is evaluated: the moving average of the weights if there is one."""
        return self.model if self.averaged is None else self.averaged.module

    def split(self) -> tuple[dict[str, Any], dict[str, Any], Pieces]:
        """Split the state into what all ranks share, this rank's own part, and its pieces of tensors.

        Of several ranks with the same pieces only one returns them.
        """
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        pieces: Pieces = {}
        ranges = self._ranges()
        for name, module in self._modules():
            names = self._own_names(name)
            prefix = _find_name_prefix(name)
            state = module.state_dict()
            own[name] = {key: value for key, value in state.items() if key in names}
            split = {key for key in state if key.removeprefix(prefix) in ranges and key not in names}
            shared[name] = {key: value for key, value in state.items() if key not in names | split}
            for key in sorted(key for key in split if ranges[key.removeprefix(prefix)].written):
                pieces[f"{name} {key}"] = (astuple(ranges[key.removeprefix(prefix)].place), state[key].reshape(-1))
        state = self.optimization.optimizer.state_dict()
        mine = self._own_positions()
        own["optimizer"] = {i: value for i, value in state["state"].items() if i in mine}
        kept: dict[int, dict[str, Any]] = {}
        for i, values in state["state"].items():
            name = self._names[i]
            kept[i] = {key: value for key, value in values.items() if not self._is_piece(i, value)}
            pieces |= {
                f"optimizer {i} {key}": (astuple(ranges[name].place), value.reshape(-1))
                for key, value in values.items()
                if key not in kept[i] and ranges[name].written
            }
        shared["optimizer"] = state | {"state": {i: value for i, value in kept.items() if i not in mine}}
        return shared, own, pieces

    def restore(self, shared: dict[str, Any], own: dict[str, Any], gathered: Mapping[str, Tensor]) -> None:
        """Load the parts that `split` returned, perhaps under another plan.

        ``gathered``: the values that `wanted` asked for, assembled from all ranks' pieces.
        """
        for name, module in self._modules():
            prefix, found = _find_name_prefix(name), shared[name] | own[name]
            for key, target in module.state_dict().items():
                if f"{name} {key}" in gathered:
                    found[key] = gathered[f"{name} {key}"].view(target.shape)
                elif key in found and found[key].shape != target.shape:
                    found[key] = self._ranges()[key.removeprefix(prefix)].place.of(found[key]).view(target.shape)
            module.load_state_dict(found)
        state = shared["optimizer"]
        values = {i: dict(each) for i, each in (state["state"] | own["optimizer"]).items()}
        for label, tensor in gathered.items():
            part, _, rest = label.partition(" ")
            if part == "optimizer":
                position, _, key = rest.partition(" ")
                values.setdefault(int(position), {})[key] = tensor
        weights = self._weights()
        for i, each in values.items():
            for key, value in each.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != weights[i].shape:
                    piece = (
                        value if value.numel() == weights[i].numel() else self._ranges()[self._names[i]].place.of(value)
                    )
                    each[key] = piece.view(weights[i].shape)
        self.optimization.optimizer.load_state_dict(state | {"state": values})

    def wanted(self) -> dict[str, Place]:
        """Return which values this rank needs of each tensor that may be saved in pieces, by name in `Pieces`."""
        ranges = self._ranges()
        found: dict[str, Place] = {}
        every = {name: Place.of_range(0, parameter.numel()) for name, parameter in self.model.named_parameters()}
        every |= {name: each.place for name, each in ranges.items()}
        for part, _ in self._modules():
            found |= {f"{part} {_find_name_prefix(part)}{name}": place for name, place in every.items()}
        for i, name in enumerate(self._names):
            found[f"optimizer {i} "] = every[name]
        return found

    @property
    def has_pieces(self) -> bool:
        """True if ranks have pieces of parameters."""
        return bool(self._ranges())

    @property
    def _names(self) -> list[str]:
        """The names of the optimizer's parameters, by position."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(weight)] for weight in self._weights()]

    def _weights(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimization.optimizer.param_groups for parameter in group["params"]]

    def _is_piece(self, position: int, value: object) -> bool:
        weight = self._weights()[position]
        split = self._names[position] in self._ranges()
        return split and isinstance(value, Tensor) and value.dim() > 0 and value.shape == weight.shape

    def _ranges(self) -> dict[str, _HeldTensor]:
        """Return the parts of parameters that this rank holds, by name."""
        found = {}
        for name, _, shape, holders in pieces_of(self.model):
            assert holders.shard is not None
            begin, end = piece_of(shape.numel(), holders.pieces, holders.shard.rank)
            found[name] = _HeldTensor(
                Place.of_range(begin, end), holders.replicas is None or holders.replicas.rank == 0
            )
        for name, parameter in self.model.named_parameters() if self.places else ():
            if name in self.places:
                first = self.places[name]
                found[name] = _HeldTensor(Place.of_range(first, first + parameter.numel()), self.copy[0] == 0)
        for name, _, part in slices(self.model):
            if name in self.places:  # of experts on some ranks
                found[name] = _HeldTensor(
                    replace(part.place, first=self.places[name] + part.place.first), self.copy[0] == 0
                )
            else:
                found[name] = _HeldTensor(part.place, part.twin == 0)
        return found

    def _modules(self) -> list[tuple[str, nn.Module]]:
        return [("model", self.model)] + ([("averaged", self.averaged)] if self.averaged is not None else [])

    @property
    def has_shares(self) -> bool:
        """True if this rank has shares with no known place in the whole.

        The number of ranks must then stay the same.
        """
        return bool(self._unplaced())

    def _unplaced(self) -> set[int]:
        """Return the ids of shares whose place in the whole the workload does not state."""
        placed = {id(parameter) for name, parameter in self.model.named_parameters() if name in self.places}
        return {id(parameter) for parameter in self.sharded} - placed

    def _own_names(self, part: str) -> set[str]:
        unplaced = self._unplaced()
        names = {name for name, parameter in self.model.named_parameters() if id(parameter) in unplaced}
        names |= {name for name, _ in self.model.named_buffers()}
        return names if part == "model" else {f"module.{name}" for name in names}  # as torch's AveragedModel calls them

    def _own_positions(self) -> set[int]:
        unplaced = self._unplaced()
        return {position for position, parameter in enumerate(self._weights()) if id(parameter) in unplaced}


def _find_name_prefix(part: str) -> str:
    """Return what torch's AveragedModel puts before the names of a model's parameters."""
    return "" if part == "model" else "module."


class MovingAverage(AveragedModel):
    """The exponential moving average of the weights, with buffers as they are."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self._decay = decay
        self._of = model, _list_tensors(model), _list_tensors(self.module)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the present weights to the average; the first ones are copied."""
        if model is not self._of[0]:
            self._of = model, _list_tensors(model), _list_tensors(self.module)
        _, (theirs, their_buffers), (mine, buffers) = self._of
        if int(self.n_averaged) == 0:  # on the host
            torch._foreach_copy_(mine, theirs)
        else:
            torch._foreach_lerp_(mine, theirs, 1 - self._decay)
        for own, other in zip(buffers, their_buffers, strict=True):
            own.copy_(other)
        self.n_averaged += 1


def _list_tensors(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """List the parameters and the buffers."""
    return [*model.parameters()], [*model.buffers()]


def _make_moving_average(model: nn.Module, optimization: Optimization) -> AveragedModel | None:
    return None if optimization.ema_decay is None else MovingAverage(model, optimization.ema_decay)
