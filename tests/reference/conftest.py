"""Our code beside the public reference codes: ``MLHPC_REFERENCES`` is a folder of clones named ``owner+name`` or ``name``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def reference() -> Callable[[str], Path]:
    """The function that finds the clone of ``owner/name``, or skips the test."""

    def find(repository: str) -> Path:
        folder = os.environ.get("MLHPC_REFERENCES")
        if folder is None:
            pytest.skip("MLHPC_REFERENCES is not set: it names a folder of clones of the reference codes")
        owner, name = repository.split("/")
        for path in (Path(folder, f"{owner}+{name}"), Path(folder, name)):
            if path.is_dir():
                return path
        pytest.skip(f"no clone of github.com/{repository} in MLHPC_REFERENCES")

    return find


@pytest.fixture
def record() -> Callable[[str, str, float, float], None]:
    """The function that adds a row to the table and fails the test if the value lies above the bound."""

    def add(workload: str, what: str, value: float, bound: float) -> None:
        assert float(value) <= bound, f"{workload}: {what}: {value} is above {bound}"

    return add
