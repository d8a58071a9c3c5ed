"""Summaries of DeepCAM shards, which add up to the statistics in the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.data.build import Arrays
from mlhpc.workloads.deepcam.config import CHANNELS, CLASSES
from mlhpc.workloads.deepcam.fields import Statistics

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Summary:
    """Counts of snapshots and pixels; per channel sums over pixels and extremes; ``classes``: pixels per class."""

    snapshots: int
    pixels: int
    sums: Numbers
    squares: Numbers
    lowest: Numbers
    highest: Numbers
    classes: NDArray[np.int64]

    @property
    def statistics(self) -> Statistics:
        """Return the statistics in the form of ``stats.h5``."""
        return Statistics(
            count=self.snapshots,
            mean=tuple((self.sums / self.pixels).tolist()),
            sqmean=tuple((self.squares / self.pixels).tolist()),
            minval=tuple(self.lowest.tolist()),
            maxval=tuple(self.highest.tolist()),
        )

    @property
    def class_frequencies(self) -> tuple[float, ...]:
        """Return the fraction of the pixels in each class."""
        return tuple((self.classes / self.pixels).tolist())


def summarise(arrays: Arrays) -> Summary:
    """Summarise one shard, x (N, H, W, C) and y (N, H, W). Channel sums are accumulated in float64."""
    samples = [sample.reshape(-1, len(CHANNELS)) for sample in arrays["x"]]
    return Summary(
        snapshots=len(arrays["y"]),
        pixels=arrays["y"].size,
        sums=np.sum([sample.sum(axis=0, dtype=np.float64) for sample in samples], axis=0),
        squares=np.sum([np.einsum("pc,pc->c", sample, sample, dtype=np.float64) for sample in samples], axis=0),
        lowest=np.min([sample.min(axis=0) for sample in samples], axis=0).astype(np.float64),
        highest=np.max([sample.max(axis=0) for sample in samples], axis=0).astype(np.float64),
        classes=np.bincount(arrays["y"].ravel(), minlength=len(CLASSES)).astype(np.int64),
    )


def merge(parts: Sequence[Summary]) -> Summary:
    """Add up summaries in the order of the shards. So the result does not depend on the number of ranks."""
    return Summary(
        snapshots=sum(part.snapshots for part in parts),
        pixels=sum(part.pixels for part in parts),
        sums=np.sum([part.sums for part in parts], axis=0),
        squares=np.sum([part.squares for part in parts], axis=0),
        lowest=np.min([part.lowest for part in parts], axis=0),
        highest=np.max([part.highest for part in parts], axis=0),
        classes=np.sum([part.classes for part in parts], axis=0),
    )
