"""Turns recipes into complete sharded data sets: over ranks, continued after a kill, the manifest last. Makes no samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

UNFINISHED_NAME = "generation.json"  # what an incomplete folder is going to be; the manifest takes its place
SPLITS = ("train", "validation")

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Piece:
    """One shard to be: ``make`` gives x (N, n, n, n, 4) int16, y (N, 4) float32 and universe (N,) int64."""

    split: str
    shard: int
    make: Callable[[], Arrays]


def build(
    root: Path,
    recipe: dict[str, Any],
    pieces: Sequence[Piece],
    *,
    size: str,
    seed: int,
    compression: Compression,
    world: World,
) -> None:
    """Write a data set. A complete one of this recipe is left as it is, finished shards of an interrupted one are kept.

    ValueError on every rank if the folder holds other data, a shard cannot be made, or a universe is in both splits.
    """
    plain = json.loads(json.dumps(recipe))
    if _start(root, plain, world):
        return
    shards = _write_all(root, pieces[world.rank :: world.size], compression, world)
    problem = None
    if world.is_first:
        try:
            write_manifest(root, _manifest(plain, shards, size, seed))
            (root / UNFINISHED_NAME).unlink()
        except (OSError, ValueError) as error:
            problem = error
    world.check_together(problem)


def input_statistics(histograms: Sequence[NDArray[np.int64]]) -> dict[str, list[float]]:
    """Mean and standard deviation of log1p(counts) per channel, from `histogram`s."""
    total = np.zeros((histograms[0].shape[0], max(each.shape[1] for each in histograms)))
    for each in histograms:
        total[:, : each.shape[1]] += each
    value = np.log1p(np.arange(total.shape[1]))
    voxels = total.sum(axis=1)
    mean = total @ value / voxels
    variance = total @ value**2 / voxels - mean**2
    return {"log1p_mean": mean.tolist(), "log1p_std": np.sqrt(variance).tolist()}


def histogram(counts: NDArray[np.int16]) -> NDArray[np.int64]:
    """Voxels per (channel, count): whole numbers, so that sums do not depend on the order of shards."""
    channels = counts.reshape(-1, counts.shape[-1])
    return np.stack([np.bincount(channels[:, c], minlength=int(counts.max()) + 1) for c in range(channels.shape[1])])


@dataclass(frozen=True)
class _Shard:
    split: str
    shard: int
    entry: ShardEntry
    sample_shape: tuple[int, ...]
    histogram: NDArray[np.int64]
    universes: frozenset[int]


def _start(root: Path, recipe: dict[str, Any], world: World) -> bool:
    """True if the data set is there already. Rank 0 notes what the folder is becoming, or compares with what it is."""
    complete, problem = False, None
    if world.is_first:
        try:
            complete = _claim(root, recipe)
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


def _write_all(root: Path, mine: Sequence[Piece], compression: Compression, world: World) -> list[_Shard]:
    """Write this rank's shards, keeping finished ones; all ranks' shards in order. One rank's failure ends all."""
    shards, problem = [], None
    try:
        for piece in mine:
            path = shard_path(root, piece.split, piece.shard)
            if path.exists():
                entry, arrays = shard_entry(path), _read(path)
            else:
                arrays = piece.make()
                entry = write_shard(path, arrays, compression=compression)
            x, universes = arrays["x"], frozenset(arrays["universe"].tolist())
            shards.append(_Shard(piece.split, piece.shard, entry, x.shape[1:], histogram(x), universes))
    except (OSError, ValueError) as error:
        problem = error
    world.check_together(problem)
    everywhere = [shard for rank in world.allgather(shards) for shard in rank]
    return sorted(everywhere, key=lambda shard: (shard.split, shard.shard))


def _read(path: Path) -> Arrays:
    with h5py.File(path, "r", locking=False) as file:
        return {name: file[name][...] for name in ("x", "universe")}


def _manifest(recipe: dict[str, Any], shards: list[_Shard], size: str, seed: int) -> Manifest:
    by_split = {split: [shard for shard in shards if shard.split == split] for split in SPLITS}
    universes = {split: frozenset().union(*(shard.universes for shard in by_split[split])) for split in SPLITS}
    shared = universes["train"] & universes["validation"]
    if shared:
        raise ValueError(
            f"universe {min(shared)} is in both splits, with {len(shared) - 1} more: its targets would leak"
        )
    samples = sum(shard.entry.samples for shard in shards)
    return Manifest(
        workload="cosmoflow",
        size=size,
        seed=seed,
        generator=recipe,
        splits={split: tuple(shard.entry for shard in by_split[split]) for split in SPLITS},
        attributes={
            "sample_shape": list(shards[0].sample_shape),
            "periodic": samples == sum(map(len, universes.values())),  # a sample is a whole box, not a cube out of one
            **{f"{split}_universes": len(universes[split]) for split in SPLITS},
            **input_statistics([shard.histogram for shard in by_split["train"]]),
        },
    )
