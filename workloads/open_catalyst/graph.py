"""Computes edges and triplets of atoms in a periodic cell, with numpy and without a loop over atoms.

An edge runs from a source atom j to a target atom i. The target is in the cell itself, the source in its image
``offset``. A triplet is two edges k->j and j->i. Conventions of the reference (ocp dimenet_plus_plus.py and
atoms_to_graphs.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from mlhpc.suite.errors import InputError

OFFSET_BASE = 1 << 16  # an image further away than a quarter of this, in cells, means a broken cell
COINCIDENT_ANGSTROM = 1e-6
FLATTEST_CELL = 1e-9  # smallest volume divided by the product of the edge lengths

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Edges:
    """Edges of one structure or of a batch, sorted by target and, within a target, by length."""

    source: Ints
    target: Ints
    offset: Ints  # (E, 3), in cells
    shift: Floats  # (E, 3), in angstrom: offset times cell

    def __len__(self) -> int:
        return len(self.source)


def find_neighbours(position: Floats, cell: Floats, *, cutoff: float, most: int) -> Edges:
    """Find the ``most`` nearest atoms within ``cutoff`` of every atom, with all three directions periodic.

    InputError if the cell has no volume or two atoms coincide.
    """
    shifts, owner, images = _images(position, cell, cutoff)
    bound = np.nextafter(cutoff, np.inf)  # the tree's bound is exclusive
    # queried once, so a cheap build matters more than fast queries
    tree = cKDTree(images, balanced_tree=False, compact_nodes=False)
    distance, nearest = tree.query(position, k=most + 1, distance_upper_bound=bound)
    if distance[:, 1].min() < COINCIDENT_ANGSTROM:
        atom = int(distance[:, 1].argmin())
        raise InputError(f"atom {atom} and another atom have the same position")
    is_neighbour = np.isfinite(distance)
    is_neighbour[:, 0] = False  # the nearest of all is the atom itself
    target, column = np.nonzero(is_neighbour)
    chosen = nearest[target, column]
    offset = shifts[chosen]
    return Edges(owner[chosen], target, offset, offset @ cell)


def join_edges(parts: Sequence[Edges], atoms: Sequence[int]) -> Edges:
    """Concatenate the edges of a batch; atom numbers continue from structure to structure."""
    first = np.concatenate([[0], np.cumsum(atoms)[:-1]])
    numbered = list(zip(parts, first, strict=True))
    return Edges(
        np.concatenate([part.source + begin for part, begin in numbered]),
        np.concatenate([part.target + begin for part, begin in numbered]),
        np.concatenate([part.offset for part in parts]),
        np.concatenate([part.shift for part in parts]),
    )


def list_triplets(edges: Edges, atoms: int) -> tuple[Ints, Ints]:
    """List all pairs of edges (k->j, j->i) with k other than i, sorted by the second edge.

    An image of i in another cell is another atom. So only k = i in the same cell is left out.
    """
    begin = np.searchsorted(edges.target, np.arange(atoms + 1))
    incoming = np.diff(begin)[edges.source]  # edges k->j of every edge j->i
    out = np.repeat(np.arange(len(edges)), incoming)
    # minus the triplets before: adding the running number below then counts from each edge's first
    first = np.repeat(begin[edges.source] - (np.cumsum(incoming) - incoming), incoming)
    into = first + np.arange(len(out))
    # one number per offset; opposite offsets have opposite numbers
    code = (edges.offset[:, 0] * OFFSET_BASE + edges.offset[:, 1]) * OFFSET_BASE + edges.offset[:, 2]
    back = (edges.source[into] == edges.target[out]) & (code[into] + code[out] == 0)
    return into[~back], out[~back]


def compute_inverse_cell(cell: Floats) -> Floats:
    """Compute the matrix from positions to fractions of the cell. InputError if the cell has no volume."""
    volume = abs(float(np.linalg.det(cell)))
    edges = float(np.prod(np.sqrt(np.einsum("ij,ij->i", cell, cell))))
    if not volume > FLATTEST_CELL * edges:  # "not >", so that NaN is refused too
        raise InputError(f"the cell {cell.tolist()} has no volume")
    return np.asarray(np.linalg.inv(cell), dtype=np.float64)


def _images(position: Floats, cell: Floats, cutoff: float) -> tuple[Ints, Ints, Floats]:
    """List images of atoms that can be within the cutoff of any atom: cell, atom number, position."""
    inverse = compute_inverse_cell(cell)
    reach = cutoff * np.sqrt(np.einsum("ij,ij->j", inverse, inverse)) + 1e-9  # cutoff in units of the distance of faces
    fraction = position @ inverse
    lowest, highest = fraction.min(axis=0), fraction.max(axis=0)
    low, high = lowest - reach, highest + reach
    axes = [
        np.arange(math.ceil(a), math.floor(b) + 1)
        for a, b in zip((low - highest).tolist(), (high - lowest).tolist(), strict=True)
    ]
    near = []
    for x, axis in enumerate(axes):
        moved = fraction[:, x, None] + axis
        near.append((moved >= low[x]) & (moved <= high[x]))
    owner, *cells = np.nonzero(near[0][:, :, None, None] & near[1][:, None, :, None] & near[2][:, None, None, :])
    shifts = np.empty((len(owner), 3), dtype=np.int64)
    for x, axis in enumerate(axes):
        shifts[:, x] = axis[cells[x]]
    return shifts, owner, position[owner] + shifts @ cell
