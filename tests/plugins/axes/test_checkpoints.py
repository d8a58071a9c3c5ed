"""Checkpoints of runs whose samples are split go on where states lie in pieces, and the other way round, with the same losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mlhpc.plugins.axes.spatial import Split, split_model, trace
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.parallel.mesh import part_of
from mlhpc.suite.training.parallel.plan import Boundary
from mlhpc.suite.training.state import Position, TrainingState, _make_moving_average
from mlhpc.suite.workload import Optimization
from tests.fixtures.thread_ranks import Holding, finish_step, on_holders, on_parts, write_checkpoint


def picture_net() -> nn.Module:
    """Made once: ranks are threads, and random states are the process's."""
    torch.manual_seed(3)
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3 * 4 * 3, 1)
    return nn.Sequential(*layers).double()


MODEL = picture_net()


class Pictures:
    """One rank's training on pictures of 9 x 7 that are split, or whole with states in pieces, or alone."""

    def __init__(self, rank: Holding, split: Split | None) -> None:
        self.rank, self.split, self.model = rank, split, copy.deepcopy(MODEL)
        if split is not None:
            boundaries = {"3": Boundary(dims=("sample", "channel", "h", "w"))}
            meta = torch.empty(1, 2, 9, 7, dtype=torch.float64, device="meta")
            found = trace(copy.deepcopy(MODEL).to("meta"), lambda each: each(meta), boundaries, split.names)
            split_model(self.model, found, split, boundaries)
        elif rank.device_mesh is not None:
            rank.shard(self.model, list(dict(self.model.named_parameters())), ["0", "4"])
        self.wrapped = self.model
        optimization = Optimization(
            torch.optim.AdamW(self.model.parameters(), lr=0.01), lambda step, epoch: 0.01, ema_decay=0.9
        )
        self.state = TrainingState(self.model, optimization, (), _make_moving_average(self.model, optimization), 1)

    def step(self, number: int) -> float:
        mesh = self.rank.mesh
        x = torch.sin(torch.arange(6 * 2 * 9 * 7, dtype=torch.float64).view(6, 2, 9, 7) * (number + 1))
        mine = x[mesh.data_rank :: mesh.data_size]
        wanted = mine.mean(dim=(1, 2, 3))
        for d, name in enumerate(self.split.names if self.split is not None else ()):
            low, high = part_of(x.shape[d + 2], mesh.spatial[d], mesh.place[d])
            assert name in "hw"
            mine = mine.narrow(d + 2, low, high - low)
        self.state.optimization.optimizer.zero_grad()
        loss = (self.wrapped(mine).squeeze(1) - wanted).square().mean()
        return finish_step(self.rank, self.state, loss, alone=self.rank.device_mesh is None and mesh.size > 1)


@pytest.mark.parametrize(
    ("before", "after"), [("2x1", "shard"), ("shard", "2x1"), ("2x2", "shard"), ("shard", "2x2"), ("2x1", "1x3")]
)
def test_a_checkpoint_goes_on_where_samples_are_split_or_states_in_pieces(
    tmp_path: Path, before: str, after: str
) -> None:
    def on(way: str, run: Callable[[Holding, Split | None], list[float]]) -> list[list[float]]:
        if way == "shard":
            return on_holders(1, 2, lambda rank: run(rank, None))
        parts = tuple(map(int, way.split("x")))
        return on_parts(parts, ("h", "w"), run)

    def save(rank: Holding, split: Split | None) -> list[float]:
        training = Pictures(rank, split)
        losses = [training.step(number) for number in range(3)]
        write_checkpoint(tmp_path / "trial_0.pt", rank, training.state, Position(1, 3))
        return losses

    def go_on(rank: Holding, split: Split | None) -> list[float]:
        training = Pictures(rank, split)
        Checkpoint(tmp_path / "trial_0.pt", {}, rank.mesh).load(rank.world, training.state)
        return [training.step(number) for number in (3, 4)]

    def plain(rank: Holding) -> list[float]:
        training = Pictures(rank, None)
        return [training.step(number) for number in range(5)]

    (losses,) = on_holders(1, 1, plain)
    for found in on(before, save):
        assert found == pytest.approx(losses[:3], rel=1e-12)
    for found in on(after, go_on):
        assert found == pytest.approx(losses[3:], rel=1e-12)
