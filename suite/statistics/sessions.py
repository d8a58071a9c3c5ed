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

from mlhpc.suite.statistics import CONFIDENCE, compute_t_cdf, compute_t_quantile, exponentiate

GAP_S = 14_400.0  # a pause of less changes seconds per epoch as little as one of minutes (published results)
SESSION_SPREAD = 0.05  # of the log of a session's time: 24 of 28 published results with several sessions have less
SPREAD_DOF = 2.0  # sessions that it counts as much as
ORDER_P = 0.05  # chance that the order of independent runs of one side is said to have a step or a trend
OUTLIER_P = 0.01  # chance that a run of independent normal ones is called an outlier
MIN_ORDERED = 4  # runs whose order says something


class TimedRun(NamedTuple):
    """When a run began (Unix time in seconds, or any number that orders runs), its seconds, and its batch job.

    ``epochs`` is what it trained; 0 if not known, or if the time is that of one epoch.
    """

    begin_s: float
    time_s: float
    job: str = ""
    epochs: float = 0.0


def find_sessions(runs: Sequence[TimedRun]) -> list[list[TimedRun]]:
    """Divide runs, in order of their start, into sessions.

    A session ends at a pause of four hours or more, or where the job changes.
    """
    ordered = sorted(runs)
    sessions = [ordered[:1]]
    for before, run in pairwise(ordered):
        if run.begin_s - before.begin_s - before.time_s >= GAP_S or run.job != before.job:
            sessions.append([])
        sessions[-1].append(run)
    return sessions


def render_sessions(runs: int, sessions: int) -> str:
    """Render numbers of runs and sessions: ``10 runs in 2 sessions``; one session is not worth a word."""
    return f"{runs} runs" + (f" in {sessions} sessions" if sessions > 1 else "")


def compute_geometric_mean(runs: Sequence[TimedRun]) -> float:
    """Compute the geometric mean of the times of one run or more."""
    return statistics.geometric_mean(run.time_s for run in runs)


class Error(NamedTuple):
    """The standard error of a mean or difference of logs, known by some degrees of freedom."""

    size: float
    dof: float

    def find_half(self, confidence: float = CONFIDENCE) -> float:
        """Find half of the width of the interval, by Student's t."""
        return compute_t_quantile(0.5 + confidence / 2, self.dof) * self.size

    @property
    def ratio(self) -> float:
        """The largest ratio that the error explains, at 95 %."""
        return exponentiate(self.find_half())


def compute_error(values: Sequence[float]) -> Error:
    """Compute the standard error of the mean of two or more values."""
    return Error(statistics.stdev(values) / math.sqrt(len(values)), len(values) - 1)


def compute_mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Compute the mean of two or more values and the half width of its Student-t interval."""
    return statistics.fmean(values), compute_error(values).find_half(confidence)


def compute_log_interval(times: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Compute the interval of the geometric mean (Student's t on log time). None for fewer than two times."""
    if len(times) < 2:
        return None
    middle, half = compute_mean_interval([math.log(time) for time in times], confidence)
    return exponentiate(middle - half), exponentiate(middle + half)


def choose_error(runs: Error, units: Error, means: Sequence[Sequence[float]], confidence: float) -> tuple[Error, int]:
    """Choose the error where sessions are the unit, and say its place: that by runs, by sessions, by assumption.

    ``means`` are the mean logs of the sessions of each side. Two sessions have one degree of freedom, which allows for
    a thousandfold difference, and two that are alike by luck have no spread. So the third error adds `SPREAD_DOF`
    sessions that spread by `SESSION_SPREAD` to the present ones (a moderated variance), and the error of the runs.
    The narrower interval of the last two counts, and none that is narrower than that of the runs.
    """
    dof = SPREAD_DOF + sum(len(side) - 1 for side in means)
    squares = sum((mean - statistics.fmean(side)) ** 2 for side in means for mean in side)
    part = (SPREAD_DOF * SESSION_SPREAD**2 + squares) / dof * sum(1.0 / len(side) for side in means)
    size = math.hypot(runs.size, math.sqrt(part))
    errors = (runs, units, Error(size, size**4 / (runs.size**4 / runs.dof + part**2 / dof)))  # Satterthwaite's
    halves = [error.find_half(confidence) for error in errors]
    place = max(0, min(1, 2, key=halves.__getitem__), key=halves.__getitem__)
    return errors[place], place


