"""Checks the course of a run: epochs, evaluations, samples and rates agree with each other and with the clock.

The time and the epochs of a run are single numbers, easily edited. The events around them are not.
"""

# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

import math
import statistics
from collections import deque
from itertools import islice, pairwise

from mlhpc.suite.compliance.result import count_evaluated_samples
from mlhpc.suite.compliance.rules.base import (
    RUN_RESULTS,
    LogBreaches,
    LogContext,
    convert_to_fields,
    find_epoch_num,
    find_steps_between_evals,
    list_finished_epochs,
    log_rule,
)
from mlhpc.suite.files import render_duration, render_repr
from mlhpc.suite.log import mllog
from mlhpc.suite.log.other_work import MAX_SHARE
from mlhpc.suite.log.reader import STEP_KEYS, Event, convert_to_float
from mlhpc.suite.log.record import has_many_digits, list_floats
from mlhpc.suite.log.timeline import Epoch

_VALUES = (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY)
_RUN_KEYS = (  # none of them may come before run_start, nor any other event that has an epoch or a step
    *(mllog.EPOCH_START, mllog.EPOCH_STOP, f"{mllog.BLOCK}_start", f"{mllog.BLOCK}_stop"),
    *(mllog.EVAL_START, mllog.EVAL_STOP, *_VALUES),
    *(mllog.TRACKED_STATS, mllog.STEP_PHASES, mllog.TARGET_ACCURACY_REACHED),
)
_INIT_KEYS = (mllog.TRAIN_SAMPLES, mllog.EVAL_SAMPLES)
_SHORTEST_EPOCH_SHARE = 0.02  # of the longest but one; the shortest of 3,792 published logs is 0.05 of the longest
_SHORTEST_EVAL_SHARE = 0.1  # of the time that training takes for as many samples; the least published is 0.11
_LEAST_OF_MIDDLE_EVAL = 0.04  # of the median evaluation of a run; the least of 3,792 published logs is 0.05
_OWN_EVAL_SHARE = 0.04  # where the log says how much of training is computing
# An evaluation computes a third of training. No accelerator trains 2.5 times as fast as in the fastest published run.
_MOST_EVAL_RATE = 7.5
_MOST_RUN_RATE = 1.5  # times the highest logged rate; the most published (MLPerf Training v5.0) is 1.011
_RATE_TOLERANCE = 0.03  # of a rate; published rates are within 0.023 of their times
_LEAST_RATE_SHARE = 0.005  # by which a rate may be below that of its samples and time; published: by 0.001
_MOST_EPOCH_RATE, _FEW = 1.3, 3  # times the median of more rates than these; the most of 884 published logs is 1.195
_OF_HPC = ("eval_loss", mllog.TARGET_ACCURACY_REACHED)
_NEVER_EQUAL = (mllog.EVAL_ACCURACY, "eval_loss")  # eval_error has been, three times
_PAUSE_S = 2.0  # a busy machine may pause so long between an epoch's time stamps and its first or last step
_LEAST_STEP_SHARE = 0.15  # of an epoch is spent in steps, however long the pauses are
_SLACK_S = 0.1  # of clocks and time stamps
# What a log states of an interval beside its time stamps: first event, last one, and how many make a second.
_CLOCKED = {
    "staging_duration": (mllog.STAGING_START, mllog.STAGING_STOP, 1.0),
    "training_epoch_latency": (mllog.EPOCH_START, mllog.EVAL_START, 1e3),
    "eval_epoch_latency": (mllog.EVAL_START, mllog.EVAL_STOP, 1e3),
    "time": (mllog.RUN_START, mllog.RUN_STOP, 1.0),
}
_ENDS = {end for begin, stop, _ in _CLOCKED.values() for end in (begin, stop)}
_NUMBERED, _CLOCK_S = (mllog.EPOCH_START, mllog.EVAL_START), 0.05
_MEASURED = (
    *(mllog.TRACKED_STATS, mllog.STEP_PHASES, mllog.RANK_PHASES, mllog.RANK_STATS, mllog.FIRST_LOSSES),
    *("eval_loss", "train_loss", "throughput"),
)
_DECAY = (
    ("opt_learning_rate_decay_boundary_epochs", "opt_learning_rate_decay_factor"),
    ("scheduler_milestones", "scheduler_decay_rate"),
)
_GROWTH = ("opt_learning_rate_warmup_epochs", "opt_learning_rate_warmup_factor")
_LEARNING_RATE_SHARE = 0.01  # the last step of a warm-up
_BASE_RATES, _LEAST_LEARNING_RATE = ("opt_lr", "opt_base_learning_rate"), 0.9  # published: 0.97 to 1
_WARM_UP = ("opt_learning_rate_warmup_steps", "scheduler_lr_warmup_steps")
_RANKS_DIFFER_S = 0.01  # the clocks of two ranks, one of which logs the start of an evaluation
_SHORTEST_S = 1.0  # in shorter epochs a pause may be most of the time: a rate may be far above what they say


