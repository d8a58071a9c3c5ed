"""Measures what a rank communicates and consumes in energy. It counts and never waits.

mlhpc.suite.training.step_timing measures where a step's time goes. mlhpc.suite.training.instrument has what a rank reads and
holds. Rank 0 gathers and logs everything once per block of steps.

Computes the event `rank_stats`: quantities that each rank counts of itself, and their distribution over ranks.

A quantity is a name in `RankCounters.read`. A number of the distribution is a column of `compute_rank_distribution`.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from mlhpc.suite.data.shards import count_read_bytes
from mlhpc.suite.machine.power.counters import (
    EnergyMeter,
    EnergyReading,
    EnergyUse,
    find_gpu_counter,
    find_node_counters,
    sum_readings,
)
from mlhpc.suite.machine.probes.processor import find_machine_root
from mlhpc.suite.training.step_timing import EXPOSED_COMMUNICATION, FORWARD_BACKWARD, Clock, PhaseTimer
from mlhpc.suite.transport import ObservedTransport, Transport
from mlhpc.suite.world import World

PROC_IO = Path("/proc/self/io")
# Above this, a log with one value per rank and quantity would grow with the machine.
MAX_LISTED_RANKS = 64


class RankCounters:
    """Counts what this rank read and communicated since the last `restart`.

    ``take_traffic`` returns the calls and bytes of collectives since it was last called. ``absent``: what this machine
    does not show, with the reason.
    """

    def __init__(self, device: torch.device, take_traffic: Callable[[], Mapping[str, float]]) -> None:
        self._device, self._take_traffic = device, take_traffic
        self.absent: dict[str, str] = {}
        self._begin = self._counts()

    def restart(self) -> None:
        """Start counting anew."""
        self._take_traffic()
        self._begin = self._counts()

    def read(self) -> dict[str, float]:
        """Return bytes read and communicated since the restart, and peaks of memory since the process began."""
        counts = {name: value - self._begin[name] for name, value in self._counts().items()}
        # Linux gives kibibytes.
        peaks = {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
        if self._device.type == "cuda":
            peaks["peak_device_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        return counts | dict(self._take_traffic()) | peaks

    def _counts(self) -> dict[str, float]:
        counts = {"loader_bytes": float(count_read_bytes())}
        try:
            # proc(5): read_bytes came from a block device. rchar is the sum of read calls, also from the page cache,
            # without reads through mapped files.
            text = PROC_IO.read_text()
        except OSError as error:
            self.absent["kernel_bytes"] = f"{PROC_IO}: {error.strerror}"
            return counts
        kernel = dict(line.split(": ") for line in text.splitlines())
        return counts | {"storage_bytes": float(kernel["read_bytes"]), "read_call_bytes": float(kernel["rchar"])}


def compute_rank_distribution(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Return each quantity's distribution over ranks and which ranks have the extremes; an absent quantity counts as 0.

    ``values`` lists every rank's value in rank order, up to 64 ranks.
    """
    summary: dict[str, dict[str, Any]] = {}
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    columns = {
        "min": table.min(0),
        "median": np.median(table, 0),
        "mean": table.mean(0),
        "max": table.max(0),
        "min_rank": table.argmin(0),
        "max_rank": table.argmax(0),
    }
    for position, quantity in enumerate(names):
        summary[quantity] = {name: column[position].item() for name, column in columns.items()}
        if len(rows) <= MAX_LISTED_RANKS:
            summary[quantity]["values"] = table[:, position].tolist()
    return summary


CONTROL = "control"
# Two clocks read within the tolerance show the same moment. Otherwise the closest of a few readings counts.
CLOCK_READINGS = 5
CLOCK_TOLERANCE_S = 20e-6
DDP_TIMES = ("backward_compute_time_end", "backward_comm_time_start", "backward_comm_time_end")  # wall clock, ns

