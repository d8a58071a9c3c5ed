"""The bound of rounding: its rate, what lies beyond it, and what cannot be judged."""

from __future__ import annotations

import math
import random

import pytest

from mlhpc.plugins.numerics.judge import ERROR_RATE, SLACK, Bound, judge, make_bounds


def draw_runs(seed: int, names: int, runs: int = 24, spread: float = 0.3) -> list[dict[str, float]]:
    chance = random.Random(seed)
    return [{f"output {n}": 1e-7 * math.exp(chance.gauss(0, spread)) for n in range(names)} for _ in range(runs)]


def test_a_run_like_the_perturbed_ones_is_rounding_at_the_stated_rate() -> None:
    alarms = 0
    for seed in range(100):
        *runs, fresh = draw_runs(seed, 30, 25)
        shifted = {name: error * SLACK for name, error in fresh.items()}  # as far as the allowance goes
        alarms += judge(shifted, make_bounds(runs, 2.0**-23), 0.02).outcome == "not rounding"
    assert alarms <= 8  # 2 expected


@pytest.mark.parametrize("place", range(0, 30, 7))
def test_the_first_tensor_beyond_its_bound_is_named(place: int) -> None:
    *runs, fresh = draw_runs(place, 30, 25)
    wrong = {name: error * (1 if n < place else 1e3) for n, (name, error) in enumerate(fresh.items())}
    found = judge(wrong, make_bounds(runs, 2.0**-23))
    assert (found.outcome, found.first, found.beyond) == ("not rounding", f"output {place}", 30 - place)
    assert found.factor > 1


def test_what_is_no_number_or_should_be_zero_is_no_rounding() -> None:
    bounds = make_bounds([{"loss": 0.0}] * 20, 2.0**-23)
    assert judge({"loss": math.inf}, bounds).outcome == "not rounding"
    assert judge({"loss": 2.0**-24}, bounds).outcome == "rounding"
    assert judge({"loss": 1e-5}, bounds).outcome == "not rounding"


def test_a_tensor_whose_perturbed_runs_jump_decides_nothing() -> None:
    runs = [{"output a": 1e-7, "output b": 1e-7 if n else 1e-2} for n in range(20)]
    bounds = make_bounds(runs, 2.0**-23)
    assert judge({"output a": 1e-7, "output b": 1e-3}, bounds).outcome == "inconclusive"
    assert judge({"output a": 1e-7, "output b": 1e-7}, bounds).outcome == "rounding"
    assert judge({"output a": 1e-7, "output b": 10.0}, bounds).first == "output b"  # far above the largest jump
    assert judge({"output a": 1e-2, "output b": 1e-3}, bounds).first == "output a"


def test_far_above_the_largest_jump_is_no_rounding_however_wide_the_jumps_are() -> None:
    """Calm and jumping runs are no normal distribution: its tail would reach to a gradient that is wholly wrong."""
    share, wide = random.uniform(0.2, 0.8), 10 ** random.uniform(2.5, 5)
    runs = [{"gradient": 1e-6 * (wide if n < 20 * share else 1)} for n in range(20)]
    bounds = make_bounds(runs, 2.0**-23)
    assert judge({"gradient": 9e-6 * wide}, bounds).outcome == "inconclusive"
    found = judge({"gradient": 1.1e-5 * wide}, bounds)
    assert (found.outcome, found.factor) == ("not rounding", pytest.approx(1.1))


def test_the_factor_is_one_where_the_chance_is_the_rate() -> None:
    bound = Bound(math.log(1e-7), 0.2, 24)
    error = 1e-7 / bound.compute_factor(1e-7, ERROR_RATE)
    assert bound.compute_p(error) == pytest.approx(ERROR_RATE, rel=1e-3)
