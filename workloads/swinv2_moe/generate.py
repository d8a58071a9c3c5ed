"""Generates SwinV2-MoE data sets of snapshots. processes.py has the physics; there are no public data.

The workload's descriptor names this module, so it also has ``convert`` and ``fetch``, which refuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlhpc.suite.data.build import Arrays, Count, Progress
from mlhpc.suite.data.generate import Generator, Synthetic
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.swinv2_moe.config import CLASSES
from mlhpc.workloads.swinv2_moe.processes import AT_ONCE, make_snapshots

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 2  # raised when the same seed gives other data


@dataclass(frozen=True)
class DataSize:
    """The data set of one size: square images, equally many of each class."""

    pixels: int
    train_samples: int
    validation_samples: int
    samples_per_shard: int


# pixels, training and validation samples, samples per shard
SIZES: dict[str, DataSize] = {
    "smoke": DataSize(32, 1_000, 800, 100),
    "mini": DataSize(48, 2_000, 1_000, 250),
    "small": DataSize(96, 60_000, 5_000, 500),
    "full": DataSize(192, 400_000, 10_000, 500),
}


def convert(
    source: Path, root: Path, *, world: World, size: str | None = None, progress: Progress | None = None
) -> None:
    """Always raise InputError: there are no public data to convert."""
    raise InputError(
        "swinv2_moe has no public data to convert; generate them: mlhpc data generate swinv2_moe --size SIZE"
    )


def fetch(destination: Path, *, source: str | None = None) -> None:
    """Always raise InputError: there are no public data to fetch."""
    raise InputError(
        "swinv2_moe has no public data to fetch; generate them: mlhpc data generate swinv2_moe --size SIZE"
    )


def _shard(settings: DataSize, seed: int, numbers: range, count: Count) -> Arrays:
    parts, at_once = [], max(1, AT_ONCE // settings.pixels**2)
    for first in range(0, len(numbers), at_once):
        some = numbers[first : first + at_once]
        parts.append(make_snapshots(seed, some, settings.pixels))
        count(len(some))
    image, label = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return {"image": image, "label": label}


def _count_samples(arrays: Arrays) -> list[int]:
    return np.bincount(arrays["label"], minlength=len(CLASSES)).tolist()  # type: ignore[no-any-return]


def _attributes(summaries: Mapping[str, Sequence[list[int]]]) -> dict[str, Any]:
    per_class = {f"{split}_per_class": np.sum(parts, axis=0).tolist() for split, parts in summaries.items()}
    return {"classes": list(CLASSES), "periodic": True, **per_class}


def _snapshots(settings: DataSize, seed: int) -> Synthetic[list[int]]:
    return Synthetic(
        settings.train_samples,
        settings.validation_samples,
        settings.samples_per_shard,
        partial(_shard, settings, seed),
        _count_samples,
        _attributes,
    )


generate = Generator("swinv2_moe", GENERATOR_VERSION, SIZES, _snapshots, name="processes").generate
