"""Builds the row of one log in the table of runs: who ran what where, times, sizes, outcome and doubts.

Counts epochs: what ``epoch_num`` means in a log, and how many epochs an evaluation or a run stands for.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlhpc.suite.card import FULL, Target
from mlhpc.suite.files import read_json
from mlhpc.suite.log import mllog
from mlhpc.suite.log.goodput import PHASES
from mlhpc.suite.log.reader import Log, parse_float, read_limits
from mlhpc.suite.log.record import FACTS, RunRecord
from mlhpc.suite.log.results_tree import LogFile
from mlhpc.suite.log.timeline import Evaluation, Interval, Timeline

LARGEST_PLAUSIBLE = 1e12  # of any count or time that a log states; larger numbers are left out and named


@dataclass(frozen=True)
class EpochCount:
    """Says how a log numbers its epochs. ``samples_per_epoch`` is None if ``epoch_num`` counts epochs; else it counts
    samples.

    OpenFold's logs give each block of steps the number of samples seen by its end.
    """

    zero_based: bool
    samples_per_epoch: float | None

    @staticmethod
    def of(record: RunRecord, line: Timeline) -> EpochCount:
        """Find how a log counts.

        Numbers that rise by at least a global batch from one block to the next count samples.
        """
        batch, samples = record.global_batch_size or 0, record.train_samples or 0
        numbers = [epoch.number for epoch in line.epochs if epoch.number is not None]
        # Repeated or falling numbers, as after a restart, say nothing about the unit
        steps = [later - earlier for earlier, later in pairwise(numbers) if later > earlier]
        counts_samples = bool(steps) and 0 < samples <= LARGEST_PLAUSIBLE and min(steps) >= batch > 1
        return EpochCount(line.zero_based, float(samples) if counts_samples else None)

    def at(self, evaluation: Evaluation | None) -> float | None:
        """Compute the epochs trained when an evaluation was made. None: not known."""
        if evaluation is None or evaluation.number is None:
            return None
        if self.samples_per_epoch:
            epochs = evaluation.number / self.samples_per_epoch
        else:
            # The evaluation after epoch 0 has seen one epoch
            epochs = evaluation.number + (1.0 if self.zero_based else 0.0)
        return epochs if 0.0 <= epochs <= LARGEST_PLAUSIBLE else None

    def of_run(self, line: Timeline, epochs: Sequence[Interval], evals: Sequence[Evaluation]) -> float | None:
        """Compute the epochs that the run's training time was spent on: those of the last evaluation.

        If evaluations overlap training, they are all epochs that began: the last ones were never evaluated. So the
        published analyses count. Of a block of samples that run_stop cut, the part counts that it ended: its time is in
        the run, too.
        """
        if not any(each.overlaps_training for each in line.evals):
            return self.at(evals[-1]) if evals else None
        if not self.samples_per_epoch:
            return float(len(epochs))
        finished = [each.stop_s - each.start_s for each in epochs if each.stop_s is not None]
        usual_s = statistics.median(finished) if finished else math.inf
        blocks = 0.0
        for each in epochs:
            length_s = usual_s if each.stop_s is None else each.stop_s - each.start_s
            left_s = math.inf if line.run_s is None else line.run_s - each.start_s
            blocks += min(1.0, left_s / length_s) if length_s > 0 else 1.0
        numbers = [each.number for each in line.epochs if each.number is not None]
        samples = statistics.median(later - earlier for earlier, later in pairwise(numbers))
        return blocks * samples / self.samples_per_epoch


STEP_PARTS = ("data_wait", "forward_backward", "exposed_communication", "optimizer", "other")
OVERLAPPED_PARTS = ("overlapped_communication",)
PLACEHOLDER_STAGING_S = 1.0  # a shorter interval is a placeholder, not staging
UNKNOWN = "unknown"

# Columns that need more than one fact, and the fields they come from
TARGET_COLUMNS = {
    "metric": "metric",
    "metric_name": "metric_name",
    "target": "threshold",
    "target_direction": "direction",
    "target_source": "source",
    "required_runs": "required_runs",
}
SHARE_COLUMNS = {
    "staging_before_run_s": "staging_before_s",
    "staging_in_run_s": "staging_in_run_s",
    "staging_exposed_s": "staging_exposed_s",
    "train_s": "train_s",
    "eval_s": "eval_s",
    "eval_hidden_s": "eval_hidden_s",
    "other_s": "other_s",
}
GOODPUT_COLUMNS = {
    f"goodput_{part}_s": f"{part}_s" for part in ("wall", "useful", "lost", "stalled", "starting", "down")
}
TIMES = {"run_s", "init_s", "last_event_s", "run_with_staging_s", "first_epoch_extra_s", *SHARE_COLUMNS}
LATER_EPOCHS = 3  # that say how long an epoch takes once data and code are there
# Columns whose numbers cannot be negative
LIMITED_COLUMNS = {column for fact in FACTS.values() if fact.limited for column in fact.columns}


@dataclass(frozen=True)
class LogContent:
    """Holds a log and what was read from it, as the rows of all tables need it."""

    file: LogFile
    log: Log
    record: RunRecord
    line: Timeline
    benchmark: str
    target: Target | None
    epochs: EpochCount


def build_run_row(content: LogContent, sha256: str) -> dict[str, Any]:
    """Build the row of a log (columns and units: docs/tables.md). Implausible numbers are left out and named."""
    row = _identity(content.file, content.record, content.benchmark, sha256)
    row |= _target(content.target) | _times(content) | _facts(content.record)
    row |= _goodput(content.log) | _plan(content.log)
    # Before outcome and doubts, which compute with these numbers
    row["implausible"] = _drop_implausible(row)
    row |= _outcome(content)
    return row | _doubts(row, content)


def remove_surrogates(row: dict[str, Any]) -> dict[str, Any]:
    """Replace lone surrogates by question marks, so that the row's texts can be written.

    JSON and file names may hold some.
    """
    for name in [name for name, value in row.items() if type(value) is str and not value.isascii()]:
        row[name] = row[name].encode("utf-8", "replace").decode()
    return row


def _identity(file: LogFile, record: RunRecord, benchmark: str, sha256: str) -> dict[str, Any]:
    """Build the columns that identify a log: its place, its submitter and its system."""
    submitter = file.submitter or record.org or UNKNOWN
    mode = file.mode or ("weak" if record.mode == "weak" else "strong")
    round_ = file.round or record.ruleset or UNKNOWN
    size = record.size or FULL
    system_key = f"{round_}/{submitter}/{file.system}"
    return {
        "run": file.label,
        "group": f"{system_key}/{mode}/{benchmark}/{size}",
        "system_key": system_key,
        "round": round_,
        "submitter": submitter,
        "system": file.system,
        "mode": mode,
        "benchmark": benchmark,
        "size": size,
        "trial": file.trial,
        "file": str(file.path),
        "sha256": sha256,
        "scaling_factor": _scaling_factor(file.path.parent),
        "suite_version": record.suite_version,
        # A round's folder can also hold own results, whose logs state the suite's version
        "published": record.suite_version is None and file.round is not None,
        "pruned": file.pruned,
        "resumed": file.resumed or record.resumed,
        "division": record.division or UNKNOWN,
        "platform": record.platform,
        "status_logged": record.status,
    }


def _target(target: Target | None) -> dict[str, Any]:
    row = _fields(target, TARGET_COLUMNS)
    if target is None:
        row["target_source"] = "no card and no public round knows this benchmark and size"
    return row


def _times(content: LogContent) -> dict[str, Any]:
    record, line = content.record, content.line
    return {
        "run_start_ms": line.start_ms,
        "run_s": record.time_to_train_s,
        "init_s": record.init_s,
        "last_event_s": line.end_s,
        **_fields(record.shares, SHARE_COLUMNS),
        "first_epoch_extra_s": _compute_first_extra(content),
        "run_with_staging_s": record.time_with_staging_s,
    }


def _compute_first_extra(content: LogContent) -> float | None:
    """Compute what the first epoch trains longer than the median of the later ones. None: it is no longer, or not known.

    Staging in the background, a cold page cache and compilers make it so: DeepCAM's code logs no asynchronous staging.
    """
    epochs = [epoch for epoch in content.record.epochs if epoch.complete]
    later = [epoch.train_s for epoch in epochs[1:]]
    if content.epochs.samples_per_epoch is not None:  # blocks, perhaps of unlike length
        ends = [0.0, *(epoch.number or 0.0 for epoch in epochs)]
        if len({end - begin for begin, end in pairwise(ends)}) > 1:
            return None
    longer = sum(train_s >= epochs[0].train_s for train_s in later)  # one in ten may have stalled
    if len(later) < LATER_EPOCHS or longer > len(later) // 10 or content.record.shares is None:
        return None
    return min(epochs[0].train_s - statistics.median(later), content.record.shares.train_s)


def _facts(record: RunRecord) -> dict[str, Any]:
    """Build the columns of the table of facts, then the columns that need several facts."""
    row = {column: show(getattr(record, name)) for name, fact in FACTS.items() for column, show in fact.columns.items()}
    return (
        row
        | {"had_company": record.company is not None}
        | {
            name: json.dumps(dict(values)) if values else None
            for name, values in (("baselines", record.baselines), ("oracle_baselines", record.oracle_baselines))
        }
    )


def _short(value: Any) -> str:
    """Render a value that a log states, as text of bounded length."""
    return str(value)[:60]


def render_plan(log: Log) -> str | None:
    """Render the parallel plan of a run: its name, mesh and what it recomputes; None without one."""
    event = log.first(mllog.PARALLEL_PLAN)
    value = event.value if event is not None and isinstance(event.value, dict) else {}
    mesh, again = value.get("mesh"), value.get("recompute")
    if not isinstance(mesh, dict):
        return None
    parts = mesh.get("spatial")
    sizes = {
        "data": mesh.get("data"),
        **{name: size for name, size in mesh.items() if name not in {"data", "spatial"} and size != 1},
    }
    axes = [f"{_short(name)}={_short(size)}" for name, size in sizes.items()]
    axes += [f"spatial={'x'.join(map(_short, parts))}"] if isinstance(parts, list) and parts else []
    recomputed = (
        [f"{_short(block)} ({_short(policy)})" for block, policy in again.items()] if isinstance(again, dict) else []
    )
    return f"{_short(value.get('name'))} {','.join(axes)}" + (
        f", recomputes {', '.join(recomputed)}" if recomputed else ""
    )


def _plan(log: Log) -> dict[str, Any]:
    """Build the columns of the plan, with the FLOPs per sample that it recomputes, if the log has them."""
    event = log.first(mllog.RECOMPUTED_FLOPS)
    return {
        "plan": render_plan(log),
        "recomputed_flops_per_sample": None if event is None else parse_float(event.value),
    }


def _goodput(log: Log) -> dict[str, Any]:
    """Build the columns of where the time of all attempts went until this log's end. A run logs it after run_stop."""
    event = log.first(mllog.GOODPUT)
    value = event.value if event is not None and isinstance(event.value, dict) else {}
    again = log.first(mllog.RECOVERY)
    phases = again.value if again is not None and isinstance(again.value, dict) else {}
    saved, each = value.get("checkpoint"), value.get("interruptions")
    return {column: parse_float(value.get(name)) for column, name in GOODPUT_COLUMNS.items()} | {
        "goodput_saves": parse_float(saved.get("saves")) if isinstance(saved, dict) else None,
        "goodput_interruptions": len(each) if isinstance(each, list) else None,
        **{f"recovery_{name}": parse_float(phases.get(name)) for name in PHASES},
    }


