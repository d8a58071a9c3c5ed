"""A structure with its energy and forces, checks of its values, and the arrays of a shard of structures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError
from mlhpc.workloads.open_catalyst.config import ELEMENTS
from mlhpc.workloads.open_catalyst.graph import Edges, find_neighbours
from mlhpc.workloads.open_catalyst.graph import list_triplets as triplets_of

Arrays = dict[str, NDArray[Any]]

TAGS = (0, 1, 2)  # below the surface, surface, adsorbate
PER_ATOM = {
    "position": (np.float32, (3,)),  # angstrom
    "force": (np.float32, (3,)),  # eV/angstrom
    "number": (np.uint8, ()),
    "tag": (np.uint8, ()),
    "fixed": (np.uint8, ()),
}


@dataclass(frozen=True)
class Structure:
    """Atoms in a cell that is periodic in three directions. Frames with the same ``trajectory`` belong together."""

    position: NDArray[np.float64]  # (A, 3) angstrom
    cell: NDArray[np.float64]  # (3, 3) angstrom, one vector a row
    number: NDArray[np.int64]  # (A,) atomic numbers
    tag: NDArray[np.int64]  # (A,)
    fixed: NDArray[np.bool_]  # (A,)
    force: NDArray[np.float64]  # (A, 3) eV/angstrom
    energy: float  # eV
    trajectory: int
    frame: int


@dataclass(frozen=True)
class Neighbourhood:
    """Which atoms are neighbours: within the cutoff, at most ``max_neighbours`` per atom."""

    cutoff_angstrom: float
    max_neighbours: int

    def edges(self, position: NDArray[np.float64], cell: NDArray[np.float64]) -> Edges:
        """Compute the edges. InputError if the cell is broken, atoms coincide or there is no edge."""
        edges = find_neighbours(position, cell, cutoff=self.cutoff_angstrom, most=self.max_neighbours)
        if not len(edges):
            raise InputError(f"no edge: no two of the {len(position)} atoms within {self.cutoff_angstrom:g} angstrom")
        return edges


def check(structure: Structure) -> None:
    """Check shapes, ranges and finiteness. InputError if the structure cannot be trained on."""
    atoms = len(structure.number)
    shapes = {"position": (atoms, 3), "force": (atoms, 3), "cell": (3, 3), "tag": (atoms,), "fixed": (atoms,)}
    for name, shape in shapes.items():
        actual = np.shape(getattr(structure, name))
        if actual != shape:
            raise InputError(f"{name} has the shape {actual}, expected {shape}")
    if not atoms:
        raise InputError("no atoms")
    for name in ("position", "force", "cell", "energy"):
        values = np.asarray(getattr(structure, name))
        if not np.isfinite(values).all():
            where = np.argwhere(~np.isfinite(np.atleast_1d(values)))[0]
            raise InputError(f"{name} has {np.atleast_1d(values)[tuple(where)]} at {where.tolist()}")
    for name, low, high in (("number", 1, ELEMENTS - 1), ("tag", TAGS[0], TAGS[-1])):
        values = np.asarray(getattr(structure, name))
        if values.min() < low or values.max() > high:
            raise InputError(f"{name} has values from {values.min()} to {values.max()}, expected {low} to {high}")
    if bool(structure.fixed.all()):
        raise InputError("all atoms are fixed: there is no force to learn")


def build_shard_arrays(structures: Sequence[Structure], neighbourhood: Neighbourhood, origins: Sequence[str]) -> Arrays:
    """Build the arrays of a shard. ``origins`` names each structure in error messages."""
    edges, triplets = [], []
    for structure, origin in zip(structures, origins, strict=True):
        try:
            check(structure)
            # rounded as the loader will read them: the counts of edges and triplets must be those of training
            stored = structure.position.astype(np.float32).astype(np.float64)
            graph = neighbourhood.edges(stored, structure.cell.astype(np.float32).astype(np.float64))
        except ValueError as error:
            raise InputError(f"{origin}: {error}") from None
        edges.append(len(graph))
        triplets.append(len(triplets_of(graph, len(structure.number))[0]))
    lengths = [len(structure.number) for structure in structures]
    arrays: Arrays = {"atom.offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)}
    for name, (dtype, _) in PER_ATOM.items():
        arrays[f"atom.{name}"] = np.concatenate([getattr(each, name) for each in structures]).astype(dtype)
    return arrays | {
        "cell": np.stack([each.cell for each in structures]).astype(np.float32),
        "energy": np.array([each.energy for each in structures], dtype=np.float64),
        "trajectory": np.array([each.trajectory for each in structures], dtype=np.int64),
        "frame": np.array([each.frame for each in structures], dtype=np.int32),
        "edges": np.array(edges, dtype=np.int32),
        "triplets": np.array(triplets, dtype=np.int64),
    }
