"""Divides each global batch anew by what its samples cost, so that ranks have nearly equal work. The batch stays the same.

Pure functions of the costs: every rank computes the whole partition alone, since the order of an epoch is a public function.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.data.sampling import epoch_order

SMALLEST = 1.0  # what a sample costs at least: one without cost is not for nothing

Indices = NDArray[np.int64]
Costs = NDArray[np.floating[Any]] | NDArray[np.integer[Any]]


def summed_shares(costs: Costs, shares: int) -> list[Indices]:
    """Places of ``costs`` divided so that the sums are nearly equal: largest first, each to the share that has least."""
    places: list[list[int]] = [[] for _ in range(shares)]
    loads = [(0.0, share) for share in range(shares)]
    for place in np.argsort(-costs, kind="stable").tolist():
        load, share = heapq.heappop(loads)
        places[share].append(place)
        heapq.heappush(loads, (load + max(float(costs[place]), SMALLEST), share))
    return [np.array(sorted(share), dtype=np.int64) for share in places]


def padded_shares(costs: Costs, shares: int) -> list[Indices]:
    """Places of ``costs`` where a share costs its number of samples times its dearest one: the largest is as small as can be.

    The best division is a contiguous one of the sorted costs; a bisection finds its largest share to six digits.
    """
    order = np.argsort(-costs, kind="stable")
    dearest = costs[order].astype(np.float64)
    low, high = 0.0, dearest[0] * -(-len(dearest) // shares)  # an even division
    cuts = _cuts(dearest, shares, high)
    assert cuts is not None, "fewer samples than shares"
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        found = _cuts(dearest, shares, middle)
        if found is None:
            low = middle
        else:
            high, cuts = middle, found
    return [np.sort(part) for part in np.split(order, cuts)]


def _cuts(dearest: NDArray[np.float64], shares: int, limit: float) -> list[int] | None:
    """Where to cut descending costs into so many shares of at least one sample that none exceeds a limit; None: impossible."""
    cuts: list[int] = []
    begin = 0
    for behind in reversed(range(shares)):
        room = int(limit // dearest[begin]) if dearest[begin] > 0 else len(dearest)
        taken = min(room, len(dearest) - begin - behind)
        if taken < 1:
            return None
        begin += taken
        cuts.append(begin)
    return cuts[:-1] if begin == len(dearest) else None


class Balance:
    """Finds the global batch that a rank's indices are of, and divides it anew. The same samples on any number of ranks.

    ``cost(indices, seed, epoch)`` says what each of these samples costs, in any unit; ``divide`` is a function of this module.
    """

    def __init__(
        self,
        samples: int,
        global_batch_size: int,
        cost: Callable[[Indices, int, int], Costs],
        divide: Callable[[Costs, int], list[Indices]],
    ) -> None:
        self._samples, self._global_batch_size = samples, global_batch_size
        self._cost, self._divide = cost, divide
        self._lock = threading.Lock()
        self._epoch: tuple[int, int] | None = None
        self._order = self._place_of = np.empty(0, dtype=np.int64)

    def share(self, indices: Indices, *, seed: int, epoch: int) -> Indices:
        """What this rank (or this part of its share, where gradients are accumulated) computes of the batch ``indices`` are of.

        The harness gives share s of n every n-th sample of a global batch from place s on (`sampling.train_batches`).
        """
        with self._lock:
            if self._epoch != (seed, epoch):
                self._epoch, self._order = (seed, epoch), epoch_order(self._samples, seed=seed, epoch=epoch)
                self._place_of = np.argsort(self._order)
            order, place = self._order, int(self._place_of[indices[0]])
        number = place % self._global_batch_size
        begin = place - number
        batch = order[begin : begin + self._global_batch_size]
        shares = len(batch) // len(indices)
        assert np.array_equal(indices, batch[number::shares])
        chosen: Indices = batch[self._divide(self._cost(batch, seed, epoch), shares)[number]]
        return chosen
