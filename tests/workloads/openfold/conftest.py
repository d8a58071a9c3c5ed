"""An OpenFold data set that takes a fraction of a second to make, and a network to go with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite.distributed import World
from workloads.openfold import generate as generator
from workloads.openfold.config import OpenFoldConfig
from workloads.openfold.data import OpenFoldData
from workloads.openfold.proteins import Families

TINY = generator.DataSize(Families(8, 12, 6, 2), 6, 4, 2)

SMALL_NET = OpenFoldConfig(
    crop_size=10,
    max_msa_clusters=3,
    max_extra_msa=2,
    max_templates=2,
    num_recycling_iters=2,
    msa_channels=8,
    pair_channels=8,
    single_channels=8,
    extra_msa_channels=8,
    template_channels=8,
    msa_heads=2,
    msa_head_channels=4,
    extra_msa_head_channels=4,
    pair_heads=2,
    pair_head_channels=4,
    template_head_channels=4,
    outer_channels=4,
    transition_factor=2,
    evoformer_blocks=2,
    extra_msa_blocks=1,
    template_blocks=1,
    structure_iterations=2,
    ipa_heads=2,
    ipa_channels=4,
    angle_channels=8,
    plddt_channels=8,
    msa_dropout=0.0,
    pair_dropout=0.0,
    structure_dropout=0.0,
)


@pytest.fixture(scope="session")
def world() -> World:
    return World.create(None)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> generator.DataSize:
    """The size ``smoke`` means 6 + 4 families of 8 to 12 residues, with templates."""
    monkeypatch.setitem(generator.SIZES, "smoke", TINY)
    return TINY


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    """Read only."""
    root = tmp_path_factory.mktemp("tiny") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(generator.SIZES, "smoke", TINY)
        generator.generate(root, "smoke", seed=3, world=world)
    return root


@pytest.fixture(scope="session")
def train(tiny_data: Path) -> OpenFoldData:
    return OpenFoldData(tiny_data, "train", SMALL_NET)


@pytest.fixture(scope="session")
def validation(tiny_data: Path) -> OpenFoldData:
    return OpenFoldData(tiny_data, "validation", SMALL_NET)
