"""What only universes have: input statistics, cubes that stay together."""

from pathlib import Path

import numpy as np
import pytest

from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow import generate as generator
from mlhpc.workloads.cosmoflow.config import TARGETS
from mlhpc.workloads.cosmoflow.cosmology import Simulation, make_universe


def test_the_result_is_described(tiny_data: Path) -> None:
    manifest = read_manifest(tiny_data)
    assert manifest.attributes["periodic"] is True
    assert manifest.attributes["targets"] == list(TARGETS)
    counts = ShardReader(tiny_data, "train").read(range(12))["x"]
    logs = np.log1p(counts.astype(float)).reshape(-1, 4)
    np.testing.assert_allclose(manifest.attributes["log1p_mean"], logs.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(manifest.attributes["log1p_std"], logs.std(axis=0), rtol=1e-9)


def test_cubes_of_a_universe_stay_in_one_split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: World) -> None:
    cubes = generator.DataSize(Simulation(16, 16, 128.0, "2lpt"), 8, 3, 2, 2, "gzip")
    monkeypatch.setitem(generator.SIZES, "full", cubes)
    generator.generate(tmp_path / "d", "full", seed=0, world=world)
    train, validation = (ShardReader(tmp_path / "d", split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (24, 16)
    assert read_manifest(tmp_path / "d").attributes["periodic"] is False
    first = train.read(range(8))
    assert len({y.tobytes() for y in first["y"]}) == 1
    whole, _ = make_universe(cubes.simulation, 0, 0)
    np.testing.assert_array_equal(first["x"][1], whole[:8, :8, 8:])
    np.testing.assert_array_equal(first["x"][4], whole[8:, :8, :8])
    assert not set(train.read(range(24))["universe"].tolist()) & set(validation.read(range(16))["universe"].tolist())


@pytest.mark.parametrize("name", ["smoke", "mini"])
def test_smoke_and_mini_show_whole_boxes_in_voxels_of_8_mpc_h(name: str) -> None:
    size = generator.SIZES[name]
    assert size.simulation.box_mpc_h / size.simulation.mesh == 8
    assert size.simulation.mesh == size.cube, "one sample is a whole periodic box, which augmentation shifts"
