"""Baselines know their standard error, keep it in the data set's folder, and stand beside a result."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mlhpc.suite.commands.score import score
from mlhpc.suite.data.baselines import (
    BASELINES_NAME,
    find_standard_error,
    measure_baselines,
    read_baselines,
    render_baselines,
)
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.workload import Baseline
from mlhpc.workloads.cosmoflow import DESCRIPTOR
from tests.fixtures.logs import our_runs


def test_a_mean_has_the_standard_error_of_its_samples() -> None:
    errors = np.random.default_rng(0).exponential(size=50)
    found = Baseline.mean(errors)
    assert found == pytest.approx(errors.mean(), rel=1e-12)
    assert found.standard_error == pytest.approx(errors.std(ddof=1) / math.sqrt(50), rel=1e-12)


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    errors = np.random.default_rng(1).exponential(size=40).tolist()
    found = Baseline.jackknife([{"sum": each, "n": 1} for each in errors], lambda totals: totals["sum"] / totals["n"])
    assert found == pytest.approx(Baseline.mean(errors), rel=1e-12)
    assert found.standard_error == pytest.approx(Baseline.mean(errors).standard_error, rel=1e-9)


def test_the_jackknife_of_a_ratio_covers_what_other_samples_give() -> None:
    """The spread over 300 new samples of structures with unequal numbers of atoms is the stated error within a quarter."""
    random = np.random.default_rng(2)

    def draw() -> Baseline:
        count = random.integers(1, 20, 60)
        error = count * random.exponential(size=60)
        pairs = zip(error.tolist(), count.tolist(), strict=True)
        return Baseline.jackknife([{"e": e, "n": n} for e, n in pairs], lambda totals: totals["e"] / totals["n"])

    found = [draw() for _ in range(300)]
    stated = np.mean([each.standard_error for each in found])
    assert np.std(found) == pytest.approx(stated, rel=0.25)


def test_one_sample_has_no_standard_error() -> None:
    for found in (Baseline.mean([0.5]), Baseline.jackknife([{"x": 0.5}], lambda totals: totals["x"]), 0.5):
        assert found == 0.5
        assert find_standard_error(found) is None


def test_the_folder_of_the_data_keeps_values_and_standard_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = {"known": Baseline(0.5, 0.01), "plain": 0.25, "knows": Baseline(0.1, 0.002, told=True)}
    monkeypatch.setattr("mlhpc.workloads.cosmoflow.workload.CosmoFlow.baselines", lambda *_: values)
    assert measure_baselines(DESCRIPTOR, "smoke", tmp_path, "ab") == values
    content = json.loads((tmp_path / BASELINES_NAME).read_text())
    assert content["values"] == {"known": 0.5, "plain": 0.25}
    assert content["standard_errors"] == {"known": 0.01, "plain": None, "knows": 0.002}
    assert read_baselines(tmp_path, "ab") == ({"known": 0.5, "plain": 0.25}, {"knows": 0.1})
    assert read_baselines(tmp_path, "cd") == ({}, {})
    del content["attainable"]  # as written before there was such a part
    (tmp_path / BASELINES_NAME).write_text(json.dumps(content))
    assert read_baselines(tmp_path, "ab") == ({"known": 0.5, "plain": 0.25}, {})


def test_the_baselines_stand_beside_a_score(tmp_path: Path) -> None:
    done = CliRunner().invoke(score, [str(our_runs(tmp_path / "r"))])
    assert "  simple predictors reach: mean 0.5000" in done.output.splitlines()
    assert render_baselines({}, {}) == []


def test_what_is_attainable_is_logged_and_shown_apart_from_baselines(tmp_path: Path) -> None:
    stated = '{"mean": 0.5}, "metadata": {'
    told = stated + '"attainable": {"knows": 0.1, "forged": "NaN"}, '
    for log in sorted(our_runs(tmp_path / "r").rglob("result_*.txt")):
        log.write_text(log.read_text().replace(stated, told))
        record = summarise_log(read_events(log))
        assert (dict(record.baselines), dict(record.attainable)) == ({"mean": 0.5}, {"knows": 0.1})
    lines = CliRunner().invoke(score, [str(tmp_path / "r")]).output.splitlines()
    assert "  simple predictors reach: mean 0.5000" in lines
    assert "  best possible, by solvers that know how the data were made: knows 0.1000" in lines
