"""RunRecord: what one log says about one run, the only place where events become times. It judges nothing.

Keys alone are trusted (event_type is wrong in thousands of published lines); the first run_start and the first run_stop
count, and whatever stands after run_stop is ignored. Every field is optional where published logs lack it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from suite import mllog
from suite.mllog import Event, Log


class Target(Protocol):
    """What a run is judged by: a `suite.card.SizeCard`, or the benchmark of a published ruleset."""

    @property
    def metric(self) -> str:
        """The key of the metric's events: eval_error or eval_accuracy."""
        ...

    @property
    def required_runs(self) -> int:
        """Runs that a time-to-train score needs."""
        ...

    def reached(self, value: float) -> bool:
        """True if ``value`` meets the target."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One logged value of the metric. ``time_s`` counts from run_start; ``epoch`` is the log's own number."""

    epoch: float | None
    value: float
    time_s: float
    line: int


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch, seconds from run_start. An epoch still open at run_stop ends there and is not ``complete``."""

    number: float | None
    start_s: float
    stop_s: float
    train_s: float
    eval_s: float
    complete: bool


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of all training steps of a run by phase; the first five sum to ``step_s``, overlapped lies inside."""

    data_wait_s: float
    forward_backward_s: float
    exposed_communication_s: float
    optimizer_s: float
    other_s: float
    overlapped_communication_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything known of one run. Times in seconds; ``run_start_s`` and ``run_stop_s`` are Unix time."""

    path: Path | None = None
    benchmark: str | None = None
    size: str | None = None
    ruleset: str | None = None
    suite_version: str | None = None
    seed: int | None = None
    org: str | None = None
    division: str | None = None
    submission_status: str | None = None
    platform: str | None = None
    mode: str | None = None
    trial: int | None = None
    instance: int | None = None
    nodes: int | None = None
    ranks: int | None = None
    accelerators_per_node: int | None = None
    global_batch_size: int | None = None
    train_samples: int | None = None
    eval_samples: int | None = None
    model_parameters: int | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    run_start_s: float | None = None
    run_stop_s: float | None = None
    init_s: float | None = None
    staging_s: float | None = None
    staging_in_run: bool | None = None
    time_to_train_s: float | None = None
    time_with_staging_s: float | None = None
    status: str | None = None
    resumed: bool = False
    metric_key: str | None = None
    evals: tuple[Evaluation, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    asynchronous_eval: bool = False
    train_s: float | None = None
    eval_s: float | None = None
    other_s: float | None = None
    samples_per_s: float | None = None
    phases: Phases | None = None
    rank_mean_phases: Phases | None = None
    cache_state: str | None = None
    startup: Mapping[str, Any] | None = None
    staging_stats: Mapping[str, Any] | None = None
    work_per_sample: Mapping[str, float] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)

    @property
    def compute_units(self) -> int | None:
        """Accelerators of the run, or its nodes if it has none; the log's own claim."""
        if self.nodes is None:
            return None
        return self.nodes * max(self.accelerators_per_node or 0, 1)


