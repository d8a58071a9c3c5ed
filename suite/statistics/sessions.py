"""Divides the runs of a result into sessions, and says what their order shows: an outlier, a step or a trend.

A machine differs from day to day by more than from run to run. So where a result has several sessions, a session and
not a run is what repeats: "10 runs in 2 sessions" are two values and not ten.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mlhpc.suite.statistics import CONFIDENCE, LARGEST_LOG, student_t

LEAST_GAP_S = 3600.0  # a shorter pause never begins a session
GAP_FACTOR = 10.0  # nor does one below so many times the median pause: queues make runs of one session wait for hours
ORDER_P = 0.05  # chance that the order of independent runs of one side is said to have a step or a trend
OUTLIER_P = 0.01  # chance that a run of independent normal ones is called an outlier
MIN_ORDERED = 4  # runs whose order says something


class TimedRun(NamedTuple):
    """When a run began (Unix time in seconds, or any number that orders runs), its seconds, and its batch job."""

    begin_s: float
    time_s: float
    job: str = ""


def find_sessions(runs: Sequence[TimedRun]) -> list[list[TimedRun]]:
    """Divide runs, in order of their start, into sessions.

    A session ends at a pause of an hour or more that is also ten times the median pause, or where the job changes.
    """
    ordered = sorted(runs)
    pauses = [max(0.0, later.begin_s - run.begin_s - run.time_s) for run, later in pairwise(ordered)]
    most = max(LEAST_GAP_S, GAP_FACTOR * statistics.median_low(pauses)) if pauses else math.inf
    sessions = [ordered[:1]]
    for pause, (before, run) in zip(pauses, pairwise(ordered), strict=True):
        if pause > most or run.job != before.job:
            sessions.append([])
        sessions[-1].append(run)
    return sessions


def list_unit_times(sessions: Sequence[Sequence[TimedRun]], *, by_session: bool | None = None) -> list[float]:
    """List what repeats: the geometric mean of each session, or the time of each run of a single one.

    ``by_session`` decides in place of the number of sessions: two sides of a comparison have the same unit.
    """
    if len(sessions) > 1 if by_session is None else by_session:
        return [compute_geometric_mean(session) for session in sessions]
    return [run.time_s for session in sessions for run in session]


def render_sessions(runs: int, sessions: int) -> str:
    """Render numbers of runs and sessions: ``10 runs in 2 sessions``; one session is not worth a word."""
    return f"{runs} runs" + (f" in {sessions} sessions" if sessions > 1 else "")


def compute_geometric_mean(runs: Sequence[TimedRun]) -> float:
    """Compute the geometric mean of the times of one run or more."""
    return math.exp(statistics.fmean(math.log(run.time_s) for run in runs))


def compute_mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Compute the mean of two or more values and the half width of its Student-t interval."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), student_t.compute_quantile(0.5 + confidence / 2, len(values) - 1) * error


def compute_log_interval(times: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Compute the interval of the geometric mean (Student's t on log time). None for fewer than two times."""
    if len(times) < 2:
        return None
    middle, half = compute_mean_interval([math.log(time) for time in times], confidence)
    return math.exp(middle - half), math.exp(min(middle + half, LARGEST_LOG))


@dataclass(frozen=True)
class Order:
    """What the order of the runs of one side shows. ``slope`` is true if times grow or fall from run to run."""

    texts: tuple[str, ...] = ()
    slope: bool = False


def describe_order(runs: Sequence[TimedRun], side: str) -> Order:
    """Say in words which run is an outlier, and whether the others have a step or a trend. Runs of one session."""
    logs = [math.log(run.time_s) for run in sorted(runs)]
    texts, places = [], list(range(len(logs)))
    if (far := _find_outlier(logs)) is not None:
        places.remove(far)
        times = math.exp(logs[far] - statistics.median(logs[place] for place in places))
        texts.append(f"run {far + 1} of {side} takes {times:.3g} times as long as its others")
    kept = [logs[place] for place in places]
    # Runs side by side, and those of a log without a start, have no order
    beside = sum(later.begin_s < run.begin_s + run.time_s / 2 for run, later in pairwise(sorted(runs)))
    if len(kept) < MIN_ORDERED or max(kept) == min(kept) or beside > len(runs) / 2:
        return Order(tuple(texts))
    slope, error = fit_slope([places], [kept])
    trend_p = compute_p(slope, error, len(kept) - 2)
    step_p, place, apart = _find_step(kept)
    if 2.0 * min(trend_p, step_p) > ORDER_P:  # of two tests
        return Order(tuple(texts))
    if step_p < trend_p:
        first, last = places[place - 1] + 1, places[place] + 1
        texts.append(
            f"runs {last} to {places[-1] + 1} of {side} take {math.exp(apart):.3g} times as long as 1 to {first}"
        )
        return Order(tuple(texts))
    change = f"{'grow' if slope > 0 else 'fall'} by {100 * abs(math.expm1(slope)):.3g} %"
    return Order((*texts, f"times of {side} {change} from run to run"), slope=True)


def fit_slope(places: Sequence[Sequence[float]], logs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Fit one slope to the values of each side around its own mean. Return it and its standard error."""
    centred = [
        (place - statistics.fmean(own), log - statistics.fmean(values))
        for own, values in zip(places, logs, strict=True)
        for place, log in zip(own, values, strict=True)
    ]
    squares = sum(place**2 for place, _ in centred)
    slope = sum(place * log for place, log in centred) / squares
    rest = sum((log - slope * place) ** 2 for place, log in centred)
    return slope, math.sqrt(rest / (len(centred) - len(logs) - 1) / squares)


def compute_p(difference: float, error: float, dof: float) -> float:
    """Compute the two-sided p of a difference by Student's t."""
    return 2.0 * student_t.compute_cdf(-abs(difference) / error, dof) if error > 0.0 else 0.0


def _find_outlier(logs: Sequence[float]) -> int | None:
    """Find the run that lies apart from all others, by its distance from their mean in their deviations."""
    count = len(logs)
    if count < MIN_ORDERED:
        return None
    far = max(range(count), key=lambda place: abs(logs[place] - statistics.median(logs)))
    others = [log for place, log in enumerate(logs) if place != far]
    error = statistics.stdev(others) * math.sqrt(1.0 + 1.0 / len(others))
    apart = logs[far] - statistics.fmean(others)
    return far if abs(apart) > 1e-9 and count * compute_p(apart, error, count - 2) <= OUTLIER_P else None


def _find_step(logs: Sequence[float]) -> tuple[float, int, float]:
    """Find the place that divides runs best into two levels. Return its p for all places, it, the difference."""
    found = []
    for place in range(2, len(logs) - 1):
        sides = logs[:place], logs[place:]
        apart = statistics.fmean(sides[1]) - statistics.fmean(sides[0])
        squares = sum((log - statistics.fmean(side)) ** 2 for side in sides for log in side)
        error = math.sqrt(squares / (len(logs) - 2) * sum(1.0 / len(side) for side in sides))
        found.append((compute_p(apart, error, len(logs) - 2) * (len(logs) - 3), place, apart))
    return min(found)
