"""The data of the toy workload."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its root. Tests that change the data copy them."""
    sys.path.insert(0, str(Path(__file__).parent))
    import toy

    root = tmp_path_factory.mktemp("toy") / "data"
    toy.generate(root)
    return root