@log_rule("stop-early", "run_stop is not earlier than an epoch, evaluation or value that stands before it")
def check_stop_early(context: LogContext) -> LogBreaches:
    stop = context.log.first(mllog.RUN_STOP)
    if context.benchmark is not None and context.benchmark.offline_evals:
        return  # the run trains on while another process evaluates, and run_stop has the time of the right checkpoint
    latest = max(context.run.every(*_RUN_KEYS), key=lambda event: event.time_ms, default=None)
    if stop is not None and latest is not None and latest.time_ms > stop.time_ms:
        early = render_duration((latest.time_ms - stop.time_ms) / 1e3)
        yield stop.line, f"run_stop is {early} earlier than {latest.key} before it (line {latest.line})"


@log_rule("before-run", "nothing is trained and nothing evaluated before run_start", RUN_RESULTS)
def check_before_run(context: LogContext) -> LogBreaches:
    start = context.log.first(mllog.RUN_START)
    position = context.position.get(mllog.RUN_START)
    if start is None or position is None:
        return
    earliest = start.time_ms - 1.0  # a millisecond of slack for rounded stamps
    found: set[str] = set()
    for index, event in enumerate(context.log.events):
        early = event.time_ms < earliest
        if not (early or index < position) or not _is_training_event(event):
            continue
        kind = event.key if event.key in _RUN_KEYS else "step"  # the reader may drop all steps but the first
        if kind not in found:
            found.add(kind)
            where = f"is {render_duration((start.time_ms - event.time_ms) / 1e3)} before" if early else "stands before"
            yield event.line, f"{event.key} {where} run_start"


def _is_training_event(event: Event) -> bool:
    """Return True for an event of training or evaluation, and for any other that names an epoch or a step."""
    if event.key == mllog.TRACKED_STATS:  # published codes log how long staging took in one of them
        return isinstance(event.value, dict) and "throughput" in event.value
    if event.key in _INIT_KEYS:  # some codes number everything
        return False
    return event.key in _RUN_KEYS or "epoch_num" in event.metadata or "step_num" in event.metadata


@log_rule(
    "epoch-begun",
    "what names an epoch names the one that began last, or that of an evaluation that began last",
)
def check_epoch_begun(context: LogContext) -> LogBreaches:
    epoch: float | None = None
    evals = deque[float](maxlen=2)  # another process may evaluate while the training goes on
    for event in context.run.events:
        number = find_epoch_num(event)
        if number is None:  # rule eval-epoch reports it
            continue
        # Some codes number what they log before the first epoch; a checkpoint may be written after its own.
        # Events of steps may be left out of what is judged.
        foreign = context.ruleset.foreign and "checkpoint" not in event.key and event.key not in STEP_KEYS
        if event.key == mllog.EPOCH_START:
            epoch = number
        elif event.key == mllog.EVAL_START:
            evals.extend([number] if number <= (epoch or 0.0) else [])
        elif number not in (epoch or 0.0, *evals) and (event.key in _VALUES or (foreign and epoch is not None)):
            begun = "no epoch" if epoch is None else f"epoch {epoch:g}"
            yield event.line, f"{event.key} of epoch {number:g}; {begun} was the last that had begun"
            return


@log_rule(
    "epoch-steps",
    "the steps at an evaluation are those of its epoch: batch size times steps are its samples",
)
def check_epoch_steps(context: LogContext) -> LogBreaches:
    batch, samples = context.record.global_batch_size or 0, context.record.train_samples or 0
    counts_samples = context.benchmark is not None and context.benchmark.epoch_counts_samples
    if batch < 1 or samples < 1 or counts_samples:
        return
    fewest, most = samples // batch, -(-samples // batch)  # steps of an epoch: codes drop or fill up the last batch
    from_zero = any(epoch.number == 0 for epoch in context.record.epochs)
    for event in context.run.every(*_VALUES):
        steps, epoch = convert_to_float(event.metadata.get("step_num")), find_epoch_num(event)
        if steps is None or epoch is None:
            continue
        number = epoch + from_zero
        if not (number - 1) * fewest <= steps <= number * most:
            due = f"{samples} samples in batches of {batch} are {fewest} to {most} for each epoch"
            yield event.line, f"{event.key} of epoch {epoch:g} after {steps:g} steps; {due}"
            return


