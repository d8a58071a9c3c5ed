"""One log to the rows of the tables: run, epochs, evals, phases, ranks. No data frames, so that a pool of processes starts fast."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from suite.card import FULL, Card, Target
from suite.compliance.ruleset import find_target
from suite.log import mllog
from suite.log.reader import Log, events_of
from suite.log.record import RunRecord, summarise
from suite.log.results_tree import LogFile
from suite.log.timeline import Evaluation, Interval, Timeline, timeline
from suite.log.values import number

STEP_PARTS = ("data_wait", "forward_backward", "exposed_communication", "optimizer", "other")
BESIDE_STEP = ("overlapped_communication",)
PLACEHOLDER_STAGING_S = 1.0
LARGEST_PLAUSIBLE = 1e12
COUNTS = (
    "ranks",
    "nodes",
    "accelerators_per_node",
    "global_batch_size",
    "train_samples",
    "eval_samples",
    "model_parameters",
)
EPOCH_COLUMNS = ["run", "epoch", "epoch_num", "start_s", "stop_s", "duration_s", "after_run_stop", "samples_per_s"]
EVAL_COLUMNS = [
    "run", "evaluation", "epoch_num", "step_num", "epochs", "start_s", "stop_s", "duration_s", "reported_s",
    "value", "reached", "after_run_stop", "overlaps_training",
]  # fmt: skip
PHASE_COLUMNS = ["run", "source", "epoch_num", "first_step", "steps", "phase", "seconds", "loss"]
RANK_COLUMNS = [
    "run", "epoch_num", "steps", "quantity", "min", "median", "mean", "max", "min_rank", "max_rank", "values",
]  # fmt: skip
EXPERT_COLUMNS = [
    "run", "epoch_num", "first_step", "steps", "layer", "experts", "tokens", "imbalance", "drop_rate", "needed_capacity",
    "padding_waste", "exposed_communication_s", "tokens_per_expert",
]  # fmt: skip
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Reading:
    """What the tables take from one log."""

    run: dict[str, Any]
    epochs: list[tuple[Any, ...]]
    evals: list[tuple[Any, ...]]
    phases: list[tuple[Any, ...]]
    ranks: list[tuple[Any, ...]]
    experts: list[tuple[Any, ...]]
    record: RunRecord
    target: Target | None


def read(place: LogFile, cards: Mapping[str, Card]) -> Reading:
    """Read one log. The content of a log never raises."""
    data = place.path.read_bytes()
    log = events_of(data, place.path, steps=False)
    record = summarise(log)
    benchmark = place.benchmark or record.benchmark or UNKNOWN
    target = find_target(benchmark, record.size or FULL, cards)
    line = timeline(log, target.metric if target else record.metric_key or mllog.EVAL_ERROR)
    experts = _expert_rows(place.label, log)
    row = encodable(
        _run_row(place, hashlib.sha256(data).hexdigest(), benchmark, log, record, target, line) | _load(experts)
    )
    return Reading(
        run=row,
        epochs=_epoch_rows(row["run"], line, log),
        evals=_eval_rows(row, line, target),
        phases=_phase_rows(row["run"], log),
        ranks=_rank_rows(row["run"], log),
        experts=experts,
        record=_plain(record),
        target=target,
    )


def text(value: Any) -> str | None:
    """A value as text; None where it says nothing."""
    if value is None or value == "" or value == {} or value == []:
        return None
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def encodable(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose texts can be written: lone surrogates, which JSON and file names may hold, become question marks."""
    return {
        name: value.encode("utf-8", "replace").decode() if isinstance(value, str) and not value.isascii() else value
        for name, value in row.items()
    }


def _plain(record: RunRecord) -> RunRecord:
    """The record with plain dicts for its read-only mappings, which no process can hand to another."""
    return replace(
        record,
        hyperparameters=dict(record.hyperparameters),
        startup=None if record.startup is None else dict(record.startup),
        staging_stats=None if record.staging_stats is None else dict(record.staging_stats),
        work_per_sample=dict(record.work_per_sample),
        baselines=dict(record.baselines),
        config=None if record.config is None else dict(record.config),
    )


