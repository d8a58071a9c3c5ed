"""Summarises one log as a RunRecord: what it says about one run. Applies no rule; times come from
mlhpc.suite.log.timeline.

Only the keys of events are trusted: event_type is wrong in thousands of published lines. The first run_start and the
first run_stop count; events after run_stop are ignored. Every field that some published log lacks is optional.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mlhpc.suite.card import Target
from mlhpc.suite.log import mllog
from mlhpc.suite.log.course import read_course
from mlhpc.suite.log.facts import (
    ROW,
    Fact,
    Reading,
    derived,
    parse_mapping,
    parse_text,
    render_json,
    render_text,
    stated,
    stated_count,
)
from mlhpc.suite.log.other_work import OtherWork, read_other_work, sum_own_seconds
from mlhpc.suite.log.reader import Event, Log, Span, convert_to_float, parse_float, parse_int, parse_int64
from mlhpc.suite.log.timeline import (
    Epoch,
    Timeline,
    TimeParts,
    TimeShares,
    compute_staging_seconds,
    compute_timeline,
    find_time_parts,
    list_ended_epochs,
)

_PLAIN_NAME = r"\w[\w.+-]{0,199}"  # of a file: no folder, and not hidden


class MetricValue(NamedTuple):
    """One logged value of the metric.

    ``time_s`` counts from run_start; ``epoch`` is the log's own number, or its samples_count.
    """

    epoch: float | None
    value: float
    time_s: float
    line: int


@dataclass(frozen=True)
class Phases:
    """Seconds of all training steps of a run by phase.

    The first five sum to ``step_s``; overlapped communication is inside.
    """

    data_wait_s: float
    forward_backward_s: float
    exposed_communication_s: float
    optimizer_s: float
    other_s: float
    overlapped_communication_s: float
    step_s: float


class CountedEnergy(NamedTuple):
    """The sum of ``energy`` events: per counter (joules, number of counters), and the seconds they cover together.

    ``absent`` names the counters of the machine that could not be read.
    """

    by_counter: Mapping[str, tuple[float, int]]
    seconds: float
    absent: tuple[str, ...] = ()


def _parse_digests(value: object) -> Mapping[str, str]:
    pairs = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in pairs if isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text)}


def _parse_losses(value: object) -> tuple[float, ...]:
    # A stranger's log may list any number; a run logs 20.
    losses = [convert_to_float(loss) for loss in value[:64]] if isinstance(value, list) else []
    # With one value missing, the steps of two lists no longer match.
    return tuple(loss for loss in losses if loss is not None) if None not in losses else ()


def _read_item(parse: Callable[[Any], object], names: Sequence[str], value: Any) -> object:
    """Parse an item of nested JSON objects."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return parse(value)


def _read_field(name: str, value: object) -> object:
    return getattr(value, name, None)


_STARTUP = {
    f"startup_{part}_{name}_s": partial(_read_item, parse_float, (part, name))
    for part in ("interpreter", "imports", "init")
    for name in ("min", "median", "max")
}
_STAGING = {
    "staging_bytes": partial(_read_item, parse_float, ("bytes",)),
    "staging_gb_per_s": partial(_read_item, parse_float, ("gb_per_s",)),
    "staging_reused": partial(_read_item, render_text, ("reused",)),
    "staging_overlapped": partial(_read_item, render_text, ("overlapped",)),
}
_PHASES = {f"step_{item.name}": partial(_read_field, item.name) for item in fields(Phases) if item.name != "step_s"}
_WORK = {
    **{
        f"{name}_per_sample": partial(_read_item, convert_to_float, (name,))
        for name in ("model_flops", "executed_flops", "algorithmic_bytes", "all_to_all_bytes")
    },
    **{
        f"{name}_per_step": partial(_read_item, convert_to_float, (f"{name}_per_step",))
        for name in ("optimizer_flops", "optimizer_bytes", "all_reduce_bytes")
    },
}


