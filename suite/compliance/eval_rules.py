"""The rules for evaluations apart from target and epochs: values that are no numbers, evaluations without an end."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

import math
from collections.abc import Iterator

from suite.compliance.rules import LOGGING, OURS, LogBreach, LogContext, epoch_num, log_rule
from suite.files import brief
from suite.log import mllog
from suite.log.values import finite


@log_rule("eval-diverged", "the metric is never NaN or infinite: there the training diverged", OURS)
def eval_diverged(context: LogContext) -> Iterator[LogBreach]:
    values = list(context.every(context.benchmark.metric)) if context.benchmark else []
    diverged = [
        event
        for event in values
        if (isinstance(event.value, float) and not math.isfinite(event.value)) or event.value in ("nan", "inf", "-inf")
    ]
    if diverged:
        yield diverged[0].line, f"{len(diverged)} of {len(values)} values of {diverged[0].key} are NaN or infinite"


@log_rule("eval-negative", "no value of the metric is negative", OURS)
def eval_negative(context: LogContext) -> Iterator[LogBreach]:
    for event in context.every(context.benchmark.metric) if context.benchmark else ():
        number = finite(event.value)
        if number is not None and number < 0.0:
            yield event.line, f"{event.key} = {brief(event.value)}: expected a number of at least 0"
            return


@log_rule("eval-closed", "every evaluation that begins also ends, except the last if run_stop interrupts it", LOGGING)
def eval_closed(context: LogContext) -> Iterator[LogBreach]:
    if mllog.RUN_STOP not in context.by_key:
        return
    run = context.log.until(mllog.RUN_STOP)
    ended = [epoch_num(event) for event in run.every(mllog.EVAL_STOP)]
    for event in list(run.every(mllog.EVAL_START))[:-1]:
        number = epoch_num(event)
        if number in ended:
            ended.remove(number)
        elif number is not None:  # rule eval-epoch reports the others
            yield event.line, f"the evaluation of epoch {number:g} has no eval_stop"
            return
