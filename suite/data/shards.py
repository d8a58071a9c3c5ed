"""The sharded form of a data set: HDF5 shards, their manifest, writer, verifier and reader. Knows no workload.

    <root>/manifest.json              version 1, written last: its presence means the data set is complete
    <root>/<split>/shard_00000.h5     datasets by name, all with the samples in the first dimension

Samples of one length have one shape in all of a split. Samples of different length are ragged: ``AXIS.offsets`` (samples + 1
numbers from 0) says which rows of every ``AXIS.name`` belong to which sample (``atom.offsets``, ``atom.position``, ...).
Uncompressed datasets are contiguous in the file and gzip datasets have one chunk per sample, so the reader asks HDF5 for
offsets once per shard and reads through a memory map from then on.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import google_crc32c
import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator

from suite.files import brief, force_to_disk, read_json_document, write_whole, written_whole

MANIFEST_VERSION: Final = 1
MANIFEST_NAME = "manifest.json"
ALIGNMENT_BYTES = 4096  # datasets of at least a page start on a page
CHUNKED_FROM_BYTES = 1024  # a sample smaller than this is not worth a chunk of its own: it stays uncompressed
GZIP_LEVEL = 4
PREFETCH_FROM_BYTES = 128 * 1024  # a sample larger than the kernel's usual read-ahead is asked for before it is touched
BLOCK_BYTES = 8 << 20
OFFSETS = ".offsets"  # ends the name of the dataset that makes the others of its axis ragged

Compression = Literal["none", "gzip"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardEntry(_Frozen):
    """One shard as the manifest states it; ``file`` is relative to the root, checksums are of the file in hex."""

    file: str
    samples: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    crc32c: str = Field(pattern="^[0-9a-f]{8}$")

    @field_validator("file")
    @classmethod
    def _stays_inside(cls, file: str) -> str:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not path.parts or str(path) != file:
            raise ValueError("expected a relative path inside the data set")
        return file


class Manifest(_Frozen):
    """What a data set is made of: ``generator`` says where it came from, ``attributes`` what the workload must know."""

    version: Literal[1] = MANIFEST_VERSION
    workload: str
    size: str
    seed: int
    generator: dict[str, Any]
    splits: dict[str, tuple[ShardEntry, ...]]
    attributes: dict[str, Any] = {}

    def text(self) -> str:
        """The manifest as `write_manifest` writes it."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"

    @property
    def sha256(self) -> str:
        """Of the manifest file, in hex: names the data set, every byte of its shards included."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        """All shards of all splits, in order."""
        return tuple(entry for entries in self.splits.values() for entry in entries)

    @property
    def bytes(self) -> int:
        """Size of all shards."""
        return sum(entry.bytes for entry in self.shards)

    def samples(self, split: str) -> int:
        """Number of samples of one split."""
        return sum(entry.samples for entry in self.splits[split])


def shard_path(root: Path, split: str, index: int) -> Path:
    """Where the shard of a split belongs."""
    return root / split / f"shard_{index:05d}.h5"


def write_shard(path: Path, arrays: Mapping[str, NDArray[Any]], *, compression: Compression = "none") -> ShardEntry:
    """Write ``<root>/<split>/<name>.h5`` beside its place, force it to the disk, then rename it.

    The first dimension of every array is the sample, of ragged ones the row (see the top of this module); ragged
    arrays are never compressed. The same arrays give the same file, byte for byte.
    """
    samples = _sample_count(path, arrays)
    with (
        written_whole(path) as part,
        h5py.File(
            part, "w", libver="earliest", alignment_threshold=ALIGNMENT_BYTES, alignment_interval=ALIGNMENT_BYTES
        ) as file,
    ):
        for name, array in arrays.items():
            sample_bytes = array.nbytes // samples
            ragged = _offsets_of(name) in arrays
            chunked = compression == "gzip" and sample_bytes >= CHUNKED_FROM_BYTES and not ragged
            layout = (
                {"chunks": (1, *array.shape[1:]), "compression": "gzip", "compression_opts": GZIP_LEVEL}
                if chunked
                else {}
            )
            file.create_dataset(name, data=np.ascontiguousarray(array), track_times=False, **layout)
    return shard_entry(path)


def shard_entry(path: Path) -> ShardEntry:
    """The manifest entry of a complete shard ``<root>/<split>/<name>.h5``, which is read whole. ValueError if damaged.

    A shard under its final name is complete, so an interrupted generator keeps those it finds.
    """
    counts = {column.samples for column in _columns(path).values()}
    if len(counts) != 1:
        raise ValueError(f"{path}: expected datasets of one length, found lengths {sorted(counts)}")
    sha256, crc = _checksums(path)
    relative = f"{path.parent.name}/{path.name}"
    return ShardEntry(file=relative, samples=counts.pop(), bytes=path.stat().st_size, sha256=sha256, crc32c=crc)


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` atomically. Called last: from now on the data set counts as complete."""
    path = root / MANIFEST_NAME
    write_whole(path, manifest.text())
    force_to_disk(root)