@dataclass(frozen=True)
class RunRecord:
    """One run, and the table of facts: each field is a row (mlhpc.suite.log.facts). Columns stand in this order.

    Times are in seconds; ``run_start_s`` and ``run_stop_s`` are Unix time. None: the log does not say.
    """

    path: Path | None = derived(lambda log: log.run.path)
    benchmark: str | None = stated(mllog.SUBMISSION_BENCHMARK, parse_text)
    size: str | None = stated(mllog.BENCHMARK_SIZE, parse_text)
    ruleset: str | None = stated(mllog.RULESET, parse_text)
    suite_version: str | None = stated(mllog.SUITE_VERSION, parse_text, cause=("suite version", "suite version"))
    org: str | None = stated(mllog.SUBMISSION_ORG, parse_text)
    division: str | None = stated(mllog.SUBMISSION_DIVISION, parse_text)
    submission_status: str | None = stated(mllog.SUBMISSION_STATUS, parse_text)
    platform: str | None = stated(mllog.SUBMISSION_PLATFORM, parse_text)
    mode: str | None = stated(mllog.RUN_MODE, parse_text)
    trial: int | None = stated(mllog.RUN_MODE, parse_int64, about="trial")
    job: str | None = stated(mllog.RUN_MODE, parse_text, about="job", columns="job")
    ranks: int | None = stated_count(mllog.NUMBER_OF_RANKS, "ranks", ("ranks", "number of ranks"))
    nodes: int | None = stated_count(mllog.NUMBER_OF_NODES, "nodes", ("ranks", "number of nodes"))
    accelerators_per_node: int | None = stated_count(mllog.ACCELERATORS_PER_NODE, "accelerators_per_node")
    global_batch_size: int | None = stated_count(mllog.GLOBAL_BATCH_SIZE, "global_batch_size")
    train_samples: int | None = stated_count(mllog.TRAIN_SAMPLES, "train_samples")
    eval_samples: int | None = stated_count(mllog.EVAL_SAMPLES, "eval_samples")
    seed: int | None = stated(mllog.SEED, parse_int, columns={"seed": render_text}, cause=("seed", "seed"))
    precision: object = derived(lambda log: _find_precision(log), columns={"precision": render_text})
    cache_state: str | None = stated(mllog.CACHE_STATE, parse_text, columns="cache_state")
    preflight: str | None = stated(mllog.PREFLIGHT, parse_text, about="verdict_sha256")
    # Bytes and files of the data, bytes of memory
    sizes: Mapping[str, float] = derived(lambda log: _read_sizes(log), empty=dict)
    device: str | None = stated(
        mllog.RUN_CONFIG, parse_text, about="device", columns={"device_type": render_text}, cause=("device", "device")
    )
    loop: str | None = stated(mllog.RUN_CONFIG, parse_text, about="loop")  # own: a person's own loop
    threads_per_rank: int | None = stated(
        mllog.RUN_CONFIG,
        parse_int64,
        about="threads_per_rank",
        columns={"threads_per_rank": parse_float},
        cause=("threads", "threads per rank"),
    )
    model_parameters: float | None = derived(
        lambda log: (
            parse_int64(log.value(mllog.MODEL_PARAMETERS))
            or parse_float(log.hyperparameters.get("model_parameters_count"))
        ),
        columns="model_parameters",
        limited=True,
    )
    config: Mapping[str, Any] | None = stated(
        mllog.RUN_CONFIG, parse_mapping, columns={"config": lambda value: render_json(value) if value else None}
    )
    plan: Mapping[str, Any] | None = stated(mllog.PARALLEL_PLAN, parse_mapping)
    hyperparameters: Mapping[str, Any] = derived(
        lambda log: log.hyperparameters, empty=dict, columns={"hyperparameters": render_json}
    )
    keys: frozenset[str] = derived(lambda log: frozenset(log.run.places), empty=frozenset)  # of all events
    startup: Mapping[str, Any] | None = stated(mllog.STARTUP, parse_mapping, columns=_STARTUP, limited=True)
    # The mean over ranks if the log has it: rank 0 alone may be the fastest or the slowest
    mean_phases: Phases | None = derived(
        lambda log: _sum_phases(log.run, mllog.RANK_PHASES) or _sum_phases(log.run, mllog.STEP_PHASES),
        columns=_PHASES,
        limited=True,
    )
    phases: Phases | None = derived(lambda log: _sum_phases(log.run, mllog.STEP_PHASES))
    staging_stats: Mapping[str, Any] | None = stated(mllog.STAGING_STATS, parse_mapping, columns=_STAGING, limited=True)
    work_per_sample: Mapping[str, float] = derived(
        lambda log: _select_numbers(log.value(mllog.WORK_PER_SAMPLE)), empty=dict, columns=_WORK
    )
    other_work: OtherWork | None = derived(
        lambda log: read_other_work(log.run.first(mllog.OTHER_WORK)),
        columns={"other_work_share": partial(_read_field, "share")},
    )
    own_cpu_s: float | None = derived(
        lambda log: sum_own_seconds(log.run.first(mllog.OTHER_WORK)), columns="own_cpu_s", limited=True
    )
    suspended_s: float | None = stated(mllog.SUSPENDED, parse_float)
    code_file: str | None = stated(mllog.RUN_START, parse_text, about="file")  # which logs the run
    # Lines of code that log each epoch, of a run that has them all
    code_lines: Mapping[str, object] | None = derived(lambda log: _find_code_lines(log.run))
    # Whether the accuracy of an epoch is its error with another sign, which some codes log
    negated_errors: Sequence[bool] | None = derived(lambda log: _compare_errors(log.run))
    # The epoch in which the run says that it stopped, less the one that began last
    stop_epochs: float | None = derived(lambda log: _count_stop_epochs(log.run))
    instance: int | None = stated(mllog.EPOCH_START, parse_int64, about="instance")
    baselines: Mapping[str, float] = field(default_factory=dict)
    oracle_baselines: Mapping[str, float] = field(default_factory=dict)  # by predictors that know the rule of the data
    data_manifest: str | None = stated(mllog.DATA_MANIFEST, parse_text, cause=("data", "data manifest"))
    first_losses: tuple[float, ...] = stated(mllog.FIRST_LOSSES, _parse_losses)
    course: Mapping[str, float] = derived(lambda log: read_course(log.run), empty=dict)
    choices: Mapping[str, str] = derived(lambda log: read_choices(log.run), empty=dict)
    # Name and sha256 of the file of settings
    config_file: tuple[str, str] | None = derived(lambda log: read_config_file(log.run.first(mllog.CONFIG_FILE)))
    run_files: Mapping[str, str] = stated(mllog.RUN_FILES, _parse_digests)  # sha256 of other files of the run folder
    run_start_s: float | None = derived(lambda log: log.time_s(mllog.RUN_START))
    run_stop_s: float | None = derived(lambda log: log.time_s(mllog.RUN_STOP))
    init_s: float | None = derived(lambda log: log.line.init_s)
    staging_s: float | None = derived(lambda log: log.staging_s[0])
    staging_in_run: bool | None = derived(lambda log: _is_staging_in_run(log))
    time_to_train_s: float | None = derived(lambda log: log.line.run_s)
    time_with_staging_s: float | None = derived(
        lambda log: None if log.line.run_s is None else log.line.run_s + log.staging_s[1]
    )
    status: str | None = stated(mllog.RUN_STOP, parse_text, about="status")
    resumed: bool = derived(lambda log: log.run.first(mllog.RUN_RESUMED) is not None, empty=bool)
    replaced: bool = derived(lambda log: log.run.first(mllog.RUN_REPLACED) is not None, empty=bool)
    metric_key: str | None = derived(lambda log: log.metric_key)
    evals: tuple[MetricValue, ...] = derived(
        lambda log: _list_metric_values(log.run, log.metric_key, log.line.zero_ms), empty=tuple
    )
    epochs: tuple[Epoch, ...] = derived(lambda log: list_ended_epochs(log.line), empty=tuple)
    # When training waited for a checkpoint
    checkpoints: tuple[Span, ...] = derived(lambda log: _list_stalls(log.run, log.line), empty=tuple)
    shares: TimeShares | None = derived(lambda log: None if log.parts is None else log.parts.shares())
    parts: TimeParts | None = derived(lambda log: log.parts)
    counted: CountedEnergy | None = derived(lambda log: _sum_energy_events(log.run))
    # Fine numbers of the beginning, by key
    measured: Mapping[str, tuple[float, ...]] = derived(lambda log: _select_measured_numbers(log.run), empty=dict)
    # Fine numbers of evaluations and of ends of epochs, by name
    evaluated: Mapping[str, tuple[float, ...]] = derived(lambda log: _select_evaluated_numbers(log.run), empty=dict)

    def __hash__(self) -> int:
        return hash(self.path)  # equal records have equal paths, and mappings have no hash

    @property
    def stretches(self) -> Mapping[str, Sequence[Span]]:
        """When each part of the run was, in seconds since run_start. Empty for a run without run_stop."""
        return {} if self.parts is None else self.parts.stretches()

    @property
    def company(self) -> OtherWork | None:
        """What other processes took of the CPUs, if that may have slowed the run.

        None in throughput mode, where instances run at once.
        """
        return (
            self.other_work if self.other_work is not None and self.other_work.counts and self.mode != "weak" else None
        )

    @property
    def compute_units(self) -> int | None:
        """Accelerators of the run, or its nodes if it has none, as the log claims."""
        if self.nodes is None:
            return None
        return self.nodes * max(self.accelerators_per_node or 0, 1)


