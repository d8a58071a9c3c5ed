"""Of a data set whose baselines.json is damaged one line says so, and the run goes on without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlhpc.suite.data.baselines import BASELINES_NAME, find_baselines_problem, read_baselines

GOOD = {"version": 1, "data_manifest": "a" * 64, "metric": "m", "values": {"mean": 0.5}, "attainable": {"oracle": 0.1}}
TEXT = json.dumps(GOOD)
DAMAGED = {
    "half": TEXT[: len(TEXT) // 2],
    "empty": "",
    "a list": "[]",
    "zeros": "\0" * 300,
    "a list of values": json.dumps(GOOD | {"values": [0.5]}),
    "a text for a number": json.dumps(GOOD | {"values": {"mean": "low"}}),
    "a number too large": TEXT.replace("0.5", "1" + "0" * 4000),
    "of other data": json.dumps(GOOD | {"data_manifest": "b" * 64}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_baselines_are_said(tmp_path: Path, name: str) -> None:
    (tmp_path / BASELINES_NAME).write_text(DAMAGED[name])
    assert read_baselines(tmp_path, "a" * 64) == ({}, {})
    problem = find_baselines_problem(tmp_path, "a" * 64)
    assert problem is not None
    assert BASELINES_NAME in problem
    assert "\n" not in problem
    assert len(problem) < 400 + len(str(tmp_path))


def test_sound_baselines_have_no_problem(tmp_path: Path) -> None:
    (tmp_path / BASELINES_NAME).write_text(TEXT)
    assert read_baselines(tmp_path, "a" * 64) == ({"mean": 0.5}, {"oracle": 0.1})
    assert find_baselines_problem(tmp_path, "a" * 64) is None
