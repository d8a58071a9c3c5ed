"""RunRecord: what one log says about one run, the only place where events become times. It judges nothing.

Keys alone are trusted (event_type is wrong in thousands of published lines); the first run_start and the first run_stop
count, and whatever stands after run_stop is ignored. Every field is optional where published logs lack it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from suite.log import mllog
from suite.log.reader import Log


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


class Evaluation(NamedTuple):
    """One logged value of the metric. ``time_s`` counts from run_start; ``epoch`` is the log's own number."""

    epoch: float | None
    value: float
    time_s: float
    line: int


class Epoch(NamedTuple):
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
    data_manifest: str | None = None
    config: Mapping[str, Any] | None = None

    @property
    def compute_units(self) -> int | None:
        """Accelerators of the run, or its nodes if it has none; the log's own claim."""
        if self.nodes is None:
            return None
        return self.nodes * max(self.accelerators_per_node or 0, 1)


def summarise(log: Log) -> RunRecord:
    """The record of a log. Total: any events give a record, with None where they say nothing usable."""
    start, stop = log.first("run_start"), log.first("run_stop")
    run = log.until("run_stop")
    zero_ms = start.time_ms if start is not None else run.events[0].time_ms if run.events else 0.0
    end_ms = stop.time_ms if stop is not None else None
    duration_s = (end_ms - zero_ms) / 1e3 if start is not None and end_ms is not None else None
    spans = _Spans.of(run, zero_ms, end_ms)
    metric_key, evals = _evals(run, zero_ms)
    staging = _closed(intervals(run, (mllog.STAGING,), zero_ms), None)
    staging_s, outside_s, in_run = _staging(staging, started=start is not None)
    mode = run.first(mllog.RUN_MODE)

    def first(key: str) -> Any:
        event = run.first(key)
        return None if event is None else event.value

    train_samples = _whole(first(mllog.TRAIN_SAMPLES))
    return RunRecord(
        path=log.path,
        benchmark=_text(first(mllog.SUBMISSION_BENCHMARK)),
        size=_text(first(mllog.BENCHMARK_SIZE)),
        ruleset=_text(first(mllog.RULESET)),
        suite_version=_text(first(mllog.SUITE_VERSION)),
        seed=_whole(first(mllog.SEED)),
        org=_text(first(mllog.SUBMISSION_ORG)),
        division=_text(first(mllog.SUBMISSION_DIVISION)),
        submission_status=_text(first(mllog.SUBMISSION_STATUS)),
        platform=_text(first(mllog.SUBMISSION_PLATFORM)),
        mode=_text(mode.value) if mode else None,
        trial=_whole(mode.metadata.get("trial")) if mode else None,
        instance=_whole(mode.metadata.get("instance")) if mode else None,
        nodes=_whole(first(mllog.NUMBER_OF_NODES)),
        ranks=_whole(first(mllog.NUMBER_OF_RANKS)),
        accelerators_per_node=_whole(first(mllog.ACCELERATORS_PER_NODE)),
        global_batch_size=_whole(first(mllog.GLOBAL_BATCH_SIZE)),
        train_samples=train_samples,
        eval_samples=_whole(first(mllog.EVAL_SAMPLES)),
        model_parameters=_whole(first(mllog.MODEL_PARAMETERS)),
        hyperparameters=_hyperparameters(run),
        run_start_s=zero_ms / 1e3 if start is not None else None,
        run_stop_s=end_ms / 1e3 if end_ms is not None else None,
        init_s=_between(run, "init_start", "init_stop"),
        staging_s=staging_s,
        staging_in_run=in_run,
        time_to_train_s=duration_s,
        time_with_staging_s=duration_s + outside_s if duration_s is not None else None,
        status=_text(stop.metadata.get("status")) if stop is not None else None,
        resumed=run.first(mllog.RUN_RESUMED) is not None,
        metric_key=metric_key,
        evals=evals,
        epochs=spans.epochs,
        asynchronous_eval=spans.asynchronous,
        train_s=spans.train_s if spans.epochs else None,
        eval_s=spans.eval_s if spans.evals else None,
        other_s=_other(spans, staging, duration_s),
        samples_per_s=_throughput(spans, train_samples),
        phases=_phases(run, mllog.STEP_PHASES),
        rank_mean_phases=_phases(run, mllog.RANK_PHASES),
        cache_state=_text(first(mllog.CACHE_STATE)),
        startup=_mapping(first(mllog.STARTUP)),
        staging_stats=_mapping(first(mllog.STAGING_STATS)),
        work_per_sample=_numbers(first(mllog.WORK_PER_SAMPLE)),
        baselines=_numbers(first(mllog.BASELINE)),
        data_manifest=_text(first(mllog.DATA_MANIFEST)),
        config=_mapping(first(mllog.RUN_CONFIG)),
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


class Interval(NamedTuple):
    """An interval in seconds from a zero; ``number`` is its epoch_num. ``stop_s`` None: the log never closes it."""

    number: float | None
    start_s: float
    stop_s: float | None


_EXACT = 2**53  # integers below are floats exactly


def intervals(log: Log, stems: Sequence[str], zero_ms: float) -> list[Interval]:
    """Start and stop events of some stems as intervals, in order of their starts; no stop lies before its start.

    A stop closes the interval of its epoch number, else the oldest open one. A start whose number is open already is the
    same interval, logged by another rank.
    """
    found: list[Interval] = []
    opened: dict[float | None, int] = {}
    begins = {f"{stem}_start" for stem in stems}
    for key, _, time_ms, _, metadata, _ in log.every(*begins, *(f"{stem}_stop" for stem in stems)):
        number = metadata.get("epoch_num", metadata.get("first_epoch_num"))
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


class Span(NamedTuple):
    """An `Interval` with an end."""

    number: float | None
    start_s: float
    stop_s: float
    complete: bool = True


def _closed(spans: Iterable[Interval], end_s: float | None) -> list[Span]:
    """Intervals with an end; open ones end at ``end_s`` and are not complete, or are left out without it."""
    ended = []
    for number, start_s, stop_s in spans:
        if stop_s is not None:
            ended.append(Span(number, start_s, stop_s))
        elif end_s is not None:
            ended.append(Span(number, start_s, end_s, complete=False))
    return ended


@dataclass(frozen=True, slots=True)
class _Spans:
    """Epoch and evaluation intervals of a run, and what they add up to."""

    epochs: tuple[Epoch, ...]
    evals: tuple[Span, ...]
    asynchronous: bool
    train_s: float
    eval_s: float

    @staticmethod
    def of(run: Log, zero_ms: float, end_ms: float | None) -> _Spans:
        epochs = _closed(intervals(run, (mllog.EPOCH,), zero_ms), None if end_ms is None else (end_ms - zero_ms) / 1e3)
        evals = _closed(intervals(run, (mllog.EVAL,), zero_ms), None)
        by_start, evals_by_start = ByStart.of(epochs), ByStart.of(evals)
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


_TOLERANCE_S = 2e-3  # intervals are stamped in whole milliseconds, one after the other


def _overlapping(epochs: Sequence[Span]) -> bool:
    return any(later.start_s < earlier.stop_s - _TOLERANCE_S for earlier, later in pairwise(epochs))


@dataclass(frozen=True, slots=True)
class ByStart:
    """Spans in order of start, and how far all up to each reach, so that what overlaps a time is found at once."""

    spans: list[Span]
    starts: list[float]
    reach: list[float]

    @staticmethod
    def of(spans: Iterable[Span]) -> ByStart:
        """The same spans, ordered."""
        ordered = sorted(spans, key=lambda span: span.start_s)
        reach = list(accumulate((span.stop_s for span in ordered), max))
        return ByStart(ordered, [span.start_s for span in ordered], reach)

    def overlapping(self, start_s: float, stop_s: float) -> Iterator[Span]:
        """Spans that begin before ``stop_s`` and end after ``start_s``, the latest first."""
        index = bisect_left(self.starts, stop_s) - 1
        while index >= 0 and self.reach[index] > start_s:
            if self.spans[index].stop_s > start_s:
                yield self.spans[index]
            index -= 1


def _crosses(span: Span, epochs: ByStart) -> bool:
    """True if an evaluation runs beside training: inside a later epoch than the one it evaluates, or across two."""
    epoch = next(epochs.overlapping(span.start_s, math.nextafter(span.start_s + _TOLERANCE_S, math.inf)), None)
    if epoch is None:
        return False
    if epoch.number is not None and span.number is not None and span.number < epoch.number:
        return True
    after = bisect_left(epochs.starts, epoch.stop_s)
    return after < len(epochs.starts) and epochs.starts[after] < span.stop_s - _TOLERANCE_S


def _nested_s(epoch: Span, evals: ByStart) -> float:
    inside = evals.overlapping(epoch.start_s, epoch.stop_s)
    return sum(min(epoch.stop_s, span.stop_s) - max(epoch.start_s, span.start_s) for span in inside)


def _length(spans: Sequence[Span | Epoch]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, -math.inf
    for span in sorted(spans, key=lambda item: item.start_s):
        total += max(0.0, span.stop_s - max(span.start_s, reach))
        reach = max(reach, span.stop_s)
    return total


def _other(spans: _Spans, staging: Sequence[Span], duration_s: float | None) -> float | None:
    """Run time in no epoch, no evaluation and no staging."""
    if duration_s is None or not spans.epochs:
        return None
    inside = [Span(None, max(span.start_s, 0.0), min(span.stop_s, duration_s)) for span in staging]
    covered: list[Span | Epoch] = [*spans.epochs, *spans.evals, *inside]
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


def _evals(run: Log, zero_ms: float) -> tuple[str | None, tuple[Evaluation, ...]]:
    """The values of the first metric key that occurs; values that are not numbers are left out."""
    key = next((key for key in run.places if key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY)), None)
    found = []
    for event in run.every(key) if key is not None else ():
        if (value := finite(event.value)) is not None:
            epoch = finite(event.metadata.get("epoch_num"))
            found.append(Evaluation(epoch, value, (event.time_ms - zero_ms) / 1e3, event.line))
    return key, tuple(found)


def _staging(spans: Sequence[Span], *, started: bool) -> tuple[float | None, float, bool | None]:
    """Seconds of staging, those before run_start, and whether most was inside the run; None: no pair of events."""
    if not spans:
        return None, 0.0, None
    total = _length(spans)
    if not started:
        return total, 0.0, None
    before = _length([Span(None, span.start_s, min(span.stop_s, 0.0)) for span in spans if span.start_s < 0.0])
    return total, before, before < total / 2


def _phases(run: Log, key: str) -> Phases | None:
    names = [name.removesuffix("_s") for name in Phases.__slots__]
    totals = dict.fromkeys(names, 0.0)
    found = False
    for event in run.every(key):
        if isinstance(event.value, Mapping):
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


def _hyperparameters(run: Log) -> Mapping[str, Any]:
    """First value of every key that is not the harness's own: all before run_start, and opt_* and dropout anywhere."""
    found: dict[str, Any] = {}
    start = run.places["run_start"][0] if "run_start" in run.places else len(run.events)
    for key, places in run.places.items():
        named = key.startswith(("opt_", "scheduler_")) or key in ("dropout", mllog.GLOBAL_BATCH_SIZE)
        if (named or places[0] < start) and key not in _NOT_HYPERPARAMETERS:
            found[key] = run.events[places[0]].value
    return MappingProxyType(found)


def _between(run: Log, start: str, stop: str) -> float | None:
    begin, end = run.first(start), run.first(stop)
    return (end.time_ms - begin.time_ms) / 1e3 if begin is not None and end is not None else None


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
