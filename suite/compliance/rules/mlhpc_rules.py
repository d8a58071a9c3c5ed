"""The rules for events that only this suite logs. Values logged twice agree, and measurements fit into their time.

Other codes do not log these events, so the rules find nothing in published logs.

The rules for what a log of this suite must state. Omitting a value must not switch a comparison off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from msgspec import ValidationError

from mlhpc.suite.card import SizeCard
from mlhpc.suite.compliance.rules.base import (
    LogBreaches,
    LogContext,
    convert_to_fields,
    find_epoch_num,
    identity_rule,
    list_finished_epochs,
    log_rule,
)
from mlhpc.suite.compliance.ruleset import is_same_value
from mlhpc.suite.documents import Fields, convert
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_duration, render_repr
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Event, convert_to_float, parse_int64
from mlhpc.suite.machine.page_cache import judge_state
from mlhpc.suite.training.parallel.plan import VERSION as PLAN_VERSION
from mlhpc.suite.training.parallel.plan import ParallelPlan

# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it


@log_rule("resumed", "a resumed run is not scored: its log is called resumed_<i>_<k>.txt, never result_<i>.txt")
def check_resumed(context: LogContext) -> LogBreaches:
    event, stop = next(context.every(mllog.RUN_RESUMED, mllog.RECOVERY), None), context.log.first(mllog.RUN_STOP)
    if event is not None:
        yield event.line, "the run was resumed from a checkpoint"
    # Shows also in a log from which somebody deleted run_resumed.
    elif stop is not None and convert_to_float(stop.metadata.get("first_block", 1)) not in (0.0, 1.0):
        yield stop.line, f"the run began with block {render_repr(stop.metadata['first_block'])}: it was resumed"


@log_rule("run-replaced", "a run that takes the place of one that began and failed says so, and is shown")
def check_run_replaced(context: LogContext) -> LogBreaches:
    for event in context.every(mllog.RUN_REPLACED):
        yield event.line, f"the run was made in place of one that began and failed ({render_repr(event.value)})"


def _render_difference(seconds: float, other: float) -> str:
    """Render a time and its difference to another one, which three digits of both may hide."""
    return (
        f"{render_duration(seconds)}, {render_duration(abs(seconds - other))} {'more' if seconds > other else 'less'}"
    )


@log_rule(
    "energy-plausible",
    "an energy counter shows 1 W (memory: 0) to 100 kW, and is one of those that the event names",
)
def check_energy_plausible(context: LogContext) -> LogBreaches:
    for event in context.every(mllog.ENERGY):
        seconds, about = convert_to_float(event.metadata.get("seconds")), event.metadata
        sources = {str(name).partition("/")[0] for name, _ in convert_to_fields(event.value).items()}
        gone = sources & {*(about.get("absent") or ())} if context.record.nodes == 1 else set()
        if gone or sources != {*(about.get("scopes") or ())}:
            what = f"has {', '.join(sorted(gone))}, which it calls absent" if gone else "has other counters than scopes"
            yield event.line, f"energy {what}: {render_repr(sorted(sources))}"
            return
        for name, entry in convert_to_fields(event.value).items():
            of_gpus = str(name).startswith("nvml/")
            run = {"seconds": seconds, "accelerators": (context.record.compute_units or 0) if of_gpus else math.inf}
            run["least_w"] = 0.0 if "dram" in str(name) else 1.0  # of a processor package or an accelerator at work
            for _, text in islice(context.list_broken("energy-plausible", entry=entry, run=run), 1):
                yield event.line, f"{name}: {text}"
                return


@log_rule("config-agrees", "the resolved configuration agrees with the events")
def check_config_agrees(context: LogContext) -> LogBreaches:
    event, config = context.log.first(mllog.RUN_CONFIG), context.record.config or {}
    if event is None:
        return
    yield from context.list_broken("config-agrees")
    for name, value, key in _list_duplicate_settings(config):
        logged = context.log.first(key)
        if logged is not None and not is_same_value(value, logged.value):
            yield (
                event.line,
                f"run_config has {name} = {render_repr(value)}, the events say {render_repr(logged.value)}",
            )
    yield from islice(_check_choices(context, config), 1)
    stated = context.log.first(mllog.CONFIG_FILE)
    if stated is not None and context.record.config_file is None:
        what = f"config_file = {render_repr(stated.value)}, sha256 = {render_repr(stated.metadata.get('sha256'))}"
        yield stated.line, f"{what}: expected the name of a file without folders, and 64 hexadecimal digits"


def _check_choices(context: LogContext, config: Fields) -> LogBreaches:
    """Yield a choice that was made in another way than run_config asks for, or for another run."""
    asked = convert_to_fields(config.get("choices"))
    pinned = convert_to_fields(asked.get("pinned"))
    record = context.record
    stated = {name: value for name, value in config.items() if value != "auto"}
    stated |= {"ranks": record.ranks, "nodes": record.nodes, "parameters": context.logged(mllog.MODEL_PARAMETERS)}
    for event in context.every(mllog.MEASURED_CHOICE):
        source, shape = event.metadata.get("source"), event.metadata.get("shape")
        name, chosen = map(convert_to_fields(event.value).get, ("name", "chosen"))
        given = pinned.get(name) if isinstance(name, str) else None
        made = {"measured": asked.get("measure", True), "cache": asked.get("measure", True), "pinned": given == chosen}
        # A pinned choice that is not possible says so in a note.
        ignored = source == "rule" and given is not None and "note" not in event.metadata
        if ignored or not made.get(str(source), source in ("rule", "kept")):
            yield event.line, f"{render_repr(name)} has the source {render_repr(source)}; run_config says otherwise"
        for key, value in convert_to_fields(shape).items():
            if stated.get(key) not in (None, value):
                what = f"{render_repr(name)} was chosen for {key} = {render_repr(value)}"
                yield event.line, f"{what}; the run has {render_repr(stated[key])}"


def _list_duplicate_settings(config: Fields) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, key of the event) for each value of a configuration that an event logs too."""
    for name, prefix in (("submission", "submission_"), ("hyperparameters", "")):
        for inner, value in convert_to_fields(config.get(name)).items():
            yield f"{name}.{inner}", value, f"{prefix}{inner}"


