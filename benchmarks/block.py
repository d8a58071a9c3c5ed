"""Training steps of any workload through the harness without a run folder: what several benchmarks time or compare. No main."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.machine.choice.chooser import make_chooser
from mlhpc.suite.training.agreement import StopAgreement
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.devices import choose_device, set_up_rank
from mlhpc.suite.training.loop import Trainer
from mlhpc.suite.training.state import TrainingState
from mlhpc.suite.training.statement import TrialPlan
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World


class Head:
    """The first samples of a data set; ``dtype`` is what becomes of floating-point arrays."""

    def __init__(self, data: Any, samples: int, dtype: torch.dtype | None = None) -> None:
        self._data, self._samples, self._dtype = data, min(samples, len(data)), dtype

    def __len__(self) -> int:
        return self._samples

    def load(self, indices: Any, *, seed: int, epoch: int) -> Any:
        """As the data set's."""
        batch = self._data.load(indices, seed=seed, epoch=epoch)
        if self._dtype is None:
            return batch
        return {name: value.to(self._dtype) if value.is_floating_point() else value for name, value in batch.items()}


@dataclass(frozen=True)
class Fixed:
    """The same splits for every block."""

    train_split: Any
    validation_split: Any

    def train(self, block: int) -> Any:
        """Training data."""
        return self.train_split

    def validation(self, block: int) -> Any:
        """Evaluation data."""
        return self.validation_split


def open_workload(name: str, size: str, overrides: Sequence[str], world: World) -> tuple[Workload, RunConfig]:
    """A workload at a size on this rank, which is set up as in a run. Nothing goes on later, so no checkpoint is saved."""
    chosen = load_descriptor(name)
    config = load_config(chosen, size, [*overrides, "checkpoint.interval_s=null"])
    device, _ = set_up_rank(config, world)
    world.init_torch(device)
    return load_workload(chosen)(config), config


def trainer(
    workload: Workload, config: RunConfig, world: World, log: EventLog, data: Head, validation: Any, seed: int
) -> Trainer:
    """A Trainer with the initial weights of ``seed``, in torch's default precision; no target is ever reached."""
    plan = TrialPlan(load_descriptor(config.workload), config, RunFolder(Path("never-written")), trial=0)
    device = choose_device(config.device, world)
    torch.manual_seed(seed)
    model = workload.build_model(world).to(device, torch.get_default_dtype())
    if torch.get_default_dtype() == torch.float32:
        workload.choose(model, make_chooser(config, world, device))
    state = TrainingState.create(workload, model, len(data) // config.global_batch_size, seed)
    if config.compile:
        state.model.compile()
    prepared = Trainer(
        plan=plan,
        workload=workload,
        world=world,
        device=device,
        state=state,
        data=Fixed(data, validation),
        log=log,
        checkpoint=Checkpoint(plan.folder.checkpoint(0), {}),
    )
    out_of_reach = float("inf") if plan.target.direction == "max" else float("-inf")
    prepared.target = structs.replace(plan.target, threshold=out_of_reach)
    return prepared


def train_epochs(loop: Trainer, epochs: int) -> Iterator[float]:
    """Train epoch after epoch, and yield the metric after each."""
    watch = StopAgreement(loop.world, lambda: None)
    for epoch in range(1, epochs + 1):
        loop.train_block(epoch, 0, watch)
        yield loop.evaluate_block(epoch)
