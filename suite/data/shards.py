"""Writes and reads shards of a data set: HDF5 files with some samples of one split. Knows no workload.

Every dataset has the samples in its first dimension, or is ragged (`mlhpc.suite.data.shards`). Large datasets begin on
a page and are contiguous, or gzip with one chunk per sample. So the reader can map the file.

Maps the datasets of one shard into memory as columns: random access to samples without calls into HDF5.

A dataset holds samples of one shape (contiguous, or gzip with one chunk per sample), or it is ragged. Samples of a
ragged dataset differ in length. The dataset ``AXIS.offsets`` (int64, samples + 1 values that rise from 0) then says
which rows of ``AXIS.name`` belong to which sample. HDF5 returns the position of each dataset once per shard; all
samples are read from the map.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mlhpc.suite.data.manifest import MANIFEST_NAME, ShardEntry, check_shard, compute_checksums, read_manifest
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_repr, write_atomically

LARGE_BYTES = 1 << 30  # a dataset of more must have a file of at least a part of it:
MOST_INFLATED = 2000  # gzip makes at most 1,032 bytes of one
OFFSETS = ".offsets"  # ends the name of the dataset that makes the others of its axis ragged
Part = Sequence[NDArray[np.int64]]  # positions along the leading dimensions of a sample
# The kernel's usual read-ahead: larger samples are requested before they are touched.
PREFETCH_FROM_BYTES = 128 * 1024


@dataclass(frozen=True)
class Column:
    """One dataset of one mapped shard. ``sample`` and ``prefetch`` take indices from -samples to samples - 1.

    ``sample`` returns an array of ``shape``; of a ragged dataset some rows of ``shape``; of offsets the number of rows.
    ``prefetch`` is None where samples are small.
    """

    samples: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sample: Callable[[int], NDArray[Any]]
    prefetch: Callable[[int], None] | None
    ragged: bool = False
    prefetch_part: Callable[[int, Part], None] | None = None  # None: a part is not cheaper to read than the whole


class Named(dict[str, Any]):
    """What lies in a place, by name of the dataset. InputError, with the place, for a name that is not there."""

    def __init__(self, items: Mapping[str, Any], place: Path) -> None:
        super().__init__(items)
        self._place = place

    def __missing__(self, name: str) -> Any:
        raise InputError(
            f"{self._place}: has no dataset {name!r}, only {', '.join(self) or 'none'}; generate the data again"
        )


def map_columns(path: Path, samples: int | None = None) -> dict[str, Column]:
    """Map every dataset of a shard, by name.

    InputError if the file is not HDF5, is damaged, has another layout or another number of ``samples``.
    """
    with open_hdf5(path) as shard:
        with path.open("rb") as file:  # the map stays valid after the file is closed
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            for name in shard:
                if problem := _find_problem(shard, name, len(mapped)):
                    raise InputError(f"{path}: {name!r} is {problem}; stage or generate the data set again")
            offsets = {name: _read_offsets(path, shard[name]) for name in shard if name.endswith(OFFSETS)}
            columns = Named({name: _map_column(path, mapped, shard[name], name, offsets) for name in shard}, path)
        except (KeyError, AttributeError, OSError, RuntimeError) as error:  # how h5py answers a damaged structure
            raise InputError(
                f"{path}: the structure of the HDF5 file is damaged: {error}; stage or generate the data set again"
            ) from None
    if samples is not None and (others := {column.samples for column in columns.values()} - {samples}):
        raise InputError(f"{path}: has {min(others)} samples, the manifest says {samples}")
    return columns


def _find_problem(shard: h5py.File, name: str, size: int) -> str | None:
    """Return what a dataset is that no shard has. What it says must lie in the file's ``size`` bytes."""
    dataset = shard[name]
    if not isinstance(dataset, h5py.Dataset) or dataset.dtype.kind not in "biufcS" or not dataset.dtype.isnative:
        kind = dataset.dtype.str if isinstance(dataset, h5py.Dataset) else "a group"
        return f"{kind}; expected a dataset in this machine's byte order"
    if not dataset.shape:
        return "a single value; expected one for each sample"
    if len(dataset) == 0 and build_offsets_name(name) not in shard:
        return "without a sample"
    if len(dataset) > size or (name.endswith(OFFSETS) and dataset.nbytes > size):
        return f"of {len(dataset):,} rows, in a file of {size:,} bytes"
    return None