FACTS: Mapping[str, Fact] = {item.name: item.metadata[ROW] for item in fields(RunRecord) if ROW in item.metadata}


def summarise_log(log: Log, metric: str | None = None) -> RunRecord:
    """Summarise any log. Fields that it does not support are None.

    ``metric``: the benchmark's key, as logs may have both.
    """
    run = log.until(mllog.RUN_STOP)
    metric_keys = [key for key in run.places if key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY)]
    metric_key = metric if metric in metric_keys else next(iter(metric_keys), None)
    line = compute_timeline(run, metric_key or mllog.EVAL_ERROR)
    staging_s, parts = compute_staging_seconds(line), find_time_parts(line)
    reading = Reading(run, line, parts, staging_s, metric_key, _collect_hyperparameters(run))
    first = reading.value
    return RunRecord(
        **{name: fact.read(reading) for name, fact in FACTS.items()},
        baselines=_select_numbers(first(mllog.BASELINE)),
        oracle_baselines=_read_oracle_metrics(run),
    )


def _list_stalls(run: Log, line: Timeline) -> tuple[Span, ...]:
    """List when training waited for a checkpoint: before it was written, which the event ends."""
    found = []
    for event in run.every(mllog.CHECKPOINT):
        stall_s, write_s = (_read_item(parse_float, (name,), event.value) for name in ("stall_s", "write_s"))
        if isinstance(stall_s, float) and stall_s > 0:
            end_s = (event.time_ms - line.zero_ms) / 1e3 - (write_s if isinstance(write_s, float) else 0.0)
            found.append((end_s - stall_s, end_s))
    return tuple(found)


