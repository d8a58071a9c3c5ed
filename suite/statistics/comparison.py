"""Compares two samples of times: Welch's t on log time, permutations, equivalence of pairs, Holm's correction.

`compare_times` is the one answer to "is B slower than A?" for results that were measured apart. How often it is wrong,
with tails, drift, sessions and few runs, is in docs/verdicts.md.

The unit is the session (`mlhpc.suite.statistics.sessions`) wherever a side has two or more. What the runs could have
shown is `mlhpc.suite.statistics.power`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, combinations
from typing import TYPE_CHECKING

from mlhpc.suite.files import render_duration
from mlhpc.suite.statistics import CONFIDENCE, Outcome, compute_t_quantile, exponentiate, judge_interval
from mlhpc.suite.statistics.power import (
    MATTERS,
    POWER,
    RunsNeeded,
    choose_dof,
    estimate_runs_needed,
    find_detectable_ratio,
)
from mlhpc.suite.statistics.sessions import (
    Error,
    TimedRun,
    choose_error,
    compute_mean_interval,
    compute_p,
    describe_order,
    find_sessions,
    fit_slope,
)

if TYPE_CHECKING:
    import numpy as np


ALPHA = 0.05  # of each of the two one-sided tests
MAX_PERMUTATIONS = 200_000
MIN_RUNS = 3  # of a result that is compared: two runs give no idea of their spread


@dataclass(frozen=True)
class TimeRatio:
    """Time of B divided by time of A, with its confidence interval.

    ``p`` is two-sided, for the hypothesis of no difference. ``error`` is that of the log ratio, by ``counts`` units of
    A and B. ``bound``: the same if how much sessions spread is not known from these alone (`choose_error`).
    """

    ratio: float
    low: float
    high: float
    p: float
    error: Error
    counts: tuple[int, int]
    bound: Error | None


def _compute_welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, Error]:
    """Compute the difference of means of logs, B less A, and its error by Welch.

    A side of one value, a session beside several, takes the variance of the other.
    """
    known = [values if len(values) > 1 else other for values, other in ((a, b), (b, a))]
    part_a, part_b = (statistics.variance(values) / len(of) for values, of in zip(known, (a, b), strict=True))
    dof = float(choose_dof(part_a, part_b, len(a), len(b))) if part_a + part_b else 1.0
    return statistics.fmean(b) - statistics.fmean(a), Error(math.sqrt(part_a + part_b), dof)


def compute_ratio(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], confidence: float = CONFIDENCE
) -> TimeRatio:
    """Compute the ratio of geometric means, B over A, from the times of each session of A and of B.

    Two or more times a side. Sessions are the unit if a side has several (`choose_error`).
    """
    logs = [[[math.log(time) for time in times] for times in side] for side in (a, b)]
    runs, units = [list(chain(*side)) for side in logs], [list(map(statistics.fmean, side)) for side in logs]
    (middle, error), place = _compute_welch(*runs), 0
    if max(map(len, units)) > 1:
        middle, by_session = _compute_welch(*units)
        error, place = choose_error(error, by_session, units, confidence)
    low, ratio, high = (exponentiate(middle + sign * error.find_half(confidence)) for sign in (-1, 0, 1))
    p = compute_p(middle, *error) if error.size else math.nan
    count_a, count_b = map(len, units if place else runs)
    return TimeRatio(ratio, low, high, p, error, (count_a, count_b), error if place == 2 else None)


@dataclass(frozen=True)
class Comparison(TimeRatio):
    """The ratio of two samples of times, and the outcome. `low` and `high` allow for what ``doubts`` say.

    ``sessions_a`` and ``sessions_b`` count sessions; ``by_session`` is true if they are the unit, and not runs.
    ``p_permutation`` is over all ways to divide the units into groups of the same sizes; NaN if there are more than
    200,000. ``doubts`` say why the outcome is inconclusive, by what the interval is wider, or what the order of the
    runs shows.
    """

    n_a: int
    n_b: int
    sessions_a: int
    sessions_b: int
    by_session: bool
    p_permutation: float
    confidence: float
    margin: float
    outcome: Outcome
    doubts: tuple[str, ...] = ()

    @cached_property
    def detectable(self) -> float:
        """The smallest ratio that such data show in 8 of 10 cases."""
        if self.bound:
            return exponentiate(self.error.find_half(self.confidence) + self.error.find_half(2.0 * POWER - 1.0))
        return find_detectable_ratio(self.spread, self.error.dof, self.counts, self.confidence)

    @cached_property
    def needed(self) -> RunsNeeded:
        """How many units of each side show a difference that matters."""
        return estimate_runs_needed(self.spread, self.error.dof, self.margin or MATTERS, self.confidence)

    @property
    def spread(self) -> float:
        """The spread of the log of a unit's time."""
        return self.error.size / math.sqrt(sum(1.0 / count for count in self.counts))

    @property
    def unit(self) -> str:
        """Whose spread counts: that of runs, or of sessions. One session a side has two runs or more."""
        return "sessions" if self.counts == (self.sessions_a, self.sessions_b) else "runs"

    def describe_power(self) -> str:
        """Say what these runs could have shown, and how many more would show a difference that matters."""
        more = f"{100 * (self.detectable - 1.0):.2g} %"
        size = more if self.detectable < 1.995 else f"{self.detectable:.3g} times as long"
        seen = f"{size} would have been seen in 8 of 10 cases of normal noise"
        if self.detectable <= 1.0 + (self.margin or MATTERS):
            return seen
        return f"{seen}; {self.needed.render(self.unit)}"


