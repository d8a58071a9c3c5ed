"""The clock of a run: turn events into epochs, evaluations and staging in seconds since run_start, and into shares of its time.

Only the key and the order of events count: in published logs event types are unreliable, every rank may have logged, and times
need not rise. Nothing here knows targets or scores.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from operator import itemgetter, le, lt
from typing import Any, NamedTuple

from suite.log import mllog
from suite.log.reader import Event, Log
from suite.log.values import (
    Stretch,
    clip_stretches,
    finite,
    length_of,
    merge_stretches,
    number,
    subtract_stretches,
)


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


class Evaluation(NamedTuple):
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
        end_s=(max(map(_TIME_MS, log.events), default=zero_ms) - zero_ms) / 1e3,
        init_s=(init_stop.time_ms - init_start.time_ms) / 1e3 if init_start and init_stop else None,
        staging=tuple((span.start_s, span.stop_s) for span in staging if span.stop_s is not None),
        epochs=epochs,
        evals=_evaluations(log, metric, epochs, zero_ms),
        zero_based=bool(numbers) and numbers[0] == 0,
    )


class Parts(NamedTuple):
    """The parts of a run that ended, each merged and clipped at run_stop. ``staging``, ``train`` and ``waited`` do not overlap."""

    run_s: float
    before: list[Stretch]
    staging_all: list[Stretch]
    staging: list[Stretch]
    train: list[Stretch]
    waited: list[Stretch]
    hidden_s: float

    def shares(self) -> TimeShares:
        """Compute how the parts share the run's time."""
        lengths = (length_of(self.staging), length_of(self.train), length_of(self.waited))
        return TimeShares(
            run_s=self.run_s,
            staging_before_s=length_of(self.before),
            staging_in_run_s=length_of(self.staging_all),
            staging_exposed_s=lengths[0],
            train_s=lengths[1],
            eval_s=lengths[2],
            eval_hidden_s=self.hidden_s,
            other_s=self.run_s - sum(lengths),
        )

    def stretches(self) -> dict[str, list[Stretch]]:
        """List when each part was. "staging before" is no part of the run; the others together are the run, once."""
        known = merge_stretches([*self.staging, *self.train, *self.waited])
        named = {"staging": self.staging, "training": self.train, "evaluation": self.waited}
        return {"staging before": self.before} | named | {"other": subtract_stretches([(0.0, self.run_s)], known)}


def parts_of(line: Timeline) -> Parts | None:
    """Find when each part of a run was, in seconds since run_start; None for a run without run_stop."""
    if line.run_s is None:
        return None
    window = (0.0, line.run_s)
    ends = [*(e.start_s for e in line.epochs[1:]), math.inf]
    epochs = clip_stretches(
        [(begin, end if stop is None else stop) for (_, begin, stop), end in zip(line.epochs, ends, strict=False)],
        window,
    )
    waited = clip_stretches(_evaluated(line, beside=False), window)
    beside = clip_stretches(_evaluated(line, beside=True), window)
    exposed, hidden_s = waited, 0.0
    if beside:
        alone = subtract_stretches(beside, epochs)
        exposed = merge_stretches([*waited, *alone])
        hidden_s = length_of(beside) - length_of(subtract_stretches(alone, waited))
    in_run = clip_stretches(line.staging, window)
    return Parts(
        run_s=line.run_s,
        before=clip_stretches(line.staging, (-math.inf, 0.0)),
        staging_all=in_run,
        staging=subtract_stretches(subtract_stretches(in_run, epochs), exposed),
        train=subtract_stretches(epochs, exposed),
        waited=exposed,
        hidden_s=hidden_s,
    )


def _evaluated(line: Timeline, *, beside: bool) -> list[Stretch]:
    """When evaluations were, those beside training or the others. One that is never closed lasts for ever."""
    return [
        (start_s, math.inf if stop_s is None else stop_s)
        for _, _, start_s, stop_s, _, _, overlaps in line.evals
        if overlaps is beside and start_s is not None
    ]


def staging_seconds(line: Timeline) -> tuple[float | None, float]:
    """Compute the seconds of staging (None if the log has none) and how many of them were before run_start."""
    if not line.staging:
        return None, 0.0
    before = clip_stretches(line.staging, (-math.inf, 0.0)) if line.start_ms is not None else []
    return length_of(merge_stretches(line.staging)), length_of(before)


def closed_epochs(line: Timeline) -> tuple[Epoch, ...]:
    """List the epochs, each with an end. An epoch that the log leaves open ends at run_stop; without run_stop it is left out."""
    waited = _Covered(merge_stretches(_evaluated(line, beside=False)))
    epochs = []
    for label, start_s, end_s in line.epochs:
        stop_s = line.run_s if end_s is None else end_s
        if stop_s is not None:
            train_s = waited.left_of(start_s, stop_s)
            epochs.append(_new(Epoch, (label, start_s, stop_s, train_s, end_s is not None)))
    return tuple(epochs)


