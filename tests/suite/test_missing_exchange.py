"""Without the wing exchange each of its parts is one line and exit code 2; a package is built and says what it lacks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mlhpc.suite.compliance.check import check
from mlhpc.suite.data.manifest import Manifest, write_manifest
from tests.fixtures.runs import run_folder
from tests.fixtures.warm import warm_python

PROGRAM = """
import mlhpc.suite.plugins as plugins
from importlib.metadata import EntryPoints, entry_points
plugins.entry_points = lambda group: [each for each in entry_points(group=group) if "plugins.exchange" not in each.value]
plugins.find_plugins.cache_clear()
from mlhpc.suite.cli.main import main
main()
"""
WHY = "the wing 'exchange' is not installed here; expected the folder plugins/exchange and its entry points: install mlhpc anew"


def mlhpc(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [*warm_python(), "-c", PROGRAM, *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("report run --form prometheus", "--form prometheus"),
        ("data describe data", "data describe"),
        ("ceilings counters ncu a.csv --system x -o counters.json", "ceilings counters"),
        ("package run --system x --submitter ACME --power a.csv --power-columns a.csv", "--power"),
    ],
)
def test_what_is_asked_for_is_one_line(tmp_path: Path, words: str, asked: str) -> None:
    run_folder(tmp_path / "run")
    write_manifest(tmp_path / "data", Manifest(workload="moe_lm", size="smoke", seed=3, generator={}, splits={}))
    (tmp_path / "a.csv").write_text("a\n")
    done = mlhpc(tmp_path, *words.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"mlhpc: {asked}: {WHY}\n")


@pytest.mark.parametrize("command", ["report", "data describe", "ceilings", "ceilings counters", "package"])
def test_the_help_says_so(tmp_path: Path, command: str) -> None:
    done = mlhpc(tmp_path, *command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert " ".join(done.stdout.split()).count("(the wing 'exchange' is not installed)") == 1


def test_a_package_is_compliant_and_says_what_is_not_in_it(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    done = mlhpc(tmp_path, "package", "run", "--system", "bed", "-o", "out/ACME")
    assert done.returncode == 0, done.stderr
    assert f"warning: out/ACME/ro-crate-metadata.json: not written: {WHY}\n" in done.stdout
    assert not (tmp_path / "out" / "ACME" / "ro-crate-metadata.json").exists()
    assert check([tmp_path / "out" / "ACME"]).compliant
