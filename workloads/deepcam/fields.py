"""Reads and checks the public file format: one HDF5 file per snapshot and one ``stats.h5`` per data set.

    climate/data      (H, W, 16) float32, channels last
    climate/labels_0  (H, W) integers: 0 background, 1 tropical cyclone, 2 atmospheric river
    stats.h5          climate/count, the number of snapshots; climate/{mean, sqmean, minval, maxval}, per channel

In the data set of 2019 the labels are ``climate/labels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError
from mlhpc.workloads.deepcam.config import CHANNELS, CLASSES

DATA, LABELS = "climate/data", ("climate/labels_0", "climate/labels")
STATISTICS_NAME = "stats.h5"

Fields = NDArray[np.float32]
Labels = NDArray[np.uint8]

PER_CHANNEL = ("mean", "sqmean", "minval", "maxval")


@dataclass(frozen=True)
class Statistics:
    """Statistics of the training split: number of snapshots; per channel extremes, mean and mean of squares."""

    count: int
    mean: tuple[float, ...]
    sqmean: tuple[float, ...]
    minval: tuple[float, ...]
    maxval: tuple[float, ...]


def read_shape(path: Path) -> tuple[int, int]:
    """Read the height and width of a snapshot. InputError as in `read_snapshot`."""
    with _OpenFile(path) as file:
        height, width, _ = _dataset(path, file, (DATA,), 3).shape
    return height, width


def read_snapshot(path: Path) -> tuple[Fields, Labels]:
    """Read fields and labels of one file and check every value. InputError names file, dataset and index."""
    with _OpenFile(path) as file:
        data, labels = _dataset(path, file, (DATA,), 3), _dataset(path, file, LABELS, 2)
        if data.shape[2] != len(CHANNELS) or data.dtype.kind != "f":
            raise InputError(f"{path}: {DATA} is {data.shape} {data.dtype}, expected (H, W, {len(CHANNELS)}) floats")
        if labels.shape != data.shape[:2]:
            raise InputError(f"{path}: {labels.name[1:]} is {labels.shape}, expected {data.shape[:2]} as {DATA}")
        x, y, name = data[...].astype(np.float32, copy=False), labels[...], labels.name[1:]
    return check_fields(x, path), check_labels(y, path, name)


def check_fields(x: Fields, path: Path) -> Fields:
    """Return the fields unchanged. InputError names the first value that is not finite."""
    if not np.isfinite(x.sum(dtype=np.float64)):  # finite fields need one pass: a sum shows any NaN or infinity
        bad = np.argwhere(~np.isfinite(x))
        if len(bad):
            row, column, channel = bad[0].tolist()
            raise InputError(
                f"{path}: {DATA}[{row}, {column}, {channel}] is {x[row, column, channel]} ({CHANNELS[channel]}), "
                f"with {len(bad) - 1} more values that are not finite"
            )
    return x


def check_labels(y: NDArray[Any], path: Path, name: str) -> Labels:
    """Return the labels as uint8. InputError names the first pixel whose class does not exist."""
    bad = np.argwhere(~np.isin(y, np.arange(len(CLASSES))))
    if len(bad):
        row, column = bad[0].tolist()
        classes = ", ".join(f"{number} {label}" for number, label in enumerate(CLASSES))
        raise InputError(f"{path}: {name}[{row}, {column}] is {y[row, column]}: unknown class; classes: {classes}")
    return y.astype(np.uint8)


def read_statistics(path: Path) -> Statistics:
    """Read ``stats.h5``. InputError if it is missing, incomplete, or a channel has no range."""
    if not path.exists():
        raise InputError(
            f"{path}: missing: inputs are normalised by its climate/minval and climate/maxval; "
            "it belongs to the data set"
        )
    values: dict[str, Any] = {}
    with _OpenFile(path) as file:
        count = _dataset(path, file, ("climate/count",), 0)[()]
        if not (np.issubdtype(type(count), np.number) and count >= 1):
            raise InputError(f"{path}: climate/count is {count}, expected the number of snapshots")
        values["count"] = int(count)
        for name in PER_CHANNEL:
            value = np.asarray(_dataset(path, file, (f"climate/{name}",), 1)[...], dtype=np.float64)
            if value.shape != (len(CHANNELS),) or not np.isfinite(value).all():
                raise InputError(f"{path}: climate/{name}: expected {len(CHANNELS)} finite numbers, one per channel")
            values[name] = tuple(value.tolist())
    return check_statistics(Statistics(**values), str(path))


def check_statistics(statistics: Statistics, where: str) -> Statistics:
    """Return the statistics unchanged. InputError names a channel that cannot be normalised."""
    for name, low, high in zip(CHANNELS, statistics.minval, statistics.maxval, strict=True):
        if not low < high:
            raise InputError(f"{where}: channel {name} has minval {low:g} and maxval {high:g}: it cannot be normalised")
    return statistics


class _OpenFile:
    """Context manager of an HDF5 file open for reading. Errors of h5py become InputError with the file's name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> h5py.File:
        try:
            # HDF5 locks even files that it only reads, and some cluster file systems have no locks
            self._file = h5py.File(self._path, "r", locking=False)
        except OSError as error:
            raise InputError(f"{self._path}: not a readable HDF5 file: {_render_error(error)}") from None
        return self._file

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._file.close()
        # h5py reads lazily, so damage inside a dataset shows only where its values are used
        if isinstance(error, OSError | RuntimeError):
            raise InputError(f"{self._path}: damaged HDF5 file: {_render_error(error)}") from None


def _dataset(path: Path, file: h5py.File, names: tuple[str, ...], dimensions: int) -> h5py.Dataset:
    for name in names:
        dataset = file.get(name)
        if isinstance(dataset, h5py.Dataset):
            if len(dataset.shape) != dimensions:
                raise InputError(f"{path}: {name} has shape {dataset.shape}, expected {dimensions} dimensions")
            return dataset
    group = file.get("climate")
    inside = ", ".join(sorted(group)) if isinstance(group, h5py.Group) else "no group 'climate'"
    raise InputError(f"{path}: no dataset {names[0]}; found: {inside or 'nothing'}")


def _render_error(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