def _run_row(
    place: LogFile, sha256: str, benchmark: str, log: Log, record: RunRecord, target: Target | None, line: Timeline
) -> dict[str, Any]:
    run_config = _first_mapping(log, mllog.RUN_CONFIG)
    about = next((event.metadata for event in log.every(mllog.RUN_CONFIG)), {})
    submitter = place.submitter or record.org or UNKNOWN
    mode = place.mode or ("weak" if record.mode == "weak" else "strong")
    round_ = place.round or record.ruleset or UNKNOWN
    size = record.size or FULL
    system_key = f"{round_}/{submitter}/{place.system}"
    split = record.shares
    row: dict[str, Any] = {
        "run": place.label,
        "group": f"{system_key}/{mode}/{benchmark}/{size}",
        "system_key": system_key,
        "round": round_,
        "submitter": submitter,
        "system": place.system,
        "mode": mode,
        "benchmark": benchmark,
        "size": size,
        "trial": place.trial,
        "file": str(place.path),
        "sha256": sha256,
        "scaling_factor": _scaling_factor(place.path.parent),
        "suite_version": record.suite_version,
        "published": record.suite_version is None and place.round is not None,
        "pruned": place.pruned,
        "resumed": place.resumed or record.resumed,
        "division": record.division or UNKNOWN,
        "platform": record.platform,
        "status_logged": record.status,
        "metric": target.metric if target else None,
        "metric_name": target.metric_name if target else None,
        "target": target.threshold if target else None,
        "target_direction": target.direction if target else None,
        "target_source": target.source if target else "no card and no public round knows this benchmark and size",
        "required_runs": target.required_runs if target else None,
        "run_start_ms": line.start_ms,
        "run_s": record.time_to_train_s,
        "init_s": record.init_s,
        "last_event_s": line.end_s,
        "staging_before_run_s": split.staging_before_s if split else None,
        "staging_in_run_s": split.staging_in_run_s if split else None,
        "staging_exposed_s": split.staging_exposed_s if split else None,
        "train_s": split.train_s if split else None,
        "eval_s": split.eval_s if split else None,
        "eval_hidden_s": split.eval_hidden_s if split else None,
        "other_s": split.other_s if split else None,
        "run_with_staging_s": record.time_with_staging_s,
        "ranks": record.ranks,
        "nodes": record.nodes,
        "accelerators_per_node": record.accelerators_per_node,
        "global_batch_size": record.global_batch_size,
        "train_samples": record.train_samples,
        "eval_samples": record.eval_samples,
        "seed": None if record.seed is None else str(record.seed),
        "precision": text(record.hyperparameters.get("precision") or run_config.get("precision")),
        "cache_state": record.cache_state,
        "device_type": text(about.get("device")),
        "threads_per_rank": number(about.get("threads_per_rank")),
        "model_parameters": record.model_parameters or number(record.hyperparameters.get("model_parameters_count")),
        "config": json.dumps(run_config, sort_keys=True) if run_config else None,
        "hyperparameters": json.dumps(dict(record.hyperparameters), sort_keys=True),
    }
    row |= _logged_extras(record)
    row["implausible"] = _drop_implausible(row)
    row |= _outcome(row, line, target)
    return row | _doubts(row, log, record, line)


def _drop_implausible(row: dict[str, Any]) -> str | None:
    """Empty the columns whose number cannot be (negative, or beyond 1e12) and name them."""
    given = [
        name
        for name, value in row.items()
        if name.startswith(("step_", "startup_", "staging_bytes", "staging_gb")) or name in COUNTS
        if isinstance(value, int | float) and not 0 <= value <= LARGEST_PLAUSIBLE
    ]
    row.update(dict.fromkeys(given))
    return ", ".join(given) or None


def _outcome(row: Mapping[str, Any], line: Timeline, target: Target | None) -> dict[str, Any]:
    """Convergence by the rules: the first evaluation before run_stop that meets the target."""
    unit = _samples_per_epoch_number(row, line)
    closed = [e for e in line.evals if line.run_s is None or (e.reported_s or 0.0) <= line.run_s]
    valued = [e for e in closed if e.value is not None]
    hit = next((e for e in valued if target and target.reached(e.value or 0.0)), None)
    values = [e.value for e in valued if e.value is not None]
    best = target.best(values) if target and values else None
    in_run = [e for e in line.epochs if line.run_s is None or e.start_s < line.run_s]
    if row["resumed"]:
        outcome = "resumed"
    elif line.run_s is None:
        outcome = "no run_stop"
    elif target is None:
        outcome = "no target known"
    else:
        outcome = "target reached" if hit else "target missed"
    return {
        "outcome": outcome,
        "converged": hit is not None and line.run_s is not None and not row["resumed"],
        "epochs_to_target": _epochs(hit, line, unit),
        "epochs_run": _epochs_run(in_run, valued, line, unit),
        "target_reached_s": hit.reported_s if hit else None,
        "reached_value": hit.value if hit else None,
        "best_value": best,
        "last_value": values[-1] if values else None,
        "epochs_logged": len(in_run),
        "evals_logged": len(closed),
    }


