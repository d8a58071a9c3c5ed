"""Compare two samples of times: Welch's t on log time, permutations, equivalence of paired times, Holm's correction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

from suite.statistics import Outcome, judge_interval, student_t
from suite.statistics.intervals import LARGEST_LOG, mean_interval

if TYPE_CHECKING:
    import numpy as np

CONFIDENCE = 0.95
POWER = 0.8  # with which `detectable` ratios are detected
ALPHA = 0.05  # of each of the two one-sided tests
MOST_PERMUTATIONS = 200_000


@dataclass(frozen=True)
class TimeRatio:
    """Time of B divided by time of A, with its confidence interval.

    ``p`` is two-sided, for the hypothesis of no difference. ``error`` and ``dof`` are those of the log ratio.
    """

    ratio: float
    low: float
    high: float
    p: float = math.nan
    error: float = 0.0
    dof: float = math.inf


def welch_ratio(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> TimeRatio:
    """Compute the ratio of geometric means, B over A, with its Welch interval on log time. Two or more times each."""
    logs = [[math.log(time) for time in times] for times in (a, b)]
    difference = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    parts = [statistics.variance(values) / len(values) for values in logs]
    error, dof, half, p = math.sqrt(sum(parts)), math.inf, 0.0, math.nan
    if error > 0.0:
        dof = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, logs, strict=True))
        half = student_t.quantile(0.5 + confidence / 2, dof) * error
        p = 2.0 * student_t.cdf(-abs(difference) / error, dof)
    low, middle, high = (math.exp(min(difference + sign * half, LARGEST_LOG)) for sign in (-1, 0, 1))
    return TimeRatio(middle, low, high, p, error, dof)


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
    def outcome(self) -> Outcome:
        """Whether A is slower than B, by the interval alone."""
        return judge_interval(self.low, self.high)


def compare(a_s: Sequence[float], b_s: Sequence[float]) -> Comparison | None:
    """Compare two samples of times. None unless both have two positive times and at least one sample varies."""
    a, b = ([time for time in times if time > 0.0] for times in (a_s, b_s))
    if len(a) < 2 or len(b) < 2:
        return None
    found = welch_ratio(b, a)
    if found.error == 0.0:
        return None
    return Comparison(
        n_a=len(a),
        n_b=len(b),
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        p_welch=found.p,
        p_permutation=permutation_p([math.log(time) for time in a], [math.log(time) for time in b]),
        detectable=_detectable(found.error, found.dof),
    )


def detectable_ratio(n: int, spread: float) -> float:
    """Smallest ratio that two results of ``n`` runs each detect with 80 % power. ``spread`` is the std of log time."""
    return _detectable(spread * math.sqrt(2.0 / n), 2.0 * n - 2.0)


def _detectable(error: float, dof: float) -> float:
    return math.exp((student_t.quantile(0.5 + CONFIDENCE / 2, dof) + student_t.quantile(POWER, dof)) * error)


def permutation_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Compute the share of all divisions of the pooled values whose means differ at least as much; NaN if too many."""
    import numpy as np

    pooled, size = np.array([*a, *b]), min(len(a), len(b))
    if math.comb(len(pooled), size) > MOST_PERMUTATIONS:
        return math.nan
    rest = len(pooled) - size
    sums = pooled[_divisions(len(pooled), size)].sum(axis=1)
    gaps = np.abs(sums / size - (pooled.sum() - sums) / rest)
    seen = abs(float(np.mean(a) - np.mean(b)))
    return float((gaps >= seen * (1.0 - 1e-12)).mean())  # the tolerance keeps the seen division itself in


@lru_cache(maxsize=4)
def _divisions(count: int, size: int) -> np.ndarray:
    """List the indices of the smaller group in every division, a row each."""
    import numpy as np

    return np.array(list(combinations(range(count), size)))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p values for their number (Holm 1979), so that the chance of any false claim stays at the level."""
    order = sorted(range(len(p)), key=lambda index: p[index])
    adjusted, least = [0.0] * len(p), 0.0
    for rank, index in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = least
    return adjusted


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests (TOST) of paired times: ratio of geometric means, B over A, with its 90 % interval."""

    pairs: int
    ratio: float
    low: float
    high: float
    margin: float

    @property
    def outcome(self) -> Outcome:
        """Equivalent if the interval lies within the margin: both tests reject a difference as large as it."""
        least, most = 1.0 / (1.0 + self.margin), 1.0 + self.margin
        if least <= self.low and self.high <= most:
            return Outcome.EQUIVALENT
        if self.low > most:
            return Outcome.SLOWER
        return Outcome.FASTER if self.high < least else Outcome.INCONCLUSIVE


def compute_equivalence(a_s: Sequence[float], b_s: Sequence[float], margin: float) -> Equivalence:
    """Test whether two or more paired times are equivalent within a margin: Student's t on the logs of the ratios."""
    logs = [math.log(b / a) for a, b in zip(a_s, b_s, strict=True)]
    middle, half = mean_interval(logs, 1.0 - 2.0 * ALPHA)
    return Equivalence(len(logs), math.exp(middle), math.exp(middle - half), math.exp(middle + half), margin)
