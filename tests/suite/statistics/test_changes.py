"""Changes in a series: false alarms at the rate that is stated, power, the place; series that must and must not alarm."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlhpc.suite.statistics.changes import (
    Changes,
    compare_levels,
    compute_min_results,
    find_changes,
    find_places,
    is_slowed,
    judge_changes,
)
from mlhpc.suite.statistics.dependence import CLIP, LINE, compute_p, compute_scores


def level(generator: random.Random, sigma: float = 0.1) -> float:
    """One result of an unchanged machine: log-normal."""
    return math.exp(generator.gauss(0.0, sigma))


def cauchy(generator: random.Random) -> float:
    """A machine with wild outliers: log time has no mean."""
    return math.exp(max(-300.0, min(0.05 * math.tan(math.pi * (generator.random() - 0.5)), 300.0)))


def coarse(generator: random.Random) -> float:
    """Times that are equal to each other more often than not."""
    return float(generator.choice([60, 61, 62]))


@pytest.mark.parametrize("law", [level, cauchy, coarse])
@pytest.mark.parametrize(("count", "rate"), [(10, 0.05), (30, 0.05)])
def test_a_series_without_a_change_alarms_no_more_often_than_stated(
    law: Callable[[random.Random], float], count: int, rate: float
) -> None:
    generator, series = random.Random(count), 200
    alarms = sum(bool(find_changes([law(generator) for _ in range(count)], rate)) for _ in range(series))
    assert alarms <= rate * series + 3 * math.sqrt(rate * series)  # three standard deviations of a fair count


@pytest.mark.parametrize(
    ("count", "place", "sigmas", "power", "near"),
    [(20, 10, 3.0, 0.97, 0.9), (30, 15, 2.0, 0.9, 0.65), (30, 26, 3.0, 0.85, 0.65), (40, 20, -2.0, 0.9, 0.65)],
)
def test_an_injected_change_is_found_at_its_place(
    count: int, place: int, sigmas: float, power: float, near: float
) -> None:
    """``near``: the share of those found that are at most one result off."""
    generator, series, found, hits = random.Random(1), 40, 0, 0
    for _ in range(series):
        values = [level(generator) * math.exp(0.1 * sigmas * (index >= place)) for index in range(count)]
        changes = find_changes(values, 0.05)
        found += bool(changes)
        hits += any(abs(change.place - place) <= 1 for change in changes)
    assert found >= power * series
    assert hits >= near * found


def steady(count: int, *, at: float = 60.0, seed: int = 4) -> list[float]:
    generator = random.Random(seed)
    return [at * level(generator, 0.01) for _ in range(count)]


def must_not_alarm() -> Iterator[tuple[str, list[float]]]:
    yield "constant", [60.0] * 30
    yield "noise", steady(30)
    yield "one slow night", [*steady(15), 600.0, *steady(14, seed=7)]
    yield "a slow first night", [600.0, *steady(29)]
    yield "a slow last night", [*steady(29), 600.0]
    yield "a last night that took a year", [*steady(29), 3e7]
    yield "three outliers apart", [600.0 if index in (5, 14, 23) else value for index, value in enumerate(steady(30))]
    yield "two levels that alternate", [60.0, 66.0] * 15
    yield "too few, however far apart", [60.0] * 4 + [6000.0] * 4
    yield "slow at weekends", [value * (1.1 if index % 7 > 4 else 1.0) for index, value in enumerate(steady(35))]
    yield "a single result", [60.0]
    yield "nothing", []


def must_alarm() -> Iterator[tuple[str, list[float], list[int]]]:
    yield "a step", steady(15) + steady(15, at=66.0, seed=5), [15]
    yield "a step down", steady(15, at=66.0) + steady(15, seed=5), [15]
    yield "a small step", steady(20) + steady(20, at=61.5, seed=5), [20]
    yield "there and back", steady(15) + steady(15, at=66.0, seed=5) + steady(15, seed=6), [15, 30]
    yield "two steps up", steady(15) + steady(15, at=66.0, seed=5) + steady(15, at=72.0, seed=6), [15, 30]
    yield "the last four of thirty", steady(26) + steady(4, at=66.0, seed=5), [26]
    yield "the first four of thirty", steady(4, at=66.0) + steady(26, seed=5), [4]
    yield "exact levels", [60.0] * 10 + [61.0] * 10, [10]
    yield "a step among outliers", [*steady(14), 600.0, *steady(14, at=66.0, seed=5), 6.0, 66.0], [14]
    yield "in other units", [value * 1e9 for value in steady(15) + steady(15, at=66.0, seed=5)], [15]


@pytest.mark.parametrize(
    ("name", "values"), list(must_not_alarm()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_no_change_does_not_alarm(name: str, values: list[float]) -> None:
    assert find_changes(values, 0.01) == []


@pytest.mark.parametrize(
    ("name", "values", "places"), list(must_alarm()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_a_change_is_found(name: str, values: list[float], places: list[int]) -> None:
    found = find_changes(values, 0.01)
    assert len(found) == len(places)
    assert all(abs(change.place - place) <= 1 for change, place in zip(found, places, strict=True))


def test_the_fewest_results_are_those_of_which_one_order_in_so_many_is_the_clearest() -> None:
    assert [compute_min_results(rate) for rate in (0.05, 0.01, 0.005, 0.0001)] == [8, 10, 11, 17]
    for rate in (0.05, 0.01):
        count = compute_min_results(rate) + 1
        clear = [1.0] * (count // 2) + [2.0] * (count - count // 2)
        clear = [value + index * 1e-6 for index, value in enumerate(clear)]
        assert find_changes(clear, rate), "one more always do"
        assert not find_changes(clear[1:-1], rate), "fewer never can"


VALUES = st.lists(st.floats(0.1, 1e6), min_size=4, max_size=30)


@given(VALUES)
def test_scores_sum_to_zero_follow_the_values_and_are_bounded(values: list[float]) -> None:
    found = list(compute_scores(np.log([values]))[0])
    assert sum(found) == pytest.approx(0.0, abs=1e-9)
    assert max(found) - min(found) <= 2 * CLIP + 1e-9
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(found[a] <= found[b] + 1e-9 for a, b in itertools.pairwise(order))


@given(VALUES, st.sampled_from([0.001, 60.0, 1e9]))
def test_the_answer_does_not_depend_on_the_unit(values: list[float], unit: float) -> None:
    logs = np.log([values])
    assert compute_scores(logs + math.log(unit)) == pytest.approx(compute_scores(logs), abs=1e-6)


def test_a_large_change_is_found_sooner_than_a_small_one() -> None:
    """Ranks alone would not see more than that the last ones are the largest."""
    large = [min(count for count in range(2, 12) if find_changes(steady(30) + steady(count, at=60 * size, seed=5), 0.01))
             for size in (1.02, 1.1)]  # fmt: skip
    assert large[1] < large[0]
    assert large[1] <= 3


def test_the_size_of_a_change_has_an_interval_that_holds_the_truth_as_often_as_stated() -> None:
    generator, holds = random.Random(2), 0
    for _ in range(400):
        values = [level(generator) * (1.1 if index >= 12 else 1.0) for index in range(24)]
        interval = compare_levels(values[:12], values[12:], 0.0).interval
        assert interval is not None
        holds += interval[0] <= 1.1 <= interval[1]
    assert 0.92 * 400 <= holds <= 0.98 * 400


def test_so_few_results_have_no_interval() -> None:
    assert compare_levels([1.0, 1.0], [2.0, 2.0], 0.0).interval is None


def follow(generator: random.Random, count: int, correlation: float) -> list[float]:
    """Draw results of which each correlates with the one before it."""
    rest, values = generator.gauss(0.0, 1.0), []
    for _ in range(count):
        rest = correlation * rest + math.sqrt(1.0 - correlation**2) * generator.gauss(0.0, 1.0)
        values.append(math.exp(0.01 * rest))
    return values


@pytest.mark.parametrize(("count", "correlation"), [(20, 0.3), (20, 0.6), (40, 0.6)])
def test_results_that_follow_each_other_alarm_no_more_often_than_stated(count: int, correlation: float) -> None:
    generator, series, rate = random.Random(count), 60, 0.05
    found = [judge_changes(follow(generator, count, correlation), rate) for _ in range(series)]
    assert sum(bool(each.sure) for each in found) <= rate * series + 3 * math.sqrt(rate * series)
    if correlation > 0.5:
        assert sum(bool(each.doubtful) for each in found) > 3 * rate * series, "independence would alarm so often"


def test_a_large_change_is_sure_though_so_few_results_may_follow_each_other() -> None:
    for size in (1.1, 1.22):
        found = judge_changes(steady(12) + steady(12, at=60 * size, seed=5), 0.01)
        assert [change.place for change in found.sure] == [12]
        assert not found.doubtful


def test_two_large_changes_in_twelve_results_are_found() -> None:
    found = judge_changes(steady(4) + steady(4, at=72.0, seed=5) + steady(4, at=69.0, seed=6), 0.005)
    assert [change.place for change in found.sure] == [4, 8]  # no step alone is as rare


@pytest.mark.parametrize("levels", [(1.0, 1.16, 1.08), (1.0, 1.3, 1.08), (1.2, 1.0, 1.1)])
def test_a_change_that_went_back_in_part_is_a_change(levels: tuple[float, ...]) -> None:
    for spread in (0.001, 0.003):
        generator = random.Random(8)
        values = [at * level(generator, spread) for at in levels for _ in range(12)]
        found = judge_changes(values, 0.01)
        assert [change.place for change in found.sure] == [12, 24]
        assert not found.doubtful


def test_the_places_of_a_change_hold_the_true_one_as_often_as_stated() -> None:
    generator, misses, width = random.Random(3), 0, 0
    for _ in range(100):
        values = [level(generator, 0.01) * (1.02 if index >= 12 else 1.0) for index in range(24)]
        for change in find_changes(values, 0.2)[:1]:
            places = find_places(values, change)
            misses += change.begin < 12 < change.end and 12 not in places
            width += len(places)
    assert misses <= 12
    assert width < 100 * 10


def keep_speed(generator: random.Random, count: int, stays: float) -> list[float]:
    """Draw results of a machine with two speeds 5 % apart."""
    state, values = generator.random() < 0.5, []
    for _ in range(count):
        state ^= generator.random() > stays
        values.append(math.exp(0.005 * generator.gauss(0.0, 1.0) + 0.05 * state))
    return values


@pytest.mark.long
def test_a_machine_with_two_speeds_alarms_seldom_and_then_the_assumption_says_so() -> None:
    """It keeps a speed with 0.8, so neighbours correlate by 0.6: one in five alarmed once."""
    generator = random.Random(30)
    found = [judge_changes(keep_speed(generator, 30, 0.8), 0.01) for _ in range(100)]
    alarms = [each for each in found if each.sure or each.line == "sure"]
    assert len(alarms) <= 12, "of these are up and back"
    assert sum(each.held >= 0.6 for each in alarms) <= 2, "1 % with the correlation that is assumed"


def test_the_assumed_correlation_grows_with_the_results_of_a_level() -> None:
    held = [judge_changes(steady(n) + steady(n, at=66.0, seed=5), 0.01).held for n in (8, 15, 30)]
    assert held == sorted(held)
    assert held[0] < held[2]


def rise(count: int, whole: float, seed: int) -> list[float]:
    return [value * math.exp(whole * index / (count - 1)) for index, value in enumerate(steady(count, seed=seed))]


def test_a_slow_change_is_a_change() -> None:
    """11.6 % in 30 results of 1 % was "inconclusive"."""
    judged = [judge_changes(rise(30, math.log(1.116), seed), 0.005) for seed in range(8)]
    assert [each.line for each in judged] == ["sure"] * 8
    assert all(not each.sure and not each.doubtful for each in judged)
    late = steady(15) + rise(15, 0.1, 5)
    assert (judge_changes(late, 0.005).line, judge_changes(late, 0.005).begin) == ("sure", 15)
    assert judge_changes(steady(15) + steady(15, at=66.0, seed=5), 0.005).line == "", "a step is no line"


def test_a_line_is_no_more_often_seen_in_results_without_one_than_stated() -> None:
    generator, rate = random.Random(7), 0.05
    for correlation in (0.0, 0.6):
        alarms = sum(
            compute_p(LINE, np.log(follow(generator, 20, correlation)), rate, 0.8 if correlation else None) <= rate
            for _ in range(100)
        )
        assert alarms <= 12, correlation


def test_too_few_results_are_not_judged() -> None:
    assert judge_changes([1.0, 1.0, 2.0], 0.01) == Changes()


def test_a_change_is_no_correlation_of_its_results() -> None:
    """Of twelve results the last four: the levels alone would make neighbours look alike, and widen the size to nothing."""
    alike = []
    for seed in range(5):
        values = [*steady(8, seed=seed), *steady(4, at=66.0, seed=seed + 9)]
        found = judge_changes(values, 0.01)
        assert [change.place for change in found.sure] == [8]
        alike.append(found.correlation)
        assert is_slowed(np.log(values), 0.0088)
        assert not is_slowed(np.log(values[::-1]), 0.0088), "its last results are faster"
        assert not is_slowed(np.log(steady(12, seed=seed)), 0.0088)
    assert sum(each < 0.3 for each in alike) >= 4
