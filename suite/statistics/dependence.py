"""Estimates how much results of a series depend on each other. Simulates such results without a change.

The model is an autoregressive process of order 1. The noise of a result correlates with that of the result before.
`find_largest_correlation` gives the largest correlation that a series does not refute. `estimate_null_p` gives how
often a series of such results looks as much like a change. Both simulate, with normal noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[Any]  # a series in each row

SHORTEST_LEVEL = 2  # fewest results on each side of a change: a single one may be an outlier
# At more, a change needs many more results than histories have.
LARGEST_CORRELATION = 0.7
CORRELATION_GRID = tuple(step / 10 for step in range(8))  # correlations that are tried, up to `LARGEST_CORRELATION`
REFUTATION_LEVEL = 0.05  # a correlation is refuted if so few series with it look as independent
CLIP = 10.0  # units of noise that one result weighs at most
CLIP_REST = 3.0  # the same once changes are removed: an outlier would hide that neighbours correlate
MIN_LEVEL_RESULTS = 10  # a level: what changes more often, on average, counts as noise
CORRELATION_DRAWS = 200  # series for `find_largest_correlation`
NORMAL_DIFFERENCE = 2.0 / math.sqrt(math.pi)  # mean distance of two normal values, in units of their deviation
ROUNDING = 1e-11  # a spread of logs below this is that of equal numbers
SEED = 20260901  # the same series always gets the same answer

Statistic = Callable[["Rows"], "Rows"]


def compute_contrast(rows: Rows) -> Rows:
    """Compute for each place the sum of the scores before it, squared and over its variance. Scores have mean zero.

    The first column is place `SHORTEST_LEVEL`.
    """
    import numpy as np

    count = rows.shape[1]
    before = np.arange(SHORTEST_LEVEL, count - SHORTEST_LEVEL + 1)
    sums = np.cumsum(rows, axis=1)[:, SHORTEST_LEVEL - 1 : count - SHORTEST_LEVEL]
    found: Rows = sums * sums / (before * (count - before))
    return found


def compute_noise_scores(rows: Rows) -> Rows:
    """Compute clipped distances from the median in units of the noise. Rows are log values; results have mean zero.

    The noise is that between neighbours. A change adds only one such difference. Noise may grow or shrink in time.
    """
    import numpy as np

    steps = np.abs(np.diff(rows, axis=1))
    usual = np.median(steps, axis=1, keepdims=True)
    usual = np.where(usual > ROUNDING, usual, steps.mean(axis=1, keepdims=True))
    steps = np.minimum(steps, 4.5 * usual)  # three deviations: neither an outlier nor a change is noise
    mean = steps.mean(axis=1, keepdims=True)
    count = rows.shape[1]
    times = np.arange(count - 1) - (count - 2) / 2
    slope = (steps @ times)[:, None] / (times @ times)
    unit = np.maximum(mean + slope * (np.arange(count) - (count - 1) / 2), mean / 3) / NORMAL_DIFFERENCE
    unit = np.where(unit > ROUNDING, unit, np.inf)
    found: Rows = np.clip((rows - np.median(rows, axis=1, keepdims=True)) / unit, -CLIP, CLIP)
    found -= found.mean(axis=1, keepdims=True)
    return found


def make_correlated_noise(draws: int, count: int, correlation: float) -> Rows:
    """Draw rows of standard normal values, each correlated with the one before it. The same call draws the same."""
    import numpy as np

    results = np.random.default_rng(SEED).standard_normal((count, draws))
    fresh = math.sqrt(1.0 - correlation**2)
    for before, result in itertools.pairwise(results):
        result *= fresh
        result += correlation * before
    return np.ascontiguousarray(results.T)


def find_largest_correlation(logs: Rows, changes: int) -> float:
    """Find the largest correlation in `CORRELATION_GRID` that a series of log values does not refute.

    Up to ``changes`` changes are removed from the series, and as many from each simulated series.
    """
    removed = min(changes, max(1, len(logs) // MIN_LEVEL_RESULTS))
    seen = _compute_correlation(compute_noise_scores(logs[None])[0], removed)
    held, refuted = 0, len(CORRELATION_GRID)  # indices of correlations; a larger one is refuted if a smaller one is
    while refuted - held > 1:
        middle = (held + refuted) // 2
        drawn = _draw_correlations(len(logs), removed, CORRELATION_GRID[middle])
        if sum(each <= seen for each in drawn) < REFUTATION_LEVEL * len(drawn):
            refuted = middle
        else:
            held = middle
    return CORRELATION_GRID[held]


@lru_cache(maxsize=256)
def _draw_correlations(count: int, removed: int, correlation: float) -> tuple[float, ...]:
    rows = compute_noise_scores(make_correlated_noise(CORRELATION_DRAWS, count, correlation))
    return tuple(_compute_correlation(row, removed) for row in rows)


def _compute_correlation(scored: Rows, removed: int) -> float:
    """Compute the correlation of neighbours once the largest changes, one after the other, are removed."""
    places = [0, len(scored)]
    for _ in range(removed):
        best = (0.0, 0)
        for begin, end in itertools.pairwise(places):
            if end - begin >= 2 * SHORTEST_LEVEL:
                part = scored[begin:end]
                gains = compute_contrast((part - part.mean())[None])[0] * len(part)
                best = max(best, (float(gains.max()), begin + SHORTEST_LEVEL + int(gains.argmax())))
        if best[0] > 0.0:
            places = sorted([*places, best[1]])
    rest = scored.copy()
    for begin, end in itertools.pairwise(places):
        rest[begin:end] -= rest[begin:end].mean()
    rest = rest.clip(-CLIP_REST, CLIP_REST)
    power = float(rest @ rest)
    return float(rest[1:] @ rest[:-1]) / power if power > 0.0 else 0.0


def estimate_null_p(statistic: Statistic, logs: Rows, correlation: float, draws: int) -> float:
    """Compute how often results with this correlation and without a change have a statistic as large."""
    seen = float(statistic(compute_noise_scores(logs[None]))[0])
    drawn = _draw_statistics(statistic, len(logs), correlation, draws)
    return (int((drawn >= seen * (1.0 - 1e-9)).sum()) + 1) / (draws + 1)


@lru_cache(maxsize=512)
def _draw_statistics(statistic: Statistic, count: int, correlation: float, draws: int) -> Rows:
    return statistic(compute_noise_scores(make_correlated_noise(draws, count, correlation)))


def compute_variance_factor(count: int, correlation: float) -> float:
    """Compute the variance of the mean of ``count`` correlated results over that of independent ones."""
    return 1.0 + 2.0 * math.fsum((1.0 - lag / count) * correlation**lag for lag in range(1, count))