class _Covered:
    """Merged stretches, of which the length inside any other stretch is found by bisection: epochs may overlap."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = stretches
        self._starts = [begin for begin, _ in stretches]
        lengths = (end - begin for begin, end in stretches)
        self._before = [0.0, *accumulate(lengths)]  # length of all stretches before each

    def left_of(self, start_s: float, stop_s: float) -> float:
        """Compute how much of a stretch is outside; 0 if it ends before it begins."""
        low, high = bisect_left(self._starts, start_s), bisect_left(self._starts, stop_s)
        if low > 0 and self._stretches[low - 1][1] > start_s:
            low -= 1
        if stop_s <= start_s:
            return 0.0
        if high == low:
            return stop_s - start_s
        if high - low == 1:  # as nearly always
            begin, end = self._stretches[low]
            return (begin - start_s if begin > start_s else 0.0) + (stop_s - end if stop_s > end else 0.0)
        if high - low == 2:  # exact
            return length_of(subtract_stretches([(start_s, stop_s)], self._stretches[low:high]))
        ends = subtract_stretches([(start_s, stop_s)], [self._stretches[low], self._stretches[high - 1]])
        return length_of(ends) - (self._before[high - 1] - self._before[low + 1])


_EXACT = 2**53  # integers below are floats exactly
_ABSENT = object()
_TIME_MS = itemgetter(2)  # of an event
_new = tuple.__new__  # half the time of Interval()


def intervals(log: Log, stems: Sequence[str], zero_ms: float) -> list[Interval]:
    """Pair the start and stop events of some stems, in order of their starts. No stop is before its start.

    A stop closes the interval with its epoch number, else the oldest open one. A start whose number is already open is the
    same interval, logged by another rank.
    """
    begins, ends = ([f"{stem}_{side}" for stem in stems] for side in ("start", "stop"))
    starts, stops = log.every(*begins), log.every(*ends)
    if _alternate(log, begins, ends):  # as nearly always: each stop closes the only one that is open
        begin_s = [(event[2] - zero_ms) / 1e3 for event in starts]
        end_s = map(max, begin_s, [(event[2] - zero_ms) / 1e3 for event in stops])
        return list(map(_new, repeat(Interval), zip(map(_epoch_number, starts), begin_s, end_s, strict=True)))
    found: list[Interval] = []
    opened: OrderedDict[float | None, int] = (
        OrderedDict()
    )  # of a dict, taking the oldest again and again takes ever longer
    for event in log.every(*begins, *ends):
        number = _epoch_number(event)
        at_s = (event.time_ms - zero_ms) / 1e3
        if event.key in begins:
            if number not in opened:
                opened[number] = len(found)
                found.append(Interval(number, at_s, None))
        elif opened:
            place = opened.pop(number if number in opened else next(iter(opened)))
            label, start_s, _ = found[place]
            found[place] = Interval(label, start_s, at_s if at_s > start_s else start_s)
    return found


def _alternate(log: Log, *sides: Sequence[str]) -> bool:
    """True if events of these groups of keys come in turn, as often each: the first ones, the second ones, the first ones again."""
    places = [log.places_of(keys) for keys in sides]
    return (
        len(set(map(len, places))) == 1
        and all(all(map(lt, one, other)) for one, other in pairwise(places))
        and all(map(lt, places[-1], places[0][1:]))
    )


def _epoch_number(event: Event) -> float | None:
    metadata = event[4]
    number = metadata.get("epoch_num", _ABSENT)
    if number is _ABSENT:
        number = metadata.get("first_epoch_num", metadata.get("samples_count"))
    return float(number) if type(number) is int and -_EXACT < number < _EXACT else finite(number)


class _Draft:
    """An `Evaluation` whose events are still coming."""

    __slots__ = ("number", "reported_s", "start_s", "step", "stop_s", "value")

    def __init__(self, number: float | None, step: float | None, start_s: float | None = None) -> None:
        self.number, self.step, self.start_s = number, step, start_s
        self.stop_s: float | None = None
        self.reported_s: float | None = None
        self.value: float | None = None


def _evaluations(log: Log, metric: str, epochs: Sequence[Interval], zero_ms: float) -> tuple[Evaluation, ...]:
    found = _evaluations_in_turn(log, metric, zero_ms)
    if found is None:
        found = _evaluations_anyhow(log, metric, zero_ms)
    for place in _overlap_later_epochs(found, epochs):
        found[place] = found[place]._replace(overlaps_training=True)
    return tuple(found)


def _evaluations_in_turn(log: Log, metric: str, zero_ms: float) -> list[Evaluation] | None:
    """List the evaluations of most logs: start, value and stop in turn, all with the epoch's number. None for another log."""
    keys = [mllog.EVAL_START], [metric], [mllog.EVAL_STOP]
    if not _alternate(log, *keys) and not _alternate(log, keys[0], keys[2], keys[1]):
        return None
    starts, reports, stops = (log.every(key) for (key,) in keys)
    labels: list[Any] = [event[4].get("epoch_num") for event in starts]
    if not all(type(label) is int and -_EXACT < label < _EXACT for label in labels):
        return None
    for others in (reports, stops):
        theirs = [event[4].get("epoch_num") for event in others]
        if theirs != labels or set(map(type, theirs)) - {int}:
            return None
    begin_s = [(event[2] - zero_ms) / 1e3 for event in starts]
    end_s = map(max, begin_s, [(event[2] - zero_ms) / 1e3 for event in stops])
    at_s = [(event[2] - zero_ms) / 1e3 for event in reports]
    steps = [_step(start) or _step(report) for start, report in zip(starts, reports, strict=True)]
    values = [finite(event[1]) for event in reports]
    columns = zip(map(float, labels), steps, begin_s, end_s, at_s, values, repeat(False), strict=False)
    return list(map(_new, repeat(Evaluation), columns))


