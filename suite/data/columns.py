"""Maps the datasets of one shard into memory as columns: random access to samples without calls into HDF5.

A dataset holds samples of one shape (contiguous, or gzip with one chunk per sample), or it is ragged. Samples of a
ragged dataset differ in length. The dataset ``AXIS.offsets`` (int64, samples + 1 values that rise from 0) then says
which rows of ``AXIS.name`` belong to which sample. HDF5 returns the position of each dataset once per shard; all
samples are read from the map.
"""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_repr

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


def map_columns(path: Path) -> dict[str, Column]:
    """Map every dataset of a shard, by name. InputError if the file is not HDF5, is damaged or has another layout."""
    with _open(path) as shard:
        with path.open("rb") as file:  # the map stays valid after the file is closed
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            offsets = {name: _read_offsets(path, shard[name]) for name in shard if name.endswith(OFFSETS)}
            return {name: _map_column(path, mapped, shard[name], name, offsets) for name in shard}
        except (KeyError, AttributeError, OSError, RuntimeError) as error:  # how h5py answers a damaged structure
            raise InputError(
                f"{path}: the structure of the HDF5 file is damaged: {error}; stage or generate the data set again"
            ) from None


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


def _open(path: Path) -> h5py.File:
    """Open for reading without file locks, which network file systems often lack."""
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise InputError(f"{path}: not a readable HDF5 file: {error}") from None


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
    if dataset.chunks != (1, *shape) or dataset.compression != "gzip" or dataset.shuffle or dataset.fletcher32:
        raise InputError(
            f"{path}: dataset {name!r}has another layout; expected contiguous, or gzip with one chunk per sample"
        )
    chunks = [dataset.id.get_chunk_info_by_coord((i, *(0 for _ in shape))) for i in range(samples)]
    extents = [(chunk.byte_offset, chunk.size) for chunk in chunks]

    def inflate(index: int) -> NDArray[Any]:
        begin, size = extents[index]
        try:
            return np.frombuffer(zlib.decompress(mapped[begin : begin + size]), dtype).reshape(shape)
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
