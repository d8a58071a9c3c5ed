"""Finds changes of level in a series of results, at a given false-alarm rate.

A change must pass two tests. The first is a permutation test. Its scores are logs of values, centred at their median
and divided by their median deviation. They are clipped: no outlier weighs more than `CLIP` deviations. The statistic is
the largest sum of scores before a place, over its deviation. Random orders of the series show its distribution without
a change. So the rate holds for every distribution of independent results.

The second test (`mlhpc.suite.statistics.dependence`) covers results that depend on each other, as much as the series
allows. It asks whether they look like this without a change. A second statistic gets `SEGMENT_RATE_SHARE` of the rate.
It looks for a part in the middle that differs from both ends.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlhpc.suite.statistics import student_t
from mlhpc.suite.statistics.comparison import LARGEST_LOG
from mlhpc.suite.statistics.dependence import (
    ROUNDING,
    SEED,
    SHORTEST_LEVEL,
    Statistic,
    compute_contrast,
    compute_noise_scores,
    compute_variance_factor,
    estimate_null_p,
    find_largest_correlation,
    make_correlated_noise,
)

if TYPE_CHECKING:
    from mlhpc.suite.statistics.dependence import Rows

CLIP = 3.0  # deviations that one result weighs at most
MAD_FACTOR = 1.4826  # standard deviation of a normal distribution in units of its median deviation
# After so many orders that are at least as extreme, a p value needs no more orders (Besag and Clifford, 1991).
ENOUGH_EXTREME_ORDERS = 30
BATCH = 500  # orders that are drawn at once: a bound of the memory
PLACE_DRAWS = 200  # series for each place that is tried as the place of a change
PLACE_STEP = 3  # places in a row
# Share of the rate for two changes at once. It is small because a single change is the usual case.
SEGMENT_RATE_SHARE = 0.1
CONFIDENCE = 0.95
RESOLUTION_S = 0.001  # MLPerf logs have milliseconds
MIN_LEVEL_RESULTS = 3  # results of a level whose size has an interval
NORMAL_QUANTILE = 1.959964  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class Change:
    """A change in a series of values. ``place`` is the index of the first result after it.

    ``begin`` and ``end`` bound the results that it divides. ``p``: how often a series without a change is as extreme.
    """

    begin: int
    place: int
    end: int
    p: float


@dataclass(frozen=True)
class Changes:
    """The changes of a series. Those in ``sure`` are found although neighbours may correlate by ``correlation``.

    Those in ``doubtful`` are changes only if the results are independent, or their noise is normal.
    """

    sure: tuple[Change, ...]
    doubtful: tuple[Change, ...]
    correlation: float


@dataclass(frozen=True)
class LevelRatio:
    """A ratio of levels and its confidence interval. None if there are too few results."""

    ratio: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Trend:
    """Theil and Sen's slope of log values, per step of ``times``, with its 95 % interval (Kendall's)."""

    slope: float
    low: float
    high: float


def compute_min_results(rate: float) -> int:
    """Compute how many results a series needs for any change to be found at a false-alarm rate."""
    count = 2 * SHORTEST_LEVEL
    # The most extreme of all orders has this p value: two halves without overlap, in either direction
    while 2 / math.comb(count, count // 2) > (1.0 - SEGMENT_RATE_SHARE) * rate:
        count += 1
    return count


def judge_changes(values: Sequence[float], rate: float) -> Changes:
    """Find changes. Those in ``sure`` hold even if results depend on each other as much as the series allows."""
    candidates = find_changes(values, rate) or _find_possible_change(_compute_logs(values), rate)
    if not candidates:
        return Changes((), (), 0.0)
    correlation = find_largest_correlation(_compute_logs(values), len(candidates))
    sure = find_changes(values, rate, correlation)
    known = {change.place for change in sure}
    if any(change.place not in known for change in candidates):
        known = {place for change in sure for place in find_places(values, change, correlation)}
    doubtful = [change for change in candidates if change.place not in known]
    return Changes(tuple(sure), tuple(doubtful), correlation)


def _find_possible_change(logs: Rows, rate: float) -> list[Change]:
    """Find a change that normal noise rarely makes, but that too few orders can show. An example is two in twelve."""
    if len(logs) < compute_min_results(rate):
        return []
    p = estimate_null_p(compute_largest_contrast, logs, 0.0, math.ceil(ENOUGH_EXTREME_ORDERS / rate))
    return [Change(0, find_largest_contrast(compute_noise_scores(logs[None])[0]), len(logs), p)] if p <= rate else []


def find_changes(values: Sequence[float], rate: float, correlation: float | None = None) -> list[Change]:
    """Find changes by place. A series without any gets one with a probability of at most ``rate``.

    ``correlation`` is that of each result with the one before it, at most. None: results are independent.
    """
    found: list[Change] = []
    logs = _compute_logs(values)
    parts = [(0, len(values))]
    while parts:
        begin, end = parts.pop()
        if end - begin < compute_min_results(rate):
            continue
        for statistic, share in (
            (compute_largest_contrast, 1.0 - SEGMENT_RATE_SHARE),
            (compute_segment_contrast, SEGMENT_RATE_SHARE),
        ):
            p = compute_p(statistic, logs[begin:end], share * rate, correlation)
            if p <= share * rate:
                scored = compute_scores(logs[begin:end])
                inside = (
                    [find_largest_contrast(scored)]
                    if statistic is compute_largest_contrast
                    else find_segment_ends(scored)
                )
                places = [begin + place for place in inside]
                found += [Change(begin, place, end, p) for place in places]
                parts += itertools.pairwise([begin, *places, end])
                break
    return _prune(
        logs, compute_change_bounds(sorted(found, key=lambda change: change.place), len(values)), rate, correlation
    )


def compute_change_bounds(changes: Sequence[Change], count: int) -> list[Change]:
    """Bound each change by its neighbours. The results before it are then of one level, and so are those after it."""
    places = [0, *(change.place for change in changes), count]
    return [Change(places[index], change.place, places[index + 2], change.p) for index, change in enumerate(changes)]


def _prune(logs: Rows, changes: list[Change], rate: float, correlation: float | None) -> list[Change]:
    """Remove, one by one, changes that are not significant given their neighbours.

    The first place found in a series of two changes may lie between them, on one level.
    """
    while len(changes) > 1:
        chances = [_compute_change_p(logs, change, rate, correlation) for change in changes]
        worst = max(range(len(changes)), key=chances.__getitem__)
        if chances[worst] <= rate:
            break
        changes = compute_change_bounds([*changes[:worst], *changes[worst + 1 :]], len(logs))
    return changes


def _compute_change_p(logs: Rows, change: Change, rate: float, correlation: float | None) -> float:
    """Compute the p value of the part that a change divides. 0 if the part has too few results for one."""
    if 2 / math.comb(change.end - change.begin, change.place - change.begin) > rate:
        return 0.0
    return compute_p(compute_largest_contrast, logs[change.begin : change.end], rate, correlation)


def compute_p(statistic: Statistic, logs: Rows, rate: float, correlation: float | None = None) -> float:
    """Compute how often a series without a change has a statistic as large.

    This is the larger p value of both tests. Orders are drawn until p is surely above ``rate``, or known well enough.
    """
    import numpy as np

    most = math.ceil(ENOUGH_EXTREME_ORDERS / rate)
    correlated = 0.0
    if correlation is not None:
        correlated = estimate_null_p(statistic, logs, correlation, most)
        if correlated > rate:
            return correlated
    scored = compute_scores(logs)
    seen = float(statistic(scored[None])[0])
    if seen <= 0.0:
        return 1.0
    chance, extreme, drawn = np.random.default_rng(SEED), 0, 0
    while drawn < most and extreme < ENOUGH_EXTREME_ORDERS:
        orders = chance.permuted(np.repeat(scored[None], min(BATCH, most - drawn), axis=0), axis=1)
        # The tolerance counts orders of the same results, whose sums differ by rounding
        extreme += int((statistic(orders) >= seen * (1.0 - 1e-9)).sum())
        drawn += len(orders)
    return max(correlated, (extreme + 1) / (drawn + 1))


def compute_largest_contrast(rows: Rows) -> Rows:
    """Compute the contrast of the place where it is largest."""
    largest: Rows = compute_contrast(rows).max(axis=1)
    return largest


def find_largest_contrast(scored: Rows) -> int:
    """Find the place where the contrast is largest."""
    return int(compute_contrast(scored[None])[0].argmax()) + SHORTEST_LEVEL


def compute_segment_contrast(rows: Rows) -> Rows:
    """Compute the contrast of the part between the least and the greatest cumulative sum with the rest.

    It is 0 if that part is at an end of the series.
    """
    import numpy as np

    count, every = rows.shape[1], np.arange(len(rows))
    sums = np.cumsum(rows, axis=1) - rows  # of the scores before each place
    least, most = sums.argmin(axis=1), sums.argmax(axis=1)
    first, last = np.minimum(least, most), np.maximum(least, most)
    inside = last - first
    whole = (first >= SHORTEST_LEVEL) & (count - last >= SHORTEST_LEVEL) & (inside >= SHORTEST_LEVEL)
    gap = sums[every, last] - sums[every, first]
    found: Rows = np.where(whole, gap**2 / np.maximum(inside * (count - inside), 1), 0.0)
    return found


def find_segment_ends(scored: Rows) -> list[int]:
    """Find the two places of `compute_segment_contrast`."""
    sums = scored.cumsum() - scored
    return sorted((int(sums.argmin()), int(sums.argmax())))


def compute_scores(logs: Rows) -> Rows:
    """Compute clipped distances of log values from their median, in median deviations. Their mean is zero."""
    import numpy as np

    distances = np.abs(logs - np.median(logs))
    units = (MAD_FACTOR * float(np.median(distances)), float(distances.mean()))  # most values may be equal
    unit = next((each for each in units if each > ROUNDING), math.inf)
    found: Rows = np.clip((logs - np.median(logs)) / unit, -CLIP, CLIP)
    found -= found.mean()
    return found


def find_places(values: Sequence[float], change: Change, correlation: float) -> list[int]:
    """Find the places where a change may be. They include the true one with a probability of 95 %.

    Each place is tried as the true one. The results before it, and those after it, get random orders in which
    neighbours correlate by ``correlation``. A place is left out if few orders show another place so much more likely.
    """
    import numpy as np

    scored = compute_scores(_compute_logs(values)[change.begin : change.end])
    noise = make_correlated_noise(PLACE_DRAWS, len(scored), correlation)
    seen = compute_contrast(scored[None])[0]
    likeliest = int(seen.argmax())
    found = {change.place}
    # The set has no large gaps: away from the likeliest place the search ends after `PLACE_STEP` places that are left
    # out
    for ways in (range(likeliest, len(seen)), range(likeliest - 1, -1, -1)):
        left_out = 0
        for column in ways:
            place = column + SHORTEST_LEVEL
            before, after = scored[:place], scored[place:]
            drawn = compute_contrast(
                np.hstack([_order_like(noise[:, :place], before), _order_like(noise[:, place:], after)])
            )
            lacks = drawn.max(axis=1) - drawn[:, column]
            if (lacks >= seen.max() - seen[column] - 1e-9).mean() > 1.0 - CONFIDENCE:
                found.add(change.begin + place)
                left_out = 0
            elif (left_out := left_out + 1) == PLACE_STEP:
                break
    return sorted(found)


def _order_like(noise: Rows, values: Rows) -> Rows:
    """Return rows of the values, ordered as the noise in each row."""
    import numpy as np

    found: Rows = np.sort(values)[noise.argsort(axis=1).argsort(axis=1)]
    return found


def compute_change_size(values: Sequence[float], change: Change, correlation: float = 0.0) -> LevelRatio:
    """Compute the level after a change over the level before it, with its 95 % interval. The place counts as known."""
    return compare_levels(values[change.begin : change.place], values[change.place : change.end], correlation)


def compare_levels(
    before: Sequence[float], after: Sequence[float], correlation: float, confidence: float = CONFIDENCE
) -> LevelRatio:
    """Compute the ratio of two levels: geometric means without outliers, and Student's t interval on log values.

    Correlated results count as fewer independent ones. A spread below the resolution counts as the resolution. This is
    the smallest difference of two values of a level. There is no interval of fewer than three results.
    """
    levels = [_clip_outliers([math.log(value) for value in side]) for side in (before, after)]
    middle = statistics.fmean(levels[1]) - statistics.fmean(levels[0])
    ratio = math.exp(max(-LARGEST_LOG, min(middle, LARGEST_LOG)))
    if min(len(before), len(after)) < MIN_LEVEL_RESULTS:
        return LevelRatio(ratio, None)
    factors = [compute_variance_factor(len(level), correlation) for level in levels]
    independent = [len(level) / factor for level, factor in zip(levels, factors, strict=True)]
    squares = sum(statistics.variance(level) * (len(level) - 1) for level in levels)
    # The mean of correlated results follows them, so their squares around it are smaller than those of the noise
    spread = squares / sum(len(level) - factor for level, factor in zip(levels, factors, strict=True))
    spread = max(spread, max(_compute_resolution(side) for side in (before, after)) ** 2 / 12)  # of rounding to a grid
    freedom = max(sum(independent) - 2.0, 1.0)
    half = student_t.compute_quantile(0.5 + confidence / 2, freedom) * math.sqrt(
        spread * sum(1 / n for n in independent)
    )
    low, high = (math.exp(max(-LARGEST_LOG, min(middle + sign * half, LARGEST_LOG))) for sign in (-1, 1))
    return LevelRatio(ratio, (low, high))


def _clip_outliers(logs: Sequence[float]) -> list[float]:
    """Move values that lie further from the median than `CLIP` ordinary deviations to that distance."""
    middle = statistics.median(logs)
    far = CLIP * MAD_FACTOR * statistics.median(abs(each - middle) for each in logs)
    return [max(middle - far, min(each, middle + far)) for each in logs] if far > ROUNDING else list(logs)


def _compute_resolution(values: Sequence[float]) -> float:
    """Compute the resolution of log values.

    It is the smallest difference of two unequal ones, but at least that of times in a log.
    """
    logs = sorted(math.log(value) for value in values)
    known = RESOLUTION_S / min(values)
    return max(known, min((b - a for a, b in itertools.pairwise(logs) if b - a > ROUNDING), default=0.0))


def _compute_logs(values: Sequence[float]) -> Rows:
    import numpy as np

    logs: Rows = np.log(np.asarray(values, dtype=float))
    return logs


def find_trend(times: Sequence[float], values: Sequence[float]) -> Trend | None:
    """Compute the median slope between all pairs of log values; None for fewer than four different times."""
    if len(set(times)) < 4:
        return None
    logs = [math.log(value) for value in values]
    count = len(values)
    slopes = sorted(
        (logs[j] - logs[i]) / (times[j] - times[i])
        for i in range(count)
        for j in range(i + 1, count)
        if times[j] != times[i]
    )
    half = NORMAL_QUANTILE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = math.floor((len(slopes) - half) / 2)
    high = math.ceil((len(slopes) + half) / 2)
    bounds = slopes[low] if low >= 0 else -math.inf, slopes[high] if high < len(slopes) else math.inf
    return Trend(statistics.median(slopes), *bounds)
