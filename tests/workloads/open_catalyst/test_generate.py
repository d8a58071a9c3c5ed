"""Trajectories are relaxations under a potential; frames never leak between splits; stored counts are those of the graphs."""

import sys
from pathlib import Path

import numpy as np
import pytest

from mlhpc.suite.config import load_config
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.open_catalyst import DESCRIPTOR
from mlhpc.workloads.open_catalyst import generate as generator
from mlhpc.workloads.open_catalyst.config import OpenCatalystConfig
from mlhpc.workloads.open_catalyst.graph import list_triplets
from mlhpc.workloads.open_catalyst.structures import LARGEST_FORCE, make_trajectory

pytest.importorskip("ase")


def test_the_result_is_described(tiny_data: Path) -> None:
    manifest = read_manifest(tiny_data)
    samples = ShardReader(tiny_data, "train").read(range(16))
    free = samples["atom.force"][samples["atom.fixed"] == 0]
    assert manifest.attributes["force_mean_absolute"] == pytest.approx(np.abs(free).mean(), rel=1e-5)
    assert manifest.attributes["mean_atoms"] == pytest.approx(len(samples["atom.number"]) / 16)
    assert manifest.attributes["mean_triplets"] == pytest.approx(samples["triplets"].mean())


def test_stored_counts_are_those_of_the_graphs(tiny_data: Path, tiny: generator.DataSize) -> None:
    sample = ShardReader(tiny_data, "train").read([5])
    edges = tiny.neighbourhood.edges(sample["atom.position"].astype(float), sample["cell"][0].astype(float))
    assert len(edges) == sample["edges"][0]
    assert len(list_triplets(edges, len(sample["atom.number"]))[0]) == sample["triplets"][0]


def test_no_trajectory_is_in_both_splits(tiny_data: Path) -> None:
    trajectories = {
        split: set(ShardReader(tiny_data, split).read(range(n))["trajectory"].tolist())
        for split, n in (("train", 16), ("validation", 8))
    }
    assert {split: len(found) for split, found in trajectories.items()} == {"train": 4, "validation": 2}
    assert not trajectories["train"] & trajectories["validation"]


def test_a_trajectory_is_a_relaxation_of_a_slab_with_an_adsorbate(tiny: generator.DataSize) -> None:
    for number in range(4):
        frames = make_trajectory(tiny.surfaces, 0, number)
        first, last = frames[0], frames[-1]
        assert [frame.frame for frame in frames] == sorted({frame.frame for frame in frames})
        assert last.energy < first.energy
        assert max(np.abs(frame.force).max() for frame in frames) <= LARGEST_FORCE
        assert set(first.tag.tolist()) == {0, 1, 2}
        np.testing.assert_array_equal(first.position[first.fixed], last.position[first.fixed])
        assert (first.position[~first.fixed] != last.position[~first.fixed]).any()
        assert first.position[first.tag == 2, 2].min() > first.position[first.tag == 1, 2].mean()


def test_stored_forces_are_the_gradient_of_stored_energies(tiny: generator.DataSize) -> None:
    """Moving one atom by a little changes the energy by minus its force: checked with ASE's own calculator."""
    ase = pytest.importorskip("ase")
    from ase.calculators.emt import EMT

    frame = make_trajectory(tiny.surfaces, 0, 1)[0]
    atoms = ase.Atoms(frame.number, positions=frame.position, cell=frame.cell, pbc=True)
    atoms.calc = EMT()
    assert atoms.get_potential_energy() == pytest.approx(frame.energy, abs=1e-9)
    energies = []
    for step in (1e-4, -2e-4):
        atoms.positions[-1, 2] += step
        energies.append(atoms.get_potential_energy())
    assert frame.force[-1, 2] == pytest.approx(-(energies[0] - energies[1]) / 2e-4, abs=1e-4)


def test_without_ase_generating_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: World
) -> None:
    monkeypatch.setitem(sys.modules, "ase", None)
    with pytest.raises(InputError, match=r"ase is not installed \(pip install"):
        generator.generate(tmp_path / "d", "smoke", seed=0, world=world)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("size", ["smoke", "mini", "small", "full"])
def test_counts_are_made_for_the_graphs_the_config_trains_on(size: str) -> None:
    own = load_config(DESCRIPTOR, size).hyperparameters
    assert isinstance(own, OpenCatalystConfig)
    settings, card = generator.SIZES[size], DESCRIPTOR.card().size(size)
    neighbourhood = settings.neighbourhood
    assert (neighbourhood.cutoff_angstrom, neighbourhood.max_neighbours) == (own.cutoff_angstrom, own.max_neighbours)
    assert card.train_samples == 4 * settings.train_trajectories
    assert abs(card.eval_samples - 4 * settings.validation_trajectories) < 200  # OC20's validation split is 999,866
