"""Summarises one log as a RunRecord: what it says about one run. Applies no rule; times come from mlhpc.suite.log.timeline.

Only the keys of events are trusted: event_type is wrong in thousands of published lines. The first run_start and the
first run_stop count; events after run_stop are ignored. Every field that some published log lacks is optional.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mlhpc.suite.card import Target
from mlhpc.suite.log import mllog
from mlhpc.suite.log.other_work import OtherWork, read_other_work
from mlhpc.suite.log.reader import Event, Log, Span, convert_to_float, parse_int, parse_int64
from mlhpc.suite.log.timeline import (
    Epoch,
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


@dataclass(frozen=True)
class RunRecord:
    """One run. Times are in seconds; ``run_start_s`` and ``run_stop_s`` are Unix time. None: the log does not say."""

    path: Path | None = None
    benchmark: str | None = None
    size: str | None = None
    ruleset: str | None = None
    suite_version: str | None = None
    seed: int | None = None
    org: str | None = None
    division: str | None = None
    submission_status: str | None = None
    platform: str | None = None
    mode: str | None = None
    trial: int | None = None
    nodes: int | None = None
    ranks: int | None = None
    accelerators_per_node: int | None = None
    global_batch_size: int | None = None
    train_samples: int | None = None
    eval_samples: int | None = None
    model_parameters: int | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    run_start_s: float | None = None
    run_stop_s: float | None = None
    init_s: float | None = None
    staging_s: float | None = None
    staging_in_run: bool | None = None
    time_to_train_s: float | None = None
    time_with_staging_s: float | None = None
    status: str | None = None
    resumed: bool = False
    metric_key: str | None = None
    evals: tuple[MetricValue, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    shares: TimeShares | None = None
    phases: Phases | None = None
    rank_mean_phases: Phases | None = None
    cache_state: str | None = None
    startup: Mapping[str, Any] | None = None
    staging_stats: Mapping[str, Any] | None = None
    work_per_sample: Mapping[str, float] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)
    oracle_baselines: Mapping[str, float] = field(default_factory=dict)  # by predictors that know the rule of the data
    data_manifest: str | None = None
    config: Mapping[str, Any] | None = None
    config_file: tuple[str, str] | None = None  # name and sha256 of the file of settings
    run_files: Mapping[str, str] = field(default_factory=dict)  # sha256 of other files of the run folder, by name
    other_work: OtherWork | None = None
    parts: TimeParts | None = None
    counted: CountedEnergy | None = None
    measured: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # fine numbers of the beginning, by key

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


def summarise_log(log: Log, metric: str | None = None) -> RunRecord:
    """Summarise any log. Fields that it does not support are None.

    ``metric``: the benchmark's key, as logs may have both.
    """
    run = log.until(mllog.RUN_STOP)
    start, stop, mode = map(run.first, (mllog.RUN_START, mllog.RUN_STOP, mllog.RUN_MODE))
    metric_keys = [key for key in run.places if key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY)]
    metric_key = metric if metric in metric_keys else next(iter(metric_keys), None)
    line = compute_timeline(run, metric_key or mllog.EVAL_ERROR)
    (staging_s, before_s), parts = compute_staging_seconds(line), find_time_parts(line)
    first = partial(_read_value, run)
    return RunRecord(
        path=log.path,
        benchmark=_convert_to_text(first(mllog.SUBMISSION_BENCHMARK)),
        size=_convert_to_text(first(mllog.BENCHMARK_SIZE)),
        ruleset=_convert_to_text(first(mllog.RULESET)),
        suite_version=_convert_to_text(first(mllog.SUITE_VERSION)),
        seed=parse_int(first(mllog.SEED)),
        org=_convert_to_text(first(mllog.SUBMISSION_ORG)),
        division=_convert_to_text(first(mllog.SUBMISSION_DIVISION)),
        submission_status=_convert_to_text(first(mllog.SUBMISSION_STATUS)),
        platform=_convert_to_text(first(mllog.SUBMISSION_PLATFORM)),
        mode=_convert_to_text(mode.value) if mode else None,
        trial=parse_int64(mode.metadata.get("trial")) if mode else None,
        nodes=parse_int64(first(mllog.NUMBER_OF_NODES)),
        ranks=parse_int64(first(mllog.NUMBER_OF_RANKS)),
        accelerators_per_node=parse_int64(first(mllog.ACCELERATORS_PER_NODE)),
        global_batch_size=parse_int64(first(mllog.GLOBAL_BATCH_SIZE)),
        train_samples=parse_int64(first(mllog.TRAIN_SAMPLES)),
        eval_samples=parse_int64(first(mllog.EVAL_SAMPLES)),
        model_parameters=parse_int64(first(mllog.MODEL_PARAMETERS)),
        hyperparameters=_collect_hyperparameters(run),
        run_start_s=start.time_ms / 1e3 if start is not None else None,
        run_stop_s=stop.time_ms / 1e3 if stop is not None else None,
        init_s=line.init_s,
        staging_s=staging_s,
        staging_in_run=None if staging_s is None or start is None else before_s < staging_s / 2,
        time_to_train_s=line.run_s,
        time_with_staging_s=None if line.run_s is None else line.run_s + before_s,
        status=_convert_to_text(stop.metadata.get("status")) if stop is not None else None,
        resumed=run.first(mllog.RUN_RESUMED) is not None,
        metric_key=metric_key,
        evals=_list_metric_values(run, metric_key, line.zero_ms),
        epochs=list_ended_epochs(line),
        shares=None if parts is None else parts.shares(),
        phases=_sum_phases(run, mllog.STEP_PHASES),
        rank_mean_phases=_sum_phases(run, mllog.RANK_PHASES),
        cache_state=_convert_to_text(first(mllog.CACHE_STATE)),
        startup=_convert_to_mapping(first(mllog.STARTUP)),
        staging_stats=_convert_to_mapping(first(mllog.STAGING_STATS)),
        work_per_sample=_select_numbers(first(mllog.WORK_PER_SAMPLE)),
        baselines=_select_numbers(first(mllog.BASELINE)),
        oracle_baselines=_read_oracle_metrics(run),
        data_manifest=_convert_to_text(first(mllog.DATA_MANIFEST)),
        config=_convert_to_mapping(first(mllog.RUN_CONFIG)),
        config_file=read_config_file(run.first(mllog.CONFIG_FILE)),
        run_files=_read_run_files(run.first(mllog.RUN_FILES)),
        other_work=read_other_work(run.first(mllog.OTHER_WORK)),
        parts=parts,
        counted=_sum_energy_events(run),
        measured=_select_measured_numbers(run),
    )


def _select_measured_numbers(run: Log) -> dict[str, tuple[float, ...]]:
    """Select the first losses, rates and phases of steps that have many digits. No two runs share several of them."""
    found = {}
    for key in _MEASURED_KEYS:
        values = (event.value for event in run.every(key))
        numbers = tuple(islice(filter(_has_many_digits, _list_floats(values)), _MOST_MEASURED))
        if numbers:
            found[key] = numbers
    return found


def _list_floats(values: Iterable[object]) -> Iterator[float]:
    """Yield the floats among the values, and in their lists and mappings. Deeper ones are left out."""
    for value in values:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
        yield from (number for number in inner if isinstance(number, float))


def _has_many_digits(number: float) -> bool:
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


def _read_run_files(event: Event | None) -> dict[str, str]:
    value = event.value if event is not None and isinstance(event.value, dict) else {}
    return {name: text for name, text in value.items() if isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text)}


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


def _read_value(run: Log, key: str) -> Any:
    event = run.first(key)
    return None if event is None else event.value


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


_MEASURED_KEYS = (mllog.FIRST_LOSSES, "train_loss", mllog.TRACKED_STATS, mllog.STEP_PHASES, mllog.RANK_PHASES)
_MANY_DIGITS, _MOST_MEASURED = 9, 40
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


def _convert_to_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _read_oracle_metrics(run: Log) -> Mapping[str, float]:
    event = run.first(mllog.BASELINE)
    about: Mapping[str, Any] = {} if event is None else event.metadata
    # Logs of earlier versions called them attainable.
    return _select_numbers(about.get("oracle", about.get("attainable")))


def _convert_to_mapping(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None


def _select_numbers(value: object) -> Mapping[str, float]:
    if not isinstance(value, dict):
        return {}
    pairs = ((key, convert_to_float(item)) for key, item in value.items())
    return {key: number for key, number in pairs if number is not None}


LONGEST_CHOICE, MOST_CHOICES = 200, 64  # characters of a name or an answer; choices of a run


def read_choices(log: Log) -> dict[str, str]:
    """Read what the run chose on its machine, by the name of each question. Long texts, a stranger's, are left out."""
    found = {}
    for event in log.events:
        value = event.value if event.key == mllog.MEASURED_CHOICE else None
        name, chosen = (value.get(part) for part in ("name", "chosen")) if isinstance(value, dict) else (None, None)
        if isinstance(name, str) and isinstance(chosen, str) and max(len(name), len(chosen)) <= LONGEST_CHOICE:
            found[name] = chosen
    return dict(list(found.items())[:MOST_CHOICES])
