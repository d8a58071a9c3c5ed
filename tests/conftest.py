"""What several test folders share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FIRST = (  # files of more than half a minute: begun last, one of them would keep one worker busy and the others idle
    "tests/test_readme.py",
    "tests/slurm/",
    "tests/suite/test_harness.py",
    "tests/test_run.py",
    "tests/workloads/moe/",
    "tests/analysis/test_report.py",
    "tests/suite/test_check.py",
    "tests/test_convergence.py",
    "tests/suite/test_profile.py",
    "tests/workloads/deepcam/",
    "tests/analysis/test_roofline",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, in this order."""

    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(ROOT).as_posix()
        return next((n for n, start in enumerate(LONGEST_FIRST) if place.startswith(start)), len(LONGEST_FIRST))

    items.sort(key=rank)


@pytest.fixture(scope="session")
def smoke_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder ($MLHPC_DATA) with the smoke size of CosmoFlow."""
    folder = tmp_path_factory.mktemp("data")
    root = folder / "cosmoflow-smoke"
    command = ["data", "generate", "cosmoflow", "--size", "smoke", "--ranks", "2", "-o", str(root)]
    subprocess.run([sys.executable, "-m", "suite", *command], cwd=ROOT, check=True, capture_output=True, timeout=240)
    return folder
