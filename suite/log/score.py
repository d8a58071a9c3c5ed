"""Computes scores by the MLPerf HPC rules: time to train (olympic mean) and throughput. Pure functions of records.

Rules: training_policies hpc_training_rules.adoc 6. Of N runs the fastest and the slowest are dropped. One run may fail
and then counts as the slowest. Throughput counts models trained between the first run_start and the last run_stop.

Says which results may be ranked against each other: same division, same data, and times that include the same.

Rounds of MLPerf HPC differ in both data and times (hpc_training_rules.adoc of each round).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlhpc.suite.card import Target
from mlhpc.suite.files import render_duration, render_repr
from mlhpc.suite.log.record import RunRecord, find_first_on_target
from mlhpc.suite.statistics import CONFIDENCE, compute_t_quantile, exponentiate
from mlhpc.suite.statistics.sessions import (
    SESSION_SPREAD,
    TimedRun,
    compute_geometric_mean,
    estimate_mean,
    find_sessions,
    render_sessions,
)

MINUTE_S = 60.0
FEW_VALUES = 3  # different numbers of epochs of runs that do not show how epochs vary


@dataclass(frozen=True)
class JudgedRun:
    """One run.

    ``find_failure``: why it did not converge, or None. ``dropped``: why the score leaves it out, or None.
    """

    record: RunRecord
    failure: str | None
    dropped: str | None = None

    @property
    def converged(self) -> bool:
        """True if the run reached the target in a time that counts."""
        return self.failure is None


@dataclass(frozen=True)
class TimeToTrain:
    """The score of repeated runs. Mean and spread are over the scored runs; None if there is no score.

    The interval is over all converged runs from which the scored ones were chosen, or over their sessions if there are
    several. Without the fastest and the slowest the others look closer than runs are. One run has neither spread nor
    interval. ``interval_words`` say what the interval is made of: it holds for further runs that are like these.
    """

    runs: tuple[JudgedRun, ...]
    required_runs: int
    reason: str | None
    mean_s: float | None = None
    mean_with_staging_s: float | None = None
    std_s: float | None = None
    fastest_s: float | None = None
    slowest_s: float | None = None
    interval_s: tuple[float, float] | None = None
    interval_words: str = ""

    @property
    def valid(self) -> bool:
        """True if this is a score."""
        return self.reason is None

    @property
    def scored(self) -> tuple[JudgedRun, ...]:
        """The runs that the mean is over."""
        return tuple(run for run in self.runs if run.dropped is None) if self.valid else ()

    @property
    def converged(self) -> int:
        """Number of runs that reached the target."""
        return sum(run.converged for run in self.runs)


@dataclass(frozen=True)
class Throughput:
    """The score of M concurrent runs: ``instances`` models of ``compute_instance_scale`` units on ``total_scale``
    units.

    ``instance_scale_claimed`` is what the logs say, which may be impossible (see `compute_instance_scale`).
    ``start_spread_s`` is the time between the first and the last run_start.
    """

    runs: tuple[JudgedRun, ...]
    required_runs: int
    reason: str | None
    instances: int | None = None
    instance_scale: int | None = None
    instance_scale_claimed: int | None = None
    total_scale: int | None = None
    time_to_train_all_s: float | None = None
    time_to_train_all_with_staging_s: float | None = None
    models_per_minute: float | None = None
    start_spread_s: float | None = None

    @property
    def valid(self) -> bool:
        """True if this is a score."""
        return self.reason is None

    @property
    def converged(self) -> int:
        """Number of instances that reached the target."""
        return sum(run.converged for run in self.runs)


def find_failure(record: RunRecord, target: Target) -> str | None:
    """Return in one phrase why a run does not count as converged. None if it does."""
    if record.resumed:
        return "resumed from a checkpoint, so not scored"
    if record.run_start_s is None:
        return "no run_start"
    if record.time_to_train_s is None:
        return "no run_stop"
    if record.time_to_train_s <= 0.0:
        return f"ends {render_duration(-record.time_to_train_s)} before it starts"
    if record.status not in (None, "success"):
        return f"status is {render_repr(record.status)}"
    if find_first_on_target(record, target) is None:
        return "target never reached"
    return None


def compute_time_to_train(
    records: Sequence[RunRecord], target: Target, reference: Mapping[int, Sequence[float]] | None = None
) -> TimeToTrain:
    """Compute the olympic mean of the runs of one benchmark on one system.

    ``reference``: epochs to target of reference runs by batch size, in any unit. With more runs than the N required,
    the rules choose the N consecutive runs, by start, whose score is the median.
    """
    need = target.required_runs
    runs = [JudgedRun(record, find_failure(record, target)) for record in records]
    eligible = [run for run in runs if not run.record.resumed]
    if len(eligible) < need:
        ended = sum(run.record.time_to_train_s is not None for run in eligible)
        return TimeToTrain(tuple(runs), need, f"not a score: {ended} of the {need} required runs complete")
    windows = _list_windows(eligible, need)
    scores = [_compute_window_score(window) for window in windows]
    window = windows[scores.index(statistics.median_high(scores))]
    failed = sum(not run.converged for run in window)
    if failed > 1:
        return TimeToTrain(tuple(runs), need, f"not a score: {failed} of {need} runs did not converge, one may")
    dropped = _find_dropped(window)
    inside = {id(run) for run in window}
    judged = tuple(
        JudgedRun(
            run.record, run.failure, dropped.get(id(run), None if id(run) in inside else _explain_not_scored(run, need))
        )
        for run in runs
    )
    kept = [run.record for run in judged if run.dropped is None]
    times = [_find_time_s(record) for record in kept]
    interval_s, words = _compute_interval([run.record for run in window if run.converged], target, reference or {})
    return TimeToTrain(
        judged,
        need,
        None,
        mean_s=statistics.fmean(times),
        mean_with_staging_s=statistics.fmean(record.time_with_staging_s or _find_time_s(record) for record in kept),
        std_s=statistics.stdev(times) if len(times) > 1 else None,
        fastest_s=min(times),
        slowest_s=max(times),
        interval_s=interval_s,
        interval_words=words,
    )


def _compute_interval(
    records: Sequence[RunRecord], target: Target, reference: Mapping[int, Sequence[float]]
) -> tuple[tuple[float, float] | None, str]:
    """Compute the interval of the geometric mean time of runs, and say what it is made of.

    Sessions are the unit if there are several. Where the epochs of runs have few values, their spread is at least that
    of the reference points: five runs of four epochs each do not show that one run in ten needs five.
    """
    runs = [TimedRun(record.run_start_s or 0.0, _find_time_s(record), record.job or "") for record in records]
    sessions = find_sessions(runs)
    words = f"by the spread of {render_sessions(len(runs), len(sessions))}"
    days = f"independent sessions that spread by {100 * SESSION_SPREAD:g} % or less"
    if_so = f", 95 % for normal noise and {'independent runs on equal days' if len(sessions) == 1 else days}"
    mean, error = estimate_mean(sessions)
    half = error.find_half() if error is not None else 0.0
    interval = (exponentiate(mean - half), exponentiate(mean + half)) if error is not None else None
    if len(sessions) > 1:
        return interval, words + if_so
    reached = [find_first_on_target(record, target) for record in records]
    epochs = [item.epoch for item in reached if item is not None and item.epoch]
    points = reference.get(_find_nearest(reference, records[0].global_batch_size), ())
    if interval is None or len(epochs) < len(runs) or len(set(epochs)) > FEW_VALUES or len(points) < FEW_VALUES:
        return interval, words + if_so
    variance = statistics.variance(math.log(point) for point in points if point > 0.0)
    variance += statistics.variance(math.log(run.time_s / epoch) for run, epoch in zip(runs, epochs, strict=True))
    half = compute_t_quantile(0.5 + CONFIDENCE / 2, len(runs) - 1) * math.sqrt(variance / len(runs))
    middle = compute_geometric_mean(runs)
    wider = (min(interval[0], middle * math.exp(-half)), max(interval[1], middle * math.exp(half)))
    return wider, words + (", and of the epochs of the reference points" if wider != interval else "") + if_so


def _find_nearest(reference: Mapping[int, Sequence[float]], batch: int | None) -> int:
    """Find the batch size of reference points that is nearest as a ratio."""
    known = [size for size in reference if size > 0]
    return min(known, key=lambda size: abs(math.log(size / batch)), default=0) if batch and batch > 0 else 0


def compute_olympic_mean(times: Sequence[float]) -> float:
    """Compute the mean of three or more times without the fastest and the slowest.

    A failed run has an infinite time: one is dropped as the slowest, two make the mean infinite.
    """
    return statistics.fmean(sorted(times)[1:-1])


def compute_throughput(records: Sequence[RunRecord], target: Target, total_scale: int | None = None) -> Throughput:
    """Compute the score of concurrent instances.

    ``total_scale`` is T; None: the units of all instances that overlap in time.
    """
    need = target.required_runs
    runs = tuple(JudgedRun(record, find_failure(record, target)) for record in records)
    done = [run.record for run in runs if run.converged]
    if len(done) < need:
        return Throughput(runs, need, f"not a score: {len(done)} of {need} instances converged")
    scale = compute_instance_scale(done, total_scale)
    starts, stops = [record.run_start_s or 0.0 for record in done], [record.run_stop_s or 0.0 for record in done]
    seconds = max(stops) - min(starts)
    staged = [start - _compute_staging_s(record) for start, record in zip(starts, done, strict=True)]
    return Throughput(
        runs,
        need,
        None,
        instances=len(done),
        instance_scale=scale,
        instance_scale_claimed=_find_common_scale(done),
        total_scale=total_scale if total_scale is not None else scale * count_concurrent_runs(done) if scale else None,
        time_to_train_all_s=seconds,
        time_to_train_all_with_staging_s=max(stops) - min(staged),
        models_per_minute=len(done) / (seconds / MINUTE_S),
        start_spread_s=max(starts) - min(starts),
    )


def compute_instance_scale(records: Sequence[RunRecord], total: int | None) -> int | None:
    """Compute S, the compute units of one instance. None if instances differ.

    Some published logs claim the whole system for each of many concurrent instances. Then S is the number of ranks, if
    all instances with that many fit into ``total``; otherwise an equal share of the system.
    """
    claimed = _find_common_scale(records)
    at_once = count_concurrent_runs(records)
    if claimed is None or total is None or not at_once or claimed * at_once <= total:
        return claimed
    ranks = {record.ranks for record in records}
    stated = next(iter(ranks)) if len(ranks) == 1 else None
    return stated if stated is not None and 0 < stated * at_once <= total else max(total // at_once, 1)


def count_concurrent_runs(records: Sequence[RunRecord]) -> int:
    """Return the maximum number of concurrent runs."""
    return count_peak_use(records)[0]


def count_peak_use(records: Sequence[RunRecord]) -> tuple[int, int]:
    """Return the maximum number of concurrent runs and of the compute units they claim together.

    Runs without an end are left out.
    """
    timed = [record for record in records if record.run_start_s is not None and record.run_stop_s is not None]
    begins = [(_find_start_s(record), 1, record.compute_units or 0) for record in timed]
    ends = [(record.run_stop_s or 0.0, -1, -(record.compute_units or 0)) for record in timed]
    running = most = units = most_units = 0
    for _, change, claim in sorted((*begins, *ends), key=lambda mark: mark[:2]):
        running, units = running + change, units + claim
        most, most_units = max(most, running), max(most_units, units)
    return most, most_units


def convert_to_minutes(seconds: float | None) -> Any:
    """Convert seconds to minutes; None stays None."""
    return None if seconds is None else seconds / MINUTE_S


def find_log_name(run: JudgedRun) -> str:
    """Return the name of a run's log."""
    return run.record.path.name if run.record.path else "?"


