"""Measures the bandwidth of every memory level. It sweeps over working sets, on all threads or the whole GPU.

One call from Python takes as long as reading an L1 cache several times. So each timed call passes over its working set
many times. There are three such kernels. `torch.sum` reads a view that repeats one row. `numpy.add.reduce` adds such a
view to a row of the working set. A copy runs between two windows that move by one cache line per pass. On a GPU a CUDA
graph holds many launches.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from mlhpc.suite.performance.ceilings.samples import (
    Effort,
    Samples,
    TimeLimit,
    count_calls_for,
    gather_maxima,
    measure_on_all_ranks,
)
from mlhpc.suite.performance.ceilings.sizes import (
    ALIGNMENT,
    CACHE_LINE,
    SKEW,
    SWEEP_END_FACTOR,
    CacheShare,
    Plateau,
    SweepPlan,
    compute_visiting_order,
    count_mapped_bytes,
    find_plateaus,
    list_sweep_sizes,
    make_level_names,
    merge_memory_plateaus,
)
from mlhpc.suite.performance.ceilings_file import Ceiling, Curve, Findings, NotMeasured, Point
from mlhpc.suite.world import World

SMALLEST_GPU_SET = 64 << 10  # bytes of the first working set
# Large sets are repeated for about this time, but at least this often.
LARGE_SET_TIME_S = 0.25
MIN_REPETITIONS = 5
# Several threads start up to 0.1 ms apart; longer samples make that small.
THREAD_SAMPLE_FACTOR = 3
FEWEST_PASSES = 3
# Share of a limited time for the kernel that finds the levels: the other kernels only refine its rates.
DETECTOR_TIME_SHARE = 2 / 3
# To estimate a set's time from a smaller one: it may be this many times slower, if it exceeds a cache.
MAX_SLOWDOWN = 4.0


@dataclass(frozen=True)
class Kernel:
    """One access pattern. ``prepare(buffer, size, passes)`` returns the call to time and the bytes it moves."""

    name: str
    library: str
    prepare: Callable[[NDArray[np.uint8], int, int], tuple[Callable[[], object], float]]
    smallest: int = 0


def measure_cpu(world: World, effort: Effort, plan: SweepPlan, budget: TimeLimit) -> Findings:
    """Sweep with one working set per thread of torch's pool on every rank. Returns a ceiling for each level found."""
    team = ThreadTeam(plan.threads, plan.buffer_bytes)
    before = torch.get_num_threads()
    # The team has its own threads; torch must not start more in each of them.
    torch.set_num_threads(1)
    try:
        sampled, left_out = _measure_sweep(world, effort, plan, team, budget)
    finally:
        torch.set_num_threads(before)
    late = [NotMeasured("memory", f"{', '.join(left_out)}: the time was over", "sweep")] if left_out else []
    if len(next(iter(sampled.values()))) < 2:  # one set shows no level
        return Findings(not_measured=late)
    findings = _build_findings(world, sampled, plan.shares, plan.cut)
    findings.not_measured += late
    return findings


