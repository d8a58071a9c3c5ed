"""Says how often a series of results without a change looks as if it had one, although results depend on each other.

Each statistic is the share of the squares of a series that a step, a part in the middle or a line explains. Three kinds
of series without a change show how large it gets: the results in random order, an autoregressive process of order 1
whose neighbours correlate as much as the series allows, and the series itself without what was found, resampled in
blocks. The first holds for every law of independent results. The others keep the stretches of dependent ones.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

    Rows = NDArray[Any]  # a series in each row

STEP, SEGMENT, LINE = range(3)  # what a statistic looks for
SHORTEST_LEVEL = 2  # fewest results on each side of a change: a single one may be an outlier
# At more, a change needs many more results than histories have.
LARGEST_CORRELATION = 0.8
CORRELATION_GRID = tuple(step / 10 for step in range(9))  # correlations that are tried, up to `LARGEST_CORRELATION`
REFUTATION_LEVEL = 0.01  # a correlation is refuted if so few series with it look as independent
CLIP = 10.0  # units of noise that one result weighs at most
CLIP_REST = 3.0  # the same of a distance: an outlier would hide that neighbours correlate
CORRELATION_DRAWS = 2000  # series for `find_largest_correlation`
NORMAL_DIFFERENCE = 2.0 / math.sqrt(math.pi)  # mean distance of two normal values, in units of their deviation
ROUNDING = 1e-11  # a spread of logs below this is that of equal numbers
SPEEDS_CORRELATION = 0.6  # of a machine with two speeds, where a faster part in the middle must be rare
STATE_NOISE = 0.1  # of a machine with two speeds, in half of their distance
BLOCKS = 5  # stretches that a resampled series has at least: fewer would be the series itself
# After so many series that are at least as extreme, a p value needs no more of them (Besag and Clifford, 1991).
ENOUGH_EXTREME = 10
BATCH = 500  # series that are drawn at once: a bound of the memory
SEED = 20260901  # the same series always gets the same answer


def compute_scores(rows: Rows) -> Rows:
    """Compute clipped distances from the median in units of the noise. Rows are log values; results have mean zero.

    The noise is that between neighbours. A change adds only one such difference.
    """
    import numpy as np

    steps = np.abs(np.diff(rows, axis=1))
    usual = np.median(steps, axis=1, keepdims=True)
    usual = np.where(usual > ROUNDING, usual, steps.mean(axis=1, keepdims=True))
    # Three deviations: neither an outlier nor a change is noise
    unit = np.minimum(steps, 4.5 * usual).mean(axis=1, keepdims=True) / NORMAL_DIFFERENCE
    unit = np.where(unit > ROUNDING, unit, np.inf)
    return _centre(np.clip((rows - np.median(rows, axis=1, keepdims=True)) / unit, -CLIP, CLIP))


def _centre(rows: Rows) -> Rows:
    found: Rows = rows - rows.mean(axis=1, keepdims=True)
    return found


def compute_contrast(rows: Rows) -> Rows:
    """Compute for each place the share of the squares that a step there explains. Scores have mean zero.

    The first column is place `SHORTEST_LEVEL`.
    """
    import numpy as np

    count = rows.shape[1]
    before = np.arange(SHORTEST_LEVEL, count - SHORTEST_LEVEL + 1)
    sums = np.cumsum(rows, axis=1)[:, SHORTEST_LEVEL - 1 : count - SHORTEST_LEVEL]
    found: Rows = count * sums * sums / (before * (count - before)) / _sum_squares(rows)[:, None]
    return found


def _sum_squares(rows: Rows) -> Rows:
    found: Rows = (rows * rows).sum(axis=1).clip(ROUNDING)
    return found


def compute_statistic(kind: int, rows: Rows) -> Rows:
    """Compute the share of the squares of each row that the best step, segment or line explains.

    A segment is a part in the middle that differs from both ends, which may differ too (`_divide_in_three`). A line
    begins with the series or in its middle.
    """
    import numpy as np

    if kind == STEP:
        return np.asarray(compute_contrast(rows).max(axis=1))
    count = rows.shape[1]
    if kind == LINE:
        return np.asarray(((rows @ _make_lines(count).T) ** 2).max(axis=1) / _sum_squares(rows))
    return np.asarray(_divide_in_three(rows)[2] / _sum_squares(rows))


def _divide_in_three(rows: Rows) -> tuple[Rows, Rows, Rows]:
    """Find two places of each row, and the squares that its three levels explain: none if one of them is too short.

    Two pairs of places are tried. Between the least and the greatest cumulative sum lies a part that differs from equal
    ends. The other pair is the best step, and the best one on either side of it.
    """
    import numpy as np

    count = rows.shape[1]
    sums = np.pad(np.cumsum(rows, axis=1), ((0, 0), (1, 0)))  # of the scores before each place
    every, each = np.arange(count + 1), np.arange(len(rows))

    def explain(first: Rows, last: Rows) -> Rows:
        parts = ((0 * first, first), (first, last), (last, 0 * last + count))
        found = sum((sums[each, end] - sums[each, begin]) ** 2 / np.maximum(end - begin, 1) for begin, end in parts)
        return np.where(np.min([end - begin for begin, end in parts], axis=0) >= SHORTEST_LEVEL, found, 0.0)

    step = compute_contrast(rows).argmax(axis=1) + SHORTEST_LEVEL
    gains = []
    for begin, end in ((0 * step, step), (step, 0 * step + count)):
        before, after = every - begin[:, None], end[:, None] - every
        apart = (
            sums
            - sums[each, begin][:, None]
            - before / (end - begin)[:, None] * (sums[each, end] - sums[each, begin])[:, None]
        )
        inside = np.minimum(before, after) >= SHORTEST_LEVEL
        gains.append(np.where(inside, apart**2 * (1 / np.maximum(before, 1) + 1 / np.maximum(after, 1)), 0.0))
    other = (gains[0] + gains[1]).argmax(axis=1)
    pairs = [
        np.sort([sums[:, :-1].argmin(axis=1), sums[:, :-1].argmax(axis=1)], axis=0),
        np.sort([step, other], axis=0),
    ]
    first, second = (explain(*pair) for pair in pairs)
    better = second > first
    return (*np.where(better, pairs[1], pairs[0]), np.where(better, second, first))


def _make_lines(count: int) -> Rows:
    """Make a line from the first result on, and one from the middle on. Each has mean 0 and square sum 1."""
    import numpy as np

    lines = _centre(np.maximum(np.arange(count) - np.array([[0], [count // 2]]), 0))
    return np.asarray(lines / np.sqrt(_sum_squares(lines))[:, None])


def fit_kind(kind: int, scored: Rows) -> tuple[list[int], Rows]:
    """Find the places that `compute_statistic` divides one series at, or where its line begins; and what is left."""
    count = len(scored)
    if kind == LINE:
        lines = _make_lines(count)
        best = int(((lines @ scored) ** 2).argmax())
        return [best * (count // 2)], scored - lines[best] * (lines[best] @ scored)
    rest = scored.copy()
    if kind == STEP:
        places = [int(compute_contrast(scored[None])[0].argmax()) + SHORTEST_LEVEL]
    else:
        places = [int(place[0]) for place in _divide_in_three(scored[None])[:2]]
    for begin, end in itertools.pairwise([0, *places, count]):
        rest[begin:end] -= rest[begin:end].mean()
    return places, rest


def make_correlated_noise(draws: int, count: int, correlation: float) -> Rows:
    """Draw rows of standard normal values, each correlated with the one before it. The same call draws the same."""
    import numpy as np

    results = np.random.default_rng(SEED).standard_normal((count, draws))
    fresh = math.sqrt(1.0 - correlation**2)
    for before, result in itertools.pairwise(results):
        result *= fresh
        result += correlation * before
    return np.ascontiguousarray(results.T)


def _make_two_states(draws: int, count: int, correlation: float) -> Rows:
    """Draw rows of a machine that changes between two speeds. No noise with this correlation has longer stretches."""
    import numpy as np

    chance = np.random.default_rng(SEED)
    states = np.cumsum(chance.random((draws, count)) < (1.0 - correlation) / 2.0, axis=1) % 2
    return 2.0 * states + STATE_NOISE * chance.standard_normal((draws, count))


def find_correlation(logs: Rows, level: float = REFUTATION_LEVEL) -> float:
    """Find the largest correlation in `CORRELATION_GRID` that a series does not refute: the likeliest at level 0.5."""
    seen = _compute_distances(compute_scores(logs[None]))[0]
    return max((each for each in CORRELATION_GRID if seen >= _find_distance(len(logs), each, level)), default=0.0)


@lru_cache(maxsize=256)
def _find_distance(count: int, correlation: float, level: float) -> float:
    noise = make_correlated_noise(CORRELATION_DRAWS, count, correlation)
    return float(sorted(_compute_distances(compute_scores(noise)))[int(level * CORRELATION_DRAWS)])


def _compute_distances(rows: Rows) -> Rows:
    """Compare the distances of results that are two to four apart with those of neighbours, which correlation lowers.

    A change of level is in few of them, and they are clipped.
    """
    import numpy as np

    near, *far = (
        (np.abs(rows[:, lag:] - rows[:, :-lag]).clip(0.0, CLIP_REST) ** 2).mean(axis=1) for lag in (1, 2, 3, 4)
    )
    return np.asarray(sum(far) / near.clip(ROUNDING))


def compute_p(kind: int, logs: Rows, rate: float, correlation: float | None = None) -> float:
    """Compute how often a series without a change has a statistic as large: the largest p value of the three kinds.

    ``correlation`` is that of neighbours, at most. None: results are independent, and only their order is random.
    Series are drawn until p is surely above ``rate``, or known well enough.
    """
    import numpy as np

    scored = compute_scores(logs[None])[0]
    # The tolerance counts orders of the same results, whose sums differ by rounding
    seen = float(compute_statistic(kind, scored[None])[0]) * (1.0 - 1e-9)
    most, p = math.ceil(ENOUGH_EXTREME / rate), 0.0
    if seen <= 0.0:
        return 1.0
    places, rest = fit_kind(kind, scored)
    if correlation is not None:
        p = estimate_null_p(kind, logs, correlation, rate)
        # A faster part in the middle makes the end a slow-down, and a machine with two speeds has such parts
        if kind == SEGMENT and scored[slice(*places)].mean() < min(
            scored[: places[0]].mean(), scored[places[1] :].mean()
        ):
            p = max(p, estimate_null_p(kind, logs, SPEEDS_CORRELATION, rate, states=True))
    for draw in (_draw_orders, draw_blocks)[: 1 if correlation is None else 2]:
        chance, extreme, drawn = np.random.default_rng(SEED), 0, 0
        while p <= rate and drawn < most and extreme < ENOUGH_EXTREME:
            rows = draw(rest if draw is draw_blocks else scored, min(BATCH, most - drawn), chance)
            extreme += int((compute_statistic(kind, rows) >= seen).sum())
            drawn += len(rows)
        p = max(p, (extreme + 1) / (drawn + 1))
    return p


def _draw_orders(values: Rows, draws: int, chance: Generator) -> Rows:
    import numpy as np

    return chance.permuted(np.repeat(values[None], draws, axis=0), axis=1)


def draw_blocks(values: Rows, draws: int, chance: Generator | None = None) -> Rows:
    """Draw rows of a series with mean 0 in blocks, so that neighbours stay neighbours. By default the same ones."""
    import numpy as np

    count, chance = len(values), chance or np.random.default_rng(SEED)
    length = max(SHORTEST_LEVEL, count // BLOCKS)
    starts = chance.integers(count, size=(draws, -(-count // length), 1))
    return _centre(values[((starts + np.arange(length)) % count).reshape(draws, -1)[:, :count]])


def estimate_null_p(kind: int, logs: Rows, correlation: float, rate: float, states: bool = False) -> float:
    """Compute how often normal noise with this correlation, or a machine with two speeds, has a statistic as large."""
    seen = float(compute_statistic(kind, compute_scores(logs[None]))[0]) * (1.0 - 1e-9)
    drawn = _draw_statistics(kind, len(logs), correlation, math.ceil(ENOUGH_EXTREME / rate), states)
    return (int((drawn >= seen).sum()) + 1) / (len(drawn) + 1)


def find_held_correlation(kind: int, logs: Rows, rate: float) -> float:
    """Find the largest of `CORRELATION_GRID` at which neither normal noise nor two speeds look like this."""
    held = 0.0
    for correlation in CORRELATION_GRID[1:]:
        if max(estimate_null_p(kind, logs, correlation, rate, states) for states in (False, True)) > rate:
            break
        held = correlation
    return held


@lru_cache(maxsize=512)
def _draw_statistics(kind: int, count: int, correlation: float, draws: int, states: bool) -> Rows:
    make = _make_two_states if states else make_correlated_noise
    return compute_statistic(kind, compute_scores(make(draws, count, correlation)))


def compute_variance_factor(count: int, correlation: float) -> float:
    """Compute the variance of the mean of ``count`` correlated results over that of independent ones."""
    return 1.0 + 2.0 * math.fsum((1.0 - lag / count) * correlation**lag for lag in range(1, count))
