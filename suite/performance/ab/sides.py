"""Runs one side of a comparison: a model under a plan and settings, in blocks of steps that begin at a checkpoint.

All ranks call everything here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlhpc.suite.data.sampling import check_batch, count_steps_per_epoch
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.machine.choice.chooser import make_chooser
from mlhpc.suite.machine.choice.layout import ProcessSettings, keep_process_settings
from mlhpc.suite.performance.ab.verdicts import LOSS
from mlhpc.suite.statistics.blocks import Turn, make_alternating_order, run_block
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.counts.flops import FlopSum
from mlhpc.suite.training.counts.memory import LiveBytes
from mlhpc.suite.training.devices import use_precision
from mlhpc.suite.training.loop import StepWindow, Trainer
from mlhpc.suite.training.parallel.apply import build
from mlhpc.suite.training.parallel.sharing import Parallel
from mlhpc.suite.training.parallel.slabs import cut
from mlhpc.suite.training.parallel.states import local
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.training.statement import SEED_BITS, TrialPlan
from mlhpc.suite.workload import Dataset, Workload, load_workload
from mlhpc.suite.world import World

START_POSITION = Position(1, 0)
COUNTED_STEPS = 2  # steps of a block that are counted and not timed: one for memory and bytes, one for FLOPs


@dataclass(frozen=True)
class BlockCost:
    """The cost of a block of steps over all ranks.

    ``step_s``, of the slowest rank, and ``cpu_s``, the sum, are per step. The others come from the first two steps,
    which are not timed. ``memory`` is the peak of bytes of tensors on a rank. ``flops`` and ``sent`` (bytes given to
    collectives) are sums. ``loss`` is the mean over steps and ranks.
    """

    step_s: float
    cpu_s: float
    memory: float
    flops: float
    sent: float
    loss: float

    def by_quantity(self) -> dict[str, float]:
        """Return the numbers by the names of `mlhpc.suite.performance.ab.verdicts.QUANTITIES`."""
        names = ("step time", "CPU time", "peak memory", "executed FLOPs", "bytes sent", LOSS)
        return dict(zip(names, asdict(self).values(), strict=True))


@dataclass
class Side:
    """A trainer under one plan.

    ``settings``: set by the user for this side; ``choices``: chosen by the suite, by name.
    """

    trainer: Trainer
    data: Dataset
    checkpoint: Checkpoint
    device: torch.device
    process: ProcessSettings
    groups: list[dict[str, Any]]  # settings of its optimizer, which a checkpoint has too
    settings: Sequence[str] = ()
    choices: dict[str, str] = field(default_factory=dict)
    collectives: dict[str, float] = field(default_factory=dict)  # of this rank in the last counted step

    @staticmethod
    def create(
        plan: TrialPlan,
        world: World,
        device: torch.device,
        root: Path,
        place: Path,
        manifest: str,
        settings: Sequence[str] = (),
        *,
        choosing: bool = False,
    ) -> Side:
        """Build a model under the plan of ``plan.config``, from the plan's seed. ``place``: folder of the checkpoint.

        ``choosing``: choose precision, layout and so on as a trial does.
        """
        config = plan.config
        parallel = Parallel.of(config, plan.descriptor, world.rank, world.size)
        check_batch(config.global_batch_size, parallel.mesh.data_size, config.gradient_accumulation_steps)
        workload: Workload = load_workload(plan.descriptor)(config)
        data = cut(workload.dataset("train", root), parallel.slabs(evaluation=False))
        seed, chooser = plan.base_seed or 0, make_chooser(config, world, device)
        look = partial(workload.choose, chooser=chooser) if choosing else lambda _: None
        with keep_process_settings():
            use_precision(config.precision, device)
            model = build(parallel, workload, plan.descriptor, world, device, seed, look)
            torch.manual_seed(seed + (parallel.mesh.data_rank << SEED_BITS))
            state = TrainingState.create(
                workload, model, count_steps_per_epoch(len(data), config.global_batch_size), seed
            )
            checkpoint = Checkpoint(place, {"data_manifest": manifest}, parallel.mesh)
            trainer = Trainer(
                plan=plan,
                workload=workload,
                world=world,
                device=device,
                state=state,
                data=_TrainingData(data),
                log=EventLog(None),
                checkpoint=checkpoint,
                stop_signal=lambda: None,
                say=lambda _: None,
                parallel=parallel,
            )
            process = ProcessSettings.now()
        chosen = {choice.name: choice.value for choice in chooser.choices.values()}
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in state.optimization.optimizer.param_groups
        ]
        return Side(trainer, data, checkpoint, device, process, groups, settings, chosen)

    @property
    def name(self) -> str:
        """The plan and its mesh, the side's own settings, and the suite's choices."""
        shared = self.trainer.shared
        plan = f"{shared.name if shared.plan is not None else 'no plan'} ({shared.mesh.text()})"
        return ", ".join((plan, *self.settings, *(f"{name}: {value}" for name, value in self.choices.items())))

    def save(self) -> None:
        """Save the present state as the checkpoint."""
        snapshot = self.checkpoint.snapshot(self.trainer.world, self.trainer.state, START_POSITION)
        every = self.trainer.world.gather(snapshot.write(), bytes)
        if every is not None:
            snapshot.commit(every)
        self.trainer.world.barrier()

    def block(self, begin: int, steps: int, *, restored: bool = True) -> BlockCost:
        """Load the checkpoint, then take two counted and ``steps`` timed steps from global step ``begin`` on."""
        trainer, world = self.trainer, self.trainer.world
        self.process.restore()
        use_precision(trainer.config.precision, self.device)
        if restored:
            self.checkpoint.load(world, trainer.state)
            for group, own in zip(trainer.state.optimization.optimizer.param_groups, self.groups, strict=True):
                group.update(own)
        trainer.wrapped.train()
        window, batches = StepWindow(1, begin), trainer.batches(self.data, begin, begin + COUNTED_STEPS + steps)
        with trainer.records.counting():
            memory, flops, sent = self._counted(batches, window)
            world.barrier()
            started = time.perf_counter(), time.process_time()
            for item, batch in batches:
                trainer.part(batch, item, window)
            loss = window.mean_loss()  # waits for the device
            step_s, cpu_s = time.perf_counter() - started[0], time.process_time() - started[1]
        trainer.timer.flush()
        rows = world.allgather((step_s / steps, cpu_s / steps, memory, flops, sent, loss))
        columns: list[Sequence[float]] = list(zip(*rows, strict=True))
        return BlockCost(
            step_s=max(columns[0]),
            cpu_s=sum(columns[1]),
            memory=max(columns[2]),
            flops=sum(columns[3]),
            sent=sum(columns[4]),
            loss=sum(columns[5]) / world.size,
        )

    def _counted(self, batches: Iterator[tuple[object, object]], window: StepWindow) -> tuple[float, float, float]:
        """Take two steps. Returns this rank's peak bytes of tensors, its FLOPs and its bytes given to collectives."""
        trainer, instruments = self.trainer, self.trainer.instruments
        assert instruments is not None
        instruments.ledger.take()
        own = _sum_storage_bytes(self._states())
        live = LiveBytes(self._states())

        def step() -> None:
            for item, batch in batches:
                trainer.part(batch, item, window)  # type: ignore[arg-type]
                if item.ends:  # type: ignore[attr-defined]
                    return

        with live:
            step()
        self.collectives = instruments.ledger.take()
        sent = sum(
            number for name, number in self.collectives.items() if name.endswith("_bytes") and "control" not in name
        )
        with FlopSum() as counted:
            step()
        return own + live.peak, float(counted.flops), sent

    def _states(self) -> list[Tensor]:
        """List parameters, buffers, moving average and optimizer state."""
        state = self.trainer.state
        found: list[Tensor] = [local(each) for each in (*state.model.parameters(), *state.model.buffers())]
        if state.averaged is not None:
            found += [*state.averaged.weights.values(), *state.averaged.buffers.values()]
        values = (value for each in state.optimization.optimizer.state.values() for value in each.values())
        return found + [local(value) for value in values if isinstance(value, Tensor)]


