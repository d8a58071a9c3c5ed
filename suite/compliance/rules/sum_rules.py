"""The rules for the events of this suite together: each is there, holds known names only, and adds up with the others.

A value that is absent, null or unknown is a breach: it would switch a comparison off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from itertools import islice, zip_longest
from typing import Any

from mlhpc.suite.compliance.rebuild import compare_values
from mlhpc.suite.compliance.rules.base import (
    NAMES,
    LogBreaches,
    LogContext,
    convert_to_fields,
    find_epoch_num,
    log_rule,
)
from mlhpc.suite.documents import Fields
from mlhpc.suite.files import render_duration, render_repr
from mlhpc.suite.log import mllog
from mlhpc.suite.log.goodput import compute_goodput
from mlhpc.suite.log.mllog import (
    CHECKPOINT,
    DATA_VERIFIED,
    EPOCH_START,
    FIRST_LOSSES,
    GOODPUT,
    RANK_PHASES,
    RANK_STATS,
    STAGING_STATS,
    STARTUP,
    STEP_PHASES,
    TRACKED_STATS,
)
from mlhpc.suite.log.other_work import find_problem
from mlhpc.suite.log.reader import Event, convert_to_float, parse_int64
from mlhpc.suite.log.record import has_many_digits, list_floats

# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

_PHASES = "step data_wait forward_backward exposed_communication optimizer other overlapped_communication"
_PARTS, _LISTED_RANKS = 5, 64  # phases that fill a step; ranks whose values are listed
_WHERE = "epoch_num first_step steps"
_ANY = "*"
_TYPES = {kind.__name__: kind for kind in (str, int, list, dict, float, bool)}
_INSTRUMENTS = (STEP_PHASES, RANK_STATS, mllog.ENERGY)  # which a run without instrumentation lacks
# Those whose value has numbers only, at every depth.
_NUMBERS = (
    *(STARTUP, mllog.WORK_PER_SAMPLE, mllog.BASELINE, FIRST_LOSSES, STEP_PHASES),
    *(TRACKED_STATS, RANK_PHASES, DATA_VERIFIED, mllog.TRAINING_COURSE),
)
_PLACE = {"file", "lineno"}  # in the code
# What each setting makes the harness log, and nothing else does.
_SWITCHED = {
    "staging.directory": (mllog.STAGING_START, mllog.STAGING_STOP, STAGING_STATS),
    "checkpoint.interval_s": (CHECKPOINT,),
    "instrumentation": (RANK_STATS,),
    "plan": (mllog.PARALLEL_PLAN,),
}
_SAVE_S = 10.0  # of a run without a checkpoint, beside two intervals: it may still be written at the end
_SAVE_SHARE = 0.8  # of the time that saves need; they are begun at checks of all ranks
_AT_END = (
    mllog.OTHER_WORK,
    GOODPUT,
    STARTUP,
    mllog.RUN_FILES,
    mllog.TARGET_ACCURACY_REACHED,
)  # of a run that reached its target
_COUNTED = (CHECKPOINT, STAGING_STATS, DATA_VERIFIED, mllog.SUSPENDED)
_OF_HARNESS = (FIRST_LOSSES, mllog.WORK_PER_SAMPLE)  # a person's own loop need not know them
_ROUNDED = 1e-5  # sums of the same numbers in another order
_CLOCK_S, _STAMP_S = 0.05, 0.002  # between two clocks of one process; of two time stamps
_CLOCK_SHARE = 0.01  # between the clock of a device and that of its host
_RATE_SHARE, _RATE_S = 0.05, 0.2  # between the steps of all ranks and the block's time
_ENERGY_SHARE, _ENERGY_S = 0.02, 1.0  # of a run may pass before its first and after its last reading
_PARAMETER_BYTES = 4  # of a checkpoint, which has each parameter in float32
_LEAST_OWN_SHARE = 0.25  # of the time in which ranks compute on processors that nobody else had


@log_rule("names-known", "the events of this suite have the names in them that the harness writes, and no others")
def check_names_known(context: LogContext) -> LogBreaches:
    for event in context.log.events:
        if event.key.endswith(("_start", "_stop")) and event.value is not None:
            yield event.line, f"{event.key} has the value {render_repr(event.value)}: expected none"
            break
    for key, named in NAMES["events"].items():
        values, metadata = named["value"], named["metadata"]
        for event in context.every(key):
            problem = _find_name_problem(event.metadata, metadata)
            if problem is None and values not in ("", _ANY) and isinstance(event.value, dict):
                problem = _find_name_problem(event.value, values)
            absent = event.value is None and key in (DATA_VERIFIED, GOODPUT, mllog.BASELINE)
            wrong = values != "" and not isinstance(event.value, dict)
            if problem is None and not absent and (wrong or (key in _NUMBERS and not _has_numbers(event.value))):
                problem = f"the value {render_repr(event.value)}: expected {'names' if wrong else 'numbers'}"
            if problem is not None:
                yield event.line, f"{key} has {problem}"
                break


def _find_name_problem(found: Fields, names: str) -> str | None:
    """Return which name is unknown or missing, or which has a value of another kind."""
    required, _, optional = names.partition("?")
    unknown = sorted(found.keys() - {*required.split(), *optional.split()} - _PLACE) if _ANY not in optional else []
    missing = sorted({*required.split()} - found.keys())
    if unknown or missing:
        return f"{render_repr(unknown[0])}, a name that nobody reads" if unknown else f"no {missing[0]}"
    kinds = [({_TYPES[kind] for kind in each.split()}, text.split()) for each, text in NAMES["kinds"].items()]
    wrong = (name for kind, of_kind in kinds for name in of_kind if name in found and type(found[name]) not in kind)
    return next((f"{name} = {render_repr(found[name])}" for name in wrong), None)


def _has_numbers(value: object) -> bool:
    """Return True if all inner values are numbers. Of a loss that diverged the log has the name."""
    if isinstance(value, dict | list):
        return all(map(_has_numbers, value.values() if isinstance(value, dict) else value))
    return convert_to_float(value) is not None or value in ("nan", "inf", "-inf")


@log_rule("events-whole", "a run that reached its target has all events that the harness writes at its end")
def check_events_whole(context: LogContext) -> LogBreaches:
    if context.record.status != "success":
        return
    own = context.record.loop == "own"
    for key in (*_AT_END, *(() if own else _OF_HARNESS)):
        event = context.log.first(key)
        # A process that is killed after run_stop leaves no goodput.
        killed = event is None and key == GOODPUT and context.log.events[-1].key == mllog.RUN_STOP
        if not killed and (event is None or event.value is None):
            yield None, f"no {key} is logged"
    yield from () if own else _check_switched(context)
    lacking = sorted({"sources.json", "environment.json"} - context.record.run_files.keys())
    if lacking:
        yield None, f"run_files states no sha256 of {lacking[0]}"
    yield from context.list_broken("events-whole")
    yield from _check_ends(context)
    if DATA_VERIFIED not in context.by_key:
        yield None, f"no {DATA_VERIFIED} is logged"


def _check_switched(context: LogContext) -> LogBreaches:
    """Yield settings that are on and have no events, and settings that are off and have some."""
    config, run_s = context.record.config or {}, context.record.time_to_train_s or 0.0
    for setting, keys in _SWITCHED.items():
        part, _, name = setting.rpartition(".")
        value = convert_to_fields(config.get(part) if part else config).get(name)
        early = setting.startswith("checkpoint") and (
            run_s <= 2 * (convert_to_float(value) or 0.0) + _SAVE_S or mllog.CHECKPOINT_FAILED in context.by_key
        )
        for key in keys:
            there = key in context.by_key
            if there != bool(value) and (there or not early):
                yield (
                    None,
                    f"run_config has {setting} = {render_repr(value)}, and {key} is{' not' * (not there)} logged",
                )


def _check_ends(context: LogContext) -> LogBreaches:
    """Yield seconds or bytes that cannot be."""
    for event in context.every(*_COUNTED):
        most = context.record.time_to_train_s if event.key == mllog.SUSPENDED else None
        wrong = [number for number in list_floats(event.value) if not 0.0 <= number <= (most or math.inf)]
        if wrong:
            yield (
                event.line,
                f"{event.key} has {wrong[0]:g}: expected 0 or more{', and no more than the run' * bool(most)}",
            )


@log_rule(
    "sums-agree",
    "what ranks and windows of steps measured is there for every epoch, unless instrumentation is off, and adds up: "
    "steps, losses, phases, rates, seconds of energy and CPUs, checkpoints, goodput",
)
def check_sums_agree(context: LogContext) -> LogBreaches:
    yield from islice(context.list_broken("sums-agree"), 1)
    for check in (
        _check_windows,
        _check_load,
        _check_losses,
        _check_phases,
        _check_ranks,
        _check_traffic,
        _check_rates,
        _check_energy,
        _check_own_work,
        _check_checkpoints,
        _check_goodput,
    ):
        yield from islice(check(context), 1)


def _check_windows(context: LogContext) -> LogBreaches:
    """Yield an epoch whose windows of steps are not as run_config asks for, or which was not measured."""
    config = context.record.config or {}
    size, bare = parse_int64(config.get("window_steps")), config.get("instrumentation") is False
    epochs = [epoch.number for epoch in context.record.epochs if epoch.complete]
    found: dict[str, dict[float | None, list[Event]]] = {}
    for key in (TRACKED_STATS, RANK_PHASES, *_INSTRUMENTS):
        for event in context.every(key):
            found.setdefault(key, {}).setdefault(find_epoch_num(event), []).append(event)
        lacking = [number for number in epochs if number not in found.get(key, {})]
        if lacking and not (bare and key in _INSTRUMENTS):
            yield None, f"no {key} of epoch {render_repr(lacking[0])}"
            return
    for number in epochs if size and not bare and context.record.loop is None else ():
        (ranks, *_), windows = found[RANK_PHASES][number], found[STEP_PHASES][number]
        steps = parse_int64(ranks.metadata.get("steps")) or 0
        firsts = range(0, steps, size or 1)
        places = [[each.metadata.get(name) for name in ("first_step", "steps")] for each in windows]
        if len(places) != len(firsts) or places != [[first, min(size or 1, steps - first)] for first in firsts]:
            what = f"{len(places)} windows of {steps} steps, first {places[:3]}"
            yield windows[0].line, f"step_phases has {what}; run_config asks for windows of {size}"
            return


def _check_load(context: LogContext) -> LogBreaches:
    """Yield what a window of steps states of a workload and contradicts itself: parts longer than the step, tokens."""
    windows = {_place(event): _number(event.value, "step") for event in context.every(STEP_PHASES)}
    per_step = set[tuple[str, float]]()
    events = context.by_key.get(mllog.WINDOW_STATS, ())
    # A run without instrumentation has no step_phases, one that was killed may lack its last event.
    if events and windows and context.record.status == "success" and {*map(_place, events)} != windows.keys():
        yield events[0].line, f"{len(events)} window_stats of {len(windows)} windows of steps"
    for event in events:
        step_s, spent = windows.get(_place(event)), math.fsum(list_floats(convert_to_fields(event.value).get("phases")))
        if step_s is not None and spent > step_s + _CLOCK_S:
            yield (
                event.line,
                f"the phases of window_stats take {render_duration(spent)}, the steps {render_duration(step_s)}",
            )
        value = convert_to_fields(event.value)
        for name, load in convert_to_fields(value.get("load")).items():
            counts = map(convert_to_float, _list(convert_to_fields(load).get("tokens_per_expert")))
            steps, total = _number(event.metadata, "steps"), math.fsum(count or 0.0 for count in counts)
            if not total or not steps:
                continue
            per_step.add((str(name), total / steps))
            if len(per_step) > len({each for each, _ in per_step}):
                yield event.line, f"{name} has {total / steps:g} tokens a step; other windows say otherwise"
            roots = {"load": load, "layers": len(value["load"])}
            roots |= {"efficiency": value.get("efficiency"), "phases": value.get("phases")}
            yield from context.list_broken("expert-load", event, **roots)


def _place(event: Event) -> tuple[Any, ...]:
    return tuple(render_repr(event.metadata.get(name)) for name in _WHERE.split())


def _check_losses(context: LogContext) -> LogBreaches:
    """Yield an epoch in which the losses of windows are not the sum that the ranks have, or less than the first
    ones.
    """
    first, window = context.log.first(FIRST_LOSSES), context.log.first(STEP_PHASES)
    begun = [convert_to_float(loss) or 0.0 for loss in _list(first.value)] if first is not None else []
    steps, mean = (
        (_number(window.metadata, name) or 0.0 for name in ("steps", "loss")) if window is not None else (0.0, 0.0)
    )
    whole = mean * steps if len(begun) <= steps else math.inf
    # Losses may be negative, but not in a run that begins with positive ones and stays so.
    if first is not None and min(begun, default=0.0) > 0.0 < mean and math.fsum(begun) > (1.0 + _ROUNDED) * whole:
        yield first.line, f"first_losses sum to {math.fsum(begun):g}, all of their window to {whole:g}"
    windows: dict[float | None, list[Event]] = {}
    for event in context.every(STEP_PHASES):
        windows.setdefault(find_epoch_num(event), []).append(event)
    for event in context.every(RANK_PHASES):
        mine = windows.get(find_epoch_num(event))
        if not mine or not isinstance(event.value, dict):  # rule measured reports it
            continue
        stated = event.value.get("loss_sum")
        losses = [each.metadata.get("loss") for each in mine]
        if stated is None and not any(losses):
            continue  # a loop that states no losses
        pairs = [
            (convert_to_float(loss), convert_to_float(each.metadata.get("steps")))
            for loss, each in zip(losses, mine, strict=True)
        ]
        known = [loss * steps for loss, steps in pairs if loss is not None and steps is not None]
        total = convert_to_float(stated)
        if len(known) < len(pairs) or total is None:
            if context.record.status == "success":
                yield (
                    event.line,
                    f"loss_sum = {render_repr(stated)}, the losses of its windows {render_repr(losses)}:"
                    " expected numbers",
                )
        elif not _is_near(math.fsum(known), total, _ROUNDED):
            yield event.line, f"loss_sum = {total:g}; the losses of the windows sum to {math.fsum(known):g}"


def _measure_epochs(context: LogContext) -> dict[float | None, float]:
    """Return the seconds of training of each complete epoch, by its number."""
    return {epoch.number: epoch.train_s for epoch in context.record.epochs if epoch.complete}


def _check_phases(context: LogContext) -> LogBreaches:
    """Yield a step that its phases do not fill, and an epoch whose windows are not what rank 0 has in rank_stats."""
    ranks = {find_epoch_num(event): event.value for event in context.every(RANK_STATS)}
    sums: dict[tuple[float | None, str], float] = {}
    for event in context.every(STEP_PHASES, RANK_PHASES):
        if isinstance(event.value, dict) and event.value.keys() <= {"loss_sum"}:
            continue  # a run without instrumentation
        step, *parts = _list_numbers(event.value, *_PHASES.split()[:-1]) or [0.0]
        if len(parts) < _PARTS or min(step, *parts) < 0.0 or not _is_near(math.fsum(parts), step, _ROUNDED):
            yield event.line, f"{event.key} = {render_repr(event.value)}: expected seconds of a step and of its phases"
        for name in _PHASES.split() if event.key == STEP_PHASES else ():
            place = find_epoch_num(event), f"{name}_s"
            sums[place] = sums.get(place, 0.0) + (_number(event.value, name) or 0.0)
    lengths = _measure_epochs(context)
    for (epoch, name), total in sums.items():
        values = _list(convert_to_fields(convert_to_fields(ranks.get(epoch)).get(name)).get("values"))
        due = convert_to_float(values[0]) if values else None
        # Both are sums of the same readings; a person's own loop may leave out steps.
        loose, exact = 0.02 * (due or 0.0) + _CLOCK_S, _ROUNDED * total + 1e-6
        least = most = exact if context.record.loop is None else loose
        if name in ("step_s", "other_s"):
            # An epoch ends after its last window: by as much as its events wait for a slow disk or a busy CPU.
            most = loose + max(lengths.get(epoch, math.inf) - sums[epoch, "step_s"], 0.0)
        if due is not None and not -least <= due - total <= most:
            yield None, f"the windows of epoch {render_repr(epoch)} have {name} = {total:g}, rank 0 {due:g}"
    began, events = 0.0, [*context.run.every(EPOCH_START, STEP_PHASES, TRACKED_STATS)]
    for event, after in zip_longest(events, events[1:]):
        # A device ends the last steps of a block after the host has written them.
        end = after if after is not None and after.key == TRACKED_STATS else event
        step_s = _number(event.value, "step") or 0.0 if event.key == STEP_PHASES else 0.0
        passed = (end.time_ms - began) / 1e3
        if step_s > (1.0 + _CLOCK_SHARE) * passed + _CLOCK_S:
            took = render_duration(step_s)
            yield event.line, f"its steps took {took}; {render_duration(passed)} have passed since the window before"
        began = event.time_ms


def _check_ranks(context: LogContext) -> LogBreaches:
    """Yield what is no distribution over ranks, or has another mean than rank_phases."""
    means = {find_epoch_num(event): event.value for event in context.every(RANK_PHASES)}
    lengths = _measure_epochs(context)
    for event in context.every(RANK_STATS):
        epoch, stats = find_epoch_num(event), convert_to_fields(event.value)
        lacking = [name for name in _PHASES.split() if f"{name}_s" not in stats]
        if lacking:
            yield event.line, f"rank_stats has no {lacking[0]}_s"
        for name, entry in stats.items():
            parts = convert_to_fields(entry)
            problem = _find_distribution_problem(parts, context.record.ranks or 1)
            due, mean = _number(means.get(epoch), name.removesuffix("_s")), _number(parts, "mean")
            if problem is None and name.endswith("_s") and due is not None and not _is_near(mean or 0.0, due, _ROUNDED):
                problem = f"rank_phases has {due:g}"
            if problem is None and name == "step_s" and parts["max"] > 1.01 * lengths.get(epoch, math.inf) + 0.1:
                problem = f"training the epoch took {render_duration(lengths[epoch])}"
            if problem is not None:
                yield event.line, f"{name} = {render_repr(entry)}: {problem}"


def _check_traffic(context: LogContext) -> LogBreaches:
    """Yield bytes that the ranks together cannot have read or reduced for the samples and steps of their epoch."""
    if context.record.plan is None and context.record.loop is None:
        for event in context.every(RANK_STATS):
            stats = {"value": event.value, "about": event.metadata}
            yield from context.list_broken("rank-traffic", event, stats=stats)


def _find_distribution_problem(parts: Fields, ranks: int) -> str | None:
    """Return why a mapping is no distribution over ranks: min, median, max, mean, two ranks, and values if any."""
    values = parts.get("values")
    known = [number for value in _list(values) if (number := convert_to_float(value)) is not None]
    if len(known) != ranks and (values is not None or ranks <= _LISTED_RANKS):
        return f"{len(known)} value{'s' * (len(known) != 1)} for {ranks} ranks"
    if not known:  # of many ranks
        numbers = _list_numbers(parts, "min", "mean", "max")
        ends = [rank for name in ("min_rank", "max_rank") if type(rank := parts.get(name)) is int and 0 <= rank < ranks]
        rounded = _ROUNDED * (1.0 + max(numbers, default=0.0))
        inside = len(numbers) == 3 and 0.0 <= numbers[0] <= numbers[1] + rounded <= numbers[2] + 2.0 * rounded
        whole = inside and numbers[0] <= (_number(parts, "median") or 0.0) <= numbers[2] and len(ends) == 2
        return None if whole else f"expected min <= median and mean <= max and whose they are, of {ranks} ranks"
    fine = [number for number in known if has_many_digits(number) and not number.is_integer()]
    if min(known) < 0.0 or len({*fine}) < len(fine):
        return "two ranks measured the same, or less than nothing"
    low, high = min(known), max(known)
    due: dict[str, Any] = {
        "min": low,
        "median": statistics.median(known),
        "mean": math.fsum(known) / ranks,
        "max": high,
    }
    due |= {"min_rank": known.index(low), "max_rank": known.index(high), "values": values}
    found = compare_values(dict(parts), due)
    return next((f"expected {name} = {value!r}" for name, _, value in found), None)


def _check_rates(context: LogContext) -> LogBreaches:
    """Yield an epoch whose steps take another time than its samples at the logged rate.

    The rate is of all steps of rank 0, and of what lies between them.
    """
    batch, windows = context.record.global_batch_size, dict[float | None, float]()
    for event in context.every(STEP_PHASES):
        epoch = find_epoch_num(event)
        windows[epoch] = windows.get(epoch, 0.0) + (_number(event.value, "step") or 0.0)
    steps = {find_epoch_num(event): event for event in context.every(RANK_PHASES)}
    stats = {find_epoch_num(event): event.value for event in context.every(RANK_STATS)}
    for event in context.every(TRACKED_STATS):
        ranks = steps.get(find_epoch_num(event))
        took = _list_numbers(ranks.value, "step") + _list_numbers(ranks.metadata, "steps") if ranks is not None else []
        rate = _number(event.value, "throughput")
        if len(took) < 2 or not batch or not rate:
            continue
        due, ranks_s = took[1] * batch / rate, [took[0], *_list_numbers(_of(stats, event, "step_s"), "min", "max")]
        least = _RATE_SHARE * due + _RATE_S  # ranks that begin or end an epoch apart have other times than their mean
        own_s = (1.0 - _CLOCK_SHARE) * windows.get(find_epoch_num(event), 0.0) - _STAMP_S
        if not max(min(ranks_s) - least, own_s) <= due <= max(ranks_s) + least:
            steps_s = render_duration(took[0])
            yield event.line, f"{rate:g} samples/s are {render_duration(due)}, the steps of the ranks {steps_s}"


def _of(found: Mapping[float | None, Any], event: Event, name: str) -> Any:
    """Return a part of what another event has of the same epoch."""
    return convert_to_fields(found.get(find_epoch_num(event))).get(name)


def _check_energy(context: LogContext) -> LogBreaches:
    """Yield energy that was counted for another time than has passed since the run began."""
    counted, start = 0.0, context.log.first(mllog.RUN_START)
    if start is None:
        return
    for event in context.every(mllog.ENERGY):
        passed = (event.time_ms - start.time_ms) / 1e3
        seconds = convert_to_float(event.metadata.get("seconds"))
        counted += seconds or 0.0
        if seconds is None or abs(counted - passed) > _ENERGY_SHARE * passed + _ENERGY_S:
            yield event.line, f"energy was counted for {render_duration(counted)} of {render_duration(passed)}"


def _check_own_work(context: LogContext) -> LogBreaches:
    """Yield CPU time that is none, or less than the passes of ranks on processors took."""
    record, phases = context.record, context.record.mean_phases
    event = context.run.first(mllog.OTHER_WORK) if record.mode != "weak" else None  # instances share the CPUs by design
    wrong = find_problem(event) if event is not None else None
    if wrong is not None and event is not None:
        yield event.line, f"other_work = {render_repr(event.value)}: {wrong}"
    others, own, nodes = record.other_work, record.own_cpu_s, record.nodes or 1
    # Of many nodes some are listed.
    if event is None or phases is None or record.device != "cpu" or others is None or len(event.value) < nodes:
        return
    cpus = others.cpus * nodes
    due = _LEAST_OWN_SHARE * max(0.0, 1.0 - others.share) * phases.forward_backward_s * min(record.ranks or 1, cpus)
    if due > _ENERGY_S and (own is None or own < due):
        used, took = render_duration(own or 0.0), render_duration(phases.forward_backward_s)
        yield event.line, f"the ranks used {used} of CPU time; their passes took {took}"


def _check_checkpoints(context: LogContext) -> LogBreaches:
    """Yield a checkpoint that the run cannot have saved there or then, or that cannot hold its model; at last the time
    that all of them stalled the run.
    """
    record, card, settings = context.record, context.card, context.record.config or {}
    steps = (card.eval_every_steps if card else None) or (record.train_samples or 0) // (record.global_batch_size or 1)
    interval_s, least = (
        _number(settings.get("checkpoint"), "interval_s") or 0.0,
        _PARAMETER_BYTES * (record.model_parameters or 0),
    )
    epochs, before = dict[float | None, int](), (0, 0)
    for event in context.run.every(EPOCH_START, CHECKPOINT):
        number, step = find_epoch_num(event), parse_int64(event.metadata.get("next_step"))
        if event.key == EPOCH_START:
            epochs.setdefault(number, len(epochs))
            continue
        known = number in epochs and step is not None and 0 <= step <= steps
        place = (epochs[number], step or steps) if known else (-1, 0)  # before step 0: all of the epoch is done
        if place < before:
            yield event.line, f"checkpoint before step {step} of epoch {number}: the run was not there, or beyond it"
        elif min(_list_numbers(event.value, "files"), default=0) < 1 or (_number(event.value, "bytes") or 0) < least:
            what = f"checkpoint_saved = {render_repr(event.value)}"
            yield event.line, f"{what}: expected a file, and {least:g} bytes for {record.model_parameters} parameters"
        before = max(place, before)
    saves = context.run.every(CHECKPOINT)
    # Each begins half an interval after the one before, or as long after it as an interval without its writing. During
    # evaluations none is begun, and none ends. A run that is stopped saves at once.
    spans = [math.fsum(_list_numbers(each.value, "stall_s", "write_s")) for each in saves]
    begun = [each.time_ms / 1e3 - span for each, span in zip(saves, spans, strict=True)]
    evals_s = math.fsum(_number(each.metadata, "duration_s") or 0.0 for each in context.every(mllog.EVAL_STOP))
    due_s = math.fsum(max(interval_s / 2, interval_s - span) for span in spans[:-1])
    if record.status == "success" and saves and begun[-1] - begun[0] < _SAVE_SHARE * due_s - evals_s:
        apart = f"{len(saves)} checkpoints in {render_duration(begun[-1] - begun[0])}"
        yield saves[-1].line, f"{apart}; run_config has interval_s = {interval_s:g}"
    # Ranks stand still between steps, which is in the phase other.
    windows = [(each.value, sign) for each in context.every(STEP_PHASES) for sign in (("step", 1), ("other", -1))]
    stalls = math.fsum(_number(each.value, "stall_s") or 0.0 for each in saves)
    parts = [sign * (_number(value, name) or 0.0) for value, (name, sign) in windows]
    run_s, busy_s = record.time_to_train_s, math.fsum(parts) + evals_s
    if run_s is not None and stalls and stalls + busy_s > (1.0 + _CLOCK_SHARE) * run_s + _CLOCK_S:
        took = f"{render_duration(stalls)}, steps and evaluations took {render_duration(busy_s)}"
        yield None, f"checkpoints stalled the run for {took} of {render_duration(run_s)}"


def _check_goodput(context: LogContext) -> LogBreaches:
    """Yield a part of goodput that is not what the events of the run say. A replaced run has attempts elsewhere."""
    event = context.log.first(GOODPUT)
    if event is None or event.value is None or {mllog.RUN_REPLACED, mllog.RUN_RESUMED} & context.by_key.keys():
        return
    due = compute_goodput([context.log.events], context.log.path, 0).logged()
    for name, stated, value in compare_values(event.value, due):
        numbers = convert_to_float(stated), convert_to_float(value)
        if None in numbers or not math.isclose(*numbers, rel_tol=1e-6, abs_tol=_STAMP_S):  # type: ignore[arg-type]
            yield event.line, f"goodput says {name} = {render_repr(stated)}, the events {render_repr(value)}"


def _number(value: object, name: str) -> float | None:
    return convert_to_float(convert_to_fields(value).get(name))


def _list_numbers(value: object, *names: str) -> list[float]:
    return [number for name in names if (number := _number(value, name)) is not None]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_near(one: float, other: float, share: float) -> bool:
    return abs(one - other) <= share * max(abs(one), abs(other)) + 1e-9
