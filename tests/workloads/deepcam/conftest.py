"""A DeepCAM data set that takes a fraction of a second to make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from suite.config import RunConfig, load_config
from suite.distributed import World
from workloads.deepcam import DESCRIPTOR
from workloads.deepcam import generate as generator
from workloads.deepcam.climate import Domain

TINY = generator.DataSize(Domain(32, 48, 4, 52, 72, 1.2, 1.5, 1.5, 1.2, 1.5, 1.2), 12, 5, 4)


@pytest.fixture(scope="session")
def world() -> World:
    return World.create(None)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> generator.DataSize:
    """The size ``smoke`` means 12 + 5 snapshots of 32 x 48 pixels."""
    monkeypatch.setitem(generator.SIZES, "smoke", TINY)
    return TINY


@pytest.fixture
def tiny_data(tiny: generator.DataSize, tmp_path: Path, world: World) -> Path:
    root = tmp_path / "data"
    generator.generate(root, "smoke", seed=3, world=world)
    return root


def make_tiny_config(*overrides: str) -> RunConfig:
    """The smoke config for 32 x 48 pixels."""
    own = ("hyperparameters.height=32", "hyperparameters.width=48")
    return load_config(DESCRIPTOR, "smoke", (*own, *overrides))


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., RunConfig]:
    """`make_tiny_config`, for tests of this folder."""
    return make_tiny_config