def compare_times(
    a: Sequence[TimedRun | tuple[float, float]],
    b: Sequence[TimedRun | tuple[float, float]],
    *,
    confidence: float = CONFIDENCE,
    margin: float = 0.0,
    resolution_s: float = 0.001,
    same_machine: bool = True,
) -> Comparison | None:
    """Compare the runs of B with those of A. None unless both have two positive times and at least one varies.

    B is slower or faster only if the interval and the permutation test say so. It is equivalent if the interval lies
    within ``margin``. ``resolution_s`` is the resolution of the times; no interval is narrower. Only runs of one
    session on the ``same_machine`` share a drift, which the interval then allows for.

    With one session a side, the outcome assumes that only the results differ between the runs of A and those of B. A
    machine that is slower for a day makes all runs of that day slower. No test of times can distinguish this from a
    slower result.
    """
    sides = [sorted(TimedRun(*run) for run in runs if run[1] > 0.0) for runs in (a, b)]
    times_a, times_b = ([run.time_s for run in runs] for runs in sides)
    if min(map(len, sides)) < 2:
        return None
    sessions = [[[run.time_s for run in session] for session in find_sessions(runs)] for runs in sides]
    sessions_a, sessions_b = map(len, sessions)
    by_session = max(sessions_a, sessions_b) > 1
    units = [list(map(statistics.geometric_mean, side)) for side in sessions] if by_session else [times_a, times_b]
    welch = compute_ratio(sessions[0], sessions[1], confidence)
    if not welch.error.size:
        return None
    middle, half = math.log(welch.ratio), welch.error.find_half(confidence)
    too_little = _describe_lacking_data(times_a, times_b)
    doubts = list(too_little)
    least = resolution_s / min(times_a + times_b)
    if half < least:
        half = least
        doubts.append(f"the times are known to {render_duration(resolution_s)}")
    if sum(map(len, units)) == sum(map(len, sides)):  # units are runs, perhaps one a day
        orders = [describe_order(runs, side) for runs, side in zip(sides, "AB", strict=True)]
        drifts = any(order.slope for order in orders)
        shared = drifts and same_machine and len(find_sessions(sides[0] + sides[1])) == 1
        half += _compute_shared_drift(*sides) if shared else 0.0
        for order in orders:
            texts = list(order.texts)
            if shared and order.slope:  # whose text is the last
                texts[-1] += ", and the interval allows for that"
            doubts += texts
    low, high = (exponentiate(middle + sign * half) for sign in (-1, 1))
    p_permutation = compute_permutation_p(*([math.log(time) for time in side] for side in units))
    outcome = judge_interval(low, high, margin)
    runs = compute_ratio([times_a], [times_b], confidence)
    alone = judge_interval(runs.low, runs.high, margin)
    if outcome == Outcome.INCONCLUSIVE != alone and by_session:
        few = f"{sessions_a} and {sessions_b} sessions"
        doubts.append(f"runs alone would say {alone}; the {few} of A and B may differ by more than runs")
    different = outcome in (Outcome.SLOWER, Outcome.FASTER)
    # Welch's t is wrong twice as often as stated for a few runs beside many, or with long tails. The permutation test
    # needs no form of the noise, so where it can reach the level, it must agree.
    reachable = math.comb(sum(map(len, units)), len(units[0])) >= 2.0 / (1.0 - confidence)
    if different and reachable and p_permutation > 1.0 - confidence:
        outcome = Outcome.INCONCLUSIVE
        doubts.append(f"{p_permutation:.1%} of all divisions of these runs differ as much")
    if too_little:
        outcome = Outcome.INCONCLUSIVE
    return Comparison(
        **vars(replace(welch, low=low, high=high)),
        n_a=len(times_a),
        n_b=len(times_b),
        sessions_a=sessions_a,
        sessions_b=sessions_b,
        by_session=by_session,
        p_permutation=p_permutation,
        confidence=confidence,
        margin=margin,
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


def _compute_shared_drift(a: Sequence[TimedRun], b: Sequence[TimedRun]) -> float:
    """Compute what a trend of log time over the order of all runs, equal in A and B, may explain of their difference.

    It is at most the upper end of the slope's 95 % interval, times the runs from the middle of A to that of B. If A and
    B ran by turns, both middles are the same.
    """
    order = {run: place for place, run in enumerate(sorted([*((*run, 0) for run in a), *((*run, 1) for run in b)]))}
    places = [[order[(*run, side)] for run in runs] for side, runs in enumerate((a, b))]
    slope, error = fit_slope(places, [[math.log(run.time_s) for run in runs] for runs in (a, b)])
    most = abs(slope) + compute_t_quantile(0.975, len(order) - 3) * error
    return most * abs(statistics.fmean(places[1]) - statistics.fmean(places[0]))


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