def _samples_per_epoch_number(row: Mapping[str, Any], line: Timeline) -> float | None:
    """train_samples if epoch_num counts samples (OpenFold logs samples at a block's end); None if it counts epochs."""
    batch, samples = row["global_batch_size"], row["train_samples"]
    numbers = [e.number for e in line.epochs if e.number is not None]
    steps = [b - a for a, b in pairwise(numbers) if b > a]
    counts_samples = bool(steps) and bool(batch) and bool(samples) and min(steps) >= batch > 1
    return float(samples) if counts_samples else None


def _epochs(evaluation: Evaluation | None, line: Timeline, unit: float | None) -> float | None:
    """Epochs trained when an evaluation was made."""
    if evaluation is None or evaluation.number is None:
        return None
    epochs = evaluation.number / unit if unit else evaluation.number + (1.0 if line.zero_based else 0.0)
    return epochs if 0.0 <= epochs <= LARGEST_PLAUSIBLE else None


def _epochs_run(
    epochs: Sequence[Interval], evals: Sequence[Evaluation], line: Timeline, unit: float | None
) -> float | None:
    """Epochs that the run's training time was spent on: those of the last evaluation, or all begun beside it."""
    if unit is None and any(e.overlaps_training for e in line.evals):
        return float(len(epochs))
    return _epochs(evals[-1], line, unit) if evals else None


def _logged_extras(record: RunRecord) -> dict[str, Any]:
    """What only our own logs carry: start-up, staging rate, work per sample, baselines, phases of the whole run."""
    startup, staging = record.startup or {}, record.staging_stats or {}
    work, phases = record.work_per_sample, record.rank_mean_phases or record.phases
    row: dict[str, Any] = {}
    for part in ("interpreter", "imports", "init"):
        spread = startup.get(part)
        for name in ("min", "median", "max"):
            row[f"startup_{part}_{name}_s"] = number(spread.get(name)) if isinstance(spread, dict) else None
    for part in (*STEP_PARTS, *BESIDE_STEP):
        row[f"step_{part}_s"] = getattr(phases, f"{part}_s") if phases else None
    return row | {
        "staging_bytes": number(staging.get("bytes")),
        "staging_gb_per_s": number(staging.get("gb_per_s")),
        "staging_reused": text(staging.get("reused")),
        "staging_overlapped": text(staging.get("overlapped")),
        "model_flops_per_sample": work.get("model_flops"),
        "executed_flops_per_sample": work.get("executed_flops"),
        "algorithmic_bytes_per_sample": work.get("algorithmic_bytes"),
        "all_to_all_bytes_per_sample": work.get("all_to_all_bytes"),
        "optimizer_flops_per_step": work.get("optimizer_flops_per_step"),
        "optimizer_bytes_per_step": work.get("optimizer_bytes_per_step"),
        "all_reduce_bytes_per_step": work.get("all_reduce_bytes_per_step"),
        "baselines": json.dumps(dict(record.baselines)) if record.baselines else None,
    }


def _doubts(row: Mapping[str, Any], log: Log, record: RunRecord, line: Timeline) -> dict[str, Any]:
    staging_s = record.staging_s
    return {
        "async_eval": any(e.overlaps_training for e in line.evals),
        "staging_before_run": (row["staging_before_run_s"] or 0.0) > 0.0,
        "staging_logged": staging_s is not None,
        "staging_placeholder": staging_s is not None and staging_s < PLACEHOLDER_STAGING_S,
        "success_without_target": record.status == "success" and row["outcome"] == "target missed",
        "epoch_num_zero_based": line.zero_based,
        "epoch_num_counts_samples": _samples_per_epoch_number(row, line) is not None,
        "events_after_run_stop_s": None if line.run_s is None else max(0.0, line.end_s - line.run_s),
        "logged_by_all_ranks": len(log.places.get(mllog.INIT_START, ())) > 1,
        "benchmark_logged": record.benchmark,
        "org_logged": record.org,
        "event_count": len(log.events) + log.skipped,
        "damaged_lines": len(log.problems),
        "damage": "; ".join(f"line {p.line}: {p.message}" for p in log.problems[:3]) or None,
    }


def _epoch_rows(run: str, line: Timeline, log: Log) -> list[tuple[Any, ...]]:
    """Rows of `EPOCH_COLUMNS`."""
    rates = {
        number(event.metadata.get("epoch_num")): number(event.value.get("throughput"))
        for event in log.every(mllog.TRACKED_STATS)
        if isinstance(event.value, dict) and "epoch_num" in event.metadata
    }
    end_s = math.inf if line.run_s is None else line.run_s
    return [
        (
            run,
            index,
            label,
            start_s,
            stop_s,
            None if stop_s is None else stop_s - start_s,
            start_s >= end_s,
            rates.get(label),
        )
        for index, (label, start_s, stop_s) in enumerate(line.epochs, start=1)
    ]


