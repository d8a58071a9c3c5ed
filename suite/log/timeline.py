"""Turns events into epochs, evaluations and staging in seconds since run_start, and into shares of a run's time.

Only the key and the order of events count. In published logs event types are unreliable, every rank may have logged,
and times need not rise. Nothing here knows targets or scores.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import (
    Event,
    Log,
    Span,
    compute_spans_inside,
    convert_to_float,
    merge_spans,
    parse_float,
    remove_holes,
    sum_lengths,
)

STAGING_BEFORE = "staging before"  # the stretches of staging before run_start, which are no part of the run


class Interval(NamedTuple):
    """An interval in seconds since run_start; ``number`` is its epoch_num.

    ``stop_s`` is None if the log never closes it.
    """

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


class Evaluation(NamedTuple):
    """One evaluation.

    Times that were not logged are None. ``overlaps_training``: a later epoch trained at the same time.
    """

    number: float | None
    step: float | None
    start_s: float | None
    stop_s: float | None
    reported_s: float | None
    value: float | None
    overlaps_training: bool = False


@dataclass(frozen=True)
class Timeline:
    """A run in seconds since run_start, or since the first event if there is none (``zero_ms``, Unix milliseconds).

    ``run_s`` is None without run_start or run_stop. ``end_s`` is the last event. ``zero_based``: epochs are numbered
    from 0.
    """

    start_ms: float | None
    zero_ms: float
    run_s: float | None
    end_s: float
    init_s: float | None
    staging: tuple[Span, ...]
    epochs: tuple[Interval, ...]
    evals: tuple[Evaluation, ...]
    zero_based: bool


@dataclass(frozen=True)
class TimeShares:
    """How a run spent its seconds: staging_exposed + train + eval + other = run.

    ``eval_s`` is evaluation that training waited for; ``eval_hidden_s`` overlapped training and cost no time.
    ``staging_before_s`` was before run_start and is no part of the run. ``staging_in_run_s`` includes what epoch 1
    overlapped.
    """

    run_s: float
    staging_before_s: float
    staging_in_run_s: float
    staging_exposed_s: float
    train_s: float
    eval_s: float
    eval_hidden_s: float
    other_s: float


def compute_timeline(log: Log, metric: str) -> Timeline:
    """Compute the timeline of a log. ``metric`` is the key of the benchmark's metric; some logs have both keys.

    If a log has no run_start, times count from its first event.
    """
    start, stop = log.first(mllog.RUN_START), log.first(mllog.RUN_STOP)
    init_start, init_stop = log.first(mllog.INIT_START), log.first(mllog.INIT_STOP)
    zero_ms = start.time_ms if start else (log.events[0].time_ms if log.events else 0.0)
    epochs = tuple(find_intervals(log, (mllog.EPOCH, mllog.BLOCK), zero_ms))
    staging = find_intervals(log, (mllog.STAGING,), zero_ms)
    numbers = [epoch.number for epoch in epochs if epoch.number is not None]
    return Timeline(
        start_ms=start.time_ms if start else None,
        zero_ms=zero_ms,
        run_s=(stop.time_ms - zero_ms) / 1e3 if start and stop else None,
        end_s=(max((event.time_ms for event in log.events), default=zero_ms) - zero_ms) / 1e3,
        init_s=(init_stop.time_ms - init_start.time_ms) / 1e3 if init_start and init_stop else None,
        staging=tuple((span.start_s, span.stop_s) for span in staging if span.stop_s is not None),
        epochs=epochs,
        evals=_find_evaluations(log, metric, epochs, zero_ms),
        zero_based=bool(numbers) and numbers[0] == 0,
    )


class TimeParts(NamedTuple):
    """The parts of a run that ended, each merged and clipped at run_stop.

    ``staging``, ``train`` and ``waited`` do not overlap.
    """

    run_s: float
    before: list[Span]
    staging_all: list[Span]
    staging: list[Span]
    train: list[Span]
    waited: list[Span]
    hidden_s: float

    def shares(self) -> TimeShares:
        """Compute how the parts share the run's time."""
        lengths = (sum_lengths(self.staging), sum_lengths(self.train), sum_lengths(self.waited))
        return TimeShares(
            run_s=self.run_s,
            staging_before_s=sum_lengths(self.before),
            staging_in_run_s=sum_lengths(self.staging_all),
            staging_exposed_s=lengths[0],
            train_s=lengths[1],
            eval_s=lengths[2],
            eval_hidden_s=self.hidden_s,
            other_s=self.run_s - sum(lengths),
        )

    def stretches(self) -> dict[str, list[Span]]:
        """Return when each part was. Without "staging before" the parts together are the run, once."""
        known = merge_spans([*self.staging, *self.train, *self.waited])
        named = {"staging": self.staging, "training": self.train, "evaluation": self.waited}
        return {STAGING_BEFORE: self.before} | named | {"other": remove_holes([(0.0, self.run_s)], known)}