def _find_precision(log: Reading) -> object:
    return log.hyperparameters.get("precision") or (parse_mapping(log.value(mllog.RUN_CONFIG)) or {}).get("precision")


def _read_sizes(log: Reading) -> Mapping[str, float]:
    found = {name: log.value(mllog.CACHE_STATE, name) for name in ("data_bytes", "memory_bytes")}
    verified = parse_mapping(log.value(mllog.DATA_VERIFIED)) or {}
    return _select_numbers(found | {name: verified.get(name) for name in ("bytes", "files")})


def _is_staging_in_run(log: Reading) -> bool | None:
    staging_s, before_s = log.staging_s
    return None if staging_s is None or log.line.start_ms is None else before_s < staging_s / 2


def _find_code_lines(run: Log) -> dict[str, object] | None:
    found = {key: run.first(key) for key in (mllog.EPOCH_START, mllog.EVAL_START, mllog.EVAL_STOP, mllog.EPOCH_STOP)}
    lines = {key: event.metadata.get("lineno") for key, event in found.items() if event is not None}
    return lines if len(lines) == len(found) else None


def _compare_errors(run: Log) -> list[bool] | None:
    errors, accuracies = (
        {convert_to_float(event.metadata.get("epoch_num")): convert_to_float(event.value) for event in run.every(key)}
        for key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY)
    )
    found = {errors[epoch] == -value for epoch, value in accuracies.items() if value is not None and epoch in errors}
    return sorted(found) or None


