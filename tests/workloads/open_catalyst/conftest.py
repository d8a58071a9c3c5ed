"""An OpenCatalyst data set that takes a second to make, and structures to build graphs from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from suite.distributed import World
from workloads.open_catalyst import generate as generator
from workloads.open_catalyst.slabs import Surfaces
from workloads.open_catalyst.structures import Neighbourhood, Structure

TINY = generator.DataSize(
    Surfaces(("Cu", "Pt"), ("H", "CO"), ((2, 2, 2),), 1, steps=4), Neighbourhood(4.5, 20), 4, 2, 2
)


@pytest.fixture(scope="session")
def world() -> World:
    return World.create(None)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> generator.DataSize:
    """The size ``smoke`` means 4 + 2 trajectories of 4 frames each."""
    pytest.importorskip("ase")
    monkeypatch.setitem(generator.SIZES, "smoke", TINY)
    return TINY


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    """16 + 8 samples; read only."""
    pytest.importorskip("ase")
    root = tmp_path_factory.mktemp("tiny") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(generator.SIZES, "smoke", TINY)
        generator.generate(root, "smoke", seed=3, world=world)
    return root


def random_structure(seed: int, atoms: int = 7, side: float = 5.0) -> Structure:
    """Atoms at least 1 angstrom apart (images included) in a skewed cell, with forces that mean nothing."""
    rng = np.random.default_rng(seed)
    cell = side * (np.eye(3) + 0.25 * rng.uniform(-1, 1, (3, 3)))
    position: list[np.ndarray] = []
    while len(position) < atoms:
        candidate = rng.random(3)
        apart = [candidate - other for other in position]
        if all(np.linalg.norm((each - np.rint(each)) @ cell) > 1.0 for each in apart):
            position.append(candidate)
    return Structure(
        position=np.array(position) @ cell,
        cell=cell,
        number=rng.choice([1, 6, 8, 29, 78], atoms),
        tag=rng.integers(0, 3, atoms),
        fixed=np.arange(atoms) < 2,
        force=rng.normal(size=(atoms, 3)),
        energy=float(rng.normal()),
        trajectory=seed,
        frame=0,
    )
