"""Save and restore a trial between two optimizer steps, so that the continuation has the same losses. Rank 0 writes.

The file is written beside and renamed: there is always one whole checkpoint or none. Parameters are taken to be the same
on every rank (data parallel); each rank's random state is kept, so the number of ranks must not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from suite.distributed import World

CHECKPOINT_VERSION = 2


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


def save_checkpoint(
    path: Path,
    world: World,
    *,
    model: nn.Module,
    averaged: nn.Module | None,
    optimizer: optim.Optimizer,
    position: Position,
    seed: int,
    identity: dict[str, Any],
) -> None:
    """Write the checkpoint; every rank calls. ``identity`` must be equal when it is loaded. OSError if it cannot be written."""
    random_states = world.allgather(_random_state())
    error: Exception | None = None
    if world.is_first:
        state = {
            "version": CHECKPOINT_VERSION,
            "identity": identity,
            "model": model.state_dict(),
            "averaged": None if averaged is None else averaged.state_dict(),
            "optimizer": optimizer.state_dict(),
            "block": position.block,
            "step": position.step,
            "seed": seed,
            "random_states": random_states,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(".part")
            torch.save(state, beside)
            beside.replace(path)
        except (OSError, RuntimeError) as caught:
            error = ValueError(f"{path}: checkpoint cannot be written: {caught}")
    world.check_together(error)


def load_checkpoint(
    path: Path,
    world: World,
    *,
    model: nn.Module,
    averaged: nn.Module | None,
    optimizer: optim.Optimizer,
    identity: dict[str, Any],
) -> Resumed:
    """Restore model, optimizer and this rank's random state. ValueError if the file is missing, damaged or of another run."""
    state, error = None, None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        error = ValueError(f"{path}: there is no checkpoint to resume from")
    except Exception as caught:  # torch.load raises many kinds for a damaged file
        error = ValueError(f"{path}: not a readable checkpoint: {str(caught).splitlines()[0]}")
    if state is not None:
        error = _mismatch(path, state, identity, world.size)
    world.check_together(error)
    assert state is not None
    model.load_state_dict(state["model"])
    if averaged is not None:
        averaged.load_state_dict(state["averaged"])
    optimizer.load_state_dict(state["optimizer"])
    _set_random_state(state["random_states"][world.rank])
    return Resumed(Position(state["block"], state["step"]), state["seed"])


def _mismatch(path: Path, state: dict[str, Any], identity: dict[str, Any], ranks: int) -> ValueError | None:
    if state.get("version") != CHECKPOINT_VERSION:
        return ValueError(f"{path}: checkpoint version {state.get('version')}; this suite reads {CHECKPOINT_VERSION}")
    for key, wanted in identity.items():
        found = state["identity"].get(key)
        if found != wanted:
            return ValueError(f"{path}: checkpoint has {key} = {found!r}, this run has {wanted!r}")
    if len(state["random_states"]) != ranks:
        return ValueError(f"{path}: checkpoint of {len(state['random_states'])} ranks; this run has {ranks}")
    return None


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
