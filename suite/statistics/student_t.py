"""Student's t distribution, to 1e-9. The base installation has no scipy, which has it too."""

from __future__ import annotations

import math
from functools import lru_cache

# Points and weights of an integral from 0 to infinity (double exponential rule, step 1/16)
_POINTS = [(v := math.exp(s - math.exp(-s)), v * (1 + math.exp(-s)) / 16) for s in (n / 16 for n in range(-64, 81))]


def compute_cdf(t: float, dof: float) -> float:
    """Compute P(T <= t) for ``dof`` degrees of freedom: where t is sqrt(dof) sinh(u), the density is cosh(u)**-dof."""
    start = math.asinh(abs(t) / math.sqrt(dof))
    log_cosh = ((weight, start + v + math.log1p(math.exp(-2 * (start + v))) - math.log(2)) for v, weight in _POINTS)
    tail = _compute_scale(dof) * sum(weight * math.exp(-dof * each) for weight, each in log_cosh)
    return 1.0 - tail if t > 0 else tail


@lru_cache(maxsize=1024)
def compute_quantile(p: float, dof: float) -> float:
    """Find the t with ``compute_cdf(t, dof) == p`` by Newton's method; p is strictly between 0 and 1."""
    if not 0.0 < p < 1.0 or dof <= 0:
        raise ValueError(f"quantile of p={p} with {dof} degrees of freedom: expected 0 < p < 1 and dof > 0")
    if p < 0.5:
        return -compute_quantile(1.0 - p, dof)
    t, step = 0.0, math.inf
    while step > 1e-12 * t:  # the distribution is concave here, so each step ends below the answer
        density = _compute_scale(dof) / math.sqrt(dof) * (1 + t * t / dof) ** (-(dof + 1) / 2)
        step = (p - compute_cdf(t, dof)) / density
        t += step
    return t


def _compute_scale(dof: float) -> float:
    return math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(math.pi)
