"""Holds the state of training: weights, moving average, optimizer state, seed, and the position reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from suite.training.parallel.data import Clipping, adapt_optimizer
from suite.training.parallel.places import Place, slices
from suite.training.parallel.states import local, states_of
from suite.workload import Optimization, Workload


@dataclass(frozen=True)
class Position:
    """The next step to take: 0-based within a 1-based block. A block is the training between two evaluations."""

    block: int
    step: int


Pieces = dict[
    str, tuple[tuple[int, int, int, int], Tensor]
]  # "<part> <name>", or "optimizer <parameter> <name>": place, values


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
    averaged: MovingAverage | None
    seed: int
    places: Mapping[str, int] = field(default_factory=dict)
    copy: tuple[int, int] = (0, 1)

    @staticmethod
    def create(workload: Workload, model: nn.Module, steps_per_epoch: int, seed: int) -> TrainingState:
        """Build the state before the first step, with the workload's optimizer and schedule."""
        optimization = workload.build_optimizer(model, steps_per_epoch)
        adapt_optimizer(optimization.optimizer, model)
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
            self.averaged.update()

    @cached_property
    def _clipping(self) -> Clipping | None:
        """The function that clips the gradients, or None."""
        norm = self.optimization.clip_norm
        return None if norm is None else Clipping(self.model, self.sharded, norm, copies=self.copy[1])

    @contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """Yield the model to evaluate. Within the body it has the moving average of its weights, if there is one."""
        if self.averaged is not None:
            self.averaged.swap()
        try:
            yield self.model
        finally:
            if self.averaged is not None:
                self.averaged.swap()

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
            state = {key: local(value) for key, value in module.state_dict().items()}
            own[name] = {key: value for key, value in state.items() if key in names}
            split = {key for key in state if key.removeprefix(prefix) in ranges and key not in names}
            shared[name] = {key: value for key, value in state.items() if key not in names | split}
            for key in sorted(key for key in split if ranges[key.removeprefix(prefix)].written):
                pieces[f"{name} {key}"] = (astuple(ranges[key.removeprefix(prefix)].place), state[key].reshape(-1))
        optimizer, unplaced = self.optimization.optimizer, self._unplaced()
        own["optimizer"], kept = {}, {}
        for name, weight in self._weights().items():
            values = {
                key: local(value) if isinstance(value, Tensor) else value
                for key, value in optimizer.state.get(weight, {}).items()
            }
            if id(weight) in unplaced:
                own["optimizer"][name] = values
                continue
            split = {key for key, value in values.items() if name in ranges and _is_like(value, local(weight))}
            kept[name] = {key: value for key, value in values.items() if key not in split}
            pieces |= {
                f"optimizer {name} {key}": (astuple(ranges[name].place), values[key].reshape(-1))
                for key in values
                if key in split and ranges[name].written
            }
        shared["optimizer"] = {"state": kept, "groups": self._groups()}
        return shared, own, pieces

    def restore(self, shared: dict[str, Any], own: dict[str, Any], gathered: Mapping[str, Tensor]) -> None:
        """Load the parts that `split` returned, perhaps under another plan.

        ``gathered``: the values that `wanted` asked for, assembled from all ranks' pieces.
        """
        ranges = self._ranges()
        for name, module in self._modules():
            prefix, found = _find_name_prefix(name), shared[name] | own[name]
            for key, target in module.state_dict().items():
                mine = local(target)
                value = gathered.get(f"{name} {key}", found.get(key))
                assert value is not None, key
                if value.numel() != mine.numel():
                    value = ranges[key.removeprefix(prefix)].place.of(value)
                mine.copy_(value.view(mine.shape))
        every: dict[str, dict[str, Any]] = {name: dict(each) for name, each in shared["optimizer"]["state"].items()}
        every |= own["optimizer"]
        for label, tensor in gathered.items():
            part, _, rest = label.partition(" ")
            if part == "optimizer":
                name, _, key = rest.partition(" ")
                every.setdefault(name, {})[key] = tensor
        self._load_optimizer(every, shared["optimizer"]["groups"])

    def _load_optimizer(self, values: Mapping[str, dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
        """Load the optimizer's state by the parameters' names: under another plan its groups may differ."""
        weights, optimizer, ranges = self._weights(), self.optimization.optimizer, self._ranges()
        state: dict[int, dict[str, Any]] = {}
        for position, (name, weight) in enumerate(weights.items()):
            mine = local(weight)
            state[position] = dict(values.get(name, {}))
            for key, value in state[position].items():
                if not isinstance(value, Tensor) or not value.dim():
                    continue
                part = value if value.numel() == mine.numel() else ranges[name].place.of(value)
                part = part.view(mine.shape)
                state[position][key] = part if weight is mine else _like(weight, part)
        now = optimizer.state_dict()["param_groups"]
        names = list(weights)
        for group in now:
            former = next(each for each in groups if names[group["params"][0]] in each["names"])
            group |= {key: value for key, value in former.items() if key != "names"}
        kept = {position: each for position, each in state.items() if each}
        optimizer.load_state_dict({"state": kept, "param_groups": now})

    def _groups(self) -> list[dict[str, Any]]:
        """The settings of the optimizer's groups, and the names of their parameters."""
        names = {id(weight): name for name, weight in self._weights().items()}
        return [
            {"names": [names[id(each)] for each in group["params"]]}
            | {key: value for key, value in group.items() if key != "params"}
            for group in self.optimization.optimizer.param_groups
        ]

    def wanted(self) -> dict[str, Place]:
        """Return which values this rank needs of each tensor that may be saved in pieces, by name in `Pieces`."""
        ranges = self._ranges()
        found: dict[str, Place] = {}
        every = {name: Place.of_range(0, local(each).numel()) for name, each in self.model.named_parameters()}
        every |= {name: each.place for name, each in ranges.items()}
        for part, _ in self._modules():
            found |= {f"{part} {_find_name_prefix(part)}{name}": place for name, place in every.items()}
        for name in self._weights():
            found[f"optimizer {name} "] = every[name]
        return found

    @property
    def has_pieces(self) -> bool:
        """True if ranks have pieces of parameters."""
        return bool(self._ranges())

    def _weights(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters by name, in its order."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = self.optimization.optimizer.param_groups
        return {names[id(weight)]: weight for group in groups for weight in group["params"]}

    def _ranges(self) -> dict[str, _HeldTensor]:
        """Return the parts of parameters that this rank holds, by name."""
        found, states = {}, states_of(self.model)
        for name, shape in states.shapes.items() if states is not None else ():
            assert states is not None
            begin, end = (row * (shape.numel() // shape[0]) for row in states.rows(name))
            found[name] = _HeldTensor(Place.of_range(begin, end), states.replicas is None or states.replicas.rank == 0)
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

    def _modules(self) -> list[tuple[str, nn.Module | MovingAverage]]:
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


def _find_name_prefix(part: str) -> str:
    """Return what torch's AveragedModel puts before the names of a model's parameters."""
    return "" if part == "model" else "module."


class MovingAverage:
    """The exponential moving average of the weights, with buffers as they are. Of a DTensor it has this rank's part.

    Its state has the names that torch's AveragedModel gives.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.n_averaged = torch.tensor(0)
        self.weights = {name: local(each).detach().clone() for name, each in model.named_parameters()}
        self.buffers = {name: each.clone() for name, each in model.named_buffers()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights to the average; the first ones are copied."""
        mine, theirs = list(self.weights.values()), [local(each) for each in self._model.parameters()]
        if int(self.n_averaged) == 0:  # on the host
            torch._foreach_copy_(mine, theirs)
        else:
            torch._foreach_lerp_(mine, theirs, 1 - self._decay)
        for name, buffer in self._model.named_buffers():
            self.buffers[name].copy_(buffer)
        self.n_averaged += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and buffers of the model with those of the average."""
        for theirs, mine in (
            (dict(self._model.named_parameters()), self.weights),
            (dict(self._model.named_buffers()), self.buffers),
        ):
            for name, tensor in theirs.items():
                kept = local(tensor).clone()
                local(tensor).copy_(mine[name])
                mine[name].copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Return its tensors by name."""
        every = self.weights | self.buffers
        return {"n_averaged": self.n_averaged} | {f"module.{name}": every[name] for name in self._model.state_dict()}


def _is_like(value: object, mine: Tensor) -> bool:
    """Return True if a value of the optimizer has an entry for each entry of this rank's part of a parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == mine.shape


def _like(parameter: Tensor, mine: Tensor) -> Tensor:
    """A DTensor that lies as a parameter does, of this rank's part."""
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        mine,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _make_moving_average(model: nn.Module, optimization: Optimization) -> MovingAverage | None:
    return None if optimization.ema_decay is None else MovingAverage(model, optimization.ema_decay)
