"""Trains and evaluates any workload on any number of ranks. It writes events and no other file.

docs/training_loop.md shows one trial in 25 lines, with the file of each call.

Every rank runs every line; only rank 0's log writes to a file. Collectives outside the gradient path go through
`World`. Decisions that change the control flow (stop, converged, diverged) depend only on numbers that are equal on
every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mlhpc.suite.card import render_metric_value
from mlhpc.suite.config import RunConfig
from mlhpc.suite.data.sampling import count_steps_per_epoch, draws, list_train_batches
from mlhpc.suite.errors import InputError
from mlhpc.suite.log import mllog
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.plugins import load_axis
from mlhpc.suite.training.agreement import CHECK_INTERVAL_S, DIVERGED, StepDecision, StopAgreement
from mlhpc.suite.training.batch_loading import BatchCopier, has_no_idle_core, load_with_prefetch
from mlhpc.suite.training.checkpoint import Checkpoint, CheckpointSaver
from mlhpc.suite.training.course import CourseMeter, MarkedData
from mlhpc.suite.training.cuda_graphs import Capture, CudaCapture, StepGraphs, find_graph_problem
from mlhpc.suite.training.gradient_exchange import register_exchange_timing
from mlhpc.suite.training.instrument import CollectiveCounter
from mlhpc.suite.training.parallel.ddp import eval_turns, wrap
from mlhpc.suite.training.parallel.fsdp import evaluating
from mlhpc.suite.training.parallel.mesh import Mesh
from mlhpc.suite.training.parallel.parallel_dims import Parallel, Passes, find_axis
from mlhpc.suite.training.parallel.recompute import recomputed_of
from mlhpc.suite.training.records import FIRST_LOSSES, TrainingLog
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.training.statement import TrialPlan
from mlhpc.suite.training.step_timing import (
    DATA_WAIT,
    EXPOSED_COMMUNICATION,
    FORWARD_BACKWARD,
    OPTIMIZER,
    OTHER,
    PhaseTimer,
    ProgressMarks,
)
from mlhpc.suite.workload import Dataset, Workload
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch


@dataclass(frozen=True)
class TrainingOutcome:
    """How training ended. ``reached`` follows from an evaluation; ``reason`` is one line for people."""

    reached: bool
    reason: str
    interrupted: bool = False


class PlannedBatch(NamedTuple):
    """One part of a training step, before its data are loaded.

    ``step`` is global and 0-based, ``epoch`` 1-based, ``indices`` are this rank's samples. With gradient accumulation a
    step has several parts; ``begins`` and ``ends`` mark the first and the last.
    """

    step: int
    epoch: int
    indices: NDArray[np.int64]
    begins: bool
    ends: bool


class DataSplits(Protocol):
    """Gives the data of a trial, block by block, so that staged data can replace the originals between two blocks."""

    def train(self, block: int) -> Dataset:
        """Return the training data of a block."""
        ...

    def validation(self, block: int) -> Dataset:
        """Return the evaluation data after a block."""
        ...


@dataclass(kw_only=True)
class Trainer:
    """Trains one trial in blocks, each followed by an evaluation.

    A block is an epoch, or the card's ``eval_every_steps``. ``stop_signal`` returns the name of a signal that asked
    this rank to stop, or None. By default nothing is logged or said, and nobody asks to stop.
    """

    plan: TrialPlan
    workload: Workload
    world: World
    device: torch.device
    state: TrainingState
    data: DataSplits
    checkpoint: Checkpoint
    log: EventLog = field(default_factory=lambda: EventLog(None))
    stop_signal: Callable[[], str | None] = lambda: None
    say: Callable[[str], None] = lambda text: None
    progress: ProgressMarks = field(default_factory=ProgressMarks)
    parallel: Parallel | None = None  # None: every rank trains on samples of its own
    capture: Capture | None = None  # how passes are captured; None: as CUDA graphs
    pipeline: Passes | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.config, self.size_card, self.target = self.plan.config, self.plan.size_card, self.plan.target
        self.shared = self.parallel or Parallel(Mesh(self.world.rank, self.world.size))
        self._throughput = 0.0
        self._steps_per_block = 0
        self._course = CourseMeter(self.state.model, self.state.sharded)
        captured = self.config.graphs is True
        self._feed = BatchCopier(self.device, alone=has_no_idle_core(self.world), fixed=captured)
        self._first_losses: list[Tensor] | None = []  # of steps; None: not those of the run's beginning, or logged
        measured = self.config.instrumentation
        self.records = TrainingLog(self.log, self.world, self.device, self.progress, measured=measured)
        self.world, self.timer, self.instruments = self.records.world, self.records.timer, self.records.instruments
        mesh = self.shared.mesh
        self._alike = self.world.split(mesh.part) if mesh.pipeline > 1 else self.world
        self.saver = CheckpointSaver(self.checkpoint, self.world, self.log, self.config.checkpoint.interval_s)
        self.ledger = self.instruments.ledger if self.instruments else CollectiveCounter()
        self.pipeline, self.wrapped = find_axis(mesh).make_passes(self), self.state.model
        if self.pipeline is None:
            self.wrapped = wrap(self.state.model, self.state.sharded, self.world, self.device)
        compressed = self.shared.plan.compress if self.shared.plan is not None else None
        if compressed is not None and isinstance(self.wrapped, DistributedDataParallel):
            load_axis("compress", "plan: compress")(self.wrapped, compressed)
        self._recomputed = recomputed_of(self.state.model)
        self._mark_exchange = register_exchange_timing(
            self.wrapped, self.timer, self.ledger, hooked=compressed is not None
        )
        self._graphs = self._make_graphs() if captured else None
        self._without_exchange: Callable[[], AbstractContextManager[Any]] = (
            self.wrapped.no_sync if isinstance(self.wrapped, DistributedDataParallel) else nullcontext
        )

    def _make_graphs(self) -> StepGraphs:
        problem = find_graph_problem(
            self.config, self.world.size, self.workload, self.state.model, planned=self.shared.plan is not None
        )
        if problem is None and self.capture is None and self.device.type != "cuda":
            problem = "this run has no GPU"
        if problem is not None:
            raise InputError(f"graphs is true, but {problem}: give --set graphs=false")
        return StepGraphs(self._pass, list(self.state.model.parameters()), self.capture or CudaCapture())

    def run(self, start: Position) -> TrainingOutcome:
        """Train from a position until the target is met, the epochs are used up, or a signal stops it."""
        with self.records.counting():
            outcome = self._run(start)
            self.records.log_first_losses(self._first_losses)
            return outcome

    def _run(self, start: Position) -> TrainingOutcome:
        if start != Position(1, 0):
            self._first_losses = None
        interval_s = self.config.checkpoint.interval_s
        often_s = CHECK_INTERVAL_S if interval_s is None else min(CHECK_INTERVAL_S, interval_s / 10)
        watch = StopAgreement(self.world, self.stop_signal, self.saver, often_s)
        steps = count_steps_per_epoch(len(self.data.train(start.block)), self.config.global_batch_size)
        blocks = max(1, self.config.max_epochs * steps // (self.size_card.eval_every_steps or steps))
        for block in range(start.block, blocks + 1):
            label = self.epoch_num(block)
            self.log.start(mllog.EPOCH, metadata={"epoch_num": label})
            stopped = self.train_block(block, start.step if block == start.block else 0, watch)
            if stopped is not None:
                self.records.log_energy(label)
                return stopped
            value = self.evaluate_block(block)
            self.records.log_energy(label)
            self.log.stop(mllog.EPOCH, metadata={"epoch_num": label})
            if not math.isfinite(value):
                return TrainingOutcome(False, f"diverged: {self.target.metric_name} is {value} after epoch {label}")
            if self.target.reached(value):
                self.log.event(mllog.TARGET_ACCURACY_REACHED, value, metadata={"epoch_num": label})
                return TrainingOutcome(True, f"target reached in epoch {label}")
            if block < blocks:
                ended = self._agree(watch.check(now=True), block + 1, 0, label)
                if ended is not None:
                    return ended
        return TrainingOutcome(False, f"target not reached in {self.config.max_epochs} epochs")

    def epoch_num(self, block: int) -> int:
        """Return a block's ``epoch_num`` in the log: the epoch, or the samples seen by its end (OpenFold's rules)."""
        every = self.size_card.eval_every_steps
        return block if every is None else block * every * self.config.global_batch_size

    def train_block(self, block: int, first_step: int, watch: StopAgreement) -> TrainingOutcome | None:
        """Train up to the next evaluation. Returns an Outcome only if training stopped earlier."""
        data = self.data.train(block)
        marked = MarkedData(data) if block == 1 and first_step == 0 else None
        data = data if marked is None else marked
        label = self.epoch_num(block)
        per_epoch = count_steps_per_epoch(len(data), self.config.global_batch_size)
        steps = self._steps_per_block = self.size_card.eval_every_steps or per_epoch
        window = StepWindow(label, first_step)
        begin = time.perf_counter()
        self.wrapped.train()
        self.records.begin_block(label)
        step, seen = first_step - 1, []
        place = (block - 1) * steps + first_step, block * steps
        for item, batch in self.batches(data, *place):
            self.part(batch, item, window, measures=self._course.is_due(step + 1, steps))
            seen.append(item.indices)
            if not item.ends:
                continue
            step += 1
            if window.steps == self.config.window_steps or step == steps - 1:
                loss = self._close_window(window)
                watch.diverged = watch.diverged or not math.isfinite(loss)
                window = StepWindow(label, step + 1)
            ended = self._agree(watch.check(), block, step + 1, label)
            if ended is not None:
                return ended
            self.timer.mark(OTHER)
        done = steps - first_step
        samples = done * self.config.global_batch_size
        self._throughput = self.records.end_block(label, done, samples, lambda: time.perf_counter() - begin)
        order = np.concatenate([np.empty(0, np.int64), *seen])
        self.records.log_course(self._course.take(self.world, first_step, order), label, done)
        expected = [item.indices for item in self._plan(len(data), per_epoch, *place, alone=True)]
        require_samples(self.world, seen if self.shared.counts else [], expected, f"training of epoch {label}")
        self._warn_of_copies(marked, f"training of epoch {label}")
        return None

    def _warn_of_copies(self, marked: MarkedData | None, what: str) -> None:
        """Say it if samples are copies of others. All ranks call it."""
        copies = None if marked is None else marked.find_copies(self.world, counts=self.shared.counts)
        if copies is not None:
            self.say(f"warning: {what}: {copies}")

    def batches(self, data: Dataset, begin: int, end: int) -> Iterator[tuple[PlannedBatch, Batch]]:
        """Load this rank's batches for the global steps ``begin`` to ``end`` (excluded) onto its device."""
        return load_with_prefetch(
            lambda item: data.load(item.indices, seed=self.state.seed, epoch=item.epoch),
            self._plan(len(data), count_steps_per_epoch(len(data), self.config.global_batch_size), begin, end),
            threads=self.config.loader_threads,
            feed=self._feed,
        )

    def _plan(
        self, samples: int, per_epoch: int, begin: int, end: int, *, alone: bool = False
    ) -> Iterator[PlannedBatch]:
        """List this rank's samples of the global steps ``begin`` to ``end`` (excluded), across epochs.

        ``alone``: as if this were the only rank, which takes all samples.
        """
        step, parts = begin, self.config.gradient_accumulation_steps
        rank, size = (0, 1) if alone else (self.shared.mesh.data_rank, self.shared.mesh.data_size)
        while step < end:
            epoch, within = divmod(step, per_epoch)
            indices = list_train_batches(
                samples,
                self.config.global_batch_size,
                seed=self.state.seed,
                epoch=epoch + 1,
                rank=rank,
                size=size,
                first_step=within,
            )
            for chosen in islice(indices, end - step):
                if self.pipeline is not None:  # which divides them again
                    whole = np.concatenate([chosen[part::parts] for part in range(parts)])
                    yield PlannedBatch(step, epoch + 1, whole, begins=True, ends=True)
                    step += 1
                    continue
                for part in range(parts):  # as if each part were of another rank
                    yield PlannedBatch(step, epoch + 1, chosen[part::parts], begins=part == 0, ends=part == parts - 1)
                step += 1

    def part(self, batch: Batch, item: PlannedBatch, window: StepWindow, *, measures: bool = False) -> None:
        """Run forward and backward pass of one part of a step and, after the last part, the optimizer.

        ``measures``: the norm of this step's gradients is measured.
        """
        self.timer.mark(DATA_WAIT)
        self.progress.enter("forward pass of step", item.step)
        # A graph overwrites its gradients, which must stay where they are.
        if item.begins and self._graphs is None:
            self.state.optimization.optimizer.zero_grad(set_to_none=True)
        value = self._compute_gradients(batch, item) if self.pipeline is None else self._run_pipeline(batch)
        window.add(value, ends_step=item.ends)
        self._keep_first(value, item)
        if not item.ends:
            return
        if measures:
            self._course.add_gradients()
        self.state.update(item.step, item.epoch)
        self.timer.mark(OPTIMIZER)
        if self._recomputed is not None:
            self.records.log_recomputed(self._recomputed.take() or 0, self.config.global_batch_size)
            self._recomputed = None

    def _run_pipeline(self, batch: Batch) -> Tensor:
        """Run all forward and backward passes of a step. On processors, waiting for other stages counts as exposed."""
        assert self.pipeline is not None
        loss, waited_s = self.pipeline.step(batch)
        if isinstance(self.timer, PhaseTimer) and self.device.type == "cpu":
            now = self.timer.stamp()
            self.timer.mark(FORWARD_BACKWARD, max(self.timer.last, now - waited_s))
            self.timer.mark(EXPOSED_COMMUNICATION, now)
        else:
            self.timer.mark(FORWARD_BACKWARD)
        return loss

    def _compute_gradients(self, batch: Batch, item: PlannedBatch) -> Tensor:
        """Run the forward and backward pass of one part of a step. Returns its loss."""
        if self._graphs is not None:
            loss = self._graphs.run(batch)
        else:
            # Gradients add up locally until the last part: one exchange per step.
            with nullcontext() if item.ends else self._without_exchange():
                loss = self._pass(batch, item.step)
        if item.ends:
            self._mark_exchange()
        else:
            self.timer.mark(FORWARD_BACKWARD)
        return loss

    def _pass(self, batch: Batch, step: int | None = None) -> Tensor:
        """Run forward and backward pass of a batch. Returns its loss."""
        with make_autocast(self.config, self.device):
            loss = self.workload.loss(self.wrapped, batch)
            parts, factor = self.config.gradient_accumulation_steps, self.shared.loss_factor
            loss = loss if parts == 1 else loss / parts
            # DDP takes the mean over all ranks, also where several of them share a sample.
            loss = loss if factor == 1.0 else loss * factor
        if step is not None:
            self.progress.enter("backward pass of step", step)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _keep_first(self, loss: Tensor, item: PlannedBatch) -> None:
        """Keep the losses of the run's first steps on the device until they are logged. A step's parts are added up."""
        if self._first_losses is None:
            return
        if not item.begins:
            self._first_losses[-1] = self._first_losses[-1] + loss
        elif len(self._first_losses) == FIRST_LOSSES:
            self.records.log_first_losses(self._first_losses)
            self._first_losses = None
        else:
            self._first_losses.append(loss)

    def _close_window(self, window: StepWindow) -> float:
        """Log a window. Returns its loss, the mean over steps and ranks."""
        where = {"epoch_num": window.epoch, "first_step": window.first_step, "steps": window.steps}
        self._course.add_losses(window.step_losses())
        return self.records.close_window(where, window.mean_loss(), lambda: self.workload.window_stats(self.world))

    def _agree(self, agreed: StepDecision | None, block: int, step: int, label: int) -> TrainingOutcome | None:
        """Do what all ranks agreed on before a step of a block. Returns an Outcome if training stops there."""
        if agreed is None:
            return None
        position = Position(block, step)
        if agreed.stop is None:
            self.saver.begin(self.state, position, label)
            return None
        if agreed.stop == DIVERGED:
            return TrainingOutcome(
                False, f"diverged: the loss is not finite in epoch {label}, before step {position.step}"
            )
        saved = self.saver.save(self.state, position, label)
        reason = f"stopped by {agreed.stop} in epoch {label}, before step {position.step}"
        return TrainingOutcome(
            False, reason if saved else f"{reason}; no checkpoint could be written", interrupted=saved
        )

    def evaluate_block(self, block: int) -> float:
        """Evaluate, log the result, and return the card's metric."""
        label = self.epoch_num(block)
        where = {"epoch_num": label, "samples_count": block * self._steps_per_block * self.config.global_batch_size}
        self.log.start(mllog.EVAL, metadata=where)
        begin = time.perf_counter()
        self.progress.enter(f"evaluation of epoch {label}")
        data = self.data.validation(block)
        marked = MarkedData(data) if block == 1 else None
        with self.state.evaluated() as model:
            self.workload.before_evaluation(model, self._alike)
            metrics = run_evaluation(
                self.workload,
                model,
                data if marked is None else marked,
                self.config,
                self.world,
                self.device,
                self._feed,
                self.progress.tick,
                self.shared,
                None if self.pipeline is None else self.pipeline.evaluate,
            )
        seconds = time.perf_counter() - begin
        value = metrics[self.target.metric]
        self.records.log_value(self.target.metric, value, where, metrics)
        self.log.stop(mllog.EVAL, metadata=where | {"duration_s": seconds})
        threshold = self.target.threshold
        shown = f"{render_metric_value(value, threshold)} (target {threshold:g}), {self._throughput:,.0f} samples/s"
        self.say(f"epoch {label}: {self.target.metric_name} {shown}")
        self._warn_of_copies(marked, f"evaluation of epoch {label}")
        return value


