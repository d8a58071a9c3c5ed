"""One run on its own clock: epochs, evaluations, staging as seconds since run_start, and how they share the run's time.

Reads events by key and order of appearance only: event types are unreliable in published logs, every rank may have
logged, and times need not be monotonic. Says nothing about targets or scores.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from suite.log.reader import Log
from suite.log.record import ByStart, Interval, Span, intervals

Stretch = tuple[float, float]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation, unlogged times None. ``overlaps_training``: a later epoch was training meanwhile."""

    number: float | None
    step: float | None
    start_s: float | None
    stop_s: float | None
    reported_s: float | None
    value: float | None
    overlaps_training: bool = False


@dataclass(frozen=True)
class Timeline:
    """A run in seconds since the first run_start. ``run_s`` is None without run_stop; ``end_s`` is the last event."""

    start_ms: float | None
    run_s: float | None
    end_s: float
    init_s: float | None
    staging: tuple[Stretch, ...]
    epochs: tuple[Interval, ...]
    evals: tuple[Evaluation, ...]
    zero_based: bool


@dataclass(frozen=True)
class TimeShares:
    """Seconds of a run; staging_exposed + train + eval + other = run exactly.

    ``eval_s`` is evaluation that training waited for; ``eval_hidden_s`` ran beside a later epoch and costs nothing.
    ``staging_before_s`` lies before run_start and is no part of the run; ``staging_in_run_s`` has what epoch 1 hid.
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
    """Build the timeline of a log; ``metric`` is the key that carries the benchmark's metric (some log both).

    A log without run_start is put on the clock of its first event.
    """
    start, stop = log.first("run_start"), log.first("run_stop")
    init_start, init_stop = log.first("init_start"), log.first("init_stop")
    zero_ms = start.time_ms if start else (log.events[0].time_ms if log.events else 0.0)
    epochs = tuple(intervals(log, ("epoch", "block"), zero_ms))
    staging = intervals(log, ("staging",), zero_ms)
    numbers = [epoch.number for epoch in epochs if epoch.number is not None]
    return Timeline(
        start_ms=start.time_ms if start else None,
        run_s=(stop.time_ms - zero_ms) / 1e3 if start and stop else None,
        end_s=(max((event.time_ms for event in log.events), default=zero_ms) - zero_ms) / 1e3,
        init_s=(init_stop.time_ms - init_start.time_ms) / 1e3 if init_start and init_stop else None,
        staging=tuple((span.start_s, span.stop_s) for span in staging if span.stop_s is not None),
        epochs=epochs,
        evals=_evaluations(log, metric, epochs, zero_ms),
        zero_based=bool(numbers) and numbers[0] == 0,
    )


def shares(line: Timeline) -> TimeShares | None:
    """How the parts share the run, clipped at run_stop; None for a run without run_stop."""
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


def number(value: Any) -> float | None:
    """A finite number from a log value, or None. Text that is a number counts (OpenFold logs its seed as text)."""
    if value is None:  # most often
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        result = float(value)
    except (ValueError, OverflowError):
        return None
    return result if math.isfinite(result) else None


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
    for event in log.every("eval_start", "eval_stop", metric):
        at_s = (event.time_ms - zero_ms) / 1e3
        label = number(event.metadata.get("epoch_num"))
        if event.key == "eval_stop":
            opened = open_at.pop(label, None)
            if opened is not None:
                opened.stop_s = max(opened.start_s or 0.0, at_s)
            continue
        step = number(event.metadata.get("step_num", event.metadata.get("step")))
        if event.key == "eval_start":
            if label not in open_at:
                open_at[label] = draft = _Draft(label, step, at_s)
                unreported.setdefault(label, deque()).append(draft)
                found.append(draft)
            continue
        waiting = unreported.get(label) or unreported.get(None)
        value = number(event.value)
        if waiting:
            draft = waiting.popleft()
            draft.number, draft.value, draft.reported_s = label, value, at_s
            draft.step = draft.step or step
        elif not any(e.number == label and e.value == value and e.step in (None, step) for e in found[-3:]):
            found.append(_Draft(label, step, reported_s=at_s, value=value))
    by_start = ByStart.of([Span(e.number, e.start_s, math.inf if e.stop_s is None else e.stop_s) for e in epochs])
    return tuple(
        Evaluation(e.number, e.step, e.start_s, e.stop_s, e.reported_s, e.value, _overlaps_later_epoch(e, by_start))
        for e in found
    )


def _overlaps_later_epoch(evaluation: _Draft, epochs: ByStart) -> bool:
    """True if an epoch with a higher number was training while the evaluation went on."""
    if evaluation.number is None or evaluation.start_s is None:
        return False
    stop_s = math.inf if evaluation.stop_s is None else evaluation.stop_s
    meanwhile = epochs.overlapping(evaluation.start_s, stop_s)
    return any(epoch.number is not None and epoch.number > evaluation.number for epoch in meanwhile)


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
    """What of the merged spans no hole covers."""
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
