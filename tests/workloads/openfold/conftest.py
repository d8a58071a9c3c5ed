"""A network for the tiny data set."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.data import OpenFoldData

# Widths differ, so that one taken for another is noticed; tests/reference has it too
SMALL_NET = OpenFoldConfig(
    crop_size=10, max_msa_clusters=3, max_extra_msa=2, max_templates=2, num_recycling_iters=2, msa_channels=16,
    pair_channels=12, single_channels=20, extra_msa_channels=8, template_channels=8, msa_heads=2, msa_head_channels=4,
    extra_msa_head_channels=4, pair_heads=2, pair_head_channels=4, template_head_channels=4, outer_channels=4,
    transition_factor=2, evoformer_blocks=2, extra_msa_blocks=1, template_blocks=1, structure_iterations=2,
    ipa_heads=3, ipa_channels=4, angle_channels=16, plddt_channels=12, msa_dropout=0.0, pair_dropout=0.0,
    structure_dropout=0.0,
)  # fmt: skip


@pytest.fixture(scope="session")
def train(made_once: Callable[[str], Path]) -> OpenFoldData:
    return OpenFoldData(made_once("openfold"), "train", SMALL_NET, 4)


@pytest.fixture(scope="session")
def validation(made_once: Callable[[str], Path]) -> OpenFoldData:
    return OpenFoldData(made_once("openfold"), "validation", SMALL_NET, 4)
