"""Simulated fleets beside the closed form of a two-stage node, and against what their sources publish."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import linalg

from mlhpc.plugins.fleet.simulate import (
    POLICIES,
    Estimate,
    Fleet,
    InitialShare,
    Outcome,
    Setting,
    SourcedValue,
    fit_selector,
    read_fleets,
    run_simulation,
)
from tests.fixtures.cli import mlhpc


def closed_form_h(healthy: float, degraded: float, every: float) -> float:
    """Mean hours between incidents of a node that is checked at fixed times, whenever it had its last incident.

    It is healthy for a mean time, then degraded for a mean time, and then has an incident; a check finds it if it is degraded.
    """
    a, b = 1.0 / healthy, 1.0 / degraded
    rates = np.array([[-a, a], [b, -b]])
    check = np.array([[1.0, 0.0], [1.0, 0.0]])
    # (state, hours spent in each state) over an interval
    both = linalg.expm(np.block([[rates * every, np.eye(2) * every], [np.zeros((2, 4))]]))
    step, hours = both[:2, :2] @ check, both[:2, 2:]
    start = np.linalg.lstsq(np.vstack([(step - np.eye(2)).T, np.ones(2)]), [0.0, 0.0, 1.0], rcond=None)[0]
    return float(every / (b * (start @ hours)[1]))


def fleet(mtbi: float, shape: float = 1.0, ages: float = 0.0) -> Fleet:
    def each(value: float) -> SourcedValue:
        return SourcedValue(value, "this test", "assumed")

    return Fleet("made up", each(mtbi), each(ages), each(shape), InitialShare(None, "this test", "assumed"))


def setting(healthy: float, degraded: float, **given: float) -> Setting:
    """Single nodes whose checks and incidents cost nothing."""
    free = {"checkpoint_h": 0.0, "restart_h": 0.0, "check_h": 0.0}
    size = {"hours": 40_000.0, "groups": 50, "job_nodes": 1, "replicas": 10}
    share = degraded / (healthy + degraded)
    return Setting(fleet(healthy + degraded), share, **{**size, **free, **given})  # type: ignore[arg-type]


def assert_simulated(outcome: Outcome, wanted: float) -> None:
    found = outcome.mtbi_h
    assert found is not None
    half = (found.high - found.low) / 2
    assert half < 0.05 * wanted
    assert abs(found.value - wanted) < 2 * half  # four standard errors and more


@pytest.mark.parametrize(
    ("healthy", "degraded", "every"),
    [(500, 100, 24), (500, 100, 168), pytest.param(500, 24, 24, marks=pytest.mark.long)],
)
def test_mean_time_between_incidents(healthy: float, degraded: float, every: float) -> None:
    wanted = closed_form_h(healthy, degraded, every)
    assert_simulated(run_simulation(setting(healthy, degraded, job_h=every), "full", [2]), wanted)


def test_the_closed_form_is_that_of_a_renewal_process() -> None:
    a, b, every = 1 / 500, 1 / 100, 168.0  # expected renewals of a sum of two exponential times, by hand
    renewals = a * b / (a + b) * every - a * b / (a + b) ** 2 * (1 - math.exp(-(a + b) * every))
    assert closed_form_h(500, 100, every) == pytest.approx(every / renewals, rel=1e-9)


def test_without_checks_it_is_the_sum() -> None:
    assert_simulated(run_simulation(setting(500, 100), "none", [3]), 600)


def test_a_fleet_without_warning_gains_nothing() -> None:
    """The 95 % intervals of two equal rates hardly ever exclude each other."""
    apart = 0
    for seed in range(20):
        given = Setting(fleet(500), 0.0, groups=20, job_nodes=4, hours=1000, replicas=10)
        plain, full = run_simulation(given, "none", [seed, 0]), run_simulation(given, "full", [seed, 1])
        assert full.repaired.sum() == 0
        one, other = plain.mtbi_h, full.mtbi_h
        assert one is not None
        assert other is not None
        apart += one.high < other.low or other.high < one.low
    assert apart <= 1


def test_all_time_is_accounted_for() -> None:
    given = Setting(fleet(300), 0.2, groups=5, job_nodes=4, hours=2000, replicas=4)
    for policy in POLICIES[:3]:
        outcome = run_simulation(given, policy, [1])
        other = outcome.total_h - outcome.useful_h - outcome.checking_h  # restarts, and work since the last checkpoint
        least = given.restart_h * outcome.incidents
        assert (other >= least - 1e-6).all()
        assert (other <= least + given.checkpoint_h * outcome.incidents + 1e-6).all()
    free = Setting(fleet(300), 0.2, groups=5, job_nodes=4, hours=2000, replicas=4, checkpoint_h=0.0, restart_h=0.0)
    plain = run_simulation(free, "none", [1])
    assert plain.useful_h == pytest.approx(plain.total_h)


def test_published_shares_are_those_that_simulated_defects_have() -> None:
    found = read_fleets().checks
    sets, below = found.defects()
    likely = np.diff(below, prepend=0.0)
    assert (found.defective * likely @ sets).tolist() == pytest.approx(list(found.shares.values()), abs=1e-6)
    assert math.fsum(found.shares.values()) == pytest.approx(0.1507)
    assert set(found.minutes_of) == set(found.shares)


def test_published_rates_are_what_their_sources_state() -> None:
    fleets = read_fleets().fleets
    assert fleets["rsc-1"].mtbi_h.value == pytest.approx(24_000 / 6.50, abs=0.1)
    assert fleets["rsc-2"].mtbi_h.value == pytest.approx(24_000 / 2.34, abs=0.1)
    assert fleets["llama-3"].mtbi_h.value == pytest.approx(54 * 24 * 2048 / 419, abs=0.1)
    anubis = fleets["anubis"]
    assert anubis.mtbi_h.value * 20**-anubis.ages.value == pytest.approx(151.7, abs=0.1)
    assert all(
        each.mark != "read" or "http" in each.source for one in fleets.values() for each in (one.mtbi_h, one.shape)
    )


def test_what_an_operator_sees_has_the_law_of_the_fleet() -> None:
    given = Setting(fleet(400, shape=0.7, ages=0.5), 0.002, groups=100, job_nodes=4, hours=3000, replicas=1)
    chosen = fit_selector(given, [5])
    assert chosen is not None
    assert chosen.hazard.shape == pytest.approx(0.7, rel=0.05)
    assert chosen.hazard.power / chosen.hazard.shape == pytest.approx(0.5, rel=0.1)


def test_selected_checks_cost_less_than_all_and_gain_where_there_is_warning() -> None:
    given = Setting(fleet(600), 0.2, groups=16, job_nodes=16, hours=2000, replicas=4)
    chosen = fit_selector(given, [1, 9])
    assert chosen is not None
    assert chosen.steps[0].name == "ib-loopback"  # finds most, and is among the shortest
    plain, full, selected = (
        run_simulation(given, policy, [1, n], chosen) for n, policy in enumerate(("none", "full", "selected"))
    )
    assert 0 < selected.checking_h.sum() < 0.5 * full.checking_h.sum()
    assert selected.useful_h.sum() / selected.total_h.sum() > full.useful_h.sum() / full.total_h.sum()
    one, other = plain.mtbi_h, selected.mtbi_h
    assert isinstance(one, Estimate)
    assert isinstance(other, Estimate)
    assert other.low > 1.5 * one.high


def test_no_warning_and_no_incident_leave_nothing_to_choose() -> None:
    given = Setting(fleet(600), 0.0, groups=4, job_nodes=4, hours=2000, replicas=1)
    assert fit_selector(given, [1]) is None
    calm = Setting(fleet(1e9), 0.1, groups=4, job_nodes=4, hours=100, replicas=3)
    assert fit_selector(calm, [1]) is None
    assert run_simulation(calm, "none", [1]).mtbi_h is None
    assert run_simulation(calm, "selected", [1]).checking_h.sum() == 0


@pytest.mark.long
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
        "10%",
    )
    said = mlhpc(*words).stdout
    assert said == mlhpc(*words).stdout != mlhpc(*words, "--seed", "2").stdout
    source = "arXiv 2410.21680: 6.50 failures per 1,000 node-days (derived)"
    assert f"  hours to a node's first incident 3692.3: {source}\n" in said
    assert "28.8 h by this rate, but 7.9 h were measured" in said
    assert (
        "rsc-1: Meta's RSC-1, 11 months of jobs; nodes degraded for 10% of the time between incidents (assumed)" in said
    )
    assert "no check would have found any incident's node" in said
    data = json.loads(mlhpc(*words, "--format", "json").stdout, parse_constant=pytest.fail)
    none, full = (data["cases"][1]["policies"][name] for name in ("none", "full"))
    assert none["mtbi_h"][1] < 3692.3 < none["mtbi_h"][2]
    assert len(none["incidents"]) == 4
    assert full["checking"][0] > 0
    assert data["cases"][1]["fleet"]["mtbi_h"]["mark"] == "derived"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("--fleet", "rsc1"), "rsc-1"),
        (("--job", "24"), "--job 24"),
        (("--degraded", "91"), "--degraded"),
        (("--nodes", "100000", "--jobs", "100"), "4,000,000"),
        (("--job", "1s"), "100,000 jobs"),
    ],
)
def test_simulate_refuses_what_it_cannot(wrong: tuple[str, ...], says: str) -> None:
    done = mlhpc("preflight", "simulate", *wrong)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
