"""A data set depends on its recipe alone: not on ranks, order or interruptions; targets never leak between splits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from suite.distributed import World
from suite.shards import ShardReader, read_manifest, verify
from workloads.cosmoflow import generate as generator
from workloads.cosmoflow.cosmology import Simulation, universe

MPIEXEC = Path(sys.executable).parent / "mpiexec"

TWO_RANKS = """
import sys
from pathlib import Path
from suite.distributed import World
from workloads.cosmoflow import generate as generator
from workloads.cosmoflow.cosmology import Simulation
generator.SIZES["smoke"] = generator.DataSize(Simulation(16, 8, 128.0, "2lpt"), 8, 12, 5, 4)
generator.generate(Path(sys.argv[1]), "smoke", seed=3, world=World.create())
"""


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside python: pip install mpich")
def test_two_ranks_write_the_bytes_of_one(tiny_data: Path, tmp_path: Path) -> None:
    other = tmp_path / "two"
    subprocess.run([MPIEXEC, "-n", "2", sys.executable, "-c", TWO_RANKS, other], check=True, timeout=120)
    assert contents(other) == contents(tiny_data)


def test_the_result_is_complete_and_described(tiny_data: Path) -> None:
    manifest = read_manifest(tiny_data)
    assert verify(tiny_data, deep=True) == []
    assert {split: manifest.samples(split) for split in manifest.splits} == {"train": 12, "validation": 5}
    assert manifest.attributes["periodic"] is True
    counts = ShardReader(tiny_data, "train").read(range(12))["x"]
    logs = np.log1p(counts.astype(float)).reshape(-1, 4)
    np.testing.assert_allclose(manifest.attributes["log1p_mean"], logs.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(manifest.attributes["log1p_std"], logs.std(axis=0), rtol=1e-9)


def test_no_universe_is_in_both_splits(tiny_data: Path) -> None:
    universes = {
        split: ShardReader(tiny_data, split).read(range(n))["universe"]
        for split, n in (("train", 12), ("validation", 5))
    }
    assert not set(universes["train"].tolist()) & set(universes["validation"].tolist())


def test_cubes_of_a_universe_stay_in_one_split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: World) -> None:
    cubes = generator.DataSize(Simulation(16, 16, 128.0, "2lpt"), 8, 3, 2, 2, "gzip")
    monkeypatch.setitem(generator.SIZES, "full", cubes)
    generator.generate(tmp_path / "d", "full", seed=0, world=world)
    train, validation = (ShardReader(tmp_path / "d", split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (24, 16)
    assert read_manifest(tmp_path / "d").attributes["periodic"] is False
    first = train.read(range(8))
    assert len({y.tobytes() for y in first["y"]}) == 1
    whole, _ = universe(cubes.simulation, 0, 0)
    np.testing.assert_array_equal(first["x"][1], whole[:8, :8, 8:])
    np.testing.assert_array_equal(first["x"][4], whole[8:, :8, :8])
    assert not set(train.read(range(24))["universe"].tolist()) & set(validation.read(range(16))["universe"].tolist())


def test_a_killed_generation_is_continued_to_the_same_bytes(
    tiny_data: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "killed"

    def until_the_sixth(done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(root, "smoke", seed=3, world=world, progress=until_the_sixth)
    assert not (root / "manifest.json").exists()
    finished = root / "train" / "shard_00000.h5"
    before = finished.stat().st_ino
    made = []
    generator.generate(root, "smoke", seed=3, world=world, progress=lambda done, total: made.append(done))
    assert len(made) == 17 - 4  # the finished shard of four universes is kept
    assert finished.stat().st_ino == before
    assert contents(root) == contents(tiny_data)


def test_a_complete_data_set_is_left_alone(tiny_data: Path, world: World) -> None:
    before = contents(tiny_data)
    generator.generate(tiny_data, "smoke", seed=3, world=world, progress=lambda done, total: pytest.fail("made again"))
    assert contents(tiny_data) == before


def test_a_folder_with_other_content_is_refused(tiny_data: Path, tmp_path: Path, world: World) -> None:
    with pytest.raises(ValueError, match="holds other data: seed is 3, not 4"):
        generator.generate(tiny_data, "smoke", seed=4, world=world)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    with pytest.raises(ValueError, match="not empty"):
        generator.generate(tmp_path / "mine", "smoke", seed=3, world=world)
    with pytest.raises(ValueError, match="unknown size 'huge'; sizes: smoke, mini"):
        generator.generate(tmp_path / "new", "huge", seed=3, world=world)


def test_larger_sizes_contain_the_universes_of_smaller_ones() -> None:
    smoke, mini = generator.SIZES["smoke"], generator.SIZES["mini"]
    assert smoke.simulation == mini.simulation
    assert smoke.validation_universes <= mini.validation_universes
