"""The page of baselines says how far each target lies beyond each measured baseline, in standard errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.pages import baselines
from mlhpc.suite.descriptor import load_descriptors


def test_the_page_has_every_workload_and_every_row() -> None:
    text = baselines.page()
    assert all(f"## {each.card().title}" in text for each in load_descriptors().values())
    assert text.count("\n| `") == len([*baselines.rows(), *baselines.rows(part="attainable")])


def test_margins_are_in_standard_errors_and_positive_beyond_a_baseline(tmp_path: Path) -> None:
    for workload, better in (("cosmoflow", -1), ("openfold", 1)):  # an error falls, lDDT rises
        target = load_descriptors()[workload].card().size("smoke").threshold
        entries = {
            "met": {"value": target + 0.02 * better, "standard_error": 0.01},
            "beyond": {"value": target - 0.03 * better, "standard_error": 0.01},
            "bare": {"value": target - 0.01 * better, "standard_error": None},
        }
        for date, sizes in (("2026-01-01", {}), ("2026-01-02", {"smoke": {"baselines": entries}})):
            (tmp_path / f"{date}-baselines_{workload}.json").write_text(json.dumps({"sizes": sizes}))
        found = {row.name: row for row in baselines.rows(tmp_path) if row.workload == workload}
        assert found["met"].margin == pytest.approx(-2)
        assert found["beyond"].margin == pytest.approx(3)
        assert found["bare"].margin is None
        assert next(iter(found)) != "beyond"


def test_the_page_names_the_sizes_whose_target_a_baseline_meets() -> None:
    found = list(baselines.rows())
    assert len(found) > 40
    (named,) = re.findall("Baselines meet the target of (.*)[.]\n", baselines.page())
    met = [f"{row.workload} `{row.size}`" for row in found if row.margin is not None and row.margin <= 0]
    assert met
    assert named == ", ".join(dict.fromkeys(met))


def test_what_is_told_the_rule_shows_that_the_target_can_be_met() -> None:
    told = list(baselines.rows(part="attainable"))
    assert {row.name for row in told} == {"known_language"}
    assert all(row.margin < 0 for row in told)
