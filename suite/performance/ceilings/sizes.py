"""Plans what fits into free memory: working sets, matrices, messages, files. Pure functions, torch-free.

No measurement may make a machine swap or exceed its control group's limit. So all ranks of a node together take at most
a quarter of the free memory.

Finds memory levels in a sweep of working sets: where the rate falls, and which cache ends there. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from mlhpc.suite.machine.probes.processor import CpuCache

# The ramp of small sets ends at the first rate above this share of the best.
RAMP_END_SHARE = 0.90
# A level ends where the rate falls below this share within an octave. From L1 to L2 of a Zen 5 core it falls to 0.81.
FALL_SHARE = 0.90
# A plateau gets a cache's name only if their capacities differ by at most this factor.
MAX_CAPACITY_FACTOR = 4.0


@dataclass(frozen=True)
class Plateau:
    """Sizes with about the same rate: indices ``first`` to ``last`` of the sweep.

    ``capacity`` is the largest size at which the rate is still nearer to this plateau's than to the next one's, as
    ratios. The last plateau has None.
    """

    first: int
    last: int
    capacity: int | None


@dataclass(frozen=True)
class CacheShare:
    """A cache that the operating system reports, and one thread's bytes of it when threads share it."""

    name: str
    share_bytes: int


def find_plateaus(sizes: Sequence[int], rates: Sequence[float]) -> list[Plateau]:
    """Find the plateaus of a sweep by growing size.

    Rates are smoothed by a median of three neighbours and, after the ramp, by isotonic regression. So none rises with
    size. ValueError for fewer than two sizes, or a rate that is not positive.
    """
    if len(sizes) != len(rates) or len(sizes) < 2 or min(rates) <= 0:
        raise ValueError(f"expected a positive rate for each of at least two sizes, got {len(sizes)} and {len(rates)}")
    smooth = [rates[0], *(median(rates[i - 1 : i + 2]) for i in range(1, len(rates) - 1)), rates[-1]]
    # The ramp of small sets is not a level: there a pass is so short that starting it counts.
    start = next(i for i, rate in enumerate(smooth) if rate >= RAMP_END_SHARE * max(smooth))
    logs = _fit_non_increasing([math.log(rate) for rate in smooth[start:]])
    edges = _find_falls(sizes[start:], logs)
    # A plateau lies between the end of one fall and the begin of the next.
    begins = [0, *(end for _, end in edges)]
    ends = [*(begin for begin, _ in edges), len(logs) - 1]
    bounds = list(zip(begins, ends, strict=True))
    levels = [sum(logs[begin : end + 1]) / (end + 1 - begin) for begin, end in bounds]
    result = []
    for position, (begin, end) in enumerate(bounds):
        capacity = None
        if position + 1 < len(levels):
            middle = (levels[position] + levels[position + 1]) / 2  # the mean of logarithms: a geometric mean
            capacity = sizes[start + _find_last_above(logs, middle, begin)]
        result.append(Plateau(start + begin, start + end, capacity))
    return result


def _find_last_above(logs: Sequence[float], least: float, begin: int) -> int:
    return max(i for i in range(begin, len(logs)) if logs[i] >= least)


def merge_memory_plateaus(levels: Sequence[Plateau], caches: Sequence[CacheShare]) -> list[Plateau]:
    """Join all plateaus after one of at least half the largest cache. They are main memory, split by noise."""
    for position, plateau in enumerate(levels):
        if plateau.capacity and caches and plateau.capacity >= max(cache.share_bytes for cache in caches) / 2:
            rest = levels[position + 1 :]
            return [*levels[: position + 1], Plateau(rest[0].first, rest[-1].last, None)]
    return list(levels)


def make_level_names(levels: Sequence[Plateau], largest_size: int, caches: Sequence[CacheShare]) -> list[str]:
    """Name each plateau after a cache, in order, each once. The last is ``dram`` if it is far beyond all caches.

    A plateau that fits no cache is ``level_<position>``.
    """
    named, left = [], list(caches)
    for position, plateau in enumerate(levels):
        if plateau.capacity is None:
            past = all(largest_size >= 4 * cache.share_bytes for cache in caches)
            named.append("dram" if past else f"level_{position + 1}")
            continue
        distances = [abs(math.log(plateau.capacity / cache.share_bytes)) for cache in left]
        nearest = min(range(len(left)), key=distances.__getitem__, default=None)
        if nearest is not None and distances[nearest] <= math.log(MAX_CAPACITY_FACTOR):
            named.append(left[nearest].name)
            # Caches that were passed over are smaller, so no later plateau is theirs.
            left = left[nearest + 1 :]
        else:
            named.append(f"level_{position + 1}")
    return named


