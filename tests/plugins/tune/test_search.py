"""The search on synthetic tables: it finds the best, says when nothing is better, and goes on after it was killed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.tune_tables import Table, make_search, make_table, search_by_proxy, shuffle
from mlhpc.plugins.tune.job import DEFAULT, TUNED
from mlhpc.plugins.tune.search import (
    Decision,
    History,
    Prediction,
    Proxy,
    Search,
    SearchRules,
    choose_expected_improvement,
    encode,
)
from mlhpc.plugins.tune.space import Point, Space, TunedTrial, key_of_point
from mlhpc.suite.card import Tunable
from mlhpc.suite.errors import InputError
from mlhpc.suite.statistics import Outcome

TABLE = make_table(1)


def measured(point: Point, ratio: float | None, why: str = "") -> TunedTrial:
    return TunedTrial(point=dict(point), ratio=ratio, seconds=1.0, why=why)


class Machine:
    """A machine that takes what the table says, with noise. It is killed before measurement ``kill``."""

    def __init__(self, table: Table, search: Search, noise: float = 0.02, drift: float = 0.0, kill: int = -1) -> None:
        self.table, self.search, self.noise, self.drift, self.kill, self.count = table, search, noise, drift, kill, 0

    def time(self, place: int) -> float:
        self.count += 1
        if self.count == self.kill:
            raise KeyboardInterrupt
        drawn = random.Random(f"{place} {len(self.search.history.trials())} {len(self.search.history.pairs())}")
        return math.exp(self.table.truth[place] + drawn.gauss(0, self.noise)) * (1 + self.drift * self.count / 60)

    def measure(self, point: Point) -> TunedTrial:
        base = self.time(self.search.default)
        return measured(point, self.time(self.search.places[key_of_point(point)]) / base)

    def compare(self, point: Point, order: Sequence[str]) -> Mapping[str, float]:
        places = {TUNED: self.search.places[key_of_point(point)], DEFAULT: self.search.default}
        return {**{name: self.time(places[name]) for name in order}, "took": 1.0}


def run_whole(search: Search, machine: Machine) -> Decision:
    list(search.run(machine.measure))
    return search.decide(machine.compare)


def make(table: Table, path: Path | None = None, most: int = 28, **rules: float) -> Search:
    proxy = Proxy(table.space, table.points, table.prior)
    chosen = SearchRules(rules.get("budget_s", math.inf), most, 16, 0.05, 0)
    return Search(History(path, table.space, "request"), table.points, table.default, proxy, chosen)


@pytest.mark.long
def test_a_tenth_of_the_evaluations_finds_a_point_within_three_percent_of_the_best() -> None:
    best = min(TABLE.truth)
    found = [search_by_proxy(shuffle(TABLE, seed), TABLE.tenth, seed, 2)[-1] for seed in range(3)]
    assert sum(value <= best + math.log(1.03) for value in found) >= 2, [value - best for value in found]


def test_the_first_point_is_the_one_of_the_shortest_closed_form() -> None:
    search = make(TABLE, most=1)
    assert TABLE.prior[search.propose() or 0] == min(TABLE.prior)


@pytest.mark.parametrize("drift", [0.0, 0.2])
def test_if_all_are_equal_nothing_is_better(drift: float) -> None:
    flat = make_table(5, flat=True)
    search = make_search(flat, 6, 0)
    machine = Machine(flat, search, noise=0.05, drift=drift)
    assert len(list(search.run(machine.measure))) == 6
    assert search.decide(machine.compare).outcome != Outcome.FASTER


def test_a_better_one_is_found_under_drift_and_its_interval_is_of_fresh_pairs() -> None:
    search = make(TABLE, most=12)
    machine = Machine(TABLE, search, noise=0.03, drift=0.2)
    list(search.run(machine.measure))
    answer = search.decide(machine.compare)
    truth = math.exp(TABLE.truth[search.places[key_of_point(answer.point)]])
    assert (answer.outcome, answer.pairs) == (Outcome.FASTER, 7)
    assert answer.ratio is not None
    assert (answer.ratio.low or 9.0) < truth < (answer.ratio.high or 0.0) < 1.0


@pytest.mark.parametrize(
    "kill", [5, pytest.param(14, marks=pytest.mark.long), pytest.param(19, marks=pytest.mark.long), 27]
)
def test_a_killed_search_comes_to_the_same_answer(kill: int, tmp_path: Path) -> None:
    """Killed in the first, a middle and the last trial's measurement, and in the race."""
    whole = make(TABLE, most=8)
    expected = run_whole(whole, Machine(TABLE, whole))
    killed = make(TABLE, tmp_path / "history.log", most=8)
    machine = Machine(TABLE, killed, kill=kill)
    with pytest.raises(KeyboardInterrupt):
        run_whole(killed, machine)
    resumed = make(TABLE, tmp_path / "history.log", most=8)
    assert run_whole(resumed, Machine(TABLE, resumed)) == expected
    assert resumed.history.trials() == whole.history.trials()
    assert resumed.history.pairs() == whole.history.pairs()


