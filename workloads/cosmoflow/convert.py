"""Converts the public CosmoFlow data (TFRecord files, HDF5 universes) to shards. Downloads nothing.

Reads the reference's TFRecord files (gzip or plain) of tf.train.Example, without TensorFlow.

A record is a length (u64), its checksum, the payload, its checksum; checksums are masked CRC-32C. The payload is an
Example with two features. ``x`` is one byte string: little-endian int16 counts, channels last. ``y`` is four floats.
Formats: tensorflow.org/tutorials/load_data/tfrecord, protobuf.dev/programming-guides/encoding.

The manifest attributes of a CosmoFlow data set, computed from a summary of each shard.
"""

from __future__ import annotations

import hashlib
import platform
import re
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import google_crc32c
import h5py
import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.data.build import SPLITS, Arrays, DataSetPlan, Progress, ShardPlan, build_data_set, check_disjoint
from mlhpc.suite.data.shards import Compression, open_hdf5
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import make_folder, write_atomically
from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow.config import REDSHIFTS, TARGETS

GZIP_MAGIC = b"\x1f\x8b"
HEADER_BYTES, FOOTER_BYTES = 12, 4

Sample = tuple[NDArray[np.int16], NDArray[np.float32]]


def read_tfrecord(path: Path) -> Iterator[Sample]:
    """Read the samples of one file: x (n, n, n, 4) int16 and y (4,) float32.

    InputError names the file and the offset (in the uncompressed stream) of a damaged or unexpected record.
    """
    for offset, payload in _records(path, _content(path)):
        try:
            yield decode_example(payload)
        except ValueError as error:
            raise InputError(f"{path}: record at offset {offset}: {error}") from None


def decode_example(payload: bytes) -> Sample:
    """Parse a serialised tf.train.Example. InputError if it is damaged or has other features."""
    # Example.features is field 1 and Features.feature field 1: a map, of entries with key (1) and value (2)
    features: dict[bytes, memoryview] = {}
    for body in _fields(memoryview(payload), 1):
        for entry in _fields(body, 1):
            key = b"".join(bytes(part) for part in _fields(entry, 1))
            for value in _fields(entry, 2):
                features[key] = value
    missing = [name for name in ("x", "y") if name.encode() not in features]
    if missing:
        present = ", ".join(sorted(key.decode("utf-8", "replace") for key in features)) or "none"
        raise InputError(f"not a CosmoFlow sample: no feature {missing[0]!r}; features: {present}")
    # Feature.bytes_list is field 1 and Feature.float_list field 2; the values of either list are field 1
    counts = [value for part in _fields(features[b"x"], 1) for value in _fields(part, 1)]
    targets = [value for part in _fields(features[b"y"], 2) for value in _fields(part, 1)]
    return _counts(counts), _targets(targets)


def _counts(values: list[memoryview]) -> NDArray[np.int16]:
    if len(values) != 1:
        raise InputError(f"feature 'x' has {len(values)} byte strings, expected 1")
    size = len(values[0])
    channels = len(REDSHIFTS)
    side = round((size / (2 * channels)) ** (1 / 3))
    if side == 0 or size != 2 * channels * side**3:
        raise InputError(
            f"feature 'x' has {size} bytes, expected 2 x {channels} x n^3: a cube of {channels} int16 channels"
        )
    # astype copies: the array of frombuffer is read-only
    return np.frombuffer(values[0], dtype="<i2").reshape(side, side, side, channels).astype(np.int16)


