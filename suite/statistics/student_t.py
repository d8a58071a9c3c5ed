"""Student's t distribution, to 1e-9.

The base installation has no scipy, which has this function too.
"""

from __future__ import annotations

import math
from functools import lru_cache


def compute_cdf(t: float, dof: float) -> float:
    """Compute P(T <= t) for ``dof`` degrees of freedom."""
    tail = 0.5 * _compute_incomplete_beta(dof / 2.0, 0.5, dof / (dof + t * t))
    return 1.0 - tail if t > 0 else tail


@lru_cache(maxsize=1024)
def compute_quantile(p: float, dof: float) -> float:
    """Find the t with ``compute_cdf(t, dof) == p`` by bisection; p is strictly between 0 and 1."""
    if not 0.0 < p < 1.0 or dof <= 0:
        raise ValueError(f"quantile of p={p} with {dof} degrees of freedom: expected 0 < p < 1 and dof > 0")
    if p < 0.5:
        return -compute_quantile(1.0 - p, dof)
    low, high = 0.0, 1.0
    while compute_cdf(high, dof) < p:
        high *= 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if compute_cdf(middle, dof) < p else (low, middle)
    return 0.5 * (low + high)


def _compute_incomplete_beta(a: float, b: float, x: float) -> float:
    """Compute the regularised incomplete beta function by Lentz's continued fraction (Numerical Recipes, 3rd ed.)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):  # there the fraction converges slowly: use the symmetry
        return 1.0 - _compute_incomplete_beta(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1.0 / _keep_from_zero(1.0 - (a + b) * x / (a + 1.0), tiny)
    fraction = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _keep_from_zero(1.0 + term * d, tiny)
            c = _keep_from_zero(1.0 + term / c, tiny)
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * fraction / a


def _keep_from_zero(value: float, tiny: float) -> float:
    """Keep a denominator away from zero."""
    return value if abs(value) > tiny else tiny
