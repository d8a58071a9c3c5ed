"""Computes a data set's manifest attributes (graph sizes, force and energy scales) from a summary of each shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.data.build import SPLITS, Arrays, check_disjoint
from mlhpc.workloads.open_catalyst.structures import Neighbourhood


@dataclass(frozen=True)
class Summary:
    """Sums over one shard.

    They are added in the order of the shards, so the result is the same on any number of ranks.
    """

    samples: int
    atoms: int
    edges: int
    triplets: int
    components: int  # force components of free atoms: three each
    force_absolute: float
    force_square: float
    energy: float
    energy_square: float
    most_atoms: int
    most_triplets: int
    trajectories: frozenset[int]


def summarise(arrays: Arrays) -> Summary:
    """Summarise the arrays of `structures.build_shard_arrays`.

    Forces on fixed atoms do not count: they are not predicted.
    """
    force: NDArray[np.float64] = arrays["atom.force"][arrays["atom.fixed"] == 0].astype(np.float64)
    lengths = np.diff(arrays["atom.offsets"])
    return Summary(
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


def compute_attributes(neighbourhood: Neighbourhood, splits: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Return the neighbourhood, mean and largest graph sizes, scales of forces and energies of the training split.

    ValueError if a trajectory is in both splits.
    """
    trajectories = {split: frozenset().union(*(each.trajectories for each in splits[split])) for split in SPLITS}
    check_disjoint(trajectories, "trajectory", "its frames")
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
        # rounding may leave a variance below zero
        "energy_std": float(np.sqrt(max(mean("energy_square", samples) - energy**2, 0.0))),
        **{f"{split}_trajectories": len(trajectories[split]) for split in SPLITS},
    }