@log_rule(
    "stated-twice",
    "what a log states twice is the same: rates, steps, seconds beside time stamps, learning rates; what it measured is "
    "finite, no accuracy above 1, no value twice in a row, no two in a row again, no rate far above "
    "the others",
)
def check_stated_twice(context: LogContext) -> LogBreaches:
    if context.record.status in ("success", None):  # logs of v0.7 state none
        for check in (_list_contradictions, _check_clocks, _check_repeated, _check_learning_rates):
            yield from islice(check(context), 1)


def _list_contradictions(context: LogContext) -> LogBreaches:
    """Yield what contradicts an earlier event. No published log of MLPerf HPC has one."""
    throughput, steps = dict[float | None, float | None](), 0.0
    before = dict[str, object]()
    rates = [rate for event in context.run.every(mllog.TRACKED_STATS) if (rate := _find_rate(event))]
    # A shared machine may be slow for most of a run; published ones were not.
    if context.ruleset.foreign and len(rates) > _FEW and max(rates) > _MOST_EPOCH_RATE * statistics.median(rates):
        yield None, f"throughput is {max(rates):g} samples/s in one epoch, in the middle {statistics.median(rates):g}"
    for event in context.run.events:
        if event.key in STEP_KEYS:  # of which the reader keeps some
            continue
        value, about = convert_to_float(event.value), event.metadata
        epoch = convert_to_float(about.get("epoch_num", about.get("epoch")))
        rate = value if event.key == "throughput" else _find_rate(event) if event.key == mllog.TRACKED_STATS else None
        if None not in (rate, epoch) and throughput.setdefault(epoch, rate) != rate:
            yield event.line, f"{event.key} = {rate}; of the same epoch the log states {throughput[epoch]}"
        elif isinstance(event.value, float) and value is None and not event.key.startswith("eval_"):
            yield event.line, f"{event.key} = {render_repr(event.value)} in a run that reached its target"
        elif value is not None and value > 1.0 and event.key.endswith("_accuracy"):
            yield event.line, f"{event.key} = {value:g}: no accuracy is above 1"
        elif event.key in _OF_HPC and context.ruleset.foreign:
            yield from _check_loss_and_target(context, event, value)
        # Accuracies of a few samples are few fractions, of which neighbours may be equal.
        elif event.key in _NEVER_EQUAL and context.ruleset.foreign and value is not None:
            if before.get(event.key) == value:
                yield event.line, f"{event.key} = {value!r}, as just before: no two measurements are equal"
            before[event.key] = value
        taken = convert_to_float(about.get("step_num")) if event.key not in STEP_KEYS else None  # not all are read
        if taken is not None and taken < steps:
            yield event.line, f"{event.key} stands at step {taken:g}, after step {steps:g}"
        steps = taken or steps


def _check_loss_and_target(context: LogContext, event: Event, value: float | None) -> LogBreaches:
    """Yield a loss below 0, and a target that is neither that of the benchmark nor the value that reached it."""
    if event.key == "eval_loss" and value is not None and value < 0.0 and context.division == "closed":
        yield event.line, f"eval_loss = {value:g}: expected at least 0"
    if event.key == mllog.TARGET_ACCURACY_REACHED and context.benchmark is not None:
        epoch, reached = find_epoch_num(event), context.benchmark.reached
        values = [each.value for each in context.record.evals if epoch in (None, each.epoch) and reached(each.value)]
        if not values or value not in (context.benchmark.threshold, *values):
            what = f"{event.key} = {render_repr(event.value)}{f' in epoch {epoch:g}' if epoch is not None else ''}"
            yield (
                event.line,
                f"{what}: neither the target {context.benchmark.target_text} nor a value that reaches it there",
            )


