"""What a CosmoFlow data set's manifest must say: input statistics, which universes, and that no split shares one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.data.build import SPLITS, Arrays, DataSetPlan, Piece, build
from suite.data.shards import Compression
from suite.world import World


def build_universes(
    root: Path,
    recipe: dict[str, Any],
    pieces: Sequence[Piece],
    *,
    size: str,
    seed: int,
    compression: Compression,
    world: World,
) -> None:
    """Write a data set whose pieces give x (N, n, n, n, 4) int16, y (N, 4) float32 and universe (N,) int64.

    ValueError on every rank if the folder holds other data, a shard cannot be made, or a universe is in both splits.
    """
    plan = DataSetPlan("cosmoflow", size, seed, recipe, pieces, _summarise, _attributes, compression)
    build(root, plan, world)


def input_statistics(histograms: Sequence[NDArray[np.int64]]) -> dict[str, list[float]]:
    """Mean and standard deviation of log1p(counts) per channel, from `histogram`s."""
    total = np.zeros((histograms[0].shape[0], max(each.shape[1] for each in histograms)))
    for each in histograms:
        total[:, : each.shape[1]] += each
    value = np.log1p(np.arange(total.shape[1]))
    voxels = total.sum(axis=1)
    mean = total @ value / voxels
    variance = total @ value**2 / voxels - mean**2
    return {"log1p_mean": mean.tolist(), "log1p_std": np.sqrt(variance).tolist()}


def histogram(counts: NDArray[np.int16]) -> NDArray[np.int64]:
    """Voxels per (channel, count): whole numbers, so that sums do not depend on the order of shards."""
    channels = counts.reshape(-1, counts.shape[-1])
    return np.stack([np.bincount(channels[:, c], minlength=int(counts.max()) + 1) for c in range(channels.shape[1])])


@dataclass(frozen=True)
class _Summary:
    samples: int
    sample_shape: tuple[int, ...]
    histogram: NDArray[np.int64]
    universes: frozenset[int]


def _summarise(arrays: Arrays) -> _Summary:
    x = arrays["x"]
    return _Summary(len(x), x.shape[1:], histogram(x), frozenset(arrays["universe"].tolist()))


def _attributes(splits: Mapping[str, Sequence[_Summary]]) -> dict[str, Any]:
    universes = {split: frozenset().union(*(shard.universes for shard in splits[split])) for split in SPLITS}
    shared = universes["train"] & universes["validation"]
    if shared:
        raise ValueError(
            f"universe {min(shared)} is in both splits, with {len(shared) - 1} more: its targets would leak"
        )
    samples = sum(shard.samples for split in SPLITS for shard in splits[split])
    return {
        "sample_shape": list(splits["train"][0].sample_shape),
        "periodic": samples == sum(map(len, universes.values())),  # a sample is a whole box, not a cube out of one
        **{f"{split}_universes": len(universes[split]) for split in SPLITS},
        **input_statistics([shard.histogram for shard in splits["train"]]),
    }
