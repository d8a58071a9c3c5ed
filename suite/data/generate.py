"""Generates data sets of numbered items for every workload with synthetic data.

An item is the unit of generation: a sample, or a universe, trajectory or family with several samples. The workload
defines how an item is made, and the attributes in the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mlhpc.suite.data.build import (
    Arrays,
    Count,
    DataSetPlan,
    Progress,
    Summary,
    build_data_set,
    find_size_settings,
    plan_numbered_shards,
)
from mlhpc.suite.data.manifest import MANIFEST_NAME
from mlhpc.suite.data.shards import Compression
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")


@dataclass(frozen=True)
class Synthetic(Generic[Summary]):
    """The data set of one size and seed.

    ``make(numbers, count)`` gives the arrays of one shard and calls ``count`` with each number of items made.
    ``summarise`` and ``attributes`` are those of a `DataSetPlan`.
    """

    train_items: int
    validation_items: int
    items_per_shard: int
    make: Callable[[range, Count], Arrays]
    summarise: Callable[[Arrays], Summary]
    attributes: Callable[[Mapping[str, Sequence[Summary]]], dict[str, Any]]
    compression: Compression = "none"


@dataclass(frozen=True)
class Generator(Generic[Settings]):
    """A workload's generator. ``data_set`` makes the data set of a size's settings and a seed.

    ``name``, ``version``, the seed, ``constants`` and the fields of the settings are the recipe that names the data.
    ``check_tools`` raises ValueError if a package that generating needs is missing.
    """

    workload: str
    version: int
    sizes: Mapping[str, Settings]
    data_set: Callable[[Settings, int], Synthetic[Any]]
    name: str = "synthetic"
    constants: Mapping[str, Any] | None = None
    check_tools: Callable[[], None] | None = None

    def generate(self, root: Path, size: str, *, seed: int, world: World, progress: Progress | None = None) -> None:
        """Generate a data set. A complete one stays as it is, an interrupted one is continued.

        ``progress(done, total)`` counts this rank's items. ValueError for an unknown size, a seed out of range, a
        missing tool, or a folder that holds other data.
        """
        settings = find_size_settings(self.workload, self.sizes, size, seed)
        if self.check_tools is not None and not (root / MANIFEST_NAME).exists():  # before anything is written
            self.check_tools()
        data = self.data_set(settings, seed)
        recipe = {
            "name": self.name,
            "version": self.version,
            "seed": seed,
            **(self.constants or {}),
            **asdict(settings),
        }
        pieces = plan_numbered_shards(
            data.train_items, data.validation_items, data.items_per_shard, data.make, world, progress
        )
        plan = DataSetPlan(self.workload, size, seed, recipe, pieces, data.summarise, data.attributes, data.compression)
        build_data_set(root, plan, world)
