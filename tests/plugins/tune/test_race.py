"""The race: what it costs to drop an entry, that the best one stays, and that equal ones have no winner."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from benchmarks.ab_runs import ENTRIES, NOISES, World, levels, plan, simulate
from mlhpc.plugins.tune.race import (
    STAKES,
    PairPower,
    Race,
    RaceRules,
    Turn,
    build_race,
    compute_e_value,
    compute_median_ratio,
    compute_sign,
    estimate_spread,
    make_random_order,
    run_race,
)
from mlhpc.suite.errors import InputError


def test_wealth_does_not_grow_on_average_if_both_are_equally_fast() -> None:
    """The sum over all sequences of wins and losses, each as likely: exactly 1."""
    assert math.fsum(part for _, part in STAKES) == pytest.approx(1.0, abs=1e-12)
    for count in (1, 5, 12):
        mean = (
            math.fsum(math.comb(count, lost) * compute_e_value(lost, count - lost) for lost in range(count + 1))
            / 2**count
        )
        assert mean == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_chance_to_drop_an_equal_entry_is_below_the_bound_over_all_orders_of_all_blocks(count: int) -> None:
    """Every course of six blocks (two to four entries, each order as likely) or a part of them; no simulation for two."""
    names = "abcd"[:count]
    given = RaceRules(tuple(names), 0.5, 6, 1)
    orders = list(itertools.permutations(names))
    chance = random.Random(1)
    courses = (
        list(itertools.product(orders, repeat=6))
        if count == 2
        else [[chance.choice(orders) for _ in range(6)] for _ in range(1000)]
    )
    dropped: Counter[str] = Counter()
    for course in courses:

        def run(turn: Turn, course: object = course) -> float:
            return 1.0 + course[turn.block - 1].index(turn.entry)  # type: ignore[index]

        dropped.update(run_race(given, {}, run).dropped.keys())
    for name in names:
        assert 0 < dropped[name] / len(courses) <= 1.0 / given.threshold + (0.0 if count == 2 else 0.03)


def test_eight_equal_entries_have_no_winner_and_one_that_is_best_wins() -> None:
    """100 tournaments each; benchmarks/results has 500 of more kinds."""
    for noise in (NOISES["cauchy"], NOISES["neighbour"]):
        equal = simulate(100, levels=levels(0.0), noise=noise, interrupted=0.05)
        assert equal.winner <= 0.05
        assert equal.dropped <= 0.10
    best = simulate(100, levels=levels(1.0), noise=NOISES["drift"])
    assert best.won >= 0.95
    assert best.runs < 8 * 12


def test_the_stated_chance_of_dropping_the_best_holds_when_one_looks_for_long() -> None:
    """Ville's bound is for any number of looks: 100 blocks, at an error of a half, so that it would show."""
    count, dropped = 150, 0
    for seed in range(count):
        given = RaceRules(("a", "b", "c"), 0.5, 100, seed)
        world = World({"a": 0.0, "b": 0.0, "c": 0.0}, NOISES["normal"], seed)
        dropped += "a" in run_race(given, {}, world).dropped
    bound = 1.0 / RaceRules(("a", "b", "c"), 0.5, 100, 0).threshold
    assert 0.03 < dropped / count < bound + 3 * math.sqrt(bound * (1 - bound) / count)


def test_nobody_is_dropped_before_the_fewest_blocks_and_a_clear_loser_soon_after() -> None:
    given = plan(1)
    race = run_race(given, {}, lambda turn: 1.0 if turn.entry == "a" else 2.0 + 0.1 * ENTRIES.index(turn.entry))
    assert race.winner == "a"
    fewest = next(n for n in range(1, 100) if compute_e_value(n, 0) >= given.threshold)
    assert fewest <= min(drop.block for drop in race.dropped.values())
    assert max(drop.block for drop in race.dropped.values()) <= fewest + 3
    assert all(drop.p <= 1.0 / given.threshold for drop in race.dropped.values())


def test_runs_that_do_not_finish_are_slower_than_all_that_do_and_tie_with_each_other() -> None:
    assert (compute_sign(math.inf, 3.0), compute_sign(3.0, math.inf), compute_sign(math.inf, math.inf)) == (1, -1, 0)
    race = run_race(plan(1), {}, lambda turn: 1.0 if turn.entry == "c" else math.inf)
    assert race.winner == "c"
    race = run_race(plan(1), {}, lambda turn: math.inf)
    assert (race.winner, race.dropped) == (None, {})


