"""A declared package that is not installed is the environment's fault: one line with the way to install it, exit code 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from mlhpc.suite.errors import PACKAGES, explain_missing
from mlhpc.suite.plugins import explain_unusable
from tests.fixtures.runs import our_runs

ROOT = Path(__file__).resolve().parents[2]
FINDER = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


def without(names: list[str], *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``mlhpc WORDS`` with a Python in which some packages are not installed."""
    (folder / "sitecustomize.py").write_text(FINDER.format(names=names))
    command = [sys.executable, "-P", "-m", "mlhpc", *words]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("module", "words", "install"),
    [
        ("click", ("status",), "click is not installed (pip install click)"),
        ("msgspec", ("status",), "msgspec is not installed (pip install msgspec)"),
        ("torch", ("moe",), "torch is not installed (pip install 'mlhpc[run]')"),
        ("pandas", ("report", "."), "pandas is not installed (pip install 'mlhpc[analysis]')"),
    ],
)
def test_a_missing_package_is_named_in_one_line(
    module: str, words: tuple[str, ...], install: str, tmp_path: Path
) -> None:
    done = without([module], *words, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    (last,) = [
        line for line in done.stderr.splitlines() if "the wing" not in line
    ]  # a copy without a wing says so first
    assert last == f"mlhpc: the Python package {install}; this Python is {sys.executable}"


def test_judging_needs_no_extra(tmp_path: Path) -> None:
    """On a login node, or a reviewer's laptop, only the dependencies proper may be there."""
    folder = our_runs(tmp_path / "run", 1)
    extras = sorted(module for module, (_, extra) in PACKAGES.items() if extra)
    for words in (
        ["check"],
        ["score"],
        ["compare", str(folder)],
        ["status", "--help"],
        ["package", "--help"],
        ["run", "--help"],
    ):
        done = without(extras, *words, str(folder), folder=tmp_path)
        assert done.returncode in (0, 1, 3), done.stderr
        assert "not installed" not in done.stderr


def test_other_errors_stay_what_they_are() -> None:
    assert explain_missing(ImportError("cannot import name 'x' from 'numpy'", name="numpy")) == ""
    assert explain_missing(ModuleNotFoundError("No module named 'numpy.gone'", name="numpy.gone")) == ""
    assert explain_missing(ModuleNotFoundError("No module named 'suite.gone'", name="suite.gone")) == ""
    assert explain_missing(ModuleNotFoundError("No module named 'unheard_of'", name="unheard_of")) == ""
    assert explain_missing(ModuleNotFoundError("no name")) == explain_missing(KeyError("numpy")) == ""
    assert "pip install 'mlhpc[fleet]'" in explain_unusable(ModuleNotFoundError("No module", name="lifelines"))


def test_every_package_that_pyproject_declares_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    declared = {(name_of(each), extra) for extra, wanted in groups.items() for each in wanted}
    developers = {"docs", "test", "mpi"}  # tools, and a library that is no Python module
    assert {(name_of(package), extra) for package, extra in PACKAGES.values()} <= declared
    known = {name_of(package) for package, _ in PACKAGES.values()}
    assert {name for name, extra in declared if extra not in developers} == known
    for module, packages in packages_distributions().items():
        if module in PACKAGES:
            assert name_of(PACKAGES[module][0]) in {name_of(each) for each in packages}


def name_of(requirement: str) -> str:
    """Return the normalised name of a requirement such as ``PyYAML>=6``."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")
