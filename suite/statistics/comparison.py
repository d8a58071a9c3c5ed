"""Compares two samples of times: Welch's t on log time, permutations, equivalence of pairs, Holm's correction.

`compare_times` is the one answer to "is B slower than A?" for results that were measured apart. How often it is wrong,
with tails, drift, sessions and few runs, is in docs/verdicts.md.

Confidence intervals of means, of geometric means and of shares.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

from mlhpc.suite.files import render_duration
from mlhpc.suite.statistics import Outcome, judge_interval, student_t

if TYPE_CHECKING:
    import numpy as np


LARGEST_LOG = 700.0  # exp of more is no float; logs may claim any time


def compute_mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Compute the mean of two or more values and the half width of its Student-t interval."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), student_t.compute_quantile(0.5 + confidence / 2, len(values) - 1) * error


def compute_log_interval(times: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Compute the interval of the geometric mean (Student's t on log time). None for fewer than two times."""
    if len(times) < 2:
        return None
    middle, half = compute_mean_interval([math.log(time) for time in times], confidence)
    return math.exp(middle - half), math.exp(min(middle + half, LARGEST_LOG))


CONFIDENCE = 0.95
POWER = 0.8  # with which `detectable` ratios are detected
ALPHA = 0.05  # of each of the two one-sided tests
MAX_PERMUTATIONS = 200_000
MIN_RUNS = 3  # of a result that is compared: two runs give no idea of their spread
# A trend over the runs counts from this p value on. Five runs a side show a drift of half their spread a run so only
# half of the time at 0.05. A larger level costs little: the interval only grows by what the drift explains.
DRIFT_P = 0.2
MAX_PROPOSED_RUNS = 200  # that are proposed to tell a difference

TimedRun = tuple[float, float]  # when it began (Unix time, or any number that orders runs) and its time, in seconds


@dataclass(frozen=True)
class TimeRatio:
    """Time of B divided by time of A, with its confidence interval.

    ``p`` is two-sided, for the hypothesis of no difference. ``error`` and ``dof`` are those of the log ratio.
    """

    ratio: float
    low: float
    high: float
    p: float = math.nan
    error: float = 0.0
    dof: float = math.inf


def compute_welch_ratio(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> TimeRatio:
    """Compute the ratio of geometric means, B over A, with its Welch interval on log time. Two or more times each."""
    logs = [[math.log(time) for time in times] for times in (a, b)]
    difference = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    parts = [statistics.variance(values) / len(values) for values in logs]
    error, dof, half, p = math.sqrt(sum(parts)), math.inf, 0.0, math.nan
    if error > 0.0:
        dof = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, logs, strict=True))
        half = student_t.compute_quantile(0.5 + confidence / 2, dof) * error
        p = 2.0 * student_t.compute_cdf(-abs(difference) / error, dof)
    low, middle, high = (math.exp(min(difference + sign * half, LARGEST_LOG)) for sign in (-1, 0, 1))
    return TimeRatio(middle, low, high, p, error, dof)


@dataclass(frozen=True)
class Comparison:
    """Time of B over time of A, and the outcome. It is the ratio of geometric means with its interval on log time.

    ``p`` is Welch's, two-sided. ``p_permutation`` is over all ways to divide the runs into groups of the same sizes;
    NaN if there are more than 200,000. ``detectable`` is the smallest ratio that as many runs with this spread detect
    with 80 % power. ``drift`` is the change of log time from one run to the next; 0 if no trend was found. ``doubts``
    say why the outcome is inconclusive, or by what the interval is wider than Welch's.
    """

    n_a: int
    n_b: int
    ratio: float
    low: float
    high: float
    p: float
    p_permutation: float
    detectable: float
    drift: float
    outcome: Outcome
    doubts: tuple[str, ...] = ()


