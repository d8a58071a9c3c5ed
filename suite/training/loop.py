"""The training loop and the evaluation, for every workload and any number of ranks. It writes events and no other file.

Every rank runs every line; only rank 0's log writes to a file. Collectives outside the gradient path go through `World`.
Decisions that change the control flow (stop, converged, diverged) depend on numbers that are equal on every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from suite.config import RunConfig
from suite.data.sampling import eval_batches, steps_per_epoch, train_batches
from suite.log import mllog
from suite.log.mllog import EventLog
from suite.training.agreement import CHECK_INTERVAL_S, DIVERGED, Agreed, StopWatch
from suite.training.checkpoint import Checkpoint
from suite.training.instrument import Instruments, Ledger, by_rank, exchange_marks
from suite.training.parallel import clip_gradients, wrap
from suite.training.plan import TrialPlan
from suite.training.progress import Progress
from suite.training.saver import Saver
from suite.training.state import Position, TrainingState
from suite.training.timing import (
    DATA_WAIT,
    FORWARD_BACKWARD,
    OPTIMIZER,
    OTHER,
    NoTimer,
    PhaseTimer,
    device_clock,
)
from suite.workload import Dataset, Workload
from suite.world import World

if TYPE_CHECKING:
    from suite.workload import Batch

LOSS_SUM = "loss_sum"

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Outcome:
    """How training ended. ``reached`` is computed from an evaluation; ``reason`` is one line for people."""

    reached: bool
    reason: str
    interrupted: bool = False


@dataclass(frozen=True)
class PlannedBatch:
    """One part of a training step, before its data are loaded: 0-based global step, 1-based epoch, this rank's samples.

    A step has as many parts as the gradient is accumulated over; ``begins``: the first part, ``ends``: the last.
    """

    step: int
    epoch: int
    indices: NDArray[np.int64]
    begins: bool
    ends: bool


class Splits(Protocol):
    """The data of a trial. The trainer asks once per block, so that staged data can replace the originals between two blocks."""

    def train(self, block: int) -> Dataset:
        """Training data of a block."""
        ...

    def validation(self, block: int) -> Dataset:
        """Evaluation data after a block."""
        ...


@dataclass(kw_only=True)
class Trainer:
    """Trains one trial. ``stop_signal`` returns the name of a signal that asked this rank to stop, or None.

    Training goes in blocks, each followed by an evaluation: epochs, or the card's ``eval_every_steps``.
    """

    plan: TrialPlan
    workload: Workload
    world: World
    device: torch.device
    state: TrainingState
    data: Splits
    log: EventLog
    checkpoint: Checkpoint
    stop_signal: Callable[[], str | None]
    say: Callable[[str], None]
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.config, self.size_card, self.target = self.plan.config, self.plan.size_card, self.plan.target
        self._throughput = 0.0
        self._steps_per_block = 0
        self.timer: PhaseTimer | NoTimer = NoTimer()
        self.instruments: Instruments | None = None
        if self.config.instrumentation:
            self.instruments = Instruments(self.world, self.device, device_clock(self.device), self.progress.collective)
            self.world, self.timer = self.instruments.world, self.instruments.timer
        self.saver = Saver(self.checkpoint, self.world, self.log, self.config.checkpoint.interval_s)
        self.wrapped = wrap(self.state.model, self.state.sharded, self.world, self.device)
        ledger = self.instruments.ledger if self.instruments else Ledger()
        self._mark_exchange = exchange_marks(self.wrapped, self.timer, ledger)

    def run(self, start: Position) -> Outcome:
        """Train from a position until the target is met, the epochs are used up or a signal says stop."""
        if self.instruments is None:
            return self._run(start)
        self.instruments.energy.restart()
        with self.instruments.counting():
            return self._run(start)

    def _run(self, start: Position) -> Outcome:
        interval_s = self.config.checkpoint.interval_s
        often_s = CHECK_INTERVAL_S if interval_s is None else min(CHECK_INTERVAL_S, interval_s / 10)
        watch = StopWatch(self.world, self.stop_signal, self.saver, often_s)
        steps = steps_per_epoch(len(self.data.train(start.block)), self.config.global_batch_size)
        blocks = max(1, self.config.max_epochs * steps // (self.size_card.eval_every_steps or steps))
        for block in range(start.block, blocks + 1):
            label = self.epoch_num(block)
            self.log.start(mllog.EPOCH, metadata={"epoch_num": label})
            stopped = self.train_block(block, start.step if block == start.block else 0, watch)
            if stopped is not None:
                self._log_energy(label)
                return stopped
            value = self.evaluate_block(block)
            self._log_energy(label)
            self.log.stop(mllog.EPOCH, metadata={"epoch_num": label})
            if not math.isfinite(value):
                return Outcome(False, f"diverged: {self.target.metric_name} is {value} after epoch {label}")
            if self.target.reached(value):
                self.log.event(mllog.TARGET_ACCURACY_REACHED, value, metadata={"epoch_num": label})
                return Outcome(True, f"target reached in epoch {label}")
            if block < blocks:
                ended = self._agree(watch.check(now=True), Position(block + 1, 0), label)
                if ended is not None:
                    return ended
        return Outcome(False, f"target not reached in {self.config.max_epochs} epochs")

    def epoch_num(self, block: int) -> int:
        """The ``epoch_num`` of a block in the log: the epoch, or the samples seen by its end, as OpenFold's rules count."""
        every = self.size_card.eval_every_steps
        return block if every is None else block * every * self.config.global_batch_size

    def train_block(self, block: int, first_step: int, watch: StopWatch) -> Outcome | None:
        """Train up to the next evaluation. Returns an Outcome only if training stopped before that."""
        data = self.data.train(block)
        label = self.epoch_num(block)
        per_epoch = steps_per_epoch(len(data), self.config.global_batch_size)
        steps = self._steps_per_block = self.size_card.eval_every_steps or per_epoch
        plan = self._plan(len(data), per_epoch, (block - 1) * steps + first_step, block * steps)
        totals: dict[str, float] = {}
        window = Window(label, first_step)
        begin = time.perf_counter()
        self.wrapped.train()
        self.timer.restart()
        if self.instruments is not None:
            self.instruments.meters.restart()
        batches = prefetch(
            lambda item: (item, data.load(item.indices, seed=self.state.seed, epoch=item.epoch)),
            plan,
            threads=self.config.loader_threads,
        )
        step = first_step - 1
        for item, batch in batches:
            self._part(self._to_device(batch), item, window)
            if not item.ends:
                continue
            step += 1
            if window.steps == self.config.window_steps or step == steps - 1:
                loss = self._close_window(window, totals)
                watch.diverged = watch.diverged or not math.isfinite(loss)
                window = Window(label, step + 1)
            ended = self._agree(watch.check(), Position(block, step + 1), label)
            if ended is not None:
                return ended
            self.timer.mark(OTHER)
        self.timer.mark(OTHER)
        _add(totals, self.timer.flush())
        seconds = time.perf_counter() - begin
        samples = (steps - first_step) * self.config.global_batch_size
        self._throughput = samples / seconds
        self.log.event(mllog.TRACKED_STATS, {"throughput": self._throughput}, metadata={"epoch_num": label})
        mean = {name: value / self.world.size for name, value in self.world.sum(totals).items()}
        self.log.event(mllog.RANK_PHASES, mean, metadata={"epoch_num": label, "steps": steps - first_step})
        self._log_ranks(totals, {"epoch_num": label, "steps": steps - first_step})
        return None

    def _log_ranks(self, totals: dict[str, float], where: dict[str, Any]) -> None:
        """Log what the ranks measured in a block, as a distribution over ranks."""
        if self.instruments is None:
            return
        meters = self.instruments.meters
        phases = {f"{name}_s": value for name, value in totals.items() if name != LOSS_SUM}
        rows = self.world.gather(phases | meters.read())
        if rows is not None:
            self.log.event(mllog.RANK_STATS, by_rank(rows), metadata=where | {"absent": meters.absent})

    def _log_energy(self, label: int) -> None:
        if self.instruments is not None:
            used = self.instruments.energy.take()
            self.log.event(mllog.ENERGY, used.value(), metadata={"epoch_num": label} | used.metadata())

    def _plan(self, samples: int, per_epoch: int, begin: int, end: int) -> Iterator[PlannedBatch]:
        """List this rank's samples for the global steps ``begin`` to ``end`` (excluded), across epochs."""
        step, parts = begin, self.config.gradient_accumulation_steps
        while step < end:
            epoch, within = divmod(step, per_epoch)
            indices = train_batches(
                samples,
                self.config.global_batch_size,
                seed=self.state.seed,
                epoch=epoch + 1,
                rank=self.world.rank,
                size=self.world.size,
                first_step=within,
            )
            for chosen in islice(indices, end - step):
                for part in range(parts):  # as if each part were of another rank
                    yield PlannedBatch(step, epoch + 1, chosen[part::parts], begins=part == 0, ends=part == parts - 1)
                step += 1

    def _part(self, batch: Batch, item: PlannedBatch, window: Window) -> None:
        """Run the forward and backward pass of one part of a step and, after the last part, the optimizer."""
        self.timer.mark(DATA_WAIT)
        self.progress.enter(f"forward pass of step {item.step}")
        optimizer = self.state.optimization.optimizer
        if item.begins:
            optimizer.zero_grad(set_to_none=True)
        parallel = isinstance(self.wrapped, DistributedDataParallel)
        with self.wrapped.no_sync() if parallel and not item.ends else nullcontext():  # type: ignore[operator]
            with autocast(self.config, self.device):
                loss = self.workload.loss(self.wrapped, batch) / self.config.gradient_accumulation_steps
            self.progress.enter(f"backward pass of step {item.step}")
            loss.backward()  # type: ignore[no-untyped-call]
        if item.ends:
            self._mark_exchange()
        else:
            self.timer.mark(FORWARD_BACKWARD)
        window.add(loss.detach(), ends_step=item.ends)
        if not item.ends:
            return
        for group in optimizer.param_groups:
            group["lr"] = self.state.optimization.learning_rate(item.step, item.epoch)
        if self.state.optimization.clip_norm is not None:
            clip_gradients(self.state.model, self.state.sharded, self.state.optimization.clip_norm)
        optimizer.step()
        if self.state.averaged is not None:
            self.state.averaged.update_parameters(self.state.model)
        self.timer.mark(OPTIMIZER)

    def _close_window(self, window: Window, totals: dict[str, float]) -> float:
        """Log a window. Returns its loss, the mean over steps and ranks."""
        mine = window.mean_loss()
        loss = self.world.sum({"loss": mine})["loss"] / self.world.size
        where = {"epoch_num": window.epoch, "first_step": window.first_step, "steps": window.steps}
        stats = self.workload.window_stats(self.world)
        self.timer.mark(OTHER)
        phases = self.timer.flush()
        _add(totals, phases | {LOSS_SUM: mine * window.steps})
        if self.instruments is not None:
            self.instruments.energy.meter.sample()
            self.log.event(mllog.STEP_PHASES, phases, metadata=where | {"loss": loss})
        if stats:
            self.log.event(mllog.WINDOW_STATS, stats, metadata=where)
        return loss

    def _agree(self, agreed: Agreed | None, position: Position, label: int) -> Outcome | None:
        """Do what all ranks agreed on before the step at ``position``. Returns an Outcome if training stops there."""
        if agreed is None:
            return None
        if agreed.stop is None:
            self.saver.begin(self.state, position, label)
            return None
        if agreed.stop == DIVERGED:
            return Outcome(False, f"diverged: the loss is not finite in epoch {label}, before step {position.step}")
        saved = self.saver.save(self.state, position, label)
        reason = f"stopped by {agreed.stop} in epoch {label}, before step {position.step}"
        return Outcome(False, reason if saved else f"{reason}; no checkpoint could be written", interrupted=saved)

    def evaluate_block(self, block: int) -> float:
        """Evaluate, log, and return the card's metric."""
        label = self.epoch_num(block)
        where = {"epoch_num": label, "samples_count": block * self._steps_per_block * self.config.global_batch_size}
        self.log.start(mllog.EVAL, metadata=where)
        begin = time.perf_counter()
        model = self.state.evaluated_model
        self.progress.enter(f"evaluation of epoch {label}")
        self.workload.before_evaluation(model, self.world)
        metrics = evaluate(
            self.workload,
            model,
            self.data.validation(block),
            self.config,
            self.world,
            self.device,
            self._to_device,
            self.progress.tick,
        )
        seconds = time.perf_counter() - begin
        value = metrics[self.target.metric]
        if math.isfinite(value):  # MLCommons' engine cannot compare text or null with the target
            self.log.event(self.target.metric, value, metadata=where | {"metrics": metrics})
        self.log.stop(mllog.EVAL, metadata=where | {"duration_s": seconds})
        self.say(
            f"epoch {label}: {self.target.metric_name} {value:.4f} (target {self.target.threshold:g}), "
            f"{self._throughput:,.0f} samples/s"
        )
        return value

    def _to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: tensor.pin_memory().to(self.device, non_blocking=True) for name, tensor in batch.items()}


