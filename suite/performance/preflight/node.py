"""Measures one node on all its ranks, without any other node: a bad node cannot spoil another's result.

The benchmarks are repeated in turn until the time is over, so that each sees all of it. After every round the node's
file is written anew: a node that dies leaves its measurements so far.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mlhpc.suite.files import render_error, write_file_atomically
from mlhpc.suite.machine.facts import Sample, render_samples
from mlhpc.suite.machine.probes.allowance import find_usable_resources
from mlhpc.suite.machine.probes.processor import find_machine_root, list_data_caches, read_cpu
from mlhpc.suite.performance.ceilings.samples import TimeLimit
from mlhpc.suite.performance.ceilings.sizes import find_free_bytes
from mlhpc.suite.performance.preflight.benches import (
    BENCHES,
    Bench,
    BenchContext,
    Repeat,
    collect_facts,
    make_step_benches,
)
from mlhpc.suite.world import World, find_node_name

MIN_ROUNDS = 2  # rounds, however short the time: one to warm up, one that counts
# Preparing ends after this share of the time, so that something is left to repeat what is prepared.
PREPARATION_SHARE = 0.6


def measure(
    world: World,
    *,
    device: torch.device,
    directory: Path,
    workloads: Mapping[str, Path],
    seconds: float,
    rounds: int | None = None,
    output: Path,
    at: Callable[[str], None],
    say: Callable[[str], None],
) -> list[Sample]:
    """Measure for ``seconds``; write and return the samples of the node. All ranks of the node call it.

    After ``rounds`` repetitions of each benchmark it ends earlier. ``at`` is called with the next step, to show where a
    node hangs. ``say`` is called with what is left out.
    """
    budget = TimeLimit(world, seconds)
    world.init_torch(device)
    allowance = find_usable_resources()
    caches = tuple(list_data_caches(find_machine_root(os.environ), allowance.cpus))
    place = BenchContext(world, device, directory, caches, find_free_bytes(world.allgather(allowance.memory_free)))
    node = _Node(
        find_node_name(),
        f"{describe_hardware(device)}, {world.size} ranks of {torch.get_num_threads()} threads",
        output,
        world.is_first,
    )
    node.add_facts(place)
    ready: list[tuple[Bench, Repeat]] = []
    late: list[str] = []
    for bench in (*BENCHES, *make_step_benches(workloads)):
        # At least one benchmark is prepared, however late it is.
        if not budget.allows((1.0 - PREPARATION_SHARE) * seconds) and ready:
            late.append(bench.metric)
            continue
        at(bench.metric)
        repeat, why = _call_safely(lambda bench=bench: bench.prepare(place))  # type: ignore[misc]
        # What fails on one rank is measured on none: they would wait for each other.
        if node.well(bench, world.allgather(why)) and repeat is not None:
            ready.append((bench, repeat))
    if late:
        say(f"no time was left to prepare {', '.join(late)}")
    node.write()
    done = 0
    while ready and done <= (rounds or done) and (done < MIN_ROUNDS or budget.left()):
        _measure_round(world, node, ready, done, budget, at)
        done += 1
        node.write()
    return node.samples()


def _measure_round(
    world: World,
    node: _Node,
    ready: list[tuple[Bench, Repeat]],
    done: int,
    budget: TimeLimit,
    at: Callable[[str], None],
) -> None:
    """Repeat each benchmark once, until the time is over.

    A benchmark that fails is removed. The first round warms up.
    """
    for bench, repeat in list(ready):
        if done >= MIN_ROUNDS and not budget.left():
            break
        at(bench.metric)
        world.barrier()
        results = world.allgather(_call_safely(repeat))  # (value, problem) of each rank
        if not node.well(bench, [why for _, why in results]):
            ready.remove((bench, repeat))
        elif done:
            node.add(bench, [value for value, _ in results])


class _Node:
    """The measurements of this node so far."""

    def __init__(self, name: str, hardware: str, output: Path, writes: bool) -> None:
        self._name, self._hardware, self._output, self._writes = name, hardware, output, writes
        self._values: dict[Bench, list[float]] = {}
        self._failed: dict[Bench, str] = {}
        self._facts: list[Sample] = []

    def add_facts(self, place: BenchContext) -> None:
        """Add untimed facts."""
        for metric, unit, value, worst in collect_facts(place):
            self._facts.append(
                Sample(
                    node=self._name, hardware=self._hardware, metric=metric, unit=unit, better="more",
                    component=metric, values=(max(value, 1e-9),), bound=worst,
                )
            )  # fmt: skip

    def add(self, bench: Bench, values: list[float]) -> None:
        """Add a repetition: the worst of all ranks."""
        self._values.setdefault(bench, []).append(min(values) if bench.better == "more" else max(values))

    def fail(self, bench: Bench, why: str) -> None:
        """Record why a benchmark has no values."""
        self._values.pop(bench, None)
        self._failed[bench] = why

    def well(self, bench: Bench, reasons: Sequence[str]) -> bool:
        """Return True if no rank reports a problem. The first problem is kept."""
        found = next(filter(None, reasons), "")
        if found:
            self.fail(bench, found)
        return not found

    def samples(self) -> list[Sample]:
        """Return all samples as they are written."""
        entries = [(bench, tuple(values), "") for bench, values in self._values.items()]
        entries += [(bench, (), why) for bench, why in self._failed.items()]
        return [
            Sample(
                node=self._name, hardware=self._hardware, metric=bench.metric, unit=bench.unit, better=bench.better,
                component=bench.component, values=values, failed=why,
            )
            for bench, values, why in entries
        ] + self._facts  # fmt: skip

    def write(self) -> None:
        """Write the file anew."""
        if self._writes:
            write_file_atomically(self._output, render_samples(self.samples()))


def _call_safely(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a call returns, or None and why it failed. Anything broken on this node is a result."""
    try:
        return call(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {render_error(error)}"


def describe_hardware(device: torch.device) -> str:
    """Return what nodes must share to be compared: processor, number of CPUs, and accelerators."""
    cpu = read_cpu(find_machine_root(os.environ))
    name = f"{cpu.threads or '?'} CPUs {cpu.model}"
    if device.type == "cuda":
        name += f", {torch.cuda.device_count()} {torch.cuda.get_device_name(device)}"
    return name
