"""Writes and reads shards of a data set: HDF5 files with some samples of one split. Knows no workload.

Every dataset has the samples in its first dimension, or is ragged (`mlhpc.suite.data.columns`). Large datasets begin on a
page and are contiguous, or gzip with one chunk per sample. So the reader can map the file.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlhpc.suite.data.columns import OFFSETS, Column, Part, build_offsets_name, check_offsets, map_columns
from mlhpc.suite.data.manifest import MANIFEST_NAME, ShardEntry, check_shard, compute_checksums, read_manifest
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_repr, write_atomically

ALIGNMENT_BYTES = 4096  # datasets of at least a page begin on a page
CHUNKED_FROM_BYTES = 1024  # smaller samples stay uncompressed: a chunk of their own would cost more than it saves
GZIP_LEVEL = 4

Compression = Literal["none", "gzip"]


def build_shard_path(root: Path, split: str, index: int) -> Path:
    """Return the path of shard ``index`` (0-based) of a split."""
    return root / split / f"shard_{index:05d}.h5"


def write_shard(path: Path, arrays: Mapping[str, NDArray[Any]], *, compression: Compression = "none") -> ShardEntry:
    """Write the arrays to ``<root>/<split>/<name>.h5`` atomically and return the manifest entry.

    The first dimension of an array counts samples, or rows if it is ragged. Ragged arrays are never compressed. The
    same arrays give the same file, byte for byte. InputError if the arrays differ in their number of samples.
    """
    samples = _count_samples(path, arrays)
    # A map can only begin at a page; unaligned datasets would share pages with their neighbours.
    page = {"alignment_threshold": ALIGNMENT_BYTES, "alignment_interval": ALIGNMENT_BYTES}
    # No lock: the part file has one writer, and some file systems that nodes share have none.
    opened = partial(h5py.File, mode="w", libver="earliest", locking=False, **page)
    with write_atomically(path) as part, _show_disk_errors(part), opened(part) as file:
        for name, array in arrays.items():
            sample_bytes = array.nbytes // samples
            ragged = build_offsets_name(name) in arrays
            layout: dict[str, Any] = {}
            if compression == "gzip" and sample_bytes >= CHUNKED_FROM_BYTES and not ragged:
                layout = {"chunks": (1, *array.shape[1:]), "compression": "gzip", "compression_opts": GZIP_LEVEL}
            # Times would make two files with the same arrays differ.
            file.create_dataset(name, data=np.ascontiguousarray(array), track_times=False, **layout)
    return read_shard_entry(path)


@contextmanager
def _show_disk_errors(path: Path) -> Iterator[None]:
    """Raise the disk's own OSError, which HDF5 hides in the middle of ten lines."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = re.search(r"errno = (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None


def read_shard_entry(path: Path) -> ShardEntry:
    """Read a whole shard ``<root>/<split>/<name>.h5`` and compute its manifest entry. InputError if it is damaged."""
    counts = {column.samples for column in map_columns(path).values()}
    if len(counts) != 1:
        raise InputError(f"{path}: expected the same number of samples in every dataset, found {sorted(counts)}")
    sha256, crc = compute_checksums(path)
    relative = f"{path.parent.name}/{path.name}"
    return ShardEntry(file=relative, samples=counts.pop(), bytes=path.stat().st_size, sha256=sha256, crc32c=crc)