class Window:
    """The steps between two step_phases events; losses stay on the device until the window closes."""

    def __init__(self, epoch: int, first_step: int) -> None:
        self.epoch, self.first_step, self.steps = epoch, first_step, 0
        self._loss: Tensor | None = None

    def add(self, loss: Tensor, *, ends_step: bool) -> None:
        """Add one part of a step. The losses of the parts sum to the loss of the step."""
        self.steps += ends_step
        self._loss = loss if self._loss is None else self._loss + loss

    def mean_loss(self) -> float:
        """Mean loss per step on this rank; waits for the device."""
        return float(self._loss) / self.steps if self._loss is not None else math.nan


def evaluate(
    workload: Workload,
    model: nn.Module,
    data: Dataset,
    config: RunConfig,
    world: World,
    device: torch.device,
    to_device: Callable[[Batch], Batch] = lambda batch: batch,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Compute the metrics of a whole split. Every sample counts once, whatever the number of ranks and the batch size."""
    model.eval()
    totals: dict[str, Tensor] = {}
    indices = eval_batches(len(data), config.eval_batch_size, rank=world.rank, size=world.size)
    with torch.no_grad(), autocast(config, device):
        for batch in prefetch(
            lambda chosen: data.load(chosen, seed=0, epoch=0), indices, threads=config.loader_threads
        ):
            for name, value in workload.eval_stats(model, to_device(batch)).items():
                totals[name] = totals[name] + value.double() if name in totals else value.double()
            tick()
    names: Sequence[str] = world.broadcast(list(totals))  # a rank without a sample does not know them
    return workload.metrics(world.sum({name: float(totals.get(name, 0.0)) for name in names}))


def prefetch(load: Callable[[Item], Loaded], items: Iterable[Item], *, threads: int) -> Iterator[Loaded]:
    """Load items in order with a pool of threads, ahead of their use: two per thread are being loaded or ready."""
    with ThreadPoolExecutor(threads, thread_name_prefix="loader") as pool:
        pending: list[Future[Loaded]] = []
        try:
            for item in items:
                pending.append(pool.submit(load, item))
                if len(pending) > 2 * threads:
                    yield pending.pop(0).result()
            while pending:
                yield pending.pop(0).result()
        finally:
            for future in pending:
                future.cancel()


def _add(totals: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        totals[name] = totals.get(name, 0.0) + value


def autocast(config: RunConfig, device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 autocast if the config asks for it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16")
