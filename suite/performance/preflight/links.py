"""Measures links between nodes so that one bad node cannot spoil the others' verdict; and clock offsets.

Pairs: every node exchanges a message with one other at a time, in turn (a tournament). Of two passes per partner the
better counts; a node's value is the median over its partners. Leave-one-out: all nodes but one make an all-reduce. If
the others are faster without a node, that is the slow one. Two nodes have one link, and nothing here can show which of
its ends is slow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from mlhpc.suite.files import write_file_atomically
from mlhpc.suite.machine.facts import Sample, render_samples
from mlhpc.suite.performance.ceilings.collectives import compute_bus_share
from mlhpc.suite.performance.ceilings.samples import TimeLimit
from mlhpc.suite.world import World

PAIR_BYTES = 2 << 20  # bandwidth, not latency, decides at this size
ALL_BYTES = 1 << 20
# With more nodes, leave-one-out is skipped: each further node costs every node one more all-reduce.
MOST_GROUPS = 16
CLOCK_BOUND_S = 1.0  # apart: logs and file times of such nodes cannot be put in order
PINGS = 20  # exchanges of which the fastest tells the clock's offset best
MIN_ROUNDS = 1  # rounds that count, however short the time


def measure(
    world: World,
    *,
    hardware: str,
    device: torch.device,
    seconds: float,
    rounds: int | None = None,
    output: Path,
    at: Callable[[str], None],
) -> None:
    """Measure for ``seconds``, and write one file with samples of every node. All ranks call it, one per node.

    ``hardware`` is the same for all nodes of a kind. After ``rounds`` rounds it ends earlier.
    """
    budget = TimeLimit(world, seconds)
    world.init_torch(device)
    at("clock offset")
    offset = _measure_clock_offset(world)
    # Values of a sample are positive: an offset of 0 is written as 1e-6.
    values: dict[str, list[float]] = {"clock_offset": [max(offset, 1e-6)]}
    pair = "link/pair" if world.size > 2 else "link/of_two"
    without = _make_groups_without_one(world.size) if 2 < world.size <= MOST_GROUPS else []
    longest, count = 0.0, 0
    while count <= (rounds or count) and (count <= MIN_ROUNDS or budget.allows(2.0 * longest)):
        begin = budget.clock()
        at(pair)
        # A median over partners: one bad partner does not make this node look bad.
        found = {pair: statistics.median_high(_measure_pairs(world, device))}
        if without:
            at("link/without")
            found["link/without"] = _measure_all_but_one(world, device, without)
        if count:  # the first round connects the nodes
            for metric, value in found.items():
                values.setdefault(metric, []).append(value)
        count += 1
        longest = max(longest, budget.clock() - begin)
        # After every round: what there is stays if the time is over.
        _write(
            world, [_build_sample(world, hardware, metric, tuple(those)) for metric, those in values.items()], output
        )


def _make_groups_without_one(nodes: int) -> list[object]:
    """Make a group without each of the nodes. All ranks make all groups, also groups that they are not in."""
    return [dist.new_group([node for node in range(nodes) if node != left]) for left in range(nodes)]


def _write(world: World, samples: list[Sample], output: Path) -> None:
    """Write the samples of all nodes on rank 0."""
    gathered = world.gather(samples, list[Sample])
    if gathered is not None:
        write_file_atomically(output, render_samples(sample for node in gathered for sample in node))


def list_round_robin_rounds(nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs in which everybody meets everybody once (the circle method)."""
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    for _ in range(len(seats) - 1):
        # The first seat stays, all others move on by one: after n - 1 rounds everybody met everybody.
        half = len(seats) // 2
        table = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(a, b) if a < b else (b, a) for a, b in table if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _measure_pairs(world: World, device: torch.device) -> list[float]:
    """Return the bytes/s that this node exchanges with each of the others, there and back."""
    message = torch.zeros(PAIR_BYTES, dtype=torch.uint8, device=device)
    found = []
    for pairs in list_round_robin_rounds(world.size):
        mine = next((pair for pair in pairs if world.rank in pair), None)
        world.barrier()
        if mine is not None:
            other = mine[0] if mine[1] == world.rank else mine[1]
            begin = time.perf_counter()
            for sends in (mine[0] == world.rank, mine[0] != world.rank):
                (dist.send if sends else dist.recv)(message, other)  # there, then back
            _wait(device)
            found.append(2.0 * PAIR_BYTES / (time.perf_counter() - begin))
    return found


def _measure_all_but_one(world: World, device: torch.device, groups: list[object]) -> float:
    """Return the bytes/s of the others' all-reduce without this node."""
    message = torch.zeros(ALL_BYTES // 4, device=device)
    took = []
    for left, group in enumerate(groups):
        world.barrier()
        begin = time.perf_counter()
        if left != world.rank:
            dist.all_reduce(message, group=group)
            _wait(device)
        took.append(time.perf_counter() - begin)
    # An all-reduce is as slow as its slowest rank, and the rank that is left out does not count.
    slowest: list[float] = [
        max(node[left] for n, node in enumerate(world.allgather(took)) if n != left) for left in range(world.size)
    ]
    return compute_bus_share("all_reduce", world.size - 1) * ALL_BYTES / slowest[world.rank]


def _measure_clock_offset(world: World) -> float:
    """Return the seconds between this node's clock and the first node's, by the shortest round trip."""
    best, offset = float("inf"), 0.0
    for other in range(1, world.size):
        world.barrier()
        for _ in range(PINGS):
            if world.rank == other:
                stamp = torch.zeros(1, dtype=torch.float64)
                begin = time.time()
                dist.send(stamp, 0)
                dist.recv(stamp, 0)
                end = time.time()
                if end - begin < best:
                    # The shortest round trip has the least room for an asymmetry of both ways.
                    best, offset = end - begin, float(stamp[0]) - (begin + end) / 2.0
            elif world.rank == 0:
                stamp = torch.zeros(1, dtype=torch.float64)
                dist.recv(stamp, other)
                stamp[0] = time.time()
                dist.send(stamp, other)
    return abs(offset)


METRICS: dict[str, tuple[str, str]] = {  # unit, component
    "clock_offset": ("s", "clock"),
    "link/pair": ("B/s", "links between nodes"),
    "link/of_two": ("B/s", "the link between two nodes"),
    "link/without": ("B/s", "links between nodes"),
}


def _build_sample(world: World, hardware: str, metric: str, values: tuple[float, ...]) -> Sample:
    unit, component = METRICS[metric]
    return Sample(
        node=world.node_names[world.node],
        hardware=hardware,
        metric=metric,
        unit=unit,
        better="more" if metric in ("link/pair", "link/of_two") else "less",
        component=component,
        values=values,
        bound=CLOCK_BOUND_S if metric == "clock_offset" else None,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
