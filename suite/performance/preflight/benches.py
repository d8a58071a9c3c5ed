"""Defines the benchmarks of a node: quantity, unit and stressed component of each. They use kernels of `ceilings`.

A benchmark is prepared once on every rank of the node and then repeated. All ranks begin together, and the slowest
counts. One repetition takes about `REPETITION_S`, whatever the speed of the node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.launcher import Launch
from mlhpc.suite.machine.facts import Better
from mlhpc.suite.machine.probes.processor import CpuCache
from mlhpc.suite.performance.ceilings import collectives, compute, memory, storage
from mlhpc.suite.performance.ceilings.samples import count_calls_for
from mlhpc.suite.performance.ceilings.sizes import SKEW
from mlhpc.suite.performance.ceilings_file import Resource
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World

REPETITION_S = 0.03  # short enough for many rounds, far above the resolution of the clock
CPU_ORDER, GPU_ORDER = 512, 4096  # of the products, the same on all nodes
MESSAGE_BYTES = 1 << 20
FILE_BYTES = 8 << 20
LINK_BYTES = 64 << 20
LARGEST_SET, SMALLEST_SET = 1 << 30, 64 << 20  # bytes of a node's working set that no cache holds
CACHE_FACTOR = 4  # times the largest cache
STEP_SAMPLES = 2  # per rank, of a workload's step

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
    """One benchmark. ``prepare`` returns the function for a repetition, which returns a value in ``unit``; or None."""

    metric: str
    component: str
    unit: str
    better: Better
    prepare: Callable[[BenchContext], Repeat | None]


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


# All but the steps of workloads, in the order in which they are repeated.
BENCHES: tuple[Bench, ...] = (
    Bench("gemm/float32", "compute", "FLOP/s", "more", partial(_prepare_gemm, "float32")),
    Bench("gemm/bfloat16", "compute", "FLOP/s", "more", partial(_prepare_gemm, "bfloat16")),
    Bench("gemm/float64", "compute", "FLOP/s", "more", partial(_prepare_gemm, "float64")),
    Bench("dispatch", "operator launch", "calls/s", "more", _prepare_dispatch),
    Bench("memory/cache", "cache", "B/s", "more", partial(_prepare_memory, cached=True)),
    Bench("memory/main", "memory", "B/s", "more", partial(_prepare_memory, cached=False)),
    Bench("host_link", "host link", "B/s", "more", _prepare_host_link),
    Bench("all_reduce/node", "links in the node", "B/s", "more", partial(_prepare_collective, "all_reduce")),
    Bench("all_to_all/node", "links in the node", "B/s", "more", partial(_prepare_collective, "all_to_all")),
    Bench("overlap", "compute beside links", "s", "less", _prepare_overlap),
    Bench("storage/write", "storage", "B/s", "more", _prepare_write),
    Bench("storage/read", "storage", "B/s", "more", _prepare_read),
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