@log_rule(
    "metric-agrees",
    "a value of the metric is the same wherever it is logged, and fits what else its evaluation measured",
)
def check_metric_agrees(context: LogContext) -> LogBreaches:
    benchmark = context.benchmark
    if benchmark is None:
        return
    for event in context.every(benchmark.metric):
        metrics = event.metadata.get("metrics")
        if isinstance(metrics, dict) and not is_same_value(metrics.get(benchmark.metric), event.value):
            other = render_repr(metrics.get(benchmark.metric))
            yield event.line, f"{benchmark.metric} is {render_repr(event.value)} and in its own metadata {other}"
            return
        # What a person's own loop calls so is its own matter; of a run that diverged nothing is a number.
        if context.record.loop is None and convert_to_float(event.value) is not None:
            yield from islice(context.list_broken("metric-agrees", event, metrics=metrics), 1)
    reached = {(item.value, item.epoch) for item in context.record.evals if benchmark.reached(item.value)}
    reached |= {(value, None) for value, _ in reached}
    for event in context.every(mllog.TARGET_ACCURACY_REACHED):
        if (convert_to_float(event.value), find_epoch_num(event)) not in reached:
            what = f"{event.key} = {render_repr(event.value)}"
            yield event.line, f"{what}: no evaluation that reaches the target has this value"
        stop, due = context.log.first(mllog.RUN_STOP), f"target reached in epoch {event.metadata.get('epoch_num')}"
        # What ended the run after its target has a reason of its own.
        if stop is not None and stop.metadata.get("status") == "success" and stop.metadata.get("reason") != due:
            yield stop.line, f"run_stop says {render_repr(stop.metadata.get('reason'))}; the {due}"