def _count_stop_epochs(run: Log) -> float | None:
    stop = run.first(mllog.RUN_STOP)
    stated = stop.metadata.get("epoch_num", stop.metadata.get("epoch")) if stop is not None else None
    last = [event.metadata.get("epoch_num") for event in run.every(mllog.EPOCH_START)][-1:]
    numbers = [number for each in (stated, *last) if (number := convert_to_float(each)) is not None]
    return numbers[0] - numbers[1] if len(numbers) == 2 else None


def _select_measured_numbers(run: Log) -> dict[str, tuple[float, ...]]:
    """Select the first losses, rates and phases of steps that have many digits. No two runs share several of them."""
    found = {}
    for key in _MEASURED_KEYS:
        values = [event.value for event in run.every(key)]
        numbers = tuple(islice(filter(has_many_digits, list_floats(values)), _MOST_MEASURED))
        if numbers:
            found[key] = numbers
    return found


def _select_evaluated_numbers(run: Log) -> dict[str, tuple[float, ...]]:
    """Select the numbers with many digits of evaluations and of ends of epochs: values, metrics and seconds."""
    found: dict[str, list[float]] = {}
    for event in run.every(mllog.EVAL_ERROR, mllog.EVAL_ACCURACY, "eval_loss", mllog.EPOCH_STOP):
        metrics = parse_mapping(event.metadata.get("metrics")) or {}
        for name, value in {**event.metadata, **metrics, event.key: event.value}.items():
            if isinstance(value, float) and has_many_digits(value):
                found.setdefault(name, []).append(value)
    return {name: tuple(numbers) for name, numbers in found.items()}


def list_floats(value: object, depth: int = 4) -> Iterator[float]:
    """Yield the floats of a value, and of its lists and mappings. Deeper ones are left out."""
    if isinstance(value, float):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner if depth else ():
        yield from list_floats(each, depth - 1)


def has_many_digits(number: float) -> bool:
    """Return True for a number of which no two measurements give the same by chance."""
    # Of twelve digits, because the sixteenth of 0.1 + 0.2 says nothing.
    digits = f"{number:.12g}".partition("e")[0].replace(".", "").strip("-0")
    return len(digits) >= _MANY_DIGITS and math.isfinite(number)


def read_config_file(event: Event | None) -> tuple[str, str] | None:
    """Read plain name and sha256 of the file that a config_file event states.

    None without an event, or if it states anything else.
    """
    if event is None or not isinstance(event.value, str) or not re.fullmatch(_PLAIN_NAME, event.value):
        return None
    sha256 = event.metadata.get("sha256")
    sound = isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256) and len(set(sha256)) > 1
    return (event.value, str(sha256)) if sound else None


def find_first_on_target(record: RunRecord, target: Target) -> MetricValue | None:
    """Find the first value of the metric that meets the target, or None. The run converged then, even if it went on."""
    if record.metric_key != target.metric:
        return None
    return next((item for item in record.evals if target.reached(item.value)), None)


def _list_metric_values(run: Log, key: str | None, zero_ms: float) -> tuple[MetricValue, ...]:
    """List every value of the metric, of all ranks. Values that are not numbers are left out."""
    found = []
    for event in run.every(key) if key is not None else ():
        value, metadata = convert_to_float(event.value), event.metadata
        if value is not None:
            epoch = convert_to_float(
                metadata["epoch_num"] if "epoch_num" in metadata else metadata.get("samples_count")
            )
            found.append(MetricValue(epoch, value, (event.time_ms - zero_ms) / 1e3, event.line))
    return tuple(found)


