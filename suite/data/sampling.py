"""Computes the samples of each rank and step: pure functions of (n, seed, epoch, rank, size).

The order of an epoch is one permutation of all samples, the same on every rank. A global batch is a contiguous piece of
it. Rank r takes every size-th sample of the piece, from r on. So global batches do not depend on the number of ranks.
Samples are neither repeated nor padded.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError


def compute_epoch_order(n: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the permutation of 0..n-1 for an epoch (1-based)."""
    # Philox is counter-based: any epoch's order follows from its key without the orders before it.
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(n)


def draws(seed: int, epoch: int, indices: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Draw one 64-bit number per sample from (seed, epoch, index): SplitMix64 (doi:10.1145/2660193.2660195)."""
    value = np.zeros(len(indices), dtype=np.uint64)
    # The constants are those of SplitMix64; each part is mixed in before the next.
    for part in (seed, epoch, indices):
        value = value ^ np.asarray(part).astype(np.uint64)
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value = value ^ (value >> np.uint64(31))
    return value


def count_steps_per_epoch(n: int, global_batch_size: int) -> int:
    """Count the full global batches in an epoch. InputError if there is none.

    Fewer samples than a batch are left over. They differ from epoch to epoch, because the orders do.
    """
    if n < global_batch_size:
        raise InputError(f"global_batch_size {global_batch_size} exceeds the {n} training samples; set at most {n}")
    return n // global_batch_size


def check_batch(global_batch_size: int, ranks: int, accumulation: int = 1) -> None:
    """Raise InputError unless a global batch divides evenly over all ranks and all their accumulation steps."""
    parts = ranks * accumulation
    if global_batch_size % parts:
        below = global_batch_size // parts * parts
        batches = [batch for batch in (below, below + parts) if batch > 0]
        fitting = [n for n in range(1, global_batch_size + 1) if global_batch_size % (n * accumulation) == 0]
        near = [n for n in fitting if n < ranks][-1:] + [n for n in fitting if n > ranks][:1]
        steps = f" in {accumulation} accumulation steps" if accumulation > 1 else ""
        raise InputError(
            f"global_batch_size {global_batch_size} cannot be split evenly over {ranks} ranks{steps}; "
            f"nearest batch that can: {' or '.join(map(str, batches))}"
            + (f"; nearest number of ranks: {' or '.join(map(str, near))}" if near else "")
        )


def list_train_batches(
    n: int, global_batch_size: int, *, seed: int, epoch: int, rank: int, size: int, first_step: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Yield this rank's sample indices for each step of an epoch, from ``first_step`` on (for a resumed run)."""
    order = compute_epoch_order(n, seed=seed, epoch=epoch)
    for step in range(first_step, count_steps_per_epoch(n, global_batch_size)):
        yield order[step * global_batch_size + rank : (step + 1) * global_batch_size : size]


def list_eval_batches(n: int, batch_size: int, *, rank: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Yield this rank's evaluation samples in batches of at most ``batch_size``.

    Over all ranks each of 0..n-1 occurs once.
    """
    mine = np.arange(rank, n, size, dtype=np.int64)
    for begin in range(0, len(mine), batch_size):
        yield mine[begin : begin + batch_size]
