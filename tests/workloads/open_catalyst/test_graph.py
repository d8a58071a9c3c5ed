"""Neighbours and triplets against ASE, matscipy and the definition, cells from very flat to very skewed."""

from itertools import product

import numpy as np
import pytest

from mlhpc.suite.errors import InputError
from mlhpc.workloads.open_catalyst.graph import Edges, compute_inverse_cell, find_neighbours, join_edges, list_triplets
from tests.workloads.open_catalyst.conftest import random_structure


def as_set(source: np.ndarray, target: np.ndarray, offset: np.ndarray) -> set[tuple[int, ...]]:
    found = {(int(j), int(i), *map(int, s)) for j, i, s in zip(source, target, offset, strict=True)}
    assert len(found) == len(source)
    return found


def by_definition(position: np.ndarray, cell: np.ndarray, cutoff: float) -> set[tuple[int, ...]]:
    reach = [int(np.ceil(cutoff * np.linalg.norm(column))) + 2 for column in compute_inverse_cell(cell).T]
    found = set()
    for shift in product(*(range(-n, n + 1) for n in reach)):
        for j, i in product(range(len(position)), repeat=2):
            vector = position[j] + np.array(shift) @ cell - position[i]
            if (j != i or any(shift)) and np.linalg.norm(vector) <= cutoff:
                found.add((j, i, *shift))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_neighbours_are_those_of_the_definition_even_when_the_cell_is_smaller_than_the_cutoff(seed: int) -> None:
    structure = random_structure(seed, atoms=3, side=(2.5, 4.0, 6.0, 9.0)[seed])
    found = find_neighbours(structure.position, structure.cell, cutoff=4.5, most=10_000)
    expected = by_definition(structure.position, structure.cell, 4.5)
    assert as_set(found.source, found.target, found.offset) == expected
    assert expected


@pytest.mark.parametrize("seed", range(6))
def test_neighbours_are_those_of_ase_and_matscipy(seed: int) -> None:
    ase = pytest.importorskip("ase")
    from ase.neighborlist import neighbor_list

    structure = random_structure(seed, atoms=12, side=6.0)
    structure.position[:] += 11.0  # atoms outside the cell are where they are
    found = find_neighbours(structure.position, structure.cell, cutoff=6.0, most=10_000)
    atoms = ase.Atoms(structure.number, positions=structure.position, cell=structure.cell, pbc=True)
    i, j, s = neighbor_list("ijS", atoms, 6.0)
    assert as_set(found.source, found.target, found.offset) == as_set(j, i, s)
    matscipy = pytest.importorskip("matscipy.neighbours")
    i, j, s = matscipy.neighbour_list("ijS", atoms, 6.0)
    assert as_set(found.source, found.target, found.offset) == as_set(j, i, s)


def test_only_the_nearest_are_kept_and_they_are_sorted() -> None:
    structure = random_structure(1, atoms=10, side=5.0)
    everything = find_neighbours(structure.position, structure.cell, cutoff=6.0, most=10_000)
    few = find_neighbours(structure.position, structure.cell, cutoff=6.0, most=8)

    def lengths(edges: Edges) -> np.ndarray:
        return np.linalg.norm(structure.position[edges.source] + edges.shift - structure.position[edges.target], axis=1)

    assert np.bincount(few.target).tolist() == [8] * 10
    for atom in range(10):
        kept, all_of_it = lengths(few)[few.target == atom], lengths(everything)[everything.target == atom]
        np.testing.assert_array_equal(kept, np.sort(all_of_it)[:8])
    np.testing.assert_array_equal(few.shift, few.offset @ structure.cell)


def test_an_isolated_atom_has_no_edges() -> None:
    assert len(find_neighbours(np.zeros((1, 3)), 20 * np.eye(3), cutoff=6.0, most=50)) == 0
    assert len(find_neighbours(np.zeros((1, 3)), 5 * np.eye(3), cutoff=6.0, most=50)) == 6  # its own images


def slow_triplets(edges: Edges) -> set[tuple[int, int]]:
    found = set()
    for first, second in product(range(len(edges)), repeat=2):
        if edges.target[first] != edges.source[second]:
            continue
        same_atom = edges.source[first] == edges.target[second]
        same_cell = not (edges.offset[first] + edges.offset[second]).any()
        if not (same_atom and same_cell):
            found.add((first, second))
    return found


@pytest.mark.parametrize("side", [3.0, 5.0, 8.0])
def test_triplets_are_all_pairs_of_edges_that_do_not_turn_back(side: float) -> None:
    structure = random_structure(2, atoms=4, side=side)
    edges = find_neighbours(structure.position, structure.cell, cutoff=4.5, most=12)
    into, out = list_triplets(edges, 4)
    assert set(zip(into.tolist(), out.tolist(), strict=True)) == slow_triplets(edges)
    assert (np.diff(out) >= 0).all()
    assert len(into) == len(slow_triplets(edges))


def test_an_image_of_the_target_is_not_a_way_back() -> None:
    """One atom alone: every triplet is k, j, i of one index. Six edges out, of whose 36 pairs six turn back."""
    edges = find_neighbours(np.zeros((1, 3)), 5 * np.eye(3), cutoff=6.0, most=50)
    assert len(list_triplets(edges, 1)[0]) == 36 - 6


def test_a_batch_is_its_structures_side_by_side() -> None:
    structures = [random_structure(seed, atoms=4 + seed) for seed in range(3)]
    parts = [find_neighbours(each.position, each.cell, cutoff=4.5, most=20) for each in structures]
    batch = join_edges(parts, [4, 5, 6])
    into, out = list_triplets(batch, 15)
    separate = [list_triplets(part, 4 + place) for place, part in enumerate(parts)]
    first = np.cumsum([0, *map(len, parts)])
    np.testing.assert_array_equal(into, np.concatenate([a + n for (a, _), n in zip(separate, first, strict=False)]))
    np.testing.assert_array_equal(out, np.concatenate([b + n for (_, b), n in zip(separate, first, strict=False)]))
    assert batch.source[first[1] :].min() >= 4


@pytest.mark.parametrize("cell", [np.zeros((3, 3)), np.diag([5.0, 5.0, 0.0]), np.ones((3, 3))])
def test_a_cell_without_volume_is_refused(cell: np.ndarray) -> None:
    with pytest.raises(InputError, match="has no volume"):
        find_neighbours(np.zeros((2, 3)), cell, cutoff=6.0, most=50)


def test_atoms_on_each_other_are_refused() -> None:
    with pytest.raises(InputError, match="atom 0 and another atom have the same position"):
        find_neighbours(np.array([[0.0, 0, 0], [5.0, 0, 0]]), 5 * np.eye(3), cutoff=6.0, most=50)
