"""The rules for one log: small pure functions from a log to what is wrong with it, each with its id and explanation.

How bad a finding is stands in the ruleset (rulesets/*.yaml), and so does everything a rule compares with.
"""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from suite.card import SizeCard
from suite.compliance.ruleset import Benchmark, KeyRule, Ruleset, Severity, same
from suite.files import brief
from suite.log import mllog
from suite.log.reader import Event, Log
from suite.log.record import RunRecord, first_reaching
from suite.log.values import finite

HPC = "hpc_training_rules.adoc"
LOGGING = "mlperf_logging hpc common.yaml"
OURS = "docs/checker.md"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, in one line. ``line`` is the file's own line number; None: the file or folder itself."""

    rule: str
    severity: Severity
    file: str
    line: int | None
    message: str


@dataclass(frozen=True)
class LogContext:
    """One log and what it is judged by. ``benchmark`` is None if the log names none that the ruleset knows."""

    log: Log
    record: RunRecord
    ruleset: Ruleset
    benchmark: Benchmark | None

    @cached_property
    def by_key(self) -> Mapping[str, list[Event]]:
        """Events by key, in file order."""
        events = self.log.events
        return {key: [events[index] for index in places] for key, places in self.log.places.items()}

    @property
    def card(self) -> SizeCard | None:
        """The workload's card, if the benchmark is one of this suite."""
        return self.benchmark.card if self.benchmark else None

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Index of the first event of each key."""
        return {key: places[0] for key, places in self.log.places.items()}

    @cached_property
    def key_rules(self) -> Mapping[str, KeyRule]:
        """What the ruleset asks of the keys of this log."""
        if not self.log.events:
            return {}
        first = {key: events[0].value for key, events in self.by_key.items()}
        keys = self.ruleset.keys(self.benchmark, self.division)
        return {key: rule for key, rule in keys.items() if rule.applies(first.get)}

    def first(self, key: str) -> Event | None:
        """The first event of a key."""
        return self.log.first(key)

    def every(self, *keys: str) -> Iterator[Event]:
        """All events of some keys, key by key."""
        for key in keys:
            yield from self.by_key.get(key, ())

    @property
    def division(self) -> str:
        """The division the log claims; closed unless it says open."""
        return "open" if self.record.division == "open" else "closed"


Found = tuple[int | None, str]
LogCheck = Callable[[LogContext], Iterable[Found]]


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """What `mlhpc check --explain` prints of a rule."""

    rule: str
    explanation: str
    reference: str


EXPLANATIONS: dict[str, RuleInfo] = {}
LOG_RULES: dict[str, LogCheck] = {}


def explain(rule: str, explanation: str, reference: str) -> str:
    """Enter a rule into the table of explanations."""
    assert rule not in EXPLANATIONS, rule
    EXPLANATIONS[rule] = RuleInfo(rule, explanation, reference)
    return rule


def log_rule(rule: str, explanation: str, reference: str) -> Callable[[LogCheck], LogCheck]:
    """Enter a function into the rules that every log is judged by."""

    def enter(check: LogCheck) -> LogCheck:
        LOG_RULES[explain(rule, explanation, reference)] = check
        return check

    return enter


def judge(context: LogContext, file: str) -> Iterator[Finding]:
    """Everything the rules find in one log."""
    for rule, check in LOG_RULES.items():
        severity = context.ruleset.severity(rule)
        if severity is not None:
            for line, message in check(context):
                yield Finding(rule, severity, file, line, message)


# What a log must hold


@log_rule("log-empty", "a log holds at least one MLLOG event", LOGGING)
def log_empty(context: LogContext) -> Iterator[Found]:
    if not context.log.events:
        yield None, "no MLLOG event found; expected lines with ':::MLLOG {...}'"


@log_rule(
    "event-valid", "every line with the MLLOG token is one JSON event with key, value, time_ms, metadata", LOGGING
)
def event_valid(context: LogContext) -> Iterator[Found]:
    yield from ((problem.line, problem.message) for problem in context.log.problems)


@log_rule("benchmark-known", "the log names a benchmark, and in mlhpc-1.0 a size, that the ruleset knows", f"{HPC} 3")
def benchmark_known(context: LogContext) -> Iterator[Found]:
    event = context.first(mllog.SUBMISSION_BENCHMARK)
    names = context.ruleset.benchmark_names()
    if event is not None and event.value not in names:
        yield event.line, f"unknown benchmark {brief(event.value)}; {context.ruleset.name} knows {', '.join(names)}"
    elif event is not None and context.benchmark is None:
        size = context.first(mllog.BENCHMARK_SIZE)
        yield (size or event).line, f"unknown size {brief(context.record.size)} of {brief(event.value)}"


@log_rule("key-missing", "every key that the ruleset requires is logged", LOGGING)
def key_missing(context: LogContext) -> Iterator[Found]:
    missing = [repr(key) for key in _missing(context) if key not in _OF_TRAINING]
    if len(missing) > 3:
        yield None, f"{len(missing)} required keys are not logged: {', '.join(missing)}"
    else:
        yield from ((None, f"required key {key} is not logged") for key in missing)


@log_rule("training-missing", "the epochs and evaluations of a run are logged", LOGGING)
def training_missing(context: LogContext) -> Iterator[Found]:
    for key in _missing(context):
        if key in _OF_TRAINING:
            yield None, f"no {key} is logged"


@log_rule("key-repeated", "a key that is required once is logged once, even if its value is the same", LOGGING)
def key_repeated(context: LogContext) -> Iterator[Found]:
    for key, events in _repeated(context):
        if all(same(event.value, events[0].value) for event in events):
            yield events[1].line, f"{key!r} is logged {len(events)} times with one value"


@log_rule("key-conflict", "a key that is required once has one value", LOGGING)
def key_conflict(context: LogContext) -> Iterator[Found]:
    for key, events in _repeated(context):
        other = next((event for event in events if not same(event.value, events[0].value)), None)
        if other is not None:
            yield other.line, f"{key!r} is logged as {brief(events[0].value)} and as {brief(other.value)}"


@log_rule("key-value", "every value is one that the ruleset or the card allows", f"{HPC} 4 and the workload's card")
def key_value(context: LogContext) -> Iterator[Found]:
    for key, rule in context.key_rules.items():
        for event in context.by_key.get(key, ()) if rule.asks else ():
            problem = None if event.value is None and key == mllog.SEED else rule.problem(event.value)
            if problem:
                yield event.line, f"{key} = {brief(event.value)}: {problem}"
                break


@log_rule("key-near", "a sample count is exactly that of the benchmark", f"{HPC} 3")
def key_near(context: LogContext) -> Iterator[Found]:
    for key, rule in context.key_rules.items():
        event = context.first(key)
        if event is not None and rule.about is not None and not rule.problem(event.value) and event.value != rule.about:
            yield event.line, f"{key} = {brief(event.value)}: expected {rule.about:g}"


@log_rule("seed-missing", "every run logs its seed", "training_policies#546; mlperf_logging seed_checker")
def seed_missing(context: LogContext) -> Iterator[Found]:
    if context.log.events and all(event.value is None for event in context.every(mllog.SEED)):
        yield None, "no seed is logged"


@log_rule("ruleset-agrees", "the log was made for the ruleset it is judged by", OURS)
def ruleset_agrees(context: LogContext) -> Iterator[Found]:
    event = context.first(mllog.RULESET)
    if event is not None and event.value != context.ruleset.name:
        yield event.line, f"the log was made for ruleset {brief(event.value)}, judged by {context.ruleset.name}"


@log_rule("placeholder", "names are filled in", OURS)
def placeholder(context: LogContext) -> Iterator[Found]:
    for event in context.every(mllog.SUBMISSION_ORG, mllog.SUBMISSION_PLATFORM):
        if isinstance(event.value, str) and "PLACEHOLDER" in event.value:
            yield event.line, f"{event.key} = {brief(event.value)} is a placeholder"


# Order and time


@log_rule("event-order", "init_start, init_stop, run_start, run_stop come in this order in the file", LOGGING)
def event_order(context: LogContext) -> Iterator[Found]:
    for before, after in (("init_start", "init_stop"), ("init_stop", "run_start"), ("run_start", "run_stop")):
        first, then = context.position.get(before), context.position.get(after)
        if first is not None and then is not None and then < first:
            yield context.log.events[then].line, f"{after} comes before {before}"
    stop = context.position.get("init_stop")
    late = [event for event in context.by_key.get("init_start", ()) if stop is not None and event.line > 0]
    if stop is not None and late and late[-1].line > context.log.events[stop].line:
        yield late[-1].line, "init_start after init_stop"


@log_rule("run-unfinished", "a run ends with run_stop", f"{HPC} 5; {LOGGING}")
def run_unfinished(context: LogContext) -> Iterator[Found]:
    if context.log.events and "run_stop" not in context.by_key:
        yield context.log.events[-1].line, "no run_stop: the run did not end"


@log_rule("run-time", "run_stop is later than run_start", f"{HPC} 5")
def run_time(context: LogContext) -> Iterator[Found]:
    seconds = context.record.time_to_train_s
    stop = context.first("run_stop")
    if seconds is not None and stop is not None and seconds <= 0.0:
        yield stop.line, f"run_stop is {-seconds:.3f} s before run_start: the run has no time"


@log_rule("clock-jump", "time never jumps back by more than a minute", OURS)
def clock_jump(context: LogContext) -> Iterator[Found]:
    yield from islice(((line, text) for line, seconds, text in _backwards(context) if seconds > 60.0), 1)


@log_rule("clock-unit", "time stamps are milliseconds of Unix time, of a year from 2000 to 2099", LOGGING)
def clock_unit(context: LogContext) -> Iterator[Found]:
    strange = next((event for event in context.log.events if not _YEAR_2000_MS <= event.time_ms < _YEAR_2100_MS), None)
    if strange is not None:
        yield (
            strange.line,
            f"time_ms = {strange.time_ms:.15g} of {brief(strange.key)}: expected Unix time in milliseconds",
        )


@log_rule("clock-order", "time never goes back", OURS)
def clock_order(context: LogContext) -> Iterator[Found]:
    yield from islice(((line, text) for line, seconds, text in _backwards(context) if seconds <= 60.0), 1)


@log_rule("init-limit", "initialisation takes at most 30 minutes (open division: 4 hours)", f"{HPC} 5.1")
def init_limit(context: LogContext) -> Iterator[Found]:
    limit = context.ruleset.data.init_minutes["open" if context.division == "open" else "closed"]
    stop = context.first("init_stop")
    if context.record.init_s is not None and stop is not None and context.record.init_s >= limit * 60.0:
        yield stop.line, f"init took {context.record.init_s / 60.0:.1f} min; at most {limit:g} are allowed"


@log_rule("init-gap", "run_start follows init_stop at once: time between them is in no account", f"{HPC} 5.1")
def init_gap(context: LogContext) -> Iterator[Found]:
    stop, start = context.first("init_stop"), context.first("run_start")
    if stop is not None and start is not None and start.time_ms - stop.time_ms > 1000.0:
        yield start.line, f"run_start is {(start.time_ms - stop.time_ms) / 1e3:.3f} s after init_stop"


@log_rule("before-run", "no epoch and no evaluation begins before run_start", f"{HPC} 5.1")
def before_run(context: LogContext) -> Iterator[Found]:
    start = context.first("run_start")
    position = context.position.get("run_start")
    if start is None or position is None:
        return
    for key in ("epoch_start", "eval_start", mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
        event = min(context.by_key.get(key, ()), key=lambda item: item.time_ms, default=None)
        if event is not None and event.time_ms < start.time_ms - 1.0:
            yield event.line, f"{key} is {(start.time_ms - event.time_ms) / 1e3:.3f} s before run_start"
        elif context.position.get(key, position) < position:
            yield context.log.events[context.position[key]].line, f"{key} stands before run_start"


@log_rule("staging-order", "staging stops after it starts, and up to v2.0 lies inside the run", f"{HPC} 5.2")
def staging_order(context: LogContext) -> Iterator[Found]:
    start, stop, run = context.first("staging_start"), context.first("staging_stop"), context.first("run_start")
    if stop is not None and start is None:
        yield stop.line, "staging_stop without staging_start"
    early = run is not None and context.position.get("staging_start", 0) < context.position["run_start"]
    if start is not None and early and not context.ruleset.data.staging_before_run:
        yield start.line, f"staging begins before run_start; {context.ruleset.name} times it inside the run"


@log_rule(
    "interval-open", "every interval that begins ends, but for the epoch and evaluation that run_stop cuts", LOGGING
)
def interval_open(context: LogContext) -> Iterator[Found]:
    if "run_stop" not in context.by_key:
        return
    for stem, allowed in (("staging", 0), ("eval", 1), ("epoch", 1)):
        starts, stops = context.by_key.get(f"{stem}_start", []), context.by_key.get(f"{stem}_stop", [])
        if len(starts) > len(stops) + allowed:
            yield starts[-1].line, f"{len(starts)} {stem}_start but {len(stops)} {stem}_stop"


@log_rule("interval-negative", "no interval ends before it begins", OURS)
def interval_negative(context: LogContext) -> Iterator[Found]:
    spans = [(item.start_s, item.stop_s, f"epoch {item.number}") for item in context.record.epochs]
    for start_s, stop_s, name in spans:
        if stop_s < start_s - 0.001:
            yield None, f"{name} ends {start_s - stop_s:.3f} s before it begins"
    for name, seconds in (
        ("init", context.record.init_s),
        ("staging", _staging_s(context)),
        ("eval", _shortest(context)),
    ):
        if seconds is not None and seconds < -0.001:
            event = context.first(f"{name}_stop")
            yield event.line if event else None, f"{name}_stop is {-seconds:.3f} s before {name}_start"


@log_rule("event-after-stop", "nothing is staged, trained or evaluated after run_stop", OURS)
def event_after_stop(context: LogContext) -> Iterator[Found]:
    position = context.position.get("run_stop")
    if position is None:
        return
    after = [event for event in context.log.events[position + 1 :] if event.key in _OF_A_RUN]
    if after:
        yield (
            after[0].line,
            f"{len(after)} events of staging, training or evaluation after run_stop, first {after[0].key}",
        )


# What the run reached


@log_rule("run-status", "run_stop carries a status, success or aborted", f"{HPC} 5; {LOGGING}")
def run_status(context: LogContext) -> Iterator[Found]:
    stop = context.first("run_stop")
    if stop is None:
        return
    if "status" not in stop.metadata:
        yield stop.line, "run_stop has no status"
    elif stop.metadata["status"] not in ("success", "aborted"):
        yield stop.line, f"status = {brief(stop.metadata['status'])}: expected 'success' or 'aborted'"


@log_rule("run-aborted", "a scored run was not aborted", f"{HPC} 6")
def run_aborted(context: LogContext) -> Iterator[Found]:
    stop = context.first("run_stop")
    if stop is not None and stop.metadata.get("status") == "aborted":
        yield stop.line, "the run was aborted"


@log_rule("target-missed", "the run reaches the target before run_stop", f"{HPC} 3")
def target_missed(context: LogContext) -> Iterator[Found]:
    if context.benchmark is None or first_reaching(context.record, context.benchmark) is not None:
        return
    values = [item.value for item in context.record.evals]
    if not values:
        yield None, f"no evaluation before run_stop; the target is {context.benchmark.target_text}"
        return
    best = min(values) if context.benchmark.direction == "min" else max(values)
    line = next(item.line for item in context.record.evals if item.value == best)
    yield line, f"best {context.record.metric_key} is {best:g}; the target is {context.benchmark.target_text}"


@log_rule("status-true", "a status says what the evaluations say", OURS)
def status_true(context: LogContext) -> Iterator[Found]:
    stop = context.first("run_stop")
    if stop is None or context.benchmark is None:
        return
    reached = first_reaching(context.record, context.benchmark) is not None
    if stop.metadata.get("status") == "success" and not reached:
        yield stop.line, "status is 'success' but no evaluation reaches the target"


@log_rule(
    "last-eval", "the last evaluation before run_stop reaches the target", "training_policies: stop at the target"
)
def last_eval(context: LogContext) -> Iterator[Found]:
    evals = context.record.evals
    if context.benchmark is None or not evals or first_reaching(context.record, context.benchmark) is None:
        return
    if context.record.status != "aborted" and not context.benchmark.reached(evals[-1].value):
        target = context.benchmark.target_text
        yield evals[-1].line, f"the last evaluation before run_stop is {evals[-1].value:g}; the target is {target}"


@log_rule("late-stop", "a run stops at the first evaluation that reaches the target", OURS)
def late_stop(context: LogContext) -> Iterator[Found]:
    first = first_reaching(context.record, context.benchmark) if context.benchmark else None
    if first is not None and first is not context.record.evals[-1]:
        after = len(context.record.evals) - 1 - context.record.evals.index(first)
        yield first.line, f"the target was reached {after} evaluations before the run stopped"


@log_rule("eval-value", "every value of the metric is a number", LOGGING)
def eval_value(context: LogContext) -> Iterator[Found]:
    for event in context.every(mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
        diverged = isinstance(event.value, float) or event.value in ("nan", "inf", "-inf")
        if finite(event.value) is None and not diverged:
            yield event.line, f"{event.key} = {brief(event.value)}: expected a number"


@log_rule("eval-epoch", "epochs, evaluations and metric values say their epoch_num", LOGGING)
def eval_epoch(context: LogContext) -> Iterator[Found]:
    keys = ("epoch_start", "epoch_stop", "eval_start", "eval_stop", mllog.EVAL_ERROR, mllog.EVAL_ACCURACY)
    for key in keys:
        bare = [event for event in context.by_key.get(key, ()) if finite(event.metadata.get("epoch_num")) is None]
        if bare:
            yield bare[0].line, f"{len(bare)} {key} without a number epoch_num"


@log_rule("epoch-numbers", "epochs are numbered 1, 2, 3, ... without a gap", f"{HPC} 4.2")
def epoch_numbers(context: LogContext) -> Iterator[Found]:
    numbers = [(finite(event.metadata.get("epoch_num")), event.line) for event in context.by_key.get("epoch_start", ())]
    samples = context.benchmark is not None and context.benchmark.epoch_counts_samples
    before = 0.0
    for number, line in numbers:
        if number is None:
            return
        if samples and number <= before:
            yield line, f"epoch_num {number:g} after {before:g}: samples seen never fall"
            return
        if not samples and number != before + 1:
            yield line, f"epoch_num {number:g} where {before + 1:g} is due"
            return
        before = number


@log_rule("eval-every-epoch", "every finished epoch is evaluated, once", "the workload's card")
def eval_every_epoch(context: LogContext) -> Iterator[Found]:
    evaluated = [item.epoch for item in context.record.evals]
    for epoch in context.record.epochs:
        if epoch.complete and evaluated.count(epoch.number) != 1:
            yield (
                None,
                f"epoch {brief(epoch.number)} has {evaluated.count(epoch.number)} values of the metric; expected 1",
            )
            return


_OF_A_RUN = frozenset(
    {
        "staging_start",
        "run_start",
        "epoch_start",
        "eval_start",
        mllog.EVAL_ERROR,
        mllog.EVAL_ACCURACY,
        mllog.STEP_PHASES,
    }
)
_YEAR_2000_MS, _YEAR_2100_MS = 946_684_800_000, 4_102_444_800_000
_OF_TRAINING = ("epoch_start", "epoch_stop", "eval_start", "eval_stop", mllog.EVAL_ERROR, mllog.EVAL_ACCURACY)


def _missing(context: LogContext) -> Iterator[str]:
    """Required keys that do not occur; run_stop has a rule of its own."""
    for key, rule in context.key_rules.items():
        if rule.count != "optional" and key not in context.by_key and key != "run_stop":
            yield key


def _repeated(context: LogContext) -> Iterator[tuple[str, list[Event]]]:
    for key, rule in context.key_rules.items():
        events = context.by_key.get(key, [])
        if rule.count == "exactly_one" and len(events) > 1:
            yield key, events


def _backwards(context: LogContext) -> Iterator[tuple[int, float, str]]:
    """Places where an event is earlier than the latest before it."""
    latest = None
    for event in context.log.events:
        if latest is not None and event.time_ms < latest.time_ms:
            seconds = (latest.time_ms - event.time_ms) / 1e3
            yield event.line, seconds, f"{event.key} is {seconds:.3f} s earlier than {latest.key} before it"
        else:
            latest = event


def _staging_s(context: LogContext) -> float | None:
    start, stop = context.first("staging_start"), context.first("staging_stop")
    return (stop.time_ms - start.time_ms) / 1e3 if start and stop else None


def _shortest(context: LogContext) -> float | None:
    """The shortest evaluation if as many ended as began."""
    starts, stops = context.by_key.get("eval_start", []), context.by_key.get("eval_stop", [])
    if not starts or len(starts) != len(stops):
        return None
    return min((stop.time_ms - start.time_ms) / 1e3 for start, stop in zip(starts, stops, strict=True))
