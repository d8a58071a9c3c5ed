"""Generates OpenCatalyst data sets of synthetic slabs; the physics is in slabs.py, the public data in convert.py.

This is the module the workload's descriptor names: ``generate``, ``convert`` and ``fetch``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from suite.data.build import Arrays, Count, Progress, numbered_pieces, size_settings
from suite.data.shards import MANIFEST_NAME
from suite.world import World
from workloads.open_catalyst.build import build_structures
from workloads.open_catalyst.convert import convert, fetch
from workloads.open_catalyst.slabs import ALL_ADSORBATES, ALL_METALS, Surfaces, require_ase, trajectory
from workloads.open_catalyst.structures import Neighbourhood, shard_arrays

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 1


@dataclass(frozen=True)
class DataSize:
    """The synthetic data set of one size. A trajectory gives ``surfaces.frames`` samples."""

    surfaces: Surfaces
    neighbourhood: Neighbourhood
    train_trajectories: int
    validation_trajectories: int
    trajectories_per_shard: int


_TOY = Neighbourhood(4.5, 20)
_REFERENCE = Neighbourhood(6.0, 50)
_LARGE = ((3, 3, 4), (4, 4, 4), (4, 4, 5), (4, 5, 4))  # 36 to 80 metal atoms; OC20 has 20 to 200

SIZES: dict[str, DataSize] = {
    "smoke": DataSize(Surfaces(("Cu", "Pt"), ("H", "O", "CO"), ((2, 2, 3),), 1), _TOY, 120, 40, 20),
    "mini": DataSize(Surfaces(ALL_METALS, ALL_ADSORBATES, ((2, 2, 3),), 1), _TOY, 560, 140, 20),
    "small": DataSize(
        Surfaces(ALL_METALS, ALL_ADSORBATES, ((2, 2, 4), (3, 3, 3), (3, 3, 4)), 2), _REFERENCE, 12_500, 1_000, 250
    ),
    "full": DataSize(Surfaces(ALL_METALS, ALL_ADSORBATES, _LARGE, 2), _REFERENCE, 500_000, 250_000, 2_500),
}


def generate(root: Path, size: str, *, seed: int, world: World, progress: Progress | None = None) -> None:
    """Generate a data set; a complete one is left as it is, an interrupted one is continued.

    ``progress(done, total)`` counts this rank's trajectories. ValueError if the folder holds, or is to hold, other data,
    or if ASE is missing.
    """
    settings = size_settings("open_catalyst", SIZES, size, seed)
    if not (root / MANIFEST_NAME).exists():
        require_ase()
    recipe = {"name": "synthetic", "version": GENERATOR_VERSION, "seed": seed, **asdict(settings)}
    pieces = numbered_pieces(
        settings.train_trajectories,
        settings.validation_trajectories,
        settings.trajectories_per_shard,
        partial(_shard, settings, seed),
        world,
        progress,
    )
    build_structures(root, recipe, pieces, size=size, seed=seed, neighbourhood=settings.neighbourhood, world=world)


def _shard(settings: DataSize, seed: int, numbers: range, count: Count) -> Arrays:
    structures = []
    for number in numbers:
        structures += trajectory(settings.surfaces, seed, number)
        count(1)
    where = [f"seed {seed}, trajectory {each.trajectory}, frame {each.frame}" for each in structures]
    return shard_arrays(structures, settings.neighbourhood, where)
