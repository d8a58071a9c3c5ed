"""The rules for epochs and evaluations: their numbers, values that are no numbers, evaluations without an end."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from mlhpc.suite.compliance.rules.base import (
    LOGGING,
    OURS,
    TRAINING,
    LogBreach,
    LogContext,
    cite,
    find_epoch_num,
    find_steps_between_evals,
    log_rule,
)
from mlhpc.suite.files import render_repr
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Event
from mlhpc.suite.log.values import convert_to_float, parse_int64

SCHEDULES = f"{cite(TRAINING, '9.4')}; mlperf_logging training_*/closed_*.yaml"  # only logs of MLPerf Training


@log_rule("eval-value", "every value of the metric is a number", LOGGING)
def check_eval_value(context: LogContext) -> Iterator[LogBreach]:
    for event in context.every(mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
        # NaN and infinity are values of the metric: the training diverged, the log is valid.
        if convert_to_float(event.value) is None and not _is_diverged(event):
            yield event.line, f"{event.key} = {render_repr(event.value)}: expected a number"


def _is_diverged(event: Event) -> bool:
    """True if the value is NaN or infinite, as a number or as text."""
    # JSON has no such numbers, so some codes log them as text.
    if isinstance(event.value, float):
        return not math.isfinite(event.value)
    return event.value in ("nan", "inf", "-inf")


@log_rule(
    "eval-epoch", "epochs, evaluations and metric values carry their epoch_num (Training: or samples_count)", LOGGING
)
def check_eval_epoch(context: LogContext) -> Iterator[LogBreach]:
    own = context.benchmark.numbered if context.benchmark is not None else {}
    for key, names in (dict(context.ruleset.data.numbered) | dict(own)).items():
        unnumbered: Sequence[Event] = context.by_key.get(key, ())
        for name in names:
            unnumbered = [event for event in unnumbered if convert_to_float(event.metadata.get(name)) is None]
        if unnumbered:
            yield unnumbered[0].line, f"{len(unnumbered)} {key} without a number {' or '.join(names)}"


@log_rule(
    "epoch-numbers",
    "epochs are numbered 1, 2, 3, ... (v0.7: from 0 or 1); OpenFold's by the samples seen: steps from one evaluation "
    "to the next times batch size",
    cite(TRAINING, "5.3"),
)
def check_epoch_numbers(context: LogContext) -> Iterator[LogBreach]:
    epochs = context.by_key.get(mllog.EPOCH_START, [])
    first = find_epoch_num(epochs[0]) if epochs else None
    increment: float | None = 1.0
    previous = 0.0
    if context.benchmark is not None and context.benchmark.epoch_counts_samples:
        steps, batch = find_steps_between_evals(context), context.record.global_batch_size
        increment = steps * batch if steps and batch else None  # unknown: only the order can be checked
    elif first is not None and first in context.ruleset.data.first_epochs:
        previous = first - 1
    for event in epochs:
        number = find_epoch_num(event)
        if number is None:  # rule eval-epoch reports it
            return
        if increment is None and number <= previous:
            yield event.line, f"epoch_num {number:g} after {previous:g}: samples seen never fall"
            return
        if increment is not None and number != previous + increment:
            yield event.line, f"epoch_num {number:g} where {previous + increment:g} is due"
            return
        previous = number


@log_rule(
    "eval-every-epoch",
    "every finished epoch is evaluated exactly once, with a value or NaN; a run that diverges may end with an "
    "evaluation without a value, and codes that evaluate beside the training in an epoch that is not evaluated",
    "the workload's card",
)
def check_eval_every_epoch(context: LogContext) -> Iterator[LogBreach]:
    if context.ruleset.foreign and context.division == "open":
        return  # only the closed division prescribes when to evaluate
    evaluated = _count_evaluations(context)
    finished = [epoch.number for epoch in context.record.epochs if epoch.complete]
    may_lack = context.ruleset.foreign or context.record.status != "success"  # the last epoch's evaluation
    for number in finished:
        values = evaluated[number]
        if values != 1 and not (values == 0 and number == finished[-1] and may_lack):
            yield None, f"epoch {render_repr(number)} has {values} values of the metric; expected 1"
            return


def _count_evaluations(context: LogContext) -> Counter[float | None]:
    """Count the values of the metric by epoch. NaN counts too: the run was evaluated, and had diverged."""
    key = context.record.metric_key
    events = context.run.every(key) if key is not None else []
    valued = [event for event in events if convert_to_float(event.value) is not None or _is_diverged(event)]
    return Counter(map(_find_eval_place, valued))


@log_rule("eval-diverged", "the metric is never NaN or infinite: there the training diverged", OURS)
def check_eval_diverged(context: LogContext) -> Iterator[LogBreach]:
    values = list(context.every(context.benchmark.metric)) if context.benchmark else []
    diverged = [event for event in values if _is_diverged(event)]
    if diverged:
        yield diverged[0].line, f"{len(diverged)} of {len(values)} values of {diverged[0].key} are NaN or infinite"


@log_rule("eval-negative", "no value of the metric is negative", OURS)
def check_eval_negative(context: LogContext) -> Iterator[LogBreach]:
    for event in context.every(context.benchmark.metric) if context.benchmark else ():
        number = convert_to_float(event.value)
        if number is not None and number < 0.0:
            yield event.line, f"{event.key} = {render_repr(event.value)}: expected a number of at least 0"
            return


@log_rule("eval-closed", "every evaluation that begins also ends, except the last if run_stop interrupts it", LOGGING)
def check_eval_closed(context: LogContext) -> Iterator[LogBreach]:
    if mllog.RUN_STOP not in context.by_key:
        return
    ended = Counter(find_epoch_num(event) for event in context.run.every(mllog.EVAL_STOP))
    for event in context.run.every(mllog.EVAL_START)[:-1]:
        number = find_epoch_num(event)
        if ended[number]:
            ended[number] -= 1
        elif number is not None:  # rule eval-epoch reports the others
            yield event.line, f"the evaluation of epoch {number:g} has no eval_stop"
            return


@log_rule(
    "eval-schedule",
    "evaluations come after as many samples as the benchmark prescribes, or in its interval within 10 % and a batch",
    SCHEDULES,
)
def check_eval_schedule(context: LogContext) -> Iterator[LogBreach]:
    benchmark, batch = context.benchmark, parse_int64(context.logged(mllog.GLOBAL_BATCH_SIZE))
    # The bound keeps a forged batch size from making the arithmetic of the schedule overflow.
    if benchmark is None or context.division == "open" or batch is None or not 0 < batch < 10**9:
        return
    if benchmark.schedule is not None:
        events = list(context.every(benchmark.metric))
        breach = benchmark.schedule.breach(
            batch, [convert_to_float(event.metadata.get("samples_count")) for event in events]
        )
        if breach is not None:
            index, due = breach
            seen = render_repr(events[index].metadata.get("samples_count"))
            yield events[index].line, f"evaluated after {seen} samples; {due} are due"
    if benchmark.interval is not None:
        # Sorted: other processes may evaluate, and log in any order. Logged twice is evaluated once.
        places = {
            place: event.line
            for event in context.run.every(benchmark.metric)
            if (place := _find_eval_place(event)) is not None
        }
        found = benchmark.interval.breach(batch, sorted(places), samples=benchmark.epoch_counts_samples)
        if found is not None:
            index, problem = found
            yield places[sorted(places)[index]], problem


def _find_eval_place(event: Event) -> float | None:
    """Return after how many epochs or samples a value of the metric was measured."""
    return convert_to_float(event.metadata.get("epoch_num", event.metadata.get("samples_count")))
