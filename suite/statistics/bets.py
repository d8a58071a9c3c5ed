"""Evidence from wins and losses that may be checked after every block: a test by betting.

The hypothesis is "this entry is the best". A wealth of 1 is bet against it, block after block, on "a named rival is
faster". If the entry is the best, the wealth does not grow on average. Then the chance that it ever reaches w is at
most 1/w (Ville, 1939). This holds for any number of blocks and any distribution of times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

# (stake, part): each part of the initial wealth bets this share of itself. A large stake is fast if an entry loses
# every block, a small one survives an entry that loses 6 of 10. The parts sum to 1.
STAKES = ((1.0, 0.4), (0.9, 0.15), (0.8, 0.1), (0.6, 0.15), (0.4, 0.1), (0.2, 0.1))
INTERVAL_ALPHA = 0.05  # chance that the interval of a median ratio misses it


@dataclass
class BettingTest:
    """The wealth that is bet against one entry, part by part of `STAKES`."""

    parts: list[float] = field(default_factory=lambda: [part for _, part in STAKES])

    @property
    def wealth(self) -> float:
        """The evidence against the entry; 1 at the beginning."""
        return math.fsum(self.parts)

    def settle(self, lost: float) -> None:
        """Settle the bets of a block.

        ``lost`` is 1 if the entry lost, -1 if it won. A mean over rivals lies in between.
        """
        self.parts = [part * (1.0 + stake * lost) for (stake, _), part in zip(STAKES, self.parts, strict=True)]


def compute_sign(mine: float, its: float) -> int:
    """Return 1 if I was slower, -1 if I was faster, 0 for a tie. Two runs that did not finish (infinite) tie."""
    return (mine > its) - (mine < its)


def compute_e_value(lost: int, won: int) -> float:
    """Compute the wealth after blocks ``lost`` to and ``won`` against one rival that was named beforehand."""
    return math.fsum(part * (1.0 + stake) ** lost * (1.0 - stake) ** won for stake, part in STAKES)


@dataclass(frozen=True)
class MedianRatio:
    """The median ratio of two entries' times, and its 95 % interval. None: infinite, or no bound yet."""

    value: float | None
    low: float | None
    high: float | None
    blocks: int


def compute_median_ratio(pairs: Sequence[tuple[float, float]]) -> MedianRatio | None:
    """Compute my time over its time from pairs of times.

    A run that did not finish is infinite. None without a ratio.
    """
    ratios = sorted(mine / its if math.isfinite(its) else 0.0 for mine, its in pairs if math.isfinite(min(mine, its)))
    if not ratios:
        return None
    count = len(ratios)
    cut = 0  # the number of ratios at each end that lie outside of the interval
    while cut < count and compute_e_value(count - cut, cut) >= 2.0 / INTERVAL_ALPHA:
        cut += 1
    low, high = (ratios[cut - 1], ratios[count - cut]) if 0 < cut <= (count + 1) // 2 else (0.0, math.inf)
    bounded = high if math.isfinite(high) else None
    middle = statistics.median(ratios)
    return MedianRatio(middle if math.isfinite(middle) else None, low or None, bounded, count)
