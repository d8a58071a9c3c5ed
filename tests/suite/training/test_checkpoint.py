"""A checkpoint is whole or not there: crashes between its files, files of other runs, damaged files. One process stands for all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from suite.errors import InputError
from suite.training import checkpoint
from suite.training.checkpoint import Checkpoint
from suite.training.state import Position, TrainingState
from suite.workload import Optimization
from suite.world import Alone, World

IDENTITY = {"data_manifest": "abc"}


def world(size: int) -> World:
    """Rank 0 of a world in which the other ranks say what rank 0 says."""
    return World("test", 0, size, 0, 1, 0, size, ("here",), Alone(), Alone())


def training(value: float) -> TrainingState:
    """A model with a share, a buffer and optimizer state."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    for tensor in (*model.parameters(), *model.buffers(), *optimizer.state[model[0].bias].values()):
        tensor.data.fill_(value)
    return TrainingState(
        model, Optimization(optimizer, lambda step, epoch: 0.1), [model[0].weight], None, seed=int(value)
    )


def content(state: TrainingState) -> list[float]:
    optimizer = state.optimization.optimizer.state[list(state.model.parameters())[1]]
    return [t.flatten()[0].item() for t in (*state.model.parameters(), *state.model.buffers(), *optimizer.values())]


@pytest.mark.parametrize("size", [1, 2])
def test_what_was_saved_comes_back(tmp_path: Path, size: int) -> None:
    path, saved, other = tmp_path / "c" / "trial_0.pt", training(2.0), training(5.0)
    Checkpoint(path, IDENTITY).save(world(size), saved, Position(3, 4))
    assert len(list(path.parent.iterdir())) == size  # one of two ranks wrote here
    assert Checkpoint(path, IDENTITY).load(world(size), other) == Position(3, 4)
    assert other.seed == saved.seed == 2
    assert content(other) == content(saved)
    Checkpoint(path, IDENTITY).remove()
    assert not list(path.parent.iterdir())


def test_a_crash_before_the_last_rename_leaves_the_former_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trial_0.pt"
    Checkpoint(path, IDENTITY).save(world(2), training(2.0), Position(1, 0))
    write = checkpoint._write_together

    def crash(target: Path | None, *rest: object) -> None:
        if target == path:
            raise KeyboardInterrupt
        write(target, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "_write_together", crash)
    with pytest.raises(KeyboardInterrupt):
        Checkpoint(path, IDENTITY).save(world(2), training(3.0), Position(2, 0))
    monkeypatch.undo()
    state = training(5.0)
    assert Checkpoint(path, IDENTITY).load(world(2), state) == Position(1, 0)
    assert content(state) == content(training(2.0))
    Checkpoint(path, IDENTITY).save(world(2), training(4.0), Position(3, 0))
    assert len(list(tmp_path.iterdir())) == 2  # what the crash left is gone


def test_a_checkpoint_that_is_not_of_this_run_is_refused_and_nothing_is_restored(tmp_path: Path) -> None:
    path, state = tmp_path / "trial_0.pt", training(5.0)
    with pytest.raises(InputError, match="there is no checkpoint"):
        Checkpoint(path, IDENTITY).load(world(2), state)
    Checkpoint(path, IDENTITY).save(world(2), training(2.0), Position(1, 0))
    with pytest.raises(InputError, match="data_manifest = 'abc', this run has 'other'"):
        Checkpoint(path, {"data_manifest": "other"}).load(world(2), state)
    with pytest.raises(InputError, match="of 2 ranks; this run has 3"):
        Checkpoint(path, IDENTITY).load(world(3), state)
    (own,) = tmp_path.glob("*.rank0.pt")
    own.write_bytes(own.read_bytes()[:50])
    with pytest.raises(InputError, match="rank0.pt: not a readable checkpoint"):
        Checkpoint(path, IDENTITY).load(world(2), state)
    own.unlink()
    with pytest.raises(InputError, match="rank0.pt: there is no checkpoint"):
        Checkpoint(path, IDENTITY).load(world(2), state)
    assert content(state) == content(training(5.0))
