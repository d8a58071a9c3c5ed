"""Finds changes of level and slow changes in a series of results, at a given false-alarm rate.

A change must pass three tests (`mlhpc.suite.statistics.dependence`): the order of independent results, noise whose
neighbours correlate as much as the series allows, and the series itself, resampled. Three statistics share the rate: a
step, a part in the middle that differs from both ends, and a line. A line is tested where it explains more than the
best step, so a series is called one or the other.

Scores are logs of values, centred at their median and divided by the noise between neighbours. They are clipped: no
outlier weighs more than `CLIP` deviations.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from mlhpc.suite.statistics import CONFIDENCE, compute_t_quantile, exponentiate
from mlhpc.suite.statistics.dependence import (
    LINE,
    REFUTATION_LEVEL,
    ROUNDING,
    SEGMENT,
    SHORTEST_LEVEL,
    STEP,
    compute_contrast,
    compute_p,
    compute_scores,
    compute_statistic,
    compute_variance_factor,
    estimate_null_p,
    find_correlation,
    find_held_correlation,
    fit_kind,
)

if TYPE_CHECKING:
    from mlhpc.suite.statistics.dependence import Rows

CLIP = 3.0  # deviations that one result weighs at most in a level
MAD_FACTOR = 1.4826  # standard deviation of a normal distribution in units of its median deviation
# Shares of the rate. A single step is the usual case
RATE_SHARES = {STEP: 0.88, SEGMENT: 0.06, LINE: 0.06}
RESOLUTION_S = 0.001  # MLPerf logs have milliseconds
MIN_LEVEL_RESULTS = 3  # results of a level whose size has an interval


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
    """The changes of a series. Those in ``sure`` are found although neighbours may correlate.

    Those in ``doubtful`` are changes only if the results are independent, or their noise is normal. ``line``: the times
    grow or fall slowly from result ``begin`` on, which is "sure" or "doubtful"; then no change is sure.
    ``correlation`` is what the series shows. What is sure holds for every machine whose neighbouring results correlate
    by at most ``held``.
    """

    sure: tuple[Change, ...] = ()
    doubtful: tuple[Change, ...] = ()
    correlation: float = 0.0
    line: Literal["sure", "doubtful", ""] = ""
    begin: int = 0
    held: float = 0.0


@dataclass(frozen=True)
class LevelRatio:
    """A ratio of levels and its confidence interval. None if there are too few results."""

    ratio: float
    interval: tuple[float, float] | None


def compute_min_results(rate: float) -> int:
    """Compute how many results a series needs for any change to be found at a false-alarm rate."""
    count = 2 * SHORTEST_LEVEL
    # The most extreme of all orders has this p value: two halves without overlap, in either direction
    while 2 / math.comb(count, count // 2) > RATE_SHARES[STEP] * rate:
        count += 1
    return count


def judge_changes(values: Sequence[float], rate: float) -> Changes:
    """Find changes. Those in ``sure`` hold even if results depend on each other as much as the series allows."""
    logs = _compute_logs(values)
    if len(logs) < compute_min_results(rate):
        return Changes()
    shown, allowed = (find_correlation(logs, level) for level in (0.5, REFUTATION_LEVEL))
    line = _judge_line(logs, RATE_SHARES[LINE] * rate, Changes(correlation=shown), allowed)
    candidates = find_changes(values, rate) or _find_possible_change(logs, rate)
    if line.line == "sure" or not candidates:
        return line
    sure = find_changes(values, rate, allowed)
    known = {change.place for change in sure}
    if any(change.place not in known for change in candidates):
        known = {place for change in sure for place in find_places(values, change)}
    doubtful = tuple(change for change in candidates if change.place not in known)
    if not sure:
        return replace(line, doubtful=doubtful)
    share = RATE_SHARES[STEP] * rate
    held = min(find_held_correlation(STEP, logs[change.begin : change.end], share) for change in sure)
    # Of the noise: a change makes the results before and after it look alike
    for begin, end in itertools.pairwise([0, *(change.place for change in sure), len(logs)]):
        logs[begin:end] -= logs[begin:end].mean()
    return Changes(tuple(sure), doubtful, find_correlation(logs, 0.5), held=held)


def is_slowed(logs: Rows, rate: float) -> bool:
    """Return whether a series of logs of times has one surely slower level, at its end."""
    if compute_p(STEP, logs, rate, find_correlation(logs)) > rate:
        return False
    (place,), rest = fit_kind(STEP, compute_scores(logs[None])[0])
    before, after = ([math.exp(log) for log in part] for part in (logs[:place], logs[place:]))
    size = compare_levels(before, after, find_correlation(rest, 0.5))
    return size.interval is not None and size.interval[0] > 1.0


def _judge_line(logs: Rows, rate: float, plain: Changes, allowed: float) -> Changes:
    """Judge whether the times grow or fall slowly: a line explains more than a step, and is rare without a change."""
    scored = compute_scores(logs[None])
    step, line = (compute_statistic(kind, scored)[0] for kind in (STEP, LINE))
    if line <= step or compute_p(LINE, logs, rate) > rate:
        return plain
    (begin,), rest = fit_kind(LINE, scored[0])
    found = replace(plain, line="doubtful", begin=begin, correlation=find_correlation(rest, 0.5))
    if compute_p(LINE, logs, rate, allowed) > rate:
        return found
    return replace(found, line="sure", held=find_held_correlation(LINE, logs, rate))


def _find_possible_change(logs: Rows, rate: float) -> list[Change]:
    """Find a change that normal noise rarely makes, but that too few orders can show."""
    p = estimate_null_p(STEP, logs, 0.0, rate)
    (place,), _ = fit_kind(STEP, compute_scores(logs[None])[0])
    return [Change(0, place, len(logs), p)] if p <= rate else []


def find_changes(values: Sequence[float], rate: float, correlation: float | None = None) -> list[Change]:
    """Find changes by place. A series without any gets one with a probability of at most ``rate``.

    ``correlation`` is that of each result with the one before it, at most. None: results are independent.
    """
    found: dict[int, float] = {}
    logs, parts = _compute_logs(values), [(0, len(values))]
    while parts:
        begin, end = parts.pop()
        if end - begin < compute_min_results(rate):
            continue
        for kind in (STEP, SEGMENT):
            share = RATE_SHARES[kind] * rate
            p = compute_p(kind, logs[begin:end], share, correlation)
            if p <= share:
                places = [begin + place for place in fit_kind(kind, compute_scores(logs[None, begin:end])[0])[0]]
                found |= dict.fromkeys(places, p)
                parts += itertools.pairwise([begin, *places, end])
                break
    # The first place found in a series of two changes may lie between them, on one level: one by one, changes go that
    # are not significant given their neighbours
    while True:
        places = sorted(found)
        bounds = zip([0, *places], places, [*places[1:], len(logs)], strict=False)
        changes = [Change(begin, place, end, found[place]) for begin, place, end in bounds]
        chances = [_compute_change_p(logs, change, rate, correlation) for change in changes]
        if len(changes) < 2 or max(chances) <= rate:
            return changes
        del found[changes[chances.index(max(chances))].place]


def _compute_change_p(logs: Rows, change: Change, rate: float, correlation: float | None) -> float:
    """Compute the p value of the part that a change divides. 0 if the part has too few results for one."""
    if 2 / math.comb(change.end - change.begin, change.place - change.begin) > rate:
        return 0.0
    return compute_p(STEP, logs[change.begin : change.end], rate, correlation)


def find_places(values: Sequence[float], change: Change) -> list[int]:
    """Find the places where a change may be. They include the true one with a probability of 95 %.

    These are the places whose likelihood is near that of the likeliest one (Siegmund, 1988), for normal noise.
    """
    import numpy as np

    shares = compute_contrast(compute_scores(_compute_logs(values)[None, change.begin : change.end]))[0]
    rest = np.log(np.maximum(1.0 - shares, ROUNDING))
    near = (change.end - change.begin - 2) * (rest - rest.min()) <= -2.0 * math.log(1.0 - math.sqrt(CONFIDENCE))
    return sorted({change.place, *(change.begin + SHORTEST_LEVEL + np.flatnonzero(near)).tolist()})


def compare_levels(
    before: Sequence[float], after: Sequence[float], correlation: float, confidence: float = CONFIDENCE
) -> LevelRatio:
    """Compute the ratio of two levels: geometric means without outliers, and Student's t interval on log values.

    Correlated results count as fewer independent ones. A spread below the resolution counts as the resolution. This is
    the smallest difference of two values of a level. There is no interval of fewer than three results.
    """
    levels = [clip_outliers([math.log(value) for value in side]) for side in (before, after)]
    middle = statistics.fmean(levels[1]) - statistics.fmean(levels[0])
    ratio = exponentiate(middle)
    if min(len(before), len(after)) < MIN_LEVEL_RESULTS:
        return LevelRatio(ratio, None)
    factors = [compute_variance_factor(len(level), correlation) for level in levels]
    independent = [len(level) / factor for level, factor in zip(levels, factors, strict=True)]
    squares = sum(statistics.variance(level) * (len(level) - 1) for level in levels)
    # The mean of correlated results follows them, so their squares around it are smaller than those of the noise
    spread = squares / sum(len(level) - factor for level, factor in zip(levels, factors, strict=True))
    spread = max(spread, max(_compute_resolution(side) for side in (before, after)) ** 2 / 12)  # of rounding to a grid
    freedom = max(sum(independent) - 2.0, 1.0)
    half = compute_t_quantile(0.5 + confidence / 2, freedom) * math.sqrt(spread * sum(1 / n for n in independent))
    low, high = (exponentiate(middle + sign * half) for sign in (-1, 1))
    return LevelRatio(ratio, (low, high))


def clip_outliers(logs: Sequence[float]) -> list[float]:
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