# A collective of torch.distributed: its kind, and which argument is what this rank gives to it
COLLECTIVES: dict[str, tuple[str, int, str]] = {
    "all_reduce": ("all_reduce", 0, "tensor"),
    "broadcast": ("broadcast", 0, "tensor"),
    "all_gather": ("all_gather", 1, "tensor"),
    "all_gather_single": ("all_gather", 1, "input_tensor"),
    "all_gather_into_tensor": ("all_gather", 1, "input_tensor"),
    "reduce_scatter": ("reduce_scatter", 1, "input_list"),
    "reduce_scatter_single": ("reduce_scatter", 1, "input"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "all_to_all": ("all_to_all", 1, "input_tensor_list"),
    "all_to_all_single": ("all_to_all", 1, "input"),
}


# What DTensors call (torch.distributed._functional_collectives): the kind. They give their first argument. torch 2.13
# renamed two of them, and the old names call the new ones
FUNCTIONAL_COLLECTIVES: dict[str, tuple[str, str]] = {
    "all_reduce": ("all_reduce", "all_reduce"),
    "all_gather": ("all_gather_single", "all_gather_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
}


class CollectiveCounter:
    """Counts calls of collectives and the bytes that this rank gave to them, by kind.

    Any thread may add. ``on_call`` is called with the kind.
    """

    def __init__(self, on_call: Callable[[str], None] = lambda kind: None) -> None:
        self._on_call = on_call
        self._lock = threading.Lock()
        self._entries: dict[str, list[int]] = {}
        self._thread = threading.local()

    def add(self, kind: str, payload: int, calls: int = 1) -> None:
        """Add calls of one kind and their total bytes."""
        # The transport may call further collectives within one piece of control traffic, which is counted already.
        if getattr(self._thread, "control", False):
            return
        # Control traffic is marked for the watchdog by its transport (make_marking_transport).
        if kind != CONTROL:
            self._on_call(kind)
        with self._lock:
            entry = self._entries.setdefault(kind, [0, 0])
            entry[0] += calls
            entry[1] += payload

    @contextmanager
    def control(self, payload: int) -> Iterator[None]:
        """Count the body as one piece of control traffic, whatever it calls."""
        self.add(CONTROL, payload)
        self._thread.control = True
        try:
            yield
        finally:
            self._thread.control = False

    def take(self) -> dict[str, float]:
        """Return ``<kind>_calls`` and ``<kind>_bytes`` since the last call."""
        with self._lock:
            entries, self._entries = self._entries, {}
        return {
            f"{kind}_{unit}": float(number)
            for kind, entry in entries.items()
            for unit, number in zip(("calls", "bytes"), entry, strict=True)
        }


@contextmanager
def count_collectives(ledger: CollectiveCounter) -> Iterator[None]:
    """Count every collective that the body calls as ``torch.distributed.<name>``, and those of DTensors."""
    # Names differ between versions of torch; absent ones are skipped.
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    for name, original in originals.items():
        # DDP's reducer calls collectives in C++, which this does not see: `ReducerTimes` counts those.
        setattr(dist, name, _make_counting(original, ledger.add, *COLLECTIVES[name]))
    try:
        with count_functional_collectives(ledger.add):
            yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@contextmanager
def count_functional_collectives(add: Callable[[str, int], None]) -> Iterator[None]:
    """Give kind and bytes of every collective of DTensors in the body to ``add``."""
    originals = {}
    for kind, names in FUNCTIONAL_COLLECTIVES.items():
        name = next(each for each in names if hasattr(functional, each))
        originals[name] = getattr(functional, name)
        setattr(functional, name, _make_counting(originals[name], add, kind, 0, "self"))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(functional, name, original)


def make_counting_transport(transport: Transport, ledger: CollectiveCounter) -> ObservedTransport:
    """Return a transport that counts its traffic as control. Traffic of its parts is not counted."""

    def count(name: str, payload: int) -> AbstractContextManager[None]:
        return nullcontext() if name == "split" else ledger.control(payload)

    return ObservedTransport(transport, count)


class ReducerTimes:
    """Reads DDP's own times and counts once per step, by the host's clock. No Python runs in the backward pass."""

    def __init__(self, wrapped: DistributedDataParallel, timer: PhaseTimer, ledger: CollectiveCounter) -> None:
        self._timer, self._ledger, self._logger = timer, ledger, wrapped.logger
        # By default DDP takes its times only in every 100th step.
        wrapped._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """Mark the phases of the last backward pass."""
        now, wall_ns = _read_both_clocks()
        self._logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
        found = self._logger._get_ddp_logging_data().ints_map  # type: ignore[union-attr]
        times = (now - 1e-9 * (wall_ns - found[name]) for name in DDP_TIMES)
        computed, begin, end = (min(max(moment, self._timer.last), now) for moment in times)  # a wall clock can be set
        self._timer.transfer(begin, end)
        self._timer.mark(FORWARD_BACKWARD, computed)
        self._timer.mark(EXPOSED_COMMUNICATION, now)
        # Each step sends every gradient once; DDP does not report bytes per bucket.
        self._ledger.add("all_reduce", found["total_parameter_size_bytes"], found["num_buckets_reduced"])


def _read_both_clocks() -> tuple[float, int]:
    """Read the same moment on the monotonic clock (s) and on the wall clock (ns).

    A process can be suspended between the two readings, so the closest of a few pairs counts.
    """
    readings = []
    for _ in range(CLOCK_READINGS):
        begin, wall_ns, end = time.perf_counter(), time.time_ns(), time.perf_counter()
        readings.append((end - begin, end, wall_ns))
        if end - begin < CLOCK_TOLERANCE_S:
            break
    _, now, wall_ns = min(readings)
    return now, wall_ns


class EnergyReader:
    """Reads the energy of all nodes and GPUs of a run. One rank reads each node and each shared GPU."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._world = world
        node = find_node_counters(find_machine_root(os.environ))
        counters, self.absent = list(node.counters), dict(node.absent)
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        readers = world.allgather((world.node, uuid), tuple[int, str | None])
        # Ranks of a node share its counters: two readers would count its energy twice.
        if world.local_rank != 0:
            counters = []
        if uuid is None:
            self.absent["nvml"] = "the ranks use no GPU"
        elif readers.index((world.node, uuid)) == world.rank:
            gpu = find_gpu_counter(uuid)
            counters += gpu.counters
            self.absent |= gpu.absent
        self.meter = EnergyMeter(counters)
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Start counting anew, without a collective."""
        self.meter.take()
        self._since = time.perf_counter()

    def take(self) -> EnergyUse:
        """Return the energy of the run since the last call. Every rank calls it.

        Log rank 0's: only that has rank 0's ``absent``.
        """
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        mine = self.meter.take()
        # Ranks other than 0 get None from gather; what they compute from their own reading is not logged.
        return sum_readings(self._world.gather(mine, EnergyReading) or [mine], seconds, self.absent)


class Instruments:
    """All measurements of a run. ``world`` is the given one with its traffic counted during `counting`."""

    def __init__(
        self, world: World, device: torch.device, clock: Clock, on_call: Callable[[str], None] = lambda kind: None
    ) -> None:
        self.ledger = CollectiveCounter(on_call)
        self.world = replace(world, transport=make_counting_transport(world.transport, self.ledger))
        self.timer = PhaseTimer(clock)
        self.meters = RankCounters(device, self.ledger.take)
        self.energy = EnergyReader(world, device)

    def counting(self) -> AbstractContextManager[None]:
        """Count collectives within the body."""
        return count_collectives(self.ledger)


def _make_counting(
    original: Callable[..., Any], add: Callable[[str, int], None], kind: str, position: int, keyword: str
) -> Callable[..., Any]:
    @wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        given = arguments[position] if len(arguments) > position else keywords[keyword]
        tensors = given if isinstance(given, list | tuple) else (given,)
        # Before the call: if it never returns, the watchdog must know that this rank is in it.
        add(kind, sum(tensor.nbytes for tensor in tensors))
        return original(*arguments, **keywords)

    return call
