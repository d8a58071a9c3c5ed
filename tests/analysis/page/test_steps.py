"""What failed before a report stands on its page; without altair there is still a page."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlhpc.analysis.commands.report import report

Build = Callable[..., Path]

FAILED = {"title": "ceilings", "command": "mlhpc ceilings", "exit_code": 2, "seconds": 1.0, "reason": "<b>no room"}
FINE = FAILED | {"title": "score", "command": "mlhpc score", "exit_code": 0, "reason": ""}


def steps(path: Path, *listed: object, **others: Any) -> Path:
    path.write_text(json.dumps({"version": 1, "kind": "steps", "steps": listed} | others))
    return path


def make(tmp_path: Path, *paths: Path) -> tuple[str, dict[str, Any]]:
    done = CliRunner().invoke(report, [*map(str, paths), "-o", str(tmp_path / "report")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return (tmp_path / "report/report.html").read_text(), json.loads((tmp_path / "report/report.json").read_text())


def test_a_failed_step_stands_on_the_page_and_in_the_numbers(tmp_path: Path, run_folder: Build) -> None:
    html, document = make(tmp_path, run_folder(tmp_path, "one"), steps(tmp_path / "steps.json", FAILED, FINE))
    assert "step &#39;ceilings&#39; (mlhpc ceilings): &lt;b&gt;no room" in html
    assert [issue["where"] for issue in document["issues"] if issue["where"].startswith("step ")] == [
        "step 'ceilings' (mlhpc ceilings)"
    ]


WITHOUT_ALTAIR = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
def find_spec(name, *more):
    return None if name.partition(".")[0] == "altair" else find(name, *more)
importlib.machinery.PathFinder.find_spec = find_spec
from mlhpc.suite.cli.main import main
main()
"""


def test_without_altair_the_page_has_everything_but_figures(tmp_path: Path, run_folder: Build) -> None:
    command = [
        sys.executable,
        "-c",
        WITHOUT_ALTAIR,
        "report",
        str(run_folder(tmp_path, "one")),
        "-o",
        str(tmp_path / "report"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    html, document = (
        (tmp_path / "report/report.html").read_text(),
        json.loads((tmp_path / "report/report.json").read_text()),
    )
    assert "<figure" not in html
    assert "Questions and answers" not in html
    assert "figures: none is drawn: altair is not installed (pip install &#39;mlhpc[analysis]&#39;)" in html
    assert document["figures"] == []
    assert document["results"]


@pytest.mark.parametrize(
    ("listed", "others", "message"),
    [
        ([{"title": "x"}], {}, "steps.0.command"),
        (["x"], {}, "steps.0"),
        ([], {"version": 2}, "`version` of the steps file is 2"),
        ([], {"steps": 3}, "steps = 3: "),
        ([FAILED | {"reason": None}], {}, "steps.0.reason"),
    ],
)
def test_damaged_steps_are_one_line(
    listed: list[object], others: dict[str, Any], message: str, tmp_path: Path, run_folder: Build
) -> None:
    path = steps(tmp_path / "steps.json", *listed, **others)
    done = CliRunner().invoke(report, [str(run_folder(tmp_path, "one")), str(path), "-o", str(tmp_path / "report")])
    assert message in str(done.exception)
    assert str(done.exception).startswith(f"{path}: ")
    assert "\n" not in str(done.exception)