@log_rule("samples-agree", "steps, batch size and samples of an epoch agree")
def check_samples_agree(context: LogContext) -> LogBreaches:
    batch, samples, card = context.record.global_batch_size, context.record.train_samples, context.card
    if card is None or not batch or not samples or batch < 1:
        return
    steps = card.eval_every_steps or samples // batch
    # A person's own loop may take the last batch of an epoch although it is not full.
    config = context.log.first(mllog.RUN_CONFIG)
    own_loop = config is not None and config.metadata.get("loop") == "own"
    taken = -(-samples // batch) if own_loop and card.eval_every_steps is None else steps
    finished = list_finished_epochs(context)
    for line, key, number, counted in _list_step_counts(context):
        if number in finished and convert_to_float(counted) not in (steps, taken):
            due = f"{samples} samples in batches of {batch} are {steps}{f' or {taken}' if taken != steps else ''}"
            yield line, f"{key} of epoch {_render_epoch(number)} counts {render_repr(counted)} steps; {due}"
            return
    yield from islice(_check_sample_counts(context, card, steps * batch, samples if taken != steps else None), 1)
    yield from () if own_loop else context.list_broken("samples-agree")


def _check_sample_counts(context: LogContext, card: SizeCard, per_epoch: int, or_per_epoch: int | None) -> LogBreaches:
    """Yield the events whose samples_count is not that of their epoch. An epoch has one of two lengths."""
    for event in context.every(mllog.EVAL_START, card.metric, mllog.EVAL_STOP):
        epoch, seen = find_epoch_num(event), event.metadata.get("samples_count")
        if epoch is None or seen is None:
            continue
        # With a card's eval_every_steps, epoch_num itself counts samples (docs/architecture.md).
        trained = epoch if card.eval_every_steps else epoch * per_epoch
        if convert_to_float(seen) != trained and (
            or_per_epoch is None or convert_to_float(seen) != epoch * or_per_epoch
        ):
            yield (
                event.line,
                f"samples_count = {render_repr(seen)} after epoch {epoch:g}; {trained:,.0f} were trained on",
            )


def _list_step_counts(context: LogContext) -> Iterator[tuple[int | None, str, float | None, object]]:
    """Yield (line, key, epoch, steps) for each count of an epoch's steps; those of step_phases are summed first."""
    sums: dict[float | None, float] = {}
    for event in context.every(mllog.STEP_PHASES):
        number = find_epoch_num(event)
        sums[number] = sums.get(number, 0.0) + (convert_to_float(event.metadata.get("steps")) or 0.0)
    yield from ((None, "step_phases", number, total) for number, total in sums.items())
    for event in context.every(mllog.RANK_PHASES, mllog.RANK_STATS, mllog.TRAINING_COURSE):
        yield event.line, event.key, find_epoch_num(event), event.metadata.get("steps")


@log_rule(
    "eval-order",
    "an epoch trains, then evaluates, then ends, and all its events have one epoch_num; every other event stands once, "
    "before init, in it, in the run or after it, as the harness writes it",
)
def check_eval_order(context: LogContext) -> LogBreaches:
    metric = context.benchmark.metric if context.benchmark else mllog.EVAL_ERROR
    after = {
        mllog.EPOCH_START: (mllog.EVAL_START,),
        mllog.EVAL_START: (metric, mllog.EVAL_STOP),
        metric: (mllog.EVAL_STOP,),
        mllog.EVAL_STOP: (mllog.EPOCH_STOP,),
        mllog.EPOCH_STOP: (mllog.EPOCH_START,),
    }
    before: Event | None = None
    for event in context.run.every(*after):
        due = after[before.key] if before is not None else (mllog.EPOCH_START,)
        if event.key not in due:
            place = before.key if before else "nothing"
            yield event.line, f"{event.key} stands after {place}; due is {' or '.join(due)}"
            return
        before = event
    yield from islice(_check_places(context), 1)


# Events of the run that are not inside the epoch whose number they have, if any; the first ones also several times.
_REPEATED = (mllog.CHECKPOINT, mllog.CHECKPOINT_FAILED)
_IN_RUN = (
    *(*_REPEATED, mllog.FIRST_LOSSES, mllog.RECOMPUTED_FLOPS, mllog.RECOVERY, mllog.SUSPENDED, mllog.OTHER_WORK),
    *(mllog.RUN_START, mllog.TARGET_ACCURACY_REACHED),
)
_PHASES = {mllog.INIT_START: "in init", mllog.RUN_START: "in the run", mllog.RUN_STOP: "after the run"}


def _check_places(context: LogContext) -> LogBreaches:
    """Yield an event that stands twice, or where the harness writes none of its kind."""
    seen, epoch, phase = dict[object, Any](), None, "before init"
    for event in context.log.events:
        key, number, stem = event.key, event.metadata.get("epoch_num"), event.key.rpartition("_")[0]
        kind = {f"{stem}_start": mllog.INTERVAL_START, f"{stem}_stop": mllog.INTERVAL_END}.get(key, mllog.POINT_IN_TIME)
        if event.event_type != kind:
            yield event.line, f"{key} has the event_type {render_repr(event.event_type)}; due is {kind}"
        phase = _PHASES.get(key, phase)
        epoch = number if key == mllog.EPOCH_START else epoch
        place = key, render_repr(number), render_repr(event.metadata.get("first_step"))
        if key == mllog.MEASURED_CHOICE:  # anywhere, also several times
            continue
        stated = event.value, {name: each for name, each in event.metadata.items() if name not in ("file", "lineno")}
        again = key in _REPEATED or seen.setdefault(place, stated) is stated
        if not (again or (phase.endswith("init") and stated == seen[place])):
            yield event.line, f"{key} stands twice"
        if "epoch_num" in event.metadata and key not in _IN_RUN and number != epoch:
            yield event.line, f"{key} of epoch {render_repr(number)} inside epoch {render_repr(epoch)}"
        if "epoch_num" in event.metadata or key in _IN_RUN:
            due = "in the run"
        elif stem == mllog.STAGING:  # before the run, or beside it
            due = "in the run" if phase in ("in the run", "after the run") else "in init"
        elif key == mllog.CACHE_STATE:
            due = "before init"
        else:
            due = "after the run" if key in (mllog.RUN_STOP, mllog.GOODPUT) else "in init"
        if phase != due and (key != mllog.GOODPUT or mllog.RUN_STOP in context.by_key):
            yield event.line, f"{key} stands {phase}; due is {due}"
        epoch = None if key == mllog.EPOCH_STOP else epoch


@log_rule("duration-agrees", "the measured time of an evaluation is that between its time stamps")
def check_duration_agrees(context: LogContext) -> LogBreaches:
    starts = {find_epoch_num(event): event for event in context.every(mllog.EVAL_START)}
    for event in context.every(mllog.EVAL_STOP):
        start, seconds = starts.get(find_epoch_num(event)), convert_to_float(event.metadata.get("duration_s"))
        apart = None if start is None else (event.time_ms - start.time_ms) / 1e3
        # The duration is measured by another clock than the time stamps, which are milliseconds.
        least = 0.8 * (apart or 0.0) - 0.1  # a busy machine may pause between stamps and clock
        if apart is not None and seconds is not None and not least <= seconds <= 1.01 * apart + 0.01:
            own = _render_difference(seconds, apart)
            yield event.line, f"the evaluation took {render_duration(apart)} by its time stamps, {own} by its own clock"
            return


check_ranks_agree = identity_rule("ranks-agree", "there are no fewer ranks than nodes and no more than accelerators")
check_data_expected = identity_rule(
    "data-expected", "the data are those of the workload's card, where it names them", "the workload's card"
)


@log_rule("data-verified", "the data were compared with their checksums before the run")
def check_data_verified(context: LogContext) -> LogBreaches:
    for event in context.every(mllog.DATA_VERIFIED):
        if event.value is None:
            yield (
                event.line,
                f"the data were not compared with their checksums: {render_repr(event.metadata.get('reason'))}",
            )


@log_rule(
    "cache-agrees",
    "caches count as dropped only if the command that drops them succeeded, and as cold only if the data are larger",
)
def check_cache_agrees(context: LogContext) -> LogBreaches:
    event = context.log.first(mllog.CACHE_STATE)
    if event is None:
        return
    about = event.metadata
    codes, sizes = (
        about.get("exit_codes"),
        [parse_int64(about.get(name)) or 0 for name in ("data_bytes", "memory_bytes")],
    )
    due = judge_state(about.get("command"), tuple(codes) if isinstance(codes, list) else (), *sizes)
    if event.value != due:
        what = f"cache_state is {render_repr(event.value)}"
        yield event.line, f"{what}; command, exit codes {render_repr(codes)} and bytes say {due!r}"
    else:
        yield from context.list_broken("cache-agrees")


@log_rule(
    "other-work",
    "a run had the CPUs that it may use to itself: others took at most 5 % of them, and no whole CPU",
)
def check_other_work(context: LogContext) -> LogBreaches:
    if context.record.mode == "weak":
        return  # instances of one measurement share the CPUs by design
    event, found = context.run.first(mllog.OTHER_WORK), context.record.company
    if event is not None and found is not None:
        where = f"node {found.node}: " if (context.record.nodes or 1) > 1 else ""
        yield event.line, f"{where}{found.text} during the run"


def _render_epoch(epoch: float | None) -> str:
    return "without a number" if epoch is None else f"{epoch:g}"


AXES = ("shard", "tensor", "axial", "expert", "pipeline")  # of a mesh, beside data and spatial
_OF_RUN = ("name", "sha256", "mesh", "engine")  # what a run adds to the plan's own content


@log_rule(
    "plan-stated",
    "a plan by which ranks share samples is that of the ranks, and leaves the mathematics as they are",
)
def check_plan_stated(context: LogContext) -> LogBreaches:
    event = context.log.first(mllog.PARALLEL_PLAN)
    yield from context.list_broken("plan-stated")
    if event is None:  # rule events-whole knows whether there must be one
        return
    plan = convert_to_fields(event.value)
    problem = _find_mesh_problem(plan.get("mesh"), context.record.ranks)
    if problem is not None:
        yield event.line, problem
    if plan.get("compress") is not None and context.division == "closed":
        how = render_repr(plan["compress"])
        yield event.line, f"parallel_plan compresses gradients ({how}), which the closed division does not admit"
    content = {key: value for key, value in plan.items() if key not in _OF_RUN}
    try:
        convert({"version": PLAN_VERSION, "description": "logged", **content}, ParallelPlan)
    except (ValidationError, InputError) as error:
        yield event.line, f"parallel_plan is no plan: {error}"


def _find_mesh_problem(mesh: object, ranks: int | None) -> str | None:
    """Return what is wrong with the mesh of a plan. The product of its dimensions must be the number of ranks."""
    stated = convert_to_fields(mesh)
    parts = stated.get("spatial")  # a list: one number for each dimension of space
    numbers = [stated.get("data"), *(stated.get(name, 1) for name in AXES)]
    numbers += parts if isinstance(parts, list) else [None]
    if not all(type(number) is int and number > 0 for number in numbers):
        expected = f"expected data, {', '.join(AXES)} and spatial, positive numbers"
        return f"parallel_plan has mesh = {render_repr(mesh)}: {expected}"
    if ranks is not None and math.prod(numbers) != ranks:
        return f"the mesh of parallel_plan has {math.prod(numbers)} ranks, number_of_ranks is {ranks}"
    return None
