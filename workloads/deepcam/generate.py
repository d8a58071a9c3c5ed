"""Generates DeepCAM data sets of synthetic weather. climate.py has the physics, convert.py reads the public data.

The workload's descriptor names this module, so it also offers ``convert`` and ``fetch``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlhpc.suite.data.build import SPLITS, Arrays, Count
from mlhpc.suite.data.generate import Generator, Synthetic
from mlhpc.workloads.deepcam.climate import Domain, make_snapshot
from mlhpc.workloads.deepcam.config import CHANNELS, CLASSES
from mlhpc.workloads.deepcam.convert import convert, fetch
from mlhpc.workloads.deepcam.fields import check_fields
from mlhpc.workloads.deepcam.summary import Summary, merge, summarise

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 1  # raised when the same seed gives other data


@dataclass(frozen=True)
class DataSize:
    """The synthetic data set of one size."""

    domain: Domain
    train_samples: int
    validation_samples: int
    samples_per_shard: int


# height, width, south, north, degrees east, mean numbers of events and decoys in the order of `Domain`;
# training and validation samples, samples per shard. full: the shape and numbers of the public data
SIZES: dict[str, DataSize] = {
    "smoke": DataSize(Domain(64, 96, 4, 52, 72, 1.2, 1.4, 1.5, 2, 2, 2), 384, 128, 16),
    "mini": DataSize(Domain(96, 144, 4, 52, 72, 1.2, 1.4, 1.5, 2, 2, 2), 512, 128, 16),
    "small": DataSize(Domain(384, 576, -48, 48, 144, 3, 5, 6, 6, 6, 6), 1_024, 128, 16),
    "full": DataSize(Domain(768, 1152, -90, 90, 360, 0.6, 6, 10, 6, 8, 6), 121_266, 15_158, 8),
}


def _shard(domain: Domain, seed: int, numbers: range, count: Count) -> Arrays:
    x = np.empty((len(numbers), domain.height, domain.width, len(CHANNELS)), dtype=np.float32)
    y = np.empty(x.shape[:3], dtype=np.uint8)
    for position, number in enumerate(numbers):
        fields, y[position] = make_snapshot(domain, seed, number)
        x[position] = check_fields(fields, Path(f"snapshot {number}"))
        count(1)
    return {"x": x, "y": y}


def _attributes(summaries: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Return input statistics of the training split, as in the public ``stats.h5``, and both splits' frequencies."""
    merged = {split: merge(parts) for split, parts in summaries.items()}
    frequencies = {f"{split}_class_frequencies": list(merged[split].class_frequencies) for split in SPLITS}
    return {"statistics": asdict(merged["train"].statistics), **frequencies}


def _snapshots(settings: DataSize, seed: int) -> Synthetic[Summary]:
    return Synthetic(
        settings.train_samples,
        settings.validation_samples,
        settings.samples_per_shard,
        partial(_shard, settings.domain, seed),
        summarise,
        _attributes,
    )


generate = Generator(
    "deepcam", GENERATOR_VERSION, SIZES, _snapshots, constants={"channels": CHANNELS, "classes": CLASSES}
).generate