def _measure_sweep(
    world: World, effort: Effort, plan: SweepPlan, team: ThreadTeam, budget: TimeLimit
) -> tuple[dict[Kernel, dict[int, Samples]], list[str]]:
    """Measure the first kernel from coarse to fine, then the others. So any time limit covers the whole range.

    Returns the rates in order of size. Also returns, for each kernel, how many of its planned sets were not measured.
    """
    sampled: dict[Kernel, dict[int, Samples]] = {kernel: {} for kernel in CPU_KERNELS}
    # seconds per set that do not follow from the rate: threads start, pages are mapped, other kernels are slower
    overhead = 0.0

    def measure(kernel: Kernel, sizes: Sequence[int], part: TimeLimit) -> None:
        nonlocal overhead
        for number, size in enumerate(sizes):
            expected = _estimate_seconds(sampled[detector], size, effort, plan)
            # The next set of the ladder may be smaller and still fit.
            if part.ends and sampled[detector] and not part.allows(expected + overhead):
                continue
            begin = part.clock()
            team.touch(size + SKEW)
            sampled[kernel][size] = _measure_cpu_rate(world, team, kernel, size, effort, part)
            took = gather_maxima(world, [part.clock() - begin])[0]
            # The largest so far is a safe estimate for the next set.
            overhead = max(overhead, took - _estimate_seconds(sampled[detector], size, effort, plan))
            part.tell(f"memory: {number + 1} of {len(sizes)} working sets with {kernel.name}")

    detector, *others = CPU_KERNELS
    order = compute_visiting_order(plan.sizes)
    measure(detector, order, budget.until(DETECTOR_TIME_SHARE * budget.length))
    planned = _select_sets(order, dict(sorted(sampled[detector].items())), effort, plan)
    for kernel in others:
        measure(kernel, planned[kernel], budget)
    left_out = [
        f"{len(sampled[kernel])} of {len(sizes)} sets with {kernel.name}"
        for kernel, sizes in planned.items()
        if len(sampled[kernel]) < len(sizes)
    ]
    rates = {kernel: dict(sorted(by_size.items())) for kernel, by_size in sampled.items()}
    return {kernel: by_size for kernel, by_size in rates.items() if by_size or kernel is detector}, left_out


def _select_sets(
    order: Sequence[int], found: Mapping[int, Samples], effort: Effort, plan: SweepPlan
) -> dict[Kernel, list[int]]:
    """Select each kernel's working sets. ``order``: the first kernel's; ``found``: its rates by growing size.

    The first kernel measures all sets. If ``effort`` limits the sets per level, the others measure fewer. These are all
    sets with passes shorter than a sample, and a few more per level.
    """
    planned = {kernel: [size for size in order if size >= kernel.smallest] for kernel in CPU_KERNELS}
    if not effort.sets_per_level or len(found) < 2:
        return planned
    within = [
        _list_level_sizes(level, name, list(found), plan.shares) for level, name in _find_levels(found, plan.shares)
    ]
    for kernel in CPU_KERNELS[1:]:
        fitting = [[size for size in sizes if size >= kernel.smallest] for sizes in within]
        cheap = {
            size
            for size in planned[kernel]
            if size in found and FEWEST_PASSES * size * plan.threads <= found[size].slowest * effort.sample_s
        }
        planned[kernel] = sorted(cheap | _select_spread_sets(fitting, effort.sets_per_level))
    return planned


