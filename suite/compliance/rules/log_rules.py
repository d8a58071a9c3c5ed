"""The rules for every log. They ask what it must hold, for order and time of events, and what the run reached.

The rules for epochs and evaluations: their numbers, values that are no numbers, evaluations without an end.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise

from mlhpc.suite.card import render_metric_value
from mlhpc.suite.compliance.rules.base import (
    BENCHMARK_RESULTS,
    EMPTY_LOG_RULE,
    HPC,
    LOGGING,
    RUN_RESULTS,
    TRAINING,
    LogBreaches,
    LogContext,
    cite,
    find_epoch_num,
    find_steps_between_evals,
    log_rule,
)
from mlhpc.suite.compliance.ruleset import is_same_value
from mlhpc.suite.files import render_duration, render_repr
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Event, convert_to_float, parse_int64
from mlhpc.suite.log.record import find_first_on_target

# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it


_TRAINING_KEYS = (
    *(mllog.EPOCH_START, mllog.EPOCH_STOP),
    *(mllog.EVAL_START, mllog.EVAL_STOP, mllog.EVAL_ERROR, mllog.EVAL_ACCURACY),
)
# Events that must not follow run_stop. An epoch or an evaluation may still end there.
_FORBIDDEN_AFTER_STOP = frozenset(
    {
        *(mllog.STAGING_START, mllog.RUN_START, mllog.EPOCH_START, mllog.STEP_PHASES),
        *(mllog.EVAL_START, mllog.EVAL_ERROR, mllog.EVAL_ACCURACY),
    }
)
# What a run begins from. Some codes read hyperparameters and data later.
_BEFORE_RUN = frozenset(
    {
        *(mllog.CACHE_CLEAR, mllog.SEED, mllog.NUMBER_OF_RANKS, mllog.NUMBER_OF_NODES, mllog.ACCELERATORS_PER_NODE),
        *(mllog.SUBMISSION_BENCHMARK, mllog.SUBMISSION_ORG, mllog.SUBMISSION_DIVISION, mllog.SUBMISSION_STATUS),
    }
)
_EVAL_KEYS = frozenset({mllog.EVAL_START, mllog.EVAL_STOP, mllog.EVAL_ERROR, mllog.EVAL_ACCURACY})
# What other processes may log after run_stop: they evaluate checkpoints while the training goes on.
_OFFLINE_EVAL_KEYS = _EVAL_KEYS | {
    f"{stem}_{side}" for stem in (mllog.EPOCH, mllog.BLOCK) for side in ("start", "stop")
}
# What the times of a run are read from.
_STEMS = (mllog.INIT, mllog.STAGING, mllog.RUN, mllog.EPOCH, mllog.BLOCK)
_TIMED_KEYS = _EVAL_KEYS | {f"{stem}_{side}" for stem in _STEMS for side in ("start", "stop")}
_CLOCKS_DIFFER_S = 0.01  # processes of one run that write into one log are rarely further apart
_CLOCK_STEP_S = 0.001  # time stamps are milliseconds
# ntpd sets a clock back if it is off by 0.128 s, and slews smaller steps; no published log goes back by as much in all.
_MOST_STEPS_BACK_S = 1.0
_LONGEST_GAP_S = 1.0  # between init_stop and run_start; a barrier takes less
_ZONES_S = 86_400.0  # clocks that show the time of another zone

# What a log must hold


@log_rule(EMPTY_LOG_RULE, "a log holds at least one MLLOG event", LOGGING)
def check_log_empty(context: LogContext) -> LogBreaches:
    if not context.log.events:
        yield None, "no MLLOG event found; expected lines with ':::MLLOG {...}'"


@log_rule(
    "event-valid", "every line with the MLLOG token holds one JSON event with key, value, time_ms and metadata", LOGGING
)
def check_event_valid(context: LogContext) -> LogBreaches:
    log = context.log
    if len(log.problems) == 1 and mllog.RUN_STOP in context.by_key and log.problems[0].line > log.events[-1].line:
        return  # the process was killed while it wrote its last line, after run_stop: nothing of the run is missing
    yield from ((problem.line, problem.message) for problem in log.problems)
    if log.damaged > len(log.problems):
        yield None, f"{log.damaged - len(log.problems)} more events of this file cannot be read"


@log_rule(
    "benchmark-known", "the ruleset knows the benchmark that the log names, and in mlhpc-1.0 its size", cite(HPC, "2")
)
def check_benchmark_known(context: LogContext) -> LogBreaches:
    event = context.log.first(mllog.SUBMISSION_BENCHMARK)
    names = context.ruleset.benchmark_names()
    if event is not None and event.value not in names:
        more = "; --card FILE adds that of a card" if context.ruleset.data.cards else ""
        known = f"{context.ruleset.name} knows {', '.join(names)}{more}"
        yield event.line, f"unknown benchmark {render_repr(event.value)}; {known}"
    elif event is not None and context.benchmark is None:
        size = context.log.first(mllog.BENCHMARK_SIZE)
        known = ", ".join(context.ruleset.sizes(context.record.benchmark))
        yield (
            (size or event).line,
            f"unknown size {render_repr(context.record.size)} of {render_repr(event.value)}; sizes: {known}",
        )


@log_rule("key-missing", "every key that the ruleset requires is logged", LOGGING)
def check_key_missing(context: LogContext) -> LogBreaches:
    missing = [repr(key) for key in _find_missing_keys(context) if key not in _TRAINING_KEYS]
    if len(missing) > 3:  # a log of another tool lacks nearly all: one finding says it
        yield None, f"{len(missing)} required keys are not logged: {', '.join(missing)}"
    else:
        yield from ((None, f"required key {key} is not logged") for key in missing)


@log_rule("training-missing", "the epochs and evaluations of a run are logged", LOGGING)
def check_training_missing(context: LogContext) -> LogBreaches:
    for key in _find_missing_keys(context):
        if key in _TRAINING_KEYS:
            yield None, f"no {key} is logged"
    for keys in context.ruleset.data.either if context.log.events else ():
        if not any(key in context.by_key for key in keys):
            yield None, f"no {' or '.join(keys)} is logged"


@log_rule("key-repeated", "a key that is required once is logged once, even with the same value", LOGGING)
def check_key_repeated(context: LogContext) -> LogBreaches:
    for key, events in _find_repeated_keys(context):
        if all(is_same_value(event.value, events[0].value) for event in events):
            yield events[1].line, f"{key!r} is logged {len(events)} times with one value"


@log_rule("key-conflict", "a key that is required once has one value", LOGGING)
def check_key_conflict(context: LogContext) -> LogBreaches:
    for key, events in _find_repeated_keys(context):
        other = next((event for event in events if not is_same_value(event.value, events[0].value)), None)
        if other is not None:
            yield other.line, f"{key!r} is logged as {render_repr(events[0].value)} and as {render_repr(other.value)}"


@log_rule("key-value", "the ruleset or the card allows every value", f"{cite(HPC, '6.1')}; the workload's card")
def check_key_value(context: LogContext) -> LogBreaches:
    for key, rule in context.key_rules.items():
        for event in context.every(key) if rule.asks else ():
            # Published logs write "seed: null"; rule seed-missing reports that.
            null_seed = event.value is None and key == mllog.SEED
            problem = None if null_seed else rule.problem(event.value, context.logged)
            if problem:
                yield event.line, f"{key} = {render_repr(event.value)}: {problem}"
                break


@log_rule("key-near", "sample counts are exactly those of the benchmark", LOGGING)
def check_key_near(context: LogContext) -> LogBreaches:
    for key, rule in context.key_rules.items():
        event = context.log.first(key)
        if event is not None and rule.about is not None and not rule.problem(event.value) and event.value != rule.about:
            yield event.line, f"{key} = {render_repr(event.value)}: expected {rule.about:g}"


@log_rule("seed-missing", "every run logs its seed", "training_policies#546; mlperf_logging seed_checker")
def check_seed_missing(context: LogContext) -> LogBreaches:
    if context.log.events and all(event.value is None for event in context.every(mllog.SEED)):
        yield None, "no seed is logged"


@log_rule("ruleset-agrees", "the log was made for the ruleset it is judged by")
def check_ruleset_agrees(context: LogContext) -> LogBreaches:
    event = context.log.first(mllog.RULESET)
    if event is not None and event.value != context.ruleset.name:
        yield event.line, f"the log was made for ruleset {render_repr(event.value)}, judged by {context.ruleset.name}"


@log_rule("placeholder", "organisation and platform are no placeholders")
def check_placeholder(context: LogContext) -> LogBreaches:
    for event in context.every(mllog.SUBMISSION_ORG, mllog.SUBMISSION_PLATFORM):
        if isinstance(event.value, str) and "PLACEHOLDER" in event.value:
            yield event.line, f"{event.key} = {render_repr(event.value)} is a placeholder"


# Order and time


@log_rule(
    "event-order",
    "init_start, init_stop, run_start, run_stop come in this order in the file; what a run begins from stands before "
    "run_start, and what describes it before run_stop",
    LOGGING,
)
def check_event_order(context: LogContext) -> LogBreaches:
    for earlier, later in (
        (mllog.INIT_START, mllog.INIT_STOP),
        (mllog.INIT_STOP, mllog.RUN_START),
        (mllog.RUN_START, mllog.RUN_STOP),
    ):
        # By place in the file, not by time stamp: processes with different clocks may write one log.
        first, second = context.position.get(earlier), context.position.get(later)
        if first is not None and second is not None and second < first:
            yield context.log.events[second].line, f"{later} comes before {earlier}"
    # The loop above sees only the first init_start; ranks may log several.
    stop, starts = context.log.first(mllog.INIT_STOP), context.by_key.get(mllog.INIT_START)
    if stop is not None and starts and starts[-1].line > stop.line:
        yield starts[-1].line, "init_start after init_stop"
    # What the ruleset has keys for describes the run, but for what is trained and evaluated.
    stated = context.key_rules.keys() - _TIMED_KEYS - _FORBIDDEN_AFTER_STOP if context.ruleset.complete else set()
    for mark, keys in ((mllog.RUN_START, stated & _BEFORE_RUN), (mllog.RUN_STOP, stated)):
        begin = context.position.get(mark, len(context.log.events))
        for key in sorted(key for key in keys if context.log.places.get(key, [-1])[-1] > begin):
            yield context.by_key[key][-1].line, f"{key} after {mark}"
            return


@log_rule("run-unfinished", "a run ends with run_stop", f"{RUN_RESULTS}; {LOGGING}")
def check_run_unfinished(context: LogContext) -> LogBreaches:
    if context.log.events and mllog.RUN_STOP not in context.by_key:
        yield context.log.events[-1].line, "no run_stop: the run did not end"


@log_rule("run-time", "run_stop is later than run_start", RUN_RESULTS)
def check_run_time(context: LogContext) -> LogBreaches:
    seconds = context.record.time_to_train_s
    stop = context.log.first(mllog.RUN_STOP)
    if seconds is not None and stop is not None and seconds <= 0.0:
        yield stop.line, f"run_stop is {render_duration(-seconds)} before run_start: the run has no time"


@log_rule("clock-jump", "time stamps never jump back by more than a minute, nor in all by more than 1 s")
def check_clock_jump(context: LogContext) -> LogBreaches:
    if context.in_time_order:
        return
    # The clock may not be paused: each step back takes its seconds out of the run.
    steps = list(_list_steps_back(context))
    total = sum(seconds for _, seconds in steps)
    if total > _MOST_STEPS_BACK_S:
        yield steps[0][0], f"time goes back {len(steps)} times, by {render_duration(total)} in all"
        return
    for line, seconds, text in _find_backward_steps(_list_run_events(context)):
        # Smaller steps are corrections of the clock, which rule clock-order reports.
        if seconds > 60.0:
            yield line, text
            return


def _list_steps_back(context: LogContext) -> Iterator[tuple[int, float]]:
    """Yield (line, seconds) of each event that is earlier than the one before it by more than clocks of ranks
    differ.
    """
    many = context.ruleset.data.many_writers
    events = _list_timed_events(_list_run_events(context)) if many else context.log.events
    least = _CLOCKS_DIFFER_S if many else _CLOCK_STEP_S
    for before, event in pairwise(events):
        seconds = (before.time_ms - event.time_ms) / 1e3
        if seconds > least:
            yield event.line, seconds


@log_rule("run-once", "a log has one run_start and one run_stop; ranks that log it too do so within 1 s")
def check_run_once(context: LogContext) -> LogBreaches:
    for key in (mllog.RUN_START, mllog.RUN_STOP):
        events = context.by_key.get(key, [])
        other = next((event for event in events if abs(event.time_ms - events[0].time_ms) > _LONGEST_GAP_S * 1e3), None)
        if other is not None:
            apart = render_duration(abs(other.time_ms - events[0].time_ms) / 1e3)
            yield other.line, f"{key} is logged {len(events)} times, {apart} apart"


@log_rule(
    "clock-unit",
    "time stamps are Unix time in milliseconds, not before the year of the rules - 2, and not after now",
    LOGGING,
)
def check_clock_unit(context: LogContext) -> LogBreaches:
    first = datetime(context.ruleset.data.year - 2, 1, 1, tzinfo=UTC).timestamp() * 1e3
    last = (time.time() + _ZONES_S) * 1e3
    event = next((event for event in context.log.events if not first <= event.time_ms <= last), None)
    if event is not None:
        span = f"from {context.ruleset.data.year - 2} to now"
        what = f"time_ms = {event.time_ms:.15g} of {render_repr(event.key)}"
        yield event.line, f"{what}: expected Unix time in milliseconds, {span}"


@log_rule(
    "clock-order",
    "time stamps never go back (MLPerf's rounds, where many ranks write: those of one clock that times are read from)",
)
def check_clock_order(context: LogContext) -> LogBreaches:
    if context.in_time_order:
        return
    many = context.ruleset.data.many_writers
    events = _list_timed_events(_list_run_events(context)) if many else context.log.events
    least = _CLOCKS_DIFFER_S if many else 0.0
    for line, seconds, text in _find_backward_steps(events):
        if least < seconds <= 60.0:  # rule clock-jump reports the others
            yield line, text
            return


@log_rule(
    "init-limit",
    "run_start (Training: init_stop) is at most 30 minutes after the first event (Training: init_start; open division: "
    "4 hours)",
    RUN_RESULTS,
)
def check_init_limit(context: LogContext) -> LogBreaches:
    limit = context.ruleset.data.init_minutes["open" if context.division == "open" else "closed"]
    start = context.log.first(mllog.INIT_START)
    if start is not None and context.ruleset.complete:  # whatever a log begins with is a part of its set-up
        start = context.log.events[0]
    for key in (mllog.INIT_STOP, mllog.RUN_START):
        event = context.log.first(key)
        if start is not None and event is not None and event.time_ms - start.time_ms >= limit * 60e3:
            seconds = (event.time_ms - start.time_ms) / 1e3
            over = render_duration(seconds - 60 * limit)
            yield event.line, f"{key} is {render_duration(seconds)} after {start.key}, {over} more than allowed"
            return
        if key == context.ruleset.data.init_ends:
            return


@log_rule(
    "init-gap",
    "run_start follows init_stop within 1 s: time between them would count neither as set-up nor as run",
    RUN_RESULTS,
)
def check_init_gap(context: LogContext) -> LogBreaches:
    stop, start = context.log.first(mllog.INIT_STOP), context.log.first(mllog.RUN_START)
    if stop is not None and start is not None and (start.time_ms - stop.time_ms) / 1e3 > _LONGEST_GAP_S:
        yield start.line, f"run_start is {render_duration((start.time_ms - stop.time_ms) / 1e3)} after init_stop"


@log_rule(
    "staging-order", "staging_stop has a staging_start, and up to v2.0 staging lies inside the run", cite(HPC, "5.1")
)
def check_staging_order(context: LogContext) -> LogBreaches:
    start, stop = context.log.first(mllog.STAGING_START), context.log.first(mllog.STAGING_STOP)
    run = context.log.first(mllog.RUN_START)
    if stop is not None and start is None:
        yield stop.line, "staging_stop without staging_start"
    early = run is not None and context.position.get(mllog.STAGING_START, 0) < context.position[mllog.RUN_START]
    if start is not None and early and not context.ruleset.data.staging_before_run:
        yield start.line, f"staging begins before run_start; {context.ruleset.name} times it inside the run"


@log_rule(
    "interval-open",
    "every interval that begins also ends, except an epoch and an evaluation that run_stop interrupts",
    LOGGING,
)
def check_interval_open(context: LogContext) -> LogBreaches:
    if mllog.RUN_STOP not in context.by_key:
        return
    for stem, allowed in (("staging", 0), ("eval", 1), ("epoch", 1)):  # run_stop may interrupt the last ``allowed``
        starts, stops = context.by_key.get(f"{stem}_start", []), context.by_key.get(f"{stem}_stop", [])
        if len(starts) > len(stops) + allowed:
            yield starts[-1].line, f"{len(starts)} {stem}_start but {len(stops)} {stem}_stop"


@log_rule("interval-negative", "no interval ends before it begins")
def check_interval_negative(context: LogContext) -> LogBreaches:
    for epoch in context.record.epochs:
        if epoch.stop_s < epoch.start_s - _CLOCK_STEP_S and (epoch.complete or not _has_offline_evals(context)):
            yield None, f"epoch {epoch.number} ends {render_duration(epoch.start_s - epoch.stop_s)} before it begins"
    intervals = (
        ("init", context.record.init_s),
        ("staging", _compute_staging_s(context)),
        ("eval", _compute_shortest_eval_s(context)),
    )
    for name, seconds in intervals:
        if seconds is not None and seconds < -_CLOCK_STEP_S:
            event = context.log.first(f"{name}_stop")
            yield event.line if event else None, f"{name}_stop is {render_duration(-seconds)} before {name}_start"


@log_rule("event-after-stop", "nothing is staged, trained or evaluated after run_stop")
def check_event_after_stop(context: LogContext) -> LogBreaches:
    position = context.position.get(mllog.RUN_STOP)
    if position is None:
        return
    offline = _OFFLINE_EVAL_KEYS if _has_offline_evals(context) else frozenset()
    after = [event for event in context.log.events[position + 1 :] if event.key in _FORBIDDEN_AFTER_STOP - offline]
    if after:
        what = f"{len(after)} events of staging, training or evaluation"
        yield after[0].line, f"{what} after run_stop, first {after[0].key}"


# What the run reached


@log_rule("run-status", "run_stop carries a status, success or aborted", LOGGING)
def check_run_status(context: LogContext) -> LogBreaches:
    stop = context.log.first(mllog.RUN_STOP)
    if stop is None:
        return
    if "status" not in stop.metadata:
        if not context.ruleset.data.status_optional:
            yield stop.line, "run_stop has no status"
    elif stop.metadata["status"] not in ("success", "aborted"):
        yield stop.line, f"status = {render_repr(stop.metadata['status'])}: expected 'success' or 'aborted'"


@log_rule("run-aborted", "a scored run was not aborted", BENCHMARK_RESULTS)
def check_run_aborted(context: LogContext) -> LogBreaches:
    stop = context.log.first(mllog.RUN_STOP)
    if stop is not None and stop.metadata.get("status") == "aborted":
        yield stop.line, "the run was aborted"


@log_rule("target-missed", "the run reaches the target before run_stop", cite(HPC, "2"))
def check_target_missed(context: LogContext) -> LogBreaches:
    if context.benchmark is None or find_first_on_target(context.record, context.benchmark) is not None:
        return
    values = [item.value for item in context.record.evals]
    if not values:
        logged = len(context.run.every(context.benchmark.metric))
        found = f"{logged} evaluations, none a number" if logged else "no evaluation before run_stop"
        yield None, f"{found}; the target is {context.benchmark.target_text}"
        return
    best = min(values) if context.benchmark.direction == "min" else max(values)
    line = next(item.line for item in context.record.evals if item.value == best)
    shown = render_metric_value(best, context.benchmark.threshold, "g")
    yield line, f"best {context.record.metric_key} is {shown}; the target is {context.benchmark.target_text}"


@log_rule("status-true", "a run with status success has an evaluation that reaches the target")
def check_status_true(context: LogContext) -> LogBreaches:
    stop = context.log.first(mllog.RUN_STOP)
    if stop is None or context.benchmark is None:
        return
    reached = find_first_on_target(context.record, context.benchmark) is not None
    if stop.metadata.get("status") == "success" and not reached:
        yield stop.line, "status is 'success' but no evaluation reaches the target"


@log_rule("last-eval", "the last evaluation before run_stop reaches the target, as an earlier one did")
def check_last_eval(context: LogContext) -> LogBreaches:
    evals = context.record.evals
    if context.benchmark is None or not evals or find_first_on_target(context.record, context.benchmark) is None:
        return
    if context.record.status != "aborted" and not context.benchmark.reached(evals[-1].value):
        last, target = (
            render_metric_value(evals[-1].value, context.benchmark.threshold, "g"),
            context.benchmark.target_text,
        )
        yield evals[-1].line, f"the last evaluation before run_stop is {last}; the target is {target}"


@log_rule("late-stop", "a run stops at the first evaluation that reaches the target")
def check_late_stop(context: LogContext) -> LogBreaches:
    first = find_first_on_target(context.record, context.benchmark) if context.benchmark else None
    if first is not None and first is not context.record.evals[-1]:
        after = len(context.record.evals) - 1 - context.record.evals.index(first)
        yield first.line, f"the target was reached {after} evaluation{'s' if after > 1 else ''} before the run stopped"


def _find_missing_keys(context: LogContext) -> Iterator[str]:
    """Yield the required keys that are not logged, except run_stop: rule run-unfinished reports it."""
    for key, rule in context.key_rules.items():
        if rule.count != "optional" and key not in context.by_key and key != mllog.RUN_STOP:
            yield key


def _find_repeated_keys(context: LogContext) -> Iterator[tuple[str, list[Event]]]:
    """Yield (key, events) for every key that was logged twice although only once is allowed."""
    for key, rule in context.key_rules.items():
        events = context.by_key.get(key, [])
        if rule.count == "exactly_one" and len(events) > 1:
            yield key, events


def _has_offline_evals(context: LogContext) -> bool:
    """True if other processes evaluate the checkpoints of the benchmark, and the training goes on meanwhile."""
    return context.benchmark is not None and context.benchmark.offline_evals


def _list_run_events(context: LogContext) -> Iterator[Event]:
    """Return the events of the training processes."""
    # Other processes may evaluate, or clear the cache, by another clock.
    if _has_offline_evals(context):
        return (event for event in _list_timed_events(context.log.events) if event.key not in _OFFLINE_EVAL_KEYS)
    many = context.ruleset.data.many_writers
    return (event for event in context.log.events if not many or event.key != mllog.CACHE_CLEAR)


def _list_timed_events(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events that times are read from, in file order. Of one event by several ranks the first counts."""
    seen = set()
    for event in events:
        if event.key not in _TIMED_KEYS:
            continue
        place = event.key, find_epoch_num(event)
        if place not in seen or event.key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
            seen.add(place)
            yield event


