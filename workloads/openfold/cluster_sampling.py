"""Draws training chains with replacement, weighted by length and cluster size, in the reference's order.

AlphaFold 2's supplement 1.2.5. The n-th sample of a run is the n-th draw, whatever the number of ranks.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlhpc.suite.data.sampling import compute_epoch_order

SAMPLING, BY_CLUSTER = "train_sampling", "by cluster, with replacement"  # attribute of a data set, and its value
SHORTEST, LONGEST = 256, 512  # residues: weights rise between these


def compute_weights(lengths: NDArray[np.integer[Any]], clusters: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Compute each chain's weight: its length, clipped, over 512, over the square root of its cluster's size."""
    _, number, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    result: NDArray[np.float64] = np.clip(lengths, SHORTEST, LONGEST) / LONGEST * (1 / np.sqrt(sizes[number]))
    return result


class ClusterSampling:
    """Says which chain stands at each place of an epoch's order. A function of seed and epoch; threads may share it."""

    def __init__(self, chain_weights: NDArray[np.float64], global_batch_size: int) -> None:
        self._weights = torch.from_numpy(chain_weights)
        self._steps = len(chain_weights) // global_batch_size
        self._batch = global_batch_size
        self._lock = threading.Lock()
        self._epoch: tuple[int, int] | None = None
        self._chains = np.empty(0, np.int64)

    def chains(self, places: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Look up the chain that is drawn for each of the harness's indices in an epoch."""
        with self._lock:
            if self._epoch != (seed, epoch):
                self._epoch, self._chains = (seed, epoch), self._draw(seed, epoch)
            drawn: NDArray[np.int64] = self._chains[places]
        return drawn

    def _draw(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Draw a chain for every index of an epoch.

        The k-th sample that the harness hands out in the run is the k-th draw.
        """
        samples = len(self._weights)
        before = (epoch - 1) * self._steps * self._batch
        generator = torch.Generator().manual_seed(seed)
        # drawn from the first epoch on, so that these follow the draws of the epochs before
        draws = torch.multinomial(self._weights, before + samples, replacement=True, generator=generator).numpy()
        chains = np.empty(samples, np.int64)
        chains[compute_epoch_order(samples, seed=seed, epoch=epoch)] = draws[before:]
        return chains
