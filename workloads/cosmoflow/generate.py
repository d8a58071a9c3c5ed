"""Generates CosmoFlow data sets of synthetic universes; the physics is in cosmology.py, the public data in convert.py.

This is the module the workload's descriptor names: ``generate``, ``convert``, ``export_tfrecord`` and ``fetch``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from suite.distributed import World
from suite.shards import Compression
from workloads.cosmoflow.build import SPLITS, Arrays, Piece, build_universes
from workloads.cosmoflow.config import REDSHIFTS, TARGETS
from workloads.cosmoflow.convert import convert, export_tfrecord, fetch, split_cubes
from workloads.cosmoflow.cosmology import Simulation, universe

__all__ = ["SIZES", "DataSize", "convert", "export_tfrecord", "fetch", "generate"]

GENERATOR_VERSION = 1
VALIDATION_INDEX = 2**32  # validation universes are numbered from here: a larger training split never meets them


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


def generate(
    root: Path, size: str, *, seed: int, world: World, progress: Callable[[int, int], None] | None = None
) -> None:
    """Generate a data set; a complete one is left as it is, an interrupted one is continued.

    ``progress(done, total)`` counts this rank's universes. ValueError if the folder holds, or is to hold, other data.
    """
    if size not in SIZES:
        raise ValueError(f"cosmoflow: unknown size {size!r}; sizes: {', '.join(SIZES)}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed {seed}: expected 0 <= seed < 2^63")
    settings = SIZES[size]
    recipe = {
        "name": "synthetic",
        "version": GENERATOR_VERSION,
        "seed": seed,
        "redshifts": REDSHIFTS,
        "targets": TARGETS,
        **asdict(settings),
    }
    plan = _plan(settings)
    total = sum(len(universes) for _, _, universes in plan[world.rank :: world.size])
    done = 0

    def count_one() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    pieces = [
        Piece(split, shard, partial(_shard, universes, settings, seed, count_one)) for split, shard, universes in plan
    ]
    build_universes(root, recipe, pieces, size=size, seed=seed, compression=settings.compression, world=world)


def _plan(settings: DataSize) -> list[tuple[str, int, range]]:
    """(split, shard, universe numbers) of every shard."""
    step = settings.universes_per_shard
    numbers = (
        range(settings.train_universes),
        range(VALIDATION_INDEX, VALIDATION_INDEX + settings.validation_universes),
    )
    return [
        (split, shard, universes[begin : begin + step])
        for split, universes in zip(SPLITS, numbers, strict=True)
        for shard, begin in enumerate(range(0, len(universes), step))
    ]


def _shard(universes: range, settings: DataSize, seed: int, count_one: Callable[[], None]) -> Arrays:
    cubes = (settings.simulation.mesh // settings.cube) ** 3
    x = np.empty((len(universes) * cubes, *(settings.cube,) * 3, len(REDSHIFTS)), dtype=np.int16)
    y = np.empty((len(x), len(TARGETS)), dtype=np.float32)
    for position, number in enumerate(universes):
        here = slice(position * cubes, (position + 1) * cubes)
        counts, y[here] = universe(settings.simulation, seed, number)
        x[here] = split_cubes(counts, settings.cube)
        count_one()
    return {"x": x, "y": y, "universe": np.repeat(np.array(universes, dtype=np.int64), cubes)}