def _select_spread_sets(levels: Sequence[Sequence[int]], per_level: int) -> set[int]:
    """Select N sets of each level, spread over its sizes. Main memory gets one: its rate does not depend on size."""
    chosen: set[int] = set()
    for sizes in levels:
        count = min(len(sizes), 1 if sizes is levels[-1] else per_level)
        chosen.update(sizes[(2 * i + 1) * len(sizes) // (2 * count)] for i in range(count))
    return chosen


def _estimate_seconds(rates: Mapping[int, Samples], size: int, effort: Effort, plan: SweepPlan) -> float:
    """Estimate the seconds of a set from the rate of the next larger set, else of the largest. 0 without any."""
    if not rates:
        return 0.0
    larger = min((known for known in rates if known >= size), default=None)
    rate = rates[larger].slowest if larger else rates[max(rates)].slowest / MAX_SLOWDOWN
    once = max(effort.sample_s, FEWEST_PASSES * size * plan.threads / rate)
    return once * (2 + min(effort.repetitions, max(MIN_REPETITIONS, count_calls_for(LARGE_SET_TIME_S, once))))


def measure_gpu(world: World, effort: Effort, device: torch.device, budget: TimeLimit) -> Findings:
    """Sweep a triad over the whole device. It does not see L1 caches, which belong to single multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    l2 = int(getattr(properties, "L2_cache_size", 0))
    shares = [CacheShare("L2", l2)] if l2 else []
    free, _ = torch.cuda.mem_get_info(device)
    # A quarter of the free memory, as on the host (mlhpc.suite.performance.ceilings.sizes).
    largest = min(max(1 << 30, SWEEP_END_FACTOR * l2), free // 4)
    rates = {}
    sizes = list_sweep_sizes(SMALLEST_GPU_SET, largest, effort.points_per_octave, 4096)
    for size in compute_visiting_order(sizes):
        if not budget.left():
            break
        launch = _gpu_triad(device, size)
        calls = int(gather_maxima(world, [count_calls_for(effort.sample_s, _measure_gpu_seconds(launch, 1))])[0])
        moved = size // 12 * 12 * GRAPH_LAUNCHES * calls  # a triad: two arrays of 4-byte numbers read and one written

        def rate(launch: Callable[[], None] = launch, calls: int = calls, moved: int = moved) -> float:
            return moved / _measure_gpu_seconds(launch, calls)

        rates[size] = measure_on_all_ranks(world, rate, effort.repetitions, budget=budget)
        budget.tell(f"memory: {len(rates)} of {len(sizes)} working sets")
    if len(rates) < 2:
        return Findings(not_measured=[NotMeasured("memory", "the time was over")])
    findings = _build_findings(world, {Kernel("triad", "torch", _cpu_triad): dict(sorted(rates.items()))}, shares)
    findings.not_measured.append(
        NotMeasured("memory", "private to a multiprocessor: no sweep of the device sees it", "L1")
    )
    if len(rates) < len(sizes):
        late = f"{len(rates)} of {len(sizes)} working sets were measured: the time was over"
        findings.not_measured.append(NotMeasured("memory", late, "sweep"))
    return findings


def _build_findings(
    world: World, sampled: dict[Kernel, dict[int, Samples]], shares: Sequence[CacheShare], cut: str = ""
) -> Findings:
    """Find the levels in the first kernel's rates. Returns a ceiling for each, and why a cache has none.

    ``cut`` says why no larger set was tried.
    """
    detector = next(iter(sampled.values()))
    sizes, levels = list(detector), _find_levels(detector, shares)
    level_names = [name for _, name in levels]
    findings = Findings(curves=[_build_curve(world, kernel, rates) for kernel, rates in sampled.items()])
    for level, name in levels:
        findings.roofs.append(_build_ceiling(world, sampled, sizes, level, name, shares))
    for cache in shares:
        if cache.name not in level_names:
            reason = f"no plateau near its {cache.share_bytes} bytes per thread: the rate does not fall behind it"
            findings.not_measured.append(NotMeasured("memory", reason, cache.name))
    if "dram" not in level_names:
        reason = f"the sweep ends at {sizes[-1]} bytes per thread, less than 4 times the largest cache"
        reason += f": {cut}" if cut else ""
        findings.not_measured.append(NotMeasured("memory", reason, "dram"))
    return findings


def _find_levels(detector: Mapping[int, Samples], shares: Sequence[CacheShare]) -> list[tuple[Plateau, str]]:
    """Return the levels in the first kernel's rates, by growing size, and their names."""
    sizes = list(detector)
    levels = merge_memory_plateaus(find_plateaus(sizes, [samples.best for samples in detector.values()]), shares)
    return list(zip(levels, make_level_names(levels, sizes[-1], shares), strict=True))


def _list_level_sizes(plateau: Plateau, name: str, sizes: Sequence[int], shares: Sequence[CacheShare]) -> list[int]:
    """Return the sets of a level. For ``dram`` only sets above four times every cache count."""
    low, high = sizes[plateau.first], plateau.capacity or sizes[-1]
    if name == "dram":
        # Below that, caches still hold a part of the set.
        low = max([low, *(4 * cache.share_bytes for cache in shares)])
    return [size for size in sizes if low <= size <= high]


def _build_ceiling(
    world: World,
    sampled: dict[Kernel, dict[int, Samples]],
    sizes: Sequence[int],
    plateau: Plateau,
    name: str,
    shares: Sequence[CacheShare],
) -> Ceiling:
    """Return the best median of any kernel on a plateau."""
    within = set(_list_level_sizes(plateau, name, sizes, shares))
    candidates = [
        (samples, kernel, size)
        for kernel, rates in sampled.items()
        for size, samples in rates.items()
        if size in within
    ]
    samples, kernel, size = max(candidates, key=lambda candidate: candidate[0].value)
    return samples.roof(
        "memory",
        name,
        kernel.name,
        "B/s",
        ranks=world.size,
        nodes=world.nodes,
        library=kernel.library,
        size_bytes=size,
        capacity_bytes=plateau.capacity,
        system_capacity_bytes=next((cache.share_bytes for cache in shares if cache.name == name), None),
    )


def _build_curve(world: World, kernel: Kernel, rates: dict[int, Samples]) -> Curve:
    points = tuple(Point(size, s.value, s.n, s.spread) for size, s in rates.items())
    return Curve(
        resource="memory",
        name="sweep",
        mode=kernel.name,
        x="working_set_bytes",
        unit="B/s",
        ranks=world.size,
        nodes=world.nodes,
        points=points,
    )


class ThreadTeam:
    """Threads with a private buffer each. `touch` makes the first bytes usable."""

    def __init__(self, threads: int, size: int) -> None:
        self._threads = threads
        self.buffers: list[NDArray[np.uint8]] = [_make_buffer(size) for _ in range(threads)]
        self._touched = 0

    def touch(self, size: int) -> None:
        """Write this many bytes of each buffer once, by its own thread. The pages then lie on its NUMA node."""
        end = min(-(-size // 8) * 8, self.buffers[0].size)
        if end > self._touched:
            self.seconds([partial(_fill, buffer[self._touched : end]) for buffer in self.buffers])
            self._touched = end

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the seconds from the first start to the last end of one call per thread.

        The threads start together.
        """
        if self._threads == 1:
            begin = time.perf_counter()
            calls[0]()
            return time.perf_counter() - begin
        # Threads of Python: the kernels release the interpreter's lock, so all run at once.
        gate = threading.Barrier(self._threads)
        spans: list[tuple[float, float]] = []

        def work(call: Callable[[], object]) -> None:
            gate.wait()
            begin = time.perf_counter()
            call()
            spans.append((begin, time.perf_counter()))

        workers = [threading.Thread(target=work, args=(call,)) for call in calls]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return max(end for _, end in spans) - min(begin for begin, _ in spans)


def _measure_cpu_rate(
    world: World, team: ThreadTeam, kernel: Kernel, size: int, effort: Effort, budget: TimeLimit
) -> Samples:
    """Measure the bytes/s of all threads of a rank together."""
    estimate = 20e9  # bytes/s; only decides how many passes the first call makes
    sample_s = effort.sample_s * (1 if len(team.buffers) == 1 else THREAD_SAMPLE_FACTOR)

    def prepared(passes: int) -> tuple[list[Callable[[], object]], float]:
        ready = [kernel.prepare(buffer, size, passes) for buffer in team.buffers]
        return [call for call, _ in ready], sum(moved for _, moved in ready)

    calls, moved = prepared(max(FEWEST_PASSES, round(estimate * sample_s / 4 / size)))
    team.seconds(calls)
    rate = moved / team.seconds(calls) / len(calls)
    passes = int(gather_maxima(world, [max(FEWEST_PASSES, round(rate * sample_s / size))])[0])
    calls, moved = prepared(passes)
    enough = int(gather_maxima(world, [count_calls_for(LARGE_SET_TIME_S, passes * size / rate)])[0])
    repetitions = min(effort.repetitions, max(MIN_REPETITIONS, enough))
    return measure_on_all_ranks(world, lambda: moved / team.seconds(calls), repetitions, budget=budget)


def _cpu_read(buffer: NDArray[np.uint8], size: int, passes: int) -> tuple[Callable[[], object], float]:
    row = torch.from_numpy(_make_view(buffer, 0, size, np.float32))
    rows = row.expand(passes, row.numel())
    out = torch.empty(passes)
    return lambda: torch.sum(rows, 1, out=out), float(size * passes)


def _cpu_update(buffer: NDArray[np.uint8], size: int, passes: int) -> tuple[Callable[[], object], float]:
    half = size // 2 // CACHE_LINE * CACHE_LINE
    x, y = _make_view(buffer, 0, half, np.float32), _make_view(buffer, half + SKEW, half, np.float32)
    rows = np.broadcast_to(x, (passes, x.size))
    return lambda: np.add.reduce(rows, axis=0, out=y), 3.0 * half * (passes - 1)  # the first pass only copies


def _cpu_copy(buffer: NDArray[np.uint8], size: int, passes: int) -> tuple[Callable[[], object], float]:
    # numpy would make a repeated row (step 0) its inner loop. So each pass begins one cache line later, within a
    # sixteenth of the set.
    half = size // 2 // CACHE_LINE * CACHE_LINE
    steps = max(1, half // 16 // CACHE_LINE)
    width = half - steps * CACHE_LINE
    rounds, rows = max(1, passes // steps), min(steps, passes)
    source, target = (
        as_strided(_make_view(buffer, start, half, np.float64), (rows, width // 8), (CACHE_LINE, 8))
        for start in (0, half + SKEW)
    )

    def call() -> None:
        for _ in range(rounds):
            np.copyto(target, source)

    return call, 2.0 * width * rows * rounds


def _cpu_triad(buffer: NDArray[np.uint8], size: int, passes: int) -> tuple[Callable[[], object], float]:
    third = size // 3 // CACHE_LINE * CACHE_LINE
    a, b, c = (torch.from_numpy(_make_view(buffer, i * (third + CACHE_LINE), third, np.float32)) for i in range(3))

    def call() -> None:
        for _ in range(passes):
            torch.add(b, c, alpha=0.5, out=a)

    return call, 3.0 * third * passes


def _make_view(buffer: NDArray[np.uint8], start: int, size: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Return ``size`` bytes of a buffer from ``start`` on. Asserts that they exist: a slice would be cut silently."""
    assert start + size <= buffer.size, f"working set of {start + size} bytes in a buffer of {buffer.size}"
    return buffer[start : start + size].view(dtype)


# The first finds the levels: pure reads, whose rate falls just where a working set exceeds a cache
CPU_KERNELS = (
    Kernel("read", "torch", _cpu_read),
    Kernel("update", "numpy", _cpu_update),
    Kernel("copy", "numpy", _cpu_copy),
    # It makes one call per pass, so only for sets so large that a call costs nothing.
    Kernel("triad", "torch", _cpu_triad, smallest=4 << 20),
)


def _make_buffer(size: int) -> NDArray[np.uint8]:
    """Map untouched pages, in huge pages and from their boundary on if the system has them."""
    mapped = mmap.mmap(-1, count_mapped_bytes(size))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # this kernel has no huge pages: use ordinary ones
            mapped.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapped, np.uint8)
    return raw[-raw.ctypes.data % (ALIGNMENT if size >= ALIGNMENT else CACHE_LINE) :][:size]


def _fill(buffer: NDArray[np.uint8]) -> None:
    buffer[: buffer.size // 8 * 8].view(np.float64)[:] = 1.0


# In one graph: a launch of its own per triad would take longer than a small triad.
GRAPH_LAUNCHES = 20


def _gpu_triad(device: torch.device, size: int) -> Callable[[], None]:
    """Capture `GRAPH_LAUNCHES` triads over a working set of ``size`` bytes in a CUDA graph. Returns its launch."""
    a, b, c = (torch.ones(size // 12, device=device) for _ in range(3))
    torch.add(b, c, alpha=0.5, out=a)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_LAUNCHES):
            torch.add(b, c, alpha=0.5, out=a)
    # The first replay uploads the graph.
    graph.replay()
    return graph.replay


def _measure_gpu_seconds(launch: Callable[[], None], calls: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        launch()
    torch.cuda.synchronize()
    return time.perf_counter() - begin
