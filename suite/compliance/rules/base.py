"""What all rules share: the classes of rules, what they are given, and what they find.

A rule is a function that yields what is wrong. How bad that is, and every value a rule compares with, is data in the
ruleset (rulesets/*.yaml). Each module of rules ends with the tuple of its rules; suite.compliance.all_rules puts these together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from suite.card import SizeCard
from suite.compliance.result import Result
from suite.compliance.ruleset import Benchmark, KeyRule, Ruleset, Severity
from suite.files import brief
from suite.log import mllog
from suite.log.reader import Event, Log
from suite.log.record import RunRecord
from suite.log.timeline import Epoch
from suite.log.values import finite

# Where a rule comes from, as --explain prints it
HPC = "hpc_training_rules.adoc"
LOGGING = "mlperf_logging hpc common.yaml"
PACKAGE = "mlperf_logging package_checker"
OURS = "docs/checker.md"
PAGE = "docs/rules.md"  # which has every rule

NO_LOG = "log-empty"  # the rule that a file without events breaks; the checker stops there


@dataclass(frozen=True)
class Waiver:
    """What reviewers decided: findings of a rule at a place count no longer. ``path``: last parts of a path, with * and ?."""

    rule: str
    path: str
    reason: str
    who: str


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, in one line. ``line`` is the line number in the file; None: the file or folder itself.

    A finding with a ``waiver`` is shown and does not count.
    """

    rule: str
    severity: Severity
    file: str
    line: int | None
    message: str
    waiver: Waiver | None = None


@dataclass(frozen=True)
class LogContext:
    """One log and what it is judged by. ``benchmark`` is None if the ruleset knows no benchmark of the log's name."""

    log: Log
    record: RunRecord
    ruleset: Ruleset
    benchmark: Benchmark | None

    @cached_property
    def by_key(self) -> Mapping[str, list[Event]]:
        """Events by key, in file order."""
        events = self.log.events
        return {key: [events[index] for index in indices] for key, indices in self.log.places.items()}

    @cached_property
    def in_time_order(self) -> bool:
        """True if no event is earlier than one before it in the file, as in most logs."""
        times = [event.time_ms for event in self.log.events]
        return times == sorted(times)

    @cached_property
    def run(self) -> Log:
        """The events before run_stop, and run_stop itself."""
        return self.log.until(mllog.RUN_STOP)

    @property
    def card(self) -> SizeCard | None:
        """The workload's card, if the benchmark is one of this suite."""
        return self.benchmark.card if self.benchmark else None

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Index of the first event of each key."""
        return {key: indices[0] for key, indices in self.log.places.items()}

    @cached_property
    def key_rules(self) -> Mapping[str, KeyRule]:
        """What the ruleset asks of the keys of this log."""
        if not self.log.events:
            return {}
        first = {key: events[0].value for key, events in self.by_key.items()}
        keys = self.ruleset.keys(self.benchmark, self.division)
        return {key: rule for key, rule in keys.items() if rule.applies(first.get)}

    def logged(self, key: str) -> object:
        """The value of the first event of a key. None if there is none."""
        event = self.log.first(key)
        return event.value if event is not None else None

    def every(self, *keys: str) -> Iterator[Event]:
        """All events of some keys, key by key."""
        for key in keys:
            yield from self.by_key.get(key, ())

    @property
    def division(self) -> str:
        """The division the log claims; closed unless it says open."""
        return "open" if self.record.division == "open" else "closed"


LogBreach = tuple[int | None, str]  # line number in the log, message
ResultBreach = tuple[Path | None, str]  # file, or None for the result's folder; message


@dataclass(frozen=True)
class Rule:
    """The name of a rule, what it asks, and where it comes from, as `mlhpc check --explain` prints them."""

    name: str
    asks: str
    source: str


@dataclass(frozen=True)
class LogRule(Rule):
    """A rule that every log is judged by."""

    check: Callable[[LogContext], Iterable[LogBreach]]


@dataclass(frozen=True)
class ResultRule(Rule):
    """A rule that the runs of a result are judged by, together."""

    check: Callable[[Result], Iterable[ResultBreach]]


def log_rule(name: str, asks: str, source: str) -> Callable[[Callable[[LogContext], Iterable[LogBreach]]], LogRule]:
    """Make the decorated function a rule for logs. The tuple RULES of its module must name it."""
    return lambda check: LogRule(name, asks, source, check)


def result_rule(
    name: str, asks: str, source: str
) -> Callable[[Callable[[Result], Iterable[ResultBreach]]], ResultRule]:
    """Make the decorated function a rule for results. The tuple RULES of its module must name it."""
    return lambda check: ResultRule(name, asks, source, check)


def link(rule: str) -> str:
    """Where the page explains a rule."""
    return f"{PAGE}#{rule}"


def weighed(rules: Ruleset, rule: str, path: Path, message: str) -> Iterator[Finding]:
    """The finding of a breach at a file or folder. None where the ruleset does not ask for the rule."""
    severity = rules.severity(rule)
    if severity is not None:
        yield Finding(rule, severity, str(path), None, message)


def of_another_suite(log: Log, rules: Ruleset, suite: str, file: str) -> Finding:
    """The one finding of a log of another benchmark suite: it is not judged by rules that were never its own."""
    event = log.first(mllog.SUBMISSION_BENCHMARK)
    message = f"a log of {suite} ({brief(event.value if event else None)}): it is not judged by {rules.data.title}"
    return Finding("benchmark-known", "error", file, event.line if event else None, message)


def epoch_num(event: Event) -> float | None:
    """The number of the epoch in the metadata of an event. None if there is none, or it is no finite number."""
    return finite(event.metadata.get("epoch_num"))


def finished_epochs(context: LogContext) -> dict[float | None, Epoch]:
    """The epochs that ended, by number."""
    return {epoch.number: epoch for epoch in context.record.epochs if epoch.complete}


def steps_between_evals(context: LogContext) -> float | None:
    """Steps from one evaluation to the next where epoch_num counts samples; None elsewhere, and if nothing says it."""
    if context.benchmark is None or not context.benchmark.epoch_counts_samples:
        return None
    logged = context.log.first("val_every_iters")
    return context.card.eval_every_steps if context.card else finite(logged.value) if logged else None


def repeats(
    runs: Sequence[RunRecord], key: Callable[[RunRecord], object], text: Callable[[RunRecord], str]
) -> Iterator[ResultBreach]:
    """Every run whose key an earlier run has already; a key of None is no key."""
    first: dict[object, RunRecord] = {}
    for run in runs:
        identity = key(run)
        if identity is None:
            continue
        if identity in first:
            yield run.path, f"{text(run)} {name_of(first[identity])}"
        else:
            first[identity] = run


def name_of(run: RunRecord) -> str:
    """The name of a run's log, for messages."""
    return run.path.name if run.path else "a run"
