"""Finds changes of level in a series of results, at a given false-alarm rate.

A change must pass two tests. The first is a permutation test. Logs of values are centred at their median, divided by
their median deviation and clipped, so that no outlier weighs more than `CLIP` ordinary deviations. The statistic is
the largest sum of scores before a place, over its deviation. Its distribution without a change is that over random
orders of the series, so the rate holds for every distribution of independent results. The second test asks whether
results that depend on each other, as much as the series allows, look like this without a change
(`suite.statistics.dependence`). A second statistic, with `THERE_AND_BACK` of the rate, looks for a part in the middle
that differs from both ends.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from suite.statistics import student_t
from suite.statistics.dependence import (
    ROUNDING,
    SEED,
    SHORTEST,
    Statistic,
    chance_without_change,
    contrast,
    draw_noise,
    largest_correlation,
    noise_scores,
    variance_factor,
)
from suite.statistics.intervals import LARGEST_LOG

if TYPE_CHECKING:
    from suite.statistics.dependence import Rows

CLIP = 3.0  # ordinary deviations that one result weighs at most
DEVIATION = 1.4826  # standard deviation of a normal distribution in units of its median deviation
ENOUGH = 30  # orders at least as extreme after which a p value needs no more of them (Besag and Clifford, 1991)
BATCH = 500  # orders that are drawn at once
PLACE_DRAWS = 200  # series for each place that is tried as the place of a change
GAP = 3  # places in a row
THERE_AND_BACK = 0.1  # share of the rate: a single change is the usual case
CONFIDENCE = 0.95
RESOLUTION_S = 0.001  # of the times in a log
LEAST_OF_LEVEL = 3  # results of a level whose size has an interval
NORMAL = 1.959964  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class Change:
    """A change before ``place``, the index of the first result after it, in a series of values.

    ``begin`` and ``end`` bound the results that it divides. ``p``: how often a series without a change is as extreme.
    """

    begin: int
    place: int
    end: int
    p: float


@dataclass(frozen=True)
class Changes:
    """The changes of a series. Those in ``sure`` are found although neighbours may correlate by ``correlation``.

    Those in ``doubtful`` would be changes if the results were independent, or if their noise were known to be normal.
    """

    sure: tuple[Change, ...]
    doubtful: tuple[Change, ...]
    correlation: float


@dataclass(frozen=True)
class Size:
    """A ratio of levels and its confidence interval; None if there are too few results for one."""

    ratio: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Trend:
    """Theil and Sen's slope of log values, per step of ``times``, with its 95 % interval (Kendall's)."""

    slope: float
    low: float
    high: float


def fewest(rate: float) -> int:
    """Compute how many results a series needs before any change in it can be found at a false-alarm rate."""
    count = 2 * SHORTEST
    # The most extreme of all orders has this p value: two halves without overlap, in either direction
    while 2 / math.comb(count, count // 2) > (1.0 - THERE_AND_BACK) * rate:
        count += 1
    return count


def judge_changes(values: Sequence[float], rate: float) -> Changes:
    """Find changes, and which of them hold if results depend on each other as much as the series allows."""
    candidates = find_changes(values, rate) or _suspect(_logs(values), rate)
    if not candidates:
        return Changes((), (), 0.0)
    correlation = largest_correlation(_logs(values), len(candidates))
    sure = find_changes(values, rate, correlation)
    known = {change.place for change in sure}
    if any(change.place not in known for change in candidates):
        known = {place for change in sure for place in find_places(values, change, correlation)}
    doubtful = [change for change in candidates if change.place not in known]
    return Changes(tuple(sure), tuple(doubtful), correlation)


def _suspect(logs: Rows, rate: float) -> list[Change]:
    """Find a change that too few orders can show, such as two in twelve results, but that normal noise rarely makes."""
    if len(logs) < fewest(rate):
        return []
    p = chance_without_change(one_change, logs, 0.0, math.ceil(ENOUGH / rate))
    return [Change(0, place_of(noise_scores(logs[None])[0]), len(logs), p)] if p <= rate else []


def find_changes(values: Sequence[float], rate: float, correlation: float | None = None) -> list[Change]:
    """Find changes by place. A series without any gets one with a probability of at most ``rate``.

    ``correlation`` is that of each result with the one before it, at most. None: results are independent.
    """
    found: list[Change] = []
    logs = _logs(values)
    parts = [(0, len(values))]
    while parts:
        begin, end = parts.pop()
        if end - begin < fewest(rate):
            continue
        for statistic, share in ((one_change, 1.0 - THERE_AND_BACK), (there_and_back, THERE_AND_BACK)):
            p = compute_p(statistic, logs[begin:end], share * rate, correlation)
            if p <= share * rate:
                scored = scores(logs[begin:end])
                inside = [place_of(scored)] if statistic is one_change else ends_of(scored)
                places = [begin + place for place in inside]
                found += [Change(begin, place, end, p) for place in places]
                parts += itertools.pairwise([begin, *places, end])
                break
    return _prune(logs, bounded(sorted(found, key=lambda change: change.place), len(values)), rate, correlation)


def bounded(changes: Sequence[Change], count: int) -> list[Change]:
    """Bound each change by its neighbours, so that the results before and after it are of one level each."""
    places = [0, *(change.place for change in changes), count]
    return [Change(places[index], change.place, places[index + 2], change.p) for index, change in enumerate(changes)]


def _prune(logs: Rows, changes: list[Change], rate: float, correlation: float | None) -> list[Change]:
    """Remove, one by one, changes that are not significant given their neighbours.

    The first place found in a series of two changes may lie between them, on one level.
    """
    while len(changes) > 1:
        chances = [_chance_of(logs, change, rate, correlation) for change in changes]
        worst = max(range(len(changes)), key=chances.__getitem__)
        if chances[worst] <= rate:
            break
        changes = bounded([*changes[:worst], *changes[worst + 1 :]], len(logs))
    return changes


def _chance_of(logs: Rows, change: Change, rate: float, correlation: float | None) -> float:
    """Compute the p value of the part that a change divides; 0 if the part has too few results for one."""
    if 2 / math.comb(change.end - change.begin, change.place - change.begin) > rate:
        return 0.0
    return compute_p(one_change, logs[change.begin : change.end], rate, correlation)


def compute_p(statistic: Statistic, logs: Rows, rate: float, correlation: float | None = None) -> float:
    """Compute how often a series without a change has a statistic as large: the larger p value of both tests.

    Orders are drawn until p is known to be above ``rate``, or known well enough.
    """
    import numpy as np

    most = math.ceil(ENOUGH / rate)
    correlated = 0.0
    if correlation is not None:
        correlated = chance_without_change(statistic, logs, correlation, most)
        if correlated > rate:
            return correlated
    scored = scores(logs)
    seen = float(statistic(scored[None])[0])
    if seen <= 0.0:
        return 1.0
    chance, extreme, drawn = np.random.default_rng(SEED), 0, 0
    while drawn < most and extreme < ENOUGH:
        orders = chance.permuted(np.repeat(scored[None], min(BATCH, most - drawn), axis=0), axis=1)
        # The tolerance counts orders of the same results, whose sums differ by rounding
        extreme += int((statistic(orders) >= seen * (1.0 - 1e-9)).sum())
        drawn += len(orders)
    return max(correlated, (extreme + 1) / (drawn + 1))


def one_change(rows: Rows) -> Rows:
    """Compute the contrast of the place where it is largest."""
    largest: Rows = contrast(rows).max(axis=1)
    return largest


def place_of(scored: Rows) -> int:
    """Find the place where the contrast is largest."""
    return int(contrast(scored[None])[0].argmax()) + SHORTEST


def there_and_back(rows: Rows) -> Rows:
    """Compute the contrast of the part between the least and the greatest cumulative sum with the rest.

    It is 0 if that part is at an end of the series.
    """
    import numpy as np

    count, every = rows.shape[1], np.arange(len(rows))
    sums = np.cumsum(rows, axis=1) - rows  # of the scores before each place
    least, most = sums.argmin(axis=1), sums.argmax(axis=1)
    first, last = np.minimum(least, most), np.maximum(least, most)
    inside = last - first
    whole = (first >= SHORTEST) & (count - last >= SHORTEST) & (inside >= SHORTEST)
    gap = sums[every, last] - sums[every, first]
    found: Rows = np.where(whole, gap**2 / np.maximum(inside * (count - inside), 1), 0.0)
    return found


def ends_of(scored: Rows) -> list[int]:
    """Find the two places of `there_and_back`."""
    sums = scored.cumsum() - scored
    return sorted((int(sums.argmin()), int(sums.argmax())))


def scores(logs: Rows) -> Rows:
    """Compute clipped distances of log values from their median, in units of the median deviation, with mean zero."""
    import numpy as np

    distances = np.abs(logs - np.median(logs))
    units = (DEVIATION * float(np.median(distances)), float(distances.mean()))  # most values may be equal
    unit = next((each for each in units if each > ROUNDING), math.inf)
    found: Rows = np.clip((logs - np.median(logs)) / unit, -CLIP, CLIP)
    found -= found.mean()
    return found


def find_places(values: Sequence[float], change: Change, correlation: float) -> list[int]:
    """Find the places where a change may be: a set that holds the true one with 95 %.

    A place is left out if the results before it, and those after it, rarely show so much larger a contrast elsewhere
    in an order drawn at random. Neighbours in such orders correlate by ``correlation``.
    """
    import numpy as np

    scored = scores(_logs(values)[change.begin : change.end])
    noise = draw_noise(PLACE_DRAWS, len(scored), correlation)
    seen = contrast(scored[None])[0]
    likeliest = int(seen.argmax())
    found = {change.place}
    # The set has no large gaps: away from the likeliest place the search ends after `GAP` places that are left out
    for ways in (range(likeliest, len(seen)), range(likeliest - 1, -1, -1)):
        left_out = 0
        for column in ways:
            place = column + SHORTEST
            before, after = scored[:place], scored[place:]
            drawn = contrast(np.hstack([_in_order_of(noise[:, :place], before), _in_order_of(noise[:, place:], after)]))
            lacks = drawn.max(axis=1) - drawn[:, column]
            if (lacks >= seen.max() - seen[column] - 1e-9).mean() > 1.0 - CONFIDENCE:
                found.add(change.begin + place)
                left_out = 0
            elif (left_out := left_out + 1) == GAP:
                break
    return sorted(found)


def _in_order_of(noise: Rows, values: Rows) -> Rows:
    """Return rows of the values, the smallest where the noise of the row is smallest, and so on."""
    import numpy as np

    found: Rows = np.sort(values)[noise.argsort(axis=1).argsort(axis=1)]
    return found


def size_of(values: Sequence[float], change: Change, correlation: float = 0.0) -> Size:
    """Compute the level after a change over that before it, with its 95 % interval, the place taken as known."""
    return compare_levels(values[change.begin : change.place], values[change.place : change.end], correlation)


def compare_levels(
    before: Sequence[float], after: Sequence[float], correlation: float, confidence: float = CONFIDENCE
) -> Size:
    """Compute the ratio of two levels: geometric means without outliers, and Student's t interval on log values.

    Correlated results count as fewer independent ones. A spread below the resolution is the resolution, which is the
    smallest difference of two values of a level. There is no interval of fewer than three results.
    """
    levels = [_clip_outliers([math.log(value) for value in side]) for side in (before, after)]
    middle = statistics.fmean(levels[1]) - statistics.fmean(levels[0])
    ratio = math.exp(max(-LARGEST_LOG, min(middle, LARGEST_LOG)))
    if min(len(before), len(after)) < LEAST_OF_LEVEL:
        return Size(ratio, None)
    factors = [variance_factor(len(level), correlation) for level in levels]
    independent = [len(level) / factor for level, factor in zip(levels, factors, strict=True)]
    squares = sum(statistics.variance(level) * (len(level) - 1) for level in levels)
    # The mean of correlated results follows them, so their squares around it are smaller than those of the noise
    spread = squares / sum(len(level) - factor for level, factor in zip(levels, factors, strict=True))
    spread = max(spread, max(_resolution(side) for side in (before, after)) ** 2 / 12)  # of rounding to a grid
    freedom = max(sum(independent) - 2.0, 1.0)
    half = student_t.quantile(0.5 + confidence / 2, freedom) * math.sqrt(spread * sum(1 / n for n in independent))
    low, high = (math.exp(max(-LARGEST_LOG, min(middle + sign * half, LARGEST_LOG))) for sign in (-1, 1))
    return Size(ratio, (low, high))


def _clip_outliers(logs: Sequence[float]) -> list[float]:
    """Move values that lie further from the median than `CLIP` ordinary deviations to that distance."""
    middle = statistics.median(logs)
    far = CLIP * DEVIATION * statistics.median(abs(each - middle) for each in logs)
    return [max(middle - far, min(each, middle + far)) for each in logs] if far > ROUNDING else list(logs)


def _resolution(values: Sequence[float]) -> float:
    """Compute the smallest difference between two unequal values, as one of logs, or that of the times in a log."""
    logs = sorted(math.log(value) for value in values)
    known = RESOLUTION_S / min(values)
    return max(known, min((b - a for a, b in itertools.pairwise(logs) if b - a > ROUNDING), default=0.0))


def _logs(values: Sequence[float]) -> Rows:
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
    half = NORMAL * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = math.floor((len(slopes) - half) / 2)
    high = math.ceil((len(slopes) + half) / 2)
    bounds = slopes[low] if low >= 0 else -math.inf, slopes[high] if high < len(slopes) else math.inf
    return Trend(statistics.median(slopes), *bounds)
