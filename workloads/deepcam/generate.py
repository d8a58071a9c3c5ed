"""Generates DeepCAM data sets of synthetic weather; the physics is in climate.py, the public data in convert.py.

This is the module the workload's descriptor names: ``generate``, ``convert``, ``export_hdf5`` and ``fetch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from suite.build import Arrays, DataSetPlan, Piece, build
from suite.distributed import World
from workloads.deepcam.climate import Domain, snapshot
from workloads.deepcam.config import CHANNELS, CLASSES
from workloads.deepcam.convert import SPLITS, convert, export_hdf5, fetch
from workloads.deepcam.fields import checked_fields
from workloads.deepcam.summary import Summary, merge, summarise

__all__ = ["SIZES", "DataSize", "convert", "export_hdf5", "fetch", "generate"]

GENERATOR_VERSION = 1
VALIDATION_INDEX = 2**32  # validation snapshots are numbered from here: a larger training split never meets them


@dataclass(frozen=True)
class DataSize:
    """The synthetic data set of one size."""

    domain: Domain
    train_samples: int
    validation_samples: int
    samples_per_shard: int


SIZES: dict[str, DataSize] = {
    "smoke": DataSize(Domain(64, 96, 4, 52, 72, 1.2, 1.4, 1.5, 2, 2, 2), 192, 64, 16),
    "mini": DataSize(Domain(96, 144, 4, 52, 72, 1.2, 1.4, 1.5, 2, 2, 2), 512, 128, 16),
    "small": DataSize(Domain(384, 576, -48, 48, 144, 3, 5, 6, 6, 6, 6), 1_024, 128, 16),
    "full": DataSize(Domain(768, 1152, -90, 90, 360, 0.6, 6, 10, 6, 8, 6), 121_266, 15_158, 8),
}


def generate(
    root: Path, size: str, *, seed: int, world: World, progress: Callable[[int, int], None] | None = None
) -> None:
    """Generate a data set; a complete one is left as it is, an interrupted one is continued.

    ``progress(done, total)`` counts this rank's snapshots. ValueError if the folder holds, or is to hold, other data.
    """
    if size not in SIZES:
        raise ValueError(f"deepcam: unknown size {size!r}; sizes: {', '.join(SIZES)}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed {seed}: expected 0 <= seed < 2^63")
    settings = SIZES[size]
    recipe = {
        "name": "synthetic",
        "version": GENERATOR_VERSION,
        "seed": seed,
        "channels": CHANNELS,
        "classes": CLASSES,
        **asdict(settings),
    }
    plan = _plan(settings)
    total = sum(len(numbers) for _, _, numbers in plan[world.rank :: world.size])
    done = 0

    def count_one() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    pieces = [
        Piece(split, shard, partial(_shard, numbers, settings.domain, seed, count_one))
        for split, shard, numbers in plan
    ]
    build(root, DataSetPlan("deepcam", size, seed, recipe, pieces, summarise, _attributes), world)


def _plan(settings: DataSize) -> list[tuple[str, int, range]]:
    """(split, shard, snapshot numbers) of every shard."""
    step = settings.samples_per_shard
    numbers = (
        range(settings.train_samples),
        range(VALIDATION_INDEX, VALIDATION_INDEX + settings.validation_samples),
    )
    return [
        (split, shard, snapshots[begin : begin + step])
        for split, snapshots in zip(SPLITS, numbers, strict=True)
        for shard, begin in enumerate(range(0, len(snapshots), step))
    ]


def _shard(numbers: range, domain: Domain, seed: int, count_one: Callable[[], None]) -> Arrays:
    x = np.empty((len(numbers), domain.height, domain.width, len(CHANNELS)), dtype=np.float32)
    y = np.empty(x.shape[:3], dtype=np.uint8)
    for position, number in enumerate(numbers):
        fields, y[position] = snapshot(domain, seed, number)
        x[position] = checked_fields(fields, Path(f"snapshot {number}"))
        count_one()
    return {"x": x, "y": y}


def _attributes(summaries: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Input statistics of the training split, as ``stats.h5`` of the public data has them."""
    merged = {split: merge(parts) for split, parts in summaries.items()}
    frequencies = {f"{split}_class_frequencies": list(merged[split].class_frequencies) for split in SPLITS}
    return {"statistics": asdict(merged["train"].statistics), **frequencies}
