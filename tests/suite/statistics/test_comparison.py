"""Spread of runs and efficiencies on cases with known answers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from benchmarks.verdict_rates import TRUTHS, share
from mlhpc.analysis.results.selection import compute_run_spread
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.comparison import (
    Comparison,
    compare_times,
    compute_detectable_ratio,
    estimate_runs_needed,
    holm,
)


def compare(a: list[float], b: list[float], **options: float) -> Comparison | None:
    """Compare runs by turns, so that nothing is a trend."""
    return compare_times(
        [(2.0 * place, time) for place, time in enumerate(a)],
        [(2.0 * place + 1.0, time) for place, time in enumerate(b)],
        **options,
    )


def test_the_variance_of_log_time_is_the_sum_of_its_parts() -> None:
    epochs, tau = pd.Series([10.0, 12.0, 9.0, 15.0]), pd.Series([3.0, 2.9, 3.2, 2.8])
    spread = compute_run_spread(epochs, tau)
    assert spread is not None
    total = sum((spread.variance_epochs, spread.variance_epoch_time, spread.covariance_twice))
    logs = [math.log(e * t) for e, t in zip(epochs, tau, strict=True)]
    assert total == pytest.approx(pd.Series(logs).var(ddof=1))


def test_spread_that_is_all_convergence_points_along_epochs() -> None:
    spread = compute_run_spread(pd.Series([10.0, 20.0, 40.0]), pd.Series([3.0, 3.0, 3.0]))
    assert spread is not None
    assert spread.along_epochs == pytest.approx(1.0)
    assert spread.axis_1_share == pytest.approx(1.0)
    assert math.isnan(spread.correlation)


def test_one_run_has_no_spread() -> None:
    assert compute_run_spread(pd.Series([10.0]), pd.Series([3.0])) is None


def test_welch_on_log_time_as_scipy_has_it() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = [10.0, 11.5, 9.7, 12.0, 10.4], [13.0, 12.1, 14.9, 13.3]
    found = compare(a, b)
    assert found is not None
    theirs = stats.ttest_ind([math.log(t) for t in b], [math.log(t) for t in a], equal_var=False)
    interval = theirs.confidence_interval()
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)), rel=1e-9)
    assert found.ratio == pytest.approx(math.exp(sum(map(math.log, b)) / 4 - sum(map(math.log, a)) / 5))


def test_the_permutation_p_counts_every_dealing() -> None:
    found = compare([1.0, 2.0, 3.0], [10.0, 20.0, 30.0])
    assert found is not None
    assert found.p_permutation == pytest.approx(2 / 20)  # this split and its mirror, of 6 over 3
    same = compare([1.0, 3.0], [3.0, 1.0])
    assert same is not None
    assert same.p_permutation == 1.0
    assert same.outcome == Outcome.INCONCLUSIVE


def test_the_detectable_ratio_is_found_in_four_of_five_trials() -> None:
    chance = np.random.default_rng(7)
    n, spread = 8, 0.1
    shift = math.log(compute_detectable_ratio(n, spread))
    hits = 0
    for _ in range(400):
        a, b = np.exp(chance.normal(shift, spread, n)), np.exp(chance.normal(0.0, spread, n))
        found = compare(list(b), list(a))
        hits += found is not None and found.low > 1.0
    assert 0.74 < hits / 400 < 0.87


def test_equal_systems_are_called_different_once_in_twenty() -> None:
    chance = np.random.default_rng(8)
    wrong = 0
    for _ in range(400):
        found = compare(list(np.exp(chance.normal(0, 0.1, 6))), list(np.exp(chance.normal(0, 0.3, 5))))
        wrong += found is not None and found.outcome != Outcome.INCONCLUSIVE
    assert 0.02 < wrong / 400 < 0.09


def test_holm_as_published() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9]) == [0.9]


def test_one_run_or_no_spread_cannot_be_compared() -> None:
    assert compare([1.0], [1.0, 2.0]) is None
    assert compare([1.0, 1.0], [2.0, 2.0]) is None


@pytest.mark.parametrize("truth", [name for name in TRUTHS if "sessions" not in name and "0.5 %" not in name])
def test_equal_results_are_called_unequal_as_seldom_as_stated(truth: str) -> None:
    """200 comparisons each: with 5 % wrong, more than 19 are seen once in two hundred tries."""
    chance = np.random.default_rng(11)
    for sizes in ((3, 10), (5, 5), (5, 10)):
        assert share(chance, truth, sizes, 1.0, 200) <= 19, sizes


@pytest.mark.parametrize(("truth", "sizes", "effect"), [
    ("log-normal, 1 %", (5, 5), 1.03),
    ("log-normal, 1 %", (3, 10), 1.05),
    ("drift of 0.5 % a run", (5, 5), 1.1),
    ("1 in 10 takes twice as long", (5, 5), 4.0),
    ("rounded to 1 %", (5, 5), 1.03),
])  # fmt: skip
def test_a_slower_result_is_found(truth: str, sizes: tuple[int, int], effect: float) -> None:
    assert share(np.random.default_rng(12), truth, sizes, effect, 100) >= 70


def test_a_drift_through_the_runs_widens_the_interval_and_is_said() -> None:
    drifting = [(float(place), 100.0 * 1.01**place * (1.0 + 0.001 * (place % 3))) for place in range(10)]
    found = compare_times(drifting[:5], drifting[5:])
    assert found is not None
    assert found.outcome == Outcome.INCONCLUSIVE
    assert found.drift == pytest.approx(0.01, abs=0.001)
    assert "times grow by 0.995 % from run to run" in found.doubts[0]
    by_turns = compare_times(drifting[::2], drifting[1::2])
    assert by_turns is not None
    assert by_turns.high / by_turns.low < found.high / found.low, "by turns the drift is the same on both sides"


@pytest.mark.parametrize(("a", "b", "said"), [
    ([100.0, 101.0], [110.0, 111.0, 112.0], "A has 2 runs; 3 are needed"),
    ([100.0, 101.0, 102.0], [110.0, 110.0, 110.0], "all 3 runs of B take the same time"),
])  # fmt: skip
def test_too_few_runs_or_no_spread_is_inconclusive(a: list[float], b: list[float], said: str) -> None:
    found = compare(a, b)
    assert found is not None
    assert found.outcome == Outcome.INCONCLUSIVE
    assert any(doubt.startswith(said) for doubt in found.doubts)


def test_no_interval_is_narrower_than_the_resolution_of_the_times() -> None:
    found = compare([100.0, 100.0001, 100.0002], [100.1, 100.1001, 100.1002], resolution_s=1.0)
    assert found is not None
    assert found.outcome == Outcome.INCONCLUSIVE
    assert math.log(found.high / found.low) == pytest.approx(2 * 1.0 / 100.0, rel=1e-3)


def test_so_many_runs_would_tell() -> None:
    """Twice the difference needs about a quarter of the runs."""
    first, second = (
        compare([100.0, 104.0, 97.0, 102.0], [k * t for t in (99.0, 103.0, 98.0, 103.0)]) for k in (1.02, 1.04)
    )
    assert first is not None
    assert second is not None
    counts = [estimate_runs_needed(item) for item in (first, second)]
    assert counts[0] is not None
    assert counts[1] is not None
    assert 2.5 < counts[0] / counts[1] < 5
