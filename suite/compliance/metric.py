"""Reads the metric of a run as its benchmark defines it. A log may have others. A metric may have parts."""

from __future__ import annotations

from dataclasses import replace

from mlhpc.suite.compliance.ruleset import Benchmark, KeyRule, Ruleset
from mlhpc.suite.log.reader import Log
from mlhpc.suite.log.record import MetricValue, RunRecord, summarise_log
from mlhpc.suite.log.values import convert_to_float


def summarise_for_benchmark(
    log: Log, rules: Ruleset, known: RunRecord | None = None
) -> tuple[RunRecord, Benchmark | None]:
    """Summarise a log by the metric of its benchmark. The benchmark is None if the ruleset has none of that name.

    ``known`` is the result of `summarise` for the log without a metric, if the caller has it already.
    """
    record = known or summarise_log(log)
    benchmark = rules.benchmark(record.benchmark, record.size)
    if benchmark is not None and record.metric_key not in (None, benchmark.metric):
        # Without a benchmark the first metric of the log counts; here it was another one.
        record = summarise_log(log, benchmark.metric)
    if benchmark is not None and benchmark.parts:
        record = replace(record, metric_key=benchmark.metric, evals=_join_parts(log, benchmark, record))
    return record, benchmark


def _join_parts(log: Log, benchmark: Benchmark, record: RunRecord) -> tuple[MetricValue, ...]:
    """Return one value per evaluation: the share of its target that the worst part reaches, at most 1.

    samples_count identifies the evaluation: the parts may be logged singly, in any order, even after run_stop.
    """
    shares: dict[float, dict[str, float]] = {}
    last: dict[float, MetricValue] = {}
    for event in log.every(benchmark.metric):
        part, at = event.metadata.get("metric"), convert_to_float(event.metadata.get("samples_count"))
        if at is None or not isinstance(part, str) or part not in benchmark.parts:
            continue
        shares.setdefault(at, {})[part] = _compute_target_share(benchmark.parts[part], event.value)
        # The evaluation ends with the last of its parts.
        last[at] = MetricValue(at, 0.0, event.time_ms / 1e3 - (record.run_start_s or 0.0), event.line)
    # A part that was not logged has not reached its target.
    worst = {at: min(parts.get(part, 0.0) for part in benchmark.parts) for at, parts in shares.items()}
    return tuple(last[at]._replace(value=worst[at]) for at in sorted(last))


def _compute_target_share(rule: KeyRule, value: object) -> float:
    """Return 1 if a part satisfies its rule, else the quotient of value and bound. 0 if the value is not positive."""
    number = convert_to_float(value)
    if rule.problem(value) is None:
        return 1.0
    if number is None or number <= 0.0:
        return 0.0
    quotients = [number / rule.at_least] if rule.at_least else []
    quotients += [rule.at_most / number] if rule.at_most is not None else []
    return min((quotient for quotient in quotients if quotient < 1.0), default=0.0)