def _find_backward_steps(events: Iterable[Event]) -> Iterator[tuple[int, float, str]]:
    """Yield (line, seconds, message) for every event that is earlier than the latest event before it."""
    latest = None
    for event in events:
        if latest is not None and event.time_ms < latest.time_ms:
            seconds = (latest.time_ms - event.time_ms) / 1e3
            yield event.line, seconds, f"{event.key} is {render_duration(seconds)} earlier than {latest.key} before it"
        else:
            latest = event


def _compute_staging_s(context: LogContext) -> float | None:
    start, stop = context.log.first(mllog.STAGING_START), context.log.first(mllog.STAGING_STOP)
    return (stop.time_ms - start.time_ms) / 1e3 if start and stop else None


def _compute_shortest_eval_s(context: LogContext) -> float | None:
    """Compute the seconds of the shortest evaluation. None if not every evaluation that began also ended."""
    starts, stops = context.by_key.get(mllog.EVAL_START, []), context.by_key.get(mllog.EVAL_STOP, [])
    if not starts or len(starts) != len(stops):
        return None
    return min((stop.time_ms - start.time_ms) / 1e3 for start, stop in zip(starts, stops, strict=True))


# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it


SCHEDULES = f"{cite(TRAINING, '9.4')}; mlperf_logging training_*/closed_*.yaml"  # only logs of MLPerf Training