def _drop_implausible(row: dict[str, Any]) -> str | None:
    """Empty the columns whose number is impossible, and name them.

    Counts must lie between 0 and 1e12. Times may be negative, but not beyond 1e12 s either.
    """
    names = [
        name
        for name, above_zero, is_time in _limited(tuple(row))
        if isinstance(value := row[name], _NUMBERS)
        if (above_zero and not 0 <= value <= LARGEST_PLAUSIBLE) or (is_time and abs(value) > LARGEST_PLAUSIBLE)
    ]
    row.update(dict.fromkeys(names))
    return ", ".join(names) or None


_NUMBERS = (int, float)  # made once: many columns are asked


@cache
def _limited(columns: tuple[str, ...]) -> list[tuple[str, bool, bool]]:
    """List the columns whose numbers have limits: whether none may be negative, and whether they are times."""
    return [(name, _never_negative(name), name in TIMES) for name in columns if _never_negative(name) or name in TIMES]


def _never_negative(column: str) -> bool:
    return column.startswith(("goodput_", "recovery_")) or column in LIMITED_COLUMNS


def _outcome(content: LogContent) -> dict[str, Any]:
    """Build the columns of convergence by the rules: the first evaluation before run_stop that meets the target."""
    line, target = content.line, content.target
    closed = [e for e in line.evals if line.run_s is None or (e.reported_s or 0.0) <= line.run_s]
    valued = [e for e in closed if e.value is not None]
    values = [e.value for e in valued if e.value is not None]
    hit = _first_reaching(valued, target)
    in_run = [epoch for epoch in line.epochs if line.run_s is None or epoch.start_s < line.run_s]
    return {
        "outcome": _outcome_name(content, hit),
        # The rules score no resumed run, and a run without run_stop has no time
        "converged": hit is not None and line.run_s is not None and not _resumed(content),
        "epochs_to_target": content.epochs.at(hit),
        "epochs_run": content.epochs.of_run(line, in_run, valued),
        "target_reached_s": hit.reported_s if hit else None,
        "reached_value": hit.value if hit else None,
        "best_value": target.best(values) if target and values else None,
        "last_value": values[-1] if values else None,
        "epochs_logged": len(in_run),
        "evals_logged": len(closed),
    }