def find_time_parts(line: Timeline) -> TimeParts | None:
    """Find when each part of a run was, in seconds since run_start. None for a run without run_stop."""
    if line.run_s is None:
        return None
    window = (0.0, line.run_s)
    ends = [*(e.start_s for e in line.epochs[1:]), math.inf]
    epochs = compute_spans_inside(
        [(begin, end if stop is None else stop) for (_, begin, stop), end in zip(line.epochs, ends, strict=False)],
        window,
    )
    waited = compute_spans_inside(_find_evaluation_spans(line, beside=False), window)
    beside = compute_spans_inside(_find_evaluation_spans(line, beside=True), window)
    exposed, hidden_s = waited, 0.0
    if beside:
        alone = remove_holes(beside, epochs)
        exposed = merge_spans([*waited, *alone])
        hidden_s = sum_lengths(beside) - sum_lengths(remove_holes(alone, waited))
    in_run = compute_spans_inside(line.staging, window)
    return TimeParts(
        run_s=line.run_s,
        before=compute_spans_inside(line.staging, (-math.inf, 0.0)),
        staging_all=in_run,
        staging=remove_holes(remove_holes(in_run, epochs), exposed),
        train=remove_holes(epochs, exposed),
        waited=exposed,
        hidden_s=hidden_s,
    )


def _find_evaluation_spans(line: Timeline, *, beside: bool) -> list[Span]:
    """Return when evaluations were: overlapping training, or the others. One that is never closed lasts for ever."""
    return [
        (start_s, math.inf if stop_s is None else stop_s)
        for _, _, start_s, stop_s, _, _, overlaps in line.evals
        if overlaps is beside and start_s is not None
    ]


def compute_staging_seconds(line: Timeline) -> tuple[float | None, float]:
    """Compute the seconds of staging (None if the log has none), and how many were before run_start."""
    if not line.staging:
        return None, 0.0
    before = compute_spans_inside(line.staging, (-math.inf, 0.0)) if line.start_ms is not None else []
    return sum_lengths(merge_spans(line.staging)), sum_lengths(before)


def list_ended_epochs(line: Timeline) -> tuple[Epoch, ...]:
    """List the epochs, each with an end.

    An epoch that the log leaves open ends at run_stop. Without run_stop it is left out.
    """
    waited = merge_spans(_find_evaluation_spans(line, beside=False))
    starts, ends = [start_s for start_s, _ in waited], [end_s for _, end_s in waited]
    # Running sums, because epochs of a damaged log may overlap: to walk through the evaluations of each would take ever
    # longer.
    before = [0.0, *accumulate(end_s - start_s for start_s, end_s in waited)]
    epochs = []
    for epoch in line.epochs:
        start_s, stop_s = epoch.start_s, line.run_s if epoch.stop_s is None else epoch.stop_s
        if stop_s is None:
            continue
        # The evaluations inside are those from ``first`` to before ``after``.
        first, after = bisect_right(ends, start_s), bisect_left(starts, stop_s)
        if stop_s <= start_s:
            train_s = 0.0
        elif first >= after:
            train_s = stop_s - start_s
        else:
            outside = [max(0.0, starts[first] - start_s), max(0.0, stop_s - ends[after - 1])]
            covered = 0.0
            if after - first > 1:
                outside.append(starts[after - 1] - ends[first])
                covered = before[after - 1] - before[first + 1]
            train_s = math.fsum(outside) - covered
        epochs.append(Epoch(epoch.number, start_s, stop_s, train_s, epoch.stop_s is not None))
    return tuple(epochs)


def find_intervals(log: Log, stems: Sequence[str], zero_ms: float) -> list[Interval]:
    """Pair start and stop events of some stems, in order of their starts. No stop is before its start.

    A stop closes the interval with its epoch number, else the oldest open one. A start whose number is already open is
    the same interval, logged by another rank.
    """
    starts, stops = [f"{stem}_start" for stem in stems], [f"{stem}_stop" for stem in stems]
    found: list[Interval] = []
    opened: OrderedDict[float | None, int] = OrderedDict()  # by number, oldest first: where in ``found``
    for event in log.every(*starts, *stops):
        number = _read_epoch_number(event)
        at_s = (event.time_ms - zero_ms) / 1e3
        if event.key in starts:
            if number not in opened:
                opened[number] = len(found)
                found.append(Interval(number, at_s, None))
        elif opened:
            # The first of an OrderedDict, because that of a dict takes ever longer once many were taken.
            place = opened.pop(number if number in opened else next(iter(opened)))
            label, start_s, _ = found[place]
            found[place] = Interval(label, start_s, max(start_s, at_s))
    return found


