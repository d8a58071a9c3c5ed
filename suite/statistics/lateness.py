"""Judges whether a node is slow or its repetitions were late by accident. It draws the measured repetitions anew."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from mlhpc.suite.statistics.outliers import PARETO_EXPONENT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


class DelayDistribution:
    """How late repetitions are: in logarithms, or in units of their spread."""

    def __init__(self, seen: Floats, *, extrapolated: bool) -> None:
        """Take the measured repetitions. ``extrapolated``: assume a Pareto tail of exponent `PARETO_EXPONENT`.

        Otherwise the chance of a repetition later than all N is 1 in (N + 1), however much later.
        """
        import numpy as np

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
        import numpy as np

        allowed = _compute_allowed_rates(repetitions, rate) * (len(self._latest) + 1)
        seen = self._latest[np.clip(allowed.astype(int) - 1, 0, len(self._latest) - 1)]
        beyond = self._latest[0] * np.maximum(allowed, 1e-300) ** (-1.0 / PARETO_EXPONENT)
        if not self._extrapolated and allowed.max() >= 1.0:  # fewer repetitions show nothing without an assumption
            beyond = np.full(len(allowed), math.inf)
        return np.asarray(np.where(allowed >= 1.0, seen, beyond))


def compute_late_median_chance(late: float, repetitions: int) -> float:
    """Compute the probability that the (lower) median of repetitions is late. ``late`` is that of one repetition."""
    from scipy import special

    middle = (repetitions + 1) // 2
    return float(special.betainc(repetitions - middle + 1, middle, late))


@cache
def _compute_allowed_rates(repetitions: int, rate: float) -> Floats:
    """Compute how often one repetition may be late, for each j up to the median.

    Each j has an equal part of ``rate``. That is the probability that all but j - 1 of the repetitions are late. The
    binomial distribution is exact.
    """
    import numpy as np
    from scipy import special

    most = (repetitions + 1) // 2
    fastest = np.arange(1, most + 1)
    return np.asarray(special.betaincinv(repetitions - fastest + 1, fastest, rate / most))
