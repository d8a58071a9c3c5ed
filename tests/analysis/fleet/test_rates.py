"""The promise of `preflight judge` where repetitions have tails, are rounded, or differ by nothing."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from analysis.fleet.samples import Metric
from analysis.fleet.slow_nodes import judge, look_again
from benchmarks.preflight_rates import TRUTHS, bad_nodes


def times_of(levels: list[float], name: str = "m", noise: float = 0.01, seed: int = 0) -> Metric:
    chance = np.random.default_rng(seed)
    samples = {f"n{n}": tuple(level * np.exp(noise * chance.standard_normal(5))) for n, level in enumerate(levels)}
    return Metric(name, "", "s", "less", samples)


@pytest.mark.parametrize("truth", TRUTHS)
def test_healthy_nodes_are_named_as_seldom_as_promised(truth: str) -> None:
    chance = np.random.default_rng(5)
    nodes, fleets, rate = TRUTHS[truth][1], 25, 2e-4
    named = sum(len(bad_nodes(chance, truth, 4, rate)) for _ in range(fleets))
    assert named <= stats.binom.isf(0.001, nodes * fleets, rate)


def test_half_speed_is_found_in_four_nodes() -> None:
    chance = np.random.default_rng(6)
    found = sum(bad_nodes(chance, "normal, 1 %, 4 nodes", 1, 5e-5, 0.5) == {"n0"} for _ in range(50))
    assert found >= 48


def test_a_node_that_is_hardly_slower_in_a_quiet_fleet_is_good() -> None:
    assert set(judge([times_of([1.0] * 15 + [1.0005], noise=1e-6)]).words.values()) == {"good"}


def test_a_fleet_that_is_alike_says_that_its_level_was_not_asked_unless_a_history_tells() -> None:
    fleet = [times_of([2.0] * 16)]
    assert judge(fleet).alike
    found = judge(fleet, history={("", "m"): list(times_of([1.0] * 20).samples["n0"]) * 4})
    assert set(found.words.values()) == {"bad"}
    assert not found.alike


def test_a_node_is_bad_only_if_it_is_so_in_one_metric_in_both_looks() -> None:
    slow, well = [2.0] + [1.0] * 7, [1.0] * 8
    looks = [judge([times_of(slow, "a"), times_of(well, "b")]), judge([times_of(well, "a"), times_of(slow, "b")])]
    assert look_again(*looks).words["n0"] == "inconclusive"
    assert look_again(looks[0], looks[0]).words["n0"] == "bad"


@pytest.mark.parametrize("truth", ["quiet", "rounded to 1 %"])
def test_a_slow_node_of_a_fleet_with_hardly_any_spread_is_found(truth: str) -> None:
    chance = np.random.default_rng(7)
    for slower in (0.0005, 0.1, 0.3, 0.75, 0.9):
        for _ in range(5):
            found = bad_nodes(chance, truth, 1, 5e-5, slower)
            assert found == ({"n0"} if slower >= 0.3 else found - {f"n{n}" for n in range(1, 16)})