def test_an_entry_that_fails_in_half_of_its_runs_does_not_win_by_the_others() -> None:
    found = simulate(40, levels=levels(1.0), noise=NOISES["normal"], fails={"a": 0.5})
    assert found.won <= 0.15


def test_a_race_goes_on_where_it_was_interrupted_and_ends_the_same() -> None:
    whole_world = World(levels(0.5), NOISES["normal"], 3)
    runs: dict[Turn, float] = {}

    def first(turn: Turn) -> float:
        runs[turn] = whole_world(turn)
        return runs[turn]

    whole = run_race(plan(3), {}, first)
    for cut in (0, 1, 7, 8, 30, len(runs)):
        known = dict(list(runs.items())[:cut])
        again = run_race(plan(3), known, lambda turn: runs[turn])
        assert (again.dropped, again.survivors) == (whole.dropped, whole.survivors)
        race, demanded = build_race(plan(3), known)
        assert demanded[: len(known)] == list(known)
        assert race.blocks == whole.blocks[: len(race.blocks)]


def test_orders_are_drawn_anew_for_each_block_and_no_entry_has_a_place_of_its_own() -> None:
    given = plan(5)
    orders = [make_random_order(block, ENTRIES, given.seed) for block in range(1, 801)]
    assert orders == [make_random_order(block, ENTRIES[::-1], given.seed) for block in range(1, 801)]
    for name in ENTRIES:
        places = Counter(order.index(name) for order in orders)
        assert all(70 <= places[place] <= 135 for place in range(8)), places  # 100 each, four deviations


def test_a_race_of_one_is_refused() -> None:
    with pytest.raises(InputError, match="at least two entries"):
        Race(RaceRules(("a",), 0.05, 3, 1))


def test_a_ratio_has_an_interval_only_once_blocks_are_enough() -> None:
    pairs = [(2.0, 1.0 + 0.01 * n) for n in range(12)]
    six, twelve = compute_median_ratio(pairs[:6]), compute_median_ratio(pairs)
    assert six is not None
    assert (six.low, six.high) == (None, None)
    assert twelve is not None
    low, value, high = twelve.low or 0.0, twelve.value or 0.0, twelve.high or 0.0
    assert 2.0 / 1.11 <= low < value < high <= 2.0
    assert compute_median_ratio([]) is None
    assert compute_median_ratio([(math.inf, math.inf)]) is None
    failed = compute_median_ratio([(math.inf, 1.0)] * 12)
    assert failed is not None
    assert failed.value is None


def test_the_interval_of_a_ratio_holds_the_truth_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        world = World({"a": 0.0, "b": 0.2}, NOISES["cauchy"], seed)
        ratio = compute_median_ratio([(world(Turn(n, "b")), world(Turn(n, "a"))) for n in range(20)])
        assert ratio is not None
        held += (ratio.low or 0.0) <= math.exp(0.2) <= (ratio.high or math.inf)
    assert held >= 190


def test_what_a_race_could_find_it_finds_in_eight_of_ten() -> None:
    noise = random.Random(5)
    power = PairPower(0.07, 16, 0.05)
    visible = power.find_visible()
    assert visible == pytest.approx(0.083, abs=0.002)
    assert power.count_needed(visible) == 16
    won = 0
    for seed in range(200):
        rules = RaceRules(("default", "tuned"), 0.05, 16, seed)
        race = run_race(
            rules, {}, lambda turn: 1.0 if turn.entry == "default" else noise.lognormvariate(math.log1p(-visible), 0.07)
        )
        won += race.winner == "tuned"
    assert 0.7 <= won / 200 <= 0.9
    assert PairPower(5.0, 16, 0.05).find_visible() is None
    assert PairPower(1.0, 16, 0.05).count_needed(0.01) is None


def test_a_spread_does_not_follow_an_outlier() -> None:
    logs = [0.02, -0.01, 0.03, -0.02, 0.0, 0.01, -0.03, 2.0]
    spread = estimate_spread([(math.exp(each), 1.0) for each in logs])
    assert spread is not None
    assert spread < 0.06
    assert estimate_spread([(1.0, 1.0), (math.inf, 1.0)]) is None
