"""Compares two sides in one job: runs each in blocks of steps that begin at a checkpoint, and judges B against A.

A side is a model under a plan and settings. All ranks call everything but the verdicts, which come from pairs of
blocks.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlhpc.plugins.tune.race import Turn, make_balanced_order, run_block
from mlhpc.suite.data.sampling import check_batch, count_steps_per_epoch
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import align_columns
from mlhpc.suite.machine.choice.chooser import make_chooser
from mlhpc.suite.machine.choice.layout import ProcessSettings, keep_process_settings
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.power import find_smallest_effect
from mlhpc.suite.statistics.sessions import compute_mean_interval
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.counts.flops import FlopSum
from mlhpc.suite.training.counts.memory import LiveBytes
from mlhpc.suite.training.devices import use_precision
from mlhpc.suite.training.loop import StepWindow, Trainer
from mlhpc.suite.training.parallel.apply import build
from mlhpc.suite.training.parallel.fsdp import local
from mlhpc.suite.training.parallel.parallel_dims import Parallel, cut
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.training.statement import SEED_BITS, TrialPlan
from mlhpc.suite.workload import Dataset, Workload, load_workload
from mlhpc.suite.world import World

CONFIDENCE = 0.95  # of all intervals of one comparison together (Bonferroni)
REFUSED = "refused"  # of every row, if a side computes something else (`mlhpc.plugins.tune.error`)
MORE, LESS = "more", "less"  # of an amount; of a time it is slower and faster
LOSS = "loss"
DRAWS = 200  # simulated comparisons
TIME_QUANTITIES = ("step time", "CPU time")
QUANTITIES: Mapping[str, str] = {  # measured in each block, with their units
    "step time": "s",
    "CPU time": "s",
    "peak memory": "B",
    "executed FLOPs": "FLOP",
    "bytes sent": "B",
    LOSS: "",
}


@dataclass(frozen=True)
class Row:
    """One quantity of both sides over ``pairs`` pairs of blocks.

    ``difference`` is B over A minus 1, from the geometric mean of the pairs' ratios, with its interval. A loss may be
    negative: its difference is the mean of (B - A) / abs(A). It is None if a side is 0 or a value is no number.
    ``largest`` is the largest absolute difference of one pair. ``verdict`` is the `Outcome` of B (equivalent: every bit
    is equal in every pair). An amount is more or less instead of slower or faster.
    """

    quantity: str
    unit: str
    pairs: int
    a_mean: float
    a_spread: float
    b_mean: float
    b_spread: float
    difference: float | None
    low: float | None
    high: float | None
    largest: float | None
    verdict: str


def judge(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> list[Row]:
    """Judge every quantity from both sides' blocks, pair by pair. InputError for fewer than two pairs."""
    return [_judge_quantity(name, unit, a[name], b[name]) for name, unit in QUANTITIES.items()]


def _judge_quantity(name: str, unit: str, a: Sequence[float], b: Sequence[float]) -> Row:
    if len(a) != len(b) or len(a) < 2:
        raise InputError(
            f"{name}: {len(a)} blocks of A and {len(b)} of B; expected the same number of both, at least 2"
        )
    means = statistics.fmean(a), _compute_spread(a), statistics.fmean(b), _compute_spread(b)
    if not all(map(math.isfinite, (*a, *b))):
        return Row(name, unit, len(a), *means, None, None, None, None, Outcome.INCONCLUSIVE)
    if list(a) == list(b):
        return Row(name, unit, len(a), *means, 0.0, 0.0, 0.0, 0.0, Outcome.EQUIVALENT)
    signed = name == LOSS
    # Without ratios only the signs of the differences decide
    if any(x == 0 for x in a) or (not signed and min(*a, *b) <= 0):
        gaps = [y - x for x, y in zip(a, b, strict=True)]
        return Row(name, unit, len(a), *means, None, None, None, None, _judge_difference(name, min(gaps), max(gaps)))
    apart = [(y - x) / abs(x) if signed else math.log(y / x) for x, y in zip(a, b, strict=True)]
    middle, half = compute_mean_interval(apart, 1.0 - (1.0 - CONFIDENCE) / len(QUANTITIES))
    low, middle, high = (
        # exp of more than about 709 is no float.
        each if signed else math.expm1(min(each, 700.0))
        for each in (middle - half, middle, middle + half)
    )
    # One bad pair hides in a mean; for a loss it may be the whole finding.
    largest = max(abs(y - x) / abs(x) for x, y in zip(a, b, strict=True))
    return Row(name, unit, len(a), *means, middle, low, high, largest, _judge_difference(name, low, high))


