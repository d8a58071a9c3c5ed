"""However an MoE layer is executed, it computes what dense float64 FFNs on every token give, drops included."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(__file__).with_name("exact_worker.py")


def run_worker(ranks: int, amount: str, timeout_s: int) -> int:
    """Number of cases that agreed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(WORKER), str(ranks), amount],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"(\d+) cases", done.stdout)
    assert found, done.stdout
    return int(found.group(1))


@pytest.mark.parametrize(("ranks", "at_least"), [(1, 180), (2, 200), (4, 250)])
def test_every_mode_equals_the_dense_reference(ranks: int, at_least: int) -> None:
    assert run_worker(ranks, "quick", 200) >= at_least


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ranks", "at_least"), [(1, 700), (2, 1000), (4, 2400), (6, 3000)])
def test_the_full_matrix_equals_the_dense_reference(ranks: int, at_least: int) -> None:
    assert run_worker(ranks, "long", 3500) >= at_least