@dataclass(frozen=True)
class _TrainingData:
    """The data of a trainer that never evaluates."""

    dataset: Dataset

    def train(self, block: int) -> Dataset:
        """Return the training data."""
        return self.dataset

    def validation(self, block: int) -> Dataset:
        """Raise an error: there is no evaluation."""
        raise NotImplementedError


def _sum_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of the storages of tensors. A storage that tensors share counts once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


@dataclass(frozen=True)
class Schedule:
    """``pairs`` of blocks, each of two counted and ``steps`` timed steps, after ``warmup`` steps."""

    pairs: int
    steps: int
    warmup: int


def run_block_pairs(a: Side, b: Side, schedule: Schedule) -> tuple[list[BlockCost], list[BlockCost]]:
    """Run both sides' blocks in turn, in reverse order in every second pair.

    Each block begins at A's state after the warm-up. The first pair is run twice; its first time does not count.
    InputError if B cannot begin there.
    """
    kept = [(type(side.trainer.state.optimization.optimizer), side.trainer.state.averaged is None) for side in (a, b)]
    if kept[0] != kept[1]:
        raise InputError(
            "the sides differ in their optimizer or in averaging of weights: "
            "both start from one checkpoint, so give both the same of these"
        )
    a.block(0, schedule.warmup, restored=False)
    a.save()
    b.trainer.state.seed = a.trainer.state.seed
    sides, first = {"a": a, "b": b}, schedule.warmup + COUNTED_STEPS
    for side in sides.values():
        side.block(first, schedule.steps)

    def run(turn: Turn) -> BlockCost:
        begin = first + (turn.block - 1) * (schedule.steps + COUNTED_STEPS)
        return sides[turn.entry].block(begin, schedule.steps)

    pairs = [
        run_block(block, make_alternating_order(block, tuple(sides)), run) for block in range(1, schedule.pairs + 1)
    ]
    return [pair["a"] for pair in pairs], [pair["b"] for pair in pairs]
