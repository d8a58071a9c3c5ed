"""Runs the examples of docs/own_loop.md, api.md, checker.md and report.md as they are written, in the order of the page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mlhpc.analysis.commands.report import ADDS_TO_REPORTS
from mlhpc.suite.plugins import list_missing_wings
from tests.fixtures.cli import mlhpc
from tests.fixtures.once import made_once
from tests.fixtures.runs import run_folder
from tests.fixtures.warm import warm_python

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a page."""
    return BLOCK.findall((DOCS / name).read_text())


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def spirals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a person who followed docs/own_loop.md up to the commands."""

    def follow(folder: Path) -> None:
        (card, program) = (text for language, text in blocks("own_loop.md") if language in ("yaml", "python"))
        (folder / "spirals.yaml").write_text(card)
        (folder / "train.py").write_text(program)
        done = subprocess.run(
            [*warm_python(), "train.py"],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("target reached") == 3, done.stdout

    return made_once(tmp_path_factory, "spirals", follow)


def test_the_api_page_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(tmp_path / "runs" / "first")
    built = mlhpc(
        "package", "runs/first", "--system", "laptop", "--submitter", "ACME", "-o", "packages/ACME", cwd=tmp_path
    )
    assert built.returncode == 0, built.stderr
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for language, text in blocks("api.md"):
        assert language == "python"
        exec(compile(text, "docs/api.md", "exec"), names)
    assert (tmp_path / "report" / "report.html").exists()
    assert (tmp_path / "convergence.png").exists()


def test_the_commands_of_the_checkers_page_work_and_its_findings_are_found(tmp_path: Path) -> None:
    for name in ("first", "before", "after"):
        run_folder(tmp_path / "runs" / name)
    found = blocks("checker.md")
    (stated,) = (text for language, text in found if language == "text")
    written = [words for language, text in found if language == "bash" for words in commands(text)]
    assert len(written) > 8
    for program, *words in written:
        assert program == "mlhpc"
        done = mlhpc(*words, cwd=tmp_path)
        # The runs of this test are equal, so their comparison is inconclusive.
        assert done.returncode == (4 if words[0] == "compare" else 0), f"{words}\n{done.stdout}{done.stderr}"

    next((tmp_path / "packages" / "ACME" / "results").rglob("result_3.txt")).unlink()
    judged = mlhpc("check", "packages/ACME", cwd=tmp_path)
    assert judged.returncode == 1
    assert set(stated.splitlines()) <= set(judged.stdout.splitlines())


def test_the_own_loop_of_the_page_is_judged_by_its_commands(spirals: Path, tmp_path: Path) -> None:
    for name in ("runs", "spirals.yaml"):
        (tmp_path / name).symlink_to(spirals / name)
    ((_, text),) = [block for block in blocks("own_loop.md") if block[0] == "bash"]
    for program, *words in commands(text):
        assert program == "mlhpc"
        done = mlhpc(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "report-spirals" / "report.html").exists()


@pytest.mark.long
def test_the_figure_of_the_page_is_in_a_report(tmp_path: Path) -> None:
    """Installed as pip does it: a folder of the import path with the package and its entry point."""
    site = tmp_path / "site"
    (site / "site_figures").mkdir(parents=True)
    found = dict(blocks("report.md"))
    project = tomllib.loads(found["toml"])
    (name, entry_points), *others = project["project"]["entry-points"].items()
    assert not others
    info = site / "site_figures-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-figures\nVersion: 0.1\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{name}]", *lines, ""]))
    for file, text in (("__init__", 'FIGURES = ("evaluation_share",)\n'), ("evaluation_share", found["python"])):
        (site / "site_figures" / f"{file}.py").write_text(text)
    run = run_folder(tmp_path / "run")
    command = [sys.executable, "-m", "mlhpc", "report", str(run), "-o", str(tmp_path / "report"), "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=DOCS.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("\n")) == (0, len({*list_missing_wings()} & {*ADDS_TO_REPORTS})), (
        done.stderr
    )
    page = (tmp_path / "report" / "report.html").read_text()
    assert "What share of a run is evaluation?" in page
    assert "Share of evaluation" in page
    assert "at most " in page
    assert (tmp_path / "report" / "tables" / "figure_evaluation_share.csv").exists()
