"""Measures all ceilings, one resource after the other, and makes the ceilings file."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlhpc.suite import VERSION
from mlhpc.suite.files import render_duration
from mlhpc.suite.machine.probes.allowance import UsableResources, find_usable_resources
from mlhpc.suite.machine.probes.processor import CpuCache, find_machine_root, is_simulated, list_data_caches, read_cpu
from mlhpc.suite.performance.ceilings import collectives, compute, memory, storage
from mlhpc.suite.performance.ceilings.samples import FULL, QUICK, Effort, TimeLimit
from mlhpc.suite.performance.ceilings.sizes import SweepPlan, find_free_bytes, plan_sweep
from mlhpc.suite.performance.ceilings_file import Findings, NotMeasured, render_json
from mlhpc.suite.world import World

# Share of a limited time that is over when each resource ends. What one resource leaves, the next may use.
TIME_SHARE_ENDS = {"compute": 0.5, "memory": 0.75, "host link": 0.8, "storage": 0.9, "collectives": 1.0}


def measure(
    world: World, *, system: str, quick: bool, device: torch.device, directory: Path, say: Callable[[str], None]
) -> str:
    """Measure all resources and return the text of the file, the same on every rank. All ranks call it.

    Storage is measured in ``directory``. ``say`` is called with a line before and after each resource, and with its
    progress.
    """
    began = datetime.now(UTC)
    effort = QUICK if quick else FULL
    world.barrier()
    budget = TimeLimit(world, effort.seconds, say)
    # Before anything is measured: later this process itself would count.
    busy = _measure_busy_cores()
    root, allowance = find_machine_root(os.environ), find_usable_resources()
    caches = list_data_caches(root, allowance.cpus)
    free = find_free_bytes(world.allgather(allowance.memory_free))
    findings = Findings()
    steps: dict[str, Callable[[TimeLimit], Findings]] = {
        "compute": lambda part: compute.measure(world, effort, device, _compute_free_share(device, free), part),
        "memory": lambda part: _measure_memory(world, effort, device, caches, allowance.cpus, free, part),
        "host link": lambda part: storage.measure_host_link(world, effort, device, part),
        "storage": lambda part: storage.measure_storage(world, effort, directory, free, part),
        "collectives": lambda part: collectives.measure(world, effort, device, free, part),
    }
    for title, step in steps.items():
        since = budget.clock()
        part = budget.until(TIME_SHARE_ENDS[title] * budget.length)
        say(f"{title} ..." + (f" at most {render_duration(part.length)}" if part.ends else ""))
        findings.add(step(part))
        say(f"{title}: {render_duration(budget.clock() - since)}")
    header = {
        "system": system,
        "simulated": is_simulated(root),
        "date": f"{began:%Y-%m-%dT%H:%M:%SZ}",
        "duration_s": round(budget.clock() - budget.begin, 1),
        "quick": quick,
        "launcher": world.launcher,
        "ranks": world.size,
        "nodes": world.nodes,
        "node_names": list(world.node_names),
        "device": _describe_device(device, busy, root, allowance),
        "caches": [
            {"level": cache.level, "size_bytes": cache.size_bytes, "shared_by_cores": len(cache.sharers)}
            for cache in caches
        ],
        "versions": _list_versions(device),
    }
    # Findings are the same on all ranks, but dates and names in the header are not.
    return str(world.broadcast(render_json(header, findings)))


def _measure_memory(
    world: World,
    effort: Effort,
    device: torch.device,
    caches: Sequence[CpuCache],
    cpus: frozenset[int],
    free: int,
    budget: TimeLimit,
) -> Findings:
    """Measure the device's memory. On CPUs the plan of rank 0 counts: it knows what its node's ranks may use."""
    if device.type == "cuda":
        return memory.measure_gpu(world, effort, device, budget)
    on_node = [mine for node, mine in world.allgather((world.node, cpus)) if node == world.node]
    ranks = max(world.allgather(world.local_size))
    threads = torch.get_num_threads()
    plan = world.broadcast(
        plan_sweep(caches, frozenset().union(*on_node), threads, ranks, free, effort.points_per_octave),
        SweepPlan | str,
    )
    if isinstance(plan, str):
        return Findings(not_measured=[NotMeasured("memory", plan)])
    return memory.measure_cpu(world, effort, plan, budget)


def _compute_free_share(device: torch.device, free: int) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free


def _measure_busy_cores(seconds: float = 0.5) -> float | None:
    """Measure how many cores other processes use while this one sleeps. None if Linux does not show it."""

    # Not the load average: it still contains processes that ended a minute ago.
    def used() -> float:
        user, nice, system, _, _, irq, softirq, steal = map(float, Path("/proc/stat").read_text().split()[1:9])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

    try:
        before, begin = used(), time.perf_counter()
        time.sleep(seconds)
        return round((used() - before) / (time.perf_counter() - begin), 2)
    except (OSError, ValueError):
        return None


def _describe_device(
    device: torch.device, busy: float | None, root: Path, allowance: UsableResources
) -> dict[str, Any]:
    host = {
        "threads": torch.get_num_threads(),
        "cores_allowed": allowance.cores,
        "busy_cores_at_start": busy,
    }
    if device.type == "cpu":
        model = read_cpu(root).model
        name = f"simulated machine: {model}" if is_simulated(root) else model
        return {"type": "cpu", "name": name, "count": 1, "memory_bytes": None, **host}
    properties = torch.cuda.get_device_properties(device)
    return {"type": "cuda", "name": properties.name, "count": 1, "memory_bytes": properties.total_memory, **host}


def _list_versions(device: torch.device) -> dict[str, str | None]:
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
