"""Logs what training measures as events: windows of steps, blocks of them, evaluations. Own loops use it too."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mlhpc.suite.log import mllog
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.log.other_work import MAX_LISTED_NODES, compute_share
from mlhpc.suite.machine.probes.allowance import read_usable_resources
from mlhpc.suite.machine.probes.cpu_time import NodeTimes, NodeUse, compute_use, read_node_times, read_own_s
from mlhpc.suite.machine.probes.processor import find_machine_root
from mlhpc.suite.training.instrument import Instruments, compute_rank_distribution
from mlhpc.suite.training.step_timing import OTHER, NoTimer, PhaseTimer, ProgressMarks, make_device_clock
from mlhpc.suite.world import World

LOSS_SUM = "loss_sum"
# The losses of so many steps are logged one by one; later ones as means of windows.
FIRST_LOSSES = 20


class TrainingLog:
    """Writes the events of one trial's training. All ranks make every call, rank 0's log writes.

    ``timer`` gets the marks of the steps. ``world`` is the given one; in a measured run its traffic is counted.
    ``instruments`` is None in a run that is not measured: then only throughput, losses and evaluations are logged.
    """

    def __init__(
        self, log: EventLog, world: World, device: torch.device, progress: ProgressMarks, *, measured: bool
    ) -> None:
        self._log, self.world, self._progress = log, world, progress
        self.timer: PhaseTimer | NoTimer = NoTimer()
        self.instruments: Instruments | None = None
        if measured:
            self.instruments = Instruments(world, device, make_device_clock(device), progress.collective)
            self.world, self.timer = self.instruments.world, self.instruments.timer
        self._totals: dict[str, float] = {}

    def counting(self) -> AbstractContextManager[None]:
        """Count collectives and energy within the body, the run."""
        if self.instruments is None:
            return nullcontext()
        self.instruments.energy.restart()
        return self.instruments.counting()

    def begin_block(self, label: int) -> None:
        """Begin the steps up to the next evaluation, of epoch ``label``, on all ranks at once."""
        self._totals = {}
        self._progress.enter(f"beginning of epoch {label}")
        # Otherwise a rank's wait for rank 0, which writes the log, would count as time of its steps.
        self.world.barrier()
        self.timer.restart()
        if self.instruments is not None:
            self.instruments.meters.restart()

    def close_window(
        self,
        where: Mapping[str, Any],
        mine: float | None,
        window_stats: Callable[[], Mapping[str, Any]] = dict,
        *,
        until: Any = None,
    ) -> float:
        """Write a window of steps and return its loss, the mean over ranks.

        ``where`` has ``epoch_num``, ``first_step`` and ``steps``. ``mine`` is this rank's mean loss per step, or None.
        The window ends now, or at the stamp ``until``.
        """
        # Every rank must enter the sum. NaN of a rank without a loss makes the mean NaN, and the event gets null.
        loss = self.world.sum({"loss": math.nan if mine is None else mine})["loss"] / self.world.size
        stats = window_stats()
        self.timer.mark(OTHER, until)
        phases = self.timer.flush()
        self._add(phases | ({} if mine is None else {LOSS_SUM: mine * where["steps"]}))
        if self.instruments is not None:
            # Energy counters wrap around; a reading per window misses no wrap in a long epoch.
            self.instruments.energy.meter.sample()
            shown = None if mine is None else loss
            self._log.event(mllog.STEP_PHASES, phases, metadata={**where, "loss": shown})
        if stats:
            self._log.event(mllog.WINDOW_STATS, stats, metadata=where)
        return loss

    def log_first_losses(self, losses: Sequence[torch.Tensor] | None) -> None:
        """Write the losses of the run's first steps, as means over ranks. All ranks call it; writes nothing if there
        are none.
        """
        if losses:
            total = self.world.sum({str(step): float(loss) for step, loss in enumerate(losses)})
            mean = [value / self.world.size for value in total.values()]
            self._log.event(mllog.FIRST_LOSSES, mean, metadata={"first_step": 0, "steps": len(mean)})

    def log_course(self, numbers: Mapping[str, float], label: int, steps: int) -> None:
        """Write the numbers by which a block of steps is compared with those of healthy runs."""
        self._log.event(mllog.TRAINING_COURSE, numbers, metadata={"epoch_num": label, "steps": steps})

    def log_recomputed(self, flops: int, samples: int) -> None:
        """Write the FLOPs per sample that blocks computed again in a step of ``samples`` samples. All ranks call it."""
        total = self.world.sum({"flops": float(flops)})["flops"]
        self._log.event(mllog.RECOMPUTED_FLOPS, total / samples)

    def end_block(
        self, label: int, steps: int, samples: int, elapsed_s: Callable[[], float], *, until: Any = None
    ) -> float:
        """Write what a block of steps took, and return samples per second. ``samples`` are those of all ranks.

        ``elapsed_s`` returns the block's seconds. It is called once the device has done the steps. The block ends now,
        or at the stamp ``until``.
        """
        self.timer.mark(OTHER, until)
        self._add(self.timer.flush())
        # After flush, which waits for the device.
        throughput = samples / elapsed_s()
        self._log.event(mllog.TRACKED_STATS, {"throughput": throughput}, metadata={"epoch_num": label})
        where = {"epoch_num": label, "steps": steps}
        # Not in `elapsed_s`: this exchange is the log's, not the training's.
        mean = {name: value / self.world.size for name, value in self.world.sum(self._totals).items()}
        self._log.event(mllog.RANK_PHASES, mean, metadata=where)
        if self.instruments is not None:
            phases = {f"{name}_s": value for name, value in self._totals.items() if name != LOSS_SUM}
            meters = self.instruments.meters
            rows = self.world.gather(phases | meters.read())
            if rows is not None:
                self._log.event(
                    mllog.RANK_STATS, compute_rank_distribution(rows), metadata={**where, "absent": meters.absent}
                )
        return throughput

    def step_s(self) -> float:
        """Return seconds of the block's steps up to the last window; 0.0 if the run is not measured."""
        return self._totals.get("step", 0.0)

    def log_energy(self, label: int) -> None:
        """Write the energy since the last such event, or since the run began."""
        if self.instruments is not None:
            used = self.instruments.energy.take()
            self._log.event(mllog.ENERGY, used.value(), metadata={"epoch_num": label} | used.metadata())

    def log_value(self, metric: str, value: float, where: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write a value of the card's metric, with all metrics of the evaluation."""
        if math.isfinite(value):  # MLCommons' engine cannot compare text or null with the target
            self._log.event(metric, value, metadata={**where, "metrics": metrics})

    def _add(self, more: Mapping[str, float]) -> None:
        for name, value in more.items():
            self._totals[name] = self._totals.get(name, 0.0) + value


class _RankUse(NamedTuple):
    """One rank's CPU use at the end of a run. Only one rank of each node has the node's ``begin`` and ``end``."""

    node: int
    own_s: float
    cpus: frozenset[int]
    cores: int
    begin: NodeTimes | None
    end: NodeTimes | None


class OtherWork:
    """Measures what other processes take of the ranks' CPUs, from its construction to `log`.

    Costs nothing in between.
    """

    def __init__(self, world: World, root: Path | None = None) -> None:
        self._world = world
        self._root = root or find_machine_root(os.environ)
        self._node = self._read_node()
        self._own_s = read_own_s(self._root)

    def log(self, log: EventLog) -> None:
        """Write the run's event, one entry per node. All ranks call it."""
        own_s, end = read_own_s(self._root) - self._own_s, self._read_node()
        allowed = read_usable_resources(self._root)
        rows = self._world.gather(
            _RankUse(self._world.node, own_s, allowed.cpus, allowed.cores, self._node, end), _RankUse
        )
        if rows is None or self._node is None or end is None:  # rank 0 reads a node and gathers
            return
        seconds = end.at_s - self._node.at_s
        by_node: dict[int, list[_RankUse]] = {}
        for row in rows:
            by_node.setdefault(row.node, []).append(row)
        uses = {node: _compute_node_use(of_node) for node, of_node in sorted(by_node.items())}
        entries = [{"node": node, **asdict(use)} for node, use in uses.items() if use.absent is None]
        absent = Counter(use.absent for use in uses.values() if use.absent is not None)
        # On thousands of nodes the log names only those with most work of others.
        most = sorted(entries, key=lambda entry: compute_share(entry, seconds), reverse=True)[:MAX_LISTED_NODES]
        value = [
            {name: round(of, 3) if isinstance(of, float) else of for name, of in entry.items() if name != "absent"}
            for entry in sorted(most, key=lambda entry: int(entry["node"]))
        ]
        log.event(mllog.OTHER_WORK, value, metadata={"seconds": seconds, "nodes": len(uses), "absent": absent})

    def _read_node(self) -> NodeTimes | None:
        """Read the whole node's times, on one rank of it."""
        return read_node_times(self._root) if self._world.local_rank == 0 else None


def _compute_node_use(rows: Sequence[_RankUse]) -> NodeUse:
    """Compute a node's CPU use from its ranks' reports."""
    begin, end = next((row.begin, row.end) for row in rows if row.begin is not None)
    assert begin is not None
    assert end is not None
    # Ranks may be pinned to different CPUs; other work on any of them slows a rank down.
    cpus = frozenset[int]().union(*(row.cpus for row in rows))
    return compute_use(begin, end, cpus, sum(row.own_s for row in rows), max(row.cores for row in rows))