def summarise(log: Log | Iterable[Event], path: Path | None = None) -> RunRecord:
    """The record of a log. Total: any events give a record, with None where they say nothing usable."""
    events = log.events if isinstance(log, Log) else tuple(log)
    path = log.path if isinstance(log, Log) else path
    start = _index(events, "run_start")
    stop = _index(events, "run_stop")
    run = events[: stop + 1] if stop is not None else events
    first = _first_values(run)
    zero_ms = events[start].time_ms if start is not None else events[0].time_ms if events else 0.0
    end_ms = events[stop].time_ms if stop is not None else None
    duration_s = (end_ms - zero_ms) / 1e3 if start is not None and end_ms is not None else None
    spans = _Spans.of(run, zero_ms, end_ms)
    metric_key, evals = _evals(run, zero_ms)
    staging_s, outside_s, in_run = _staging(run, start, zero_ms)
    mode = next((event for event in run if event.key == mllog.RUN_MODE), None)
    train_samples = _whole(first.get(mllog.TRAIN_SAMPLES))
    return RunRecord(
        path=path,
        benchmark=_text(first.get(mllog.SUBMISSION_BENCHMARK)),
        size=_text(first.get(mllog.BENCHMARK_SIZE)),
        ruleset=_text(first.get(mllog.RULESET)),
        suite_version=_text(first.get(mllog.SUITE_VERSION)),
        seed=_whole(first.get(mllog.SEED)),
        org=_text(first.get(mllog.SUBMISSION_ORG)),
        division=_text(first.get(mllog.SUBMISSION_DIVISION)),
        submission_status=_text(first.get(mllog.SUBMISSION_STATUS)),
        platform=_text(first.get(mllog.SUBMISSION_PLATFORM)),
        mode=_text(mode.value) if mode else None,
        trial=_whole(mode.metadata.get("trial")) if mode else None,
        instance=_whole(mode.metadata.get("instance")) if mode else None,
        nodes=_whole(first.get(mllog.NUMBER_OF_NODES)),
        ranks=_whole(first.get(mllog.NUMBER_OF_RANKS)),
        accelerators_per_node=_whole(first.get(mllog.ACCELERATORS_PER_NODE)),
        global_batch_size=_whole(first.get(mllog.GLOBAL_BATCH_SIZE)),
        train_samples=train_samples,
        eval_samples=_whole(first.get(mllog.EVAL_SAMPLES)),
        model_parameters=_whole(first.get(mllog.MODEL_PARAMETERS)),
        hyperparameters=_hyperparameters(run, start),
        run_start_s=zero_ms / 1e3 if start is not None else None,
        run_stop_s=end_ms / 1e3 if end_ms is not None else None,
        init_s=_between(run, "init_start", "init_stop"),
        staging_s=staging_s,
        staging_in_run=in_run,
        time_to_train_s=duration_s,
        time_with_staging_s=duration_s + outside_s if duration_s is not None else None,
        status=_text(events[stop].metadata.get("status")) if stop is not None else None,
        resumed=any(event.key == mllog.RUN_RESUMED for event in run),
        metric_key=metric_key,
        evals=evals,
        epochs=spans.epochs,
        asynchronous_eval=spans.asynchronous,
        train_s=spans.train_s if spans.epochs else None,
        eval_s=spans.eval_s if spans.evals else None,
        other_s=_other(spans, run, zero_ms, duration_s),
        samples_per_s=_throughput(spans, train_samples),
        phases=_phases(run, mllog.STEP_PHASES),
        rank_mean_phases=_phases(run, mllog.RANK_PHASES),
        cache_state=_text(first.get(mllog.CACHE_STATE)),
        startup=_mapping(first.get(mllog.STARTUP)),
        staging_stats=_mapping(first.get(mllog.STAGING_STATS)),
        work_per_sample=_numbers(first.get(mllog.WORK_PER_SAMPLE)),
        baselines=_numbers(first.get(mllog.BASELINE)),
    )


def first_reaching(record: RunRecord, target: Target) -> Evaluation | None:
    """The first evaluation that meets the target, or None. Runs may go on after it; convergence is when it happened."""
    if record.metric_key != target.metric:
        return None
    return next((item for item in record.evals if target.reached(item.value)), None)