class ShardReader:
    """Random access to the samples of one split.

    Several threads may call `read`. A shard is opened when first needed.
    """

    def __init__(self, root: Path, split: str) -> None:
        manifest = read_manifest(root)
        if split not in manifest.splits:
            raise InputError(
                f"{root / MANIFEST_NAME}: no split {split!r}; the data set has {', '.join(manifest.splits)}"
            )
        self.manifest = manifest
        self._root = root
        self._entries = manifest.splits[split]
        self._ends = np.cumsum([entry.samples for entry in self._entries])
        self._shards: list[dict[str, Column] | None] = [None] * len(self._entries)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of samples of the split."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, indices: ArrayLike, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """Copy the samples ``indices``, in that order, by dataset. ``names`` selects datasets; the default is all.

        Rows of ragged datasets are joined; their offsets count from the first sample read. IndexError for a sample that
        does not exist. InputError names a missing or damaged shard.
        """
        shards, from_end = self._locate(indices)
        batch = {}
        for name in shards[0]:
            if names is None or name in names:
                columns = [shard[name] for shard in shards]
                batch[name] = _read_samples(name, list(zip(columns, from_end, strict=True)))
        _BYTES_READ.add(sum(array.nbytes for array in batch.values()))
        return batch

    def read_parts(self, name: str, indices: ArrayLike, parts: Sequence[Part]) -> list[NDArray[Any]]:
        """Copy a part of each sample of one dataset: the wanted positions per leading dimension, in that order.

        Only these are read from storage, unless the dataset is compressed; then whole samples count as read. Raises the
        errors of `read`.
        """
        shards, from_end = self._locate(indices)
        wanted = list(zip([shard[name] for shard in shards], from_end, parts, strict=True))
        found = []
        for column, index, part in wanted:
            if column.prefetch_part is not None:
                column.prefetch_part(index, part)
        for column, index, part in wanted:
            sample = column.sample(index)
            found.append(sample[np.ix_(*part)])
            _BYTES_READ.add(found[-1].nbytes if column.prefetch_part is not None else sample.nbytes)
        return found

    def _locate(self, indices: ArrayLike) -> tuple[list[dict[str, Column]], list[int]]:
        """Return the shard of each sample, and the sample's index in it."""
        samples = np.asarray(indices, dtype=np.int64)
        if len(samples) == 0 or samples.min() < 0 or samples.max() >= len(self):
            raise IndexError(f"samples {render_repr(samples.tolist())}: expected one or more of 0..{len(self) - 1}")
        numbers = np.searchsorted(self._ends, samples, side="right")
        from_end = (samples - self._ends[numbers]).tolist()  # negative, as Python indexes from the end
        return [self._shards[number] or self._open(number) for number in numbers.tolist()], from_end

    def _open(self, number: int) -> dict[str, Column]:
        with self._lock:  # two loader threads may need the same shard first
            columns = self._shards[number]
            if columns is None:
                columns = self._map(self._entries[number])
                self._shards[number] = columns
        return columns

    def _map(self, entry: ShardEntry) -> dict[str, Column]:
        # Presence and size only: reading all bytes here would read the data set twice.
        problem = check_shard(self._root, entry, deep=False)
        if problem is not None:
            raise InputError(problem)
        path = self._root / entry.file
        columns = map_columns(path)
        first = next((shard for shard in self._shards if shard is not None), columns)
        kinds = [{name: (c.shape, c.dtype, c.ragged) for name, c in shard.items()} for shard in (first, columns)]
        if kinds[0] != kinds[1] or any(column.samples != entry.samples for column in columns.values()):
            raise InputError(
                f"{path}: names, types or numbers of samples differ from the manifest or from other shards of the split"
            )
        return columns


def count_stored_bytes(path: Path) -> int:
    """Count the uncompressed bytes of all arrays of a shard."""
    with h5py.File(path, "r", locking=False) as file:
        return sum(file[name].nbytes for name in file)


def count_read_bytes() -> int:
    """Return the bytes of samples that this process has read from shards so far, on all threads."""
    return _BYTES_READ.total


class _ByteCounter:
    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, amount: int) -> None:
        with self._lock:
            self.total += amount


_BYTES_READ = _ByteCounter()  # one per process, as the kernel's own count in /proc/self/io is


def _read_samples(name: str, samples: Sequence[tuple[Column, int]]) -> NDArray[Any]:
    """Read samples of dataset ``name`` into one array. Large samples are all requested before the first is read."""
    for column, index in samples:
        if column.prefetch is not None:
            column.prefetch(index)
    first, _ = samples[0]
    if first.ragged:
        return np.concatenate([column.sample(index) for column, index in samples])
    out = np.empty((len(samples), *first.shape), first.dtype)
    for position, (column, index) in enumerate(samples):
        out[position] = column.sample(index)
    return np.concatenate([[0], np.cumsum(out)]) if name.endswith(OFFSETS) else out


def _count_samples(path: Path, arrays: Mapping[str, NDArray[Any]]) -> int:
    """Count the samples of all arrays. InputError if the counts differ or offsets do not fit their rows."""
    counts = {name: _count_samples_of(path, name, arrays) for name in arrays}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise InputError(f"{path}: expected arrays with one number of samples in the first dimension, found {counts}")
    return next(iter(counts.values()))


def _count_samples_of(path: Path, name: str, arrays: Mapping[str, NDArray[Any]]) -> int:
    rows = len(arrays[name]) if arrays[name].ndim else 0
    if name.endswith(OFFSETS):
        problem = check_offsets(arrays[name])
        if problem is not None:
            raise InputError(f"{path}: array {name!r} {problem}")
        return rows - 1
    offsets = arrays.get(build_offsets_name(name))
    if offsets is None:
        return rows
    if rows != offsets[-1]:
        raise InputError(f"{path}: array {name!r} has {rows} rows; expected {offsets[-1]}, the last of its offsets")
    return len(offsets) - 1
