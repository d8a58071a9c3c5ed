"""Which rank is slow, from per-rank times of blocks of steps, and what it costs beyond what jitter alone would. Pure.

In synchronous training every rank logs the same step time. The slow rank is the one that waits least at the gradient
exchange, because all others wait for it. Its gap is its mean own time over the median rank's; how large a gap equal ranks
would show by luck is found by dealing the ranks' times anew within each block. K blocks, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_RANKS = 2
DEALINGS = 2000
SIGNIFICANT = 0.05
WORTH_A_NAME = 0.01  # of the step: a smaller excess is nobody's business


@dataclass(frozen=True)
class Straggling:
    """Seconds per step. ``own_s`` and ``wait_s`` are means over blocks by rank; ``p`` is that luck gives such a gap."""

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
        """The gap beyond what luck gives equal ranks; not negative."""
        return max(0.0, self.gap_s - self.luck_s)

    @property
    def waiting_s(self) -> float:
        """What the median rank waits longer than the slow one: bytes that both exchange are not in it."""
        return float(np.median(self.wait_s) - self.wait_s.min())

    @property
    def is_slow(self) -> bool:
        """True if the slow rank is no accident: it also computes longest, and its excess is significant and worth a name."""
        return (
            self.excess_s > WORTH_A_NAME * self.step_s
            and self.p < SIGNIFICANT
            and int(self.own_s.argmax()) == self.slow
        )

    @property
    def least_p(self) -> float:
        """The smallest p that so many blocks can give: each has R! orders, of which the statistic sees who is where."""
        return float(len(self.own_s) ** (1.0 - self.blocks))


def straggling(
    own_KR: NDArray[np.float64], wait_KR: NDArray[np.float64], steps_K: NDArray[np.float64]
) -> Straggling | None:
    """What the ranks of one result say, from seconds of whole blocks; None for fewer than two ranks."""
    blocks, ranks = own_KR.shape
    if ranks < LEAST_RANKS or not blocks:
        return None
    own = own_KR / steps_K[:, None]
    wait = wait_KR / steps_K[:, None]
    dealt = np.random.default_rng(0).permuted(np.broadcast_to(own, (DEALINGS, blocks, ranks)), axis=2)
    by_luck = _gap(dealt.mean(axis=1))
    gap = float(_gap(own.mean(axis=0)))
    return Straggling(
        own_s=own.mean(axis=0),
        wait_s=wait.mean(axis=0),
        step_s=float((own + wait).max(axis=1).mean()),
        blocks=blocks,
        gap_s=gap,
        luck_s=float(by_luck.mean()),
        p=float((1 + (by_luck >= gap * (1 - 1e-9)).sum()) / (1 + DEALINGS)),
    )


def _gap(mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slowest rank over the median one, ranks along the last axis."""
    return np.asarray(mean.max(axis=-1) - np.median(mean, axis=-1))
