"""Divides each global batch into shares, one per rank: even in samples, or nearly even in cost.

The samples of the batch stay the same. The shares follow from the costs and the order of the epoch. So every rank
computes all shares without communication.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.data.sampling import compute_epoch_order

# Least cost of a sample: one with a stated cost of 0 still takes time, and not all of them may go to one rank.
SMALLEST = 1.0

Indices = NDArray[np.int64]
Costs = NDArray[np.floating[Any]] | NDArray[np.integer[Any]]


def split_by_sum(costs: Costs, shares: int) -> list[Indices]:
    """Split samples into shares with nearly equal sums of costs. Returns indices into ``costs``, ascending in each
    share.

    Greedy: the largest cost first, each to the share with the smallest sum so far.
    """
    indices: list[list[int]] = [[] for _ in range(shares)]
    loads = [(0.0, share) for share in range(shares)]
    # Stable: every rank must find the same shares, whatever library sorts.
    for index in np.argsort(-costs, kind="stable").tolist():
        load, share = heapq.heappop(loads)
        indices[share].append(index)
        heapq.heappush(loads, (load + max(float(costs[index]), SMALLEST), share))
    return [np.array(sorted(share), dtype=np.int64) for share in indices]


def split_by_padding(costs: Costs, shares: int) -> list[Indices]:
    """Split samples into shares with the least largest padded cost (samples x longest). Returns indices into ``costs``.

    An optimal split is contiguous in the sorted costs. Bisection finds its largest padded cost to six digits.
    """
    order = np.argsort(-costs, kind="stable")
    descending = costs[order].astype(np.float64)
    # The upper bound is the cost of the largest share if all shares have the same number of samples.
    low, high = 0.0, descending[0] * -(-len(descending) // shares)
    cuts = _cut_by_padding(descending, shares, high)
    assert cuts is not None, "fewer samples than shares"
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        smaller = _cut_by_padding(descending, shares, middle)
        if smaller is None:
            low = middle
        else:
            high, cuts = middle, smaller
    return [np.sort(part) for part in np.split(order, cuts)]


def _cut_by_padding(descending: NDArray[np.float64], shares: int, limit: float) -> list[int] | None:
    """Cut descending costs into ``shares`` non-empty shares, each with a padded cost of at most ``limit``.

    The padded cost is the number of samples times the largest cost. Returns the index at which each share but the first
    begins. None if there is no such cut.
    """
    cuts: list[int] = []
    begin = 0
    for later_shares in reversed(range(shares)):
        room = int(limit // descending[begin]) if descending[begin] > 0 else len(descending)
        taken = min(room, len(descending) - begin - later_shares)  # each later share needs a sample
        if taken < 1:
            return None
        begin += taken
        cuts.append(begin)
    return cuts[:-1] if begin == len(descending) else None


class EvenShares:
    """Finds all shares of a global batch from one of them. A rank that accumulates gradients has several shares.

    Share s of n has every n-th sample of a global batch, from s on (`sampling.list_train_batches`). Part p of rank r
    is share r + p * ranks. So one share determines its batch and the number of shares.
    """

    def __init__(self, samples: int, global_batch_size: int) -> None:
        self._samples, self._global_batch_size = samples, global_batch_size
        self._lock = threading.Lock()
        self._epoch: tuple[int, int] | None = None
        self._order = self._position_of = np.empty(0, dtype=np.int64)

    def shares(self, indices: Indices, *, seed: int, epoch: int) -> tuple[list[Indices], int]:
        """Return all shares of the global batch of ``indices``, and the position of ``indices`` among them."""
        batch, own, shares = self._find(indices, seed, epoch)
        return [batch[share::shares] for share in range(shares)], own

    def _find(self, indices: Indices, seed: int, epoch: int) -> tuple[Indices, int, int]:
        with self._lock:  # loader threads share this object
            if self._epoch != (seed, epoch):
                self._epoch, self._order = (seed, epoch), compute_epoch_order(self._samples, seed=seed, epoch=epoch)
                self._position_of = np.argsort(self._order)
            order, position = self._order, int(self._position_of[indices[0]])
        own = position % self._global_batch_size
        begin = position - own
        batch = order[begin : begin + self._global_batch_size]
        shares = len(batch) // len(indices)
        # A caller with another order of samples would train samples twice without this.
        assert np.array_equal(indices, batch[own::shares])
        return batch, own, shares


class BalancedShares(EvenShares):
    """Replaces the shares of a global batch by balanced ones. The global batch is the same on any number of ranks.

    ``cost(indices, seed, epoch)`` returns each sample's cost, in any unit; ``divide`` is `split_by_sum`
    or `split_by_padding`.
    """

    def __init__(
        self,
        samples: int,
        global_batch_size: int,
        cost: Callable[[Indices, int, int], Costs],
        divide: Callable[[Costs, int], list[Indices]],
    ) -> None:
        super().__init__(samples, global_batch_size)
        self._cost, self._divide = cost, divide

    def shares(self, indices: Indices, *, seed: int, epoch: int) -> tuple[list[Indices], int]:
        """Return the balanced shares of the global batch of ``indices``, and the position of this rank's share."""
        batch, own, shares = self._find(indices, seed, epoch)
        return [batch[places] for places in self._divide(self._cost(batch, seed, epoch), shares)], own

    def share(self, indices: Indices, *, seed: int, epoch: int) -> Indices:
        """Return the balanced share in place of ``indices``."""
        shares, own = self.shares(indices, seed=seed, epoch=epoch)
        return shares[own]
