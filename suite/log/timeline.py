"""The clock of a run: turn events into epochs, evaluations and staging in seconds since run_start, and into shares of its time.

Only the key and the order of events count: in published logs event types are unreliable, every rank may have logged, and times
need not rise. Nothing here knows targets or scores.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from suite.log import mllog
from suite.log.reader import Log
from suite.log.values import finite, number

Stretch = tuple[float, float]


class Interval(NamedTuple):
    """An interval in seconds since run_start; ``number`` is its epoch_num. ``stop_s`` is None if the log never closes it."""

    number: float | None
    start_s: float
    stop_s: float | None


class Epoch(NamedTuple):
    """One epoch, in seconds since run_start. An epoch that is open at run_stop ends there and is not ``complete``.

    ``train_s`` is its length without the evaluations that training waited for.
    """

    number: float | None
    start_s: float
    stop_s: float
    train_s: float
    complete: bool


@dataclass(frozen=True)
class Evaluation:
    """One evaluation. Times that were not logged are None. ``overlaps_training``: a later epoch trained at the same time."""

    number: float | None
    step: float | None
    start_s: float | None
    stop_s: float | None
    reported_s: float | None
    value: float | None
    overlaps_training: bool = False


@dataclass(frozen=True)
class Timeline:
    """A run in seconds since the first run_start, or the first event where there is none (``zero_ms``, Unix milliseconds).

    ``run_s`` is None without run_start or run_stop; ``end_s`` is the last event; ``zero_based``: epochs are numbered from 0.
    """

    start_ms: float | None
    zero_ms: float
    run_s: float | None
    end_s: float
    init_s: float | None
    staging: tuple[Stretch, ...]
    epochs: tuple[Interval, ...]
    evals: tuple[Evaluation, ...]
    zero_based: bool


@dataclass(frozen=True)
class TimeShares:
    """How a run spent its seconds: staging_exposed + train + eval + other = run.

    ``eval_s`` is evaluation that training waited for; ``eval_hidden_s`` overlapped training and cost no time.
    ``staging_before_s`` was before run_start and is no part of the run. ``staging_in_run_s`` includes what epoch 1 overlapped.
    """

    run_s: float
    staging_before_s: float
    staging_in_run_s: float
    staging_exposed_s: float
    train_s: float
    eval_s: float
    eval_hidden_s: float
    other_s: float


def timeline(log: Log, metric: str) -> Timeline:
    """Compute the timeline of a log. ``metric`` is the key of the benchmark's metric; some logs have both keys.

    If a log has no run_start, times count from its first event.
    """
    start, stop = log.first(mllog.RUN_START), log.first(mllog.RUN_STOP)
    init_start, init_stop = log.first(mllog.INIT_START), log.first(mllog.INIT_STOP)
    zero_ms = start.time_ms if start else (log.events[0].time_ms if log.events else 0.0)
    epochs = tuple(intervals(log, (mllog.EPOCH, mllog.BLOCK), zero_ms))
    staging = intervals(log, (mllog.STAGING,), zero_ms)
    numbers = [epoch.number for epoch in epochs if epoch.number is not None]
    return Timeline(
        start_ms=start.time_ms if start else None,
        zero_ms=zero_ms,
        run_s=(stop.time_ms - zero_ms) / 1e3 if start and stop else None,
        end_s=(max((event.time_ms for event in log.events), default=zero_ms) - zero_ms) / 1e3,
        init_s=(init_stop.time_ms - init_start.time_ms) / 1e3 if init_start and init_stop else None,
        staging=tuple((span.start_s, span.stop_s) for span in staging if span.stop_s is not None),
        epochs=epochs,
        evals=_evaluations(log, metric, epochs, zero_ms),
        zero_based=bool(numbers) and numbers[0] == 0,
    )


def shares(line: Timeline) -> TimeShares | None:
    """Compute how the parts share the run's time, clipped at run_stop; None for a run without run_stop."""
    if line.run_s is None:
        return None
    window = (0.0, line.run_s)
    ends = [*(e.start_s for e in line.epochs[1:]), math.inf]
    epochs = _clip(
        [(e.start_s, end if e.stop_s is None else e.stop_s) for e, end in zip(line.epochs, ends, strict=False)], window
    )
    timed = [e for e in line.evals if e.start_s is not None]
    spans = [(e.start_s or 0.0, math.inf if e.stop_s is None else e.stop_s, e.overlaps_training) for e in timed]
    waited = _clip([(a, b) for a, b, overlaps in spans if not overlaps], window)
    beside = _clip([(a, b) for a, b, overlaps in spans if overlaps], window)
    hidden = _length(beside) - _length(_minus(_minus(beside, epochs), waited))
    exposed_eval = _merge([*waited, *_minus(beside, epochs)])
    train = _minus(epochs, exposed_eval)
    in_run = _clip(line.staging, window)
    exposed_staging = _minus(_minus(in_run, epochs), exposed_eval)
    parts = (_length(exposed_staging), _length(train), _length(exposed_eval))
    return TimeShares(
        run_s=line.run_s,
        staging_before_s=_length(_clip(line.staging, (-math.inf, 0.0))),
        staging_in_run_s=_length(in_run),
        staging_exposed_s=parts[0],
        train_s=parts[1],
        eval_s=parts[2],
        eval_hidden_s=hidden,
        other_s=line.run_s - sum(parts),
    )


