"""Generates CosmoFlow data sets of simulated universes (cosmology.py).

convert.py reads the public data. The workload's descriptor names this module, so it also offers ``convert`` and
``fetch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from mlhpc.suite.data.build import Arrays, Count, Generator, Synthetic
from mlhpc.suite.data.shards import Compression
from mlhpc.workloads.cosmoflow.config import REDSHIFTS, TARGETS
from mlhpc.workloads.cosmoflow.convert import Summary, compute_attributes, convert, fetch, split_cubes, summarise
from mlhpc.workloads.cosmoflow.cosmology import Simulation, make_universe

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 3  # raised when the same seed gives other data


@dataclass(frozen=True)
class DataSize:
    """The synthetic data set of one size. A universe gives (mesh / cube)^3 samples of cube^3 voxels."""

    simulation: Simulation
    cube: int
    train_universes: int
    validation_universes: int
    universes_per_shard: int
    compression: Compression = "none"


# simulation, side of a sample, training and validation universes, universes per shard;
# full: the box, the voxels of 1 Mpc/h and the numbers of samples of the public data (524,288 + 65,536)
SIZES: dict[str, DataSize] = {
    "smoke": DataSize(Simulation(16, 16, 128.0, "cola4", "float64", points=8), 16, 2_000, 1_000, 250),
    "mini": DataSize(Simulation(32, 32, 256.0, "cola4", "float64"), 32, 2_000, 500, 50),
    "small": DataSize(Simulation(64, 64, 256.0, "cola10"), 64, 4_096, 512, 32),
    "full": DataSize(Simulation(512, 512, 512.0, "cola10"), 128, 8_192, 1_024, 1, "gzip"),
}


def _shard(settings: DataSize, seed: int, universes: range, count: Count) -> Arrays:
    cubes = (settings.simulation.mesh // settings.cube) ** 3
    x = np.empty((len(universes) * cubes, *(settings.cube,) * 3, len(REDSHIFTS)), dtype=np.int16)
    y = np.empty((len(x), len(TARGETS)), dtype=np.float32)
    for position, number in enumerate(universes):
        here = slice(position * cubes, (position + 1) * cubes)
        counts, y[here] = make_universe(settings.simulation, seed, number)
        x[here] = split_cubes(counts, settings.cube)
        count(1)
    return {"x": x, "y": y, "universe": np.repeat(np.array(universes, dtype=np.int64), cubes)}


def _universes(settings: DataSize, seed: int) -> Synthetic[Summary]:
    return Synthetic(
        settings.train_universes,
        settings.validation_universes,
        settings.universes_per_shard,
        partial(_shard, settings, seed),
        summarise,
        compute_attributes,
        settings.compression,
    )


generate = Generator("cosmoflow", GENERATOR_VERSION, SIZES, _universes, constants={"redshifts": REDSHIFTS}).generate