def list_sweep_sizes(smallest: int, largest: int, per_octave: int, multiple: int) -> list[int]:
    """List sizes from ``smallest`` to ``largest``, evenly on a logarithmic scale, as multiples of ``multiple``.

    An octave has at least ``per_octave`` sizes. No size exceeds ``largest``: buffers of that many bytes hold every
    working set. ValueError if ``largest`` is below ``smallest``.
    """
    if not multiple <= smallest <= largest:
        raise ValueError(f"expected {multiple} <= smallest <= largest, got smallest {smallest} and largest {largest}")
    count = max(1, math.ceil(math.log2(largest / smallest) * per_octave))
    raw = [smallest * (largest / smallest) ** (i / count) for i in range(count + 1)]
    return sorted({min(round(size / multiple), largest // multiple) * multiple for size in raw})


def _fit_non_increasing(values: Sequence[float]) -> list[float]:
    """Fit the nearest non-increasing sequence in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] < mean:  # a pool below its successor: both get their common mean
            before, more = pools.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _find_falls(sizes: Sequence[int], logs: Sequence[float]) -> list[tuple[int, int]]:
    """Find index intervals where the rate falls below `FALL_SHARE` of itself within an octave, and join overlaps."""
    edges: list[tuple[int, int]] = []
    for i, size in enumerate(sizes):
        # 2.05, not 2: sizes are rounded to a multiple.
        octave = max(j for j in range(i, len(sizes)) if sizes[j] <= 2.05 * size)
        if octave == i or logs[octave] - logs[i] > math.log(FALL_SHARE):
            continue
        begin = _find_last_before_fall(logs, i, octave)
        end = octave
        if edges and begin <= edges[-1][1]:
            edges[-1] = (edges[-1][0], end)
        else:
            edges.append((begin, end))
    return edges


def _find_last_before_fall(logs: Sequence[float], begin: int, end: int) -> int:
    """Return the last index between two at which at most a tenth of the fall between them has happened."""
    tolerance = 0.1 * (logs[begin] - logs[end])
    return max(i for i in range(begin, end) if logs[i] >= logs[begin] - tolerance)


CACHE_LINE = 64  # bytes of a cache line
PAGE = 4096
ALIGNMENT = 2 << 20  # a huge page
# Offset between the halves of a set: loads and stores with equal low address bits would stall each other.
SKEW = 7 * CACHE_LINE
SMALLEST_SET = 8 << 10
SHORTEST_SWEEP = 64 << 10  # a sweep that ends below this shows no level
LARGEST_FALLBACK = 64 << 20  # per thread, where no cache size is known
SWEEP_END_FACTOR = 5  # the sweep ends at this many times the largest cache
MIN_SWEEP_END = 8 << 20  # per thread, at least: triad is measured from 4 MiB on
COARSE_FACTOR = 8  # between the sets that are measured first: the rate of one bounds that of the next
FREE_DIVISOR = 4  # measurements take a quarter of the free memory
DEFAULT_FREE_BYTES = 1 << 30  # taken as free where the machine does not say


@dataclass(frozen=True)
class SweepPlan:
    """A sweep over working sets, one private buffer per thread. Sizes are bytes per thread.

    ``cut`` says why the sweep ends below `SWEEP_END_FACTOR` times the largest cache; "" if it does not.
    """

    shares: tuple[CacheShare, ...]
    sizes: tuple[int, ...]
    threads: int
    ranks: int
    cut: str = ""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a thread's buffer: largest set and skew."""
        return self.sizes[-1] + SKEW

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks of a node map."""
        return self.threads * self.ranks * count_mapped_bytes(self.buffer_bytes)


def find_free_bytes(amounts: Iterable[int | None]) -> int:
    """Return the memory that every rank agrees is free on its node: the minimum over ranks."""
    return min(DEFAULT_FREE_BYTES if amount is None else amount for amount in amounts)


def plan_sweep(
    caches: Sequence[CpuCache], cpus: frozenset[int], threads: int, ranks: int, free: int, per_octave: int
) -> SweepPlan | str:
    """Plan the sweep of ``ranks`` ranks of a node with ``threads`` threads each. A text says why it is impossible.

    ``cpus``: the CPUs that the node's ranks may use. ``free`` is in bytes. A cache is shared by as many threads as may
    run on its CPUs.
    """
    active = threads * ranks
    shares = [CacheShare(f"L{c.level}", c.size_bytes // max(1, min(active, len(c.sharers & cpus)))) for c in caches]
    wanted = max((SWEEP_END_FACTOR * cache.share_bytes for cache in shares), default=LARGEST_FALLBACK)
    wanted = max(wanted, MIN_SWEEP_END)
    most = free // FREE_DIVISOR // active
    # The largest buffer for which `count_mapped_bytes` is at most ``most``.
    buffer = max(most - 2 * ALIGNMENT, min(most - PAGE, ALIGNMENT - 1))
    largest = min(wanted, buffer - SKEW) // PAGE * PAGE
    cut = ""
    if largest < wanted // PAGE * PAGE:
        allowed, whole = free // FREE_DIVISOR >> 20, free >> 20
        cut = f"{active} threads may take {allowed} MiB, a quarter of the {whole} MiB of memory that are free"
    if largest < SHORTEST_SWEEP:
        return f"{cut}: too little for a sweep"
    return SweepPlan(
        tuple(shares), tuple(list_sweep_sizes(SMALLEST_SET, largest, per_octave, PAGE)), threads, ranks, cut
    )


def compute_visiting_order(sizes: Sequence[int]) -> list[int]:
    """Order the sizes from coarse to fine. Steps of at most `COARSE_FACTOR` come first, then gaps, widest first.

    The coarse steps begin with the smallest, so that each shows how long the next will take.
    """
    last = len(sizes) - 1
    ladder = [0]
    while ladder[-1] < last:
        here = ladder[-1]
        ladder.append(
            max(i for i in range(here + 1, last + 1) if i == here + 1 or sizes[i] <= COARSE_FACTOR * sizes[here])
        )
    order, gaps = list(ladder), list(pairwise(ladder))
    for low, high in gaps:
        middle = (low + high) // 2
        if low < middle < high:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [sizes[i] for i in order]


def count_mapped_bytes(buffer_bytes: int) -> int:
    """Return the bytes to map for a buffer. One of at least a huge page begins at a huge page's boundary."""
    return buffer_bytes + (2 * ALIGNMENT if buffer_bytes >= ALIGNMENT else PAGE)


def may_allocate(bytes_per_rank: int, ranks: int, free: int) -> bool:
    """Return True if all ranks of a node may take this much."""
    return bytes_per_rank * ranks <= free // FREE_DIVISOR