def estimate_mean(sessions: Sequence[Sequence[TimedRun]]) -> tuple[float, Error | None]:
    """Estimate the mean log time of the runs of one result, and its error. None: of one run."""
    logs = [[math.log(run.time_s) for run in session] for session in sessions]
    runs, means = [log for session in logs for log in session], [statistics.fmean(session) for session in logs]
    if len(means) > 1:
        return statistics.fmean(means), choose_error(compute_error(runs), compute_error(means), [means], CONFIDENCE)[0]
    return means[0], compute_error(runs) if len(runs) > 1 else None


@dataclass(frozen=True)
class Order:
    """What the order of the runs of one side shows. ``slope``: a trend is at least as sure as a step."""

    texts: tuple[str, ...] = ()
    slope: bool = False


def describe_order(runs: Sequence[TimedRun], side: str) -> Order:
    """Say in words which run is an outlier, and whether the others have a step or a trend. Runs of one session."""
    ordered = sorted(runs)
    logs = [math.log(run.time_s) for run in ordered]
    texts, places = [], list(range(len(logs)))

    def describe(what: str, apart: float, late: Sequence[int], early: Sequence[int]) -> None:
        """Add what was found, and whether the epochs of the late runs explain at least half of it."""
        epochs = [statistics.fmean(math.log(ordered[place].epochs or 1.0) for place in part) for part in (late, early)]
        texts.append(what + (", most of it by epochs" if (epochs[0] - epochs[1]) / apart >= 0.5 else ""))

    if (far := _find_outlier(logs)) is not None:
        places.remove(far)
        apart = logs[far] - statistics.median(logs[place] for place in places)
        describe(
            f"run {far + 1} of {side} takes {math.exp(apart):.3g} times as long as its others", apart, [far], places
        )
    kept = [logs[place] for place in places]
    # Runs side by side, and those of a log without a start, have no order
    beside = any(later.begin_s < run.begin_s + run.time_s / 2 for run, later in pairwise(ordered))
    if len(kept) < MIN_ORDERED or max(kept) == min(kept) or beside:
        return Order(tuple(texts))
    slope, error = fit_slope([places], [kept])
    trend_p = compute_p(slope, error, len(kept) - 2)
    step_p, place, apart = _find_step(kept)
    of_places = step_p * (len(kept) - 3)  # of all places that a step may have
    if 2.0 * min(trend_p, of_places) > ORDER_P:  # of two tests
        return Order(tuple(texts))
    early, late = places[:place], places[place:]
    change = (
        f"times of {side} {'grow' if slope > 0 else 'fall'} by {100 * abs(math.expm1(slope)):.3g} % from run to run"
    )
    if step_p < trend_p:  # it is named by what explains more, whichever of them is surer
        change = f"runs {late[0] + 1} to {late[-1] + 1} of {side} take {math.exp(apart):.3g} times as long"
        change += f" as 1 to {early[-1] + 1}"
    describe(change, apart, late, early)
    return Order(tuple(texts), slope=trend_p <= of_places)


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
    return 2.0 * compute_t_cdf(-abs(difference) / error, dof) if error > 0.0 else 0.0


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
    """Find the place that divides runs best into two levels. Return its p, it, the difference."""
    found = []
    for place in range(2, len(logs) - 1):
        sides = logs[:place], logs[place:]
        apart = statistics.fmean(sides[1]) - statistics.fmean(sides[0])
        squares = sum((log - statistics.fmean(side)) ** 2 for side in sides for log in side)
        error = math.sqrt(squares / (len(logs) - 2) * sum(1.0 / len(side) for side in sides))
        found.append((compute_p(apart, error, len(logs) - 2), place, apart))
    return min(found)
