"""Finds the slow rank from times of blocks of steps per rank, and its cost beyond chance. Pure functions.

In synchronous training every rank logs the same step time. The slow rank waits least at the gradient exchange, because
all others wait for it. Its gap is its mean own time minus that of the median rank. A permutation test gives the gap
that equal ranks show by chance. It deals the times of each block to the ranks at random.

K blocks, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_RANKS = 2  # one rank waits for nobody
# With 2,000 permutations, a p value of 0.05 is known to about 0.005 (one standard error).
PERMUTATIONS = 2000
SIGNIFICANCE_LEVEL = 0.05
# Of the step's time: a smaller excess is not worth a look at a node, however significant.
MIN_EXCESS_SHARE = 0.01


@dataclass(frozen=True)
class StragglerTest:
    """Seconds per step; ``own_s`` and ``wait_s`` are means over blocks, by rank.

    ``luck_s`` is the mean gap of the permutations. ``p`` is the share of them with a gap at least as large.
    """

    own_s: NDArray[np.float64]
    wait_s: NDArray[np.float64]
    step_s: float
    blocks: int
    gap_s: float
    luck_s: float
    p: float

    @property
    def slow(self) -> int:
        """The rank that waits least."""
        return int(self.wait_s.argmin())

    @property
    def excess_s(self) -> float:
        """The part of the gap that exceeds the gap by chance; 0 if it does not."""
        return max(0.0, self.gap_s - self.luck_s)

    @property
    def waiting_s(self) -> float:
        """Waiting time of the median rank minus the slow one's. The exchange itself cancels."""
        return float(np.median(self.wait_s) - self.wait_s.min())

    @property
    def is_slow(self) -> bool:
        """True if the rank that waits least also computes longest, significantly and by more than `MIN_EXCESS_SHARE`."""
        return (
            self.excess_s > MIN_EXCESS_SHARE * self.step_s
            and self.p < SIGNIFICANCE_LEVEL
            and int(self.own_s.argmax()) == self.slow
        )

    @property
    def least_p(self) -> float:
        """The smallest possible p: by chance one rank is the slowest in every block."""
        return float(len(self.own_s) ** (1.0 - self.blocks))


def find_straggler(
    own_KR: NDArray[np.float64], wait_KR: NDArray[np.float64], steps_K: NDArray[np.float64]
) -> StragglerTest | None:
    """Test the ranks of one result, from seconds and numbers of steps of its blocks. None for fewer than two ranks."""
    blocks, ranks = own_KR.shape
    if ranks < MIN_RANKS or not blocks:
        return None
    own = own_KR / steps_K[:, None]
    wait = wait_KR / steps_K[:, None]
    # A fixed seed: the same log gives the same verdict.
    dealt = np.random.default_rng(0).permuted(np.broadcast_to(own, (PERMUTATIONS, blocks, ranks)), axis=2)
    by_luck = _compute_gap(dealt.mean(axis=1))
    gap = float(_compute_gap(own.mean(axis=0)))
    return StragglerTest(
        own_s=own.mean(axis=0),
        wait_s=wait.mean(axis=0),
        step_s=float((own + wait).max(axis=1).mean()),
        blocks=blocks,
        gap_s=gap,
        luck_s=float(by_luck.mean()),
        # The 1s count the times as measured, so that p is never 0
        p=float((1 + (by_luck >= gap * (1 - 1e-9)).sum()) / (1 + PERMUTATIONS)),
    )


def _compute_gap(mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the slowest rank's time minus the median rank's, ranks along the last axis."""
    return np.asarray(mean.max(axis=-1) - np.median(mean, axis=-1))
