"""Defines rules, their inputs and their findings.

A rule is a function that yields what is wrong. How bad that is, and every value a rule compares with, is data in the
ruleset (rulesets/*.yaml). mlhpc.suite.compliance.all_rules collects the rules of all modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mlhpc.suite.card import SizeCard
from mlhpc.suite.compliance.identities import find_broken
from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.ruleset import Benchmark, KeyRule, Ruleset, Severity
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.files import render_repr
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Event, Log, convert_to_float
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.timeline import Epoch

# Where a rule comes from, as --explain prints it
HPC = "hpc_training_rules.adoc"
TRAINING = "training_rules.adoc"
LOGGING = "mlperf_logging hpc common.yaml"
PACKAGE = "mlperf_logging package_checker"
OURS = "docs/checker.md"
RULES_PAGE = "docs/rules.md"  # which has every rule

# Headings of mlcommons/training_policies d73e20f, the commit that the rulesets name. A test compares them.
SECTIONS = {
    (HPC, "2"): "Benchmarks",
    (HPC, "5.1"): "Data State at Start of Run",
    (HPC, "6.1"): "Hyperparameters and Optimizer",
    (HPC, "7.2"): "Throughput",
    (TRAINING, "5.3"): "Epoch numbering",
    (TRAINING, "9.4"): "Quality measure",
    (TRAINING, "10"): "Results Resubmission",
    (TRAINING, "11"): "Run Results",
    (TRAINING, "12"): "Benchmark Results",
}


def cite(document: str, section: str) -> str:
    """Cite a section of a rules document with its number and heading."""
    return f"{document} {section} ({SECTIONS[document, section]})"


RUN_RESULTS = cite(TRAINING, "11")
BENCHMARK_RESULTS = cite(TRAINING, "12")

NAMES = YamlSource.read(Path(__file__).parents[1] / "names.yaml").data  # of events and of system descriptions
EMPTY_LOG_RULE = "log-empty"  # the rule that a file without events breaks; its output has no summary


@dataclass(frozen=True)
class Waiver:
    """A decision that findings of a rule do not count. ``path`` has the last parts of a path, with * and ?."""

    rule: str
    path: str
    reason: str
    who: str


@dataclass(frozen=True)
class Finding:
    """One breach of a rule, in one line. ``line`` is the line number in the file; None: the file or folder itself.

    Outputs list a finding with a ``waiver``, but it does not count.
    """

    rule: str
    severity: Severity
    file: str
    line: int | None
    message: str
    waiver: Waiver | None = None


@dataclass(frozen=True)
class LogContext:
    """One log, with the ruleset that judges it. ``benchmark`` is None if the ruleset does not know it."""

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
        """Return the card (targets and rules) of the workload and size. None if the benchmark is not one of mlhpc."""
        return self.benchmark.card if self.benchmark else None

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Index of the first event of each key."""
        return {key: indices[0] for key, indices in self.log.places.items()}

    @cached_property
    def key_rules(self) -> Mapping[str, KeyRule]:
        """The ruleset's rules for the keys of this log. A file without events breaks rule log-empty and no other."""
        if not self.log.events:
            return {}
        first = {key: events[0].value for key, events in self.by_key.items()}
        keys = self.ruleset.keys(self.benchmark, self.division)
        return {key: rule for key, rule in keys.items() if rule.applies(first.get)}

    @cached_property
    def roots(self) -> Mapping[str, object]:
        """What identities.yaml names of a log."""
        events = {key: {"value": each[0].value, "about": each[0].metadata} for key, each in self.by_key.items()}
        card = {"card": self.card} if self.card is not None and self.division == "closed" else {}
        return events | card | {"record": self.record, "benchmark": self.benchmark}

    def list_broken(self, group: str, at: Event | None = None, **more: object) -> LogBreaches:
        """Yield the identities of a group that the log does not keep: of one event with ``at``. ``more``: its roots."""
        for name, text in find_broken(group, {**self.roots, **more}):
            event = at or self.log.first(name)
            yield event and event.line, text

    def logged(self, key: str) -> object:
        """Return the value of the first event of a key. None if there is none."""
        event = self.log.first(key)
        return event and event.value

    def every(self, *keys: str) -> Iterator[Event]:
        """Yield all events of some keys, key by key."""
        for key in keys:
            yield from self.by_key.get(key, ())

    @property
    def division(self) -> str:
        """The division that the log claims. A log that names no division is judged as closed, which is stricter."""
        return "open" if self.record.division == "open" else "closed"


