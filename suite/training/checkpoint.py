"""Save and restore a trial between two optimizer steps, so that the continuation has the same losses.

``trial_<i>.pt``, written by rank 0, holds what is the same on every rank. What a rank has of its own (buffers, its share of
sharded parameters with their optimizer state, random state) is in a file per rank that it names; random states alone are in
the one file. That is renamed into place after all others are written: a crash leaves the former checkpoint whole, or none.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from suite.errors import InputError
from suite.files import written_whole
from suite.training.state import Position, TrainingState
from suite.world import World

CHECKPOINT_VERSION = 3


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one trial. ``identity``: what must be equal for another run to continue from it."""

    path: Path
    identity: Mapping[str, Any]

    def save(self, world: World, state: TrainingState, position: Position) -> None:
        """Write the checkpoint; every rank calls. ValueError on every rank if one of them cannot write."""
        shared, own = state.split()
        own["random"] = _random_state()
        content: dict[str, Any] = {
            "version": CHECKPOINT_VERSION,
            "identity": dict(self.identity),
            "shared": shared,
            "block": position.block,
            "step": position.step,
            "seed": state.seed,
            "ranks": world.size,
        }
        if world.size > 1 and state.differs_between_ranks():
            content["own_files"] = world.broadcast(secrets.token_hex(4))
            _write_together(_own_path(self.path, content["own_files"], world.rank), own, world)
        else:
            content["own"] = world.allgather(own)
        _write_together(self.path if world.is_first else None, content, world)
        if world.is_first:
            _remove_own_files(self.path, keep=content.get("own_files"))

    def load(self, world: World, state: TrainingState) -> Position:
        """Restore the training and this rank's random state, and return where training stands; every rank calls.

        ValueError if a file is missing, damaged or of another run; nothing is restored then.
        """
        content, own, error = None, None, None
        try:
            content = _read(self.path)
            _check(self.path, content, self.identity, world.size)
            own = (
                content["own"][world.rank]
                if "own" in content
                else _read(_own_path(self.path, content["own_files"], world.rank))
            )
        except ValueError as caught:
            error = caught
        world.check_together(error)
        assert content is not None
        assert own is not None
        state.restore(content["shared"], own)
        state.seed = content["seed"]
        _set_random_state(own["random"])
        return Position(content["block"], content["step"])

    def remove(self) -> None:
        """Remove the checkpoint, if there is one: the file that names the others first."""
        self.path.unlink(missing_ok=True)
        _remove_own_files(self.path, keep=None)


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
            error = InputError(f"{path}: checkpoint cannot be written: {caught}")
    world.check_together(error)


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no checkpoint to resume from") from None
    except Exception as caught:  # torch.load raises many kinds for a damaged file
        raise InputError(f"{path}: not a readable checkpoint: {str(caught).splitlines()[0]}") from None
    return state


def _check(path: Path, state: dict[str, Any], identity: Mapping[str, Any], ranks: int) -> None:
    if state.get("version") != CHECKPOINT_VERSION:
        raise InputError(f"{path}: checkpoint version {state.get('version')}; this suite reads {CHECKPOINT_VERSION}")
    for key, wanted in identity.items():
        found = state["identity"].get(key)
        if found != wanted:
            raise InputError(f"{path}: checkpoint has {key} = {found!r}, this run has {wanted!r}")
    if state["ranks"] != ranks:
        raise InputError(f"{path}: checkpoint of {state['ranks']} ranks; this run has {ranks}")


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
