"""The promise of `preflight judge` where repetitions have tails, are rounded, or differ by nothing."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.preflight_rates import TRUTHS, bad_nodes, draw, verdict
from mlhpc.plugins.fleet.samples import Metric
from mlhpc.plugins.fleet.slow_nodes import FALSE_ALARM_RATE, judge, merge_verdicts

DOUBLED = "1 repetition in 50 takes twice as long"


def times_of(levels: list[float], name: str = "m", noise: float = 0.01, seed: int = 0) -> Metric:
    chance = np.random.default_rng(seed)
    samples = {f"n{n}": tuple(level * np.exp(noise * chance.standard_normal(5))) for n, level in enumerate(levels)}
    return Metric(name, "", "s", "less", samples)


@pytest.mark.parametrize("truth", [name for name, truth in TRUTHS.items() if truth.held])
def test_healthy_nodes_are_named_as_seldom_as_promised(truth: str) -> None:
    chance, rate = np.random.default_rng(5), 2e-3
    named = nodes = 0
    for size in [size for size in (4, 8, 16) if size >= TRUTHS[truth].fewest]:
        for _ in range(96 // size):
            named += len(bad_nodes(chance, truth, (8, size), rate))
            nodes += size
    assert named <= stats.binom.isf(0.001, nodes, rate)


@pytest.mark.parametrize(("truth", "nodes"), [
    ("repetitions normal, 1 %", 4), ("repetitions normal, 1 %", 8), ("a quiet fleet, 0.001 %", 4),
    ("rounded to 1 %", 8), (DOUBLED, 16), ("drift from node to node", 16),
])  # fmt: skip
def test_half_speed_is_found(truth: str, nodes: int) -> None:
    chance = np.random.default_rng(6)
    assert sum(bad_nodes(chance, truth, (20, nodes), FALSE_ALARM_RATE, 0.5) == {"n0"} for _ in range(10)) >= 9


def test_a_node_that_is_hardly_slower_in_a_quiet_fleet_is_good() -> None:
    assert set(judge([times_of([1.0] * 15 + [1.0005], noise=1e-6)]).words.values()) == {"good"}


def test_nodes_that_are_equal_are_not_all_slow_only_if_a_history_says_so() -> None:
    fleet = [times_of([2.0] * 16)]
    assert judge(fleet).are_equal
    found = judge(fleet, history={("", "m"): [[value] for value in times_of([1.0] * 20).samples["n0"]] * 4})
    assert set(found.words.values()) == {"bad"}
    assert not found.are_equal


def test_a_node_is_bad_only_if_it_is_so_in_one_metric_in_both_looks() -> None:
    slow, well = [2.0] + [1.0] * 7, [1.0] * 8
    looks = [judge([times_of(slow, "a"), times_of(well, "b")]), judge([times_of(well, "a"), times_of(slow, "b")])]
    assert merge_verdicts(*looks).words["n0"] == "inconclusive"
    assert merge_verdicts(looks[0], looks[0]).words["n0"] == "bad"


@pytest.mark.parametrize("truth", ["a quiet fleet, 0.001 %", "rounded to 1 %"])
def test_a_slow_node_of_a_fleet_with_hardly_any_spread_is_found(truth: str) -> None:
    chance = np.random.default_rng(7)
    for slower in (0.0005, 0.1, 0.3, 0.75, 0.9):
        for _ in range(5):
            found = bad_nodes(chance, truth, (1, 16), 5e-5, slower)
            assert found == ({"n0"} if slower >= 0.3 else found - {f"n{n}" for n in range(1, 16)})


def test_a_fleet_below_a_ceiling_is_a_finding() -> None:
    rates = Metric("m", "", "B/s", "more", times_of([2.0] * 16).samples)
    assert set(judge([rates], ceilings={("", "m"): 3.2}).words.values()) == {"bad"}
    found = judge([rates], ceilings={("", "m"): 2.8})
    assert found.are_equal
    assert found.metrics[0].has_level


@pytest.mark.parametrize("sessions", [1, 4, 20])
def test_sessions_that_differ_by_less_than_the_effect_make_no_fleet_slow(sessions: int) -> None:
    chance = np.random.default_rng(8)
    for _ in range(20):
        now, *past = np.exp(0.01 * chance.standard_normal(1 + sessions))
        history = {("", "m"): [[level * value for value in (0.999, 1.0, 1.001, 1.002)] for level in past]}
        well = [times_of([now] * 8, seed=int(1e6 * now))]
        assert "bad" not in judge(well, history=history).words.values()
        slow = [times_of([2.0 * now] * 8, f"m{n or ''}", seed=int(1e6 * now)) for n in range(20)]
        assert set(judge(slow, history=history).words.values()) == {"bad"}


def test_the_chance_that_is_printed_grows_with_the_tails_and_stays_below_the_promise() -> None:
    chance = np.random.default_rng(9)
    printed = [
        verdict(draw(chance, name, (20, 16)), FALSE_ALARM_RATE).chance for name in ("repetitions normal, 1 %", DOUBLED)
    ]
    assert 0 < printed[0] < printed[1] <= FALSE_ALARM_RATE