def compare_times(
    a: Sequence[TimedRun],
    b: Sequence[TimedRun],
    *,
    confidence: float = CONFIDENCE,
    margin: float = 0.0,
    resolution_s: float = 0.001,
) -> Comparison | None:
    """Compare the runs of B with those of A. None unless both have two positive times and at least one varies.

    B is slower or faster only if the interval and the permutation test say so. It is equivalent if the interval lies
    within ``margin``. ``resolution_s`` is the resolution of the times; no interval is narrower.

    The outcome assumes that only the results differ between the runs of A and those of B. A machine that is slower for
    a day makes all runs of that day slower. No test of times can distinguish this from a slower result.
    """
    a, b = (sorted(run for run in runs if run[1] > 0.0) for runs in (a, b))
    times_a, times_b = ([time for _, time in runs] for runs in (a, b))
    if len(a) < 2 or len(b) < 2:
        return None
    welch = compute_welch_ratio(times_a, times_b, confidence)
    if welch.error == 0.0:
        return None
    middle, half = math.log(welch.ratio), (math.log(welch.high) - math.log(welch.low)) / 2
    too_little = _describe_lacking_data(times_a, times_b)
    doubts = list(too_little)
    least = resolution_s / min(*times_a, *times_b)
    if half < least:
        half = least
        doubts.append(f"the times are known to {render_duration(resolution_s)}")
    drift, moved = _find_drift(a, b)
    half += moved
    if moved > half / 20:  # less is not worth a word
        change = f"{'grow' if drift > 0 else 'fall'} by {100 * abs(math.expm1(drift)):.3g} %"
        doubts.append(f"times {change} from run to run, and the interval allows for that")
    low, high = math.exp(middle - half), math.exp(min(middle + half, LARGEST_LOG))
    p_permutation = compute_permutation_p([math.log(time) for time in times_a], [math.log(time) for time in times_b])
    outcome = judge_interval(low, high, margin)
    different = outcome in (Outcome.SLOWER, Outcome.FASTER)
    # Welch's t is wrong twice as often as stated for a few runs beside many, or with long tails. The permutation test
    # needs no form of the noise, so where it can reach the level, it must agree.
    reachable = 1.0 / math.comb(len(a) + len(b), len(a)) <= (1.0 - confidence) / 2
    if different and reachable and p_permutation > 1.0 - confidence:
        outcome = Outcome.INCONCLUSIVE
        doubts.append(f"{p_permutation:.1%} of all divisions of these runs differ as much")
    if too_little:
        outcome = Outcome.INCONCLUSIVE
    return Comparison(
        n_a=len(a),
        n_b=len(b),
        ratio=welch.ratio,
        low=low,
        high=high,
        p=welch.p,
        p_permutation=p_permutation,
        detectable=_compute_detectable(welch.error, welch.dof),
        drift=drift,
        outcome=outcome,
        doubts=tuple(doubts),
    )


def _describe_lacking_data(a: Sequence[float], b: Sequence[float]) -> list[str]:
    """Say which side has too few runs, or runs without spread, to be judged."""
    reasons = []
    for side, times in (("A", a), ("B", b)):
        if len(times) < MIN_RUNS:
            reasons.append(f"{side} has {len(times)} runs; {MIN_RUNS} are needed to know how much runs differ")
        elif max(times) == min(times):
            reasons.append(f"all {len(times)} runs of {side} take the same time, so how much runs differ is not known")
    return reasons


def _find_drift(a: Sequence[TimedRun], b: Sequence[TimedRun]) -> tuple[float, float]:
    """Find a trend of log time over the order of all runs, equal in A and B. Return it and what it may explain.

    Both are 0 if there is none. A trend per run explains at most the upper end of its 95 % interval. This is multiplied
    by the runs from the middle of A to that of B. If A and B ran by turns, both middles are the same.
    """
    order = {run: place for place, run in enumerate(sorted([*((*run, 0) for run in a), *((*run, 1) for run in b)]))}
    places = [[order[(*run, side)] for run in runs] for side, runs in enumerate((a, b))]
    logs = [[math.log(time) for _, time in runs] for runs in (a, b)]
    centred = [
        (place - statistics.fmean(own_places), log - statistics.fmean(own_logs))
        for own_places, own_logs in zip(places, logs, strict=True)
        for place, log in zip(own_places, own_logs, strict=True)
    ]
    dof = len(centred) - 3
    squares = sum(place**2 for place, _ in centred)
    if dof < 1 or squares == 0:
        return 0.0, 0.0
    slope = sum(place * log for place, log in centred) / squares
    rest = sum((log - slope * place) ** 2 for place, log in centred)
    error = math.sqrt(rest / dof / squares)
    if error > 0.0 and 2.0 * student_t.compute_cdf(-abs(slope) / error, dof) > DRIFT_P:
        return 0.0, 0.0
    most = abs(slope) + student_t.compute_quantile(0.975, dof) * error
    return slope, most * abs(statistics.fmean(places[1]) - statistics.fmean(places[0]))


