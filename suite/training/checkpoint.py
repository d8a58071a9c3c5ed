"""Save and restore a trial between two optimizer steps, so that the continuation has the same losses.

``trial_<i>.pt``, written by rank 0, holds what is the same on every rank. What a rank has of its own (buffers, its share of
sharded parameters with their optimizer state, random state) is in a file per rank that it names; random states alone are in
the one file. That is renamed into place after all others are written: a crash leaves the former checkpoint whole, or none.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel

from suite.files import written_whole
from suite.world import World

CHECKPOINT_VERSION = 3


@dataclass(frozen=True)
class Position:
    """Where training stands: the next step to take, 0-based within a 1-based block between evaluations."""

    block: int
    step: int


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint says beside the tensors it restored."""

    position: Position
    seed: int


@dataclass(frozen=True)
class TrainingState:
    """What a trial changes. ``averaged``: the moving average of the weights that is evaluated in their place, if there is one;

    ``sharded``: parameters of which this rank holds its own share.
    """

    model: nn.Module
    averaged: AveragedModel | None
    optimizer: optim.Optimizer
    sharded: Sequence[nn.Parameter] = ()

    def split(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The part that is the same on every rank, and this rank's own."""
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for name, module in self._modules():
            names = self._own_names(name)
            state = module.state_dict()
            shared[name] = {key: value for key, value in state.items() if key not in names}
            own[name] = {key: value for key, value in state.items() if key in names}
        state = self.optimizer.state_dict()
        mine = self._own_positions()
        shared["optimizer"] = state | {"state": {i: value for i, value in state["state"].items() if i not in mine}}
        own["optimizer"] = {i: value for i, value in state["state"].items() if i in mine}
        return shared, own

    def restore(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """The inverse of `split`."""
        for name, module in self._modules():
            module.load_state_dict(shared[name] | own[name])
        state = shared["optimizer"]
        self.optimizer.load_state_dict(state | {"state": state["state"] | own["optimizer"]})

    def differs_between_ranks(self) -> bool:
        """True if a rank has tensors of its own; the same on every rank."""
        return bool(self._own_names("model"))

    def _modules(self) -> list[tuple[str, nn.Module]]:
        return [("model", self.model)] + ([("averaged", self.averaged)] if self.averaged is not None else [])

    def _own_names(self, part: str) -> set[str]:
        sharded = {id(parameter) for parameter in self.sharded}
        names = {name for name, parameter in self.model.named_parameters() if id(parameter) in sharded}
        names |= {name for name, _ in self.model.named_buffers()}
        return names if part == "model" else {f"module.{name}" for name in names}  # as torch's AveragedModel calls them

    def _own_positions(self) -> set[int]:
        sharded = {id(parameter) for parameter in self.sharded}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return {position for position, parameter in enumerate(parameters) if id(parameter) in sharded}


def save_checkpoint(
    path: Path, world: World, training: TrainingState, *, position: Position, seed: int, identity: dict[str, Any]
) -> None:
    """Write the checkpoint; every rank calls. ``identity`` must be equal when it is loaded. ValueError if it cannot be written."""
    shared, own = training.split()
    own["random"] = _random_state()
    state: dict[str, Any] = {
        "version": CHECKPOINT_VERSION,
        "identity": identity,
        "shared": shared,
        "block": position.block,
        "step": position.step,
        "seed": seed,
        "ranks": world.size,
    }
    if world.size > 1 and training.differs_between_ranks():
        state["own_files"] = world.broadcast(secrets.token_hex(4))
        _write_together(_own_path(path, state["own_files"], world.rank), own, world)
    else:
        state["own"] = world.allgather(own)
    _write_together(path if world.is_first else None, state, world)
    if world.is_first:
        _remove_own_files(path, keep=state.get("own_files"))


def load_checkpoint(path: Path, world: World, training: TrainingState, *, identity: dict[str, Any]) -> Resumed:
    """Restore the training and this rank's random state; every rank calls.

    ValueError if a file is missing, damaged or of another run; nothing is restored then.
    """
    state, own, error = None, None, None
    try:
        state = _read(path)
        _check(path, state, identity, world.size)
        own = state["own"][world.rank] if "own" in state else _read(_own_path(path, state["own_files"], world.rank))
    except ValueError as caught:
        error = caught
    world.check_together(error)
    assert state is not None
    assert own is not None
    training.restore(state["shared"], own)
    _set_random_state(own["random"])
    return Resumed(Position(state["block"], state["step"]), state["seed"])


def remove_checkpoint(path: Path) -> None:
    """Remove a trial's checkpoint, if there is one: the file that names the others first."""
    path.unlink(missing_ok=True)
    _remove_own_files(path, keep=None)


def _own_path(path: Path, token: str, rank: int) -> Path:
    return path.with_name(f"{path.stem}.{token}.rank{rank}{path.suffix}")


def _remove_own_files(path: Path, keep: str | None) -> None:
    for old in path.parent.glob(f"{path.stem}.*.rank*"):
        if keep is None or not old.name.startswith(f"{path.stem}.{keep}."):
            old.unlink(missing_ok=True)


def _write_together(path: Path | None, state: dict[str, Any], world: World) -> None:
    """Write beside and rename on each rank with a path; returns when all have, raises on all if one could not."""
    error = None
    if path is not None:
        try:
            with written_whole(path) as part:
                torch.save(state, part)
        except (OSError, RuntimeError) as caught:
            error = ValueError(f"{path}: checkpoint cannot be written: {caught}")
    world.check_together(error)


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no checkpoint to resume from") from None
    except Exception as caught:  # torch.load raises many kinds for a damaged file
        raise ValueError(f"{path}: not a readable checkpoint: {str(caught).splitlines()[0]}") from None
    return state


def _check(path: Path, state: dict[str, Any], identity: dict[str, Any], ranks: int) -> None:
    if state.get("version") != CHECKPOINT_VERSION:
        raise ValueError(f"{path}: checkpoint version {state.get('version')}; this suite reads {CHECKPOINT_VERSION}")
    for key, wanted in identity.items():
        found = state["identity"].get(key)
        if found != wanted:
            raise ValueError(f"{path}: checkpoint has {key} = {found!r}, this run has {wanted!r}")
    if state["ranks"] != ranks:
        raise ValueError(f"{path}: checkpoint of {state['ranks']} ranks; this run has {ranks}")


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