def _first_reaching(evals: list[Evaluation], target: Target | None) -> Evaluation | None:
    return next((e for e in evals if target and target.reached(e.value or 0.0)), None)


def _outcome_name(content: LogContent, hit: Evaluation | None) -> str:
    if _resumed(content):
        return "resumed"
    if content.line.run_s is None:
        return "no run_stop"
    if content.target is None:
        return "no target known"
    return "target reached" if hit else "target missed"


def _resumed(content: LogContent) -> bool:
    return content.file.resumed or content.record.resumed


def _doubts(row: Mapping[str, Any], content: LogContent) -> dict[str, Any]:
    """Build the columns of what a reader should know before believing the row."""
    log, record, line = content.log, content.record, content.line
    staging_s = record.staging_s
    return {
        "async_eval": any(e.overlaps_training for e in line.evals),
        "staging_before_run": (row["staging_before_run_s"] or 0.0) > 0.0,
        "staging_logged": staging_s is not None,
        "staging_placeholder": staging_s is not None and staging_s < PLACEHOLDER_STAGING_S,
        "success_without_target": record.status == "success" and row["outcome"] == "target missed",
        "epoch_num_zero_based": line.zero_based,
        "epoch_num_counts_samples": content.epochs.samples_per_epoch is not None,
        "events_after_run_stop_s": None if line.run_s is None else max(0.0, line.end_s - line.run_s),
        # One process logs init_start once
        "logged_by_all_ranks": len(log.places.get(mllog.INIT_START, ())) > 1,
        "benchmark_logged": record.benchmark,
        "org_logged": record.org,
        "event_count": len(log.events) + log.skipped,
        "damaged_lines": log.damaged,
        # Three are enough to find the place; a damaged file may have thousands
        "damage": "; ".join(f"line {p.line}: {p.message}" for p in log.problems[:3]) or None,
    }


def _fields(source: object, columns: Mapping[str, str]) -> dict[str, Any]:
    """Build columns from the fields of an object; all None if there is no object. ``columns``: field by column."""
    return {column: None if source is None else getattr(source, name) for column, name in columns.items()}


def _scaling_factor(folder: Path) -> float | None:
    """Read the reference-convergence factor that a package ships with its logs (the official tool multiplies by it)."""
    try:
        return parse_float(read_json(folder / "scaling.json", read_limits().json).get("scaling_factor"))
    # AttributeError: the file is JSON but no object
    except (OSError, ValueError, AttributeError):
        return None
