"""Checks of nodes: closed forms, simulations beside them, and that a node without warning gains nothing."""

from __future__ import annotations

import json

import pytest

from analysis.fleet.incidents import Node, gain, interval_for_gain, mtbi_h, simulate_mtbi_h
from tests.fixtures.cli import mlhpc

CASES = [
    (500, 100, 24, 1.0, 4572.2),
    (500, 100, 24, 0.9, 3877.2),
    (500, 100, 168, 1.0, 1030.7),
    (500, 24, 24, 1.0, 1374.0),
]


@pytest.mark.parametrize(("healthy", "degraded", "every", "found", "wanted"), CASES)
def test_mean_time_between_incidents(
    healthy: float, degraded: float, every: float, found: float, wanted: float
) -> None:
    node = Node(healthy, degraded)
    assert mtbi_h(node, every, found) == pytest.approx(wanted, rel=1e-4)
    mean, error = simulate_mtbi_h(node, every, found, 2000, seed=1)
    assert abs(mean - wanted) < 4 * error
    assert error < 0.03 * wanted


def test_without_checks_it_is_the_sum_and_so_it_is_with_checks_that_find_nothing() -> None:
    assert mtbi_h(Node(500, 100)) == mtbi_h(Node(500, 100), 24, 0.0) == 600
    assert mtbi_h(Node(500, 100), 1e7) == pytest.approx(600, rel=1e-3)


@pytest.mark.parametrize("degraded", [0.0, 1e-9])
def test_a_node_whose_incidents_come_without_warning_gains_nothing(degraded: float) -> None:
    assert gain(Node(500, degraded), 24) == pytest.approx(1.0, abs=1e-9)


def test_equal_rates_are_no_special_case() -> None:
    assert mtbi_h(Node(100, 100), 24) == pytest.approx(mtbi_h(Node(100, 100.001), 24), rel=1e-4)


def test_the_interval_for_a_gain() -> None:
    node = Node(500, 100)
    every = interval_for_gain(node, 22.61)
    assert every is not None
    assert gain(node, every) == pytest.approx(22.61, rel=1e-6)
    assert interval_for_gain(Node(500, 0.01), 22.61, found=0.5) is None


def test_the_command_states_the_rates_with_the_gain() -> None:
    words = ("preflight", "checks", "--healthy", "500h", "--degraded", "100h", "--every", "1d")
    first, second, third = mlhpc(*words).stdout.splitlines()
    assert (
        first
        == "healthy for 500 h, then degraded for 100 h, checked every 24 h, found with probability 1 (a model, not a measurement)"
    )
    assert second == "mean time between incidents: 600 h without checks, 4572 h with: 7.62 times"
    assert third.startswith("checked every: 6 h ")
    assert json.loads(mlhpc(*words, "--format", "json").stdout)["gain"] == pytest.approx(7.62, abs=0.001)
    for wrong in ("24", "h", "-3h", "0h", "infh", "x", "nanh", "1e-9s", "1e7h"):
        done = mlhpc(*words[:-1], wrong)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
