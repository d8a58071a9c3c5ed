"""The manifest attributes of a CosmoFlow data set, computed from a summary of each shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.data.build import SPLITS, Arrays, check_disjoint
from mlhpc.workloads.cosmoflow.config import TARGETS

STATISTICS_DIGITS = 10  # of input statistics: sums in another order, on another processor, differ after the fifteenth


@dataclass(frozen=True)
class Summary:
    """One shard. ``histogram`` is that of `compute_histogram`, ``universes`` the numbers of its universes."""

    samples: int
    sample_shape: tuple[int, ...]
    histogram: NDArray[np.int64]
    universes: frozenset[int]


def summarise(arrays: Arrays) -> Summary:
    """Summarise a shard of x (N, n, n, n, 4) int16, y (N, 4) float32 and universe (N,) int64."""
    x = arrays["x"]
    return Summary(len(x), x.shape[1:], compute_histogram(x), frozenset(arrays["universe"].tolist()))


def compute_attributes(splits: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Sample shape, names of the targets, number of universes per split, input statistics of the training split.

    ValueError if a universe is in both splits.
    """
    universes = {split: frozenset().union(*(shard.universes for shard in splits[split])) for split in SPLITS}
    check_disjoint(universes, "universe", "its targets")
    samples = sum(shard.samples for split in SPLITS for shard in splits[split])
    return {
        "sample_shape": list(splits["train"][0].sample_shape),
        "targets": list(TARGETS),
        # one sample per universe: it is the whole periodic box, not a cube cut from it
        "periodic": samples == sum(map(len, universes.values())),
        **{f"{split}_universes": len(universes[split]) for split in SPLITS},
        **compute_input_statistics([shard.histogram for shard in splits["train"]]),
    }


def compute_input_statistics(histograms: Sequence[NDArray[np.int64]]) -> dict[str, list[float]]:
    """Compute mean and standard deviation of log1p(counts) per channel from the histograms of the shards."""
    total = np.zeros((histograms[0].shape[0], max(each.shape[1] for each in histograms)))
    for each in histograms:
        # a shard's histogram ends at its own largest count
        total[:, : each.shape[1]] += each
    value = np.log1p(np.arange(total.shape[1]))
    voxels = total.sum(axis=1)
    mean = total @ value / voxels
    variance = total @ value**2 / voxels - mean**2
    rounded = (np.round(each, STATISTICS_DIGITS).tolist() for each in (mean, np.sqrt(variance)))
    return dict(zip(("log1p_mean", "log1p_std"), rounded, strict=True))


def compute_histogram(counts: NDArray[np.int16]) -> NDArray[np.int64]:
    """Count voxels per (channel, count). Integers, so that their sums do not depend on the order of the shards."""
    channels = counts.reshape(-1, counts.shape[-1])
    return np.stack([np.bincount(channels[:, c], minlength=int(counts.max()) + 1) for c in range(channels.shape[1])])
