"""Spells, the hazard model on simulated fleets whose law is known, and the choice of checks on tables done by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from analysis.fleet import hazard
from analysis.fleet.selector import Checks, Step, order_checks, pays_from, select
from analysis.fleet.spells import Spell, read_spells, render
from suite.documents import convert
from suite.errors import InputError
from tests.fixtures.cli import mlhpc

CHECKS = convert(
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


def simulated(seed: int, nodes: int, shape: float, power: float, hours: float = 1500.0) -> list[Spell]:
    """Nodes whose times between incidents are Weibull, and shorter with every incident: (1 + incidents)^power times the hazard."""
    chance = np.random.default_rng(seed)
    found = []
    for number in range(nodes):
        now, incidents = 0.0, 0
        while now < hours:
            lasts = 500.0 * (chance.exponential() / (1 + incidents) ** power) ** (1 / shape)
            ended = now + lasts < hours
            found.append(
                Spell(
                    node=f"n{number:03}",
                    hours=min(lasts, hours - now),
                    incidents=incidents,
                    ended="incident" if ended else "open",
                )
            )
            now, incidents = now + lasts, incidents + 1
    return found


def test_the_law_of_a_fleet_is_found_within_its_own_error() -> None:
    table = hazard.tabulate(simulated(1, 400, 0.7, 0.4))
    found = hazard.fit(table)
    errors = np.sqrt(np.diag(found.covariance))
    assert abs(found.theta[0] - math.log(0.7)) < 3 * errors[0]
    assert abs(found.theta[2] / found.scale[0] - 0.4) < 3 * errors[2] / found.scale[0]
    assert errors[0] < 0.02
    wanted = (24 / 500) ** 0.7  # of a node without incidents in its first day
    assert found.during(np.array([0.0]), 24, np.array([[0.0]]))[0] == pytest.approx(wanted, rel=0.1)


def test_throwing_censored_times_away_would_give_another_answer() -> None:
    table = hazard.tabulate(simulated(2, 200, 1.0, 0.0, hours=600.0))
    learned = hazard.learn(table)
    assert learned.hazard.unit_h == pytest.approx(500, rel=0.1)
    assert table.hours[table.ended].mean() < 300


def test_a_fleet_without_memory_is_given_one_no_more_often_than_promised() -> None:
    fleets = [hazard.learn(hazard.tabulate(simulated(seed, 30, 1.0, 0.0))) for seed in range(60)]
    assert all(each.better is not None for each in fleets)
    assert (
        sum(each.remembers for each in fleets) <= 6
    )  # 60 of 5 %: more than 6 in 1 of 25 trials if the rate were that high


@pytest.mark.parametrize(("shape", "power"), [(1.6, 0.0), (0.6, 0.0), (1.0, 0.8)])
def test_a_fleet_with_memory_is_seen_to_have_one(shape: float, power: float) -> None:
    learned = hazard.learn(hazard.tabulate(simulated(3, 80, shape, power)))
    assert learned.remembers
    assert learned.better is not None
    assert learned.better > 0.0
    assert learned.hazard.shape == pytest.approx(shape, rel=0.15)


def test_nodes_that_were_slow_have_more_incidents() -> None:
    chance = np.random.default_rng(4)
    spells = []
    for number in range(300):
        slower = float(chance.uniform(0, 0.1))
        lasts = float(chance.exponential(500 * math.exp(-30 * slower)))
        ended = "incident" if lasts < 800 else "open"
        spells.append(Spell(node=f"n{number}", hours=min(lasts, 800), incidents=0, ended=ended, slower=slower))
    learned = hazard.learn(hazard.tabulate(spells))
    assert learned.hazard.names == (hazard.SLOWER,)  # all have no earlier incident: that cannot tell anything
    assert learned.hazard.theta[2] / learned.hazard.scale[0] == pytest.approx(30, rel=0.25)
    assert hazard.tabulate([*spells, Spell(node="x", hours=1, incidents=0, ended="open")]).names == ()


def test_few_incidents_give_a_rate_and_its_interval_and_none_an_error() -> None:
    spells = [Spell(node=f"n{n}", hours=100, incidents=0, ended="incident" if n < 4 else "open") for n in range(20)]
    table = hazard.tabulate(spells)
    learned = hazard.learn(table)
    assert (learned.better, learned.remembers, learned.hazard.unit_h) == (None, False, 500)
    ages = table.hours[~table.ended]
    low, high = learned.hazard.interval(ages, 24, table.x[~table.ended])
    assert low < -math.expm1(-16 * 24 / 500) < high
    with pytest.raises(InputError, match="--mtbi"):
        hazard.learn(hazard.tabulate([spells[-1]]))


def test_all_incidents_on_every_fifth_node_are_still_in_every_fold() -> None:
    spells = [
        Spell(node=f"n{n:03}", hours=50 + n, incidents=0, ended="incident" if n % 5 == 0 else "open")
        for n in range(200)
    ]
    assert hazard.learn(hazard.tabulate(spells)).better is not None


def test_defects_that_two_checks_find_count_once() -> None:
    steps = order_checks(CHECKS)
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
    steps = order_checks(CHECKS)
    expected = np.array([0.2, 0.002, 0.0])
    plan = select(expected, steps, lost_h=1.0)
    # gemm pays from 2/60 / (0.2 * 1 h * 3 nodes) = 0.0556 expected incidents, disk from 0.278, stream from 0.417
    assert [pays_from(step, 1.0, 3) for step in steps] == pytest.approx([1 / 18, 5 / 18, 5 / 12])
    assert plan.checks == (1, 0, 0)
    assert plan.cost_h == pytest.approx(2 / 60)
    assert plan.saved_h == pytest.approx(0.2 * 0.2 * 3)
    assert (plan.before, plan.after) == (pytest.approx(0.202), pytest.approx(0.162))
    assert plan.risk[0] == pytest.approx(1 - math.exp(-0.202))


def test_nothing_is_run_where_nothing_pays_and_the_same_everywhere_where_all_wait() -> None:
    steps = order_checks(CHECKS)
    assert select(np.full(3, 1e-4), steps, lost_h=1.0).checks == (0, 0, 0)
    assert select(np.array([0.5, 0.0, 0.0]), steps, lost_h=1.0, waiting=True).checks == (1, 1, 1)
    assert select(np.array([0.1, 0.0, 0.0]), steps, lost_h=1.0, waiting=True).checks == (0, 0, 0)
    assert select(np.array([0.5]), (), lost_h=1.0).cost_h == 0


def test_a_risk_asked_for_is_met_with_the_fewest_checks_or_said_to_be_missed() -> None:
    steps = order_checks(CHECKS)
    expected = np.array([0.2, 0.1])
    plan = select(expected, steps, lost_h=1e-6, risk=0.24)  # of 0.259: one check of the worse node does it
    assert (plan.checks, plan.met) == ((1, 0), True)
    plan = select(expected, steps, lost_h=1e-6, risk=0.01)
    assert (plan.checks, plan.met) == ((3, 3), False)
    assert plan.after == pytest.approx(0.3 * 0.66)
    assert select(expected, steps, lost_h=100.0, risk=0.5).checks == (0, 0)


def test_the_plan_is_what_trying_all_plans_finds() -> None:
    """Greedy is best here because single steps of one node only get worse: compared with all plans of two nodes and three steps."""
    steps = order_checks(CHECKS)
    for first, second in ((0.3, 0.1), (0.05, 0.6), (0.01, 0.02)):
        expected = np.array([first, second])
        plan = select(expected, steps, lost_h=0.7)
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
        ("", "no spell"),
        ("node,hours\na,1\n", ":1: no column incidents, ended"),
        ("node,hours,incidents,ended\na,1,0,open\nb,-1,0,open\n", ":3: hours = '-1'"),
        ("node,hours,incidents,ended\na,1,0,open\na,2,0,open\n", ":3: node 'a' has an open spell"),
        ("node,hours,incidents,ended\na,1,0,incident\n", "no spell is open"),
        ("node,hours,incidents,ended\na,0,0,incident\n", ":2: hours = 0"),
        ("node,hours,incidents,ended\na,1,0\n", ":2: not as many cells"),
        ("node,hours,incidents,ended,colour\na,1,0,open,red\n", ":2: colour = 'red'"),
        ('{"node": "a", "hours": 1, "incidents": 0, "ended": "later"}\n', ":1: ended = 'later'"),
        ('{"node": "a", "hours": 1, "incidents": 0}\n', ":1: ended = "),
        ('{"node": "a"', ":1: the line = "),
        ('{"node": "a", "hours": NaN, "incidents": 0, "ended": "open"}', ":1: hours = "),
    ],
)
def test_a_wrong_file_of_spells_is_one_line(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "spells"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_spells([path])
    assert str(error.value).startswith(f"{path}:")
    assert wrong in str(error.value)
    assert "\n" not in str(error.value)


def test_csv_and_json_lines_say_the_same(tmp_path: Path) -> None:
    spells = [
        Spell(node="a", hours=12.5, incidents=2, ended="incident", slower=0.03),
        Spell(node="a", hours=3, incidents=3, ended="open"),
    ]
    lines, cells = tmp_path / "a.jsonl", tmp_path / "a.csv"
    lines.write_text(render(spells))
    cells.write_text("node,hours,incidents,ended,slower\r\na,12.5,2,incident,0.03\r\na,3,3,open,\r\n")
    assert read_spells([lines]) == read_spells([cells]) == spells


CHECKS_TEXT = """minutes: {gemm: 2, stream: 3}
incidents:
  - {found_by: [gemm, stream], count: 3}
  - {found_by: []}
