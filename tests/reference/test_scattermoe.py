"""The fused kernels beside ScatterMoE's (shawntan/scattermoe), forward and backward, in Triton's interpreter."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

WORKER = Path(__file__).with_name("scattermoe_worker.py")
CASES = 20


def test_output_and_gradients_equal_scattermoe_s(
    reference: Callable[[str], Path],
    python_with: Callable[..., str],
    record: Callable[[str, str, float, float], None],
) -> None:
    clone, python = reference("shawntan/scattermoe"), python_with("torch", "triton")
    done = subprocess.run([python, WORKER, clone, str(CASES)], capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]
    record("moe", f"fused kernels, {CASES} layers, output and gradients", float(done.stdout.split()[-1]), 1e-5)
