"""A tournament of real processes: two configurations of `moe_lm smoke`, one block, and what is left of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fixtures.cli import mlhpc


@pytest.mark.long
def test_real_runs_are_as_the_tournament_states(tmp_path: Path) -> None:
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
    assert mlhpc("tournament", "new", root, *words).returncode == 0
    assert mlhpc("tournament", "enter", root, "default").returncode == 0
    assert mlhpc("tournament", "enter", root, "parts", "--set", "gradient_accumulation_steps=8").returncode == 0
    done = mlhpc("tournament", "run", root)
    assert done.returncode == 0, done.stderr
    shown = mlhpc("tournament", "rank", root, "--format", "json")
    document = json.loads(shown.stdout)
    assert (shown.returncode, document["findings"], document["runs"]) == (0, [], 2)
    assert document["verdict"] == "no winner: 1 block cannot tell default, parts apart at an error of 5 %"
    first, second = document["entries"]
    assert (first["entry"], second["ratio_to_leader"]["value"] > 1.2) == ("default", True)
    again = mlhpc("tournament", "run", root)
    assert (again.returncode, len(list((root / "journal").iterdir()))) == (0, 5)
