"""Holds the state of training: weights, moving average, optimizer state, seed, and the position reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mlhpc.suite.training.parallel.clipping import Clipping
from mlhpc.suite.training.parallel.ddp import adapt_optimizer
from mlhpc.suite.training.parallel.fsdp import local, states_of
from mlhpc.suite.training.parallel.layout import Held, Layout, SharePlace, find_away, slices, stages_of
from mlhpc.suite.workload import Optimization, Workload


@dataclass(frozen=True)
class Position:
    """The next step to take: 0-based within a 1-based block. A block is the training between two evaluations."""

    block: int
    step: int


Moments = dict[str, dict[str, Any]]  # of an optimizer, by the name of its parameter


@dataclass
class TrainingState:
    """Everything that a trial changes while it trains, and its seed.

    ``sharded``: parameters that are split over ranks; this rank holds its own share. ``places``: by name, where a share
    lies in the whole, if the workload says so. ``copy``: this rank's number among the ranks with the same shares, and
    their number. ``averaged``: the moving average of the weights, which is evaluated instead of them, or None.
    """

    model: nn.Module
    optimization: Optimization
    sharded: Sequence[nn.Parameter]
    averaged: MovingAverage | None
    seed: int
    places: Mapping[str, SharePlace] = field(default_factory=dict)
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

    def moments(self) -> Moments:
        """Return the state of the optimizer by the names of the parameters."""
        state = self.optimization.optimizer.state
        return {name: dict(state[weight]) for name, weight in self._weights().items() if weight in state}

    def hold(self, rank: int, moments: Moments, *, own_buffers: bool = True) -> dict[str, Held]:
        """Return every tensor of the state, and of ``moments``, under its name in a checkpoint.

        Of several ranks with the same values only one writes them. Without ``own_buffers`` each rank's own are left
        out.
        """
        layouts, found = self._layouts(rank), {}
        for part, tensors in self._tensors():
            for name, tensor in tensors.items():
                layout = layouts.get(name)
                if layout is not None:
                    found[f"{part} {name}{self._ending(name, rank)}"] = layout.hold(tensor)
                elif own_buffers:
                    found[f"{part} {name} of rank {rank}"] = Layout.of_whole(tensor.shape, written=True).hold(tensor)
        if self.averaged is not None:
            whole = Layout.of_whole(torch.Size(), written=rank == 0)
            found["averaged, updates"] = whole.hold(self.averaged.n_averaged)
        weights = self._weights()
        for name, values in moments.items():
            for key, value in values.items():
                if not _has_dimensions(value):
                    continue
                mine = local(value)
                alike = mine.shape == local(weights[name]).shape
                ending = self._ending(name, rank)
                first = self._is_first(rank) or bool(ending)
                layout = layouts[name] if alike else Layout.of_whole(mine.shape, written=first)
                found[f"optimizer {name} {key}{ending}"] = layout.hold(mine)
        return found

    def make_moments(self, saved: Mapping[str, tuple[torch.Size, torch.dtype]], rank: int) -> Moments:
        """Make tensors for the optimizer's state from what a checkpoint has: shapes of whole tensors, and types."""
        weights, layouts = self._weights(), self._layouts(0)
        found: Moments = {}
        for label, (size, dtype) in saved.items():
            part, name, key = (*label.split(" ", 2), "")[:3]
            if part != "optimizer" or name not in weights or not label.endswith(self._ending(name, rank)):
                continue
            weight, key = weights[name], key.split(" of rank ")[0]
            away = find_away(weight)
            if away is not None:
                found.setdefault(name, {})[key] = away.make_moment(key)
            elif size == layouts[name].whole:
                mine = torch.empty_like(local(weight), dtype=dtype)
                found.setdefault(name, {})[key] = mine if weight is local(weight) else _like(weight, mine)
            else:
                found.setdefault(name, {})[key] = torch.empty(size, dtype=dtype)
        return found

    def settings(self) -> tuple[dict[str, Any], Moments]:
        """Return numbers of the optimizer and its groups' settings, of all ranks, and numbers of this rank's shares."""
        others = {
            name: {
                key: local(value) if isinstance(value, Tensor) else value
                for key, value in values.items()
                if not _has_dimensions(value)
            }
            for name, values in self.moments().items()
        }
        own = {name: values for name, values in others.items() if values and self._ending(name, 0)}
        shared = {name: values for name, values in others.items() if values and name not in own}
        return {"groups": self._groups(), "values": shared}, own

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Set buffers by their names in a checkpoint, without the rank."""
        for part, tensors in self._tensors():
            for name, tensor in tensors.items():
                if f"{part} {name}" in values:
                    tensor.copy_(values[f"{part} {name}"])

    def restore(self, moments: Moments, groups: list[Any], others: Moments) -> None:
        """Load the optimizer's state by the parameters' names: under another plan its groups may differ."""
        names, optimizer = list(self._weights()), self.optimization.optimizer
        state = {at: moments.get(name, {}) | others.get(name, {}) for at, name in enumerate(names)}
        now = optimizer.state_dict()["param_groups"]
        for group in now:
            former = next(each for each in groups if names[group["params"][0]] in each["names"])
            group |= {key: value for key, value in former.items() if key != "names"}
        optimizer.load_state_dict({"state": {at: each for at, each in state.items() if each}, "param_groups": now})

    def _groups(self) -> list[dict[str, Any]]:
        """The settings of the optimizer's groups, and the names of their parameters."""
        names = {id(weight): name for name, weight in self._weights().items()}
        return [
            {"names": [names[id(each)] for each in group["params"]]}
            | {key: value for key, value in group.items() if key != "params"}
            for group in self.optimization.optimizer.param_groups
        ]

    def _is_first(self, rank: int) -> bool:
        """Return True on the first of the ranks that have the same stages of a pipeline; without one, on rank 0."""
        stages = stages_of(self.model)
        return rank == 0 if stages is None else stages.replicas.rank == 0

    def _weights(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters by name, in its order."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = self.optimization.optimizer.param_groups
        return {names[id(weight)]: weight for group in groups for weight in group["params"]}

    def _layouts(self, rank: int) -> dict[str, Layout]:
        """Return where this rank's values of each parameter lie, by name."""
        states, found = states_of(self.model), {}
        shares = {id(parameter) for parameter in self.sharded}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in shares and name in self.places:
                begin, whole = self.places[name]
                found[name] = Layout(torch.Size(whole), (torch.Size(begin),), self.copy[0] == 0)
            else:
                written = self._is_first(rank) or name in self._unplaced_names
                found[name] = Layout.of_whole(parameter.shape, written=written)
        for name, shape in states.shapes.items() if states is not None else ():
            assert states is not None
            begin = torch.Size([states.rows(name)[0], *(0 for _ in shape[1:])])
            found[name] = Layout(shape, (begin,), states.replicas is None or states.replicas.rank == 0)
        for name, _, part in slices(self.model):
            share = self.places.get(name)
            found[name] = part.layout(share, written=part.twin == 0 if share is None else self.copy[0] == 0)
        return found

    def _tensors(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the tensors of the model, and of the moving average: parameters and buffers that are saved."""
        parameters = dict(self.model.named_parameters())
        twice = dict(self.model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
        buffers = {key: value for key, value in self.model.state_dict().items() if key not in twice | parameters.keys()}
        yield "model", {name: local(each) for name, each in parameters.items()} | buffers
        if self.averaged is not None:
            every = self.averaged.weights | self.averaged.buffers
            yield "averaged", {name: every[name] for name in (*parameters, *buffers)}

    def _ending(self, name: str, rank: int) -> str:
        """Return what the name of a share in a checkpoint ends with, if its place in the whole is not known."""
        return f" of rank {rank}" if name in self._unplaced_names else ""

    @property
    def has_shares(self) -> bool:
        """True if this rank has shares with no known place in the whole.

        The number of ranks must then stay the same.
        """
        return bool(self._unplaced_names)

    @cached_property
    def _unplaced_names(self) -> set[str]:
        """The names of shares with a place in the whole that the workload does not state."""
        shares = {id(parameter) for parameter in self.sharded}
        every = {name for name, parameter in self.model.named_parameters() if id(parameter) in shares}
        return every - self.places.keys()


def _has_dimensions(value: object) -> bool:
    """Return False for a number, which may be a tensor: torch.distributed.checkpoint takes 1 ms for each tensor."""
    return isinstance(value, Tensor) and value.dim() > 0


class MovingAverage:
    """The exponential moving average of the weights, with buffers as they are. Of a DTensor it has this rank's part."""

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
