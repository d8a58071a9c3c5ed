"""Read the metric of a run as its benchmark defines it: logs may hold a second metric, and a metric may have several parts."""

from __future__ import annotations

from dataclasses import replace

from suite.compliance.ruleset import Benchmark, KeyRule, Ruleset
from suite.log.reader import Log
from suite.log.record import MetricValue, RunRecord, summarise
from suite.log.values import finite


def record_of(log: Log, rules: Ruleset, known: RunRecord | None = None) -> tuple[RunRecord, Benchmark | None]:
    """Summarise a log by the metric of the benchmark that it names; the benchmark is None if the ruleset has none of that name.

    ``known`` is what `summarise` said of the log without a metric, if it was asked already.
    """
    record = known or summarise(log)
    benchmark = rules.benchmark(record.benchmark, record.size)
    if benchmark is not None and record.metric_key not in (None, benchmark.metric):
        record = summarise(log, benchmark.metric)
    if benchmark is not None and benchmark.parts:
        record = replace(record, metric_key=benchmark.metric, evals=_joined(log, benchmark, record))
    return record, benchmark


def _joined(log: Log, benchmark: Benchmark, record: RunRecord) -> tuple[MetricValue, ...]:
    """One value per evaluation, found by its samples_count: how near its worst part comes to what it must be, 1 if all are there.

    The parts may be logged one by one, in any order, and after run_stop.
    """
    shares: dict[float, dict[str, float]] = {}
    last: dict[float, MetricValue] = {}
    for event in log.every(benchmark.metric):
        part, at = event.metadata.get("metric"), finite(event.metadata.get("samples_count"))
        if at is None or not isinstance(part, str) or part not in benchmark.parts:
            continue
        shares.setdefault(at, {})[part] = _share(benchmark.parts[part], event.value)
        last[at] = MetricValue(at, 0.0, event.time_ms / 1e3 - (record.run_start_s or 0.0), event.line)
    return tuple(
        last[at]._replace(value=min(shares[at].get(part, 0.0) for part in benchmark.parts)) for at in sorted(last)
    )


def _share(rule: KeyRule, value: object) -> float:
    """1 if a part is what its rule asks; else the quotient of value and bound, below 1; 0 for what is no such number."""
    number = finite(value)
    if rule.problem(value) is None:
        return 1.0
    if number is None or number <= 0.0:
        return 0.0
    quotients = [number / rule.at_least] if rule.at_least else []
    quotients += [rule.at_most / number] if rule.at_most is not None else []
    return min((quotient for quotient in quotients if quotient < 1.0), default=0.0)
