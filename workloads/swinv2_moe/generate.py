"""Generates data sets of snapshots; the physics is in processes.py. There are no public data to convert or fetch.

This is the module the workload's descriptor names: ``generate``, ``convert`` and ``fetch``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from suite.data.build import Arrays, Count, DataSetPlan, Progress, build, numbered_pieces, size_settings
from suite.world import World
from workloads.swinv2_moe.config import CLASSES
from workloads.swinv2_moe.processes import snapshot

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 1


@dataclass(frozen=True)
class DataSize:
    """The data set of one size: square images, all classes equally often."""

    pixels: int
    train_samples: int
    validation_samples: int
    samples_per_shard: int
    classes: tuple[str, ...] = CLASSES


SIZES: dict[str, DataSize] = {
    "smoke": DataSize(32, 1_000, 400, 100, ("scale_free", "allen_cahn")),
    "mini": DataSize(48, 4_000, 1_000, 250),
    "small": DataSize(96, 60_000, 5_000, 500),
    "full": DataSize(192, 400_000, 10_000, 500),
}


def generate(root: Path, size: str, *, seed: int, world: World, progress: Progress | None = None) -> None:
    """Generate a data set; a complete one is left as it is, an interrupted one is continued.

    ``progress(done, total)`` counts this rank's images. ValueError if the folder holds, or is to hold, other data.
    """
    settings = size_settings("swinv2_moe", SIZES, size, seed)
    recipe = {"name": "processes", "version": GENERATOR_VERSION, "seed": seed, **asdict(settings)}
    pieces = numbered_pieces(
        settings.train_samples,
        settings.validation_samples,
        settings.samples_per_shard,
        partial(_shard, settings, seed),
        world,
        progress,
    )
    counts, attributes = partial(_counts, len(settings.classes)), partial(_attributes, settings.classes)
    build(root, DataSetPlan("swinv2_moe", size, seed, recipe, pieces, counts, attributes), world)


def convert(source: Path, root: Path, *, world: World, size: str | None = None) -> None:
    """ValueError: there is nothing to convert."""
    raise ValueError("swinv2_moe has no public data to convert: mlhpc data generate swinv2_moe --size SIZE")


def fetch(destination: Path, *, source: str | None = None) -> None:
    """ValueError: there is nothing to fetch."""
    raise ValueError("swinv2_moe has no public data to fetch: mlhpc data generate swinv2_moe --size SIZE")


def _shard(settings: DataSize, seed: int, numbers: range, count: Count) -> Arrays:
    pixels = settings.pixels
    image = np.empty((len(numbers), pixels, pixels), dtype=np.uint8)
    label = np.empty(len(numbers), dtype=np.uint8)
    for position, number in enumerate(numbers):
        image[position], label[position] = snapshot(seed, number, pixels, settings.classes)
        count(1)
    return {"image": image, "label": label}


def _counts(classes: int, arrays: Arrays) -> list[int]:
    """Samples per class."""
    return np.bincount(arrays["label"], minlength=classes).tolist()  # type: ignore[no-any-return]


def _attributes(classes: Sequence[str], summaries: Mapping[str, Sequence[list[int]]]) -> dict[str, Any]:
    per_class = {f"{split}_per_class": np.sum(parts, axis=0).tolist() for split, parts in summaries.items()}
    return {"classes": list(classes), "periodic": True, **per_class}