def test_another_request_does_not_go_on(tmp_path: Path) -> None:
    History(tmp_path / "history.log", TABLE.space, "one")
    with pytest.raises(InputError, match=r"history.log: was begun with other settings"):
        History(tmp_path / "history.log", TABLE.space, "another")


def test_what_cannot_run_keeps_its_reason_and_the_search_goes_on() -> None:
    search = make(TABLE, most=10)
    machine = Machine(TABLE, search)

    def measure(point: Point) -> TunedTrial:
        return measured(point, None, "out of memory") if point["ranks"] == 8 else machine.measure(point)

    trials = list(search.run(measure))
    failed = [trial for trial in trials if trial.ratio is None]
    assert len(trials) == 10
    assert failed
    assert all(trial.why == "out of memory" and trial.point["ranks"] == 8 for trial in failed)
    assert search.pool[search.choose_best()]["ranks"] != 8
    assert search.history.trials() == trials


def test_a_pair_that_fails_is_lost_by_the_tuned_one() -> None:
    search = make(TABLE, most=3)
    list(search.run(Machine(TABLE, search).measure))
    assert search.choose_best() != search.default
    answer = search.decide(lambda point, order: {TUNED: math.inf, DEFAULT: 1.0, "took": 1.0})
    assert (answer.outcome, answer.pairs) == (Outcome.SLOWER, 7)
    assert answer.ratio is not None
    assert answer.ratio.value is None


def test_if_the_default_is_the_best_there_is_no_race() -> None:
    search = make(TABLE, most=3)
    list(search.run(lambda point: measured(point, 2.0)))
    answer = search.decide(lambda point, order: pytest.fail("no race"))
    assert (answer.outcome, answer.point) == (Outcome.EQUIVALENT, TABLE.points[TABLE.default])


def test_the_budget_leaves_time_for_the_race() -> None:
    search = make(TABLE, budget_s=14.5)
    assert len(list(search.run(Machine(TABLE, search).measure))) == 7  # each takes 1 s; 7 pairs and one more are left


def test_unmeasured_values_are_predicted_from_the_closed_form_and_from_other_points() -> None:
    space = Space({"a": Tunable(values=(1, 2, 4, 8)), "b": Tunable(values=("x", "y", "z"))})
    points = list(space.points())
    truth = [-math.log(float(str(point["a"]))) + {"x": 0.0, "y": 0.3, "z": -0.4}[str(point["b"])] for point in points]
    proxy = Proxy(space, points, [-math.log(float(str(point["a"]))) for point in points])
    measured = {place: [truth[place]] for place, point in enumerate(points) if point["a"] != 8}
    mean = proxy.predict(measured).mean
    assert np.abs(mean - truth).max() < 0.02
    assert list(proxy.predict({}).mean) == list(proxy.prior)


def test_an_inactive_tunable_has_zeros_and_a_single_value_no_column() -> None:
    space = Space(
        {"a": Tunable(values=(1, 4)), "b": Tunable(values=(True, False), when={"a": (4,)}), "c": Tunable(values=(9,))}
    )
    rows = encode(space, [{"a": 1, "c": 9}, {"a": 4, "b": False, "c": 9}])
    assert rows.tolist() == [[0, 1, 0, -1, 0, 0], [0, 0, 1, 1, 0, 1]]


def test_the_largest_improvement_is_of_the_lowest_mean_or_of_the_least_known() -> None:
    mean, sure, unsure = np.array([0.0, -0.1, 0.1]), np.array([0.01] * 3), np.array([0.01, 0.01, 1.0])
    assert choose_expected_improvement(Prediction(mean, sure, 0.01), 0.0, [0, 1, 2])[0] == 1
    assert choose_expected_improvement(Prediction(mean, unsure, 0.01), 0.0, [0, 1, 2])[0] == 2
    assert choose_expected_improvement(Prediction(mean, unsure, 0.01), 0.0, [0])[0] == 0