def _check_clocks(context: LogContext) -> LogBreaches:
    """Yield seconds that a log states of an interval and that its time stamps do not have."""
    stamps = dict[tuple[str, float | None], float]()
    for event in context.run.events:
        named = [name for name in _CLOCKED if name in event.metadata]
        if not named and event.key not in _ENDS:
            continue
        epoch = find_epoch_num(event)
        stamps.setdefault((event.key, epoch), event.time_ms)
        stamps.setdefault((event.key, None), event.time_ms)
        for name in named:
            begin, end, per_s = _CLOCKED[name]
            stated, number = convert_to_float(event.metadata.get(name)), epoch if begin in _NUMBERED else None
            first, last = stamps.get((begin, number)), stamps.get((end, number))
            if stated is None or first is None or last is None:
                continue
            took = (last - first) / 1e3
            if not _fits_clock(stated / per_s, took):
                yield event.line, f"{name} = {stated:g}; the time stamps say {render_duration(took)}"


def _fits_clock(stated_s: float, took_s: float) -> bool:
    """Return True for seconds of a part of an interval that took so long: published ones are up to 2.3 % less."""
    return (1.0 - _RATE_TOLERANCE) * took_s - _SHORTEST_S <= stated_s <= 1.002 * took_s + _CLOCK_S


def _check_repeated(context: LogContext) -> LogBreaches:
    """Yield two measured numbers in a row that an earlier event has. Of 944 published logs none has such."""
    seen, last = dict[tuple[str, float, float], int](), dict[str, float]()
    for event in context.run.every(*_MEASURED):
        loss = event.metadata.get("loss")
        for key, numbers in ((event.key, list_floats(event.value)), ("loss", list_floats(loss))):
            # Bytes, which ranks count too, are often equal.
            fine = [each for each in numbers if has_many_digits(each) and not each.is_integer()]
            known = [last[key], *fine] if key in last else fine
            for one, other in pairwise(known):
                if one != other and seen.setdefault((key, one, other), event.line) != event.line:
                    yield event.line, f"{key} has {one!r}, {other!r}, as line {seen[key, one, other]}: measured twice"
            if known:
                last[key] = known[-1]


def _check_learning_rates(context: LogContext) -> LogBreaches:
    """Yield a learning rate that the stated warm-up and decay do not give.

    Of epochs: the highest one, those before it and those after it. Some codes end with a rate of 0. Of steps the first
    ones after other events are always read. None is above the stated one. After the warm-up none is above the one
    before, and all are as the milestones say, which count from the end of the warm-up.
    """
    base, warm = (
        next((rate for key in keys if (rate := convert_to_float(context.logged(key))) is not None), None)
        for keys in (_BASE_RATES, _WARM_UP)
    )
    if not context.ruleset.foreign:
        return
    (ends, shares), (marks, decays) = ([_list_numbers(context.logged(key)) for key in keys] for keys in _DECAY)
    most, late = math.inf if base is None else base, list[tuple[float, float]]()
    for before, event in pairwise(context.run.events):
        if event.key != "learning_rate" or before.key in STEP_KEYS:
            continue
        rate, step = max(_list_numbers(event.value), default=0.0), convert_to_float(event.metadata.get("step_num"))
        if rate > 1.001 * most:
            yield event.line, f"the learning rate is {rate:g} at step {step}; expected at most {most:g}"
        if warm is None or step is None or step <= warm:
            continue
        most = min(most, rate)
        late.append((rate, sum(mark + warm < step for mark in marks)))
        due = late[0][0] * decays[0] ** (late[-1][1] - late[0][1]) if marks and len(decays) == 1 else rate
        if not math.isclose(rate, due, rel_tol=_LEARNING_RATE_SHARE):
            yield event.line, f"the learning rate is {rate:g} at step {step:g}; the stated milestones give {due:g}"
    starts = context.run.every(mllog.EPOCH_START)
    found = [(rate, event) for event in starts for rate in list_floats(event.metadata.get("lr"))]
    if not base or not found:
        return
    most, event = max(found, key=lambda each: each[0])
    if not _LEAST_LEARNING_RATE * base <= most <= 1.001 * base:
        yield event.line, f"the highest learning rate is {most:g}; the log states {base:g}"
    growing, factor = (convert_to_float(context.logged(key)) or 0.0 for key in _GROWTH)
    for rate, each in found if len(ends) == len(shares) else ():
        epoch = find_epoch_num(each) or 0.0
        passed = sum(end < epoch for end in ends)
        due = most * shares[passed - 1] if passed else most
        known = growing or each.line > event.line
        if epoch <= growing:
            known, due = factor, base * (1.0 + (factor - 1.0) * (epoch - 1.0) / growing) / (factor or 1.0)
        if known and rate and not math.isclose(rate, due, rel_tol=1e-3):
            yield each.line, f"the learning rate is {rate:g}; the warm-up and decay that the log states give {due:g}"


