"""Spread of runs and efficiencies on cases with known answers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from analysis.results.spread import run_spread
from suite.statistics import Outcome
from suite.statistics.comparison import compare, detectable_ratio, holm


def test_the_variance_of_log_time_is_the_sum_of_its_parts() -> None:
    epochs, tau = pd.Series([10.0, 12.0, 9.0, 15.0]), pd.Series([3.0, 2.9, 3.2, 2.8])
    spread = run_spread(epochs, tau)
    assert spread is not None
    total = sum((spread.variance_epochs, spread.variance_epoch_time, spread.covariance_twice))
    logs = [math.log(e * t) for e, t in zip(epochs, tau, strict=True)]
    assert total == pytest.approx(pd.Series(logs).var(ddof=1))


def test_spread_that_is_all_convergence_points_along_epochs() -> None:
    spread = run_spread(pd.Series([10.0, 20.0, 40.0]), pd.Series([3.0, 3.0, 3.0]))
    assert spread is not None
    assert spread.along_epochs == pytest.approx(1.0)
    assert spread.axis_1_share == pytest.approx(1.0)
    assert math.isnan(spread.correlation)


def test_one_run_has_no_spread() -> None:
    assert run_spread(pd.Series([10.0]), pd.Series([3.0])) is None


def test_welch_on_log_time_as_scipy_has_it() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = [10.0, 11.5, 9.7, 12.0, 10.4], [13.0, 12.1, 14.9, 13.3]
    found = compare(a, b)
    assert found is not None
    theirs = stats.ttest_ind([math.log(t) for t in a], [math.log(t) for t in b], equal_var=False)
    interval = theirs.confidence_interval()
    assert found.p_welch == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)), rel=1e-9)
    assert found.ratio == pytest.approx(math.exp(sum(map(math.log, a)) / 5 - sum(map(math.log, b)) / 4))


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
    shift = math.log(detectable_ratio(n, spread))
    hits = 0
    for _ in range(400):
        a, b = np.exp(chance.normal(shift, spread, n)), np.exp(chance.normal(0.0, spread, n))
        found = compare(list(a), list(b))
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
