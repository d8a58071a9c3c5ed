"""Converts the public OC20 data (LMDB files or extended XYZ) to shards. Downloads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlhpc.suite.data.build import SPLITS, Arrays, DataSetPlan, Progress, ShardPlan, build_data_set
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.open_catalyst.extxyz import SUFFIXES, read_extxyz
from mlhpc.workloads.open_catalyst.lmdb_form import LmdbFile
from mlhpc.workloads.open_catalyst.structures import Neighbourhood, Structure, build_shard_arrays
from mlhpc.workloads.open_catalyst.summary import compute_attributes, summarise

CONVERTER_VERSION = 1  # raised when the same files give other shards
REFERENCE_NEIGHBOURHOOD = Neighbourhood(6.0, 50)
STRUCTURES_PER_SHARD = 10_000
# val_id is the public archive's name
FOLDERS = {"train": ("train",), "validation": ("validation", "val_id", "val")}
WHERE_THE_DATA_ARE = (
    "open_catalyst: the public data are not downloaded here, because compute nodes have no internet: "
    "on a login or transfer node get s2ef_train_2M.tar (3.4 GB, 17 GB unpacked) and s2ef_val_id.tar from "
    "https://dl.fbaipublicfiles.com/opencatalystproject/data/ (listed in the OCP repository's DATASET.md), "
    "unpack them as FOLDER/train and FOLDER/val_id, then `mlhpc data convert open_catalyst FOLDER`; "
    "LMDB files made from them work as well"
)


def convert(
    source: Path,
    root: Path,
    *,
    world: World,
    size: str | None = None,
    progress: Progress | None = None,
    trust_pickles: bool = False,
) -> None:
    """Convert a folder with ``train`` and ``validation`` (or ``val_id``) of LMDB or extxyz files to shards.

    Edges in the source are ignored: training computes them. LMDB values are pickles, which may run code when loaded. A
    pickle that needs more than plain data is refused. ``trust_pickles`` loads it anyway and so runs its code.
    """
    files: dict[str, list[_SourceFile]] = world.compute_on_first(
        partial(_list_files, source, trust_pickles), dict[str, list[_SourceFile]]
    )
    pieces = [piece for split in SPLITS for piece in _plan_shards(split, files[split], trust_pickles)]
    recipe: dict[str, Any] = {
        "name": "converted",
        "version": CONVERTER_VERSION,
        "source": str(source),
        "files": {split: len(files[split]) for split in SPLITS},
        "cutoff_angstrom": REFERENCE_NEIGHBOURHOOD.cutoff_angstrom,
        "max_neighbours": REFERENCE_NEIGHBOURHOOD.max_neighbours,
    }
    of_graphs = partial(compute_attributes, REFERENCE_NEIGHBOURHOOD)
    build_data_set(
        root, DataSetPlan("open_catalyst", size or "full", 0, recipe, pieces, summarise, of_graphs), world, progress
    )


def fetch(destination: Path, *, source: str | None = None) -> None:
    """Always raise InputError, which says where to get the data."""
    raise InputError(WHERE_THE_DATA_ARE)


@dataclass(frozen=True)
class _SourceFile:
    path: Path
    structures: int | None  # None: text, whose structures nobody has counted


def _list_files(source: Path, trusted: bool) -> dict[str, list[_SourceFile]]:
    return {split: [_count(path, trusted) for path in _find_files(source, split)] for split in SPLITS}


def _count(path: Path, trusted: bool) -> _SourceFile:
    return _SourceFile(path, len(LmdbFile(path, trust_pickles=trusted)) if path.suffix == ".lmdb" else None)


def _find_files(source: Path, split: str) -> list[Path]:
    for name in FOLDERS[split]:
        folder = source / name
        if not folder.is_dir():
            continue
        paths = sorted(path for path in folder.rglob("*") if path.suffix == ".lmdb" or path.name.endswith(SUFFIXES))
        if not paths:
            raise InputError(f"{folder}: no *.lmdb and no *.extxyz, *.extxyz.xz or *.extxyz.gz in it")
        return paths
    raise InputError(f"{source}: no folder {' or '.join(map(repr, FOLDERS[split]))} in it: {split} data are missing")


def _plan_shards(split: str, files: list[_SourceFile], trusted: bool) -> list[ShardPlan]:
    ranges = []
    for number, file in enumerate(files):
        if file.structures is None:
            ranges.append(partial(_extxyz_shard, file.path, number))
            continue
        for begin in range(0, file.structures, STRUCTURES_PER_SHARD):
            end = min(begin + STRUCTURES_PER_SHARD, file.structures)
            ranges.append(partial(_lmdb_shard, file.path, begin, end, trusted))
    return [ShardPlan(split, shard, make) for shard, make in enumerate(ranges)]


def _lmdb_shard(path: Path, begin: int, end: int, trusted: bool) -> Arrays:
    structures = list(LmdbFile(path, trust_pickles=trusted).structures(begin, end))
    return _arrays(path, begin, structures)


def _extxyz_shard(path: Path, number: int) -> Arrays:
    # negative, so that it equals no system number from a text file
    return _arrays(path, 0, list(read_extxyz(path, trajectory=-1 - number)))


def _arrays(path: Path, begin: int, structures: list[Structure]) -> Arrays:
    if not structures:
        raise InputError(f"{path}: no structure in it")
    return build_shard_arrays(
        structures, REFERENCE_NEIGHBOURHOOD, [f"{path}: structure {begin + place}" for place in range(len(structures))]
    )
