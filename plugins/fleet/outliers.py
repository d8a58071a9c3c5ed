"""Says at a given false-alarm rate how many of N values are outliers, and whether repetitions were late by accident.

Lateness: the measured repetitions are drawn anew.

Outliers: the i worst values are outliers if each lies above the mean of the rest by more than a limit. The largest
such i is taken, so that several bad nodes do not mask each other. There are two kinds of limit:

- Values are normal. The limit is c_i standard deviations of the rest. For i = 1 the statistic has Student's t
  distribution. For i > 1, the expected number of groups of i healthy values that pass is computed. It is the number of
  groups times an integral over mean and standard deviation of the rest. The c_i are chosen for ``rate``. In the long
  run this share of healthy values is named, `SINGLE_OUTLIER_SHARE` of it by i = 1.
- Tails are heavy, at most as those of Student's t with 3 degrees of freedom. The limit is a multiple of the distance
  of the furthest of the rest. A Pareto tail of exponent `PARETO_EXPONENT` gives the multiple for one value (Renyi). It
  is used for several values, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

Floats = NDArray[np.float64]

SINGLE_OUTLIER_SHARE = 0.95  # share of the false alarms that is left to the test of a single value
# Exponent of the heaviest tail for which a rate is promised: that of Student's t with 3 degrees of freedom.
PARETO_EXPONENT = 3.0
MIN_REST = 3  # values that must be left to compare with
MIN_FOR_SPREAD = 8  # fewer values than this do not show their own spread
MIN_SAMPLE_FOR_TAILS = 16  # fewer values than this in each sample do not show how heavy their tails are
MIN_VALUES_FOR_TAILS = 32  # fewer values than this in all samples do not, either
HEAVY_TAIL_STANDARD_ERRORS = 2.0  # standard errors above the skewness or kurtosis of normal values
_S_POINTS, _M_POINTS = 400, 16  # of the quadrature over standard deviations and means


@dataclass(frozen=True)
class HealthyTails:
    """What is known of healthy values.

    ``heavy``: tails may be Pareto's of exponent `PARETO_EXPONENT`. Otherwise values are normal. ``floor``: the least
    standard deviation. ``least``: if tails are heavy, the least distance of healthy values from the middle.
    """

    heavy: bool = False
    floor: float = 0.0
    least: float = 0.0


@dataclass(frozen=True)
class Outliers:
    """The ``count`` worst values are outliers. ``mean`` and ``deviation`` are those of the other ``rest`` values.

    ``limit``: one more value is an outlier if it lies further than this above the mean.
    """

    count: int
    rest: int
    mean: float
    deviation: float
    limit: float


def find_outliers(
    values: Floats, rate: float, *, margin: float = 0.0, tails: HealthyTails | None = None, most: int | None = None
) -> Outliers | None:
    """Find how many of the largest of N values (N,) are outliers. None if N is too small for a test.

    ``rate``: the share of healthy values that may be named wrongly. An outlier is surely further than ``margin`` from
    the mean of the rest. ``most``: the largest number of outliers; by default less than half of the values.
    """
    count = len(values)
    if count < MIN_REST + 1:
        return None
    rests = _TrimmedSamples(
        values[None], tails or HealthyTails(), rate, compute_max_outliers(count) if most is None else most
    )
    found = int(rests.count_outliers(margin)[0])
    return Outliers(
        found,
        count - found,
        float(rests.means[0, found] + rests.middle[0, 0]),
        float(rests.deviations[0, found]),
        float(rests.one_more[0, found]),
    )


def count_outliers(values: Floats, rate: float, *, margin: float = 0.0, tails: HealthyTails | None = None) -> Floats:
    """Count the outliers of many samples (samples, N) at once, as `find_outliers` does for one."""
    return _TrimmedSamples(values, tails or HealthyTails(), rate, compute_max_outliers(values.shape[1])).count_outliers(
        margin
    )


class _TrimmedSamples:
    """Samples (samples, N) without their 0, 1, 2, ... largest values: arrays (samples, how many are left out)."""

    def __init__(self, values: Floats, tails: HealthyTails, rate: float, most: int) -> None:
        self._count = values.shape[1]
        ascending = np.sort(values, axis=1)
        self.middle = (ascending[:, [(self._count - 1) // 2]] + ascending[:, [self._count // 2]]) / 2.0
        self._centred = centred = ascending - self.middle
        self._rests = rests = self._count - np.arange(min(compute_max_outliers(self._count), most) + 1)
        self.means = np.cumsum(centred, axis=1)[:, rests - 1] / rests
        squares = np.cumsum(centred**2, axis=1)[:, rests - 1] - rests * self.means**2
        self.deviations = np.maximum(tails.floor, np.sqrt(np.maximum(squares, 0.0) / (rests - 1)))
        units = np.sqrt(1.0 + 1.0 / rests) * self.deviations
        factors = _compute_factors(self._count, rate)
        # The limits of the smallest of the values left out, and those of one more value than the rest
        self._limits, self.one_more = factors[: len(rests)] * units, factors[0] * units
        if tails.heavy:
            middles = (centred[:, (rests - 1) // 2] + centred[:, rests // 2]) / 2.0
            furthest = np.maximum(centred[:, rests - 1] - middles, middles - centred[:, :1])
            self.one_more = compute_pareto_factor(self._count, rate) * np.maximum(
                furthest, max(tails.floor, tails.least)
            )
            # The rest of several outliers may lie close together by accident: there both limits hold
            self._limits[:, 2:] = np.maximum(self.one_more, self._limits)[:, 2:]
            self._limits[:, :2] = self.one_more[:, :2]

    def count_outliers(self, margin: float) -> Floats:
        """Count for each sample the most values left out that all lie beyond their limit."""
        smallest = self._centred[:, self._rests % self._count]
        apart = smallest - self.means - margin > self._limits
        apart[:, 0] = True  # none left out
        return np.asarray(apart.shape[1] - 1 - apart[:, ::-1].argmax(axis=1))


@cache
def _compute_factors(count: int, rate: float) -> Floats:
    """Compute c_i for i = 1, 1, 2, 3, ... outliers: the first one is for no outlier and one more value."""
    return np.array([compute_critical_value(count, max(1, i), rate) for i in range(compute_max_outliers(count) + 1)])


def compute_pareto_factor(count: int, rate: float) -> float:
    """Compute how many times further than the rest a value must lie if tails are Pareto's (Renyi)."""
    return max(1.0, math.pow(rate * count, -1.0 / PARETO_EXPONENT))


