"""Intervals of a share: so many of so many."""

from __future__ import annotations

from scipy import stats


def share_interval(found: int, count: int, confidence: float) -> tuple[float, float]:
    """Compute the Clopper-Pearson interval of the share behind ``found`` of ``count`` independent trials."""
    tail = (1.0 - confidence) / 2
    low = float(stats.beta.ppf(tail, found, count - found + 1)) if found else 0.0
    high = float(stats.beta.isf(tail, found + 1, count - found)) if found < count else 1.0
    return low, high