def _eval_rows(row: Mapping[str, Any], line: Timeline, target: Target | None) -> list[tuple[Any, ...]]:
    """Rows of `EVAL_COLUMNS`."""
    unit = _samples_per_epoch_number(row, line)
    return [
        (
            row["run"],
            index,
            e.number,
            e.step,
            _epochs(e, line, unit),
            e.start_s,
            e.stop_s,
            None if e.start_s is None or e.stop_s is None else e.stop_s - e.start_s,
            e.reported_s,
            e.value,
            bool(target and e.value is not None and target.reached(e.value)),
            line.run_s is not None and (e.reported_s or e.stop_s or 0.0) > line.run_s,
            e.overlaps_training,
        )
        for index, e in enumerate(line.evals, start=1)
    ]


def _phase_rows(run: str, log: Log) -> list[tuple[Any, ...]]:
    """Rows of `PHASE_COLUMNS`."""
    rows = []
    for event in log.every(mllog.STEP_PHASES, mllog.RANK_PHASES):
        if not isinstance(event.value, dict):
            continue
        where = [number(event.metadata.get(name)) for name in ("epoch_num", "first_step", "steps")]
        loss = number(event.metadata.get("loss"))
        source = "rank 0, window" if event.key == mllog.STEP_PHASES else "mean over ranks, epoch"
        for phase in (*STEP_PARTS, *BESIDE_STEP):
            seconds = number(event.value.get(phase))
            if seconds is not None:
                rows.append((run, source, *where, phase, seconds, loss))
    return rows


def _rank_rows(run: str, log: Log) -> list[tuple[Any, ...]]:
    """Rows of `RANK_COLUMNS`; ``values`` is JSON, in rank order, where the log has every rank's."""
    rows: list[tuple[Any, ...]] = []
    for event in log.every(mllog.RANK_STATS):
        where = [number(event.metadata.get(name)) for name in ("epoch_num", "steps")]
        for quantity, spread in event.value.items() if isinstance(event.value, dict) else ():
            if isinstance(spread, dict):
                numbers = [number(spread.get(name)) for name in RANK_COLUMNS[4:10]]
                rows.append((run, *where, quantity, *numbers, text(spread.get("values"))))
    return rows


def _expert_rows(run: str, log: Log) -> list[tuple[Any, ...]]:
    """Rows of `EXPERT_COLUMNS`; ``imbalance`` is computed from the tokens, ``tokens_per_expert`` is JSON."""
    rows: list[tuple[Any, ...]] = []
    for event in log.every(mllog.WINDOW_STATS):
        stats = event.value if isinstance(event.value, dict) else {}
        where = [number(event.metadata.get(name)) for name in ("epoch_num", "first_step", "steps")]
        layers, efficiency = stats.get("load"), stats.get("efficiency")
        exposed = number(efficiency.get("exposed_communication_s")) if isinstance(efficiency, dict) else None
        for layer, entry in layers.items() if isinstance(layers, dict) else ():
            tokens = _counts(entry.get("tokens_per_expert")) if isinstance(entry, dict) else []
            if tokens and sum(tokens) > 0:
                said = [number(entry.get(name)) for name in ("drop_rate", "needed_capacity", "padding_waste")]
                name = layer.encode("utf-8", "replace").decode()
                even = max(tokens) * len(tokens) / sum(tokens)
                rows.append((run, *where, name, len(tokens), sum(tokens), even, *said, exposed, json.dumps(tokens)))
    return rows


def _load(experts: list[tuple[Any, ...]]) -> dict[str, float | None]:
    """What a run's windows say of its experts: means over windows and layers, and the seconds of all windows."""
    windows = {row[1:4]: row[11] for row in experts}  # logged once a window, for all layers
    return {
        "expert_imbalance": _mean(row[7] for row in experts),
        "expert_drop_rate": _mean(row[8] for row in experts),
        "expert_padding_waste": _mean(row[10] for row in experts),
        "exposed_all_to_all_s": sum(filter(None, windows.values())) if windows else None,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _counts(values: Any) -> list[int]:
    """A list of counts, or nothing if any of it cannot be one."""
    numbers = [number(value) for value in values] if isinstance(values, list) else []
    known = [round(value) for value in numbers if value is not None and 0.0 <= value <= LARGEST_PLAUSIBLE]
    return known if len(known) == len(numbers) else []


def _scaling_factor(folder: Path) -> float | None:
    """The reference-convergence factor a package ships beside its logs (the official tool multiplies by it)."""
    try:
        return number(json.loads((folder / "scaling.json").read_text("utf-8")).get("scaling_factor"))
    except (OSError, ValueError, AttributeError):
        return None


def _first_mapping(log: Log, key: str) -> dict[str, Any]:
    return next((event.value for event in log.every(key) if isinstance(event.value, dict)), {})
