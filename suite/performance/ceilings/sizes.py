"""Plans what fits into free memory: working sets, matrices, messages, files. Pure functions, torch-free.

No measurement may make a machine swap or exceed its control group's limit. So all ranks of a node together take at most
a quarter of the free memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mlhpc.suite.machine.probes.processor import CpuCache
from mlhpc.suite.performance.ceilings.plateaus import CacheShare, list_sweep_sizes

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
