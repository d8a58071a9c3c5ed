"""Reads the energy counters of a node about once a second, into official power logs. A process of its own.

    python -P -m mlhpc.suite.machine.power.sampler FOLDER NODE --root / --gpu UUID ...

It runs until its standard input ends, which happens when the process that started it ends in any way. Each reading is
one write. A killed sampler leaves whole lines and no ``power_measurement_stop``. So does one that was suspended while
another process took over the trial's lock. A starved one leaves gaps. The checker finds all of them. It imports neither
torch nor numpy, takes no signal, and buffers no reading.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import make_folder
from mlhpc.suite.log.energy.power_log import READING, START, STOP
from mlhpc.suite.machine.power.counters import EnergyCounter, EnergyMeter, find_gpu_counter, find_node_counters

INTERVAL_S = 0.9  # on average: the rules ask for a reading a second; a timer is late now and then
JITTER = 0.5  # of the interval, either way: then no load is in step with the readings, whatever its period
MAX_DELAY_S = 2.0
ACCURACY = 0.05  # a share; no counter's is documented, so the most that the rules allow a meter


@dataclass
class Scope:
    """One power log: the sum of its counters. ``watts`` of a reading are the mean since the previous reading."""

    name: str
    counters: Sequence[EnergyCounter]
    file: int = -1
    total_j: float = 0.0
    lost: bool = False
    torn: bool = False

    def write(self, key: str, value: object, time_ms: int, metadata: Mapping[str, Any] | None = None) -> None:
        """Append one event. A full disk costs the event; the next reading begins on a line of its own."""
        event = {"namespace": "", "time_ms": time_ms, "event_type": _KINDS.get(key, "POINT_IN_TIME"), "key": key}
        line = f":::MLLOG {json.dumps(event | {'value': value, 'metadata': metadata or ''})}\n".encode()
        data = b"\n" + line if self.torn else line
        with suppress(OSError):
            self.torn = os.write(self.file, data) < len(data)


_KINDS = {START: "INTERVAL_START", STOP: "INTERVAL_END"}


def list_scopes(counters: Sequence[EnergyCounter]) -> list[Scope]:
    """List the scopes of a node's counters, widest first. Cray's parts of a node are left out."""
    whole = [item for item in counters if item.name == "pm_counters/node"]
    packages = [item for item in counters if item.name.startswith("rapl/")]
    devices = [item for item in counters if item.name.startswith("nvml/")]
    both = [*packages, *devices] if packages and devices else []
    found = (("node", whole), ("package+device", both), ("package", packages), ("device", devices))
    return [Scope(name, members) for name, members in found if members]


@dataclass
class Sampler:
    """Samples until it is stopped. ``clock`` gives Unix seconds; ``wait`` waits and returns whether to go on."""

    scopes: Sequence[Scope]
    meter: EnergyMeter
    clock: Callable[[], float] = time.time
    wait: Callable[[float], bool] = lambda seconds: not select.select([sys.stdin], [], [], seconds)[0]
    check: Callable[[], None] = lambda: None  # ends the process that lost its trial
    jitter: Callable[[], float] = lambda: random.uniform(1.0 - JITTER, 1.0 + JITTER)  # noqa: S311
    late: int = 0
    largest_s: float = 0.0
    _joules: dict[str, float] = field(default_factory=dict)

    def run(self, stated: Mapping[str, Any], interval_s: float = INTERVAL_S) -> None:
        """Write the start, a reading per interval of random length, and the stop of every scope."""
        before = round(self.clock() * 1e3)
        for scope in self.scopes:
            sources = sorted({item.name.partition("/")[0] for item in scope.counters})
            said = {"scope": scope.name, "source": "+".join(sources), "reads": "mean", "accuracy": ACCURACY}
            said["measurement_type"] = "DC"  # all three count behind the supply
            scope.write(START, None, before, {**said, **stated, "counter_j": 0.0})
        due, on = time.monotonic() + interval_s * self.jitter(), True
        while on:
            on = self.wait(max(due - time.monotonic(), 0.0))
            self.check()
            due = max(due + interval_s * self.jitter(), time.monotonic())
            before = self._sample(before)
        marks = {"late": self.late, "largest_gap_s": round(self.largest_s, 3)}
        for scope in self.scopes:
            reasons = {item.name: self.meter.lost[item.name] for item in scope.counters if item.name in self.meter.lost}
            if not reasons:  # a scope that lost a counter has no end
                scope.write(STOP, None, before, marks | {"counter_j": scope.total_j})

    def _sample(self, before: int) -> int:
        """Write a reading of every scope that has all its counters. Returns the time of the reading."""
        reading = self.meter.take()
        now = round(self.clock() * 1e3)
        if now <= before:  # the clock was set back, or nothing passed: what was counted belongs to the next reading
            for name, joules in reading.joules.items():
                self._joules[name] = self._joules.get(name, 0.0) + joules
            return before
        gap = (now - before) / 1e3
        self.late, self.largest_s = self.late + (gap > MAX_DELAY_S), max(self.largest_s, gap)
        for scope in self.scopes:
            scope.lost = scope.lost or any(item.name in reading.lost for item in scope.counters)
            if not scope.lost:
                joules = sum(reading.joules.get(c.name, 0.0) + self._joules.get(c.name, 0.0) for c in scope.counters)
                scope.total_j += joules
                scope.write(READING, round(joules / gap, 6), now)
        self._joules = {}
        return now


def build_file_name(node: int, scope: str, widest: bool) -> str:
    """Return the name of a scope's log. The widest scope has the node's name."""
    return f"node_{node}.txt" if widest else f"part_{node}_{scope}.txt"


def watch_owner(lock: Path) -> Callable[[], None]:
    """Return what ends this process if a lock has another owner than now. One that is gone was given back."""
    with suppress(OSError):
        owner = lock.read_bytes()

        def check() -> None:
            with suppress(OSError):
                if lock.read_bytes() != owner:
                    os._exit(ExitCode.TAKEN_OVER)

        return check
    return lambda: None


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample until standard input ends. Returns 0 also without counters; then no file is written."""
    parser = argparse.ArgumentParser(prog="mlhpc.suite.machine.power.sampler")
    parser.add_argument("folder", type=Path)
    parser.add_argument("node", type=int)
    parser.add_argument("--root", type=Path, default=Path("/"))
    parser.add_argument("--gpu", action="append", default=[])
    parser.add_argument("--offset", type=float, default=0.0)
    parser.add_argument("--bound", type=float, default=0.0)
    parser.add_argument("--lock", type=Path)
    given = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run decides when it ends
    of_node = find_node_counters(given.root)
    counters = [*of_node.counters]
    for index, uuid in enumerate(given.gpu):
        found = find_gpu_counter(uuid).counters
        counters += [EnergyCounter(f"nvml/gpu{index}", item.read, item.range_j) for item in found]
    scopes = list_scopes(counters)
    if not scopes:
        return 0
    make_folder(given.folder)
    for place, scope in enumerate(scopes):
        path = given.folder / build_file_name(given.node, scope.name, place == 0)
        scope.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
    stated = {"clock_offset_s": given.offset, "clock_bound_s": given.bound}
    # One of several zones: the sum of the others is less than the node uses, and the log says so.
    lacking = {name: reason for name, reason in of_node.absent.items() if name.startswith("rapl/")}
    stated |= {"absent": lacking} if lacking else {}
    sampler = Sampler(scopes, EnergyMeter(counters))
    if given.lock is not None:
        sampler.check = watch_owner(given.lock)
    sampler.run(stated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
