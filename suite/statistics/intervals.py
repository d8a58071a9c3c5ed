"""Confidence intervals of means, of geometric means and of shares."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from mlhpc.suite.statistics import student_t

LARGEST_LOG = 700.0  # exp of more is no float; logs may claim any time


def compute_mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Compute the mean of two or more values and the half width of its Student-t interval."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), student_t.compute_quantile(0.5 + confidence / 2, len(values) - 1) * error


def compute_log_interval(times: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Compute the interval of the geometric mean (Student's t on log time). None for fewer than two times."""
    if len(times) < 2:
        return None
    middle, half = compute_mean_interval([math.log(time) for time in times], confidence)
    return math.exp(middle - half), math.exp(min(middle + half, LARGEST_LOG))


def compute_share_interval(found: int, count: int, confidence: float) -> tuple[float, float]:
    """Compute the Clopper-Pearson interval of the share behind ``found`` of ``count`` independent trials."""
    from scipy import stats

    tail = (1.0 - confidence) / 2
    low = float(stats.beta.ppf(tail, found, count - found + 1)) if found else 0.0
    high = float(stats.beta.isf(tail, found + 1, count - found)) if found < count else 1.0
    return low, high
