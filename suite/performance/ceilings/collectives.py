"""Measures all-reduce and all-to-all of 2, 4, … N ranks over message sizes, by torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from mlhpc.suite.performance.ceilings.samples import (
    Effort,
    Samples,
    TimeLimit,
    count_calls_for,
    gather_maxima,
    measure_on_all_ranks,
)
from mlhpc.suite.performance.ceilings.sizes import may_allocate
from mlhpc.suite.performance.ceilings_file import Curve, Findings, NotMeasured, Point, Resource
from mlhpc.suite.world import World

# Bytes. At this size the time of a collective is its latency.
SMALLEST_MESSAGE = 4 << 10
# Between two message sizes: seven or eight sizes cover latency to bandwidth.
SIZE_FACTOR = 4
# A rank holds what it sends, what it receives, and the library's own buffers.
MESSAGE_COPIES = 4


def measure(world: World, effort: Effort, device: torch.device, free: int, budget: TimeLimit) -> Findings:
    """Measure each collective for each number of ranks: a curve over message sizes and the best bus bandwidth.

    The largest number of ranks comes first; if time is short, smaller ones are left out.
    """
    if world.size == 1:
        reason = "one rank: start with --ranks 2, or under srun or mpiexec"
        return Findings(not_measured=[NotMeasured("all_reduce", reason), NotMeasured("all_to_all", reason)])
    world.init_torch(device)
    findings = Findings()
    sizes = list_group_sizes(world.size)
    for number, ranks in enumerate(reversed(sizes)):
        part = budget.until(budget.length * (number + 1) / len(sizes))
        # new_group is a collective of all ranks, also of those that are not in the group.
        group = dist.group.WORLD if ranks == world.size else dist.new_group(range(ranks))
        nodes = len(set(world.allgather(world.node)[:ranks]))
        for resource, prepare in COLLECTIVES:
            findings.add(_measure_collective(world, effort, device, resource, prepare, group, ranks, nodes, free, part))
        budget.tell(f"collectives: {number + 1} of {len(sizes)} numbers of ranks")
    return findings


def find_collective_library() -> str:
    """Return the library that carries collectives between processors here."""
    return dist.get_backend()


def list_group_sizes(ranks: int) -> list[int]:
    """List the numbers of ranks to measure: powers of two below ``ranks``, and ``ranks``."""
    return [2**i for i in range(1, ranks.bit_length()) if 2**i < ranks] + [ranks]


def compute_bus_share(resource: str, ranks: int) -> float:
    """Return the bytes that a rank must send per byte of message.

    2 (n-1)/n for an all-reduce, (n-1)/n for an all-to-all.
    """
    return (2 if resource == "all_reduce" else 1) * (ranks - 1) / ranks


Prepare = Callable[[torch.Tensor, object], Callable[[], object]]  # from message and group to the call to time


def _measure_collective(
    world: World,
    effort: Effort,
    device: torch.device,
    resource: Resource,
    prepare: Prepare,
    group: object,
    ranks: int,
    nodes: int,
    free: int,
    budget: TimeLimit,
) -> Findings:
    member = world.rank < ranks
    sampled: dict[int, Samples] = {}
    size, took, reason = SMALLEST_MESSAGE, 0.0, ""
    while size <= effort.largest_message_bytes and not reason:
        begin = budget.clock()
        elements = max(ranks, size // 4 // ranks * ranks)  # an all-to-all needs as many elements for each rank
        call = prepare(torch.zeros(elements, device=device), group) if member else (lambda: None)
        world.barrier()
        if member:
            _measure_seconds(call, 1, device)  # connects the ranks
        # All ranks must make the same number of calls, or the collectives would not meet.
        calls = int(
            gather_maxima(
                world, [count_calls_for(effort.sample_s * 2, _measure_seconds(call, 1, device)) if member else 1]
            )[0]
        )
        sent = compute_bus_share(resource, ranks) * elements * 4

        def rate(call: Callable[[], object] = call, calls: int = calls, sent: float = sent) -> float:
            return sent * calls / _measure_seconds(call, calls, device)

        sampled[elements * 4] = measure_on_all_ranks(world, rate, effort.repetitions, member=member, budget=budget)
        # The decision below must be the same on all ranks, so it uses the slowest one's time.
        took = gather_maxima(world, [budget.clock() - begin])[0]
        size *= SIZE_FACTOR
        # Measuring must never push the node into swapping.
        if not may_allocate(MESSAGE_COPIES * size, world.local_size, free):
            reason = f"messages from {size} bytes: they take more than a quarter of the free memory, {free >> 20} MiB"
        elif not budget.allows(SIZE_FACTOR * took):
            reason = f"messages from {size} bytes between {ranks} ranks: the time was over"
    backend = "nccl" if device.type == "cuda" else find_collective_library()
    findings = _build_findings(resource, backend, ranks, nodes, sampled)
    if reason and size <= effort.largest_message_bytes:
        findings.not_measured.append(NotMeasured(resource, reason))
    return findings


def _build_findings(resource: Resource, backend: str, ranks: int, nodes: int, sampled: dict[int, Samples]) -> Findings:
    """Return the curve over message sizes, and as the ceiling its best bus bandwidth."""
    best = max(sampled, key=lambda message: sampled[message].value)
    points = tuple(
        Point(message, s.value, s.n, s.spread, seconds=compute_bus_share(resource, ranks) * message / s.value)
        for message, s in sampled.items()
    )
    roof = sampled[best].roof(
        resource,
        backend,
        "bus",
        "B/s",
        ranks=ranks,
        nodes=nodes,
        library=backend,
        dtype="float32",
        size_bytes=best,
    )
    return Findings(
        roofs=[roof],
        curves=[
            Curve(
                resource=resource,
                name=backend,
                mode="bus",
                x="message_bytes",
                unit="B/s",
                ranks=ranks,
                nodes=nodes,
                points=points,
                dtype="float32",
            )
        ],
    )


def _all_reduce(message: torch.Tensor, group: object) -> Callable[[], object]:
    return lambda: dist.all_reduce(message, group=group)


def _all_to_all(message: torch.Tensor, group: object) -> Callable[[], object]:
    received = torch.empty_like(message)
    return lambda: dist.all_to_all_single(received, message, group=group)


COLLECTIVES: tuple[tuple[Resource, Prepare], ...] = (("all_reduce", _all_reduce), ("all_to_all", _all_to_all))


def _measure_seconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
