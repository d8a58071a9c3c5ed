"""Spells, the hazard model on simulated fleets whose law is known, and the choice of checks on tables done by hand."""

from __future__ import annotations

import builtins
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mlhpc.plugins.fleet.select import (
    FALSE_ALARM_RATE,
    Checks,
    NodeInterval,
    build_interval_table,
    choose,
    choose_hazard,
    compute_break_even,
    fit,
    plan_check_order,
    read_node_intervals,
)
from mlhpc.suite.errors import InputError
from tests.fixtures.cli import mlhpc

CHECKS = msgspec.convert(
    {
        "minutes": {"gemm": 2, "stream": 3, "disk": 5, "idle": 1},
        "incidents": [
            {"found_by": ["gemm", "stream"], "count": 20},
            {"found_by": ["stream"], "count": 4},
            {"found_by": ["disk"], "count": 10},
            {"found_by": [], "count": 66},
        ],
    },
    Checks,
)


def simulated(seed: int, nodes: int, shape: float, power: float, hours: float = 1500.0) -> list[NodeInterval]:
    """Nodes whose times between incidents are Weibull, and shorter with every incident: (1 + incidents)^power times the hazard."""
    chance = np.random.default_rng(seed)
    found = []
    for number in range(nodes):
        now, incidents = 0.0, 0
        while now < hours:
            lasts = 500.0 * (chance.exponential() / (1 + incidents) ** power) ** (1 / shape)
            ended = now + lasts < hours
            found.append(
                NodeInterval(
                    node=f"n{number:03}",
                    hours=min(lasts, hours - now),
                    incidents=incidents,
                    ended="incident" if ended else "open",
                )
            )
            now, incidents = now + lasts, incidents + 1
    return found


def test_the_law_of_a_fleet_is_found_within_its_own_error() -> None:
    found, _ = fit(build_interval_table(simulated(1, 400, 0.7, 0.4)))
    errors = np.sqrt(np.diag(found.covariance))
    assert abs(math.log(found.shape / 0.7)) < 3 * errors[2]
    assert found.power == pytest.approx(0.4, abs=3 * 0.7 * errors[0])
    assert errors[2] < 0.02
    wanted = (24 / 500) ** 0.7  # of a node without incidents in its first day
    assert found.during(np.array([0.0]), 24, np.array([0.0]))[0] == pytest.approx(wanted, rel=0.1)


def test_the_fit_is_that_of_an_independent_likelihood() -> None:
    """An own likelihood with its Hessian, which lifelines replaced, gave these numbers for this history."""
    found, _ = fit(build_interval_table(simulated(1, 400, 0.7, 0.4)))
    assert found.shape == pytest.approx(0.709398, abs=1e-5)
    assert found.power == pytest.approx(0.407454, abs=1e-5)
    assert math.exp(found.parameters[1]) == pytest.approx(494.057, abs=0.01)
    assert math.sqrt(found.covariance[2, 2]) == pytest.approx(0.018149, abs=1e-5)


def test_throwing_censored_times_away_would_give_another_answer() -> None:
    table = build_interval_table(simulated(2, 200, 1.0, 0.0, hours=600.0))
    assert choose_hazard(table).mtbi_h == pytest.approx(500, rel=0.1)
    assert table["hours"][table["ended"]].mean() < 300


@pytest.mark.long
def test_a_fleet_without_memory_is_not_given_one() -> None:
    found = [choose_hazard(build_interval_table(simulated(seed, 30, 1.0, 0.0))) for seed in range(10)]
    assert all(each.p is not None and each.p >= FALSE_ALARM_RATE for each in found)
    assert {each.hazard.shape for each in found} == {1.0}


@pytest.mark.parametrize(("shape", "power"), [(1.6, 0.0), (0.6, 0.0), (1.0, 0.8)])
def test_a_fleet_with_memory_is_seen_to_have_one(shape: float, power: float) -> None:
    learned = choose_hazard(build_interval_table(simulated(3, 80, shape, power)))
    assert learned.p is not None
    assert learned.p < FALSE_ALARM_RATE
    assert learned.hazard.shape == pytest.approx(shape, rel=0.15)


