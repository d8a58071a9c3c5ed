"""Generates OpenCatalyst data sets of synthetic slabs; the physics is in slabs.py, the public data in convert.py.

This is the module the workload's descriptor names: ``generate``, ``convert`` and ``fetch``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from suite.distributed import World
from suite.shards import MANIFEST_NAME
from workloads.open_catalyst.build import SPLITS, Piece, build
from workloads.open_catalyst.convert import convert, fetch
from workloads.open_catalyst.slabs import ALL_ADSORBATES, ALL_METALS, Surfaces, require_ase, trajectory
from workloads.open_catalyst.structures import Arrays, Neighbourhood, shard_arrays

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 1
VALIDATION_INDEX = 2**32  # validation trajectories are numbered from here: a larger training split never meets them


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


def generate(
    root: Path, size: str, *, seed: int, world: World, progress: Callable[[int, int], None] | None = None
) -> None:
    """Generate a data set; a complete one is left as it is, an interrupted one is continued.

    ``progress(done, total)`` counts this rank's trajectories. ValueError if the folder holds, or is to hold, other data,
    or if ASE is missing.
    """
    if size not in SIZES:
        raise ValueError(f"open_catalyst: unknown size {size!r}; sizes: {', '.join(SIZES)}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed {seed}: expected 0 <= seed < 2^63")
    if not (root / MANIFEST_NAME).exists():
        require_ase()
    settings = SIZES[size]
    recipe = {"name": "synthetic", "version": GENERATOR_VERSION, "seed": seed, **asdict(settings)}
    plan = _plan(settings)
    total = sum(len(numbers) for _, _, numbers in plan[world.rank :: world.size])
    done = 0

    def count_one() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    pieces = [
        Piece(split, shard, partial(_shard, numbers, settings, seed, count_one)) for split, shard, numbers in plan
    ]
    build(root, recipe, pieces, size=size, seed=seed, neighbourhood=settings.neighbourhood, world=world)


def _plan(settings: DataSize) -> list[tuple[str, int, range]]:
    """(split, shard, trajectory numbers) of every shard."""
    step = settings.trajectories_per_shard
    numbers = (
        range(settings.train_trajectories),
        range(VALIDATION_INDEX, VALIDATION_INDEX + settings.validation_trajectories),
    )
    return [
        (split, shard, trajectories[begin : begin + step])
        for split, trajectories in zip(SPLITS, numbers, strict=True)
        for shard, begin in enumerate(range(0, len(trajectories), step))
    ]


def _shard(numbers: range, settings: DataSize, seed: int, count_one: Callable[[], None]) -> Arrays:
    structures = []
    for number in numbers:
        structures += trajectory(settings.surfaces, seed, number)
        count_one()
    where = [f"seed {seed}, trajectory {each.trajectory}, frame {each.frame}" for each in structures]
    return shard_arrays(structures, settings.neighbourhood, where)
