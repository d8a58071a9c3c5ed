"""What several test folders share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smoke_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder ($MLHPC_DATA) with the smoke size of CosmoFlow."""
    folder = tmp_path_factory.mktemp("data")
    root = folder / "cosmoflow-smoke"
    command = ["data", "generate", "cosmoflow", "--size", "smoke", "--ranks", "2", "-o", str(root)]
    subprocess.run([sys.executable, "-m", "suite", *command], cwd=ROOT, check=True, capture_output=True, timeout=240)
    return folder
