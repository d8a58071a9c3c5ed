"""A contest of real processes: two configurations of `moe_lm smoke`, one block, and what is left of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures.cli import mlhpc


@pytest.mark.long
def test_real_runs_are_as_the_contest_states(tmp_path: Path) -> None:
    data, root = tmp_path / "data", tmp_path / "contest"
    assert mlhpc("data", "generate", "moe_lm", "--size", "smoke", "-o", data).returncode == 0
    words = (
        "moe_lm",
        "--size",
        "smoke",
        "--system",
        "bed",
        "--blocks",
        1,
        "--data",
        data,
        "--objective",
        "cpu_seconds",
    )
    assert mlhpc("ab", "runs", "new", root, *words).returncode == 0
    assert mlhpc("ab", "runs", "enter", root, "default").returncode == 0
    assert mlhpc("ab", "runs", "enter", root, "parts", "--set", "gradient_accumulation_steps=8").returncode == 0
    done = mlhpc("ab", "runs", "run", root)
    assert done.returncode == 0, done.stderr
    shown = mlhpc("ab", "runs", "show", root, "--format", "json")
    document = json.loads(shown.stdout)
    assert (shown.returncode, document["findings"], document["runs"]) == (0, [], 2)
    assert document["verdict"] == "no winner: default, parts are inconclusive after 1 block at an error of 5 %"
    first, second = document["entries"]
    assert (first["entry"], second["ratio_to_leader"]["value"] > 1.2) == ("default", True)
    again = mlhpc("ab", "runs", "run", root)
    assert (again.returncode, len(json.loads((root / "journal.json").read_text())["runs"])) == (0, 2)
