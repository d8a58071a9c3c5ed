"""Measures all roofs, one resource after the other, and makes the ceilings file of them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from suite import VERSION
from suite.machine.probes.processor import list_data_caches, read_cpuinfo
from suite.performance.ceilings import collectives, compute, host_link, memory, storage
from suite.performance.ceilings.document import Findings, to_json
from suite.performance.ceilings.samples import FULL, QUICK
from suite.world import World

ROOT = Path("/")


def measure(
    world: World, *, system: str, quick: bool, device: torch.device, directory: Path, say: Callable[[str], None]
) -> str:
    """Measure all resources and return the text of the file, the same on every rank. All ranks call it.

    Storage is measured in ``directory``; ``say`` is called with one line per resource.
    """
    begin, began = time.perf_counter(), datetime.now(UTC)
    effort = QUICK if quick else FULL
    world.barrier()
    busy = _busy_cores()
    caches = list_data_caches(ROOT)
    findings = Findings()
    steps: tuple[tuple[str, Callable[[], Findings]], ...] = (
        ("compute", lambda: compute.measure(world, effort, device)),
        (
            "memory",
            lambda: (
                memory.measure_gpu(world, effort, device)
                if device.type == "cuda"
                else memory.measure_cpu(world, effort, caches)
            ),
        ),
        ("host link", lambda: host_link.measure(world, effort, device)),
        ("storage", lambda: storage.measure(world, effort, directory)),
        ("collectives", lambda: collectives.measure(world, effort, device)),
    )
    for title, step in steps:
        since = time.perf_counter()
        findings.add(step())
        say(f"{title}: {time.perf_counter() - since:.1f} s")
    header = {
        "system": system,
        "date": f"{began:%Y-%m-%dT%H:%M:%SZ}",
        "duration_s": round(time.perf_counter() - begin, 1),
        "quick": quick,
        "launcher": world.launcher,
        "ranks": world.size,
        "nodes": world.nodes,
        "node_names": list(world.node_names),
        "device": _device(device, busy),
        "caches": [
            {"level": cache.level, "size_bytes": cache.size_bytes, "shared_by_cores": cache.cpus} for cache in caches
        ],
        "versions": _versions(device),
    }
    return str(world.broadcast(to_json(header, findings)))


def _busy_cores(seconds: float = 0.5) -> float | None:
    """Measure how many cores other processes use while this one sleeps. None if Linux does not say.

    The load average is not used: it still contains processes that ended a minute ago.
    """

    def used() -> float:
        user, nice, system, _, _, irq, softirq, steal = map(float, Path("/proc/stat").read_text().split()[1:9])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

    try:
        before, begin = used(), time.perf_counter()
        time.sleep(seconds)
        return round((used() - before) / (time.perf_counter() - begin), 2)
    except (OSError, ValueError):
        return None


def _device(device: torch.device, busy: float | None) -> dict[str, Any]:
    host = {
        "threads": torch.get_num_threads(),
        "cores_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "busy_cores_at_start": busy,
    }
    if device.type == "cpu":
        return {"type": "cpu", "name": _cpu_name(ROOT), "count": 1, "memory_bytes": None, **host}
    properties = torch.cuda.get_device_properties(device)
    return {"type": "cuda", "name": properties.name, "count": 1, "memory_bytes": properties.total_memory, **host}


def _cpu_name(root: Path) -> str:
    names = [entry["model name"] for entry in read_cpuinfo(root) if "model name" in entry]
    return names[0] if names else platform.processor() or platform.machine()


def _versions(device: torch.device) -> dict[str, str | None]:
    cuda = device.type == "cuda"
    return {
        "mlhpc": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "hip": torch.version.hip if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
        "kernel": platform.release(),
    }
