"""Measures copies between host and device memory: one GPU per rank, all ranks at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mlhpc.suite.performance.ceilings.document import Findings, NotMeasured
from mlhpc.suite.performance.ceilings.samples import Effort, count_calls_for, gather_maxima, measure_on_all_ranks
from mlhpc.suite.performance.ceilings.time_limit import TimeLimit
from mlhpc.suite.world import World

COPY_BYTES = 256 << 20  # bytes of a copy, large enough that its launch does not count


def measure(world: World, effort: Effort, device: torch.device, budget: TimeLimit) -> Findings:
    """Measure both directions with pinned and with pageable host memory."""
    if device.type == "cpu":
        return Findings(not_measured=[NotMeasured("host_link", "the device is the host: nothing is copied")])
    findings = Findings()
    on_device = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    for mode, on_host in (
        ("pinned", torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)),
        ("pageable", torch.ones(COPY_BYTES, dtype=torch.uint8)),
    ):
        for name, target, source in (
            ("host_to_device", on_device, on_host),
            ("device_to_host", on_host, on_device),
        ):

            def run(calls: int, target: torch.Tensor = target, source: torch.Tensor = source) -> float:
                torch.cuda.synchronize(device)
                begin = time.perf_counter()
                for _ in range(calls):
                    # From pageable memory the driver copies through a pinned buffer of its own, so both modes differ.
                    target.copy_(source, non_blocking=True)
                torch.cuda.synchronize(device)
                return time.perf_counter() - begin

            if not budget.left():
                findings.not_measured.append(NotMeasured("host_link", f"{mode}: the time was over", name))
                continue
            # The first copy maps the pages.
            run(1)
            calls = int(gather_maxima(world, [count_calls_for(10 * effort.sample_s, run(1))])[0])

            def rate(calls: int = calls, run: Callable[[int], float] = run) -> float:
                return COPY_BYTES * calls / run(calls)

            samples = measure_on_all_ranks(world, rate, effort.repetitions, budget=budget)
            findings.roofs.append(
                samples.roof(
                    "host_link",
                    name,
                    mode,
                    "B/s",
                    ranks=world.size,
                    nodes=world.nodes,
                    library="torch",
                    size_bytes=COPY_BYTES,
                )
            )
    return findings