def _find_common_scale(records: Sequence[RunRecord]) -> int | None:
    scales = {record.compute_units for record in records}
    return next(iter(scales)) if len(scales) == 1 else None


def _list_windows(runs: list[JudgedRun], need: int) -> list[list[JudgedRun]]:
    ordered = sorted(runs, key=lambda run: _find_start_s(run.record)) if len(runs) > need else runs
    return [ordered[begin : begin + need] for begin in range(len(ordered) - need + 1)]


def _compute_window_score(window: list[JudgedRun]) -> float:
    return compute_olympic_mean([_find_time_s(run.record) if run.converged else math.inf for run in window])


def _find_dropped(window: list[JudgedRun]) -> dict[int, str]:
    """Return the two runs of a window that the olympic mean leaves out (by id), with the reasons."""
    ordered = sorted(window, key=lambda run: _find_time_s(run.record) if run.converged else math.inf)
    slowest = ordered[-1]
    why = "slowest" if slowest.converged else f"did not converge ({slowest.failure}), counts as the slowest"
    return {id(ordered[0]): "fastest", id(slowest): why}


def _explain_not_scored(run: JudgedRun, need: int) -> str:
    if run.record.resumed:
        return "resumed from a checkpoint, so not scored"
    return f"outside the {need} consecutive runs with the median score"


