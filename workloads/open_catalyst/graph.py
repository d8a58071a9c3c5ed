"""Computes edges and triplets of atoms in a periodic cell, with numpy and without a loop over atoms.

An edge runs from a source atom j to a target atom i. The target is in the cell itself, the source in its image
``offset``. A triplet is two edges k->j and j->i. Conventions of the reference (ocp dimenet_plus_plus.py and
atoms_to_graphs.py).

Radial and angular basis functions of DimeNet, twice differentiable with few operations.

Gasteiger, Groß & Günnemann, "Directional message passing for molecular graphs", arXiv:2003.03123, equations 6 to 8.
Shapes: E edges, T triplets, L angular and K radial functions. x is a distance in units of the cutoff.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.spatial import cKDTree
from scipy.special import spherical_jn
from torch import Tensor, nn

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


PERIOD = 2.0  # half period of the cosines that represent a function on [0, 1]; on the second interval the fit is free
SPARE_TERMS = 7  # more than the band limit of the fastest function needs; then the error is 1e-11


class Envelope(nn.Module):
    """1/x plus three powers of x, from ``exponent`` on. At x = 1 the value and the first two derivatives are 0."""

    def __init__(self, exponent: int) -> None:
        super().__init__()
        self.p = p = exponent + 1
        self.a, self.b, self.c = -(p + 1) * (p + 2) / 2, p * (p + 2.0), -p * (p + 1) / 2

    def forward(self, x_E: Tensor) -> Tensor:
        """Evaluate the envelope, one value per edge."""
        power_E = x_E ** (self.p - 1)
        value_E: Tensor = 1 / x_E + power_E * (self.a + x_E * (self.b + self.c * x_E))
        return value_E


class RadialBasis(nn.Module):
    """sin(frequency_k x) times the envelope. The frequencies are learned, starting from k pi."""

    def __init__(self, count: int, envelope: Envelope) -> None:
        super().__init__()
        self.envelope = envelope
        self.frequency_K = nn.Parameter(math.pi * torch.arange(1, count + 1, dtype=torch.float32))

    def forward(self, x_E: Tensor) -> Tensor:
        """Return (E, K) of scaled lengths x (E)."""
        envelope_E: Tensor = self.envelope(x_E)
        return envelope_E[:, None] * torch.sin(self.frequency_K * x_E[:, None])


class SphericalRadialBasis(nn.Module):
    """Normalised spherical Bessel functions j_l(z_lk x) times the envelope; z_lk is the k-th zero of j_l.

    j_l has the parity of l. So it is a sum of a few cosines (l even) or sines (l odd) of a longer period. They are
    fitted once, in float64. The error is 1e-11; the closed forms suffer from cancellation at small x in float32.
    """

    def __init__(self, angular: int, radial: int, envelope: Envelope) -> None:
        super().__init__()
        self.envelope = envelope
        self.angular = angular
        zeros_LK, terms = compute_bessel_zeros(angular, radial), count_waves(angular, radial)
        wave_Q = np.arange(terms) * math.pi / PERIOD
        cosines, sines = np.zeros((2, terms, angular * radial))
        grid = np.linspace(0, 1, 40 * terms)
        for order in range(angular):
            wave, target = (np.sin, sines) if order % 2 else (np.cos, cosines)
            values = np.stack([compute_normalised_bessel(order, z, grid) for z in zeros_LK[order]], axis=1)
            fitted = np.linalg.lstsq(wave(np.outer(grid, wave_Q)), values, rcond=1e-13)[0]
            target[:, order * radial : (order + 1) * radial] = fitted
        self.wave_Q: Tensor
        self.coefficients: Tensor
        self.register_buffer("wave_Q", torch.tensor(wave_Q, dtype=torch.float32), persistent=False)
        both = torch.tensor(np.concatenate([cosines, sines]), dtype=torch.float32)
        self.register_buffer("coefficients", both, persistent=False)

    def forward(self, x_E: Tensor) -> Tensor:
        """Return (E, L, K) of scaled lengths x (E)."""
        phase_EQ = x_E[:, None] * self.wave_Q
        values = torch.cat([torch.cos(phase_EQ), torch.sin(phase_EQ)], dim=1) @ self.coefficients
        values_ELK: Tensor = (values * self.envelope(x_E)[:, None]).view(len(x_E), self.angular, -1)
        return values_ELK


def count_waves(angular: int, radial: int) -> int:
    """Compute the number of cosines (and of sines) that represent the spherical Bessel functions."""
    return math.ceil(float(compute_bessel_zeros(angular, radial).max()) * PERIOD / math.pi) + SPARE_TERMS


def compute_angular_basis(cosine_T: Tensor, count: int) -> Tensor:
    """Compute the real spherical harmonics Y_l0 (T, L) from the cosine of the angle, by Legendre's recurrence.

    The angle itself is never computed: its derivative is singular where three atoms lie on a line.
    """
    legendre = [torch.ones_like(cosine_T), cosine_T]
    for order in range(1, count - 1):
        following = ((2 * order + 1) * cosine_T * legendre[order] - order * legendre[order - 1]) / (order + 1)
        legendre.append(following)
    norms = [math.sqrt((2 * order + 1) / (4 * math.pi)) for order in range(count)]
    return torch.stack([norm * value for norm, value in zip(norms, legendre, strict=False)], dim=-1)


def compute_bessel_zeros(angular: int, radial: int) -> NDArray[np.float64]:
    """Find the first positive zeros of j_0 .. j_(L-1), shape (L, K). Those of j_l lie between those of j_(l-1)."""
    # zeros of j_0. Each next order has one zero between two of these, so it begins with one less
    between = np.arange(1, radial + angular, dtype=np.float64) * math.pi
    zeros = [between[:radial]]
    for order in range(1, angular):
        between = np.array([brentq(partial(spherical_jn, order), a, b) for a, b in pairwise(between)])
        zeros.append(between[:radial])
    return np.array(zeros)


def compute_normalised_bessel(order: int, zero: float, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute j_l(z x), scaled so that the integral of its square times x^2 over 0..1 is 1."""
    norm = math.sqrt(2) / abs(spherical_jn(order + 1, zero))
    return np.asarray(norm * spherical_jn(order, zero * x))
