"""Counted FLOPs and bytes of the fused kernels beside the closed forms (benchmarks/kernel_counters.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernel_counters import compare, compute_expected
from benchmarks.kernels import SHAPES
from mlhpc.plugins.exchange.counters import read

ROOT = Path(__file__).parents[3]


def write(path: Path, scale: float, leave_out: str = "") -> Path:
    """A file as ncu writes it, of one launch per kernel."""
    lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for number, (name, (flops, moved)) in enumerate(compute_expected(SHAPES[0]).items()):
        values = {
            ("gpu__time_duration.sum", "msecond"): 2,
            ("sm__ops_path_tensor_src_bf16_dst_fp32.sum", ""): flops * scale,
            ("dram__bytes.sum", "byte"): moved,
        }
        if name != leave_out:
            lines += [f'"{number}","{name}","{key}","{unit}","{value:.0f}"' for (key, unit), value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(("scale", "good"), [(1.0, True), (1.04, True), (1.06, False), (0.5, False)])
def test_flops_that_differ_by_more_than_5_percent_are_bad(tmp_path: Path, scale: float, good: bool) -> None:
    lines, found = compare(read("ncu", write(tmp_path / "ncu.csv", scale)), compute_expected(SHAPES[0]))
    assert found is good
    assert lines[1].split()[2:] == [f"{scale:.3f}", "3.221", "1.000", "2.000"]


def test_a_kernel_that_is_missing_is_named(tmp_path: Path) -> None:
    kernels = read("ncu", write(tmp_path / "ncu.csv", 1.0, leave_out="wide_rows"))
    lines, good = compare(kernels, compute_expected(SHAPES[0]))
    assert not good
    assert "wide_rows        not in the file, which has add_rows, hidden_gradient" in lines[2]


def test_a_file_of_something_else_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "ncu.csv").write_text("a,b\n1,2\n")
    words = [sys.executable, "benchmarks/kernel_counters.py", str(tmp_path / "ncu.csv")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no column 'Kernel Name'" in done.stderr
