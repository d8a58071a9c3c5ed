"""Reads how long CPUs were busy, and how much of it was this process and its descendants. Computes what others took.

All times are CPU seconds since a moment that the kernel chose. Only differences of two readings mean something.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlhpc.suite.machine.probes.allowance import list_control_groups
from mlhpc.suite.machine.probes.processor import parse_integer, read_text

TICKS = os.sysconf("SC_CLK_TCK")  # of /proc/stat and /proc/<pid>/stat in a second: 100 on all Linux of today
UTIME, CSTIME = 11, 14  # fields of /proc/<pid>/stat after the name: user, system, and both of children waited for
PARENT = 1  # field of /proc/<pid>/stat after the name
PROC_STAT, CONTROL_GROUP = "proc_stat", "control_group"
COUNTER_TOLERANCE = (
    0.02  # a kernel that samples by ticks counts busy time this much too short; more is another view of the node
)


@dataclass(frozen=True)
class NodeTimes:
    """One reading of a node. ``by_cpu``: (busy, stolen) seconds per CPU of /proc/stat; empty if unreadable.

    Busy is user, nice and system time. Interrupts are left out, because the run's own traffic causes some. Stolen time
    went to other guests of the hypervisor. ``group_s`` is the use of the widest visible control group. ``pressure_s``
    is the time in which some process of the node waited for a CPU. None if the node does not show it. ``at_s`` is the
    monotonic clock.
    """

    at_s: float
    by_cpu: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    group_s: float | None = None
    pressure_s: float | None = None


@dataclass(frozen=True)
class NodeUse:
    """Who used the CPUs of a node that a job may use, between two readings of it.

    ``own_s`` and ``other_s`` are seconds of CPU, ``pressure_s`` of wall clock. ``source``: where the total is from.
    ``absent``: the reason if nothing is known; the times are then 0.
    """

    cpus: int
    own_s: float
    other_s: float = 0.0
    stolen_s: float = 0.0
    pressure_s: float | None = None
    source: str | None = None
    absent: str | None = None


def read_node_times(root: Path) -> NodeTimes:
    """Read the counters of the node whose file system is below ``root``."""
    rows = re.findall(r"^cpu(\d+) (.+)$", read_text(root / "proc/stat"), re.M)
    by_cpu = {int(cpu): times for cpu, text in rows if (times := _parse_cpu_times(text))}
    total = re.search(r"^some .*total=(\d+)", read_text(root / "proc/pressure/cpu"))
    pressure_s = int(total.group(1)) / 1e6 if total else None
    return NodeTimes(time.monotonic(), by_cpu, _read_group_s(root), pressure_s)


def read_own_s(root: Path) -> float:
    """Return CPU seconds of this process, its ended children, and its living descendants."""
    proc = root / "proc"
    return sum(map(_sum_ticks, map(_read_stat_fields, (proc / "self", *_list_descendants(proc))))) / TICKS


def compute_use(begin: NodeTimes, end: NodeTimes, cpus: Collection[int], own_s: float, cores: int) -> NodeUse:
    """Compute who used ``cpus`` from ``begin`` to ``end``. ``own_s``: the use of all ranks there.

    In some containers /proc/stat does not list these CPUs, or counts less than the ranks used. Then the control group's
    count is taken. It covers only processes in the same container, on ``cores`` CPUs.
    """
    pressure_s = _compute_increase(begin.pressure_s, end.pressure_s)
    own_s = max(0.0, own_s)
    least = (
        own_s * (1 - COUNTER_TOLERANCE) - 1.0
    )  # a second, because short runs of many ranks are counted in whole ticks
    if cpus and all(cpu in begin.by_cpu and cpu in end.by_cpu for cpu in cpus):
        busy_s, stolen_s = (sum(max(0.0, end.by_cpu[c][i] - begin.by_cpu[c][i]) for c in cpus) for i in (0, 1))
        if busy_s >= least:  # else /proc/stat is another view of the node, as in some containers
            return NodeUse(len(cpus), own_s, max(0.0, busy_s - own_s), stolen_s, pressure_s, PROC_STAT)
    group_s = _compute_increase(begin.group_s, end.group_s)
    if group_s is not None and group_s >= least:
        return NodeUse(cores, own_s, max(0.0, group_s - own_s), 0.0, pressure_s, CONTROL_GROUP)
    return NodeUse(
        len(cpus) or cores,
        own_s,
        pressure_s=pressure_s,
        absent="neither /proc/stat nor a control group counts the CPU time of these CPUs",
    )


def _parse_cpu_times(text: str) -> tuple[float, float] | None:
    """Parse user, nice and system time, and stolen time, of a line of /proc/stat. Old kernels count fewer kinds."""
    ticks = [parse_integer(word) for word in text.split()]
    if len(ticks) < 4 or None in ticks:
        return None
    known = [tick or 0 for tick in ticks]
    return sum(known[:3]) / TICKS, (known[7] if len(known) > 7 else 0) / TICKS


def _read_group_s(root: Path) -> float | None:
    """Return the use of the highest control group with a counter of its own. In a container it is the container's."""
    found = None
    for group in list_control_groups(root, "cpuacct"):
        used = re.search(r"^usage_usec (\d+)$", read_text(group / "cpu.stat"), re.M)
        nanoseconds = parse_integer(read_text(group / "cpuacct.usage"))
        if used is not None:
            found = int(used.group(1)) / 1e6
        elif nanoseconds is not None:
            found = nanoseconds / 1e9
    return found


def _list_descendants(proc: Path) -> Iterator[Path]:
    """Yield the folders of all living descendants of this process."""
    # A breadth-first walk over the tree of processes.
    waiting = [proc / "self"]
    if not (proc / "thread-self/children").exists():
        yield from _search_descendants(proc)
        return
    while waiting:
        for task in _list_entries(waiting.pop() / "task"):
            children = [proc / pid for pid in read_text(task / "children").split()]
            yield from children
            waiting += children


def _search_descendants(proc: Path) -> Iterator[Path]:
    """Find descendants by the parents of all processes, if the kernel lists no children (CONFIG_PROC_CHILDREN)."""
    me = read_text(proc / "self/stat").partition(" ")[0]
    parents = {
        path: _read_stat_fields(path)[PARENT : PARENT + 1] for path in _list_entries(proc) if path.name.isdecimal()
    }
    family, before = {me}, 0
    # Each pass finds one more generation.
    while len(family) > before:
        before = len(family)
        family |= {path.name for path, parent in parents.items() if parent and parent[0] in family}
    yield from (proc / pid for pid in sorted(family - {me}))


def _list_entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # ended meanwhile
        return []


def _read_stat_fields(process: Path) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the name, which may hold spaces. Empty if the process has ended."""
    return read_text(process / "stat").rpartition(")")[2].split()


def _sum_ticks(fields: list[str]) -> int:
    return sum(parse_integer(text) or 0 for text in fields[UTIME : CSTIME + 1])


def _compute_increase(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)
