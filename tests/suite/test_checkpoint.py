"""A checkpoint is whole or not there: crashes between its files, files of other runs, damaged files. One process stands for all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from suite.training import checkpoint
from suite.training.checkpoint import Position, TrainingState, load_checkpoint, remove_checkpoint, save_checkpoint
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
    return TrainingState(model, None, optimizer, [model[0].weight])


def content(state: TrainingState) -> list[float]:
    optimizer = state.optimizer.state[list(state.model.parameters())[1]]
    return [t.flatten()[0].item() for t in (*state.model.parameters(), *state.model.buffers(), *optimizer.values())]


@pytest.mark.parametrize("size", [1, 2])
def test_what_was_saved_comes_back(tmp_path: Path, size: int) -> None:
    path, saved, other = tmp_path / "c" / "trial_0.pt", training(2.0), training(5.0)
    save_checkpoint(path, world(size), saved, position=Position(3, 4), seed=9, identity=IDENTITY)
    assert len(list(path.parent.iterdir())) == size  # one of two ranks wrote here
    resumed = load_checkpoint(path, world(size), other, identity=IDENTITY)
    assert (resumed.position, resumed.seed) == (Position(3, 4), 9)
    assert content(other) == content(saved)
    remove_checkpoint(path)
    assert not list(path.parent.iterdir())


def test_a_crash_before_the_last_rename_leaves_the_former_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trial_0.pt"
    save_checkpoint(path, world(2), training(2.0), position=Position(1, 0), seed=9, identity=IDENTITY)
    write = checkpoint._write_together

    def crash(target: Path | None, *rest: object) -> None:
        if target == path:
            raise KeyboardInterrupt
        write(target, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "_write_together", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, world(2), training(3.0), position=Position(2, 0), seed=9, identity=IDENTITY)
    monkeypatch.undo()
    state = training(5.0)
    assert load_checkpoint(path, world(2), state, identity=IDENTITY).position == Position(1, 0)
    assert content(state) == content(training(2.0))
    save_checkpoint(path, world(2), training(4.0), position=Position(3, 0), seed=9, identity=IDENTITY)
    assert len(list(tmp_path.iterdir())) == 2  # what the crash left is gone


def test_a_checkpoint_that_is_not_of_this_run_is_refused_and_nothing_is_restored(tmp_path: Path) -> None:
    path, state = tmp_path / "trial_0.pt", training(5.0)
    with pytest.raises(ValueError, match="there is no checkpoint"):
        load_checkpoint(path, world(2), state, identity=IDENTITY)
    save_checkpoint(path, world(2), training(2.0), position=Position(1, 0), seed=9, identity=IDENTITY)
    with pytest.raises(ValueError, match="data_manifest = 'abc', this run has 'other'"):
        load_checkpoint(path, world(2), state, identity={"data_manifest": "other"})
    with pytest.raises(ValueError, match="of 2 ranks; this run has 3"):
        load_checkpoint(path, world(3), state, identity=IDENTITY)
    (own,) = tmp_path.glob("*.rank0.pt")
    own.write_bytes(own.read_bytes()[:50])
    with pytest.raises(ValueError, match="rank0.pt: not a readable checkpoint"):
        load_checkpoint(path, world(2), state, identity=IDENTITY)
    own.unlink()
    with pytest.raises(ValueError, match="rank0.pt: there is no checkpoint"):
        load_checkpoint(path, world(2), state, identity=IDENTITY)
    assert content(state) == content(training(5.0))