def _list_numbers(value: object) -> list[float]:
    found = map(convert_to_float, value if isinstance(value, list) else [value])
    return [number for number in found if number is not None]


def _is_disturbed(context: LogContext) -> bool:
    """Return True if other programs may have slowed a part of the run, forty times even. Such a run is not ranked."""
    company = context.record.company
    return company is not None and company.share > MAX_SHARE


@log_rule("epoch-time", "no epoch is fifty times shorter than two others")
def check_epoch_time(context: LogContext) -> LogBreaches:
    seconds = [(epoch.stop_s - epoch.start_s, epoch) for epoch in context.record.epochs if epoch.complete]
    # One may have waited for a file system: that costs the submitter.
    long_s = sorted(length for length, _ in seconds)[-2] if len(seconds) > 1 else 0.0
    short = [(length, epoch) for length, epoch in seconds if length < _SHORTEST_EPOCH_SHARE * long_s]
    if short and long_s > 1.0 and not _is_disturbed(context):
        length, epoch = short[0]
        what = f"{len(short)} of {len(seconds)} epochs, first {render_repr(epoch.number)}"
        yield None, f"{what}: {render_duration(length)}, where others take {render_duration(long_s)}"


@log_rule(
    "eval-time",
    "no evaluation is ten times faster than training computes as many samples, 25 times faster than others of the run, "
    "nor faster than the accelerators can",
)
def check_eval_time(context: LogContext) -> LogBreaches:
    lasted, begun = list[tuple[float, Event]](), dict[float | None, Event]()
    for event in context.run.every(mllog.EVAL_START, mllog.EVAL_STOP):
        number = find_epoch_num(event)
        start = begun.pop(number, None)
        if event.key == mllog.EVAL_START:
            begun[number] = start or event  # another rank may have logged it before
        elif start is not None:
            lasted.append(((event.time_ms - start.time_ms) / 1e3, event))
    middle = statistics.median_low([took for took, _ in lasted]) if lasted else 0.0
    least = max(_compute_shortest_eval_s(context) or 0.0, _LEAST_OF_MIDDLE_EVAL * middle)
    for took, event in lasted if not _is_disturbed(context) else ():
        if took + _RANKS_DIFFER_S < least:
            what = f"{context.record.eval_samples} samples are evaluated in {render_duration(took)}"
            yield event.line, f"{what}; at least {render_duration(least)} are possible"
            return


def _compute_shortest_eval_s(context: LogContext) -> float | None:
    """Compute the least seconds of an honest evaluation. None if the log does not say enough.

    A slow disk makes training alone slow, because the few samples of the evaluation stay in memory. So only the time
    counts in which training computes. Logs of other codes do not say it; there the fastest published run bounds
    what the accelerators compute.
    """
    train_s = [epoch.train_s for epoch in context.record.epochs if epoch.complete and epoch.train_s > 0.0]
    block, samples = _list_block_samples(context)[:1], context.record.eval_samples
    if not train_s or not block or not samples or samples < 1:
        return None
    share = _SHORTEST_EVAL_SHARE if context.ruleset.foreign else _OWN_EVAL_SHARE
    least = share * statistics.median(train_s) * samples / block[0]
    phases, published = context.record.phases, context.benchmark.fastest if context.benchmark is not None else {}
    if phases is not None:
        return least * min(1.0, phases.forward_backward_s / phases.step_s) if phases.step_s > 0.0 else None
    if not published or context.division == "open":  # the open division may train another model
        return None
    units = context.record.compute_units
    if units is None:  # logs of v0.7, of which no new one will come
        return least
    return min(least, samples / (_MOST_EVAL_RATE * max(published.values()) * units)) if units > 0 else None


@log_rule(
    "throughput-run",
    "a run is at most half as fast again as its highest logged throughput, where the metric counts samples or epochs",
)
def check_throughput_run(context: LogContext) -> LogBreaches:
    rates = [rate for event in context.run.every(mllog.TRACKED_STATS) if (rate := _find_rate(event))]
    seconds, benchmark = context.record.time_to_train_s, context.benchmark
    samples = count_evaluated_samples(context.record, benchmark) if benchmark is not None else None
    if not rates or not samples or not seconds or seconds <= 0.0:
        return
    if samples / seconds > _MOST_RUN_RATE * max(rates):
        due = f"its {samples:,.0f} samples in {render_duration(seconds)} are {samples / seconds:g}"
        yield context.record.evals[-1].line, f"throughput is at most {max(rates):g} samples/s; {due}"


