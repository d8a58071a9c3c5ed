"""Baselines without a network: zero force, the mean force, and forces along pairs fitted by least squares."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import lsmr

from benchmarks.baselines import Baseline
from mlhpc.suite.config import load_config
from mlhpc.suite.data.shards import ShardReader
from mlhpc.workloads.open_catalyst import DESCRIPTOR
from mlhpc.workloads.open_catalyst.config import OpenCatalystConfig
from mlhpc.workloads.open_catalyst.graph import join_edges
from mlhpc.workloads.open_catalyst.structures import Neighbourhood

MAX_SAMPLES = 2_500  # read from each split for the fits: suffices for their coefficients
MAX_SAMPLES_OF_CONSTANTS = 200_000
RADIAL_FUNCTIONS = 10  # radial functions per pair of elements
EMBEDDED_FUNCTIONS = 4  # radial functions per pair of elements and density
DENSITY_DECAY_ANGSTROM = 0.5
RAREST = 0.002  # columns of fewer components than this share of all are left out: they would have any coefficient
SCALING = 0.7  # power of a column's norm that divides it
PENALTY = 3e-3  # on scaled coefficients, relative to the largest scaled column
ITERATIONS = 200
READ_AT_ONCE = 50

Floats = NDArray[np.floating[Any]]
# (reader, samples) to a sparse matrix, force components and the structure of each atom
Design = Callable[[ShardReader, NDArray[np.int64]], tuple[Any, Floats, NDArray[np.int64]]]


def measure_baselines(root: Path) -> dict[str, Baseline]:
    """Measure the mean absolute error of force components on free atoms of the validation split.

    ``zero_force``; ``mean_force`` per component; and least squares on at most `MAX_SAMPLES` evenly spaced samples.
    ``pair_potential`` has `RADIAL_FUNCTIONS` radial functions per pair of elements. ``embedded_atom`` has others too,
    times the density of each element around both atoms: in the embedded-atom method a force is such a sum.
    """
    train, validation = ShardReader(root, "train"), ShardReader(root, "validation")
    mean = _free_forces(train)[0].mean(axis=0)
    truth, structure = _free_forces(validation)
    elements = np.unique(train.read(_spaced(train, MAX_SAMPLES), ["atom.offsets", "atom.number"])["atom.number"])
    config = load_config(DESCRIPTOR, train.manifest.size).hyperparameters
    assert isinstance(config, OpenCatalystConfig)
    neighbourhood = Neighbourhood(config.cutoff_angstrom, config.max_neighbours)
    return {
        "zero_force": _mean_error(np.abs(truth).sum(axis=1), structure),
        "mean_force": _mean_error(np.abs(truth - mean).sum(axis=1), structure),
        "pair_potential": _fit_forces(train, validation, partial(_design, neighbourhood, elements, embedded=False)),
        "embedded_atom": _fit_forces(train, validation, partial(_design, neighbourhood, elements, embedded=True)),
    }


def _mean_error(error_A: Floats, structure_A: NDArray[np.int64]) -> Baseline:
    """Compute the mean error of a component from each atom's, three components together.

    Its standard error is by the jackknife over structures (Tukey 1958).
    """
    _, sample = np.unique(structure_A, return_inverse=True)
    sums, components = np.bincount(sample, error_A), 3 * np.bincount(sample)
    without = (sums.sum() - sums) / (components.sum() - components)
    return Baseline(sums.sum() / components.sum(), without.std() * (len(sums) - 1) ** 0.5)


def _fit_forces(train: ShardReader, validation: ShardReader, design: Design) -> Baseline:
    parts = [design(train, chosen)[:2] for chosen in _pieces(train)]
    coefficients = _solve(sparse.vstack([x for x, _ in parts], format="csr"), np.concatenate([y for _, y in parts]))
    found, structures = [], []
    for chosen in _pieces(validation):
        x, y, structure = design(validation, chosen)
        found.append(np.abs(x @ coefficients - y).reshape(-1, 3).sum(axis=1))
        structures.append(chosen[structure])
    return _mean_error(np.concatenate(found), np.concatenate(structures))


def _solve(x: Any, y: Floats) -> Floats:
    """Solve least squares with a penalty. Returns a coefficient for each column."""
    norm = np.sqrt(x.multiply(x).sum(axis=0))
    kept = (x != 0).sum(axis=0) > RAREST * len(y)
    scale = np.zeros(len(norm))
    scale[kept] = norm[kept] ** -SCALING
    found = lsmr(x @ sparse.diags_array(scale), y, damp=PENALTY * float((norm * scale).max()), maxiter=ITERATIONS)
    return np.asarray(found[0] * scale)


def _design(
    neighbourhood: Neighbourhood,
    elements: NDArray[np.uint8],
    reader: ShardReader,
    chosen: NDArray[np.int64],
    *,
    embedded: bool,
) -> tuple[Any, Floats, NDArray[np.int64]]:
    """Compute the design matrix of free atoms' force components, their true values, and each atom's structure."""
    arrays = reader.read(chosen)
    offsets, position = arrays["atom.offsets"], arrays["atom.position"].astype(np.float64)
    parts = [
        neighbourhood.edges(position[begin:end], cell.astype(np.float64))
        for begin, end, cell in zip(offsets, offsets[1:], arrays["cell"], strict=False)
    ]
    edges = join_edges(parts, np.diff(offsets).tolist())
    vector = position[edges.source] + edges.shift - position[edges.target]
    distance = np.linalg.norm(vector, axis=1)
    direction = vector / distance[:, None]
    # an element that the training split lacks counts as one that it has
    kind = np.searchsorted(elements, arrays["atom.number"]).clip(max=len(elements) - 1)
    low, high = np.sort([kind[edges.source], kind[edges.target]], axis=0)
    # number of the pair in the upper triangle, row by row
    pair = low * len(elements) - low * (low - 1) // 2 + high - low
    cutoff = neighbourhood.cutoff_angstrom
    # (edges, first column in the pair's block, radial functions of these edges)
    every = np.arange(len(edges))
    terms = [(every, np.zeros_like(every), _radial(distance, RADIAL_FUNCTIONS, cutoff))]
    width = RADIAL_FUNCTIONS
    if embedded:
        density = np.zeros((len(position), len(elements) + 1))
        weight = np.exp(-distance / DENSITY_DECAY_ANGSTROM) * (1 - (distance / cutoff) ** 2) ** 2
        np.add.at(density, (edges.target, kind[edges.source]), weight)
        density[:, -1] = density.sum(axis=1)
        # the atom of the smaller kind first, so that both directions of an edge have the same columns
        swapped = (kind[edges.target] > kind[edges.source])[:, None]
        ends = density[edges.target], density[edges.source]
        around = np.concatenate([np.where(swapped, *ends[::-1]), np.where(swapped, *ends)], axis=1)
        edge, which = np.nonzero(around)
        radial = _radial(distance[edge], EMBEDDED_FUNCTIONS, cutoff) * around[edge, which][:, None]
        terms.append((edge, RADIAL_FUNCTIONS + EMBEDDED_FUNCTIONS * which, radial))
        width += EMBEDDED_FUNCTIONS * around.shape[1]
    entries = [
        _entries(radial, direction[edge], edges.target[edge], width * pair[edge] + first)
        for edge, first, radial in terms
    ]
    values, rows, columns = (np.concatenate(each) for each in zip(*entries, strict=True))
    pairs = len(elements) * (len(elements) + 1) // 2
    design = sparse.csr_array((values, (rows, columns)), shape=(3 * len(position), width * pairs))
    free = arrays["atom.fixed"] == 0
    components = np.repeat(free, 3)
    return design[components], arrays["atom.force"].astype(np.float64).ravel()[components], _structures(arrays)[free]


def _radial(distance: Floats, functions: int, cutoff: float) -> Floats:
    centres = np.linspace(0.8, cutoff, functions)
    return np.asarray(np.exp(-(((distance[:, None] - centres) / (centres[1] - centres[0])) ** 2)))


def _entries(
    radial_EF: Floats, direction_E3: Floats, target_E: NDArray[np.int64], first_E: NDArray[np.int64]
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """List values, rows and columns of forces along edges, one column per radial function."""
    values = radial_EF[:, :, None] * direction_E3[:, None, :]
    rows = np.broadcast_to(3 * target_E[:, None, None] + np.arange(3), values.shape)
    columns = np.broadcast_to(first_E[:, None, None] + np.arange(values.shape[1])[:, None], values.shape)
    return values.ravel(), rows.ravel(), columns.ravel()


def _structures(arrays: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
    """List the position of each atom's structure among those read."""
    atoms = np.diff(arrays["atom.offsets"])
    return np.repeat(np.arange(len(atoms)), atoms)


def _free_forces(reader: ShardReader) -> tuple[Floats, NDArray[np.int64]]:
    """Read the forces (atoms, 3) on free atoms, and the structure of each atom."""
    chosen = _spaced(reader, MAX_SAMPLES_OF_CONSTANTS)
    arrays = reader.read(chosen, ["atom.offsets", "atom.force", "atom.fixed"])
    free = arrays["atom.fixed"] == 0
    return arrays["atom.force"][free].astype(np.float64), _structures(arrays)[free]


def _spaced(reader: ShardReader, most: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, len(reader) - 1, min(most, len(reader))).astype(np.int64))


def _pieces(reader: ShardReader) -> list[NDArray[np.int64]]:
    chosen = _spaced(reader, MAX_SAMPLES)
    return [chosen[begin : begin + READ_AT_ONCE] for begin in range(0, len(chosen), READ_AT_ONCE)]
