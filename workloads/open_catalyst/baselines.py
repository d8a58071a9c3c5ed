"""Baselines without a network: zero force, the mean force, and a pair potential fitted by least squares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from suite.data.shards import ShardReader
from suite.workload import Baseline
from workloads.open_catalyst.config import OpenCatalystConfig
from workloads.open_catalyst.graph import join_edges
from workloads.open_catalyst.structures import Neighbourhood

MAX_SAMPLES = 4_000  # read from each split for the pair potential: takes seconds, and suffices to fit its coefficients
MAX_SAMPLES_OF_CONSTANTS = 200_000
RADIAL_FUNCTIONS = 10  # radial functions per pair of elements
RIDGE = 1e-6  # of the largest diagonal element
READ_AT_ONCE = 500

Floats = NDArray[np.floating[Any]]


def measure_baselines(root: Path, config: OpenCatalystConfig) -> dict[str, Baseline]:
    """Measure the mean absolute error of force components on free atoms of the validation split.

    ``zero_force``; ``mean_force`` per component; ``pair_potential`` with `RADIAL_FUNCTIONS` radial functions per pair
    of elements, on at most `MAX_SAMPLES` evenly spaced samples.
    """
    train, validation = ShardReader(root, "train"), ShardReader(root, "validation")
    mean = _free_forces(train)[0].mean(axis=0)
    truth, structure = _free_forces(validation)
    return {
        "zero_force": _mean_error(np.abs(truth).sum(axis=1), structure),
        "mean_force": _mean_error(np.abs(truth - mean).sum(axis=1), structure),
        "pair_potential": _pair_potential(
            train, validation, Neighbourhood(config.cutoff_angstrom, config.max_neighbours)
        ),
    }


def _mean_error(error_A: Floats, structure_A: NDArray[np.int64]) -> Baseline:
    """Compute the mean error of a component from each atom's, three components together. Structures are the samples."""
    _, sample = np.unique(structure_A, return_inverse=True)
    sums, components = np.bincount(sample, error_A), 3 * np.bincount(sample)
    pairs = zip(sums.tolist(), components.tolist(), strict=True)
    of_samples = [{"error": error, "components": count} for error, count in pairs]
    return Baseline.jackknife(of_samples, lambda totals: totals["error"] / totals["components"])


def _pair_potential(train: ShardReader, validation: ShardReader, neighbourhood: Neighbourhood) -> Baseline:
    elements = np.unique(train.read(_spaced(train, MAX_SAMPLES), ["atom.offsets", "atom.number"])["atom.number"])
    width = len(elements) * (len(elements) + 1) // 2 * RADIAL_FUNCTIONS
    gram, moment = np.zeros((width, width)), np.zeros(width)
    for chosen in _pieces(train):
        design, force, _ = _design(train, chosen, neighbourhood, elements)
        # normal equations, added piece by piece: only one piece's design is in memory
        gram += (design.T @ design).toarray()
        moment += design.T @ force
    gram[np.diag_indices(width)] += RIDGE * gram.diagonal().max()
    coefficients = np.linalg.solve(gram, moment)
    errors, structures = [], []
    for chosen in _pieces(validation):
        design, force, structure = _design(validation, chosen, neighbourhood, elements)
        errors.append(np.abs(design @ coefficients - force).reshape(-1, 3).sum(axis=1))
        structures.append(chosen[structure])
    return _mean_error(np.concatenate(errors), np.concatenate(structures))


def _design(
    reader: ShardReader, chosen: NDArray[np.int64], neighbourhood: Neighbourhood, elements: NDArray[np.uint8]
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
    # an element that the training split lacks counts as one that it has
    kind = np.searchsorted(elements, arrays["atom.number"]).clip(max=len(elements) - 1)
    low, high = np.sort([kind[edges.source], kind[edges.target]], axis=0)
    # number of the pair in the upper triangle, row by row
    pair = low * len(elements) - low * (low - 1) // 2 + high - low
    centres = np.linspace(0.8, neighbourhood.cutoff_angstrom, RADIAL_FUNCTIONS)
    radial = np.exp(-(((distance[:, None] - centres) / (centres[1] - centres[0])) ** 2))
    values = radial[:, :, None] * (vector / distance[:, None])[:, None, :]
    rows = np.broadcast_to(3 * edges.target[:, None, None] + np.arange(3), values.shape)
    columns = np.broadcast_to(
        RADIAL_FUNCTIONS * pair[:, None, None] + np.arange(RADIAL_FUNCTIONS)[:, None], values.shape
    )
    width = len(elements) * (len(elements) + 1) // 2 * RADIAL_FUNCTIONS
    design = sparse.csr_array((values.ravel(), (rows.ravel(), columns.ravel())), shape=(3 * len(position), width))
    free = arrays["atom.fixed"] == 0
    components = np.repeat(free, 3)
    return design[components], arrays["atom.force"].astype(np.float64).ravel()[components], _structures(arrays)[free]


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
