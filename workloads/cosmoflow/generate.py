"""Makes CosmoFlow data sets: synthetic universes, conversion of the public data, export to the reference's own form.

What a universe is lies in cosmology.py, what a file of the reference is in tfrecord.py and universes.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from suite.distributed import World
from suite.shards import (
    MANIFEST_NAME,
    Compression,
    Manifest,
    ShardEntry,
    read_manifest,
    shard_entry,
    shard_path,
    write_manifest,
    write_shard,
)
from workloads.cosmoflow.config import REDSHIFTS, TARGETS
from workloads.cosmoflow.cosmology import Simulation, universe

Progress = Callable[[int, int], None]

GENERATOR_VERSION = 1
UNFINISHED_NAME = "generation.json"  # what an incomplete folder is going to be; replaced by the manifest
VALIDATION_INDEX = 2**32  # validation universes are numbered from here: a larger training split never meets them


@dataclass(frozen=True)
class DataSize:
    """The synthetic data set of one size. A universe gives (mesh / cube)^3 samples of cube^3 voxels."""

    simulation: Simulation
    cube: int
    train_universes: int
    validation_universes: int
    universes_per_shard: int
    compression: Compression = "none"

    @property
    def cubes_per_universe(self) -> int:
        """Samples that share the targets of one universe."""
        return (self.simulation.mesh // self.cube) ** 3


SIZES: dict[str, DataSize] = {
    "smoke": DataSize(Simulation(32, 16, 256.0, "2lpt"), 16, 2_000, 500, 250),
    "mini": DataSize(Simulation(32, 16, 256.0, "2lpt"), 16, 8_000, 1_000, 250),
    "mini32": DataSize(Simulation(64, 32, 512.0, "2lpt"), 32, 2_000, 500, 50),
    "small": DataSize(Simulation(64, 64, 256.0, "cola"), 64, 4_096, 512, 32),
    "full": DataSize(Simulation(512, 512, 512.0, "cola"), 128, 8_192, 1_024, 1, "gzip"),
}


def generate(root: Path, size: str, *, seed: int, world: World, progress: Progress | None = None) -> None:
    """Generate a data set in the sharded form; a complete one is left as it is, an interrupted one is continued.

    ``progress(done, total)`` counts this rank's universes. ValueError if the folder holds, or is to hold, other data.
    """
    if size not in SIZES:
        raise ValueError(f"cosmoflow: unknown size {size!r}; sizes: {', '.join(SIZES)}")
    settings = SIZES[size]
    recipe = {
        "name": "synthetic",
        "version": GENERATOR_VERSION,
        "seed": seed,
        "size": size,
        "redshifts": REDSHIFTS,
        "targets": TARGETS,
        **asdict(settings),
    }
    if _start(root, recipe, world):
        return
    mine = _plan(settings)[world.rank :: world.size]
    total, done = sum(len(piece.universes) for piece in mine), 0

    def tell() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    def build(piece: _Piece) -> dict[str, NDArray[Any]]:
        return _synthetic_shard(piece, settings, seed, tell)

    shards = _write_all(root, mine, build, settings.compression, world)
    attributes = {"periodic": settings.cubes_per_universe == 1, "sample_shape": [settings.cube] * 3 + [len(REDSHIFTS)]}
    _finish(root, size, seed, recipe, shards, attributes, world)


@dataclass(frozen=True)
class _Piece:
    """One shard to be written: the universes in it, by number."""

    split: str
    shard: int
    universes: range


@dataclass(frozen=True)
class _Shard:
    """One finished shard. ``histogram[c, v]``: voxels of channel c with count v."""

    split: str
    shard: int
    entry: ShardEntry
    histogram: NDArray[np.int64]


def _plan(settings: DataSize) -> list[_Piece]:
    pieces = []
    for split, first, number in (
        ("train", 0, settings.train_universes),
        ("validation", VALIDATION_INDEX, settings.validation_universes),
    ):
        step = settings.universes_per_shard
        for shard, begin in enumerate(range(0, number, step)):
            pieces.append(_Piece(split, shard, range(first + begin, first + min(begin + step, number))))
    return pieces


def _start(root: Path, recipe: dict[str, Any], world: World) -> bool:
    """True if the data set is there already. Rank 0 notes what the folder is becoming, or compares with what it is."""
    complete, problem = False, None
    if world.is_first:
        try:
            complete = _claim(root, json.loads(json.dumps(recipe)))
        except (OSError, ValueError) as error:
            problem = error
    world.check_together(problem)
    return bool(world.broadcast(complete))


def _claim(root: Path, recipe: dict[str, Any]) -> bool:
    complete = (root / MANIFEST_NAME).exists()
    note = root / UNFINISHED_NAME
    if complete:
        found = read_manifest(root).generator
    elif note.exists():
        found = json.loads(note.read_text())
    elif root.exists() and any(root.iterdir()):
        raise ValueError(f"{root}: not empty and not an unfinished CosmoFlow data set; choose another folder")
    else:
        root.mkdir(parents=True, exist_ok=True)
        part = note.with_name(note.name + ".part")
        part.write_text(json.dumps(recipe, indent=1) + "\n")
        part.replace(note)
        return False
    different = sorted(key for key in found.keys() | recipe.keys() if found.get(key) != recipe.get(key))
    if different:
        key = different[0]
        raise ValueError(
            f"{root}: holds other data: {key} is {found.get(key)!r}, not {recipe.get(key)!r}; choose another folder"
        )
    return complete


def _synthetic_shard(piece: _Piece, settings: DataSize, seed: int, tell: Callable[[], None]) -> dict[str, NDArray[Any]]:
    cubes = settings.cubes_per_universe
    samples = len(piece.universes) * cubes
    x = np.empty((samples, *(settings.cube,) * 3, len(REDSHIFTS)), dtype=np.int16)
    y = np.empty((samples, len(TARGETS)), dtype=np.float32)
    for position, index in enumerate(piece.universes):
        counts, targets = universe(settings.simulation, seed, index)
        here = slice(position * cubes, (position + 1) * cubes)
        x[here], y[here] = split_cubes(counts, settings.cube), targets
        tell()
    return {"x": x, "y": y, "universe": np.repeat(np.array(piece.universes, dtype=np.int64), cubes)}


def split_cubes(counts: NDArray[np.int16], cube: int) -> NDArray[np.int16]:
    """The cubes (M, cube, cube, cube, C) of a universe (side, side, side, C), the last space axis running fastest."""
    m = counts.shape[0] // cube
    blocks = counts.reshape(m, cube, m, cube, m, cube, counts.shape[-1])
    return blocks.transpose(0, 2, 4, 1, 3, 5, 6).reshape(m**3, cube, cube, cube, counts.shape[-1])


def _write_all(
    root: Path,
    mine: list[_Piece],
    build: Callable[[_Piece], dict[str, NDArray[Any]]],
    compression: Compression,
    world: World,
) -> list[_Shard]:
    """Write this rank's shards, keeping finished ones; all ranks' shards in order. One rank's failure ends all."""
    shards, problem = [], None
    try:
        for piece in mine:
            path = shard_path(root, piece.split, piece.shard)
            if path.exists():
                entry = shard_entry(path)
                with h5py.File(path, locking=False) as file:
                    counts = file["x"][...]
            else:
                arrays = build(piece)
                entry = write_shard(path, arrays, compression=compression)
                counts = arrays["x"]
            shards.append(_Shard(piece.split, piece.shard, entry, histogram(counts)))
    except (OSError, ValueError) as error:
        problem = error
    world.check_together(problem)
    everywhere = [shard for rank in world.allgather(shards) for shard in rank]
    return sorted(everywhere, key=lambda shard: (shard.split, shard.shard))


