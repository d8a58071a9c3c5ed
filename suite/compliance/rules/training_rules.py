"""The rule that only logs of MLPerf Training are judged by: when a run is evaluated."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

from collections.abc import Iterator

from suite.compliance.rules.base import LogBreach, LogContext, log_rule
from suite.files import brief
from suite.log import mllog
from suite.log.values import finite, whole

SOURCE = "mlperf_logging training_*/closed_*.yaml"


@log_rule("eval-schedule", "evaluations come after as many samples as the benchmark prescribes", SOURCE)
def eval_schedule(context: LogContext) -> Iterator[LogBreach]:
    schedule = context.benchmark.schedule if context.benchmark is not None else None
    batch = whole(context.logged(mllog.GLOBAL_BATCH_SIZE))
    # The bound keeps a forged batch size from making the arithmetic of the schedule overflow.
    if schedule is None or context.division == "open" or batch is None or not 0 < batch < 10**9:
        return
    events = list(context.every(context.benchmark.metric)) if context.benchmark is not None else []
    breach = schedule.breach(batch, [finite(event.metadata.get("samples_count")) for event in events])
    if breach is not None:
        index, due = breach
        seen = brief(events[index].metadata.get("samples_count"))
        yield events[index].line, f"evaluated after {seen} samples; {due} are due"
