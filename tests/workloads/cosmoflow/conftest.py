"""A CosmoFlow data set that takes a fraction of a second to make."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite.distributed import World
from workloads.cosmoflow import generate as generator
from workloads.cosmoflow.cosmology import Simulation

TINY = generator.DataSize(Simulation(16, 8, 128.0, "2lpt"), 8, 12, 5, 4)


@pytest.fixture(scope="session")
def world() -> World:
    return World.create(None)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> generator.DataSize:
    """The size ``smoke`` means 12 + 5 universes of 8^3 voxels."""
    monkeypatch.setitem(generator.SIZES, "smoke", TINY)
    return TINY


@pytest.fixture
def tiny_data(tiny: generator.DataSize, tmp_path: Path, world: World) -> Path:
    root = tmp_path / "data"
    generator.generate(root, "smoke", seed=3, world=world)
    return root