LogBreach = tuple[int | None, str]  # line number in the log, message
ResultBreach = tuple[Path | None, str]  # file, or None for the result's folder; message
LogBreaches = Iterator[LogBreach]
ResultBreaches = Iterator[ResultBreach]


@dataclass(frozen=True)
class Rule:
    """The name of a rule, what it asks, and where it comes from, as `mlhpc check --explain` prints them."""

    name: str
    asks: str
    source: str = OURS


@dataclass(frozen=True)
class LogRule(Rule):
    """A rule that judges every log by itself."""

    check: Callable[[LogContext], LogBreaches] = field(kw_only=True)


@dataclass(frozen=True)
class ResultRule(Rule):
    """A rule that judges the runs of a result together."""

    check: Callable[[Result], ResultBreaches] = field(kw_only=True)


def log_rule(name: str, asks: str, source: str = OURS) -> Callable[[Callable[[LogContext], LogBreaches]], LogRule]:
    """Make the decorated function a rule for logs."""
    return lambda check: LogRule(name, asks, source, check=check)


def result_rule(name: str, asks: str, source: str = OURS) -> Callable[[Callable[[Result], ResultBreaches]], ResultRule]:
    """Make the decorated function a rule for results."""
    return lambda check: ResultRule(name, asks, source, check=check)


def render_rule_link(rule: str) -> str:
    """Return the address of a rule's explanation."""
    return f"{RULES_PAGE}#{rule}"


def judge_breach(rules: Ruleset, rule: str, path: Path, message: str) -> Iterator[Finding]:
    """Yield the finding for a breach at a file or folder, or nothing if the ruleset ignores the rule."""
    severity = rules.severity(rule)
    if severity is not None:
        yield Finding(rule, severity, str(path), None, message)


def make_other_suite_finding(log: Log, rules: Ruleset, suite: str, file: str) -> Finding:
    """Return the only finding of a log of another benchmark suite: no rule of this suite judges it."""
    event = log.first(mllog.SUBMISSION_BENCHMARK)
    message = (
        f"a log of {suite} ({render_repr(event.value if event else None)}): it is not judged by {rules.data.title}"
    )
    return Finding("benchmark-known", "error", file, event.line if event else None, message)


def convert_to_fields(value: object) -> dict[str, Any]:
    """Return a mapping of a document. An empty one for anything else."""
    return value if isinstance(value, dict) else {}


def identity_rule(name: str, asks: str, source: str = OURS) -> LogRule:
    """Return the rule for logs that asks the identities of its name, and nothing else."""
    return LogRule(name, asks, source, check=lambda context: context.list_broken(name))


def find_epoch_num(event: Event) -> float | None:
    """Return the epoch_num in the metadata of an event. None without one, or if it is not finite."""
    return convert_to_float(event.metadata.get("epoch_num"))


def list_finished_epochs(context: LogContext) -> dict[float | None, Epoch]:
    """Map the number of each complete epoch to it."""
    return {epoch.number: epoch for epoch in context.record.epochs if epoch.complete}


def find_steps_between_evals(context: LogContext) -> float | None:
    """Return the steps from one evaluation to the next. None if the benchmark's epoch_num does not count samples."""
    if context.benchmark is None or not context.benchmark.epoch_counts_samples:
        return None
    # OpenFold's card has the number; logs of MLPerf HPC's OpenFold state it as val_every_iters.
    return context.card.eval_every_steps if context.card else convert_to_float(context.logged("val_every_iters"))


def check_distinct(
    runs: Sequence[RunRecord], key: Callable[[RunRecord], object], text: Callable[[RunRecord], str]
) -> ResultBreaches:
    """Yield a breach for every run whose key an earlier run has already. None is no key."""
    first: dict[object, RunRecord] = {}
    for run in runs:
        identity = key(run)
        if identity is None:
            continue
        if identity in first:
            yield run.path, f"{text(run)} {render_log_name(first[identity])}"
        else:
            first[identity] = run


def render_log_name(run: RunRecord) -> str:
    """Return the name of a run's log, for messages."""
    return run.path.name if run.path else "a run"
