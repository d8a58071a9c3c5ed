"""Outlier test: how many of N values are outliers, at a given false-alarm rate.

The i worst values are outliers if every one of them lies more than c_i standard deviations of the rest above the mean
of the rest. The largest i for which that holds is taken, so that several bad nodes do not mask each other. For i = 1
the statistic has Student's t distribution. For more, the expected number of groups of i healthy values that pass is the
number of groups times an integral over the mean and the standard deviation of the rest. The c_i are such that a share
``rate`` of healthy, normal values is named in the long run, `FIRST` of it by i = 1.

Where tails may be as heavy as Student's t with 3 degrees of freedom, a value must also lie as many times further away
than the furthest of the rest as a Pareto tail of exponent 3 allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FIRST = 0.95  # share of the false alarms that is left to the test of a single value
TAIL = 3.0  # exponent of the heaviest tail for which a rate is promised: that of Student's t with 3 degrees of freedom
LEAST_REST = 3  # values that must be left to compare with
_S_POINTS, _M_POINTS = 400, 16  # of the quadrature over standard deviations and means


@dataclass(frozen=True)
class Outliers:
    """The ``count`` worst values are outliers. ``mean`` and ``deviation`` are those of the other ``rest`` values."""

    count: int
    rest: int
    mean: float
    deviation: float


def find_outliers(
    values: Floats, rate: float, *, margin: float = 0.0, floor: float = 0.0, tailed: bool = False, known: float = 0.0
) -> Outliers | None:
    """Find how many of the largest of N values (N,) are outliers. None if N is too small for a test.

    ``rate``: the share of healthy values that may be named wrongly. An outlier is surely further than ``margin`` from
    the mean of the rest. ``floor``: the least standard deviation. ``tailed``: tails may be as heavy as `TAIL`.
    ``known``: the furthest that a healthy value is known to lie from the others, so that a few values need not tell.
    """
    import numpy as np

    count = len(values)
    if count < LEAST_REST + 1:
        return None
    ordered = np.sort(values)[::-1]
    found = 0
    for i in range(1, most_outliers(count) + 1):
        rest = ordered[i:]
        deviation = max(floor, float(rest.std(ddof=1)))
        limit = critical(count, i, rate) * spread_of_one(deviation, len(rest))
        furthest = max(floor, known, float(np.abs(rest - np.median(rest)).max()))
        if tailed:
            limit = max(limit, times_further(count, i, rate) * furthest)
        elif known:
            limit = min(limit, times_further(count, i, rate) * furthest)
        if ordered[i - 1] - rest.mean() - margin > limit:
            found = i
    rest = ordered[found:]
    return Outliers(found, len(rest), float(rest.mean()), max(floor, float(rest.std(ddof=1))))


def times_further(count: int, i: int, rate: float) -> float:
    """Compute how many times further than the rest i of ``count`` values must lie if tails are Pareto's (Renyi)."""
    return max(1.0, math.pow(rate * count / i, -1.0 / (TAIL * i)))


def chance_of_median(distance: float, deviations: Floats, repetitions: int) -> float:
    """Compute how often the median of ``repetitions`` lies further than ``distance``, by resampling ``deviations``.

    It is exact: the binomial probability that half of the repetitions do. Beyond the furthest of the deviations their
    tail is continued with the exponent `TAIL`.
    """
    from scipy import stats

    beyond = int((deviations >= distance).sum())
    one = (beyond + 1) / (len(deviations) + 1)
    if not beyond:
        one *= (float(deviations.max(initial=0.0)) / distance) ** TAIL
    return float(stats.binom.sf((repetitions + 1) // 2 - 1, repetitions, one))


def most_outliers(count: int) -> int:
    """Compute how many of ``count`` values may be outliers: less than half, and enough are left."""
    return max(0, min((count - 1) // 2, count - LEAST_REST))


def spread_of_one(deviation: float, rest: int) -> float:
    """Compute the standard deviation of one more value's distance from the mean of ``rest`` values."""
    return deviation * math.sqrt(1.0 + 1.0 / rest)


@cache
def critical(count: int, i: int, rate: float) -> float:
    """Compute c_i for ``count`` values, in units of `spread_of_one`."""
    from scipy import optimize, special, stats

    rest = count - i
    if i == 1:
        return float(stats.t.isf(rate * FIRST, rest - 1))
    share = (1.0 - FIRST) / (most_outliers(count) - 1)
    allowed = math.log(rate * count * share / i) - _log_groups(count, i)  # log of the chance of one group
    weights, means, deviations = _rest(rest)

    def excess(c: float) -> float:
        beyond = special.log_ndtr(-(means + c * math.sqrt(1.0 + 1.0 / rest) * deviations))
        return float(special.logsumexp(i * beyond, b=weights)) - allowed

    high = 4.0
    while excess(high) > 0.0:
        high *= 2.0
    return float(optimize.brentq(excess, 0.0, high)) if excess(0.0) > 0.0 else 0.0


def critical_beside(rest: int, rate: float) -> float:
    """Compute the critical distance of one value from ``rest`` values that are known to be healthy (a history)."""
    from scipy import stats

    return float(stats.t.isf(rate, rest - 1))


def power(distance: float, deviation: float, rest: int, c: float) -> float:
    """Compute the power: the chance that a value ``distance`` worse than the mean of the rest is named."""
    from scipy import stats

    away = distance / spread_of_one(deviation, rest)
    chance = float(stats.nct.sf(c, rest - 1, away))
    if math.isnan(chance):  # scipy's answer where both are large: there the normal approximation is close
        chance = float(stats.norm.sf((c - away) / math.sqrt(1.0 + c * c / (2 * (rest - 1)))))
    return chance


def _log_groups(count: int, i: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1)


@cache
def _rest(rest: int) -> tuple[Floats, Floats, Floats]:
    """Make a quadrature (weights, means, standard deviations) over samples of ``rest`` standard normal values."""
    import numpy as np
    from scipy import stats

    freedom = rest - 1
    low, high = (math.log(math.sqrt(stats.chi2.ppf(p, freedom) / freedom)) for p in (1e-14, 1.0 - 1e-14))
    logs = np.linspace(low, high, _S_POINTS)
    deviation = np.exp(logs)
    density = stats.chi2.pdf(freedom * deviation**2, freedom) * 2.0 * freedom * deviation**2  # of the logarithm
    s_weights = density * (logs[1] - logs[0])
    nodes, m_weights = np.polynomial.hermite_e.hermegauss(_M_POINTS)
    weights = np.outer(s_weights / s_weights.sum(), m_weights / m_weights.sum())
    means, deviations = np.meshgrid(nodes / math.sqrt(rest), deviation)
    return weights.ravel(), means.ravel(), deviations.ravel()