def _sum_energy_events(run: Log) -> CountedEnergy | None:
    """Sum the ``energy`` events. None if no counter is in all of them.

    A counter that an event lacks was lost and is left out.
    """
    events = [event for event in run.every(mllog.ENERGY) if isinstance(event.value, Mapping)]
    names = set.intersection(*(set(event.value) for event in events)) if events else set()
    found = {}
    for name in sorted(names, key=str):
        parts = [event.value[name] if isinstance(event.value[name], Mapping) else {} for event in events]
        joules = [convert_to_float(part.get("joules")) for part in parts]
        numbers = {parse_int64(part.get("counters")) for part in parts}
        if None not in joules and len(numbers) == 1 and None not in numbers:
            found[str(name)] = (math.fsum(j for j in joules if j is not None), next(iter(numbers)) or 0)
    seconds = [convert_to_float(event.metadata.get("seconds")) for event in events]
    stated = [event.metadata.get("absent") for event in events]
    absent = {str(name) for each in stated if isinstance(each, dict) for name in each if "/" in str(name)}
    return CountedEnergy(found, math.fsum(s or 0.0 for s in seconds), tuple(sorted(absent))) if found else None


def _sum_phases(run: Log, key: str) -> Phases | None:
    values = [event.value for event in run.every(key) if isinstance(event.value, Mapping)]
    if not values:
        return None
    names = [item.name.removesuffix("_s") for item in fields(Phases)]
    totals = dict.fromkeys(names, 0.0)
    for value in values:
        for name in names:
            totals[name] += convert_to_float(value.get(name)) or 0.0
    return Phases(**{f"{name}_s": seconds for name, seconds in totals.items()})


_MEASURED_KEYS = (
    *(mllog.FIRST_LOSSES, "train_loss"),
    *(mllog.TRACKED_STATS, mllog.STEP_PHASES, mllog.RANK_PHASES, mllog.TRAINING_COURSE),
)
_MANY_DIGITS, _MOST_MEASURED = 9, 400
_INTERVAL_KEYS = (mllog.INIT, mllog.RUN, mllog.STAGING, mllog.EPOCH, mllog.EVAL, mllog.BLOCK)
NOT_HYPERPARAMETERS = frozenset(
    {
        *(f"{stem}_{side}" for stem in _INTERVAL_KEYS for side in ("start", "stop")),
        *(value for name, value in vars(mllog).items() if name.isupper() and isinstance(value, str)),
        "submission_poc_name",
        "submission_poc_email",
        "weights_initialization",
    }
) - {mllog.GLOBAL_BATCH_SIZE}


def _collect_hyperparameters(run: Log) -> Mapping[str, Any]:
    """Collect the first value of every key that is not the harness's.

    These are all keys before run_start, and opt_* and dropout anywhere.
    """
    found: dict[str, Any] = {}
    start = run.places[mllog.RUN_START][0] if mllog.RUN_START in run.places else len(run.events)
    for key, places in run.places.items():
        named = key.startswith(("opt_", "scheduler_")) or key in ("dropout", mllog.GLOBAL_BATCH_SIZE)
        if (named or places[0] < start) and key not in NOT_HYPERPARAMETERS:
            found[key] = run.events[places[0]].value
    return found


def _read_oracle_metrics(run: Log) -> Mapping[str, float]:
    event = run.first(mllog.BASELINE)
    about = {} if event is None else event.metadata
    # Logs of earlier versions called them attainable.
    return _select_numbers(about.get("oracle", about.get("attainable")))


def _select_numbers(value: object) -> Mapping[str, float]:
    if not isinstance(value, dict):
        return {}
    pairs = ((key, convert_to_float(item)) for key, item in value.items())
    return {key: number for key, number in pairs if number is not None}


LONGEST_CHOICE, MOST_CHOICES = 200, 64  # characters of a name or an answer; choices of a run


def read_choices(log: Log) -> dict[str, str]:
    """Read what the run chose on its machine, by the name of each question. Long texts, a stranger's, are left out."""
    found = {}
    for event in log.every(mllog.MEASURED_CHOICE):
        value = event.value if isinstance(event.value, dict) else {}
        name, chosen = value.get("name"), value.get("chosen")
        if isinstance(name, str) and isinstance(chosen, str) and max(len(name), len(chosen)) <= LONGEST_CHOICE:
            found[name] = chosen
    return dict(list(found.items())[:MOST_CHOICES])
