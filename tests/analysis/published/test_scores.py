"""The table of published scores: what it holds, what it names as missing, and that it can be made again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.published_scores import COLUMNS
from benchmarks.published_scores import main as published_scores
from mlhpc.analysis.published.scores import ROUNDS, describe_missing_results, read_scores, read_stated_minutes

Build = Callable[..., Any]


def test_the_shipped_table_has_the_machines_everybody_knows() -> None:
    table = read_scores()
    assert list(table.columns) == list(COLUMNS)
    assert {"Fugaku", "Perlmutter", "Selene", "Eos", "Piz Daint"} <= set(table["machine"])
    assert set(table["round"]) <= set(ROUNDS)
    assert table["round"].value_counts().to_dict() == ROUNDS
    strong = table[table["mode"] == "strong"]
    eos = strong[(strong["machine"] == "Eos") & (strong["benchmark"] == "cosmoflow")].iloc[0]
    assert eos["score_s"] / 60 == pytest.approx(2.0984, abs=1e-3)


def test_what_is_missing_is_named() -> None:
    for round_, count in ROUNDS.items():
        at_hand = int((read_scores()["round"] == round_).sum())
        assert (f"{round_} ({count - at_hand} of {count} results)" in describe_missing_results()) == (at_hand < count)


def test_stated_minutes_belong_to_results_of_the_table_and_have_a_source() -> None:
    assert set(read_stated_minutes()) <= set(read_scores()["group"])
    assert all(minutes > 0 and source for minutes, source in read_stated_minutes().values())


def test_the_table_is_made_again_from_clones(tmp_path: Path, package: Build) -> None:
    package(tmp_path / "hpc_results_v3.0", submitter="NVIDIA", system="eos_n1", division="closed")
    target = tmp_path / "table.json"
    done = CliRunner().invoke(published_scores, [str(tmp_path / "hpc_results_v3.0"), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert "missing: v0.7, 15 of 15 results" in done.output
    assert "missing: v3.0, 21 of 22 results" in done.output
    document = json.loads(target.read_text())
    assert [row[document["columns"].index("machine")] for row in document["rows"]] == ["Eos"]
