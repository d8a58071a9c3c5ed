"""Read the metric of a run as its benchmark defines it: logs may hold a second metric, and a benchmark may have two parts."""

from __future__ import annotations

from suite.compliance.ruleset import Benchmark, Ruleset
from suite.log.reader import Log
from suite.log.record import RunRecord, summarise


def record_of(log: Log, rules: Ruleset) -> tuple[RunRecord, Benchmark | None]:
    """Summarise a log by the metric of the benchmark that it names; the benchmark is None if the ruleset has none of that name."""
    record = summarise(log)
    benchmark = rules.benchmark(record.benchmark, record.size)
    if benchmark is not None and not fits(record, benchmark):
        record = summarise(log, benchmark.metric)
    return record, benchmark


def fits(record: RunRecord, benchmark: Benchmark | None) -> bool:
    """True if the values of the record are those of the benchmark's metric, or if there are none."""
    return benchmark is None or record.metric_key in (None, benchmark.metric)
