"""Generates OpenCatalyst data sets of synthetic slabs. slabs.py has the physics, convert.py reads the public data.

The workload's descriptor names this module, so it also offers ``convert`` and ``fetch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mlhpc.suite.data.build import Arrays, Count, Generator, Synthetic
from mlhpc.workloads.open_catalyst.convert import Summary, compute_attributes, convert, fetch, summarise
from mlhpc.workloads.open_catalyst.structures import (
    ALL_ADSORBATES,
    ALL_METALS,
    Neighbourhood,
    Surfaces,
    build_shard_arrays,
    make_trajectory,
    verify_ase,
)

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 1  # raised when the same seed gives other data


@dataclass(frozen=True)
class DataSize:
    """The synthetic data set of one size. Each trajectory gives ``surfaces.frames`` samples."""

    surfaces: Surfaces
    neighbourhood: Neighbourhood
    train_trajectories: int
    validation_trajectories: int
    trajectories_per_shard: int


_SMALL = Neighbourhood(4.5, 20)
_REFERENCE = Neighbourhood(6.0, 50)
_LARGE = ((3, 3, 4), (4, 4, 4), (4, 4, 5), (4, 5, 4))  # 36 to 80 metal atoms; OC20 has 20 to 200

# surfaces, neighbourhood, training and validation trajectories, trajectories per shard
SIZES: dict[str, DataSize] = {
    "smoke": DataSize(Surfaces(("Cu", "Pt"), ("H", "O", "CO"), ((2, 2, 3),), 1), _SMALL, 240, 80, 20),
    "mini": DataSize(Surfaces(ALL_METALS, ALL_ADSORBATES, ((2, 2, 3),), 1), _SMALL, 560, 140, 20),
    "small": DataSize(
        Surfaces(ALL_METALS, ALL_ADSORBATES, ((2, 2, 4), (3, 3, 3), (3, 3, 4)), 2), _REFERENCE, 12_500, 1_000, 250
    ),
    "full": DataSize(Surfaces(ALL_METALS, ALL_ADSORBATES, _LARGE, 2), _REFERENCE, 500_000, 250_000, 2_500),
}


def _shard(settings: DataSize, seed: int, numbers: range, count: Count) -> Arrays:
    structures = []
    for number in numbers:
        structures += make_trajectory(settings.surfaces, seed, number)
        count(1)
    where = [f"seed {seed}, trajectory {each.trajectory}, frame {each.frame}" for each in structures]
    return build_shard_arrays(structures, settings.neighbourhood, where)


def _trajectories(settings: DataSize, seed: int) -> Synthetic[Summary]:
    return Synthetic(
        settings.train_trajectories,
        settings.validation_trajectories,
        settings.trajectories_per_shard,
        partial(_shard, settings, seed),
        summarise,
        partial(compute_attributes, settings.neighbourhood),
    )


generate = Generator("open_catalyst", GENERATOR_VERSION, SIZES, _trajectories, check_tools=verify_ase).generate