def staging_seconds(line: Timeline) -> tuple[float | None, float]:
    """Compute the seconds of staging (None if the log has none) and how many of them were before run_start."""
    if not line.staging:
        return None, 0.0
    before = _clip(line.staging, (-math.inf, 0.0)) if line.start_ms is not None else []
    return _length(_merge(line.staging)), _length(before)


def closed_epochs(line: Timeline) -> tuple[Epoch, ...]:
    """List the epochs, each with an end. An epoch that the log leaves open ends at run_stop; without run_stop it is left out."""
    waited = _merge(
        (e.start_s, math.inf if e.stop_s is None else e.stop_s)
        for e in line.evals
        if e.start_s is not None and not e.overlaps_training
    )
    epochs = []
    for label, start_s, end_s in line.epochs:
        stop_s = line.run_s if end_s is None else end_s
        if stop_s is not None:
            train_s = _length(_minus([(start_s, stop_s)], waited))
            epochs.append(Epoch(label, start_s, stop_s, train_s, end_s is not None))
    return tuple(epochs)


_EXACT = 2**53  # integers below are floats exactly


def intervals(log: Log, stems: Sequence[str], zero_ms: float) -> list[Interval]:
    """Pair the start and stop events of some stems, in order of their starts. No stop is before its start.

    A stop closes the interval with its epoch number, else the oldest open one. A start whose number is already open is the
    same interval, logged by another rank.
    """
    found: list[Interval] = []
    opened: dict[float | None, int] = {}
    begins = {f"{stem}_start" for stem in stems}
    for key, _, time_ms, _, metadata, _ in log.every(*begins, *(f"{stem}_stop" for stem in stems)):
        number = metadata.get("epoch_num", metadata.get("first_epoch_num", metadata.get("samples_count")))
        number = float(number) if type(number) is int and -_EXACT < number < _EXACT else finite(number)
        at_s = (time_ms - zero_ms) / 1e3
        if key in begins:
            if number not in opened:
                opened[number] = len(found)
                found.append(Interval(number, at_s, None))
        elif opened:
            place = opened.pop(number if number in opened else next(iter(opened)))
            span = found[place]
            found[place] = Interval(span.number, span.start_s, max(span.start_s, at_s))
    return found


@dataclass(slots=True)
class _Draft:
    """An `Evaluation` whose events are still coming."""

    number: float | None
    step: float | None
    start_s: float | None = None
    stop_s: float | None = None
    reported_s: float | None = None
    value: float | None = None


