"""One run on its own clock: epochs, evaluations, staging as seconds since run_start, and how they share the run's time.

Reads events by key and order of appearance only: event types are unreliable in published logs, every rank may have
logged, and times need not be monotonic. Says nothing about targets or scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from suite.mllog import Event

Span = tuple[float, float]


@dataclass(frozen=True)
class EpochSpan:
    """An epoch or block. ``stop_s`` is None if the log never closes it; ``number`` is epoch_num as logged."""

    number: float | None
    start_s: float
    stop_s: float | None


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
    staging: tuple[Span, ...]
    epochs: tuple[EpochSpan, ...]
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


def timeline(events: Sequence[Event], metric: str) -> Timeline:
    """Build the timeline of a log; ``metric`` is the key that carries the benchmark's metric (some log both).

    A log without run_start is put on the clock of its first event.
    """
    start = _first(events, "run_start")
    stop = _first(events, "run_stop")
    zero_ms = start.time_ms if start else (events[0].time_ms if events else 0.0)

    def seconds(event: Event) -> float:
        return (event.time_ms - zero_ms) / 1000.0

    init_start, init_stop = _first(events, "init_start"), _first(events, "init_stop")
    epoch_events = [e for e in events if e.key in {"epoch_start", "block_start", "epoch_stop", "block_stop"}]
    epochs = tuple(
        EpochSpan(number, begin, end)
        for number, begin, end in _pairs(epoch_events, ("epoch_start", "block_start"), seconds)
    )
    numbers = [epoch.number for epoch in epochs if epoch.number is not None]
    return Timeline(
        start_ms=start.time_ms if start else None,
        run_s=seconds(stop) if start and stop else None,
        end_s=max((seconds(event) for event in events), default=0.0),
        init_s=(init_stop.time_ms - init_start.time_ms) / 1000.0 if init_start and init_stop else None,
        staging=_staging(events, seconds),
        epochs=epochs,
        evals=_evaluations(events, metric, epochs, seconds),
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
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        result = float(value)
    except (ValueError, OverflowError):
        return None
    return result if math.isfinite(result) else None


def _first(events: Iterable[Event], key: str) -> Event | None:
    return next((event for event in events if event.key == key), None)


def _staging(events: Sequence[Event], seconds: Callable[[Event], float]) -> tuple[Span, ...]:
    spans: list[Span] = []
    begin: float | None = None
    for event in events:
        if event.key == "staging_start" and begin is None:
            begin = seconds(event)
        elif event.key == "staging_stop" and begin is not None:
            spans.append((begin, max(begin, seconds(event))))
            begin = None
    return tuple(spans)


def _pairs(
    events: Iterable[Event], starts: tuple[str, ...], seconds: Callable[[Event], float]
) -> list[tuple[float | None, float, float | None]]:
    """(number, start, stop) of intervals that share epoch_num; a repeated start (other ranks) is the same interval."""
    found: list[tuple[float | None, float, float | None]] = []
    open_at: dict[float | None, int] = {}
    for event in events:
        label = number(event.metadata.get("epoch_num", event.metadata.get("first_epoch_num")))
        if event.key in starts:
            if label not in open_at:
                open_at[label] = len(found)
                found.append((label, seconds(event), None))
        else:
            at = open_at.pop(label, None)
            if at is None and label is None and open_at:
                at = open_at.pop(next(iter(open_at)))
            if at is not None:
                found[at] = (found[at][0], found[at][1], max(found[at][1], seconds(event)))
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


def _evaluations(
    events: Sequence[Event], metric: str, epochs: Sequence[EpochSpan], seconds: Callable[[Event], float]
) -> tuple[Evaluation, ...]:
    found: list[_Draft] = []
    open_at: dict[float | None, _Draft] = {}
    unreported: dict[float | None, list[_Draft]] = {}
    for event in events:
        if event.key not in ("eval_start", "eval_stop", metric):  # logs with a million other events exist
            continue
        label = number(event.metadata.get("epoch_num"))
        step = number(event.metadata.get("step_num", event.metadata.get("step")))
        if event.key == "eval_start":
            if label not in open_at:
                open_at[label] = draft = _Draft(label, step, seconds(event))
                unreported.setdefault(label, []).append(draft)
                found.append(draft)
        elif event.key == "eval_stop":
            opened = open_at.pop(label, None)
            if opened is not None:
                opened.stop_s = max(opened.start_s or 0.0, seconds(event))
        else:
            waiting = unreported.get(label) or unreported.get(None)
            value = number(event.value)
            if waiting:
                draft = waiting.pop(0)
                draft.number, draft.value, draft.reported_s = label, value, seconds(event)
                draft.step = draft.step or step
            elif not any(e.number == label and e.value == value and e.step in (None, step) for e in found[-3:]):
                found.append(_Draft(label, step, reported_s=seconds(event), value=value))
    return tuple(_finished(draft, epochs) for draft in found)


def _finished(draft: _Draft, epochs: Sequence[EpochSpan]) -> Evaluation:
    evaluation = Evaluation(draft.number, draft.step, draft.start_s, draft.stop_s, draft.reported_s, draft.value)
    beside = _overlaps_later_epoch(evaluation, epochs)
    return replace(evaluation, overlaps_training=True) if beside else evaluation


def _overlaps_later_epoch(evaluation: Evaluation, epochs: Sequence[EpochSpan]) -> bool:
    """True if an epoch with another number began before the evaluation ended and after its own epoch began."""
    number, start = evaluation.number, evaluation.start_s
    if number is None or start is None:
        return False
    stop = evaluation.stop_s if evaluation.stop_s is not None else math.inf
    meanwhile = [e for e in epochs if e.start_s < stop and (e.stop_s is None or e.stop_s > start)]
    return any(epoch.number is not None and epoch.number > number for epoch in meanwhile)


def _clip(spans: Iterable[Span], window: Span) -> list[Span]:
    low, high = window
    return _merge([(max(a, low), min(b, high)) for a, b in spans if min(b, high) > max(a, low)])


def _merge(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _minus(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """What of the merged spans no hole covers."""
    left: list[Span] = []
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


def _length(spans: Iterable[Span]) -> float:
    return math.fsum(end - begin for begin, end in spans)
