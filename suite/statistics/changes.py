"""Finds change points of a series of results: a permutation test at a given false-alarm rate.

Logs of values are centred at their median, divided by their median deviation and clipped, so that no outlier weighs
more than `CLIP` ordinary deviations. For each place the sum of these scores before it is compared with its mean and
spread over all orders. The largest value of all places is the statistic. Its distribution without a change is that over
random orders of the series, so the rate holds for every distribution of times as long as results are independent. A
second test, with `THERE_AND_BACK` of the rate, looks for a part in the middle that differs from both ends.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SHORTEST = 2  # fewest results on each side of a change: a single one may be an outlier
CLIP = 3.0  # ordinary deviations that one result weighs at most
DEVIATION = 1.4826  # standard deviation of a normal distribution in units of its median deviation
ROUNDING = 1e-11  # a spread of logs below this is that of equal numbers
ENOUGH = 30  # orders at least as extreme after which a p value needs no more of them (Besag and Clifford, 1991)
THERE_AND_BACK = 0.1  # share of the rate: a single change is the usual case
NORMAL = 1.959964  # 97.5 % quantile of the normal distribution
SEED = 20260901  # the same series always gets the same answer


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
class Size:
    """A ratio of levels and its 95 % interval; None if there are too few results for one."""

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


def find_changes(values: Sequence[float], rate: float) -> list[Change]:
    """Find changes by place. A series without any gets one with a probability of at most ``rate``."""
    found: list[Change] = []
    parts = [(0, len(values))]
    while parts:
        begin, end = parts.pop()
        if end - begin < fewest(rate):
            continue
        scored = scores(values[begin:end])
        for places, p in (
            compute_p(one_change, scored, (1.0 - THERE_AND_BACK) * rate),
            compute_p(there_and_back, scored, THERE_AND_BACK * rate),
        ):
            if places:
                found += [Change(begin, begin + place, end, p) for place in places]
                parts += itertools.pairwise([begin, *(begin + place for place in places), end])
                break
    return _prune(values, bounded(sorted(found, key=lambda change: change.place), len(values)), rate)


def bounded(changes: Sequence[Change], count: int) -> list[Change]:
    """Bound each change by its neighbours, so that the results before and after it are of one level each."""
    places = [0, *(change.place for change in changes), count]
    return [Change(places[index], change.place, places[index + 2], change.p) for index, change in enumerate(changes)]


def _prune(values: Sequence[float], changes: list[Change], rate: float) -> list[Change]:
    """Remove, one by one, changes that are not significant given their neighbours.

    The first place found in a series of two changes may lie between them, on one level.
    """
    while changes:
        chances = [_chance_at(values, change, rate) for change in changes]
        worst = max(range(len(changes)), key=chances.__getitem__)
        if chances[worst] <= rate:
            break
        changes = bounded([*changes[:worst], *changes[worst + 1 :]], len(values))
    return changes


def _chance_at(values: Sequence[float], change: Change, rate: float) -> float:
    """Estimate how often an order of the results around a change divides them as much; 0 if there are too few."""
    size, before = change.end - change.begin, change.place - change.begin
    if 2 / math.comb(size, before) > rate:
        return 0.0
    scored = scores(values[change.begin : change.end])
    seen = abs(math.fsum(scored[:before]))
    generator, most, extreme = random.Random(SEED), math.ceil(ENOUGH / rate), 0  # noqa: S311  no secret
    for drawn in range(1, most + 1):
        # The tolerance counts orders of the same results, whose sums differ by rounding
        extreme += abs(math.fsum(generator.sample(scored, before))) >= seen - 1e-9
        if extreme == ENOUGH:
            return extreme / drawn
    return (extreme + 1) / (most + 1)


Statistic = Callable[[Sequence[float]], tuple[float, tuple[int, ...]]]


def compute_p(statistic: Statistic, scored: Sequence[float], rate: float) -> tuple[tuple[int, ...], float]:
    """Compute a statistic's places, and its p value: how often an order of the scores has a value as large.

    There are no places if p is above ``rate``. Drawing stops early once p is known to be large.
    """
    seen, places = statistic(scored)
    if seen <= 0.0:
        return (), 1.0
    drawn_scores = list(scored)
    generator, most, extreme = random.Random(SEED), math.ceil(ENOUGH / rate), 0  # noqa: S311  no secret
    for drawn in range(1, most + 1):
        generator.shuffle(drawn_scores)
        extreme += statistic(drawn_scores)[0] >= seen * (1.0 - 1e-12)
        if extreme == ENOUGH:
            p = extreme / drawn
            return (places if p <= rate else ()), p
    return places, (extreme + 1) / (most + 1)


def one_change(scored: Sequence[float]) -> tuple[float, tuple[int, ...]]:
    """Find the place at which the sum of the scores before it, squared and over its variance, is largest."""
    count = len(scored)
    total, best, place = 0.0, -1.0, SHORTEST
    for index in range(1, count - SHORTEST + 1):
        total += scored[index - 1]
        if index >= SHORTEST:
            size = total * total / (index * (count - index))
            if size > best:
                best, place = size, index
    return best, (place,)


def there_and_back(scored: Sequence[float]) -> tuple[float, tuple[int, ...]]:
    """Find the part between the least and the greatest cumulative sum, and its squared sum over its variance.

    The value is 0 if that part is at an end of the series.
    """
    sums = list(itertools.accumulate(scored, initial=0.0))[:-1]
    first, last = sorted((sums.index(min(sums)), sums.index(max(sums))))
    inside = last - first
    if first < SHORTEST or len(scored) - last < SHORTEST or inside < SHORTEST:
        return 0.0, ()
    return (sums[last] - sums[first]) ** 2 / (inside * (len(scored) - inside)), (first, last)


def scores(values: Sequence[float]) -> list[float]:
    """Compute clipped distances of log values from their median, in units of the median deviation, with mean zero."""
    logs = [math.log(value) for value in values]
    middle = statistics.median(logs)
    distances = [abs(each - middle) for each in logs]
    units = (DEVIATION * statistics.median(distances), statistics.fmean(distances))  # most values may be equal
    unit = next((each for each in units if each > ROUNDING), None)
    if unit is None:
        return [0.0] * len(values)
    clipped = [max(-CLIP, min((each - middle) / unit, CLIP)) for each in logs]
    mean = math.fsum(clipped) / len(clipped)
    return [each - mean for each in clipped]


def size_of(values: Sequence[float], change: Change) -> Size:
    """Compute the level after a change over that before it (Hodges and Lehmann): the median ratio of all pairs.

    The interval of 95 % is Wilcoxon's, by its normal approximation. It takes the place of the change as known.
    """
    before, after = values[change.begin : change.place], values[change.place : change.end]
    ratios = sorted(b / a for a in before for b in after)
    pairs = len(ratios)
    half = NORMAL * math.sqrt(pairs * (len(before) + len(after) + 1) / 12)
    low, high = math.floor(pairs / 2 - half), math.ceil(pairs / 2 + half) - 1
    whole = low >= 0 and high < pairs
    return Size(statistics.median(ratios), (ratios[low], ratios[high]) if whole else None)


def follow_each_other(values: Sequence[float], changes: Sequence[Change], rate: float = 0.05) -> float | None:
    """Compute the correlation of each result with the one before it, levels removed; None if it is not significant.

    If there is one, the false-alarm rate does not hold: correlated results look like changes.
    """
    places = [0, *(change.place for change in changes), len(values)]
    rest: list[float] = []
    for begin, end in itertools.pairwise(places):
        logs = [math.log(value) for value in values[begin:end]]
        rest += [each - statistics.fmean(logs) for each in logs]
    power = math.fsum(each * each for each in rest)
    if len(rest) < fewest(rate) or power == 0.0:
        return None
    seen = _lag(rest)
    generator, extreme, most = random.Random(SEED), 0, 999  # noqa: S311  no secret
    for _ in range(most):
        generator.shuffle(rest)
        extreme += _lag(rest) >= seen
    return seen / power if (extreme + 1) / (most + 1) <= rate else None


def _lag(rest: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in itertools.pairwise(rest))


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
