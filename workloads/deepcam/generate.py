"""Generates DeepCAM data sets of synthetic weather. climate.py has the physics, convert.py reads the public data.

The workload's descriptor names this module, so it also offers ``convert`` and ``fetch``.

Summaries of DeepCAM shards, which add up to the statistics in the manifest.

Converts the public DeepCAM data (a folder of HDF5 snapshots with stats.h5) to shards. Downloads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.data.build import (
    SPLITS,
    Arrays,
    Count,
    DataSetPlan,
    Generator,
    Progress,
    ShardPlan,
    Synthetic,
    build_data_set,
)
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.deepcam.climate import (
    STATISTICS_NAME,
    Domain,
    Statistics,
    check_fields,
    make_snapshot,
    read_shape,
    read_snapshot,
    read_statistics,
)
from mlhpc.workloads.deepcam.config import CHANNELS, CLASSES

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Summary:
    """Counts of snapshots and pixels; per channel sums over pixels and extremes; ``classes``: pixels per class."""

    snapshots: int
    pixels: int
    sums: Numbers
    squares: Numbers
    lowest: Numbers
    highest: Numbers
    classes: NDArray[np.int64]

    @property
    def statistics(self) -> Statistics:
        """Return the statistics in the form of ``stats.h5``."""
        return Statistics(
            count=self.snapshots,
            mean=tuple((self.sums / self.pixels).tolist()),
            sqmean=tuple((self.squares / self.pixels).tolist()),
            minval=tuple(self.lowest.tolist()),
            maxval=tuple(self.highest.tolist()),
        )

    @property
    def class_frequencies(self) -> tuple[float, ...]:
        """Return the fraction of the pixels in each class."""
        return tuple((self.classes / self.pixels).tolist())


def summarise(arrays: Arrays) -> Summary:
    """Summarise one shard, x (N, H, W, C) and y (N, H, W). Channel sums are accumulated in float64."""
    samples = [sample.reshape(-1, len(CHANNELS)) for sample in arrays["x"]]
    return Summary(
        snapshots=len(arrays["y"]),
        pixels=arrays["y"].size,
        sums=np.sum([sample.sum(axis=0, dtype=np.float64) for sample in samples], axis=0),
        squares=np.sum([np.einsum("pc,pc->c", sample, sample, dtype=np.float64) for sample in samples], axis=0),
        lowest=np.min([sample.min(axis=0) for sample in samples], axis=0).astype(np.float64),
        highest=np.max([sample.max(axis=0) for sample in samples], axis=0).astype(np.float64),
        classes=np.bincount(arrays["y"].ravel(), minlength=len(CLASSES)).astype(np.int64),
    )


def merge(parts: Sequence[Summary]) -> Summary:
    """Add up summaries in the order of the shards. So the result does not depend on the number of ranks."""
    return Summary(
        snapshots=sum(part.snapshots for part in parts),
        pixels=sum(part.pixels for part in parts),
        sums=np.sum([part.sums for part in parts], axis=0),
        squares=np.sum([part.squares for part in parts], axis=0),
        lowest=np.min([part.lowest for part in parts], axis=0),
        highest=np.max([part.highest for part in parts], axis=0),
        classes=np.sum([part.classes for part in parts], axis=0),
    )


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
    attributes = partial(_converted_attributes, survey.statistics)
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
        ShardPlan(split, shard, partial(_convert_shard, files[begin : begin + step], source.shape))
        for split, files in source.files.items()
        for shard, begin in enumerate(range(0, len(files), step))
    ]


def _convert_shard(files: Sequence[Path], shape: tuple[int, int]) -> Arrays:
    samples = []
    for path in files:
        x, y = read_snapshot(path)
        if y.shape != shape:
            raise InputError(f"{path}: sample of {y.shape} pixels among samples of {shape}")
        samples.append((x, y))
    return {"x": np.stack([x for x, _ in samples]), "y": np.stack([y for _, y in samples])}


def _converted_attributes(statistics: Statistics, summaries: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Take the statistics from the source's stats.h5, so that inputs are normalised as in the benchmark."""
    frequencies = {f"{split}_class_frequencies": list(merge(summaries[split]).class_frequencies) for split in SPLITS}
    return {"statistics": asdict(statistics), **frequencies}


__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 1  # raised when the same seed gives other data


@dataclass(frozen=True)
class DataSize:
    """The synthetic data set of one size."""

    domain: Domain
    train_samples: int
    validation_samples: int
    samples_per_shard: int


# height, width, south, north, degrees east, mean numbers of events and decoys in the order of `Domain`;
# training and validation samples, samples per shard. full: the shape and numbers of the public data
SIZES: dict[str, DataSize] = {
    "smoke": DataSize(Domain(64, 96, 4, 52, 72, 1.2, 1.4, 1.5, 2, 2, 2), 384, 128, 16),
    "mini": DataSize(Domain(96, 144, 4, 52, 72, 1.2, 1.4, 1.5, 2, 2, 2), 512, 128, 16),
    "small": DataSize(Domain(384, 576, -48, 48, 144, 3, 5, 6, 6, 6, 6), 1_024, 128, 16),
    "full": DataSize(Domain(768, 1152, -90, 90, 360, 0.6, 6, 10, 6, 8, 6), 121_266, 15_158, 8),
}


def _shard(domain: Domain, seed: int, numbers: range, count: Count) -> Arrays:
    x = np.empty((len(numbers), domain.height, domain.width, len(CHANNELS)), dtype=np.float32)
    y = np.empty(x.shape[:3], dtype=np.uint8)
    for position, number in enumerate(numbers):
        fields, y[position] = make_snapshot(domain, seed, number)
        x[position] = check_fields(fields, Path(f"snapshot {number}"))
        count(1)
    return {"x": x, "y": y}


def _attributes(summaries: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Return input statistics of the training split, as in the public ``stats.h5``, and both splits' frequencies."""
    merged = {split: merge(parts) for split, parts in summaries.items()}
    frequencies = {f"{split}_class_frequencies": list(merged[split].class_frequencies) for split in SPLITS}
    return {"statistics": asdict(merged["train"].statistics), **frequencies}


def _snapshots(settings: DataSize, seed: int) -> Synthetic[Summary]:
    return Synthetic(
        settings.train_samples,
        settings.validation_samples,
        settings.samples_per_shard,
        partial(_shard, settings.domain, seed),
        summarise,
        _attributes,
    )


generate = Generator(
    "deepcam", GENERATOR_VERSION, SIZES, _snapshots, constants={"channels": CHANNELS, "classes": CLASSES}
).generate
