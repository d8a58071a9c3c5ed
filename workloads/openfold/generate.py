"""Generates OpenFold data sets of synthetic families; the families are in proteins.py, real files in convert.py.

This is the module the workload's descriptor names: ``generate``, ``convert`` and ``fetch``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from suite.data.build import Arrays, Count, Progress, numbered_pieces, size_settings
from suite.world import World
from workloads.openfold.build import build_proteins
from workloads.openfold.convert import convert, fetch
from workloads.openfold.proteins import Families, families
from workloads.openfold.shard_form import shard_arrays

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 1


@dataclass(frozen=True)
class DataSize:
    """The synthetic data set of one size."""

    families: Families
    train_families: int
    validation_families: int
    families_per_shard: int


SIZES: dict[str, DataSize] = {
    "smoke": DataSize(Families(8, 10, 8, strands_per_helix=2), 1_024, 128, 128),
    "mini": DataSize(Families(20, 24, 16), 1_024, 128, 128),
    "small": DataSize(Families(48, 96, 64, 2), 8_192, 256, 128),
    "full": DataSize(Families(100, 500, 1_200, 4), 594_595, 180, 64),
}


def generate(root: Path, size: str, *, seed: int, world: World, progress: Progress | None = None) -> None:
    """Generate a data set; a complete one is left as it is, an interrupted one is continued.

    ``progress(done, total)`` counts this rank's families. ValueError if the folder holds, or is to hold, other data.
    """
    settings = size_settings("openfold", SIZES, size, seed)
    recipe = {"name": "synthetic", "version": GENERATOR_VERSION, "seed": seed, **asdict(settings)}
    pieces = numbered_pieces(
        settings.train_families,
        settings.validation_families,
        settings.families_per_shard,
        partial(_shard, settings.families, seed),
        world,
        progress,
    )
    build_proteins(root, recipe, pieces, size=size, seed=seed, world=world)


def _shard(settings: Families, seed: int, numbers: range, count: Count) -> Arrays:
    arrays = shard_arrays(families(settings, seed, numbers), list(numbers))
    count(len(numbers))
    return arrays