def histogram(counts: NDArray[np.int16]) -> NDArray[np.int64]:
    """Voxels per (channel, count): exact, so that statistics do not depend on the order of shards."""
    channels = counts.reshape(-1, counts.shape[-1])
    return np.stack([np.bincount(channels[:, c], minlength=int(counts.max()) + 1) for c in range(channels.shape[1])])


def input_statistics(histograms: list[NDArray[np.int64]]) -> dict[str, list[float]]:
    """Mean and standard deviation of log1p(counts) per channel."""
    total = np.zeros((histograms[0].shape[0], max(h.shape[1] for h in histograms)))
    for each in histograms:
        total[:, : each.shape[1]] += each
    value = np.log1p(np.arange(total.shape[1]))
    voxels = total.sum(axis=1)
    mean = total @ value / voxels
    variance = total @ value**2 / voxels - mean**2
    return {"log1p_mean": mean.tolist(), "log1p_std": np.sqrt(variance).tolist()}


def _finish(
    root: Path,
    size: str,
    seed: int,
    recipe: dict[str, Any],
    shards: list[_Shard],
    attributes: dict[str, Any],
    world: World,
) -> None:
    """Rank 0 writes the manifest; then the folder is complete."""
    problem = None
    if world.is_first:
        splits = {
            split: tuple(shard.entry for shard in shards if shard.split == split) for split in ("train", "validation")
        }
        statistics = input_statistics([shard.histogram for shard in shards if shard.split == "train"])
        try:
            write_manifest(
                root,
                Manifest(
                    workload="cosmoflow",
                    size=size,
                    seed=seed,
                    generator=json.loads(json.dumps(recipe)),
                    splits=splits,
                    attributes=attributes | statistics,
                ),
            )
            (root / UNFINISHED_NAME).unlink(missing_ok=True)
        except OSError as error:
            problem = error
    world.check_together(problem)
