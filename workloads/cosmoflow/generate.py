"""Generates CosmoFlow data sets of synthetic universes; the physics is in cosmology.py, the public data in convert.py.

This is the module the workload's descriptor names: ``generate``, ``convert``, ``export_tfrecord`` and ``fetch``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from suite.data.build import Arrays, Count, Progress, numbered_pieces, size_settings
from suite.data.shards import Compression
from suite.world import World
from workloads.cosmoflow.build import build_universes
from workloads.cosmoflow.config import REDSHIFTS, TARGETS
from workloads.cosmoflow.convert import convert, export_tfrecord, fetch, split_cubes
from workloads.cosmoflow.cosmology import Simulation, universe

__all__ = ["SIZES", "DataSize", "convert", "export_tfrecord", "fetch", "generate"]

GENERATOR_VERSION = 1


@dataclass(frozen=True)
class DataSize:
    """The synthetic data set of one size. A universe gives (mesh / cube)^3 samples of cube^3 voxels."""

    simulation: Simulation
    cube: int
    train_universes: int
    validation_universes: int
    universes_per_shard: int
    compression: Compression = "none"


SIZES: dict[str, DataSize] = {
    "smoke": DataSize(Simulation(32, 16, 256.0, "2lpt"), 16, 2_000, 500, 250),
    "mini": DataSize(Simulation(32, 16, 256.0, "2lpt"), 16, 8_000, 1_000, 250),
    "mini32": DataSize(Simulation(64, 32, 512.0, "2lpt"), 32, 2_000, 500, 50),
    "small": DataSize(Simulation(64, 64, 256.0, "cola"), 64, 4_096, 512, 32),
    "full": DataSize(Simulation(512, 512, 512.0, "cola"), 128, 8_192, 1_024, 1, "gzip"),
}


def generate(root: Path, size: str, *, seed: int, world: World, progress: Progress | None = None) -> None:
    """Generate a data set; a complete one is left as it is, an interrupted one is continued.

    ``progress(done, total)`` counts this rank's universes. ValueError if the folder holds, or is to hold, other data.
    """
    settings = size_settings("cosmoflow", SIZES, size, seed)
    recipe = {
        "name": "synthetic",
        "version": GENERATOR_VERSION,
        "seed": seed,
        "redshifts": REDSHIFTS,
        "targets": TARGETS,
        **asdict(settings),
    }
    pieces = numbered_pieces(
        settings.train_universes,
        settings.validation_universes,
        settings.universes_per_shard,
        partial(_shard, settings, seed),
        world,
        progress,
    )
    build_universes(root, recipe, pieces, size=size, seed=seed, compression=settings.compression, world=world)


def _shard(settings: DataSize, seed: int, universes: range, count: Count) -> Arrays:
    cubes = (settings.simulation.mesh // settings.cube) ** 3
    x = np.empty((len(universes) * cubes, *(settings.cube,) * 3, len(REDSHIFTS)), dtype=np.int16)
    y = np.empty((len(x), len(TARGETS)), dtype=np.float32)
    for position, number in enumerate(universes):
        here = slice(position * cubes, (position + 1) * cubes)
        counts, y[here] = universe(settings.simulation, seed, number)
        x[here] = split_cubes(counts, settings.cube)
        count(1)
    return {"x": x, "y": y, "universe": np.repeat(np.array(universes, dtype=np.int64), cubes)}
