"""Generates SwinV2-MoE data sets of process snapshots. processes.py has the physics; there are no public data.

The workload's descriptor names this module, so it also has ``convert`` and ``fetch``, which refuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from suite.data.build import Arrays, Count, Progress
from suite.data.generate import Generator, Synthetic
from suite.errors import InputError
from suite.world import World
from workloads.swinv2_moe.config import CLASSES
from workloads.swinv2_moe.processes import make_snapshot

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 1  # raised when the same seed gives other data


@dataclass(frozen=True)
class DataSize:
    """The data set of one size: square images, equally many of each class."""

    pixels: int
    train_samples: int
    validation_samples: int
    samples_per_shard: int
    classes: tuple[str, ...] = CLASSES


# pixels, training and validation samples, samples per shard
SIZES: dict[str, DataSize] = {
    "smoke": DataSize(32, 1_000, 400, 100, ("scale_free", "allen_cahn")),
    "mini": DataSize(48, 4_000, 1_000, 250),
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
    pixels = settings.pixels
    image = np.empty((len(numbers), pixels, pixels), dtype=np.uint8)
    label = np.empty(len(numbers), dtype=np.uint8)
    for position, number in enumerate(numbers):
        image[position], label[position] = make_snapshot(seed, number, pixels, settings.classes)
        count(1)
    return {"image": image, "label": label}


def _count_samples(classes: int, arrays: Arrays) -> list[int]:
    return np.bincount(arrays["label"], minlength=classes).tolist()  # type: ignore[no-any-return]


def _attributes(classes: Sequence[str], summaries: Mapping[str, Sequence[list[int]]]) -> dict[str, Any]:
    per_class = {f"{split}_per_class": np.sum(parts, axis=0).tolist() for split, parts in summaries.items()}
    return {"classes": list(classes), "periodic": True, **per_class}


def _snapshots(settings: DataSize, seed: int) -> Synthetic[list[int]]:
    return Synthetic(
        settings.train_samples,
        settings.validation_samples,
        settings.samples_per_shard,
        partial(_shard, settings, seed),
        partial(_count_samples, len(settings.classes)),
        partial(_attributes, settings.classes),
    )


generate = Generator("swinv2_moe", GENERATOR_VERSION, SIZES, _snapshots, name="processes").generate
