"""Measures the nodes of an allocation before a job so that a bad node cannot spoil the others' verdict: each alone,
then the links.

A benchmark of a node has a quantity, a unit and a component that it stresses; it uses kernels of `ceilings`. It is
prepared once on every rank of the node and then repeated. All ranks begin together, and the slowest counts. One
repetition takes about `REPETITION_S`, whatever the speed of the node. The benchmarks are repeated in turn until the
time is over, so that each sees all of it. After every round the node's file is written anew: a node that dies leaves
its measurements so far.

Links are measured in pairs: every node exchanges a message with one other at a time, in turn (a tournament). Of two
passes per partner the better counts; a node's value is the median over its partners. Leave-one-out: all nodes but one
make an all-reduce. If the others are faster without a node, that is the slow one. Two nodes have one link, and nothing
here can show which of its ends is slow.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from msgspec import structs

from mlhpc.plugins.fleet import checks
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.files import render_error, write_file_atomically
from mlhpc.suite.launcher import Launch
from mlhpc.suite.machine.facts import Better, Sample, Severity, render_samples
from mlhpc.suite.machine.probes.allowance import find_usable_resources
from mlhpc.suite.machine.probes.processor import CpuCache, find_machine_root, list_data_caches, read_cpu
from mlhpc.suite.performance.ceilings import collectives, compute, memory, storage
from mlhpc.suite.performance.ceilings.samples import TimeLimit, count_calls_for
from mlhpc.suite.performance.ceilings.sizes import SKEW, find_free_bytes
from mlhpc.suite.performance.ceilings_file import Resource
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World, find_node_name

REPETITION_S = 0.03  # short enough for many rounds, far above the resolution of the clock
CPU_ORDER, GPU_ORDER = 512, 4096  # of the products, the same on all nodes
MESSAGE_BYTES = 1 << 20
FILE_BYTES = 8 << 20
LINK_BYTES = 64 << 20
LARGEST_SET, SMALLEST_SET = 1 << 30, 64 << 20  # bytes of a node's working set that no cache holds
CACHE_FACTOR = 4  # times the largest cache
STEP_SAMPLES = 2  # per rank, of a workload's step
LEAST_ERROR = 1e-9  # of a check, over its bound: values of a sample are positive

Repeat = Callable[[], float]


@dataclass(frozen=True)
class BenchContext:
    """Where benchmarks run: the ranks of one node, their device, staging folder, caches and free bytes."""

    world: World
    device: torch.device
    directory: Path
    caches: tuple[CpuCache, ...]
    free: int


@dataclass(frozen=True)
class Bench:
    """One benchmark. ``prepare`` returns the function for a repetition, which returns a value in ``unit``; or None.

    ``checks``: it is a check of what is computed, whose value is the error over its bound. "wrong" if more than 1 is
    wrong, "watch" if that may be honest.
    """

    metric: str
    component: str
    unit: str
    better: Better
    prepare: Callable[[BenchContext], Repeat | None]
    checks: Literal["", "wrong", "watch"] = ""


def _make_timer(call: Callable[[], object], device: torch.device, *, floor: int = 1) -> tuple[int, Callable[[], float]]:
    """Return how many calls fill a repetition, and a function that returns their seconds."""
    compute.measure_seconds(call, 1, device)
    # The fastest of three, so that a disturbed try does not make all repetitions too short.
    once = min(compute.measure_seconds(call, floor, device) / floor for _ in range(3))
    calls = max(floor, count_calls_for(REPETITION_S, once))
    return calls, lambda: compute.measure_seconds(call, calls, device)


def _prepare_gemm(dtype: str, place: BenchContext) -> Repeat:
    order = GPU_ORDER if place.device.type == "cuda" else CPU_ORDER
    calls, seconds = _make_timer(compute.list_products(place.device, dtype, order)[0].multiply, place.device)
    return lambda: compute.count_gemm_flops(order) * calls / seconds()


def _prepare_dispatch(place: BenchContext) -> Repeat:
    product = compute.list_products(place.device, "float32", compute.LAUNCH_ORDER)[0]
    calls, seconds = _make_timer(product.multiply, place.device, floor=100)
    return lambda: calls / seconds()


def _prepare_memory(place: BenchContext, *, cached: bool) -> Repeat | None:
    """Run triads on all threads. Their set lies in a core's private cache, or no cache holds it."""
    if place.device.type == "cuda":
        return None if cached else _prepare_gpu_memory(place)
    threads = torch.get_num_threads()
    largest = max((cache.size_bytes for cache in place.caches), default=0)
    private = max((cache.size_bytes for cache in place.caches if cache.level == 2), default=256 << 10)
    whole = min(max(SMALLEST_SET, CACHE_FACTOR * largest), LARGEST_SET, place.free // 4)
    size = private // 2 if cached else whole // (threads * place.world.local_size)
    kernel = memory.CPU_KERNELS[1]  # update: two loads and a store
    team = memory.ThreadTeam(threads, size + SKEW)
    team.touch(size + SKEW)

    def prepared(passes: int) -> tuple[list[Callable[[], object]], float]:
        ready = [kernel.prepare(buffer, size, passes) for buffer in team.buffers]
        return [call for call, _ in ready], sum(moved for _, moved in ready)

    calls, _ = prepared(memory.FEWEST_PASSES)
    team.seconds(calls)
    once = min(team.seconds(calls) for _ in range(3)) / memory.FEWEST_PASSES
    calls, moved = prepared(max(memory.FEWEST_PASSES, count_calls_for(REPETITION_S, once)))
    return lambda: moved / team.seconds(calls)


def _prepare_gpu_memory(place: BenchContext) -> Repeat:
    a, b, c = (torch.ones(LARGEST_SET // 12, device=place.device) for _ in range(3))
    calls, seconds = _make_timer(lambda: torch.add(b, c, alpha=0.5, out=a), place.device)
    return lambda: LARGEST_SET * calls / seconds()


def _prepare_host_link(place: BenchContext) -> Repeat | None:
    if place.device.type != "cuda":
        return None
    on_host = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.ones(LINK_BYTES, dtype=torch.uint8, device=place.device)

    def there_and_back() -> None:
        on_device.copy_(on_host, non_blocking=True)
        on_host.copy_(on_device, non_blocking=True)

    calls, seconds = _make_timer(there_and_back, place.device)
    return lambda: 2.0 * LINK_BYTES * calls / seconds()


def _prepare_collective(resource: Resource, place: BenchContext) -> Repeat | None:
    world = place.world
    if world.size == 1:
        return None
    message = torch.zeros(MESSAGE_BYTES // 4 // world.size * world.size, device=place.device)
    call = dict(collectives.COLLECTIVES)[resource](message, dist.group.WORLD)
    calls, seconds = _make_common_timer(world, call, place.device)
    sent = collectives.compute_bus_share(resource, world.size) * message.numel() * 4
    return lambda: sent * calls / seconds()


def _prepare_overlap(place: BenchContext) -> Repeat | None:
    """Return the seconds of a product and an all-reduce that run at the same time."""
    world = place.world
    if world.size == 1:
        return None
    message = torch.zeros(MESSAGE_BYTES // 4, device=place.device)
    order = GPU_ORDER if place.device.type == "cuda" else CPU_ORDER
    product = compute.list_products(place.device, "float32", order)[0]

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        product.multiply()
        assert work is not None
        work.wait()

    calls, seconds = _make_common_timer(world, both, place.device)
    return lambda: seconds() / calls


def _make_common_timer(
    world: World, call: Callable[[], object], device: torch.device
) -> tuple[int, Callable[[], float]]:
    """Return the same as `_make_timer`, for a call that all ranks make. They agree on the number of calls."""
    compute.measure_seconds(call, 1, device)
    once = max(world.allgather(compute.measure_seconds(call, 3, device) / 3))
    calls = count_calls_for(REPETITION_S, once)
    return calls, lambda: compute.measure_seconds(call, calls, device)


def _prepare_write(place: BenchContext) -> Repeat:
    path, block = _make_file_path(place), np.random.default_rng(place.world.rank).bytes(storage.BLOCK)

    def repetition() -> float:
        try:
            return FILE_BYTES / storage.measure_write(path, block, FILE_BYTES)
        finally:
            path.unlink(missing_ok=True)

    return repetition


def _prepare_read(place: BenchContext) -> Repeat:
    """Read a file that is not in the page cache, if the file system can drop it."""
    path, block = _make_file_path(place), np.random.default_rng(place.world.rank).bytes(storage.BLOCK)

    def repetition() -> float:
        try:
            storage.measure_write(path, block, FILE_BYTES)
            storage.drop_from_page_cache(path)
            return FILE_BYTES / storage.measure_read(path)
        finally:
            path.unlink(missing_ok=True)

    return repetition


def _make_file_path(place: BenchContext) -> Path:
    return place.directory / f".mlhpc-preflight-{os.getpid()}-{place.world.rank}"


def _prepare_step(name: str, root: Path, place: BenchContext) -> Repeat:
    """Return the seconds of forward, backward and update of the ``smoke`` model. Each rank works alone."""
    workload = load_workload(load_descriptor(name))(load_config(load_descriptor(name), "smoke", ()))
    torch.manual_seed(0)
    # A step of one rank: a slow link must not make another node's compute look slow.
    alone = World.create(Launch("none", 0, 1))
    model = workload.build_model(alone).to(place.device)
    data = workload.dataset("train", root)
    optimizer = workload.build_optimizer(model, 100).optimizer
    loaded = data.load(range(STEP_SAMPLES), seed=0, epoch=1)
    batch = {name: tensor.to(place.device) for name, tensor in loaded.items()}

    for group in optimizer.param_groups:
        group["lr"] = 0.0  # every step the same work on the same numbers

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    calls, seconds = _make_timer(step, place.device)
    return lambda: seconds() / calls


def _prepare_product(make: Callable[[int, torch.device, int], Repeat], place: BenchContext) -> Repeat:
    return make(GPU_ORDER if place.device.type == "cuda" else CPU_ORDER, place.device, place.world.rank)


def _prepare_sum(place: BenchContext) -> Repeat | None:
    world = place.world
    return checks.make_sum_check(world.rank, world.size, place.device, dist.all_reduce) if world.size > 1 else None


def _make_check(name: str, component: str, prepare: Callable[[BenchContext], Repeat | None]) -> Bench:
    return Bench(f"check/{name}", component, "of the bound", "less", prepare, checks="wrong")


# All but the steps of workloads, in the order in which they are repeated. Checks follow what loads the node.
BENCHES: tuple[Bench, ...] = (
    Bench("gemm/float32", "compute", "FLOP/s", "more", partial(_prepare_gemm, "float32")),
    Bench("gemm/bfloat16", "compute", "FLOP/s", "more", partial(_prepare_gemm, "bfloat16")),
    Bench("gemm/float64", "compute", "FLOP/s", "more", partial(_prepare_gemm, "float64")),
    _make_check("product", "compute", partial(_prepare_product, checks.make_product_check)),
    Bench("dispatch", "operator launch", "calls/s", "more", _prepare_dispatch),
    Bench("memory/cache", "cache", "B/s", "more", partial(_prepare_memory, cached=True)),
    Bench("memory/main", "memory", "B/s", "more", partial(_prepare_memory, cached=False)),
    _make_check("convolution", "compute", lambda place: checks.make_convolution_check(place.device, place.world.rank)),
    Bench(
        "check/repeat",
        "compute",
        "of the bound",
        "less",
        partial(_prepare_product, checks.make_repeat_check),
        checks="watch",
    ),
    Bench("host_link", "host link", "B/s", "more", _prepare_host_link),
    Bench("all_reduce/node", "links in the node", "B/s", "more", partial(_prepare_collective, "all_reduce")),
    Bench("all_to_all/node", "links in the node", "B/s", "more", partial(_prepare_collective, "all_to_all")),
    _make_check("all_reduce", "links in the node", _prepare_sum),
    Bench("overlap", "compute beside links", "s", "less", _prepare_overlap),
    Bench("storage/write", "storage", "B/s", "more", _prepare_write),
    Bench("storage/read", "storage", "B/s", "more", _prepare_read),
    _make_check("storage", "storage", lambda place: checks.make_storage_check(_make_file_path(place))),
)


def make_step_benches(workloads: Mapping[str, Path]) -> list[Bench]:
    """Return a benchmark of a training step for each workload, with its data in the given folder."""
    return [
        Bench(f"step/{name}", "all of a training step", "s", "less", partial(_prepare_step, name, root))
        for name, root in workloads.items()
    ]


def collect_facts(place: BenchContext) -> Iterator[tuple[str, str, float, float]]:
    """Yield (metric, unit, value, worst value allowed) of untimed facts: free space, descriptors, free memory."""
    import resource

    status = os.statvfs(place.directory)
    yield "free_space", "B", float(status.f_bavail * status.f_frsize), 1e9
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    yield "descriptors", "", float(descriptors if descriptors > 0 else 2**31), 1024.0
    yield "free_memory", "B", float(place.free), 1e9


MIN_ROUNDS = 2  # rounds, however short the time: one to warm up, one that counts
# Preparing ends after this share of the time, so that something is left to repeat what is prepared.
PREPARATION_SHARE = 0.6


def measure_node(
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
        elif done or bench.checks:  # a wrong result is wrong also while the node warms up
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
        found = []
        for bench, values, why in entries:
            sample = Sample(
                node=self._name, hardware=self._hardware, metric=bench.metric, unit=bench.unit, better=bench.better,
                component=bench.component, values=values, failed=why,
            )  # fmt: skip
            found.append(judge_check(bench, sample) if bench.checks and values else sample)
        return found + self._facts

    def write(self) -> None:
        """Write the file anew."""
        if self._writes:
            write_file_atomically(self._output, render_samples(self.samples()))


def judge_check(bench: Bench, sample: Sample) -> Sample:
    """Judge the repetitions of a check: wrong if one of them is beyond its bound, and by how many to isolate."""
    wrong = [value for value in sample.values if value > 1.0]
    if not wrong:
        return structs.replace(sample, values=(max(*sample.values, LEAST_ERROR),), bound=1.0)
    severity: Severity = "watch" if bench.checks == "watch" else "reset" if len(wrong) == 1 else "isolate"
    why = f"wrong in {len(wrong)} of {len(sample.values)} repetitions, by up to {max(wrong):.2g} times the bound"
    return structs.replace(sample, values=(), bound=1.0, failed=why, severity=severity)


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


PAIR_BYTES = 2 << 20  # bandwidth, not latency, decides at this size
ALL_BYTES = 1 << 20
# With more nodes, leave-one-out is skipped: each further node costs every node one more all-reduce.
MOST_GROUPS = 16
CLOCK_BOUND_S = 1.0  # apart: logs and file times of such nodes cannot be put in order
PINGS = 20  # exchanges of which the fastest tells the clock's offset best
MIN_LINK_ROUNDS = 1  # rounds that count, however short the time


def measure_links(
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
    while count <= (rounds or count) and (count <= MIN_LINK_ROUNDS or budget.allows(2.0 * longest)):
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
        _write_links(
            world,
            [_build_link_sample(world, hardware, metric, tuple(those)) for metric, those in values.items()],
            output,
        )


def _make_groups_without_one(nodes: int) -> list[object]:
    """Make a group without each of the nodes. All ranks make all groups, also groups that they are not in."""
    return [dist.new_group([node for node in range(nodes) if node != left]) for left in range(nodes)]


def _write_links(world: World, samples: list[Sample], output: Path) -> None:
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
    return collectives.compute_bus_share("all_reduce", world.size - 1) * ALL_BYTES / slowest[world.rank]


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


LINK_METRICS: dict[str, tuple[str, str]] = {  # unit, component
    "clock_offset": ("s", "clock"),
    "link/pair": ("B/s", "links between nodes"),
    "link/of_two": ("B/s", "the link between two nodes"),
    "link/without": ("B/s", "links between nodes"),
}


def _build_link_sample(world: World, hardware: str, metric: str, values: tuple[float, ...]) -> Sample:
    unit, component = LINK_METRICS[metric]
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
