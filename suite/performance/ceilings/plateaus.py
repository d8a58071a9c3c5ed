"""Memory levels in a working-set sweep: where the rate falls, and which cache that is. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RAMP = 0.90  # sizes before the first rate this near the best are dominated by the cost of starting a pass
FALL = 0.90  # a rate that falls below this in one octave leaves a level (L1 to L2 of a Zen 5 core: 0.81)
SAME_CACHE = 4.0  # a plateau is a cache the system names if its capacity is within this factor, and nearer than others


@dataclass(frozen=True)
class Plateau:
    """Sizes that run at one rate: indices ``first`` to ``last`` of the sweep.

    ``capacity`` is the largest size that still runs above the geometric mean of this rate and the next; None for the last.
    """

    first: int
    last: int
    capacity: int | None


@dataclass(frozen=True)
class Cache:
    """A cache as the operating system tells it, as one thread sees it: its share where active threads share it."""

    name: str
    share_bytes: int


def plateaus(sizes: Sequence[int], rates: Sequence[float]) -> list[Plateau]:
    """The plateaus of a sweep by growing size.

    Rates are smoothed by a median of three neighbours and, after the ramp, by isotonic regression: no rate rises with size.
    """
    if len(sizes) != len(rates) or len(sizes) < 2 or min(rates) <= 0:
        raise ValueError(f"expected a positive rate for each of at least two sizes, got {len(sizes)} and {len(rates)}")
    smooth = [median(rates[max(0, i - 1) : i + 2]) if 0 < i < len(rates) - 1 else rate for i, rate in enumerate(rates)]
    start = next(i for i, rate in enumerate(smooth) if rate >= RAMP * max(smooth))
    logs = _falling([math.log(rate) for rate in smooth[start:]])
    edges = _falls(sizes[start:], logs)
    begins = [0, *(end for _, end in edges)]
    ends = [*(begin for begin, _ in edges), len(logs) - 1]
    levels = [sum(logs[b : e + 1]) / (e + 1 - b) for b, e in zip(begins, ends, strict=True)]
    found = []
    for position, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        capacity = None
        if position + 1 < len(levels):
            middle = (levels[position] + levels[position + 1]) / 2
            capacity = sizes[start + max(i for i in range(begin, len(logs)) if logs[i] >= middle)]
        found.append(Plateau(start + begin, start + end, capacity))
    return found


def with_one_memory(found: Sequence[Plateau], caches: Sequence[Cache]) -> list[Plateau]:
    """All plateaus that follow one of at least half the largest cache are main memory: noise may have split them."""
    for position, plateau in enumerate(found):
        if plateau.capacity and caches and plateau.capacity >= max(cache.share_bytes for cache in caches) / 2:
            rest = found[position + 1 :]
            return [*found[: position + 1], Plateau(rest[0].first, rest[-1].last, None)]
    return list(found)


def names(found: Sequence[Plateau], largest_size: int, caches: Sequence[Cache]) -> list[str]:
    """A name per plateau: a cache's, in order and each once; ``dram`` for the last if it is well past every cache."""
    named, left = [], list(caches)
    for position, plateau in enumerate(found):
        if plateau.capacity is None:
            past = all(largest_size >= 4 * cache.share_bytes for cache in caches)
            named.append("dram" if past else f"level_{position + 1}")
            continue
        distances = [abs(math.log(plateau.capacity / cache.share_bytes)) for cache in left]
        nearest = min(range(len(left)), key=distances.__getitem__, default=None)
        if nearest is not None and distances[nearest] <= math.log(SAME_CACHE):
            named.append(left[nearest].name)
            left = left[nearest + 1 :]
        else:
            named.append(f"level_{position + 1}")
    return named


def sweep(smallest: int, largest: int, per_octave: int, multiple: int) -> list[int]:
    """Sizes from ``smallest`` to ``largest``, evenly spaced on a logarithmic scale, each a multiple of ``multiple``.

    At least ``per_octave`` sizes in an octave. No size exceeds ``largest``: buffers of that many bytes hold every working set.
    ValueError if ``largest`` is below ``smallest``.
    """
    if not multiple <= smallest <= largest:
        raise ValueError(f"expected {multiple} <= smallest <= largest, got smallest {smallest} and largest {largest}")
    count = max(1, math.ceil(math.log2(largest / smallest) * per_octave))
    raw = [smallest * (largest / smallest) ** (i / count) for i in range(count + 1)]
    return sorted({min(round(size / multiple), largest // multiple) * multiple for size in raw})


def _falling(values: Sequence[float]) -> list[float]:
    """The non-increasing sequence nearest in least squares: neighbours that rise are pooled to their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] < mean:
            before, more = pools.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _falls(sizes: Sequence[int], logs: Sequence[float]) -> list[tuple[int, int]]:
    """Intervals of indices over which the rate falls: runs of sizes that lose more than `FALL` within an octave."""
    edges: list[tuple[int, int]] = []
    for i, size in enumerate(sizes):
        octave = max(j for j in range(i, len(sizes)) if sizes[j] <= 2.05 * size)
        if octave == i or logs[octave] - logs[i] > math.log(FALL):
            continue
        begin = _last_before_fall(logs, i, octave)
        end = octave
        if edges and begin <= edges[-1][1]:
            edges[-1] = (edges[-1][0], end)
        else:
            edges.append((begin, end))
    return edges


def _last_before_fall(logs: Sequence[float], begin: int, end: int) -> int:
    """The last index from which most of the fall between two indices is still to come."""
    tolerance = 0.1 * (logs[begin] - logs[end])
    return max(i for i in range(begin, end) if logs[i] >= logs[begin] - tolerance)
