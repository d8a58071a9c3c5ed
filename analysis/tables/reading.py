"""Reads one log into rows of the tables: run, epochs, evals, phases, ranks, experts.

No pandas: worker processes start fast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlhpc.analysis.tables.epochs import LARGEST_PLAUSIBLE, EpochCount
from mlhpc.analysis.tables.run_row import (
    OVERLAPPED_PARTS,
    STEP_PARTS,
    UNKNOWN,
    LogContent,
    build_run_row,
    remove_surrogates,
    render_text,
)
from mlhpc.suite.card import FULL, Card, Target
from mlhpc.suite.compliance.check import CheckedLog, judge_log
from mlhpc.suite.compliance.manifest import compute_sha256
from mlhpc.suite.compliance.ruleset import find_target, read_ruleset
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Log, read_events
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.results_tree import LogFile
from mlhpc.suite.log.timeline import Timeline, compute_timeline
from mlhpc.suite.log.values import parse_float

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


Columns = Sequence[Sequence[Any]]  # of a table, but for its first, the name of the run; empty if there are no rows


@dataclass(frozen=True)
class LogTables:
    """Holds what the tables take from one log."""

    run: dict[str, Any]
    epochs: Columns
    evals: Columns
    phases: Columns
    ranks: Columns
    experts: Columns
    record: RunRecord
    target: Target | None
    checked: CheckedLog | None = None


def read_log(cards: Mapping[str, Card], rules: Mapping[Path, str], file: LogFile) -> LogTables:
    """Read one log.

    Its content never raises. ``rules`` has the ruleset by which a log is judged as well, by its path.
    """
    # No table shows single steps
    log = read_events(file.path, steps=False)
    record = summarise_log(log)
    judged_by = rules.get(file.path)
    checked = judge_log(log, read_ruleset(judged_by), str(file.path), record) if judged_by else None
    benchmark = file.benchmark or record.benchmark or UNKNOWN
    target = find_target(benchmark, record.size or FULL, cards)
    # The log names another metric than the rules judge: it is read again for the judged one
    if target is not None and record.metric_key not in (None, target.metric):
        record = summarise_log(log, target.metric)
    metric = target.metric if target else record.metric_key or mllog.EVAL_ERROR
    line = compute_timeline(log, metric)  # that of the record ends at run_stop; the tables show what came after it too
    content = LogContent(file, log, record, line, benchmark, target, EpochCount.of(record, line))
    experts = _expert_rows(log)
    return LogTables(
        run=remove_surrogates(build_run_row(content, compute_sha256(file.path)) | _expert_load(experts)),
        epochs=_epoch_columns(line, log),
        evals=_eval_columns(content),
        phases=_columns(_phase_rows(log)),
        ranks=_columns(_rank_rows(log)),
        experts=_columns(experts),
        record=record,
        target=target,
        checked=checked,
    )


def _columns(rows: Iterable[tuple[Any, ...]]) -> Columns:
    return tuple(zip(*rows, strict=True))


def _epoch_columns(line: Timeline, log: Log) -> Columns:
    """Build the columns of `EPOCH_COLUMNS`."""
    if not line.epochs:
        return ()
    rates = {
        parse_float(event.metadata.get("epoch_num")): parse_float(event.value.get("throughput"))
        for event in log.every(mllog.TRACKED_STATS)
        if isinstance(event.value, dict) and "epoch_num" in event.metadata
    }
    end_s = math.inf if line.run_s is None else line.run_s
    labels, starts, stops = zip(*line.epochs, strict=True)
    return (
        range(1, len(labels) + 1),
        labels,
        starts,
        stops,
        _durations(starts, stops),
        [start_s >= end_s for start_s in starts],
        list(map(rates.get, labels)),
    )


def _eval_columns(content: LogContent) -> Columns:
    """Build the columns of `EVAL_COLUMNS`."""
    line, target, at = content.line, content.target, content.epochs.at
    if not line.evals:
        return ()
    labels, steps, starts, stops, reports, values, overlaps = zip(*line.evals, strict=True)
    end_s = math.inf if line.run_s is None else line.run_s
    return (
        range(1, len(labels) + 1),
        labels,
        steps,
        list(map(at, line.evals)),
        starts,
        stops,
        _durations(starts, stops),
        reports,
        values,
        [target is not None and value is not None and target.reached(value) for value in values],
        [(report_s or stop_s or 0.0) > end_s for report_s, stop_s in zip(reports, stops, strict=True)],
        overlaps,
    )


def _durations(starts: Iterable[float | None], stops: Iterable[float | None]) -> list[float | None]:
    return [None if a is None or b is None else b - a for a, b in zip(starts, stops, strict=True)]


def _phase_rows(log: Log) -> list[tuple[Any, ...]]:
    """List the rows of `PHASE_COLUMNS` without the run."""
    rows = []
    for event in log.every(mllog.STEP_PHASES, mllog.RANK_PHASES):
        if not isinstance(event.value, dict):
            continue
        where = [parse_float(event.metadata.get(name)) for name in ("epoch_num", "first_step", "steps")]
        loss = parse_float(event.metadata.get("loss"))
        source = "rank 0, window" if event.key == mllog.STEP_PHASES else "mean over ranks, epoch"
        for phase in (*STEP_PARTS, *OVERLAPPED_PARTS):
            seconds = parse_float(event.value.get(phase))
            if seconds is not None:
                rows.append((source, *where, phase, seconds, loss))
    return rows


def _rank_rows(log: Log) -> list[tuple[Any, ...]]:
    """List the rows of `RANK_COLUMNS` without the run.

    ``values`` is JSON in rank order, if the log has every rank's value.
    """
    rows: list[tuple[Any, ...]] = []
    for event in log.every(mllog.RANK_STATS):
        where = [parse_float(event.metadata.get(name)) for name in ("epoch_num", "steps")]
        for quantity, spread in event.value.items() if isinstance(event.value, dict) else ():
            if isinstance(spread, dict):
                numbers = [parse_float(spread.get(name)) for name in RANK_COLUMNS[4:10]]
                rows.append((*where, quantity, *numbers, render_text(spread.get("values"))))
    return rows


def _expert_rows(log: Log) -> list[tuple[Any, ...]]:
    """List the rows of `EXPERT_COLUMNS` without the run.

    ``imbalance`` is computed from the tokens: the busiest expert's over the mean. ``tokens_per_expert`` is JSON.
    """
    rows: list[tuple[Any, ...]] = []
    for event in log.every(mllog.WINDOW_STATS):
        stats = event.value if isinstance(event.value, dict) else {}
        where = [parse_float(event.metadata.get(name)) for name in ("epoch_num", "first_step", "steps")]
        layers, efficiency = stats.get("load"), stats.get("efficiency")
        exposed = parse_float(efficiency.get("exposed_communication_s")) if isinstance(efficiency, dict) else None
        for layer, entry in layers.items() if isinstance(layers, dict) else ():
            tokens = _counts(entry.get("tokens_per_expert")) if isinstance(entry, dict) else []
            if tokens and sum(tokens) > 0:
                rates = [parse_float(entry.get(name)) for name in ("drop_rate", "needed_capacity", "padding_waste")]
                # A lone surrogate, which JSON may hold, cannot be written to a table
                name = layer.encode("utf-8", "replace").decode()
                even = max(tokens) * len(tokens) / sum(tokens)
                rows.append((*where, name, len(tokens), sum(tokens), even, *rates, exposed, json.dumps(tokens)))
    return rows


def _expert_load(experts: list[tuple[Any, ...]]) -> dict[str, float | None]:
    """Compute the expert load of a run: means over its windows and layers; seconds are the sum over windows."""
    windows = {row[:3]: row[10] for row in experts}  # logged once a window, for all layers
    return {
        "expert_imbalance": _mean(row[6] for row in experts),
        "expert_drop_rate": _mean(row[7] for row in experts),
        "expert_padding_waste": _mean(row[9] for row in experts),
        "exposed_all_to_all_s": sum(filter(None, windows.values())) if windows else None,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _counts(values: Any) -> list[int]:
    """Parse a list of counts; empty if any of it cannot be one."""
    numbers = [parse_float(value) for value in values] if isinstance(values, list) else []
    known = [round(value) for value in numbers if value is not None and 0.0 <= value <= LARGEST_PLAUSIBLE]
    # All or nothing: without one expert the shares of the others would be wrong
    return known if len(known) == len(numbers) else []
