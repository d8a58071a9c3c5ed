"""Generates OpenFold data sets of synthetic families; the families are in proteins.py, real files in convert.py.

This is the module the workload's descriptor names: ``generate``, ``convert`` and ``fetch``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from suite.distributed import World
from workloads.openfold.build import SPLITS, Arrays, Piece, build_proteins
from workloads.openfold.convert import convert, fetch
from workloads.openfold.proteins import Families, families
from workloads.openfold.shard_form import shard_arrays

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 1
VALIDATION_INDEX = 2**32  # validation families are numbered from here: a larger training split never meets them


@dataclass(frozen=True)
class DataSize:
    """The synthetic data set of one size."""

    families: Families
    train_families: int
    validation_families: int
    families_per_shard: int


SIZES: dict[str, DataSize] = {
    "smoke": DataSize(Families(12, 16, 8), 256, 64, 64),
    "mini": DataSize(Families(20, 24, 16), 1_024, 128, 128),
    "small": DataSize(Families(48, 96, 64, 2), 8_192, 256, 128),
    "full": DataSize(Families(100, 500, 1_200, 4), 594_595, 180, 64),
}


def generate(
    root: Path, size: str, *, seed: int, world: World, progress: Callable[[int, int], None] | None = None
) -> None:
    """Generate a data set; a complete one is left as it is, an interrupted one is continued.

    ``progress(done, total)`` counts this rank's families. ValueError if the folder holds, or is to hold, other data.
    """
    if size not in SIZES:
        raise ValueError(f"openfold: unknown size {size!r}; sizes: {', '.join(SIZES)}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed {seed}: expected 0 <= seed < 2^63")
    settings = SIZES[size]
    recipe = {"name": "synthetic", "version": GENERATOR_VERSION, "seed": seed, **asdict(settings)}
    plan = _plan(settings)
    total = sum(len(numbers) for _, _, numbers in plan[world.rank :: world.size])
    done = 0

    def count(number: int) -> None:
        nonlocal done
        done += number
        if progress is not None:
            progress(done, total)

    pieces = [Piece(split, shard, partial(_shard, numbers, settings, seed, count)) for split, shard, numbers in plan]
    build_proteins(root, recipe, pieces, size=size, seed=seed, world=world)


def _plan(settings: DataSize) -> list[tuple[str, int, range]]:
    """(split, shard, family numbers) of every shard."""
    step = settings.families_per_shard
    numbers = (
        range(settings.train_families),
        range(VALIDATION_INDEX, VALIDATION_INDEX + settings.validation_families),
    )
    return [
        (split, shard, each[begin : begin + step])
        for split, each in zip(SPLITS, numbers, strict=True)
        for shard, begin in enumerate(range(0, len(each), step))
    ]


def _shard(numbers: range, settings: DataSize, seed: int, count: Callable[[int], None]) -> Arrays:
    arrays = shard_arrays(families(settings.families, seed, numbers), list(numbers))
    count(len(numbers))
    return arrays
