"""What a run's log says of the preflight before it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from mlhpc.suite.training.statement import read_preflight

VERDICT = {
    "nodes": {"n1": {"word": "good"}, "n2": {"word": "bad"}, "n3": {"word": "good"}},
    "false_alarms": 1e-3,
    "effect": 0.05,
    "metrics": [{"metric": "gemm/float32", "found_9_in_10": 0.04}],
}


def test_the_log_has_counts_and_criteria_and_no_names(tmp_path: Path) -> None:
    text = json.dumps(VERDICT)
    (tmp_path / "verdict.json").write_text(text)
    found = read_preflight({"MLHPC_PREFLIGHT": str(tmp_path)})
    assert found is not None
    assert found[0] == {"good": 2, "bad": 1, "inconclusive": 0}
    assert found[1] == {
        "false_alarms": 1e-3,
        "effect": 0.05,
        "found_9_in_10": {"gemm/float32": 0.04},
        "verdict_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    assert "n2" not in json.dumps(found)


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"nodes": []}', json.dumps(VERDICT | {"metrics": [1]})])
def test_without_a_verdict_the_log_says_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "verdict.json").write_text(text)
    assert read_preflight({"MLHPC_PREFLIGHT": str(tmp_path)}) is None
    assert read_preflight({}) is None
