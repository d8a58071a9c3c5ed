"""Generates OpenFold data sets of synthetic protein families.

proteins.py makes a family, convert.py reads real files. The
workload's descriptor names this module, so it also offers ``convert`` and ``fetch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mlhpc.suite.data.build import Arrays, Count, Generator, Synthetic
from mlhpc.workloads.openfold.convert import convert, fetch
from mlhpc.workloads.openfold.proteins import Families, make_proteins
from mlhpc.workloads.openfold.shard_form import build_shard_arrays
from mlhpc.workloads.openfold.summary import Summary, compute_attributes, summarise

__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 3


@dataclass(frozen=True)
class DataSize:
    """The synthetic data set of one size."""

    families: Families
    train_families: int
    validation_families: int
    families_per_shard: int


# shortest and longest chain, alignment rows, templates; training and validation families, families per shard
SIZES: dict[str, DataSize] = {
    "smoke": DataSize(Families(12, 14, 16, hairpins_per_helix=3), 1_024, 256, 128),
    "mini": DataSize(Families(16, 18, 24, hairpins_per_helix=3), 1_024, 256, 128),
    "small": DataSize(Families(48, 96, 64, 2), 8_192, 256, 128),
    "full": DataSize(Families(100, 500, 1_200, 4), 594_595, 180, 64),
}


def _shard(settings: Families, seed: int, numbers: range, count: Count) -> Arrays:
    arrays = build_shard_arrays(make_proteins(settings, seed, numbers), list(numbers))
    count(len(numbers))
    return arrays


def _families(settings: DataSize, seed: int) -> Synthetic[Summary]:
    return Synthetic(
        settings.train_families,
        settings.validation_families,
        settings.families_per_shard,
        partial(_shard, settings.families, seed),
        summarise,
        compute_attributes,
    )


generate = Generator("openfold", GENERATOR_VERSION, SIZES, _families).generate
