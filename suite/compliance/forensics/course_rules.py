"""The rules for the course of a run: its epochs, evaluations, samples and rates against each other and against the clock.

The time and the epochs of a run are single numbers that are easily edited; what stands around them is not.
"""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

from collections.abc import Iterator

from suite.compliance.rules.base import (
    HPC,
    OURS,
    LogBreach,
    LogContext,
    LogRule,
    epoch_num,
    finished_epochs,
    log_rule,
    steps_between_evals,
)
from suite.files import brief
from suite.log import mllog
from suite.log.reader import Event
from suite.log.timeline import Epoch
from suite.log.values import finite

_OF_THE_RUN = (  # and nothing else may stand before run_start that has an epoch or a step
    *(
        mllog.EPOCH_START,
        mllog.EPOCH_STOP,
        f"{mllog.BLOCK}_start",
        f"{mllog.BLOCK}_stop",
        mllog.EVAL_START,
        mllog.EVAL_STOP,
    ),
    *(mllog.EVAL_ERROR, mllog.EVAL_ACCURACY, mllog.TRACKED_STATS, mllog.STEP_PHASES, mllog.TARGET_ACCURACY_REACHED),
)
_OF_INIT = (mllog.TRAIN_SAMPLES, mllog.EVAL_SAMPLES)
_SHORTEST_EPOCH = 0.02  # of the longest; the shortest of 3,792 published logs is 0.05
_MOST_APART = 0.1  # of a rate; published rates are within 0.023 of their times
_PAUSE_S = (
    2.0  # for which a busy machine may stop between an epoch's time stamps and the first or the last of its steps
)
_LEAST_SHARE = 0.15  # of an epoch that its steps take, whatever paused
_SLACK_S = 0.1  # of clocks and time stamps
_SHORTEST_S = 1.0  # below, that is too much to say whether a rate is true


@log_rule("stop-early", "run_stop is not earlier than an epoch, evaluation or value that stands before it", OURS)
def stop_early(context: LogContext) -> Iterator[LogBreach]:
    stop = context.log.first(mllog.RUN_STOP)
    if context.benchmark is not None and context.benchmark.offline_evals:
        return  # the run trains on, and stops at the checkpoint that another process later finds to have reached the target
    latest = max(context.run.every(*_OF_THE_RUN), key=lambda event: event.time_ms, default=None)
    if stop is not None and latest is not None and latest.time_ms > stop.time_ms:
        seconds = (latest.time_ms - stop.time_ms) / 1e3
        yield stop.line, f"run_stop is {seconds:.3f} s earlier than {latest.key} before it (line {latest.line})"


@log_rule("before-run", "nothing is trained and nothing evaluated before run_start", f"{HPC} 5.1")
def before_run(context: LogContext) -> Iterator[LogBreach]:
    start = context.log.first(mllog.RUN_START)
    position = context.position.get(mllog.RUN_START)
    if start is None or position is None:
        return
    earliest = start.time_ms - 1.0  # a millisecond of slack for rounded stamps
    found: set[str] = set()
    for index, event in enumerate(context.log.events):
        early = event.time_ms < earliest
        if (early or index < position) and _trains(event):
            kind = event.key if event.key in _OF_THE_RUN else "step"  # of steps the reader may keep the first alone
            if kind in found:
                continue
            found.add(kind)
            seconds = (start.time_ms - event.time_ms) / 1e3
            yield event.line, f"{event.key} {f'is {seconds:.3f} s before' if early else 'stands before'} run_start"


def _trains(event: Event) -> bool:
    """True for an event of training or evaluation, and for any other that names an epoch or a step of them."""
    if event.key == mllog.TRACKED_STATS:  # published codes log how long staging took in one of them
        return isinstance(event.value, dict) and "throughput" in event.value
    if event.key in _OF_INIT:  # some codes number everything
        return False
    return event.key in _OF_THE_RUN or "epoch_num" in event.metadata or "step_num" in event.metadata