@log_rule("throughput-whole", "a log that states the throughput of one epoch states that of every finished epoch")
def check_throughput_whole(context: LogContext) -> LogBreaches:
    rates = [event for event in context.run.every(mllog.TRACKED_STATS) if _find_rate(event) is not None]
    numbers = {convert_to_float(event.metadata.get("epoch_num", event.metadata.get("epoch"))) for event in rates}
    finished = [epoch for epoch in context.record.epochs if epoch.complete]
    lacking = [epoch for epoch in finished if epoch.number not in numbers]
    if rates and None not in numbers and lacking:
        first = render_repr(lacking[0].number)
        yield (
            rates[0].line,
            f"{len(lacking)} of {len(finished)} epochs have no throughput, first {first}; others have one",
        )
    elif None in numbers and 0 < len(rates) < len(finished):
        yield rates[0].line, f"{len(rates)} of {len(finished)} epochs have a throughput"


@log_rule(
    "throughput-true",
    "the logged throughput agrees with the samples and the time of the epoch: it is at most 3 % and a pause of 2 s "
    "above them, and 0.5 %, two batches and 0.1 s of the clock below",
)
def check_throughput_true(context: LogContext) -> LogBreaches:
    finished = list_finished_epochs(context)
    rates = [(event, rate) for event in context.run.every(mllog.TRACKED_STATS) if (rate := _find_rate(event))]
    blocks = context.benchmark is not None and context.benchmark.epoch_counts_samples
    # Codes leave out the last batch of an epoch, and one more.
    lost = 0 if blocks else 2 * (context.record.global_batch_size or 0)
    for index, (event, rate) in enumerate(rates):
        number = convert_to_float(event.metadata.get("epoch_num", event.metadata.get("epoch")))
        epoch = finished.get(number) if number is not None else _find_epoch(context, index)
        times = [] if epoch is None else _list_training_times(context, epoch, event)
        cases = [(samples, seconds) for seconds in times for samples in _list_block_samples(context)]
        if cases and not any(_is_possible_rate(rate, *case, lost) for case in cases):
            named, due = f"epoch {render_repr(epoch.number) if epoch else '?'}", cases[0][0] / cases[0][1]
            yield event.line, f"throughput {rate:g} samples/s in {named}; its times say {due:g}"
            return


def _is_possible_rate(rate: float, samples: float, seconds: float, lost: float) -> bool:
    """Return True if training at this rate can take these seconds, minus a pause, for these samples but ``lost``."""
    counted = max((1.0 - _RATE_TOLERANCE) * samples, (1.0 - _LEAST_RATE_SHARE) * (samples - lost))
    least = counted / (seconds + _SLACK_S)
    most = (1.0 + _RATE_TOLERANCE) * samples / max(seconds - _PAUSE_S, _LEAST_STEP_SHARE * seconds)
    return least <= rate and (rate <= most or seconds < _SHORTEST_S)


def _find_rate(event: Event) -> float | None:
    return convert_to_float(convert_to_fields(event.value).get("throughput"))


def _find_epoch(context: LogContext, index: int) -> Epoch | None:
    """Return the epoch of the n-th rate, for codes that log no number of the epoch."""
    epochs = context.record.epochs
    return epochs[index] if index < len(epochs) else None


def _list_training_times(context: LogContext, epoch: Epoch, event: Event) -> list[float]:
    """List the seconds of training to which the rate may refer."""
    times = [epoch.train_s]
    if context.ruleset.foreign:
        # Some codes evaluate while they train, so their rate covers the time up to its event.
        until_event = event.time_ms / 1e3 - (context.record.run_start_s or 0.0) - epoch.start_s
        times.append(min(until_event, epoch.stop_s - epoch.start_s))
    return [seconds for seconds in times if seconds > 0.0]


def _list_block_samples(context: LogContext) -> list[float]:
    """List the samples between two evaluations, and the number that some codes of the benchmark log instead."""
    benchmark, batch = context.benchmark, convert_to_float(context.record.global_batch_size)
    if benchmark is None:
        return []
    if benchmark.epoch_counts_samples:
        steps = find_steps_between_evals(context)
        return [steps * batch] if steps and batch else []
    known = [float(context.record.train_samples)] if context.record.train_samples else []
    if benchmark.throughput_per_rank is not None and context.record.ranks:
        known.append(float(benchmark.throughput_per_rank * context.record.ranks))
    return known