def has_heavy_tails(groups: Iterable[Floats]) -> bool:
    """Return True if values have heavier tails than normal. Each group has its own level and spread.

    The skewness and kurtosis of all groups are compared with their exact moments for normal values.
    Fewer than `MIN_VALUES_FOR_TAILS` values cannot show that tails are not heavy.
    """
    skewness = kurtosis = variance3 = variance4 = 0.0
    values = 0
    for group in groups:
        n = len(group)
        centred = group - group.mean()
        second = float(np.mean(centred**2))
        if n < MIN_FOR_SPREAD or not second:
            continue
        values += n
        skewness += float(np.mean(centred**3)) / second**1.5
        kurtosis += float(np.mean(centred**4)) / second**2 - 3.0 * (n - 1) / (n + 1)
        variance3 += 6.0 * (n - 2) / ((n + 1) * (n + 3))
        variance4 += 24.0 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    is_heavier = skewness > HEAVY_TAIL_STANDARD_ERRORS * math.sqrt(
        variance3
    ) or kurtosis > HEAVY_TAIL_STANDARD_ERRORS * math.sqrt(variance4)
    return values < MIN_VALUES_FOR_TAILS or is_heavier


def compute_max_outliers(count: int) -> int:
    """Compute how many of ``count`` values may be outliers: less than half, and enough are left."""
    return max(0, min((count - 1) // 2, count - MIN_REST))


def compute_prediction_std(deviation: float, rest: int) -> float:
    """Compute the standard deviation of one more value's distance from the mean of ``rest`` values."""
    return deviation * math.sqrt(1.0 + 1.0 / rest)


@cache
def compute_critical_value(count: int, i: int, rate: float) -> float:
    """Compute c_i for ``count`` values, in units of `compute_prediction_std`."""
    rest = count - i
    if i == 1:
        return float(stats.t.isf(_compute_alarm_share(count, 1, rate), rest - 1))
    allowed = math.log(_compute_alarm_share(count, i, rate) * count / i) - _compute_log_groups(
        count, i
    )  # log of the chance of one group
    weights, means, deviations = _make_quadrature(rest)

    def excess(c: float) -> float:
        beyond = special.log_ndtr(-(means + c * math.sqrt(1.0 + 1.0 / rest) * deviations))
        return float(special.logsumexp(i * beyond, b=weights)) - allowed

    high = 4.0
    while excess(high) > 0.0:
        high *= 2.0
    return float(optimize.brentq(excess, 0.0, high)) if excess(0.0) > 0.0 else 0.0


def _compute_alarm_share(count: int, i: int, rate: float) -> float:
    """Compute the share of the false alarms that groups of i outliers may cause."""
    return (
        rate * SINGLE_OUTLIER_SHARE
        if i == 1
        else rate * (1.0 - SINGLE_OUTLIER_SHARE) / (compute_max_outliers(count) - 1)
    )


def _compute_log_groups(count: int, i: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1)


@cache
def _make_quadrature(rest: int) -> tuple[Floats, Floats, Floats]:
    """Make a quadrature (weights, means, standard deviations) over samples of ``rest`` standard normal values."""
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


class DelayDistribution:
    """How late repetitions are: in logarithms, or in units of their spread."""

    def __init__(self, seen: Floats, *, extrapolated: bool) -> None:
        """Take the measured repetitions. ``extrapolated``: assume a Pareto tail of exponent `PARETO_EXPONENT`.

        Otherwise the chance of a repetition later than all N is 1 in (N + 1), however much later.
        """
        self._latest = np.sort(seen)[::-1]
        self._extrapolated = extrapolated
        self._limits: dict[tuple[int, float], Floats] = {}

    def probability(self, distance: float) -> float:
        """Compute the probability of a repetition later than a distance."""
        count = len(self._latest)
        beyond = count - int(self._latest[::-1].searchsorted(distance, "right"))
        if beyond or not self._extrapolated:
            return (beyond + 1) / (count + 1)
        return float(self._latest[0] / distance) ** PARETO_EXPONENT / (count + 1) if distance else 1.0

    def limits(self, repetitions: int, rate: float) -> Floats:
        """Compute how late the fastest, the second, ... repetition up to the median must be to be no accident.

        The probability that one of ``repetitions`` is later than its limit is at most ``rate`` over all limits.
        """
        key = repetitions, rate
        if key not in self._limits:
            self._limits[key] = self._find_limits(repetitions, rate)
        return self._limits[key]

    def _find_limits(self, repetitions: int, rate: float) -> Floats:
        allowed = _compute_allowed_rates(repetitions, rate) * (len(self._latest) + 1)
        seen = self._latest[np.clip(allowed.astype(int) - 1, 0, len(self._latest) - 1)]
        beyond = self._latest[0] * np.maximum(allowed, 1e-300) ** (-1.0 / PARETO_EXPONENT)
        if not self._extrapolated and allowed.max() >= 1.0:  # fewer repetitions show nothing without an assumption
            beyond = np.full(len(allowed), math.inf)
        return np.asarray(np.where(allowed >= 1.0, seen, beyond))


def compute_late_median_chance(late: float, repetitions: int) -> float:
    """Compute the probability that the (lower) median of repetitions is late. ``late`` is that of one repetition."""
    middle = (repetitions + 1) // 2
    return float(special.betainc(repetitions - middle + 1, middle, late))


@cache
def _compute_allowed_rates(repetitions: int, rate: float) -> Floats:
    """Compute how often one repetition may be late, for each j up to the median.

    Each j has an equal part of ``rate``. That is the probability that all but j - 1 of the repetitions are late. The
    binomial distribution is exact.
    """
    most = (repetitions + 1) // 2
    fastest = np.arange(1, most + 1)
    return np.asarray(special.betaincinv(repetitions - fastest + 1, fastest, rate / most))