@log_rule("epoch-begun", "an evaluation is that of an epoch that has begun, as the epochs around it are numbered", HPC)
def epoch_begun(context: LogContext) -> Iterator[LogBreach]:
    latest: float | None = None
    for event in context.run.every(mllog.EPOCH_START, mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
        number = epoch_num(event)
        if number is None:  # rule eval-epoch reports it
            continue
        if event.key == mllog.EPOCH_START:
            latest = number if latest is None else max(latest, number)
        elif number > (latest or 0.0):
            begun = "no epoch" if latest is None else f"epoch {latest:g}"
            yield event.line, f"{event.key} of epoch {number:g}; {begun} was the last that had begun"
            return


@log_rule(
    "epoch-steps", "the steps at an evaluation are those of its epoch: batch size times steps are its samples", OURS
)
def epoch_steps(context: LogContext) -> Iterator[LogBreach]:
    batch, samples = context.record.global_batch_size, context.record.train_samples
    if (
        not batch
        or not samples
        or batch < 1
        or samples < 1
        or (context.benchmark and context.benchmark.epoch_counts_samples)
    ):
        return
    fewest, most = samples // batch, -(-samples // batch)  # steps of an epoch: the last batch is left out or filled up
    from_zero = any(epoch.number == 0 for epoch in context.record.epochs)
    for event in context.run.every(mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
        steps, epoch = finite(event.metadata.get("step_num")), epoch_num(event)
        if steps is None or epoch is None:
            continue
        number = epoch + from_zero
        if not (number - 1) * fewest <= steps <= number * most:
            due = f"{samples} samples in batches of {batch} are {fewest} to {most} for each epoch"
            yield event.line, f"{event.key} of epoch {epoch:g} after {steps:g} steps; {due}"
            return


@log_rule("epoch-time", "no epoch is fifty times shorter than another", OURS)
def epoch_time(context: LogContext) -> Iterator[LogBreach]:
    seconds = [(epoch.stop_s - epoch.start_s, epoch) for epoch in context.record.epochs if epoch.complete]
    longest = max((length for length, _ in seconds), default=0.0)
    short = [(length, epoch) for length, epoch in seconds if length < _SHORTEST_EPOCH * longest]
    if short and longest > 1.0:
        length, epoch = short[0]
        what = f"{len(short)} of {len(seconds)} epochs, first {brief(epoch.number)}"
        yield None, f"{what}: {length:.3f} s, where the longest takes {longest:.3f} s"


@log_rule(
    "throughput-true",
    "the logged throughput agrees with the samples and the time of the epoch within 10 % and a pause of 2 s",
    OURS,
)
def throughput_true(context: LogContext) -> Iterator[LogBreach]:
    finished = finished_epochs(context)
    rates = [(event, rate) for event in context.run.every(mllog.TRACKED_STATS) if (rate := _rate(event))]
    for index, (event, rate) in enumerate(rates):
        number = finite(event.metadata.get("epoch_num", event.metadata.get("epoch")))
        epoch = finished.get(number) if number is not None else _at(context, index)
        times = [] if epoch is None else _training_times(context, epoch, event)
        cases = [(samples, seconds) for seconds in times for samples in _samples(context)]
        if cases and min(times) >= _SHORTEST_S and not any(_may_be(rate, *case) for case in cases):
            named, due = f"epoch {brief(epoch.number) if epoch else '?'}", cases[0][0] / cases[0][1]
            yield event.line, f"throughput {rate:g} samples/s in {named}; its times say {due:g}"
            return


def _may_be(rate: float, samples: float, seconds: float) -> bool:
    """True if so many samples in so many seconds, less a pause, can have been trained at a rate."""
    least = (1.0 - _MOST_APART) * samples / (seconds + _SLACK_S)
    return least <= rate <= (1.0 + _MOST_APART) * samples / max(seconds - _PAUSE_S, _LEAST_SHARE * seconds)


def _rate(event: Event) -> float | None:
    value = event.value.get("throughput") if isinstance(event.value, dict) else None
    return finite(value)


def _at(context: LogContext, index: int) -> Epoch | None:
    """The epoch that the n-th rate is of, where rates have no epoch's number."""
    epochs = context.record.epochs
    return epochs[index] if index < len(epochs) else None


def _training_times(context: LogContext, epoch: Epoch, event: Event) -> list[float]:
    """Seconds of training that the rate may be of: without evaluations, or up to the event where they overlap training."""
    start_s = context.record.run_start_s or 0.0
    until_event = event.time_ms / 1e3 - start_s - epoch.start_s
    times = (
        [epoch.train_s]
        if context.ruleset.data.cards
        else [epoch.train_s, min(until_event, epoch.stop_s - epoch.start_s)]
    )
    return [seconds for seconds in times if seconds > 0.0]


def _samples(context: LogContext) -> list[float]:
    """Samples between two evaluations, and what some codes of the benchmark take for them."""
    benchmark, batch = context.benchmark, finite(context.record.global_batch_size)
    if benchmark is None:
        return []
    if benchmark.epoch_counts_samples:
        steps = steps_between_evals(context)
        return [steps * batch] if steps and batch else []
    known = [float(context.record.train_samples)] if context.record.train_samples else []
    if benchmark.throughput_per_rank is not None and context.record.ranks:
        known.append(float(benchmark.throughput_per_rank * context.record.ranks))
    return known


RULES: tuple[LogRule, ...] = (
    stop_early,
    before_run,
    epoch_begun,
    epoch_steps,
    epoch_time,
    throughput_true,
)