def _judge_difference(name: str, low: float, high: float) -> str:
    """Judge B by the interval of its difference from A."""
    if low > 0:
        return Outcome.SLOWER if name in TIME_QUANTITIES else MORE
    if high < 0:
        return Outcome.FASTER if name in TIME_QUANTITIES else LESS
    return Outcome.INCONCLUSIVE


def find_visible_step_time(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Find by which part B must be slower to be found slower in 8 of 10 such comparisons. None: not even 11 times.

    Pairs are drawn anew, with normal noise and all spreads that these pairs leave open.
    """
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True) if min(x, y) > 0]
    if len(logs) < 2:
        return None
    chance, dof = random.Random(0), len(logs) - 1  # noqa: S311  no secret
    # Two degrees more than the data have, as in `mlhpc.suite.statistics.power`
    spreads = [
        statistics.stdev(logs) * math.sqrt((dof + 2) / chance.gammavariate((dof + 2) / 2, 2)) for _ in range(DRAWS)
    ]
    noise = [[chance.gauss(0.0, spread) for _ in logs] for spread in spreads]
    ones = [1.0] * len(logs)

    def find_share(effect: float) -> float:
        drawn = ([(1.0 + effect) * math.exp(each) for each in row] for row in noise)
        return sum(_judge_quantity("step time", "s", ones, row).verdict == Outcome.SLOWER for row in drawn) / DRAWS

    return find_smallest_effect(find_share, 10.0)


def _compute_spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def render_rows(rows: Sequence[Row]) -> list[str]:
    """Render rows as a table."""
    text = [("quantity", "A", "spread", "B", "spread", "B - A", "interval", "B is")]
    for row in rows:
        between = "none"
        if row.low is not None and row.high is not None:
            between = f"[{_render_percent(row, row.low)}, {_render_percent(row, row.high)}]"
        difference = "none" if row.difference is None else _render_percent(row, row.difference)
        a, b = (
            (f"{mean:.5g}", f"{spread:.2g}")
            for mean, spread in ((row.a_mean, row.a_spread), (row.b_mean, row.b_spread))
        )
        text.append((row.quantity, *a, *b, difference, between, row.verdict))
    return align_columns(text, right=range(1, 6))


def _render_percent(row: Row, value: float) -> str:
    return f"{value:+.1e}" if row.quantity == LOSS else f"{100 * value:+.2f} %"


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
        """Return the numbers by the names of `mlhpc.plugins.tune.sides.QUANTITIES`."""
        names = ("step time", "CPU time", "peak memory", "executed FLOPs", "bytes sent", LOSS)
        return dict(zip(names, asdict(self).values(), strict=True))


@dataclass
class Side:
    """A trainer under one plan.

    ``settings``: set by the user for this side; ``choices``: chosen by the suite, by name.
    """

    trainer: Trainer
    data: Dataset  # this rank's part of each sample
    whole: Dataset
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
        whole = workload.dataset("train", root)
        data = cut(whole, parallel.slabs(evaluation=False))
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
                checkpoint=checkpoint,
                parallel=parallel,
            )
            process = ProcessSettings.now()
        chosen = {choice.name: choice.value for choice in chooser.choices.values()}
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in state.optimization.optimizer.param_groups
        ]
        return Side(trainer, data, whole, checkpoint, device, process, groups, settings, chosen)

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
    """``pairs`` of blocks, each of two counted and ``steps`` timed steps, after ``warmup`` steps.

    ``order_seed`` draws which side begins. All ranks must have the same one.
    """

    pairs: int
    steps: int
    warmup: int
    order_seed: int = 0


def run_block_pairs(a: Side, b: Side, schedule: Schedule) -> tuple[list[BlockCost], list[BlockCost]]:
    """Run both sides' blocks in turn: which one begins is drawn, and every second pair is in reverse order.

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
        run_block(block, make_balanced_order(block, tuple(sides), schedule.order_seed), run)
        for block in range(1, schedule.pairs + 1)
    ]
    return [pair["a"] for pair in pairs], [pair["b"] for pair in pairs]
