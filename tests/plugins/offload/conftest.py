"""Small models with experts, trained for some steps: the same with and without offload, or a test fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.training.checkpoint import Checkpoint, CheckpointSaver
from mlhpc.suite.training.parallel.ddp import wrap
from mlhpc.suite.training.parallel.layout import find_away
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World

pytest.importorskip("safetensors")
MINI = ("layers=3", "width=16", "heads=2", "context=16", "row_bytes=17", "moe_every=1")


def configure(workload: str, *settings: str) -> RunConfig:
    """A small configuration. Settings of ``moe`` may leave out its name."""
    small = MINI if workload == "moe_lm" else ()
    moe = ("experts=6", "hidden=16") if workload == "moe_lm" else ()
    named = [f"hyperparameters.{each}" for each in small] + [f"hyperparameters.moe.{each}" for each in moe]
    top = ("hyperparameters.", "gradient_accumulation_steps", "global_batch_size", "compile")
    words = [each if each.startswith(top) else f"hyperparameters.moe.{each}" for each in settings]
    return load_config(load_descriptor(workload), "smoke", ["precision=float32", "graphs=false", *named, *words])


def in_files(folder: Path, cache: int = 10**9, depth: int = 1) -> tuple[str, ...]:
    return "offload.tier=file", f"offload.folder={folder}", f"offload.cache={cache}", f"offload.depth={depth}"


@dataclass
class Run:
    """A training by hand, as the loop does it."""

    config: RunConfig
    world: World
    losses: list[float]

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.workload: Workload = load_workload(load_descriptor(self.config.workload))(self.config)
        self.state = TrainingState.create(self.workload, self.workload.build_model(self.world), 10, 1)
        self.model = wrap(self.state.model, self.state.sharded, self.world, torch.device("cpu"))

    @property
    def keeper(self) -> Any:
        return self.workload._keeper  # type: ignore[attr-defined]

    def batch(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 * step + self.world.rank)
        found = self.workload.example(4)
        assert found is not None
        name = next(iter(found))
        return {**found, name: torch.randint(0, 256, found[name].shape, generator=generator, dtype=torch.uint8)}

    def train(self, begin: int, end: int) -> Run:
        self.state.model.train()
        parts = self.config.gradient_accumulation_steps
        for step in range(begin, end):
            self.state.optimization.optimizer.zero_grad(set_to_none=True)
            for part in range(parts):
                loss = self.workload.loss(self.model, self.batch(parts * step + part)) / parts
                loss.backward()
                self.losses.append(float(loss.detach()))
            self.state.update(step, 1)
        return self

    def evaluate(self) -> dict[str, float]:
        self.state.model.eval()
        with torch.no_grad():
            return {name: float(each) for name, each in self.workload.eval_stats(self.model, self.batch(1)).items()}

    def save(self, path: Path) -> None:
        warnings: list[str] = []
        saver = CheckpointSaver(Checkpoint(path, {}), self.world, EventLog(None), None, warnings.append)
        saver.save(self.state, Position(1, 0), 1)
        assert warnings == []

    def values(self) -> Mapping[str, Tensor]:
        """All weights and moments by name."""
        found = {name: whole(each) for name, each in self.state.model.named_parameters()}
        for name, moments in self.state.moments().items():
            found |= {f"{name} {key}": whole(each) for key, each in moments.items()}
        return found


def whole(tensor: Tensor) -> Tensor:
    away = find_away(tensor)
    return tensor.detach() if away is None else away.read()


def assert_equal(one: Run, other: Run) -> None:
    assert one.losses == other.losses
    theirs = other.values()
    for name, value in one.values().items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture
def start() -> Iterator[Any]:
    """Begin a training; what it holds goes with the test."""
    kept: list[Run] = []

    def begin(workload: str, *settings: str, world: World | None = None) -> Run:
        kept.append(Run(configure(workload, *settings), world or World.create(None), []))
        return kept[-1]

    yield begin
    for run in kept:
        if run.keeper is not None:
            run.keeper.close()