def _step(event: Event) -> float | None:
    metadata = event[4]
    step = metadata["step_num"] if "step_num" in metadata else metadata.get("step")
    return None if step is None else number(step)


def _evaluations_anyhow(log: Log, metric: str, zero_ms: float) -> list[Evaluation]:
    found: list[_Draft] = []
    open_at: dict[float | None, _Draft] = {}
    unreported: dict[float | None, deque[_Draft]] = {}
    for event in log.every(mllog.EVAL_START, mllog.EVAL_STOP, metric):
        key, value = event.key, event.value
        at_s = (event.time_ms - zero_ms) / 1e3
        label = event.metadata.get("epoch_num")
        label = float(label) if type(label) is int and -_EXACT < label < _EXACT else number(label)
        if key == mllog.EVAL_STOP:
            opened = open_at.pop(label, None)
            if opened is not None:
                begin_s = opened.start_s or 0.0
                opened.stop_s = at_s if at_s > begin_s else begin_s
            continue
        step = _step(event)
        if key == mllog.EVAL_START:
            if label not in open_at:
                open_at[label] = draft = _Draft(label, step, at_s)
                if label in unreported:
                    unreported[label].append(draft)
                else:
                    unreported[label] = deque((draft,))
                found.append(draft)
            continue
        waiting = unreported.get(label) or unreported.get(None)
        value = finite(value)
        if waiting:
            draft = waiting.popleft()
            draft.number, draft.value, draft.reported_s = label, value, at_s
            draft.step = draft.step or step
        elif not any(e.number == label and e.value == value and e.step in (None, step) for e in found[-3:]):
            found.append(draft := _Draft(label, step))
            draft.reported_s, draft.value = at_s, value
    return [Evaluation(e.number, e.step, e.start_s, e.stop_s, e.reported_s, e.value) for e in found]


def _overlap_later_epochs(evaluations: Sequence[Evaluation], epochs: Sequence[Interval]) -> set[int]:
    """Find the evaluations during which an epoch with a higher number trained. Returns their places.

    Evaluations are taken from the highest number down, and the epochs above each are entered by their starts into a tree
    that knows the latest end of all that start before a time: n log n steps, however many overlap.
    """
    numbered = sorted((e for e in epochs if e.number is not None), key=itemgetter(0))
    starts = [start_s for _, start_s, _ in numbered]
    ends = [math.inf if stop_s is None else stop_s for _, _, stop_s in numbered]
    if all(map(le, starts, starts[1:])) and all(map(le, ends, ends[1:])):
        return _overlap_the_next(evaluations, numbered, starts)
    starts.sort()
    latest_end = [-math.inf] * (len(starts) + 1)  # a Fenwick tree of maxima
    places = [place for place, e in enumerate(evaluations) if e.number is not None and e.start_s is not None]
    found = set()
    for place in sorted(places, key=lambda place: evaluations[place].number or 0.0, reverse=True):
        number, start_s, stop_s = evaluations[place].number, evaluations[place].start_s, evaluations[place].stop_s
        while numbered and number is not None and (numbered[-1].number or 0.0) > number:
            _, begin_s, end_s = numbered.pop()
            node = bisect_left(starts, begin_s) + 1
            while node < len(latest_end):
                latest_end[node] = max(latest_end[node], math.inf if end_s is None else end_s)
                node += node & -node
        node = bisect_left(starts, math.inf if stop_s is None else stop_s)
        while node > 0:
            if start_s is not None and latest_end[node] > start_s:
                found.add(place)
                break
            node -= node & -node
    return found


def _overlap_the_next(
    evaluations: Sequence[Evaluation], epochs: Sequence[Interval], starts: Sequence[float]
) -> set[int]:
    """Find what `_overlap_later_epochs` finds where epochs begin and end in the order of their numbers.

    Of the epochs that begin before an evaluation ends, the last one has the highest number and the latest end.
    """
    found = set()
    for place, e in enumerate(evaluations):
        if e.number is None or e.start_s is None:
            continue
        last = bisect_left(starts, math.inf if e.stop_s is None else e.stop_s) - 1
        if last >= 0:
            stop_s = epochs[last].stop_s
            if (epochs[last].number or 0.0) > e.number and (stop_s is None or stop_s > e.start_s):
                found.add(place)
    return found
