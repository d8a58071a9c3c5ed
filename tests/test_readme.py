"""The README is run: its commands in order in an empty folder; the two make commands are parsed and the demo runs small."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from suite.commands.demo import demo
from suite.descriptor import descriptor
from suite.log.reader import read_events
from suite.log.record import first_reaching, summarise
from tests.fixtures.readme import COMMANDS, MLHPC_COMMANDS, ROOT

ENV = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def test_the_readme_names_two_make_commands_that_the_makefile_has() -> None:
    targets = [line.split("#")[0].split()[1] for line in COMMANDS if line.startswith("make ")]
    assert targets == ["demo", "test"]
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "suite demo" in done.stdout
    assert "pytest" in done.stdout


@pytest.mark.timeout(400)
def test_the_three_jobs_work_as_written(smoke_data: Path, tmp_path: Path) -> None:
    """In a folder that has the data already: the fixture ran the README's own command for them."""
    assert len(MLHPC_COMMANDS) >= 10
    (tmp_path / "data").symlink_to(smoke_data)
    for line in MLHPC_COMMANDS:
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"$ {line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


@pytest.mark.timeout(400)
def test_the_demo_runs_small_and_says_what_one_run_is_not(tmp_path: Path) -> None:
    """With another workload than the README's commands; its run reaches the target of `smoke`."""
    done = subprocess.run(
        [sys.executable, "-m", "suite", "demo", "moe_lm", "--size", "smoke", "--runs", "1", "-o", "out"],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == 1, done.stdout + done.stderr  # one run is too few for a score: a finding
    assert (tmp_path / "out" / "report" / "report.html").exists()
    (log,) = (tmp_path / "out").glob("submissions/demo/results/*/strong/moe_lm/result_*.txt")
    assert first_reaching(summarise(read_events(log)), descriptor("moe_lm").card().size("smoke")) is not None


def test_the_demo_reaches_its_report_when_the_ceilings_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A side step that ends with an error is named at the end; the report is made of what there is."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, returncode=2 if command[3] == "ceilings" else 0)

    monkeypatch.setattr("suite.commands.demo.subprocess.run", run)
    done = CliRunner().invoke(demo, ["--size", "smoke", "-o", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "failed: `mlhpc ceilings`" in done.output
    assert commands[-1] == ["report", f"{tmp_path}/out/submissions/demo", "-o", f"{tmp_path}/out/report"]
    assert "ceilings.json  this machine's" not in done.output


def test_every_relative_path_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"`((?:docs|submissions|benchmarks)/[^`*]*)`", text):
        assert (ROOT / name).exists(), name
