"""The examples in docs/own_loop.md and docs/api.md are run as they are written, in the order of the page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.cli import mlhpc
from tests.fixtures.once import made_once
from tests.fixtures.runs import run_folder

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
            [sys.executable, "train.py"],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
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


def test_the_own_loop_of_the_page_is_judged_by_its_commands(spirals: Path, tmp_path: Path) -> None:
    for name in ("runs", "spirals.yaml"):
        (tmp_path / name).symlink_to(spirals / name)
    ((_, text),) = [block for block in blocks("own_loop.md") if block[0] == "bash"]
    for program, *words in commands(text):
        assert program == "mlhpc"
        done = mlhpc(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "report" / "report.html").exists()