"""


def files(root: Path, ages: tuple[float, ...]) -> tuple[str, ...]:
    spells = [Spell(node=f"n{n}", hours=age, incidents=0, ended="open") for n, age in enumerate(ages)]
    (root / "spells.jsonl").write_text(render(spells))
    (root / "checks.yaml").write_text(CHECKS_TEXT)
    words = ("preflight", "select", "--nodes", root / "spells.jsonl", "--checks", root / "checks.yaml")
    return tuple(map(str, words))


def test_the_command_says_what_to_run_where_and_when_nothing_is_best(tmp_path: Path) -> None:
    words = (*files(tmp_path, (1.0, 2.0)), "--job", "24h", "--mtbi", "500h")
    said = mlhpc(*words).stdout.splitlines()
    assert said[0] == "an incident of a node every 500 h, as stated"
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
    assert mlhpc(*words, "--risk", "0.2").stdout.splitlines()[-1] == "run nothing: the risk is no more than 0.2"
    assert "leave more than the 0.001" in mlhpc(*words, "--risk", "0.001").stdout.splitlines()[-1]
    data = json.loads(mlhpc(*words, "--waiting", "--format", "json").stdout)
    assert data["nodes"]["n1"] == {"risk": pytest.approx(1 - math.exp(-24 / 500)), "run": ["gemm"]}
    done = mlhpc(*words[:-2])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--mtbi" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("gemm: 2", "gemm: 0", "checks.yaml:1: minutes.gemm = 0"),
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


def test_steps_are_plain_numbers() -> None:
    assert all(type(value) is float for step in order_checks(CHECKS) for value in (step.low, step.high, step.adds))
    assert isinstance(order_checks(CHECKS)[0], Step)
