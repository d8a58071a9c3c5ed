"""Whether two results differ: ratios of times with intervals and p values. Numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from suite.log import student_t

CONFIDENCE = 0.95
POWER = 0.8
MOST_PERMUTATIONS = 200_000


@dataclass(frozen=True)
class Comparison:
    """Time of A over time of B: ratio of geometric means, with a 95 % Welch interval on log time.

    ``p_welch`` and ``p_permutation`` are two-sided, for the hypothesis of no difference. ``p_permutation`` is exact: it
    counts all ways to divide the runs into groups of these sizes, and is NaN if there are more than 200,000.
    ``detectable`` is the smallest ratio that so many runs with this spread would detect with 80 % power.
    """

    n_a: int
    n_b: int
    ratio: float
    low: float
    high: float
    p_welch: float
    p_permutation: float
    detectable: float

    @property
    def distinguishable(self) -> bool:
        """True if the interval excludes 1."""
        return self.low > 1.0 or self.high < 1.0


def compare(a_s: Sequence[float], b_s: Sequence[float]) -> Comparison | None:
    """Compare two samples of times. None unless both have two positive times and at least one sample varies."""
    a, b = (np.log(np.asarray([t for t in times if t > 0.0], float)) for times in (a_s, b_s))
    if len(a) < 2 or len(b) < 2:
        return None
    parts = np.array([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
    error = math.sqrt(parts.sum())
    if error == 0.0:
        return None
    dof = float(parts.sum() ** 2 / (parts**2 / [len(a) - 1, len(b) - 1]).sum())
    difference = float(a.mean() - b.mean())
    half = student_t.quantile(0.5 + CONFIDENCE / 2, dof) * error
    return Comparison(
        n_a=len(a),
        n_b=len(b),
        ratio=math.exp(difference),
        low=math.exp(difference - half),
        high=math.exp(difference + half),
        p_welch=2.0 * student_t.cdf(-abs(difference) / error, dof),
        p_permutation=permutation_p(a, b),
        detectable=math.exp((student_t.quantile(0.5 + CONFIDENCE / 2, dof) + student_t.quantile(POWER, dof)) * error),
    )


def permutation_p(a: np.ndarray, b: np.ndarray) -> float:
    """Share of all divisions of the pooled values into two groups whose means differ at least as much; NaN if too many."""
    pooled, size = np.concatenate([a, b]), min(len(a), len(b))
    if math.comb(len(pooled), size) > MOST_PERMUTATIONS:
        return math.nan
    rest = len(pooled) - size
    sums = pooled[_divisions(len(pooled), size)].sum(axis=1)
    gaps = np.abs(sums / size - (pooled.sum() - sums) / rest)
    seen = abs(float(a.mean() - b.mean()))
    return float((gaps >= seen * (1.0 - 1e-12)).mean())


@lru_cache(maxsize=4)
def _divisions(count: int, size: int) -> np.ndarray:
    """The indices of the smaller group in every division, a row each. Made once: most results have as many runs."""
    return np.array(list(combinations(range(count), size)))


def detectable_ratio(n: int, spread: float) -> float:
    """Smallest ratio that two results of ``n`` runs each detect with 80 % power. ``spread`` is the std of log time."""
    dof = 2.0 * n - 2.0
    return math.exp(
        (student_t.quantile(0.5 + CONFIDENCE / 2, dof) + student_t.quantile(POWER, dof)) * spread * math.sqrt(2.0 / n)
    )


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p values for their number (Holm 1979), so that the chance of any false claim among all stays at the level."""
    order = sorted(range(len(p)), key=lambda index: p[index])
    adjusted, least = [0.0] * len(p), 0.0
    for rank, index in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = least
    return adjusted
