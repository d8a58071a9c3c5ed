"""A data set of snapshots that takes a second to make."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite.distributed import World
from workloads.swinv2_moe import generate as generator

TINY = generator.DataSize(16, 40, 20, 15)


@pytest.fixture(scope="session")
def world() -> World:
    return World.create(None)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> generator.DataSize:
    """The size ``smoke`` means 40 + 20 images of 16 x 16 pixels."""
    monkeypatch.setitem(generator.SIZES, "smoke", TINY)
    return TINY


@pytest.fixture
def tiny_data(tiny: generator.DataSize, tmp_path: Path, world: World) -> Path:
    root = tmp_path / "data"
    generator.generate(root, "smoke", seed=3, world=world)
    return root
