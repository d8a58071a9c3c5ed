from __future__ import annotations

import pytest
from scipy.stats import binomtest

from mlhpc.suite.statistics.comparison import compute_share_interval


@pytest.mark.parametrize(("found", "count"), [(0, 100), (4, 100), (20, 20), (1, 1), (7, 9)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_the_interval_is_the_exact_one(found: int, count: int, confidence: float) -> None:
    other = binomtest(found, count).proportion_ci(confidence, "exact")
    assert compute_share_interval(found, count, confidence) == pytest.approx((other.low, other.high), abs=1e-9)
