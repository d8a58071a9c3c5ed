"""Finds the slow rank from times of blocks of steps per rank, and its cost beyond chance. Pure functions.

In synchronous training every rank logs the same step time. The slow rank waits least at the gradient exchange, because
all others wait for it. Its gap is its mean own time minus that of the median rank.

Equal ranks have a gap too: by noise, and by noise that lasts, which makes one of them slow for many blocks. So the gap
is compared with that of simulated equal ranks. Their noise is as large, and each block's correlates with that of the
block before as much as the times do not refute, at most 0.95. Ranks that share noise count as fewer. What slows a rank
for as long as the run looks the same as a slow rank: it was slow in this run.

N simulated runs, K blocks, R ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.statistics.power import find_smallest_effect

MIN_RANKS = 2  # one rank waits for nobody
MIN_BLOCKS = 3  # fewer say nothing of how long noise lasts
MOST_BLOCKS = 30  # more are averaged in stretches, which makes simulations cheap
DRAWS = 1000  # simulated runs for each correlation
POWER_DRAWS = 200
SIGNIFICANCE_LEVEL = 0.05
# Of the step's time: a smaller excess is not worth a look at a node, however significant.
MIN_EXCESS_SHARE = 0.01
# Correlations of neighbouring blocks that are simulated
CORRELATIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
LIKELY = 0.5  # the share for the most likely one: of two estimates the larger is taken
REFUTED = 0.1  # a correlation is refuted if so few simulated runs look as independent
CLEARLY_SLOW = 5.0  # deviations of the noise: a block in which a rank was slow beyond doubt

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StragglerTest:
    """Seconds per step; ``own_s`` and ``wait_s`` are means over blocks, by rank.

    ``luck_s`` is the mean gap of simulated equal ranks. ``p`` is the share of them with a gap at least as large.
    ``noise_s`` is the spread of blocks of a rank. ``correlation`` is the largest one of neighbouring blocks that times
    do not refute, ``likely`` the most likely one. ``slow_blocks`` are those in which the slow rank was slow beyond doubt.
    """

    own_s: Floats
    wait_s: Floats
    step_s: float
    blocks: int
    gap_s: float
    luck_s: float
    p: float
    noise_s: float
    correlation: float
    likely: float
    slow_blocks: tuple[int, ...]

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
        """True if the rank that waits least computes longest, significantly and by over `MIN_EXCESS_SHARE`."""
        return (
            self.excess_s > MIN_EXCESS_SHARE * self.step_s
            and self.p < SIGNIFICANCE_LEVEL
            and int(self.own_s.argmax()) == self.slow
        )

    def find_visible_share(self) -> float | None:
        """Find the smallest slowness, as a part of the step, that is found in 8 of 10 such runs. None: not even 3."""
        if self.blocks < MIN_BLOCKS:
            return None
        count, ranks = min(self.blocks, MOST_BLOCKS), len(self.own_s)
        noise = _draw_noise(POWER_DRAWS, count, ranks, self.likely, 1)
        noise *= self.noise_s / self.step_s / _measure(noise)[2].mean()

        def find_share(effect: float) -> float:
            slow = noise.copy()
            slow[:, :, 0] += effect
            gap, luck, p, *_ = _judge(slow)
            found = (gap - luck > MIN_EXCESS_SHARE) & (p < SIGNIFICANCE_LEVEL) & (slow.mean(axis=1).argmax(axis=1) == 0)
            return float(found.mean())

        return find_smallest_effect(find_share, 3.0)


def find_straggler(own_KR: Floats, wait_KR: Floats, steps_K: Floats) -> StragglerTest | None:
    """Test the ranks of one result, from seconds and numbers of steps of its blocks. None for fewer than two ranks."""
    blocks, ranks = own_KR.shape
    if ranks < MIN_RANKS or not blocks:
        return None
    own = own_KR / steps_K[:, None]
    wait = wait_KR / steps_K[:, None]
    step_s = float((own + wait).max(axis=1).mean())
    gap, luck, p, noise, correlation, likely = (
        (float(each[0]) for each in _judge(_average_stretches(own)[None]))
        if blocks >= MIN_BLOCKS
        else (float(np.ptp(own.mean(axis=0))), 0.0, 1.0, 0.0, 1.0, 1.0)
    )
    apart = own - np.median(own, axis=1, keepdims=True)
    usual = max(CLEARLY_SLOW * 1.4826 * float(np.median(np.abs(apart))), MIN_EXCESS_SHARE * step_s)
    return StragglerTest(
        own_s=own.mean(axis=0),
        wait_s=wait.mean(axis=0),
        step_s=step_s,
        blocks=blocks,
        gap_s=gap,
        luck_s=luck,
        p=p,
        noise_s=noise,
        correlation=correlation,
        likely=likely,
        slow_blocks=tuple((np.flatnonzero(apart[:, wait.mean(axis=0).argmin()] > usual) + 1).tolist()),
    )


def _average_stretches(own: Floats) -> Floats:
    """Average neighbouring blocks, so that at most `MOST_BLOCKS` are left."""
    cuts = np.linspace(0, len(own), min(len(own), MOST_BLOCKS) + 1).astype(int)
    return np.asarray(np.add.reduceat(own, cuts[:-1], axis=0) / np.diff(cuts)[:, None])


def _judge(own_NKR: Floats) -> tuple[Floats, ...]:
    """Return by run: gap, gap by luck, p, spread of blocks, and the largest and the likely correlation."""
    _, blocks, ranks = own_NKR.shape
    gap, spread, usual, alike, *memory = _measure(own_NKR)
    ratio = gap / np.maximum(spread, 1e-12 * gap + 1e-300)
    largest, likely = (np.zeros(len(gap), dtype=int) for _ in range(2))
    for count in np.unique(alike):
        here = alike == count
        for place, seen in enumerate(memory):
            for held, share in ((largest, REFUTED), (likely, LIKELY)):
                least = _find_quantiles(blocks, int(count), place, share)
                held[here] = np.maximum(held[here], np.searchsorted(least, seen[here], side="right") - 1)
    by_luck = [_draw_ratios(blocks, ranks, place) for place in range(len(CORRELATIONS))]
    # The 1s count the times as measured, so that p is never 0
    p = [
        (1 + DRAWS - np.searchsorted(by_luck[at], r * (1 - 1e-9))) / (1 + DRAWS)
        for at, r in zip(largest, ratio, strict=True)
    ]
    luck = np.array([by_luck[at].mean() for at in largest]) * spread
    grid = np.array(CORRELATIONS)
    return gap, luck, np.array(p), usual, grid[largest], grid[likely]


def _measure(own_NKR: Floats) -> tuple[Floats, ...]:
    """Return by run: gap, spread, usual spread, ranks that count, correlation of neighbours, and that of longer lags.

    The spread is the usual one, over all ranks, or that of the slowest rank if it is larger.
    """
    blocks, ranks = own_NKR.shape[1:]
    apart = own_NKR - np.median(own_NKR, axis=2, keepdims=True)
    mean = apart.mean(axis=1)
    rest = apart - mean[:, None]
    power = np.einsum("nkr,nkr->nr", rest, rest)
    slowest = np.take_along_axis(power, mean.argmax(axis=1)[:, None], axis=1)[:, 0]
    usual, own = np.sqrt(power.mean(axis=1) / (blocks - 1)), np.sqrt(slowest / (blocks - 1))
    whole = np.maximum(power.sum(axis=1), 1e-300)
    lags = range(1, max(1, blocks // 4) + 1)
    shared = [np.einsum("nkr,nkr->n", rest[:, lag:], rest[:, :-lag]) / whole for lag in lags]
    products = np.einsum("nkr,nks->nrs", rest, rest)
    alike = np.clip(np.round(whole**2 / np.maximum((products**2).sum(axis=(1, 2)), 1e-300)), MIN_RANKS, ranks)
    gap = mean.max(axis=1) - np.median(mean, axis=1)
    return gap, np.maximum(usual, own), usual, alike, shared[0], np.sum(shared, axis=0)


def _draw_noise(draws: int, blocks: int, ranks: int, correlation: float, seed: int) -> Floats:
    """Draw noise of equal ranks. A fixed seed: the same log gives the same verdict."""
    noise = np.random.default_rng(seed).standard_normal((draws, blocks, ranks))
    for block in range(1, blocks):
        noise[:, block] *= math.sqrt(1.0 - correlation**2)
        noise[:, block] += correlation * noise[:, block - 1]
    return noise


@lru_cache(maxsize=1024)
def _simulate(blocks: int, ranks: int, place: int) -> tuple[Floats, ...]:
    return _measure(_draw_noise(DRAWS, blocks, ranks, CORRELATIONS[place], 0))


@lru_cache(maxsize=1024)
def _draw_ratios(blocks: int, ranks: int, place: int) -> Floats:
    """Draw gaps of equal ranks in units of the spread, in order."""
    gap, spread, *_ = _simulate(blocks, ranks, place)
    return np.sort(gap / spread)


@lru_cache(maxsize=1024)
def _find_quantiles(blocks: int, ranks: int, which: int, share: float) -> Floats:
    """Find for each correlation the value that this share of its simulated runs lies below."""
    drawn = [_simulate(blocks, ranks, place)[4 + which] for place in range(len(CORRELATIONS))]
    return np.maximum.accumulate([np.quantile(each, share) for each in drawn])
