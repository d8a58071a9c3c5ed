"""Without a wing's folder and its entry points the core works: its own tests pass in a copy."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from itertools import chain
from pathlib import Path

import pytest

from mlhpc.analysis.commands.report import ADDS_TO_REPORTS
from mlhpc.suite.plugins import WINGS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def without(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The name of a wing, or several with a | between them, and a copy of this checkout without them."""
    wing: str = request.param
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not in a checkout")
    copy = tmp_path / "copy"
    for name in listed.stdout.splitlines():
        if not (ROOT / name).exists() or re.match(rf"(tests/)?plugins/({wing})/", name):
            continue
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    project = copy / "pyproject.toml"
    lines = project.read_text().splitlines(keepends=True)
    project.write_text("".join(line for line in lines if not re.search(rf'= "mlhpc\.plugins\.({wing})\b', line)))
    # Entry points are read from metadata: these stand before those of the environment
    words = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info"]
    subprocess.run(words, cwd=copy, check=True, capture_output=True)
    install(copy)
    return wing, copy


def install(copy: Path) -> None:
    """Make an environment of the copy's own, with the packages and programs of this one."""
    here, there = Path(sys.prefix), copy / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(there)], check=True, capture_output=True)
    packages = Path(sysconfig.get_path("purelib"))
    added = there / packages.relative_to(here) / "copy.pth"
    added.write_text(f"{copy / 'src'}\n{packages}\n")
    for path in chain((here / "bin").iterdir(), (here / "lib").iterdir()):
        place = there / path.relative_to(here)
        if place.exists():
            continue
        if path.is_file() and path.read_bytes()[:2] == b"#!":  # a program starts the Python that its first line names
            place.write_bytes(path.read_bytes().replace(f"#!{here}/".encode(), f"#!{there}/".encode(), 1))
            place.chmod(0o755)
        else:
            place.symlink_to(path)


def run(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(copy / ".venv/bin/python"), *words], cwd=copy, capture_output=True, text=True)


LATER = [pytest.param(wing, marks=pytest.mark.long) for wing in WINGS if wing not in {"axes", "network"}]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("without", ["axes", "network", *LATER], indirect=True)  # one of each kind of ADDS_TO_REPORTS
def test_help_and_report_say_which_wing_is_missing(without: tuple[str, Path], tmp_path: Path) -> None:
    wing, copy = without
    program = (
        "from mlhpc.suite.plugins import list_missing_wings; import mlhpc, tests.fixtures.runs as runs, pathlib\n"
        f"print(list_missing_wings(), mlhpc.__file__); runs.our_runs(pathlib.Path({str(tmp_path / 'run')!r}), 1)"
    )
    made = run(copy, "-c", program)
    assert made.stdout == f"['{wing}'] {copy}/src/mlhpc/__init__.py\n", made.stderr
    done = run(copy, "-m", "mlhpc", "report", str(tmp_path / "run"), "-o", str(tmp_path / "report"))
    assert done.returncode == 0, done.stderr
    pages = "".join(run(copy, "-m", "mlhpc", *words, "--help").stdout for words in ([], ["report"]))
    refused = run(copy, "-m", "mlhpc", "moe", "fit", "pyproject.toml").stderr
    assert f"the wing '{wing}' is not installed" in " ".join((pages + refused).split())
    assert (f"the wing '{wing}' is not installed here" in done.stderr) == (wing in ADDS_TO_REPORTS)


@pytest.mark.long
@pytest.mark.parametrize("without", [*WINGS, "|".join(WINGS)], indirect=True)
def test_the_tests_of_the_core_pass_without_a_wing(without: tuple[str, Path]) -> None:
    _, copy = without
    chosen = [
        "-m",
        "not long and not slurm and not grid_engine",
        "--deselect",
        "tests/test_wings.py",
    ]
    done = run(copy, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *chosen)
    assert done.returncode == 0, done.stdout[-5000:]