def read_manifest(root: Path) -> Manifest:
    """Read ``manifest.json``. ValueError says file, what was wanted and what was found."""
    path = root / MANIFEST_NAME
    if not path.exists():
        found = "the folder does not exist" if not root.exists() else "an incomplete data set or none"
        raise ValueError(f"{path}: no manifest: {found}")
    return read_json_document(path, Manifest, "a manifest", MANIFEST_VERSION)


def verify(root: Path, *, deep: bool, progress: Callable[[int], None] | None = None) -> list[str]:
    """What is wrong with a data set, one line per file; empty if nothing. ``deep`` reads and checksums every byte.

    ``progress`` is told the bytes of each shard that was looked at.
    """
    try:
        manifest = read_manifest(root)
    except ValueError as error:
        return [str(error)]
    problems = []
    for entry in manifest.shards:
        problem = _problem(root, entry, deep=deep)
        if problem is not None:
            problems.append(problem)
        if progress is not None:
            progress(entry.bytes)
    return problems


class ShardReader:
    """Random access to one split; `read` may be called from several threads. Shards are opened when first needed."""

    def __init__(self, root: Path, split: str) -> None:
        manifest = read_manifest(root)
        if split not in manifest.splits:
            raise ValueError(f"{root / MANIFEST_NAME}: no split {split!r}; splits: {', '.join(manifest.splits)}")
        self.manifest = manifest
        self._root = root
        self._entries = manifest.splits[split]
        self._ends = np.cumsum([entry.samples for entry in self._entries])
        self._shards: list[dict[str, _Column] | None] = [None] * len(self._entries)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of samples of the split."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, indices: ArrayLike, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
        """The samples of ``indices`` in their order, copied. ValueError names a shard that is missing or damaged.

        ``names`` are the datasets wanted, by default all.
        Ragged ones come one after the other, with offsets that say where each begins in this answer.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) == 0 or wanted.min() < 0 or wanted.max() >= len(self):
            raise IndexError(f"samples {brief(wanted.tolist())}: expected one or more of 0..{len(self) - 1}")
        numbers = np.searchsorted(self._ends, wanted, side="right")
        from_end = wanted - self._ends[numbers]  # negative, as Python indexes from the end
        shards = [self._shards[number] or self._open(number) for number in numbers.tolist()]
        batch = {}
        for name, like in shards[0].items():
            if names is not None and name not in names:
                continue
            columns = [shard[name] for shard in shards]
            places = list(zip(columns, from_end.tolist(), strict=True))
            for column, place in places:
                if column.prefetch is not None:
                    column.prefetch(place)
            if like.ragged:
                batch[name] = np.concatenate([column.sample(place) for column, place in places])
                continue
            out = np.empty((len(places), *like.shape), like.dtype)
            for position, (column, place) in enumerate(places):
                out[position] = column.sample(place)
            batch[name] = np.concatenate([[0], np.cumsum(out)]) if name.endswith(OFFSETS) else out
        _READ.add(sum(array.nbytes for array in batch.values()))
        return batch

    def _open(self, number: int) -> dict[str, _Column]:
        with self._lock:
            columns = self._shards[number]
            if columns is None:
                columns = self._map(self._entries[number])
                self._shards[number] = columns
        return columns

    def _map(self, entry: ShardEntry) -> dict[str, _Column]:
        problem = _problem(self._root, entry, deep=False)
        if problem is not None:
            raise ValueError(problem)
        path = self._root / entry.file
        columns = _columns(path)
        first = next((shard for shard in self._shards if shard is not None), columns)
        kinds = [{name: (c.shape, c.dtype, c.ragged) for name, c in shard.items()} for shard in (first, columns)]
        if kinds[0] != kinds[1] or any(column.samples != entry.samples for column in columns.values()):
            raise ValueError(f"{path}: datasets differ from the manifest and the other shards of the split")
        return columns


def bytes_read() -> int:
    """Bytes of samples that this process has read out of shards, on any thread, since it began."""
    return _READ.total


class _Tally:
    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self.total += number


_READ = _Tally()  # of the process, as the kernel's own count in /proc/self/io is


@dataclass(frozen=True)
class _Column:
    """One dataset of one mapped shard. ``sample`` takes indices from -samples to samples - 1.

    A sample of a ragged dataset is some rows of ``shape``; a sample of offsets is the number of its rows.
    """

    samples: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sample: Callable[[int], NDArray[Any]]
    prefetch: Callable[[int], None] | None
    ragged: bool = False


def _columns(path: Path) -> dict[str, _Column]:
    """Map a shard: the offsets come from HDF5, the bytes from the map."""
    with _open(path) as shard:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            offsets = {name: _offsets(path, shard[name]) for name in shard if name.endswith(OFFSETS)}
            return {name: _any_column(path, mapped, shard[name], name, offsets) for name in shard}
        except (KeyError, AttributeError, OSError, RuntimeError) as error:  # how h5py answers a damaged structure
            raise ValueError(f"{path}: damaged HDF5 structure: {error}") from None


def _offsets_of(name: str) -> str:
    """The dataset that makes ``name`` ragged if it exists."""
    axis, separator, _ = name.partition(".")
    return axis + OFFSETS if separator and not name.endswith(OFFSETS) else ""


def _offsets(path: Path, dataset: Any) -> NDArray[np.int64]:
    """Offsets as they stand in the file: checked, because every later read trusts them."""
    values = np.asarray(dataset[...])
    problem = _offsets_problem(values)
    if problem is not None:
        raise ValueError(f"{path}: dataset {dataset.name!r} {problem}")
    return values


def _offsets_problem(values: NDArray[Any]) -> str | None:
    if values.ndim != 1 or len(values) < 2 or values.dtype != np.int64 or values[0] != 0 or (np.diff(values) < 0).any():
        return f"is {values.dtype} {brief(values.tolist())}: expected int64 offsets that rise from 0"
    return None


def _any_column(
    path: Path, mapped: mmap.mmap, dataset: Any, name: str, offsets: Mapping[str, NDArray[np.int64]]
) -> _Column:
    if name in offsets:
        lengths = np.diff(offsets[name])
        return _Column(len(lengths), (), lengths.dtype, lengths.__getitem__, None)
    if _offsets_of(name) in offsets:
        return _ragged_column(path, mapped, dataset, offsets[_offsets_of(name)])
    return _column(path, mapped, dataset)


def _ragged_column(path: Path, mapped: mmap.mmap, dataset: Any, offsets: NDArray[np.int64]) -> _Column:
    if dataset.chunks is not None or len(dataset) != offsets[-1]:
        raise ValueError(
            f"{path}: dataset {dataset.name!r} has {len(dataset)} rows: expected {offsets[-1]}, contiguous, as its offsets say"
        )
    begin, rows = _map_array(path, mapped, dataset)
    samples, row_bytes = len(offsets) - 1, dataset.nbytes // len(dataset)

    def sample(index: int) -> NDArray[Any]:
        place = index % samples
        return rows[offsets[place] : offsets[place + 1]]

    prefetch = None
    if int(np.diff(offsets).max()) * row_bytes >= PREFETCH_FROM_BYTES:
        extents = [(begin + int(a) * row_bytes, int(b - a) * row_bytes) for a, b in pairwise(offsets)]
        prefetch = _prefetch(mapped, extents)
    return _Column(samples, tuple(dataset.shape[1:]), dataset.dtype, sample, prefetch, ragged=True)


def _map_array(path: Path, mapped: mmap.mmap, dataset: Any) -> tuple[int, NDArray[Any]]:
    """Where a contiguous dataset begins in its file, and its values as a view of the map."""
    offset = dataset.id.get_offset()
    if offset is None or offset + dataset.nbytes > len(mapped):
        raise ValueError(f"{path}: dataset {dataset.name!r} does not lie inside the file's {len(mapped)} bytes")
    return offset, np.frombuffer(mapped, dataset.dtype, dataset.size, offset).reshape(dataset.shape)


def _column(path: Path, mapped: mmap.mmap, dataset: Any) -> _Column:
    samples, *rest = dataset.shape
    shape, dtype = tuple(rest), dataset.dtype
    if dataset.chunks is None:
        offset, array = _map_array(path, mapped, dataset)
        sample_bytes = dataset.nbytes // samples
        extents = [(offset + i * sample_bytes, sample_bytes) for i in range(samples)]
        return _Column(samples, shape, dtype, array.__getitem__, _prefetch(mapped, extents))
    if dataset.chunks != (1, *shape) or dataset.compression != "gzip" or dataset.shuffle or dataset.fletcher32:
        raise ValueError(f"{path}: dataset {dataset.name!r}: expected contiguous, or gzip with one chunk per sample")
    chunks = [dataset.id.get_chunk_info_by_coord((i, *(0 for _ in shape))) for i in range(samples)]
    extents = [(chunk.byte_offset, chunk.size) for chunk in chunks]

    def inflate(index: int) -> NDArray[Any]:
        begin, size = extents[index]
        try:
            return np.frombuffer(zlib.decompress(mapped[begin : begin + size]), dtype).reshape(shape)
        except (zlib.error, ValueError):
            place = index % samples
            raise ValueError(f"{path}: sample {place} of {dataset_name!r} is damaged: it does not decompress") from None

    dataset_name = dataset.name
    return _Column(samples, shape, dtype, inflate, _prefetch(mapped, extents))


def _prefetch(mapped: mmap.mmap, extents: Sequence[tuple[int, int]]) -> Callable[[int], None] | None:
    """Ask for a whole sample at once: the kernel's own read-ahead is small and knows nothing of samples."""
    if max(size for _, size in extents) < PREFETCH_FROM_BYTES or not hasattr(mmap, "MADV_WILLNEED"):
        return None

    def prefetch(index: int) -> None:
        begin, size = extents[index]
        skew = begin % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, begin - skew, size + skew)

    return prefetch


