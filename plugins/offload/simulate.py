"""Simulates caches of experts on a trace of requests: which policy finds how many there. Nothing here is measured.

A trace is made from popularity: of a run's `window_stats`, or by Zipf's law. In a step each layer asks for the experts
that get tokens, in the forward and, in the opposite order, in the backward pass. Each rank has a cache of its own, and
draws its tokens by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError
from mlhpc.suite.log.mllog import WINDOW_STATS
from mlhpc.suite.log.reader import read_events

Trace = Sequence[int]
# What a policy keeps longest has the highest rank. A rank is given when an entry is asked for, at this time.
Rank = Callable[[int, int], tuple[float, int]]
HALF_LIFE = 10  # in requests for each place of the cache
DRAWN_RANKS = 8  # of more ranks these many are simulated: all draw from the same popularity


def count_hits(trace: Trace, size: int, rank: Rank) -> int:
    """Count the requests that a cache of ``size`` entries answers. Every entry that is asked for enters it."""
    kept: dict[int, tuple[float, int]] = {}
    heap: list[tuple[tuple[float, int], int]] = []
    hits = 0
    for time, entry in enumerate(trace):
        if entry in kept:
            hits += 1
        elif len(kept) == size:
            while True:
                lowest, old = heappop(heap)
                if kept.get(old) == lowest:  # else it was asked for later
                    del kept[old]
                    break
        kept[entry] = rank(time, entry)
        heappush(heap, (kept[entry], entry))
    return hits


def rank_lru(trace: Trace, size: int) -> Rank:
    """Least recently used goes first."""
    return lambda time, entry: (0.0, time)


def rank_lfu(trace: Trace, size: int) -> Rank:
    """Least frequently used goes first, of all requests so far; of equal ones the least recently used."""
    counts: dict[int, int] = {}

    def rank(time: int, entry: int) -> tuple[float, int]:
        counts[entry] = counts.get(entry, 0) + 1
        return counts[entry], time

    return rank


def rank_decayed(trace: Trace, size: int) -> Rank:
    """As LFU, but a request counts half after `HALF_LIFE` requests for each place. Ranks are logarithms of the sums."""
    sums: dict[int, float] = {}
    life = HALF_LIFE * size

    def rank(time: int, entry: int) -> tuple[float, int]:
        now = time / life  # in place of old requests' decay, new ones count more
        former = sums.get(entry)
        sums[entry] = now if former is None else now + math.log2(1 + 2 ** (former - now))
        return sums[entry], time

    return rank


def rank_belady(trace: Trace, size: int) -> Rank:
    """What is needed last goes first: no policy has more hits, and none can know it."""
    following, last = [0] * len(trace), dict[int, int]()
    for time in range(len(trace) - 1, -1, -1):
        following[time] = last.get(trace[time], len(trace))
        last[trace[time]] = time
    return lambda time, entry: (-following[time], 0)


POLICIES: dict[str, Callable[[Trace, int], Rank]] = {
    "LRU": rank_lru, "LFU": rank_lfu, "decayed LFU": rank_decayed, "Belady": rank_belady
}  # fmt: skip


@dataclass(frozen=True)
class Popularity:
    """How tokens spread: ``shares`` of each layer's experts, and the ``choices`` of all ranks in a step."""

    shares: Sequence[NDArray[np.float64]]
    choices: int
    source: str

    @property
    def experts(self) -> int:
        """The number of experts of all layers."""
        return sum(map(len, self.shares))

    def draw(self, ranks: int, requests: int, generator: np.random.Generator) -> Trace:
        """Draw the requests of one of several ranks, which share a step. An expert's number counts those of
        earlier layers.
        """
        firsts = np.cumsum([0, *map(len, self.shares)])
        mine = max(1, self.choices // ranks)
        absent = [(1 - share) ** mine for share in self.shares]  # the chance that an expert gets no token
        found = list[int]()
        while len(found) < requests:
            asked = [
                first + np.flatnonzero(generator.random(len(each)) >= each)
                for first, each in zip(firsts, absent, strict=False)
            ]
            for layer in (*asked, *reversed(asked)):
                found.extend(layer.tolist())
        return found[:requests]


def make_zipf(exponent: float, layers: int, experts: int, choices: int, seed: int) -> Popularity:
    """Make popularity by Zipf's law, with another order of the experts in each layer."""
    generator = np.random.default_rng(seed)
    share = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    shares = [generator.permutation(share / share.sum()) for _ in range(layers)]
    return Popularity(shares, choices, f"Zipf's law with exponent {exponent:g}")


def read_popularity(path: Path) -> Popularity:
    """Read the load of experts from a run's log, the sum of its windows. InputError if it has none."""
    sums: dict[str, NDArray[np.float64]] = {}
    steps = 0
    for event in read_events(path).events:
        load = event.value.get("load") if event.key == WINDOW_STATS and isinstance(event.value, Mapping) else None
        if not isinstance(load, Mapping):
            continue
        steps += int(event.metadata.get("steps", 0))
        for name, each in load.items():
            tokens = np.asarray(each["tokens_per_expert"], dtype=np.float64)
            sums[name] = sums[name] + tokens if name in sums else tokens
    if not sums or not steps or not all(each.sum() for each in sums.values()):
        raise InputError(f"{path}: has no {WINDOW_STATS} with the load of experts: give the log of a run with experts")
    choices = round(float(next(iter(sums.values())).sum()) / steps)
    return Popularity([each / each.sum() for each in sums.values()], max(1, choices), f"loads of {path}")


class Hits(Struct, frozen=True, kw_only=True):
    """The hits of one policy in 100 requests: the mean over ranks, and the rank with fewest. ``entries``: of a
    cache.
    """

    policy: str
    cache: float
    entries: int
    mean: float
    least: float


def simulate(popularity: Popularity, caches: Sequence[float], ranks: int, requests: int, seed: int) -> Iterator[Hits]:
    """Yield the hits of each policy for each cache, a share of all experts. ``requests``: of a rank."""
    drawn = range(min(ranks, DRAWN_RANKS))
    traces = [popularity.draw(ranks, requests, np.random.default_rng((seed, rank))) for rank in drawn]
    for share in caches:
        size = max(1, round(share * popularity.experts))
        for name, policy in POLICIES.items():
            hits = [100 * count_hits(trace, size, policy(trace, size)) / requests for trace in traces]
            yield Hits(policy=name, cache=share, entries=size, mean=fmean(hits), least=min(hits))