def _evaluations(log: Log, metric: str, epochs: Sequence[Interval], zero_ms: float) -> tuple[Evaluation, ...]:
    found: list[_Draft] = []
    open_at: dict[float | None, _Draft] = {}
    unreported: dict[float | None, deque[_Draft]] = {}
    for event in log.every(mllog.EVAL_START, mllog.EVAL_STOP, metric):
        at_s = (event.time_ms - zero_ms) / 1e3
        label = number(event.metadata.get("epoch_num"))
        if event.key == mllog.EVAL_STOP:
            opened = open_at.pop(label, None)
            if opened is not None:
                opened.stop_s = max(opened.start_s or 0.0, at_s)
            continue
        step = number(event.metadata.get("step_num", event.metadata.get("step")))
        if event.key == mllog.EVAL_START:
            if label not in open_at:
                open_at[label] = draft = _Draft(label, step, at_s)
                unreported.setdefault(label, deque()).append(draft)
                found.append(draft)
            continue
        waiting = unreported.get(label) or unreported.get(None)
        value = finite(event.value)
        if waiting:
            draft = waiting.popleft()
            draft.number, draft.value, draft.reported_s = label, value, at_s
            draft.step = draft.step or step
        elif not any(e.number == label and e.value == value and e.step in (None, step) for e in found[-3:]):
            found.append(_Draft(label, step, reported_s=at_s, value=value))
    by_start = _ByStart.of([Span(e.number, e.start_s, math.inf if e.stop_s is None else e.stop_s) for e in epochs])
    return tuple(
        Evaluation(e.number, e.step, e.start_s, e.stop_s, e.reported_s, e.value, _overlaps_later_epoch(e, by_start))
        for e in found
    )


def _overlaps_later_epoch(evaluation: _Draft, epochs: _ByStart) -> bool:
    """True if an epoch with a higher number trained during the evaluation."""
    if evaluation.number is None or evaluation.start_s is None:
        return False
    stop_s = math.inf if evaluation.stop_s is None else evaluation.stop_s
    meanwhile = epochs.overlapping(evaluation.start_s, stop_s)
    return any(epoch.number is not None and epoch.number > evaluation.number for epoch in meanwhile)


class Span(NamedTuple):
    """A stretch of time with its epoch number, in seconds from run_start."""

    number: float | None
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class _ByStart:
    """Spans sorted by start. ``reach`` is the latest end of all spans up to each, so that overlaps are found by bisection."""

    spans: list[Span]
    starts: list[float]
    reach: list[float]

    @staticmethod
    def of(spans: Iterable[Span]) -> _ByStart:
        """Sort spans by start."""
        ordered = sorted(spans, key=lambda span: span.start_s)
        reach = list(accumulate((span.stop_s for span in ordered), max))
        return _ByStart(ordered, [span.start_s for span in ordered], reach)

    def overlapping(self, start_s: float, stop_s: float) -> Iterator[Span]:
        """Find the spans that begin before ``stop_s`` and end after ``start_s``, latest first."""
        index = bisect_left(self.starts, stop_s) - 1
        while index >= 0 and self.reach[index] > start_s:
            if self.spans[index].stop_s > start_s:
                yield self.spans[index]
            index -= 1


def _clip(spans: Iterable[Stretch], window: Stretch) -> list[Stretch]:
    low, high = window
    return _merge([(max(a, low), min(b, high)) for a, b in spans if min(b, high) > max(a, low)])


def _merge(spans: Iterable[Stretch]) -> list[Stretch]:
    merged: list[Stretch] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _minus(spans: Sequence[Stretch], holes: Sequence[Stretch]) -> list[Stretch]:
    """Subtract the holes from the merged spans."""
    left: list[Stretch] = []
    for begin, end in spans:
        at = begin
        for low, high in holes:
            if high <= at or low >= end:
                continue
            if low > at:
                left.append((at, low))
            at = max(at, high)
        if at < end:
            left.append((at, end))
    return left


def _length(spans: Iterable[Stretch]) -> float:
    return math.fsum(end - begin for begin, end in spans)
