"""Which rank is slow, from per-rank compute and wait times, and what it costs beyond what jitter alone would. Pure.

In synchronous training every rank logs the same step time. The slow rank is the one that waits least at the gradient
exchange, because all others wait for it. Healthy ranks wait too: with jitter s of a step's computation, the last of R ranks
is e_R s behind the mean, e_R the expected maximum of R standard normals; only what exceeds that has a culprit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

LEAST_RANKS = 2
SIGNIFICANT = 0.01  # of the step: a smaller excess is not worth a name


@dataclass(frozen=True)
class RankTimes:
    """Mean seconds per training step of one rank. ``jitter_s`` is the standard deviation of ``compute_s`` over steps."""

    rank: int
    host: str
    compute_s: float
    wait_s: float
    jitter_s: float
    steps: int


@dataclass(frozen=True)
class Straggling:
    """All ranks of one run. Shares are of ``step_s``; ``gap_s`` is the slowest rank's mean computation over the median's."""

    ranks: tuple[RankTimes, ...]
    step_s: float
    slow: RankTimes
    gap_s: float
    expected_gap_s: float
    jitter_tax_s: float

    @property
    def excess_s(self) -> float:
        """The slow rank's gap beyond what unequal luck of equal ranks would give, seconds per step; not negative."""
        return max(0.0, self.gap_s - self.expected_gap_s)

    @property
    def is_slow(self) -> bool:
        """True if the excess is worth a name: 1 % of the step, and the rank that waits least also computes longest."""
        longest = max(self.ranks, key=lambda times: times.compute_s)
        return self.excess_s > SIGNIFICANT * self.step_s and longest.rank == self.slow.rank


def straggling(ranks: Sequence[RankTimes], step_s: float) -> Straggling | None:
    """What the ranks of one run say; None for fewer than two."""
    if len(ranks) < LEAST_RANKS:
        return None
    computing = [times.compute_s for times in ranks]
    jitter = math.sqrt(statistics.fmean(times.jitter_s**2 for times in ranks))
    steps = statistics.fmean(times.steps for times in ranks)
    behind = largest_of(len(ranks)) * jitter
    return Straggling(
        ranks=tuple(ranks),
        step_s=step_s,
        slow=min(ranks, key=lambda times: times.wait_s),
        gap_s=max(computing) - statistics.median(computing),
        expected_gap_s=behind / math.sqrt(max(1.0, steps)),
        jitter_tax_s=behind,
    )


@cache
def largest_of(count: int) -> float:
    """Expected maximum of ``count`` standard normal numbers: 0.564 of 2, 1.77 of 16."""
    width, half = 0.01, 900
    points = [width * step for step in range(-half, half + 1)]
    below = [0.5 * (1 + math.erf(x / math.sqrt(2))) for x in points]
    # E[max] = integral of (1 - F^n) over x > 0 minus that of F^n over x < 0
    return width * sum(
        (1 - f**count) if x > 0 else -(f**count) if x < 0 else 0.5 - f**count
        for x, f in zip(points, below, strict=True)
    )
