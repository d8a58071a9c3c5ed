"""Spread of runs and efficiencies on cases with known answers."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from analysis.statistics import efficiency, run_spread


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


def test_twice_the_rate_on_four_times_the_units_is_half_efficient() -> None:
    assert efficiency(20.0, 4.0, 10.0, 1.0) == 0.5
