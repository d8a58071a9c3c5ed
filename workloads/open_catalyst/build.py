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
    Manifest,
    ShardEntry,
    read_manifest,
    shard_entry,
    shard_path,
    write_manifest,
    write_shard,
)
from workloads.open_catalyst.structures import Arrays, Neighbourhood

UNFINISHED_NAME = "generation.json"  # what an incomplete folder is going to be; the manifest takes its place
SPLITS = ("train", "validation")
STATISTICS = ("atom.offsets", "atom.force", "atom.fixed", "energy", "trajectory", "edges", "triplets")


@dataclass(frozen=True)
class Piece:
    """One shard to be: ``make`` gives the arrays of `structures.shard_arrays`."""

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
    neighbourhood: Neighbourhood,
    world: World,
) -> None:
    """Write a data set. A complete one of this recipe is left as it is, finished shards of an interrupted one are kept.

    ValueError on every rank if the folder holds other data, a shard cannot be made, or a trajectory is in both splits.
    """
    plain = json.loads(json.dumps(recipe))
    if _start(root, plain, world):
        return
    shards = _write_all(root, pieces[world.rank :: world.size], world)
    problem = None
    if world.is_first:
        try:
            write_manifest(root, _manifest(plain, shards, size, seed, neighbourhood))
            (root / UNFINISHED_NAME).unlink()
        except (OSError, ValueError) as error:
            problem = error
    world.check_together(problem)


@dataclass(frozen=True)
class _Sums:
    """Of the training split; added in the order of the shards, so the same on any number of ranks."""

    atoms: int
    edges: int
    triplets: int
    components: int  # of the forces on free atoms
    force_absolute: float
    force_square: float
    energy: float
    energy_square: float


@dataclass(frozen=True)
class _Shard:
    split: str
    shard: int
    entry: ShardEntry
    sums: _Sums
    largest: tuple[int, int]  # atoms, triplets
    trajectories: frozenset[int]


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
        raise ValueError(f"{root}: not empty and not an unfinished OpenCatalyst data set; choose another folder")
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


def _write_all(root: Path, mine: Sequence[Piece], world: World) -> list[_Shard]:
    """Write this rank's shards, keeping finished ones; all ranks' shards in order. One rank's failure ends all."""
    shards, problem = [], None
    try:
        for piece in mine:
            path = shard_path(root, piece.split, piece.shard)
            if path.exists():
                entry, arrays = shard_entry(path), _read(path)
            else:
                arrays = piece.make()
                entry = write_shard(path, arrays)
            shards.append(_described(piece, entry, arrays))
    except (OSError, ValueError) as error:
        problem = error
    world.check_together(problem)
    everywhere = [shard for rank in world.allgather(shards) for shard in rank]
    return sorted(everywhere, key=lambda shard: (shard.split, shard.shard))


def _read(path: Path) -> Arrays:
    with h5py.File(path, "r", locking=False) as file:
        return {name: file[name][...] for name in STATISTICS}


def _described(piece: Piece, entry: ShardEntry, arrays: Arrays) -> _Shard:
    force: NDArray[np.float64] = arrays["atom.force"][arrays["atom.fixed"] == 0].astype(np.float64)
    lengths = np.diff(arrays["atom.offsets"])
    sums = _Sums(
        atoms=int(lengths.sum()),
        edges=int(arrays["edges"].sum()),
        triplets=int(arrays["triplets"].sum()),
        components=force.size,
        force_absolute=float(np.abs(force).sum()),
        force_square=float(np.square(force).sum()),
        energy=float(arrays["energy"].sum()),
        energy_square=float(np.square(arrays["energy"]).sum()),
    )
    largest = (int(lengths.max()), int(arrays["triplets"].max()))
    return _Shard(piece.split, piece.shard, entry, sums, largest, frozenset(arrays["trajectory"].tolist()))


def _manifest(
    recipe: dict[str, Any], shards: list[_Shard], size: str, seed: int, neighbourhood: Neighbourhood
) -> Manifest:
    by_split = {split: [shard for shard in shards if shard.split == split] for split in SPLITS}
    trajectories = {split: frozenset().union(*(shard.trajectories for shard in by_split[split])) for split in SPLITS}
    shared = trajectories["train"] & trajectories["validation"]
    if shared:
        raise ValueError(
            f"trajectory {min(shared)} is in both splits, with {len(shared) - 1} more: its frames would leak"
        )
    train = [shard.sums for shard in by_split["train"]]
    samples = sum(shard.entry.samples for shard in by_split["train"])

    def mean(name: str, count: int) -> float:
        return float(sum(getattr(sums, name) for sums in train) / count)

    components = sum(sums.components for sums in train)
    energy = mean("energy", samples)
    return Manifest(
        workload="open_catalyst",
        size=size,
        seed=seed,
        generator=recipe,
        splits={split: tuple(shard.entry for shard in by_split[split]) for split in SPLITS},
        attributes={
            "cutoff_angstrom": neighbourhood.cutoff_angstrom,
            "max_neighbours": neighbourhood.max_neighbours,
            "mean_atoms": mean("atoms", samples),
            "mean_edges": mean("edges", samples),
            "mean_triplets": mean("triplets", samples),
            "most_atoms": max(shard.largest[0] for shard in shards),
            "most_triplets": max(shard.largest[1] for shard in shards),
            "force_mean_absolute": mean("force_absolute", components),
            "force_rms": float(np.sqrt(mean("force_square", components))),
            "energy_mean": energy,
            "energy_std": float(np.sqrt(max(mean("energy_square", samples) - energy**2, 0.0))),
            **{f"{split}_trajectories": len(trajectories[split]) for split in SPLITS},
        },
    )
