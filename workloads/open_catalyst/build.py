"""What an OpenCatalyst data set's manifest must say: sizes of graphs, scales of forces, and that no split shares a trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.data.build import SPLITS, Arrays, DataSetPlan, Piece, build
from suite.world import World
from workloads.open_catalyst.structures import Neighbourhood


def build_structures(
    root: Path,
    recipe: dict[str, Any],
    pieces: Sequence[Piece],
    *,
    size: str,
    seed: int,
    neighbourhood: Neighbourhood,
    world: World,
) -> None:
    """Write a data set whose pieces give the arrays of `structures.shard_arrays`.

    ValueError on every rank if the folder holds other data, a shard cannot be made, or a trajectory is in both splits.
    """
    attributes = partial(_attributes, neighbourhood)
    build(root, DataSetPlan("open_catalyst", size, seed, recipe, pieces, _summarise, attributes), world)


@dataclass(frozen=True)
class _Summary:
    """Of one shard; sums are added in the order of the shards, so they are the same on any number of ranks."""

    samples: int
    atoms: int
    edges: int
    triplets: int
    components: int  # of the forces on free atoms
    force_absolute: float
    force_square: float
    energy: float
    energy_square: float
    most_atoms: int
    most_triplets: int
    trajectories: frozenset[int]


def _summarise(arrays: Arrays) -> _Summary:
    force: NDArray[np.float64] = arrays["atom.force"][arrays["atom.fixed"] == 0].astype(np.float64)
    lengths = np.diff(arrays["atom.offsets"])
    return _Summary(
        samples=len(lengths),
        atoms=int(lengths.sum()),
        edges=int(arrays["edges"].sum()),
        triplets=int(arrays["triplets"].sum()),
        components=force.size,
        force_absolute=float(np.abs(force).sum()),
        force_square=float(np.square(force).sum()),
        energy=float(arrays["energy"].sum()),
        energy_square=float(np.square(arrays["energy"]).sum()),
        most_atoms=int(lengths.max()),
        most_triplets=int(arrays["triplets"].max()),
        trajectories=frozenset(arrays["trajectory"].tolist()),
    )


def _attributes(neighbourhood: Neighbourhood, splits: Mapping[str, Sequence[_Summary]]) -> dict[str, Any]:
    trajectories = {split: frozenset().union(*(each.trajectories for each in splits[split])) for split in SPLITS}
    shared = trajectories["train"] & trajectories["validation"]
    if shared:
        raise ValueError(
            f"trajectory {min(shared)} is in both splits, with {len(shared) - 1} more: its frames would leak"
        )
    train, everything = splits["train"], [each for split in SPLITS for each in splits[split]]
    samples, components = sum(each.samples for each in train), sum(each.components for each in train)

    def mean(name: str, count: int) -> float:
        return float(sum(getattr(each, name) for each in train) / count)

    energy = mean("energy", samples)
    return {
        "cutoff_angstrom": neighbourhood.cutoff_angstrom,
        "max_neighbours": neighbourhood.max_neighbours,
        "mean_atoms": mean("atoms", samples),
        "mean_edges": mean("edges", samples),
        "mean_triplets": mean("triplets", samples),
        "most_atoms": max(each.most_atoms for each in everything),
        "most_triplets": max(each.most_triplets for each in everything),
        "force_mean_absolute": mean("force_absolute", components),
        "force_rms": float(np.sqrt(mean("force_square", components))),
        "energy_mean": energy,
        "energy_std": float(np.sqrt(max(mean("energy_square", samples) - energy**2, 0.0))),
        **{f"{split}_trajectories": len(trajectories[split]) for split in SPLITS},
    }
