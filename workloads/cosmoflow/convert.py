"""Converts the public CosmoFlow data (TFRecord files, HDF5 universes) to shards. Downloads nothing."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.data.build import SPLITS, Arrays, DataSetPlan, Progress, ShardPlan, build_data_set
from mlhpc.suite.data.shards import Compression
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import make_folder, write_atomically
from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow.config import REDSHIFTS, TARGETS
from mlhpc.workloads.cosmoflow.summary import compute_attributes, summarise
from mlhpc.workloads.cosmoflow.tfrecord import Sample, read_tfrecord

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
    # HDF5 locks even files that it only reads, and some cluster file systems have no locks
    with h5py.File(path, "r", locking=False) as file:
        side = file["full"].shape[0]
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
    try:
        with h5py.File(path, "r", locking=False) as file:
            for name in ("full", "unitPar"):
                if name not in file:
                    raise InputError(f"{path}: no dataset {name!r}; datasets: {', '.join(sorted(file)) or 'none'}")
            counts, targets = _full_counts(path, file["full"]), np.asarray(file["unitPar"][()], dtype=np.float32)
    except OSError as error:
        raise InputError(f"{path}: not a readable HDF5 file: {error}") from None
    if targets.shape != (len(TARGETS),) or not np.isfinite(targets).all():
        raise InputError(f"{path}: dataset 'unitPar' is {targets.tolist()}, expected {len(TARGETS)} finite numbers")
    if counts.min() < 0 or counts.max() > np.iinfo(np.int16).max:
        raise InputError(
            f"{path}: dataset 'full' has counts from {counts.min()} to {counts.max()}, expected int16 from 0"
        )
    return counts.astype(np.int16, copy=False), targets


def _full_counts(path: Path, full: h5py.Dataset) -> NDArray[np.integer[Any]]:
    side = full.shape[0] if full.shape else 0
    if full.shape != (side, side, side, len(REDSHIFTS)) or full.dtype.kind not in "iu":
        raise InputError(f"{path}: dataset 'full' is {full.shape} {full.dtype}, expected (n, n, n, 4) integers")
    return np.asarray(full[...])


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
    make_folder(folder)
    try:
        with tarfile.open(archive) as tar:
            # "data" refuses members and links that lead out of the folder, and device files
            tar.extractall(folder, filter="data")
    # a truncated gzip stream raises EOFError and a damaged one zlib.error, neither a TarError
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise InputError(f"{archive}: not a readable tar archive: {error}") from None