def estimate_runs_needed(comparison: Comparison) -> int | None:
    """Compute how many runs of each side would show the measured ratio with 80 % power.

    None above `MAX_PROPOSED_RUNS`, or if the spread is unknown. The spread follows from the smallest ratio that
    the present runs can detect.
    """
    if min(comparison.n_a, comparison.n_b) < 2 or not 1.0 < comparison.detectable < math.inf:
        return None
    seen = abs(math.log(comparison.ratio))
    dof = comparison.n_a + comparison.n_b - 2
    quantiles = student_t.compute_quantile(0.5 + CONFIDENCE / 2, dof) + student_t.compute_quantile(POWER, dof)
    spread = math.log(comparison.detectable) / quantiles / math.sqrt(1 / comparison.n_a + 1 / comparison.n_b)
    return next(
        (n for n in range(MIN_RUNS, MAX_PROPOSED_RUNS + 1) if math.log(compute_detectable_ratio(n, spread)) <= seen),
        None,
    )


def compute_detectable_ratio(n: int, spread: float) -> float:
    """Compute the smallest ratio that ``n`` runs per side detect with 80 % power. ``spread``: the std of log time."""
    return _compute_detectable(spread * math.sqrt(2.0 / n), 2.0 * n - 2.0)


def _compute_detectable(error: float, dof: float) -> float:
    return math.exp(
        (student_t.compute_quantile(0.5 + CONFIDENCE / 2, dof) + student_t.compute_quantile(POWER, dof)) * error
    )


def compute_permutation_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Compute the share of all divisions of the pooled values with means as far apart. NaN if there are too many."""
    import numpy as np

    pooled, size = np.array([*a, *b]), min(len(a), len(b))
    if math.comb(len(pooled), size) > MAX_PERMUTATIONS:
        return math.nan
    rest = len(pooled) - size
    sums = pooled[_list_divisions(len(pooled), size)].sum(axis=1)
    gaps = np.abs(sums / size - (pooled.sum() - sums) / rest)
    seen = abs(float(np.mean(a) - np.mean(b)))
    return float((gaps >= seen * (1.0 - 1e-12)).mean())  # the tolerance keeps the seen division itself in


@lru_cache(maxsize=4)
def _list_divisions(count: int, size: int) -> np.ndarray:
    """List the indices of the smaller group in every division, a row each."""
    import numpy as np

    return np.array(list(combinations(range(count), size)))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p values for their number (Holm 1979). The chance of any false claim stays at the level."""
    order = sorted(range(len(p)), key=lambda index: p[index])
    adjusted, least = [0.0] * len(p), 0.0
    for rank, index in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = least
    return adjusted


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests (TOST) of paired times. ``ratio`` is of geometric means, B over A, with its 90 % interval."""

    pairs: int
    ratio: float
    low: float
    high: float
    margin: float

    @property
    def outcome(self) -> Outcome:
        """Equivalent if the interval lies within the margin: both tests reject a difference as large as it."""
        least, most = 1.0 / (1.0 + self.margin), 1.0 + self.margin
        if least <= self.low and self.high <= most:
            return Outcome.EQUIVALENT
        if self.low > most:
            return Outcome.SLOWER
        return Outcome.FASTER if self.high < least else Outcome.INCONCLUSIVE


def compute_equivalence(a_s: Sequence[float], b_s: Sequence[float], margin: float) -> Equivalence:
    """Test whether paired times are equivalent within a margin, by Student's t on logs of ratios. Two pairs or more."""
    logs = [math.log(b / a) for a, b in zip(a_s, b_s, strict=True)]
    middle, half = compute_mean_interval(logs, 1.0 - 2.0 * ALPHA)
    return Equivalence(len(logs), math.exp(middle), math.exp(middle - half), math.exp(middle + half), margin)
