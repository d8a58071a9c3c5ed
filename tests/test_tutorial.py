"""docs/tutorial.md is followed: every command of its ```bash blocks, in their order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.strip().splitlines()]
ALLOWED = {"mlhpc compare": {0, 1, 4}, "mlhpc doctor": {0, 1}}  # slower, or inconclusive; no Slurm here


def test_the_tutorial_has_its_five_steps() -> None:
    assert [line.split()[1] for line in LINES if line.startswith("mlhpc ")] == [
        *("doctor", "workload", "data", "run", "status", "package", "check", "score"),
        *("run", "compare", "report", "workload", "data", "run", "score", "workload"),
    ]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_command_of_the_tutorial_works_as_written(tmp_path: Path) -> None:
    """A workload is installed into a folder of the import path, not into the environment of the tests."""
    bin_folder = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(tmp_path / "site")
    for line in LINES:
        typed = line.replace("-e tides", f"--target {tmp_path / 'site'} ./tides")
        done = subprocess.run(typed, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        allowed = ALLOWED.get(" ".join(line.split()[:2]), {0})
        assert done.returncode in allowed, f"$ {line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