def _find_start_s(record: RunRecord) -> float:
    return math.inf if record.run_start_s is None else record.run_start_s


def _find_time_s(record: RunRecord) -> float:
    assert record.time_to_train_s is not None
    return record.time_to_train_s


def _compute_staging_s(record: RunRecord) -> float:
    if record.time_with_staging_s is None or record.time_to_train_s is None:
        return 0.0
    return record.time_with_staging_s - record.time_to_train_s


OLD, MIDDLE, NEW = "v0.7", "v1.0 and v2.0", "v3.0"
ROUND_GROUPS: Mapping[str, str] = {  # round or ruleset: the rounds whose times mean the same
    **{"v0.7": OLD, "v1.0": MIDDLE, "v2.0": MIDDLE, "v3.0": NEW},
    **{"0.7.0": OLD, "1.0.0": MIDDLE, "2.0.0": MIDDLE, "3.0.0": NEW, "mlhpc-1.0": NEW},
}
GROUP_MEANINGS: Mapping[str, str] = {
    OLD: "the first data sets; staging counts",
    MIDDLE: "staging counts",
    NEW: "staging before run_start does not count",
}


def find_round_group(round_: str | None) -> str:
    """Return the rounds whose times mean the same as this round's or ruleset's. An unknown one is returned as it is."""
    return ROUND_GROUPS.get(round_ or "", round_ or "no round")


def list_differences(
    round_a: str | None, round_b: str | None, division_a: str | None, division_b: str | None
) -> list[str]:
    """List the reasons, a clause each, why two results are not ranked against each other. Empty if they may be."""
    reasons = []
    first, second = find_round_group(round_a), find_round_group(round_b)
    if first != second:
        meanings = [f"{name} ({GROUP_MEANINGS[name]})" if name in GROUP_MEANINGS else name for name in (first, second)]
        reasons.append(f"unlike rules: {meanings[0]} and {meanings[1]}")
    if division_a != division_b:
        reasons.append(f"unlike divisions: {division_a or 'none'} and {division_b or 'none'}")
    return reasons