@log_rule("eval-value", "every value of the metric is a number", LOGGING)
def check_eval_value(context: LogContext) -> LogBreaches:
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
def check_eval_epoch(context: LogContext) -> LogBreaches:
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
def check_epoch_numbers(context: LogContext) -> LogBreaches:
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
def check_eval_every_epoch(context: LogContext) -> LogBreaches:
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


@log_rule("eval-diverged", "the metric is never NaN or infinite: there the training diverged")
def check_eval_diverged(context: LogContext) -> LogBreaches:
    values = list(context.every(context.benchmark.metric)) if context.benchmark else []
    diverged = [event for event in values if _is_diverged(event)]
    if diverged:
        yield diverged[0].line, f"{len(diverged)} of {len(values)} values of {diverged[0].key} are NaN or infinite"


@log_rule("eval-negative", "no value of the metric is negative")
def check_eval_negative(context: LogContext) -> LogBreaches:
    for event in context.every(context.benchmark.metric) if context.benchmark else ():
        number = convert_to_float(event.value)
        if number is not None and number < 0.0:
            yield event.line, f"{event.key} = {render_repr(event.value)}: expected a number of at least 0"
            return


@log_rule(
    "eval-closed",
    "every evaluation that ends has begun, and every one that begins ends, except the last if run_stop interrupts it",
    LOGGING,
)
def check_eval_closed(context: LogContext) -> LogBreaches:
    if mllog.RUN_STOP not in context.by_key:
        return
    starts, stops = context.run.every(mllog.EVAL_START), context.run.every(mllog.EVAL_STOP)
    if len(stops) > len(starts):
        yield stops[-1].line, f"{len(stops)} eval_stop but {len(starts)} eval_start"
    ended = Counter(map(find_epoch_num, stops))
    for event in starts[:-1]:
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
def check_eval_schedule(context: LogContext) -> LogBreaches:
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