def _open(path: Path) -> h5py.File:
    """Open for reading, without the file locks that network file systems often lack."""
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise ValueError(f"{path}: not a readable HDF5 file: {error}") from None


def _sample_count(path: Path, arrays: Mapping[str, NDArray[Any]]) -> int:
    counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    for name, rows in list(counts.items()):
        offsets = arrays.get(_offsets_of(name))
        if name.endswith(OFFSETS):
            problem = _offsets_problem(arrays[name])
            if problem is not None:
                raise ValueError(f"{path}: array {name!r} {problem}")
            counts[name] = rows - 1
        elif offsets is not None:
            if rows == 0 or rows != offsets[-1]:
                raise ValueError(f"{path}: array {name!r} has {rows} rows, its offsets say {offsets[-1]}")
            counts[name] = len(offsets) - 1
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ValueError(f"{path}: expected arrays with one number of samples in the first dimension, found {counts}")
    return next(iter(counts.values()))


def _problem(root: Path, entry: ShardEntry, *, deep: bool) -> str | None:
    path = root / entry.file
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            what = "truncated" if size < entry.bytes else "too long"
            return f"{path}: {what}: {size} bytes, manifest says {entry.bytes}"
        if not deep:
            return None
        sha256, crc32c = _checksums(path)
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    for name, found, wanted in (("crc32c", crc32c, entry.crc32c), ("sha256", sha256, entry.sha256)):
        if found != wanted:
            return f"{path}: damaged: {name} {found[:16]}, manifest says {wanted[:16]}"
    return None


def _checksums(path: Path) -> tuple[str, str]:
    """sha256 and crc32c of a file, in hex."""
    sha256, crc = hashlib.sha256(), 0
    for block in _blocks(path):
        sha256.update(block)
        crc = google_crc32c.extend(crc, block)
    return sha256.hexdigest(), f"{crc:08x}"


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            yield block