def test_few_incidents_give_a_rate_and_its_interval_and_none_an_error() -> None:
    spells = [
        NodeInterval(node=f"n{n}", hours=100, incidents=0, ended="incident" if n < 4 else "open") for n in range(20)
    ]
    learned = choose_hazard(build_interval_table(spells))
    assert (learned.p, learned.hazard.shape, learned.mtbi_h) == (None, 1.0, 500)
    low, high = learned.hazard.interval(np.full(16, 100.0), 24, np.zeros(16))
    assert low < -math.expm1(-16 * 24 / 500) < high
    with pytest.raises(InputError, match="--mtbi"):
        choose_hazard(build_interval_table([spells[-1]]))


def test_nodes_without_earlier_incidents_are_fitted_without_that_covariate() -> None:
    spells = [
        NodeInterval(node=f"n{n:03}", hours=50 + n, incidents=0, ended="incident" if n % 5 == 0 else "open")
        for n in range(200)
    ]
    assert choose_hazard(build_interval_table(spells)).p is not None
    assert fit(build_interval_table(spells))[0].power == 0.0


def test_a_missing_lifelines_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without(name: str, *args: object, **more: object) -> object:
        if name.startswith("lifelines"):
            raise ImportError(name)
        return load(name, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'mlhpc\[fleet\]'"):
        choose_hazard(build_interval_table(simulated(3, 80, 1.6, 0.0)))


def test_defects_that_two_checks_find_count_once() -> None:
    steps = plan_check_order(CHECKS)
    assert [(step.name, step.alone, step.adds, step.together) for step in steps] == [
        ("gemm", 0.2, 0.2, 0.2),
        ("disk", 0.1, 0.1, pytest.approx(0.3)),
        ("stream", 0.24, 0.04, pytest.approx(0.34)),
    ]  # stream alone finds most, after gemm it adds least per minute; idle finds nothing and is left out
    low, high = steps[0].low, steps[0].high
    assert (low, high) == (
        pytest.approx(0.1367, abs=1e-3),
        pytest.approx(0.2772, abs=1e-3),
    )  # Clopper and Pearson, 20 of 100


def test_a_check_is_run_where_it_saves_more_than_it_costs() -> None:
    steps = plan_check_order(CHECKS)
    expected = np.array([0.2, 0.002, 0.0])
    plan = choose(expected, steps, lost_h=1.0)
    # gemm pays from 2/60 / (0.2 * 1 h * 3 nodes) = 0.0556 expected incidents, disk from 0.278, stream from 0.417
    assert [compute_break_even(step, 1.0, 3) for step in steps] == pytest.approx([1 / 18, 5 / 18, 5 / 12])
    assert plan.checks == (1, 0, 0)
    assert plan.cost_h == pytest.approx(2 / 60)
    assert plan.saved_h == pytest.approx(0.2 * 0.2 * 3)
    assert (plan.before, plan.after) == (pytest.approx(0.202), pytest.approx(0.162))
    assert plan.risk[0] == pytest.approx(1 - math.exp(-0.202))


def test_nothing_is_run_where_nothing_pays_and_the_same_everywhere_where_all_wait() -> None:
    steps = plan_check_order(CHECKS)
    assert choose(np.full(3, 1e-4), steps, lost_h=1.0).checks == (0, 0, 0)
    assert choose(np.array([0.5, 0.0, 0.0]), steps, lost_h=1.0, waiting=True).checks == (1, 1, 1)
    assert choose(np.array([0.1, 0.0, 0.0]), steps, lost_h=1.0, waiting=True).checks == (0, 0, 0)
    assert choose(np.array([0.5]), (), lost_h=1.0).cost_h == 0


def test_the_plan_is_what_trying_all_plans_finds() -> None:
    """Greedy is best here because single steps of one node only get worse: compared with all plans of two nodes and three steps."""
    steps = plan_check_order(CHECKS)
    for first, second in ((0.3, 0.1), (0.05, 0.6), (0.01, 0.02)):
        expected = np.array([first, second])
        plan = choose(expected, steps, lost_h=0.7)
        worth = {
            (i, j): sum(
                each * sum(s.adds for s in steps[:k]) * 0.7 * 2 - sum(s.minutes for s in steps[:k]) / 60
                for each, k in ((first, i), (second, j))
            )
            for i in range(4)
            for j in range(4)
        }
        assert plan.checks == max(worth, key=lambda key: worth[key])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", ":1: column node, hours, incidents, ended is missing"),
        ("node;hours\na;1\n", "the head is 'node;hours'; expected the columns node, hours, incidents, ended"),
        ("node,hours\na,1\n", ":1: column incidents, ended is missing"),
        ("node,hours,incidents,ended\na,1,0,open\nb,-1,0,open\n", ":3: "),
        ("node,hours,incidents,ended\na,1,0,open\na,2,0,open\n", ":3: node 'a' is in the job twice"),
        ("node,hours,incidents,ended\na,1,0,incident\n", "no row has ended = open"),
        ("node,hours,incidents,ended\na,0,0,incident\n", ":2: field `hours` is 0"),
        ("node,hours,incidents,ended\na,1,0\n", ":2: the row has more or fewer cells"),
        ("node,hours,incidents,ended,colour\na,1,0,open,red\n", ":2: "),
        ("node,hours,incidents,ended\na,1,0,later\n", "ended"),
        ("node,hours,incidents,ended\na,nan,0,open\n", "hours"),
    ],
)
def test_a_wrong_file_of_spells_is_one_line(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "spells"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_node_intervals([path])
    assert str(error.value).startswith(f"{path}:")
    assert wrong in str(error.value)
    assert "\n" not in str(error.value)


def test_spells_of_a_spreadsheet_are_read(tmp_path: Path) -> None:
    path = tmp_path / "spells.csv"
    path.write_bytes("\ufeffnode; hours; incidents; ended\r\na ; 1 ; 0 ; open\r\n".encode())
    assert read_node_intervals([path]) == [NodeInterval(node="a", hours=1.0, incidents=0, ended="open")]


CHECKS_TEXT = """minutes: {gemm: 2, stream: 3}
incidents:
  - {found_by: [gemm, stream], count: 3}
  - {found_by: []}
"""


def files(root: Path, ages: tuple[float, ...]) -> tuple[str, ...]:
    spells = [NodeInterval(node=f"n{n}", hours=age, incidents=0, ended="open") for n, age in enumerate(ages)]
    rows = [f"{spell.node},{spell.hours},{spell.incidents},{spell.ended}" for spell in spells]
    (root / "spells.csv").write_text("\n".join(["node,hours,incidents,ended", *rows]) + "\n")
    (root / "checks.yaml").write_text(CHECKS_TEXT)
    words = ("preflight", "select", "--nodes", root / "spells.csv", "--checks", root / "checks.yaml")
    return tuple(map(str, words))


def test_the_command_says_what_to_run_where_and_when_nothing_is_best(tmp_path: Path) -> None:
    words = (*files(tmp_path, (1.0, 2.0)), "--job", "24h", "--mtbi", "500h")
    said = mlhpc(*words).stdout.splitlines()
    assert said[0] == "an incident of a node every 500h, as stated"
    assert said[1] == "P(incident) of the job, 24 h on 2 nodes: 0.092"
    assert said[3].startswith(
        "  gemm: 2 min, finds 75.0% of 4 incidents, 75.0% more than those above, 75.0% [24.9%, 98.7%] together;"
    )
    assert said[4] == "  add nothing to those: stream"
    assert said[5] == "run gemm on 2 nodes: n0,n1"
    assert said[6] == "then P(incident) is 0.024; checks take 0.0667 node hours and save 1.73 on average"
    assert (
        mlhpc(*words, "--lost", "1min").stdout.splitlines()[-1] == "run nothing: every check costs more than it saves"
    )
    data = json.loads(mlhpc(*words, "--waiting", "--format", "json").stdout)
    assert data["nodes"]["n1"] == {"risk": pytest.approx(1 - math.exp(-24 / 500)), "run": ["gemm"]}
    done = mlhpc(*words[:-2])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--mtbi" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("gemm: 2", "gemm: 0", "checks.yaml:"),
        ("[gemm, stream]", "[gem]", "checks.yaml:"),
        ("count: 3", "count: 0", "checks.yaml:"),
        ("minutes:", "minute:", "checks.yaml:"),
    ],
)
def test_a_wrong_table_of_checks_is_one_line(tmp_path: Path, old: str, new: str, wrong: str) -> None:
    words = files(tmp_path, (1.0,))
    path = tmp_path / "checks.yaml"
    path.write_text(path.read_text().replace(old, new))
    done = mlhpc(*words, "--job", "24h", "--mtbi", "500h")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert wrong in done.stderr