def build_offsets_name(name: str) -> str:
    """Return the dataset that would make ``name`` ragged.

    This is ``AXIS.offsets`` for ``AXIS.name``, and "" for names without an axis.
    """
    axis, separator, _ = name.partition(".")
    return axis + OFFSETS if separator and not name.endswith(OFFSETS) else ""


def check_offsets(values: NDArray[Any]) -> str | None:
    """Return what is wrong with the values of an offsets dataset, as the end of a message, or None."""
    if values.ndim != 1 or len(values) < 2 or values.dtype != np.int64 or values[0] != 0 or (np.diff(values) < 0).any():
        return f"is {values.dtype} {render_repr(values.tolist())}: expected int64 offsets that rise from 0"
    return None


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file for reading: no other code does. What it names lies in it, not in another file of the user.

    InputError if the file cannot be read, leads out of itself or is damaged; also if its structure fails in the body.
    It takes no locks, which network file systems often lack.
    """
    try:
        known = path.stat()
        if not stat.S_ISREG(known.st_mode):  # a named pipe would never answer
            raise InputError(f"{path}: is no file; expected an HDF5 file")
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise InputError(f"{path}: not a readable HDF5 file: {_render_first_line(error)}") from None
    with file:
        try:
            if problem := _find_way_out(file, known.st_size):
                raise InputError(f"{path}: {problem}")
            yield file
        except (KeyError, OSError, RuntimeError) as error:  # h5py reads lazily: damage shows where values are used
            raise InputError(f"{path}: damaged HDF5 file: {_render_first_line(error)}") from None


def _find_way_out(file: h5py.File, size: int) -> str | None:
    """Return what of a file lies elsewhere, or takes more memory than its ``size`` bytes can mean.

    Nothing is asked of a dataset before: the shape of a virtual one already opens the files that it names.
    """
    groups, seen = [file["/"]], set()
    while groups:
        group = groups.pop()
        for name in group:
            place = f"{group.name.rstrip('/')}/{name}"[1:]
            if group.get(name, getlink=True, getclass=True) is not h5py.HardLink:
                return f"{place!r} is a link; expected a dataset of this file"
            found = group[name]
            if isinstance(found, h5py.Dataset):
                if found.is_virtual or found.external:
                    return f"{place!r} is kept in another file; expected its values here"
                if found.nbytes > max(LARGE_BYTES, size * MOST_INFLATED):
                    return f"{place!r} is of {found.nbytes:,} bytes, in a file of {size:,} bytes"
            elif isinstance(found, h5py.Group) and (number := h5py.h5o.get_info(found.id).addr) not in seen:
                seen.add(number)  # a group may hold itself
                groups.append(found)
    return None


def _render_first_line(error: BaseException) -> str:
    return str(error.args[0] if isinstance(error, KeyError) else error).partition("\n")[0] or type(error).__name__


def _read_offsets(path: Path, dataset: Any) -> NDArray[np.int64]:
    """Read the offsets of a ragged axis. They are checked here: every later read relies on them."""
    values = np.asarray(dataset[...])
    problem = check_offsets(values)
    if problem is not None:
        raise InputError(f"{path}: dataset {dataset.name!r} {problem}")
    return values


def _map_column(
    path: Path, mapped: mmap.mmap, dataset: Any, name: str, offsets: Mapping[str, NDArray[np.int64]]
) -> Column:
    if name in offsets:
        lengths = np.diff(offsets[name])
        return Column(len(lengths), (), lengths.dtype, lengths.__getitem__, None)
    if build_offsets_name(name) in offsets:
        return _map_ragged(path, mapped, dataset, offsets[build_offsets_name(name)])
    if dataset.chunks is None:
        return _map_contiguous(path, mapped, dataset)
    return _map_chunked(path, mapped, dataset)


def _map_ragged(path: Path, mapped: mmap.mmap, dataset: Any, offsets: NDArray[np.int64]) -> Column:
    if dataset.chunks is not None or len(dataset) != offsets[-1]:
        expected = f"expected {offsets[-1]}, contiguous, as its offsets say"
        raise InputError(f"{path}: dataset {dataset.name!r} has {len(dataset)} rows: {expected}")
    begin, rows = _map_array(path, mapped, dataset)
    samples, row_bytes = len(offsets) - 1, dataset.dtype.itemsize * math.prod(dataset.shape[1:])

    def sample(index: int) -> NDArray[Any]:
        first = index % samples  # offsets have one entry more than samples, so a negative index must not reach them
        return rows[offsets[first] : offsets[first + 1]]

    prefetch = None
    if int(np.diff(offsets).max()) * row_bytes >= PREFETCH_FROM_BYTES:
        extents = [(begin + int(a) * row_bytes, int(b - a) * row_bytes) for a, b in pairwise(offsets)]
        prefetch = _make_prefetch(mapped, extents)
    return Column(samples, tuple(dataset.shape[1:]), dataset.dtype, sample, prefetch, ragged=True)


def _map_contiguous(path: Path, mapped: mmap.mmap, dataset: Any) -> Column:
    samples, *shape = dataset.shape
    begin, array = _map_array(path, mapped, dataset)
    sample_bytes = dataset.nbytes // samples
    extents = [(begin + i * sample_bytes, sample_bytes) for i in range(samples)]
    prefetch_part = _make_part_prefetch(mapped, extents, (*shape, dataset.dtype.itemsize))
    return Column(
        samples,
        tuple(shape),
        dataset.dtype,
        array.__getitem__,
        _make_prefetch(mapped, extents),
        prefetch_part=prefetch_part,
    )


def _map_chunked(path: Path, mapped: mmap.mmap, dataset: Any) -> Column:
    samples, *rest = dataset.shape
    name, shape, dtype = dataset.name, tuple(rest), dataset.dtype
    sample_bytes = dtype.itemsize * math.prod(shape)
    if dataset.chunks != (1, *shape) or dataset.compression != "gzip" or dataset.shuffle or dataset.fletcher32:
        raise InputError(
            f"{path}: dataset {name!r} has another layout; expected contiguous, or gzip with one chunk per sample"
        )
    chunks = [dataset.id.get_chunk_info_by_coord((i, *(0 for _ in shape))) for i in range(samples)]
    extents = [(chunk.byte_offset, chunk.size) for chunk in chunks]
    if any(begin is None for begin, _ in extents):
        raise InputError(f"{path}: {name!r} lacks samples that were never written; generate the data again")

    def inflate(index: int) -> NDArray[Any]:
        begin, size = extents[index]
        try:
            # At most a byte too many: few bytes can stand for many.
            inflater = zlib.decompressobj()
            content = inflater.decompress(mapped[begin : begin + size], sample_bytes + 1)
            return np.frombuffer(content if inflater.eof else b"", dtype).reshape(shape)
        # ValueError: it decompresses, but to another number of bytes.
        except (zlib.error, ValueError):
            number = index % samples
            raise InputError(
                f"{path}: sample {number} of {name!r} is damaged: gzip cannot decompress it; generate the data again"
            ) from None

    return Column(samples, shape, dtype, inflate, _make_prefetch(mapped, extents))


def _map_array(path: Path, mapped: mmap.mmap, dataset: Any) -> tuple[int, NDArray[Any]]:
    """Return the position of a contiguous dataset in its file, and its values as a view of the map."""
    if dataset.size == 0:  # HDF5 gives it no place
        return 0, np.empty(dataset.shape, dataset.dtype)
    offset = dataset.id.get_offset()
    if offset is None or offset + dataset.nbytes > len(mapped):
        raise InputError(f"{path}: dataset {dataset.name!r} does not lie inside the file's {len(mapped)} bytes")
    return offset, np.frombuffer(mapped, dataset.dtype, dataset.size, offset).reshape(dataset.shape)


def _make_prefetch(mapped: mmap.mmap, extents: Sequence[tuple[int, int]]) -> Callable[[int], None] | None:
    """Return a function that requests a whole sample at once, or None if samples are small.

    ``extents`` has the (position, size) of each sample. The kernel's own read-ahead is smaller than a large sample and
    does not know where samples end.
    """
    if max(size for _, size in extents) < PREFETCH_FROM_BYTES or not hasattr(mmap, "MADV_WILLNEED"):
        return None

    def prefetch(index: int) -> None:
        mapped.madvise(mmap.MADV_WILLNEED, *_align_to_pages(*extents[index]))

    return prefetch


def _make_part_prefetch(
    mapped: mmap.mmap, extents: Sequence[tuple[int, int]], shape: tuple[int, ...]
) -> Callable[[int, Part], None]:
    """Return a function that requests the pages of a part of a sample, and no others.

    ``shape`` is the shape of a sample, followed by the bytes of a value. For samples smaller than the kernel's
    read-ahead that suffices.
    """

    def prefetch(index: int, part: Part) -> None:
        begin, size = extents[index]
        if size < PREFETCH_FROM_BYTES or not hasattr(mmap, "MADV_WILLNEED"):
            return
        # Switches the kernel's own read-ahead off, which would read the parts in between.
        mapped.madvise(mmap.MADV_RANDOM, *_align_to_pages(begin, size))
        for first, length in list_page_runs(begin, part, shape):
            mapped.madvise(mmap.MADV_WILLNEED, first, min(length, len(mapped) - first))

    return prefetch


def _align_to_pages(begin: int, size: int) -> tuple[int, int]:
    skew = begin % mmap.PAGESIZE  # madvise takes whole pages
    return begin - skew, size + skew


def list_page_runs(begin: int, part: Part, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """List (position, bytes) of the runs of whole pages of a part of a sample at ``begin``, in order."""
    steps = [math.prod(shape[d + 1 :]) for d in range(len(part))]  # bytes from one position to the next, by dimension
    rows = np.array([begin])
    for step, positions in zip(steps[:-1], part[:-1], strict=True):
        rows = (rows[:, None] + step * positions).reshape(-1)
    first = (rows + steps[-1] * int(part[-1].min())) // mmap.PAGESIZE
    last = (rows + steps[-1] * (int(part[-1].max()) + 1) - 1) // mmap.PAGESIZE
    order = np.argsort(first)
    first, reach = first[order], np.maximum.accumulate(last[order])
    # A run starts where a page does not touch any page before it; rows may overlap or be out of order.
    starts = np.concatenate([[True], first[1:] > reach[:-1] + 1])
    ends = np.concatenate([starts[1:], [True]])
    pairs = zip(first[starts].tolist(), reach[ends].tolist(), strict=True)
    return [(low * mmap.PAGESIZE, (high + 1 - low) * mmap.PAGESIZE) for low, high in pairs]


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
        self._root, self._split = root, split
        self._entries = manifest.splits[split]
        self._ends = np.cumsum([entry.samples for entry in self._entries])
        self._shards: list[dict[str, Column] | None] = [None] * len(self._entries)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of samples of the split."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def names(self) -> Collection[str]:
        """The names of the datasets."""
        return self._open(0).keys()

    def require(self, expected: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> None:
        """Check the first shard for datasets with these shapes of a sample, or of a row, and types.

        InputError names it. All other shards have what it has, or they are refused as they are opened.
        """
        columns = self._open(0)
        for name, (shape, dtype) in expected.items():
            found = columns[name].shape, str(columns[name].dtype)
            if found != (wanted := (shape, str(np.dtype(dtype)))):
                path = self._root / self._entries[0].file
                raise InputError(f"{path}: dataset {name!r} is {found}, expected {wanted}")

    def read(self, indices: ArrayLike, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """Copy the samples ``indices``, in that order, by dataset. ``names`` selects datasets; the default is all.

        Rows of ragged datasets are joined; their offsets count from the first sample read. IndexError for a sample that
        does not exist. InputError names a missing or damaged shard.
        """
        shards, from_end = self._locate(indices)
        batch = Named({}, self._root / self._entries[0].file)  # all shards of a split have the same names
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
        columns = map_columns(path, entry.samples)
        first = next((shard for shard in self._shards if shard is not None), columns)
        kinds = [{name: (c.shape, c.dtype, c.ragged) for name, c in shard.items()} for shard in (first, columns)]
        if kinds[0] != kinds[1]:
            raise InputError(f"{path}: names or types differ from those of other shards of the split")
        return columns


def count_stored_bytes(path: Path) -> int:
    """Count the uncompressed bytes of all arrays of a shard."""
    with open_hdf5(path) as file:
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
