"""Converts the public DeepCAM data (a folder of HDF5 snapshots with stats.h5) to shards. Downloads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlhpc.suite.data.build import SPLITS, Arrays, DataSetPlan, Progress, ShardPlan, build_data_set
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.deepcam.fields import (
    STATISTICS_NAME,
    Statistics,
    read_shape,
    read_snapshot,
    read_statistics,
)
from mlhpc.workloads.deepcam.summary import Summary, merge, summarise

CONVERTER_VERSION = 1  # raised when the same files give other shards
VALIDATION_EVERY = 9  # if a folder has no splits, every ninth file: 8 : 1, as in the MLPerf data set
MAX_SHARD_BYTES = 512 << 20
SIZE_OF_SHAPE = {(64, 96): "smoke", (96, 144): "mini", (384, 576): "small", (768, 1152): "full"}
WHERE_THE_DATA_ARE = (
    "deepcam: the public data (8.8 TB) are not downloaded here, because compute nodes have no internet: "
    "copy the folder All-Hist (train, validation, stats.h5) with Globus from the collection "
    "0b226e2c-4de0-11ea-971a-021304b0cca7 "
    "(app.globus.org/file-manager?origin_id=0b226e2c-4de0-11ea-971a-021304b0cca7), "
    "then: mlhpc data convert deepcam FOLDER"
)


def convert(
    source: Path, root: Path, *, world: World, size: str | None = None, progress: Progress | None = None
) -> None:
    """Convert a folder of ``*.h5`` snapshots with ``stats.h5`` to shards, fields bit for bit.

    Subfolders ``train`` and ``validation`` are the splits. Without them every ninth file, by name, goes to validation.
    ``size`` defaults to the size with samples of this shape.
    """
    survey: _Source = world.compute_on_first(partial(_list_files, source), _Source)
    name = size or SIZE_OF_SHAPE.get(survey.shape)
    if name is None:
        known = ", ".join(f"{height} x {width}" for height, width in SIZE_OF_SHAPE)
        raise InputError(
            f"{source}: samples of {survey.shape[0]} x {survey.shape[1]} pixels; expected {known}, or --size"
        )
    recipe = {
        "name": "converted",
        "version": CONVERTER_VERSION,
        "source": str(source),
        "files": {split: len(files) for split, files in survey.files.items()},
        "shape": survey.shape,
    }
    attributes = partial(_attributes, survey.statistics)
    build_data_set(
        root, DataSetPlan("deepcam", name, 0, recipe, _pieces(survey), summarise, attributes), world, progress
    )


def fetch(destination: Path, *, source: str | None = None) -> None:
    """Always raise InputError, which says where to get the data; `convert` takes a copy that is already here."""
    raise InputError(WHERE_THE_DATA_ARE)


@dataclass(frozen=True)
class _Source:
    """Holds the snapshot files of a folder by split. ``shape`` is (height, width) of the first; all must have it."""

    files: dict[str, tuple[Path, ...]]
    shape: tuple[int, int]
    statistics: Statistics


def _list_files(source: Path) -> _Source:
    if not source.is_dir():
        raise InputError(f"{source}: expected a folder of *.h5 snapshots with {STATISTICS_NAME}")
    statistics = read_statistics(source / STATISTICS_NAME)
    files = {split: tuple(sorted((source / split).glob("*.h5"))) for split in SPLITS}
    if not any(files.values()):
        every = [path for path in sorted(source.glob("*.h5")) if path.name != STATISTICS_NAME]
        # fewer than nine files: the last one is held out
        held_out = set(every[VALIDATION_EVERY - 1 :: VALIDATION_EVERY] or every[-1:])
        files = {
            "train": tuple(path for path in every if path not in held_out),
            "validation": tuple(path for path in every if path in held_out),
        }
    empty = [split for split, paths in files.items() if not paths]
    if empty:
        raise InputError(f"{source}: no *.h5 file for the {empty[0]} split")
    return _Source(files, read_shape(files["train"][0]), statistics)


def _pieces(source: _Source) -> list[ShardPlan]:
    # bytes per pixel: 16 float32 channels and a uint8 label
    step = max(1, MAX_SHARD_BYTES // (source.shape[0] * source.shape[1] * 65))
    return [
        ShardPlan(split, shard, partial(_shard, files[begin : begin + step], source.shape))
        for split, files in source.files.items()
        for shard, begin in enumerate(range(0, len(files), step))
    ]


def _shard(files: Sequence[Path], shape: tuple[int, int]) -> Arrays:
    samples = []
    for path in files:
        x, y = read_snapshot(path)
        if y.shape != shape:
            raise InputError(f"{path}: sample of {y.shape} pixels among samples of {shape}")
        samples.append((x, y))
    return {"x": np.stack([x for x, _ in samples]), "y": np.stack([y for _, y in samples])}


def _attributes(statistics: Statistics, summaries: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Take the statistics from the source's stats.h5, so that inputs are normalised as in the benchmark."""
    frequencies = {f"{split}_class_frequencies": list(merge(summaries[split]).class_frequencies) for split in SPLITS}
    return {"statistics": asdict(statistics), **frequencies}