def finite(value: object) -> float | None:
    """A JSON number as float; None for anything else (text, true, NaN, infinity, an integer too large for a float)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class _Span:
    number: float | None
    start_s: float
    stop_s: float
    complete: bool


@dataclass(frozen=True, slots=True)
class _Spans:
    """Epoch and evaluation intervals of a run, and what they add up to."""

    epochs: tuple[Epoch, ...]
    evals: tuple[_Span, ...]
    asynchronous: bool
    train_s: float
    eval_s: float

    @staticmethod
    def of(run: Sequence[Event], zero_ms: float, end_ms: float | None) -> _Spans:
        epochs = list(_intervals(run, mllog.EPOCH, zero_ms, end_ms))
        evals = [span for span in _intervals(run, mllog.EVAL, zero_ms, end_ms) if span.complete]
        by_start, evals_by_start = _ByStart.of(epochs), _ByStart.of(evals)
        asynchronous = _overlapping(epochs) or any(_crosses(span, by_start) for span in evals)
        inside = [_nested_s(epoch, evals_by_start) for epoch in epochs]
        union_s = _length(epochs)
        return _Spans(
            epochs=tuple(
                Epoch(
                    epoch.number,
                    epoch.start_s,
                    epoch.stop_s,
                    epoch.stop_s - epoch.start_s - (0.0 if asynchronous else nested),
                    nested,
                    epoch.complete,
                )
                for epoch, nested in zip(epochs, inside, strict=True)
            ),
            evals=tuple(evals),
            asynchronous=asynchronous,
            train_s=union_s if asynchronous else union_s - sum(inside),
            eval_s=sum(span.stop_s - span.start_s for span in evals),
        )


def _intervals(run: Sequence[Event], stem: str, zero_ms: float, end_ms: float | None) -> Iterator[_Span]:
    """Start/stop pairs in order of start. A stop closes the oldest open start of its epoch number, else the oldest."""
    begins, ends = f"{stem}_start", f"{stem}_stop"
    opened: dict[int, tuple[float | None, float]] = {}  # number and start by index, oldest first
    numbered: dict[float | None, deque[int]] = {}
    spans: dict[int, _Span] = {}
    for index, event in enumerate(run):
        if event.key == begins:
            number = finite(event.metadata.get("epoch_num"))
            opened[index] = number, (event.time_ms - zero_ms) / 1e3
            numbered.setdefault(number, deque()).append(index)
        elif event.key == ends and opened:
            alike = numbered.get(finite(event.metadata.get("epoch_num")))
            begin = alike[0] if alike else next(iter(opened))
            number, start_s = opened.pop(begin)
            numbered[number].popleft()
            spans[begin] = _Span(number, start_s, (event.time_ms - zero_ms) / 1e3, True)
    if end_ms is not None:
        for index, (number, start_s) in opened.items():
            spans[index] = _Span(number, start_s, (end_ms - zero_ms) / 1e3, False)
    yield from (spans[index] for index in sorted(spans))


_TOLERANCE_S = 2e-3  # intervals are stamped in whole milliseconds, one after the other


def _overlapping(epochs: Sequence[_Span]) -> bool:
    return any(later.start_s < earlier.stop_s - _TOLERANCE_S for earlier, later in pairwise(epochs))


@dataclass(frozen=True, slots=True)
class _ByStart:
    """Spans in order of start, and how far all up to each reach, so that what overlaps a time is found at once."""

    spans: list[_Span]
    starts: list[float]
    reach: list[float]

    @staticmethod
    def of(spans: Iterable[_Span]) -> _ByStart:
        ordered = sorted(spans, key=lambda span: span.start_s)
        reach = list(accumulate((span.stop_s for span in ordered), max))
        return _ByStart(ordered, [span.start_s for span in ordered], reach)

    def overlapping(self, start_s: float, stop_s: float) -> Iterator[_Span]:
        """Spans that begin before ``stop_s`` and end after ``start_s``, the latest first."""
        index = bisect_left(self.starts, stop_s) - 1
        while index >= 0 and self.reach[index] > start_s:
            if self.spans[index].stop_s > start_s:
                yield self.spans[index]
            index -= 1


def _crosses(span: _Span, epochs: _ByStart) -> bool:
    """True if an evaluation runs beside training: inside a later epoch than the one it evaluates, or across two."""
    epoch = next(epochs.overlapping(span.start_s, math.nextafter(span.start_s + _TOLERANCE_S, math.inf)), None)
    if epoch is None:
        return False
    if epoch.number is not None and span.number is not None and span.number < epoch.number:
        return True
    after = bisect_left(epochs.starts, epoch.stop_s)
    return after < len(epochs.starts) and epochs.starts[after] < span.stop_s - _TOLERANCE_S


def _nested_s(epoch: _Span, evals: _ByStart) -> float:
    inside = evals.overlapping(epoch.start_s, epoch.stop_s)
    return sum(min(epoch.stop_s, span.stop_s) - max(epoch.start_s, span.start_s) for span in inside)


def _length(spans: Sequence[_Span | Epoch]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, -math.inf
    for span in sorted(spans, key=lambda item: item.start_s):
        total += max(0.0, span.stop_s - max(span.start_s, reach))
        reach = max(reach, span.stop_s)
    return total


def _other(spans: _Spans, run: Sequence[Event], zero_ms: float, duration_s: float | None) -> float | None:
    """Run time in no epoch, no evaluation and no staging."""
    if duration_s is None or not spans.epochs:
        return None
    staging = [
        _Span(None, max(span.start_s, 0.0), min(span.stop_s, duration_s), True)
        for span in _intervals(run, mllog.STAGING, zero_ms, None)
    ]
    covered: list[_Span | Epoch] = [*spans.epochs, *spans.evals, *staging]
    return duration_s - _length([span for span in covered if span.stop_s > span.start_s])


def _throughput(spans: _Spans, train_samples: int | None) -> float | None:
    """Training samples per second of complete epochs; None where an epoch is not one pass (OpenFold counts samples)."""
    numbers = [epoch.number for epoch in spans.epochs]
    passes = all(b is not None and a is not None and b - a in (0.0, 1.0) for a, b in pairwise(numbers))
    complete = [epoch for epoch in spans.epochs if epoch.complete]
    seconds = _length(complete) if spans.asynchronous else sum(epoch.train_s for epoch in complete)
    if not passes or not train_samples or seconds <= 0.0:
        return None
    return len({epoch.number for epoch in complete}) * train_samples / seconds


def _evals(run: Sequence[Event], zero_ms: float) -> tuple[str | None, tuple[Evaluation, ...]]:
    """The values of the first metric key that occurs; values that are not numbers are left out."""
    key = next((event.key for event in run if event.key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY)), None)
    found = []
    for event in run:
        if event.key == key and (value := finite(event.value)) is not None:
            epoch = finite(event.metadata.get("epoch_num"))
            found.append(Evaluation(epoch, value, (event.time_ms - zero_ms) / 1e3, event.line))
    return key, tuple(found)


def _staging(run: Sequence[Event], start: int | None, zero_ms: float) -> tuple[float | None, float, bool | None]:
    """Seconds of staging, those before run_start, and whether most was inside the run; None: no pair of events."""
    spans = list(_intervals(run, mllog.STAGING, zero_ms, None))
    if not spans:
        return None, 0.0, None
    total = _length(spans)
    if start is None:
        return total, 0.0, None
    before = _length([_Span(None, span.start_s, min(span.stop_s, 0.0), True) for span in spans if span.start_s < 0.0])
    return total, before, before < total / 2


def _phases(run: Sequence[Event], key: str) -> Phases | None:
    names = [name.removesuffix("_s") for name in Phases.__slots__]
    totals = dict.fromkeys(names, 0.0)
    found = False
    for event in run:
        if event.key == key and isinstance(event.value, Mapping):
            found = True
            for name in names:
                totals[name] += finite(event.value.get(name)) or 0.0
    return Phases(**{f"{name}_s": seconds for name, seconds in totals.items()}) if found else None


_STEMS = ("init", "run", "staging", "epoch", "eval", "block")
_NOT_HYPERPARAMETERS = frozenset(
    {
        *(f"{stem}_{side}" for stem in _STEMS for side in ("start", "stop")),
        *(value for name, value in vars(mllog).items() if name.isupper() and isinstance(value, str)),
        "submission_poc_name",
        "submission_poc_email",
        "weights_initialization",
    }
) - {mllog.GLOBAL_BATCH_SIZE}


def _hyperparameters(run: Sequence[Event], start: int | None) -> Mapping[str, Any]:
    """First value of every key that is not the harness's own: all before run_start, and opt_* and dropout anywhere."""
    found: dict[str, Any] = {}
    for index, event in enumerate(run):
        before = start is None or index < start
        named = event.key.startswith(("opt_", "scheduler_")) or event.key in ("dropout", mllog.GLOBAL_BATCH_SIZE)
        if (before or named) and event.key not in _NOT_HYPERPARAMETERS:
            found.setdefault(event.key, event.value)
    return MappingProxyType(found)


def _first_values(run: Sequence[Event]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for event in run:
        values.setdefault(event.key, event.value)
    return values


def _between(run: Sequence[Event], start: str, stop: str) -> float | None:
    begin = next((event.time_ms for event in run if event.key == start), None)
    end = next((event.time_ms for event in run if event.key == stop), None)
    return (end - begin) / 1e3 if begin is not None and end is not None else None


def _index(events: Sequence[Event], key: str) -> int | None:
    return next((index for index, event in enumerate(events) if event.key == key), None)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: object) -> int | None:
    """An integer of at most 64 bits, also where a log wrote it as text or as 512.0."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return None
    number = finite(value)
    return int(number) if number is not None and number == int(number) and abs(number) < 2.0**63 else None


def _mapping(value: object) -> Mapping[str, Any] | None:
    return MappingProxyType(value) if isinstance(value, dict) else None


def _numbers(value: object) -> Mapping[str, float]:
    if not isinstance(value, dict):
        return MappingProxyType({})
    pairs = ((key, finite(item)) for key, item in value.items())
    return MappingProxyType({key: number for key, number in pairs if number is not None})
