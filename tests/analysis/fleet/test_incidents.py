"""Checks of nodes: closed forms, simulations beside them, and that a node without warning gains nothing."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from analysis.fleet import hazard
from analysis.fleet.fleets import FILE, Fleet, Sourced, Start, defect_table, published
from analysis.fleet.incidents import Node, gain, interval_for_gain, mtbi_h, together_mtbi_h
from analysis.fleet.simulation import POLICIES, Outcome, Policy, Setting, learn_selector, observe, simulate
from tests.fixtures.cli import mlhpc

CASES = [
    (500, 100, 24, 1.0, 4572.2),
    (500, 100, 24, 0.9, 3877.2),
    (500, 100, 168, 1.0, 1030.7),
    (500, 24, 24, 1.0, 1374.0),
]


def fleet(mtbi: float, shape: float = 1.0, ages: float = 0.0) -> Fleet:
    def each(value: float) -> Sourced:
        return Sourced(value=value, source="this test", mark="assumed")

    start = Start(value=None, source="this test", mark="assumed")
    return Fleet(about="made up", mtbi_h=each(mtbi), ages=each(ages), shape=each(shape), defective=start)


def setting(healthy: float, degraded: float, *, again: bool = False, **given: float) -> Setting:
    """Single nodes whose checks and incidents cost nothing. ``again``: an incident puts the next check a whole interval away."""
    given = {"hours": 40_000.0, "groups": 50, "job_nodes": 1, "replicas": 10, "restart_h": 0.0, "check_h": 0.0, **given}
    share = degraded / (healthy + degraded)
    return Setting(fleet(healthy + degraded), share, checkpoint_h=math.inf if again else 0.0, **given)  # type: ignore[arg-type]


def assert_simulated(outcome: Outcome, wanted: float) -> None:
    found = outcome.mtbi_h
    assert found is not None
    half = (found.high - found.low) / 2
    assert half < 0.05 * wanted
    assert abs(found.value - wanted) < 2 * half  # four standard errors and more


@pytest.mark.parametrize(("healthy", "degraded", "every", "found", "wanted"), CASES)
def test_mean_time_between_incidents(
    healthy: float, degraded: float, every: float, found: float, wanted: float
) -> None:
    node = Node(healthy, degraded)
    assert mtbi_h(node, every, found) == pytest.approx(wanted, rel=1e-4)
    own = setting(healthy, degraded, again=True, job_h=every, finds=found, warm_h=20 * every)
    assert_simulated(simulate(own, "full", [1]), wanted)
    same = setting(healthy, degraded, job_h=every, finds=found, warm_h=20 * every)
    assert_simulated(simulate(same, "full", [2]), together_mtbi_h(node, every, found))


def test_nodes_checked_together_have_the_closed_form_of_a_renewal_process() -> None:
    a, b, every = 1 / 500, 1 / 100, 168.0  # expected renewals of a sum of two exponential times, by hand
    renewals = a * b / (a + b) * every - a * b / (a + b) ** 2 * (1 - math.exp(-(a + b) * every))
    assert together_mtbi_h(Node(500, 100), every) == pytest.approx(every / renewals, rel=1e-9)
    assert together_mtbi_h(Node(500, 100), 1e5) == pytest.approx(600, rel=2e-3)
    assert together_mtbi_h(Node(500, 0), every) == 500


def test_defects_that_no_check_finds_bound_the_gain() -> None:
    node = Node(500, 100)
    for closed in (mtbi_h, together_mtbi_h):
        assert closed(node, 1e-3, visible=0.75) == pytest.approx(
            500 / 0.25 + 100, rel=1e-3
        )  # only a quarter ends in one
        assert closed(node, 24.0, 1.0, 0.9) < closed(node, 24.0, 0.9, 1.0)  # a later check does not find it either
        assert closed(node, 24.0, visible=0.0) == pytest.approx(600)


def test_without_checks_it_is_the_sum_and_so_it_is_with_checks_that_find_nothing() -> None:
    assert mtbi_h(Node(500, 100)) == mtbi_h(Node(500, 100), 24, 0.0) == 600
    assert mtbi_h(Node(500, 100), 1e7) == pytest.approx(600, rel=1e-3)
    assert_simulated(simulate(setting(500, 100), "none", [3]), 600)


@pytest.mark.parametrize("degraded", [0.0, 1e-9])
def test_a_node_whose_incidents_come_without_warning_gains_nothing(degraded: float) -> None:
    assert gain(Node(500, degraded), 24) == pytest.approx(1.0, abs=1e-9)
    assert gain(Node(500, 0.0), 24) == 1.0


def test_a_fleet_without_warning_gains_nothing_in_simulation_either() -> None:
    """The 95 % interval of the gain holds 1 for about 95 % of fleets: fewer than 33 of 40 would be 1 in 10,000."""
    holds = 0
    for seed in range(20):
        given = Setting(fleet(500), 0.0, groups=20, job_nodes=4, hours=1000, replicas=10)
        plain, full, periodic = (
            simulate(given, policy, [seed, n]) for n, policy in enumerate(("none", "full", "periodic"))
        )
        for outcome in (full, periodic):
            found = outcome.gain(plain)
            assert found is not None
            assert outcome.repaired.sum() == 0
            holds += found.low <= 1.0 <= found.high
    assert holds >= 33


def test_equal_rates_are_no_special_case() -> None:
    assert mtbi_h(Node(100, 100), 24) == pytest.approx(mtbi_h(Node(100, 100.001), 24), rel=1e-4)


def test_the_interval_for_a_gain() -> None:
    node = Node(500, 100)
    every = interval_for_gain(node, 22.61)
    assert every is not None
    assert gain(node, every) == pytest.approx(22.61, rel=1e-6)
    assert interval_for_gain(Node(500, 0.01), 22.61, found=0.5) is None


def test_all_time_is_accounted_for() -> None:
    given = Setting(fleet(300), 0.2, groups=5, job_nodes=4, hours=2000, replicas=4)
    for policy in POLICIES[:3]:
        outcome = simulate(given, policy, [1])
        other = outcome.total_h - outcome.useful_h - outcome.checking_h  # restarts, and work since the last checkpoint
        least = given.restart_h * outcome.incidents
        assert (other >= least - 1e-6).all()
        assert (other <= least + given.checkpoint_h * outcome.incidents + 1e-6).all()
    free = Setting(fleet(300), 0.2, groups=5, job_nodes=4, hours=2000, replicas=4, checkpoint_h=0.0, restart_h=0.0)
    plain = simulate(free, "none", [1])
    assert plain.useful_h == pytest.approx(plain.total_h)


def test_published_shares_are_those_that_simulated_defects_have() -> None:
    found = published().checks
    sets, below = defect_table()
    likely = np.diff(below, prepend=0.0)
    shares = [found.defective * likely[(sets >> bit & 1) == 1].sum() for bit in range(len(found.names))]
    assert shares == pytest.approx(list(found.shares.values()), abs=1e-6)
    assert math.fsum(found.shares.values()) == pytest.approx(0.1507)
    assert set(found.minutes_of) == set(found.shares)


def test_published_rates_are_what_their_sources_state() -> None:
    fleets = published().fleets
    assert fleets["rsc-1"].mtbi_h.value == pytest.approx(24_000 / 6.50, abs=0.1)
    assert fleets["rsc-2"].mtbi_h.value == pytest.approx(24_000 / 2.34, abs=0.1)
    assert fleets["llama-3"].mtbi_h.value == pytest.approx(54 * 24 * 2048 / 419, abs=0.1)
    anubis = fleets["anubis"]
    assert anubis.mtbi_h.value * 20**-anubis.ages.value == pytest.approx(151.7, abs=0.1)
    assert all(
        each.mark != "read" or "http" in each.source for one in fleets.values() for each in (one.mtbi_h, one.shape)
    )
    assert FILE.read_text().count("22.61") == 0  # a result, not a parameter


def test_what_an_operator_sees_has_the_law_of_the_fleet() -> None:
    given = Setting(
        fleet(400, shape=0.7, ages=0.5), 0.0, groups=100, job_nodes=4, hours=3000, replicas=1, restart_h=0.0
    )
    learned = hazard.learn(hazard.tabulate(observe(given, [5]).spells))
    assert learned.remembers
    assert learned.hazard.shape == pytest.approx(0.7, rel=0.05)
    power = learned.hazard.theta[2] / learned.hazard.scale[0] / learned.hazard.shape
    assert power == pytest.approx(0.5, rel=0.1)


def test_selected_checks_cost_less_than_all_and_gain_where_there_is_warning() -> None:
    given = Setting(fleet(600), 0.2, groups=16, job_nodes=16, hours=2000, replicas=4)
    chosen = learn_selector(given, observe(given, [1, 9]))
    assert chosen is not None
    assert chosen.steps[0].name == "ib-loopback"  # finds most, and is among the shortest
    plain, full, selected = (
        simulate(given, policy, [1, n], chosen) for n, policy in enumerate(("none", "full", "selected"))
    )
    assert 0 < selected.checking_h.sum() < 0.5 * full.checking_h.sum()
    assert selected.useful_h.sum() / selected.total_h.sum() > full.useful_h.sum() / full.total_h.sum()
    found = selected.gain(plain)
    assert found is not None
    assert found.low > 1.5


def test_no_warning_and_no_incident_leave_nothing_to_choose() -> None:
    given = Setting(fleet(600), 0.0, groups=4, job_nodes=4, hours=2000, replicas=1)
    assert learn_selector(given, observe(given, [1])) is None
    calm = Setting(fleet(1e9), 0.1, groups=4, job_nodes=4, hours=100, replicas=3)
    assert learn_selector(calm, observe(calm, [1])) is None
    none = simulate(calm, "none", [1])
    assert none.mtbi_h is None
    assert none.gain(none) is None
    policy: Policy = "selected"
    assert simulate(calm, policy, [1]).checking_h.sum() == 0


def test_the_command_states_the_rates_with_the_gain() -> None:
    words = ("preflight", "checks", "--healthy", "500h", "--degraded", "100h", "--every", "1d")
    first, second, third, fourth = mlhpc(*words).stdout.splitlines()
    assert (
        first
        == "healthy for 500 h, then degraded for 100 h, checked every 24 h, found with probability 1 (a model, not a measurement)"
    )
    assert second == "mean time between incidents: 600 h without checks, 4572 h with: 7.62 times"
    assert third.startswith("checked every: 6 h ")
    assert fourth == "gains need checks: 2 times every 130 h, 10 times every 17.9 h, 22.61 times every 7.6 h"
    data = json.loads(mlhpc(*words, "--format", "json").stdout)
    assert data["gain"] == pytest.approx(7.62, abs=0.001)
    assert data["every_h_for_gain"]["22.61"] == pytest.approx(7.60, abs=0.01)
    assert (
        mlhpc(*words, "--found", "0.5", "--degraded", "0h").stdout.splitlines()[-1]
        == "no interval between checks gains 2 times"
    )
    for wrong in ("24", "h", "-3h", "0h", "infh", "x", "nanh", "1e-9s", "1e7h"):
        done = mlhpc(*words[:-1], wrong)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_simulate_prints_parameters_with_sources_and_the_same_for_a_seed() -> None:
    words = (
        "preflight",
        "simulate",
        "--fleet",
        "rsc-1",
        "--jobs",
        "4",
        "--replicas",
        "4",
        "--degraded",
        "0",
        "--degraded",
        "0.1",
    )
    said = mlhpc(*words).stdout
    assert said == mlhpc(*words).stdout != mlhpc(*words, "--seed", "2").stdout
    assert (
        "  hours to a node's first incident 3692.3: arXiv 2410.21680: 6.50 failures per 1,000 node-days (derived)\n"
        in said
    )
    assert "  a job of 128 nodes every 28.8 h, but 7.9 h were measured" in said
    assert "  healthy for 3323 h, then degraded for 369.2 h (10%, assumed)" in said
    assert "no check gains anything, by the closed form 1.000 times" in said
    assert (
        "a job of 2048 nodes has one every 1.803 h"
        in mlhpc(*words[:4], "--jobs", "1", "--nodes", "2048", "--time", "1d").stdout
    )
    data = json.loads(mlhpc(*words, "--format", "json").stdout, parse_constant=pytest.fail)
    none, periodic = (data["cases"][1]["policies"][name] for name in ("none", "periodic"))
    assert none["closed_form_h"] == pytest.approx(3692.3)
    assert len(none["incidents"]) == 4
    assert periodic["gain"][1] < periodic["gain"][0] < periodic["gain"][2]
    assert data["cases"][1]["fleet"]["mtbi_h"]["mark"] == "derived"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("--fleet", "rsc1"), "rsc-1"),
        (("--job", "24"), "--job 24"),
        (("--degraded", "1"), "--degraded"),
        (("--nodes", "100000", "--jobs", "100"), "4,000,000"),
        (("--job", "1s"), "100,000 jobs"),
    ],
)
def test_simulate_refuses_what_it_cannot(wrong: tuple[str, ...], says: str) -> None:
    done = mlhpc("preflight", "simulate", *wrong)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