def _targets(values: list[memoryview]) -> NDArray[np.float32]:
    # a writer may pack the floats in one field or write a field for each: the bytes are the same
    packed = b"".join(bytes(value) for value in values)
    if len(packed) != 4 * len(TARGETS):
        raise InputError(f"feature 'y' has {len(packed)} bytes, expected {len(TARGETS)} floats")
    targets = np.frombuffer(packed, dtype="<f4").astype(np.float32)
    if not np.isfinite(targets).all():
        raise InputError(f"feature 'y' is {targets.tolist()}, expected finite numbers")
    return targets


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if not content.startswith(GZIP_MAGIC):
            return content
        # 31: a gzip header and trailer around a window of 2^15. gzip.decompress would not show where the stream ends
        stream = zlib.decompressobj(wbits=31)
        data = stream.decompress(content)
        complete = stream.eof
    except zlib.error as error:
        raise InputError(f"{path}: offset 0: gzip stream is damaged: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not complete:
        raise InputError(f"{path}: offset {len(data)}: gzip stream is truncated after {len(content)} compressed bytes")
    if stream.unused_data:
        raise InputError(f"{path}: offset {len(data)}: {len(stream.unused_data)} bytes follow the gzip stream")
    return data


def _records(path: Path, content: bytes) -> Iterator[tuple[int, bytes]]:
    if not content:
        raise InputError(f"{path}: offset 0: empty, expected a TFRecord file")
    offset = 0
    while offset < len(content):
        if offset + HEADER_BYTES > len(content):
            raise InputError(f"{path}: offset {offset}: truncated record header")
        length, check = struct.unpack_from("<QI", content, offset)
        if compute_masked_crc32c(content[offset : offset + 8]) != check:
            raise InputError(f"{path}: offset {offset}: record length fails its crc32c; damaged or not a TFRecord file")
        begin = offset + HEADER_BYTES
        if begin + length + FOOTER_BYTES > len(content):
            raise InputError(
                f"{path}: offset {offset}: truncated: record of {length} bytes, {len(content) - begin} left"
            )
        payload = content[begin : begin + length]
        if compute_masked_crc32c(payload) != struct.unpack_from("<I", content, begin + length)[0]:
            raise InputError(f"{path}: offset {begin}: payload of {length} bytes fails its crc32c")
        yield offset, payload
        offset = begin + length + FOOTER_BYTES


def compute_masked_crc32c(data: bytes) -> int:
    """Compute the CRC-32C, rotated and shifted as TFRecord stores it."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _fields(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """Return the values of one field of a message, in order; other fields are skipped.

    Lengths or 32-bit values only.
    """
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        field, wire_type = key >> 3, key & 7
        # wire types: 0 varint, 1 eight bytes, 2 a length and its bytes, 5 four bytes
        if wire_type == 0:
            _, position = _read_varint(message, position)
            continue
        if wire_type == 2:
            length, position = _read_varint(message, position)
        else:
            length = {1: 8, 5: 4}.get(wire_type, -1)
        if length < 0 or position + length > len(message):
            raise InputError("not a serialised tf.train.Example")
        if field == wanted:
            yield message[position : position + length]
        position += length


def _read_varint(message: memoryview, position: int) -> tuple[int, int]:
    value = 0
    # ten bytes of seven bits hold 64 bits
    for shift in range(0, 70, 7):
        if position >= len(message):
            break
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise InputError("not a serialised tf.train.Example")


STATISTICS_DIGITS = 10  # of input statistics: sums in another order, on another processor, differ after the fifteenth


@dataclass(frozen=True)
class Summary:
    """One shard. ``histogram`` is that of `compute_histogram`, ``universes`` the numbers of its universes."""

    samples: int
    sample_shape: tuple[int, ...]
    histogram: NDArray[np.int64]
    universes: frozenset[int]


def summarise(arrays: Arrays) -> Summary:
    """Summarise a shard of x (N, n, n, n, 4) int16, y (N, 4) float32 and universe (N,) int64."""
    x = arrays["x"]
    return Summary(len(x), x.shape[1:], compute_histogram(x), frozenset(arrays["universe"].tolist()))


def compute_attributes(splits: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Sample shape, names of the targets, number of universes per split, input statistics of the training split.

    ValueError if a universe is in both splits.
    """
    universes = {split: frozenset().union(*(shard.universes for shard in splits[split])) for split in SPLITS}
    check_disjoint(universes, "universe", "its targets")
    samples = sum(shard.samples for split in SPLITS for shard in splits[split])
    return {
        "sample_shape": list(splits["train"][0].sample_shape),
        "targets": list(TARGETS),
        # one sample per universe: it is the whole periodic box, not a cube cut from it
        "periodic": samples == sum(map(len, universes.values())),
        **{f"{split}_universes": len(universes[split]) for split in SPLITS},
        **compute_input_statistics([shard.histogram for shard in splits["train"]]),
    }


def compute_input_statistics(histograms: Sequence[NDArray[np.int64]]) -> dict[str, list[float]]:
    """Compute mean and standard deviation of log1p(counts) per channel from the histograms of the shards."""
    total = np.zeros((histograms[0].shape[0], max(each.shape[1] for each in histograms)))
    for each in histograms:
        # a shard's histogram ends at its own largest count
        total[:, : each.shape[1]] += each
    value = np.log1p(np.arange(total.shape[1]))
    voxels = total.sum(axis=1)
    mean = total @ value / voxels
    variance = total @ value**2 / voxels - mean**2
    rounded = (np.round(each, STATISTICS_DIGITS).tolist() for each in (mean, np.sqrt(variance)))
    return dict(zip(("log1p_mean", "log1p_std"), rounded, strict=True))


def compute_histogram(counts: NDArray[np.int16]) -> NDArray[np.int64]:
    """Count voxels per (channel, count). Integers, so that their sums do not depend on the order of the shards."""
    channels = counts.reshape(-1, counts.shape[-1])
    return np.stack([np.bincount(channels[:, c], minlength=int(counts.max()) + 1) for c in range(channels.shape[1])])


CONVERTER_VERSION = 1  # raised when the same files give other shards
PUBLIC_CUBE = 128
SUMS_NAME = "SHA256SUMS"
VALIDATION_EVERY = 9  # if a folder has no splits, every ninth universe: 8 : 1, as in the MLPerf data set
MAX_SHARD_BYTES, MAX_SHARD_FILES = 1 << 30, 256
SIZE_OF_CUBE: dict[int, tuple[str, Compression]] = {
    16: ("smoke", "none"),
    32: ("mini", "none"),
    64: ("small", "none"),
    128: ("full", "gzip"),
}
WHERE_THE_DATA_ARE = (
    "cosmoflow: the public data are not downloaded here, because compute nodes have no internet: "
    "on a login or transfer "
    "node get cosmoUniverse_2019_05_4parE_tf_v2.tar (1.7 TB, 524,288 + 65,536 samples) or "
    "cosmoUniverse_2019_05_4parE_tf_small.tgz (179 MB, 32 + 32 samples) from "
    "https://portal.nersc.gov/project/dasrepo/cosmoflow-benchmark/ or from the Globus collection "
    "31647fba-a006-4322-ad3e-9a4f124db422 (app.globus.org/file-manager), then give --from PATH: the archive, with "
    "PATH.sha256 beside it, or its unpacked folder, with SHA256SUMS in it (both as sha256sum writes them)"
)


def convert(
    source: Path, root: Path, *, world: World, size: str | None = None, progress: Progress | None = None
) -> None:
    """Convert a folder of ``*.tfrecord`` files or of ``*.hdf5`` universes to shards.

    Subfolders ``train`` and ``validation`` are the splits. Without them every ninth universe, by name, goes to
    validation. All cubes of a universe go to the same split. ``size`` defaults to the size with cubes of this side.
    """
    survey: _Source = world.compute_on_first(partial(_list_files, source), _Source)
    if survey.cube not in SIZE_OF_CUBE:
        raise InputError(
            f"{source}: samples of {survey.cube}^3 voxels; expected a side of "
            f"{', '.join(map(str, SIZE_OF_CUBE))}, one for each --size"
        )
    name, compression = SIZE_OF_CUBE[survey.cube]
    recipe = {
        "name": "converted",
        "version": CONVERTER_VERSION,
        "source": str(source),
        "form": survey.form,
        "files": len(survey.files),
        "cube": survey.cube,
    }
    plan = DataSetPlan(
        "cosmoflow", size or name, 0, recipe, _pieces(survey), summarise, compute_attributes, compression
    )
    build_data_set(root, plan, world, progress)


def fetch(destination: Path, *, source: str | None = None) -> None:
    """Copy the public files from ``source`` on this machine, checking their sha256 sums.

    ``source`` is an archive with ``<archive>.sha256`` in the same folder, or a folder with ``SHA256SUMS`` in it. Both
    have the form that the program sha256sum writes. InputError without a source, or for a URL; it says where to get the
    data.
    """
    if source is None or "://" in source:
        raise InputError(WHERE_THE_DATA_ARE)
    origin = Path(source)
    if origin.is_dir():
        sums = _sums(origin / SUMS_NAME)
        for name, expected in sums.items():
            _copy_checked(origin / name, destination / name, expected)
        return
    sums = _sums(origin.with_name(origin.name + ".sha256"))
    if origin.name not in sums:
        raise InputError(f"{origin}.sha256: no line for {origin.name}; write it with: sha256sum {origin.name}")
    # the whole archive is checked before any of it is unpacked
    _check_sha256(origin, sums[origin.name])
    _unpack(origin, destination)


def split_cubes(counts: NDArray[np.int16], cube: int) -> NDArray[np.int16]:
    """Cut a universe (side, side, side, C) into cubes (M, cube, cube, cube, C).

    The last space axis runs fastest.
    """
    m = counts.shape[0] // cube
    blocks = counts.reshape(m, cube, m, cube, m, cube, counts.shape[-1])
    return blocks.transpose(0, 2, 4, 1, 3, 5, 6).reshape(m**3, cube, cube, cube, counts.shape[-1])


@dataclass(frozen=True)
class _File:
    path: Path
    split: str
    universe: int


@dataclass(frozen=True)
class _Source:
    """The files of a folder; ``cube`` is the side of the samples in voxels."""

    form: str
    files: tuple[_File, ...]
    cube: int
    bytes_per_file: int


def _list_files(source: Path) -> _Source:
    """List the files of a source with their splits and universes. InputError if there are none, or none for a split."""
    form, paths = _find_files(source)
    # the cubes of one universe differ in the last three digits of their names
    names = [re.sub(r"_\d{3}$", "", path.stem) if form == "tfrecord" else path.stem for path in paths]
    order = {name: number for number, name in enumerate(sorted(set(names)))}
    splits = _splits(source, paths, [order[name] for name in names])
    files = tuple(
        _File(path, split, order[name])
        for path, split, name in zip(paths, splits, names, strict=True)
        if split is not None  # files in other folders, such as "test"
    )
    empty = [split for split in SPLITS if not any(file.split == split for file in files)]
    if empty:
        raise InputError(f"{source}: no file for the {empty[0]} split; {len(order)} universes in {len(paths)} files")
    shapes = _shapes(form, files[0].path)
    # counts are int16: two bytes each
    return _Source(form, files, shapes[0][0], sum(2 * int(np.prod(shape)) for shape in shapes))


def _find_files(source: Path) -> tuple[str, list[Path]]:
    """Find the files of the first form that the folder has. InputError if it has none."""
    if not source.is_dir():
        raise InputError(f"{source}: expected a folder of *.tfrecord files or *.hdf5 universes")
    for form in ("tfrecord", "hdf5"):
        paths = sorted(source.rglob(f"*.{form}"))
        if paths:
            return form, paths
    raise InputError(f"{source}: no *.tfrecord and no *.hdf5 file in it")


def _splits(source: Path, paths: Sequence[Path], universes: Sequence[int]) -> list[str | None]:
    """Return the split of each file: that of its folder.

    If no folder is named after a split, every ninth universe is for validation.
    """
    by_folder = [next((part for part in path.relative_to(source).parts if part in SPLITS), None) for path in paths]
    if any(by_folder):
        return by_folder
    last = max(universes)
    # fewer than nine universes: the last one is held out
    held_out = set(range(VALIDATION_EVERY - 1, last + 1, VALIDATION_EVERY)) or {last}
    return ["validation" if universe in held_out else "train" for universe in universes]


def _shapes(form: str, path: Path) -> list[tuple[int, ...]]:
    if form == "tfrecord":
        return [x.shape for x, _ in read_tfrecord(path)]
    with open_hdf5(path) as file:
        side = _find_full(path, file).shape[0]
    cube = min(PUBLIC_CUBE, side)
    if side % cube:
        raise InputError(f"{path}: {side}^3 voxels cannot be split in cubes of {cube}^3")
    return [(cube, cube, cube, 4)] * (side // cube) ** 3


def _pieces(source: _Source) -> list[ShardPlan]:
    step = max(1, min(MAX_SHARD_FILES, MAX_SHARD_BYTES // source.bytes_per_file))
    pieces = []
    for split in SPLITS:
        files = [file for file in source.files if file.split == split]
        for shard, begin in enumerate(range(0, len(files), step)):
            make = partial(_shard, files[begin : begin + step], source.form, source.cube)
            pieces.append(ShardPlan(split, shard, make))
    return pieces


def _shard(files: Sequence[_File], form: str, cube: int) -> Arrays:
    read: Callable[[Path], Iterator[Sample]] = read_tfrecord if form == "tfrecord" else partial(_cubes, cube=cube)
    columns: dict[str, list[Any]] = {"x": [], "y": [], "universe": []}
    for file in files:
        for x, y in read(file.path):
            if x.shape[0] != cube:
                raise InputError(f"{file.path}: sample of {x.shape[0]}^3 voxels among samples of {cube}^3")
            for name, value in (("x", x), ("y", y), ("universe", np.int64(file.universe))):
                columns[name].append(value)
    return {name: np.stack(values) for name, values in columns.items()}


def _cubes(path: Path, *, cube: int) -> Iterator[Sample]:
    counts, targets = _read_universe(path)
    if counts.shape[0] % cube:
        raise InputError(f"{path}: {counts.shape[0]}^3 voxels cannot be split in cubes of {cube}^3")
    return ((part, targets) for part in split_cubes(counts, cube))


def _read_universe(path: Path) -> Sample:
    """Read counts (n, n, n, 4) int16 and targets (4,) float32. InputError names file, dataset and what was expected.

    Files of https://portal.nersc.gov/project/m3363/ (cosmoUniverse_2019_05_4parE, 512^3 voxels of 1 Mpc/h) have
    ``full`` counts and targets ``unitPar``. namePar, physPar and redshifts hold the same information in physical units.
    """
    with open_hdf5(path) as file:
        counts, unit = np.asarray(_find_full(path, file)[...]), _find_dataset(path, file, "unitPar")
        if unit.shape != (len(TARGETS),) or unit.dtype.kind not in "fiu":
            raise InputError(f"{path}: dataset 'unitPar' is {unit.shape} {unit.dtype}, expected {len(TARGETS)} numbers")
        targets = np.asarray(unit[...], dtype=np.float32)
    if targets.shape != (len(TARGETS),) or not np.isfinite(targets).all():
        raise InputError(f"{path}: dataset 'unitPar' is {targets.tolist()}, expected {len(TARGETS)} finite numbers")
    if counts.min() < 0 or counts.max() > np.iinfo(np.int16).max:
        raise InputError(
            f"{path}: dataset 'full' has counts from {counts.min()} to {counts.max()}, expected int16 from 0"
        )
    return counts.astype(np.int16, copy=False), targets


def _find_dataset(path: Path, file: h5py.File, name: str) -> h5py.Dataset:
    found = file.get(name)
    if not isinstance(found, h5py.Dataset):
        raise InputError(f"{path}: no dataset {name!r}; datasets: {', '.join(sorted(file)) or 'none'}")
    return found


def _find_full(path: Path, file: h5py.File) -> h5py.Dataset:
    full = _find_dataset(path, file, "full")
    side = full.shape[0] if full.shape else 0
    if full.shape != (side, side, side, len(REDSHIFTS)) or full.dtype.kind not in "iu":
        raise InputError(f"{path}: dataset 'full' is {full.shape} {full.dtype}, expected (n, n, n, 4) integers")
    return full


def _sums(path: Path) -> dict[str, str]:
    """Read a file written by sha256sum. Returns the sha256 by file name."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; write it with sha256sum") from None
    sums = {}
    for number, line in enumerate(lines, start=1):
        digest, separator, name = line.partition(" ")
        # sha256sum writes a second space (text) or an asterisk (binary) before the name
        name = name.lstrip(" *").removeprefix("./")
        # the name is joined to the destination, so it must not lead out of that folder
        if not separator or not re.fullmatch(r"[0-9a-fA-F]{64}", digest) or ".." in Path(name).parts or name[:1] == "/":
            raise InputError(f"{path}:{number}: expected a sha256 and a file name, found {line[:80]!r}")
        sums[name] = digest.lower()
    return sums


def _check_sha256(path: Path, expected: str, copy_to: IO[bytes] | None = None) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
            if copy_to is not None:
                copy_to.write(block)
    if digest.hexdigest() != expected:
        raise InputError(f"{path}: sha256 is {digest.hexdigest()}, expected {expected}; copy it again")


def _copy_checked(origin: Path, target: Path, expected: str) -> None:
    # one pass over the data: the copy is hashed while it is written, and dropped if the sum is wrong
    with write_atomically(target) as part, part.open("wb") as file:
        _check_sha256(origin, expected, copy_to=file)


def _unpack(archive: Path, folder: Path) -> None:
    if not hasattr(tarfile, "data_filter"):  # Debian 12 has 3.11.2
        raise InputError(
            f"{archive}: Python {platform.python_version()} cannot unpack a stranger's archive safely; expected"
            " 3.11.4 or"
            f" newer: unpack it yourself into {folder}"
        )
    make_folder(folder)
    try:
        with tarfile.open(archive) as tar:
            # "data" refuses members and links that lead out of the folder, and device files
            tar.extractall(folder, filter="data")
    # a truncated gzip stream raises EOFError and a damaged one zlib.error, neither a TarError
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise InputError(f"{archive}: not a readable tar archive: {error}") from None
