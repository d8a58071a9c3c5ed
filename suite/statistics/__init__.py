"""Is B slower than A? One package of tests and intervals, and one vocabulary of answers: `Outcome`.

Modules import scipy and numpy inside of functions, because `mlhpc check`, `score` and `compare` start without them.
"""

from __future__ import annotations

import math
from enum import StrEnum

CONFIDENCE = 0.95
LARGEST_LOG = 700.0  # exp of more is no float; logs may claim any time


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