def _read_epoch_number(event: Event) -> float | None:
    metadata = event.metadata
    if "epoch_num" in metadata:
        return convert_to_float(metadata["epoch_num"])
    return convert_to_float(metadata.get("first_epoch_num", metadata.get("samples_count")))


class _OpenEvaluation:
    """An `Evaluation` whose events are still coming."""

    __slots__ = ("number", "reported_s", "start_s", "step", "stop_s", "value")

    def __init__(self, number: float | None, step: float | None, start_s: float | None = None) -> None:
        self.number, self.step, self.start_s = number, step, start_s
        self.stop_s: float | None = None
        self.reported_s: float | None = None
        self.value: float | None = None


def _find_evaluations(log: Log, metric: str, epochs: Sequence[Interval], zero_ms: float) -> tuple[Evaluation, ...]:
    """List the evaluations in order of their first event.

    Start, value and stop belong together by their epoch number. A value without number goes to the oldest evaluation
    without value. A value that no evaluation waits for is an evaluation of its own, unless it repeats one of the last
    three.
    """
    found: list[_OpenEvaluation] = []
    opened: dict[float | None, _OpenEvaluation] = {}
    unreported: dict[float | None, deque[_OpenEvaluation]] = {}
    for event in log.every(mllog.EVAL_START, mllog.EVAL_STOP, metric):
        at_s = (event.time_ms - zero_ms) / 1e3
        label = parse_float(event.metadata.get("epoch_num"))
        if event.key == mllog.EVAL_STOP:
            ending = opened.pop(label, None)
            if ending is not None:
                ending.stop_s = max(ending.start_s or 0.0, at_s)
            continue
        metadata = event.metadata
        step = parse_float(metadata["step_num"] if "step_num" in metadata else metadata.get("step"))
        if event.key == mllog.EVAL_START:
            if label not in opened:  # else another rank logged it too
                opened[label] = draft = _OpenEvaluation(label, step, at_s)
                unreported.setdefault(label, deque()).append(draft)
                found.append(draft)
            continue
        value = convert_to_float(event.value)
        waiting = unreported.get(label) or unreported.get(None)
        if waiting:
            draft = waiting.popleft()
            draft.number, draft.value, draft.reported_s = label, value, at_s
            draft.step = draft.step or step
        elif not any(e.number == label and e.value == value and e.step in (None, step) for e in found[-3:]):
            found.append(draft := _OpenEvaluation(label, step))
            draft.reported_s, draft.value = at_s, value
    overlapping = _find_overlapping(found, epochs)
    return tuple(
        Evaluation(e.number, e.step, e.start_s, e.stop_s, e.reported_s, e.value, place in overlapping)
        for place, e in enumerate(found)
    )


def _find_overlapping(evaluations: Sequence[_OpenEvaluation], epochs: Sequence[Interval]) -> set[int]:
    """Find the evaluations during which an epoch with a higher number trained. Returns their places.

    Takes evaluations by their ends, and adds epochs as they begin. An epoch that ends no later than another and has no
    higher number never matters. In the epochs that are kept, numbers fall as ends rise. So the first one that ends
    after an evaluation began has the highest number.
    """
    waiting = sorted(epochs, key=lambda epoch: epoch.start_s, reverse=True)
    ends: list[float] = []
    numbers: list[float] = []
    found = set()

    def end_of(place: int) -> float:
        stop_s = evaluations[place].stop_s
        return math.inf if stop_s is None else stop_s

    for place in sorted(range(len(evaluations)), key=end_of):
        evaluation = evaluations[place]
        while waiting and waiting[-1].start_s < end_of(place):
            epoch = waiting.pop()
            end_s = math.inf if epoch.stop_s is None else epoch.stop_s
            at = bisect_left(ends, end_s)
            if epoch.number is None or (at < len(ends) and numbers[at] >= epoch.number):
                continue
            after = at + (at < len(ends) and ends[at] == end_s)
            while at > 0 and numbers[at - 1] <= epoch.number:
                at -= 1
            ends[at:after], numbers[at:after] = [end_s], [epoch.number]
        if evaluation.number is not None and evaluation.start_s is not None:
            at = bisect_right(ends, evaluation.start_s)
            if at < len(ends) and numbers[at] > evaluation.number:
                found.add(place)
    return found
