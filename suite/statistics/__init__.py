"""Is B slower than A? One package of tests and intervals, and one vocabulary of answers: `Outcome`.

Student's t distribution is here, to 1e-9, because the base installation has no scipy.

Modules import scipy and numpy inside of functions, because `mlhpc check`, `score` and `compare` start without them.
"""

from __future__ import annotations

import math
from enum import StrEnum
from functools import lru_cache

CONFIDENCE = 0.95
LARGEST_LOG = 700.0  # exp of more is no float; logs may claim any time
# Points and weights of an integral from 0 to infinity (double exponential rule, step 1/16)
_POINTS = [(v := math.exp(s - math.exp(-s)), v * (1 + math.exp(-s)) / 16) for s in (n / 16 for n in range(-64, 81))]


def exponentiate(log: float) -> float:
    """Compute the ratio of a log. It is a positive float for any log."""
    return math.exp(max(-LARGEST_LOG, min(log, LARGEST_LOG)))


class Outcome(StrEnum):
    """The answer of every comparison of B with A, in documents and in text alike."""

    FASTER = "faster"
    SLOWER = "slower"
    EQUIVALENT = "equivalent"  # as fast within a stated margin, or equal to the last bit
    INCONCLUSIVE = "inconclusive"  # the values are too few, too noisy or too unlike to tell


def judge_interval(low: float, high: float, margin: float = 0.0) -> Outcome:
    """Judge B by the confidence interval of its time over that of A.

    B is slower if the interval begins above 1 + ``margin``. It is faster if the interval ends below 1. It is equivalent
    if the interval ends within the margin. Without a margin nothing is equivalent: an interval around 1 never shows
    that two times are equal.
    """
    most = 1.0 + margin
    if low > most:
        return Outcome.SLOWER
    if high < 1.0:
        return Outcome.FASTER
    return Outcome.EQUIVALENT if margin and high <= most else Outcome.INCONCLUSIVE


def compute_t_cdf(t: float, dof: float) -> float:
    """Compute P(T <= t) for ``dof`` degrees of freedom: where t is sqrt(dof) sinh(u), the density is cosh(u)**-dof."""
    start = math.asinh(abs(t) / math.sqrt(dof))
    log_cosh = ((weight, start + v + math.log1p(math.exp(-2 * (start + v))) - math.log(2)) for v, weight in _POINTS)
    tail = _compute_scale(dof) * sum(weight * math.exp(-dof * each) for weight, each in log_cosh)
    return 1.0 - tail if t > 0 else tail


@lru_cache(maxsize=1024)
def compute_t_quantile(p: float, dof: float) -> float:
    """Find the t with ``compute_t_cdf(t, dof) == p`` by Newton's method; p is strictly between 0 and 1."""
    if not 0.0 < p < 1.0 or dof <= 0:
        raise ValueError(f"quantile of p={p} with {dof} degrees of freedom: expected 0 < p < 1 and dof > 0")
    if p < 0.5:
        return -compute_t_quantile(1.0 - p, dof)
    t, step = 0.0, math.inf
    while step > 1e-12 * t:  # the distribution is concave here, so each step ends below the answer
        density = _compute_scale(dof) / math.sqrt(dof) * (1 + t * t / dof) ** (-(dof + 1) / 2)
        step = (p - compute_t_cdf(t, dof)) / density
        t += step
    return t


def _compute_scale(dof: float) -> float:
    return math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(math.pi)
