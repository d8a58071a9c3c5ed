"""The README is run: its commands in order; the two make commands are parsed, the demo is led through its steps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mlhpc.suite.cli.main import group
from mlhpc.suite.commands.demo import ORG, demo
from tests.fixtures.readme import COMMANDS, MLHPC_COMMANDS, ROOT
from tests.fixtures.warm import warm_folder, warm_python

ENV = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def test_the_readme_names_two_make_commands_that_the_makefile_has() -> None:
    targets = [line.split("#")[0].split()[1] for line in COMMANDS if line.startswith("make ")]
    assert targets == ["demo", "test"]
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mlhpc demo" in done.stdout
    assert "pytest" in done.stdout


def shell(line: str, folder: Path, programs: str | None = None) -> subprocess.CompletedProcess[str]:
    """What a line prints. ``programs``: a folder of programs that are used in place of the installed ones."""
    environment = ENV | ({"PATH": f"{programs}:{ENV['PATH']}"} if programs else {})
    return subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_three_jobs_work_as_written(smoke_data: Path, tmp_path: Path) -> None:
    """In a folder that has the data already: the fixture ran the README's own command for them."""
    (tmp_path / "data").symlink_to(smoke_data)
    for line in MLHPC_COMMANDS:
        done = shell(line, tmp_path)
        assert done.returncode == 0, f"$ {line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


@pytest.fixture(scope="module")
def followed(smoke_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of a person who typed the README's commands, but one run for five, and what `check` and `score` said.

    Those two find that one run is too few, and only that; every other command ends well.
    """
    folder = tmp_path_factory.mktemp("readme")
    (folder / "data").symlink_to(smoke_data)
    said = {}
    for line in MLHPC_COMMANDS:
        name = line.split()[1]
        done = shell(line.replace("--runs 5 --set", "--runs 1 --set"), folder, warm_folder())
        assert done.returncode == (1 if name in {"check", "score"} else 0), f"$ {line}\n{done.stdout}\n{done.stderr}"
        said[name] = done.stdout
    return folder, said


@pytest.mark.timeout(900)
def test_the_three_jobs_work_with_one_run(followed: tuple[Path, dict[str, str]]) -> None:
    assert len(MLHPC_COMMANDS) >= 9
    folder, said = followed
    assert [line.split()[1] for line in said["check"].splitlines() if line.startswith("error")] == ["run-count"]
    assert "not a score: 1 of the 5 required runs complete" in said["score"]
    assert "accepted  compliance_checker" in said["check"]
    assert (folder / "report" / "report.html").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_demo_runs_small_and_says_what_one_run_is_not(tmp_path: Path) -> None:
    """With another workload than the README's commands."""
    done = subprocess.run(
        [sys.executable, "-m", "mlhpc", "demo", "moe_lm", "--size", "smoke", "--runs", "1", "-o", "out"],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == 1, done.stdout + done.stderr  # one run is too few for a score: a finding
    assert (tmp_path / "out" / "report" / "report.html").exists()
    assert len(list((tmp_path / "out").glob("submissions/demo/results/*/strong/moe_lm/result_*.txt"))) == 1


def parse(command: click.Command, words: list[str]) -> None:
    """Let a command, or the subcommand that is named first, parse its arguments; a mistake is raised."""
    if isinstance(command, click.Group) and words[0] in command.commands:
        parse(command.commands[words[0]], words[1:])
    else:
        command.make_context(command.name, [*words])  # click empties what it is given


@pytest.mark.timeout(900)
def test_the_demos_commands_are_understood_and_make_a_package_and_a_report_of_a_run(
    followed: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long is parsed only, and the run is that of the README's commands; the rest is executed."""

    def execute(command: list[str], limit_s: float | None) -> tuple[int, str]:
        name, *words = command[command.index("mlhpc") + 1 :]
        if name in {"data", "run", "ceilings"}:
            loaded = group.get_command(click.Context(group), name)
            assert loaded is not None
            parse(loaded, words)
            if name == "run":
                folder = Path(words[words.index("-o") + 1])
                shutil.copytree(followed[0] / "runs" / "first", folder)
                for log in folder.glob("result_*.txt"):
                    log.write_text(log.read_text().replace('"ACME"', f'"{ORG}"'))
            return 0, ""
        words = [*warm_python(), *command[command.index("-m") :]]
        return subprocess.run(words, capture_output=True, text=True, timeout=600).returncode, ""

    monkeypatch.setattr("mlhpc.suite.commands.demo._execute", execute)
    done = CliRunner().invoke(demo, ["--size", "smoke", "--runs", "1", "-o", str(tmp_path / "out")])
    assert done.exit_code == 1, (done.output, done.exception)
    failed = [line.split("`")[1] for line in done.output.splitlines() if line.startswith("  failed:")]
    assert failed == ["mlhpc check", "mlhpc score"]  # one run is too few for a score
    assert (tmp_path / "out" / "report" / "report.html").exists()
    assert len(list((tmp_path / "out").glob("submissions/demo/results/*/strong/cosmoflow/result_*.txt"))) == 2


def test_every_relative_path_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"\]\(([^):#]+)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`((?:docs|submissions|benchmarks)/[^`*]*)`", text):
        assert (ROOT / name).exists(), name