class StepWindow:
    """The steps between two step_phases events. Losses stay on the device until the window closes."""

    def __init__(self, epoch: int, first_step: int) -> None:
        self.epoch, self.first_step, self.steps = epoch, first_step, 0
        self._losses: list[Tensor] = []
        self._ends: list[int] = []  # parts up to the end of each step

    def add(self, loss: Tensor, *, ends_step: bool) -> None:
        """Add one part of a step. The losses of a step's parts sum to the step's loss."""
        self.steps += ends_step
        self._losses.append(loss)
        if ends_step:
            self._ends.append(len(self._losses))

    def mean_loss(self) -> float:
        """Return this rank's mean loss per step. Waits for the device."""
        return float(torch.stack(self._losses).sum()) / self.steps if self._losses else math.nan

    def step_losses(self) -> list[float]:
        """Return this rank's loss of each step. Waits for the device."""
        values = torch.stack(self._losses).tolist() if self._losses else []
        return [math.fsum(values[begin:end]) for begin, end in pairwise([0, *self._ends])]


def run_evaluation(
    workload: Workload,
    model: nn.Module,
    data: Dataset,
    config: RunConfig,
    world: World,
    device: torch.device,
    feed: BatchCopier | None = None,
    tick: Callable[[], None] = lambda: None,
    shared: Parallel | None = None,
    evaluate: Callable[[Batch], Mapping[str, Tensor]] | None = None,
) -> dict[str, float]:
    """Compute the metrics of a whole split.

    Every sample counts once, whatever the number of ranks and the batch size, and is counted. ``evaluate``: computes
    the statistics of a batch in place of the workload.
    """
    model.eval()
    totals: dict[str, Tensor] = {}
    seen: list[NDArray[np.int64]] = []
    shared = shared or Parallel(Mesh(world.rank, world.size))
    turns = eval_turns(len(data), config.eval_batch_size, shared)
    with torch.no_grad(), make_autocast(config, device), evaluating(model, gathered=not shared.in_step):
        batches = load_with_prefetch(
            lambda turn: data.load(turn.indices, seed=0, epoch=0),
            turns,
            threads=config.loader_threads,
            feed=feed or BatchCopier(device),
        )
        for turn, batch in batches:
            stats = workload.eval_stats(model, batch) if evaluate is None else evaluate(batch)
            for name, value in stats.items() if turn.counts else ():
                totals[name] = totals[name] + value.double() if name in totals else value.double()
            if turn.counts and shared.counts:
                seen.append(turn.indices)
            tick()
    # A rank without a sample, or without the last stage of a pipeline, does not know the names.
    every: list[list[str]] = world.allgather(list(totals))
    names = max(every, key=len)
    mine = totals if shared.counts else {}  # the ranks of a sample have computed the same
    metrics = workload.metrics(world.sum({name: float(mine.get(name, 0.0)) for name in names}))
    require_samples(world, seen, [np.arange(len(data))], "evaluation")
    return metrics


def require_samples(
    world: World, mine: Sequence[NDArray[np.int64]], expected: Sequence[NDArray[np.int64]], what: str
) -> None:
    """Raise InputError unless all ranks together took the expected samples, each as often. All ranks call it.

    Numbers of samples and sums of a mark of each are compared, so what is left out or repeated is found.
    """

    def count(parts: Sequence[NDArray[np.int64]]) -> dict[str, float]:
        taken = np.concatenate([np.empty(0, np.int64), *parts])
        return {"samples": float(len(taken)), "marks": float((draws(0, 0, taken) >> np.uint64(44)).sum())}  # exact

    found, wanted = world.sum(count(mine)), count(expected)
    if found["samples"] != wanted["samples"]:
        raise InputError(f"{what}: {found['samples']:.0f} samples were taken; expected {wanted['samples']:.0f}")
    if found != wanted:
        raise InputError(f"{what}: some of {wanted['samples']:.0f} samples were taken twice and others never")


def make_autocast(config: RunConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return a bfloat16 autocast context if the config asks for it, else an empty one."""
    # A disabled torch.autocast would do, but entering it takes a hundredth of a small step.
    return torch.autocast(device.type, torch.bfloat16) if config.precision == "bfloat16" else nullcontext()
