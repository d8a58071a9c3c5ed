"""Reads what this process may use of the node: CPUs, memory, open files. Control groups (versions 1 and 2) count."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mlhpc.suite.machine.probes.processor import (
    REAL_ROOT,
    find_machine_root,
    is_simulated,
    parse_cpu_list,
    parse_integer,
    read_text,
)

CGROUPS = "sys/fs/cgroup"  # below the file-system root
UNLIMITED = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page


@dataclass(frozen=True)
class UsableResources:
    """The share of its node that a process may use. None if the node does not show it. Memory is in bytes.

    ``cpus``: the online CPUs of the affinity mask. ``cpu_quota``: CPU time per time that the control group allows.
    ``memory_limit``: the lowest limit of the control groups. ``memory_free``: what can be taken without swapping and
    without reaching a limit. ``open_files`` and ``open_files_most``: the soft and the hard limit. ``cpu_time_s``: CPU
    time of one process, after which the kernel ends it.
    """

    cpus: frozenset[int]
    cpu_quota: float | None = None
    memory_total: int | None = None
    memory_limit: int | None = None
    memory_free: int | None = None
    open_files: int | None = None
    open_files_most: int | None = None
    cpu_time_s: int | None = None

    @property
    def cores(self) -> int:
        """How many threads can run at once: CPUs, or the whole CPUs of the quota if they are fewer; at least one."""
        quota = len(self.cpus) if self.cpu_quota is None else int(self.cpu_quota)
        return max(1, min(len(self.cpus), quota))


def find_usable_resources(environ: Mapping[str, str] = os.environ) -> UsableResources:
    """Return what this process may use.

    On a simulated machine it is at most what the real one has, which does the work.
    """
    root = find_machine_root(environ)
    allowed = read_usable_resources(root)
    if not is_simulated(root):
        return allowed
    real = read_usable_resources(REAL_ROOT)
    return replace(
        allowed,
        cpu_quota=min(allowed.cores, real.cores),
        memory_free=_find_least(allowed.memory_free, real.memory_free),
        open_files=_find_least(allowed.open_files, real.open_files),
        open_files_most=_find_least(allowed.open_files_most, real.open_files_most),
        cpu_time_s=_find_least(allowed.cpu_time_s, real.cpu_time_s),
    )


def read_usable_resources(root: Path) -> UsableResources:
    """Read what the process may use of the machine below ``root``."""
    info = {
        key: int(kib) << 10 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", read_text(root / "proc/meminfo"), re.M)
    }
    without_estimate = sum(info.get(key, 0) for key in ("MemFree", "Buffers", "Cached")) or None  # before Linux 3.14
    limit, left = _read_group_memory(root)
    soft, most = _read_limit(root, "open files")
    return UsableResources(
        cpus=_read_cpus(root),
        cpu_quota=_read_quota(root),
        memory_total=info.get("MemTotal"),
        memory_limit=limit,
        memory_free=_find_least(info.get("MemAvailable", without_estimate), left),
        open_files=soft,
        open_files_most=most,
        cpu_time_s=_read_limit(root, "cpu time")[0],
    )


def count_memory_kills(root: Path = REAL_ROOT) -> int | None:
    """Return how many processes the kernel has ended here for want of memory, of any control group. None: not known."""
    found = re.search(r"^oom_kill (\d+)$", read_text(root / "proc/vmstat"), re.M)
    return int(found[1]) if found else None


def _read_cpus(root: Path) -> frozenset[int]:
    """Return the affinity mask without offline CPUs; else all online CPUs, else all in /proc/cpuinfo."""
    # Taskset, srun and mpiexec restrict a process by its mask
    mask = re.search(r"^Cpus_allowed_list:\s*(\S+)", read_text(root / "proc/self/status"), re.M)
    allowed = parse_cpu_list(mask.group(1)) if mask else frozenset()
    online = parse_cpu_list(read_text(root / "sys/devices/system/cpu/online"))
    if not allowed and not online:
        listed = re.findall(r"^processor\s*:\s*(\d+)$", read_text(root / "proc/cpuinfo"), re.M)
        return frozenset(map(int, listed)) or frozenset({0})
    return (allowed & online) or allowed or online


def _read_quota(root: Path) -> float | None:
    """Return the CPU seconds per second that the strictest control group allows."""
    quotas = []
    for group in list_control_groups(root, "cpu"):
        words = read_text(group / "cpu.max").split()
        # Version 1 of control groups has two files in place of one
        words = words or [read_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = map(parse_integer, words) if len(words) == 2 else (None, None)  # "max" and "-1": none
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _read_group_memory(root: Path) -> tuple[int | None, int | None]:
    """Return the lowest limit of the control groups and the bytes left below all limits. Page cache counts as free."""
    limits, remaining = [], []
    for group in list_control_groups(root, "memory"):
        hard = [read_text(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        known = [value for text in hard if (value := parse_integer(text)) is not None and value < UNLIMITED]
        if not known:
            continue
        limits.append(min(known))
        used = parse_integer(read_text(group / "memory.current") or read_text(group / "memory.usage_in_bytes")) or 0
        pages = dict(re.findall(r"^(\w+) (\d+)$", read_text(group / "memory.stat"), re.M))
        # The kernel gives up such pages before it denies memory.
        idle = int(pages.get("total_inactive_file") or pages.get("inactive_file") or 0)
        remaining.append(max(0, min(known) - max(0, used - idle)))
    return min(limits, default=None), min(remaining, default=None)


def list_control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups for a controller, from its own up to each hierarchy's root.

    In a container the path may be the host's and not exist. Then the hierarchy's root is the container's own group.
    """
    lines = [line.split(":", 2) for line in read_text(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    for _, controllers, path in lines or [["0", "", "/"], ["1", controller, "/"]]:
        if controllers and controller not in controllers.split(","):
            continue
        # Version 1 mounts each controller apart, version 2 all in one place, or beside version 1 in "unified".
        names = (controllers, controller) if controllers else ("unified", "")
        mount = next((each for name in names if (each := root / CGROUPS / name).is_dir()), None)
        if mount is None:
            continue
        parts = [part for part in path.split("/") if part not in {"", ".", ".."}]
        yield from (mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1))


def _read_limit(root: Path, name: str) -> tuple[int | None, int | None]:
    """Return the soft and the hard limit of something; None for "unlimited" or unknown."""
    match = re.search(rf"^Max {name}\s+(\S+)\s+(\S+)", read_text(root / "proc/self/limits"), re.M)
    return (parse_integer(match.group(1)), parse_integer(match.group(2))) if match else (None, None)


def _find_least(*amounts: int | None) -> int | None:
    return min((amount for amount in amounts if amount is not None), default=None)
