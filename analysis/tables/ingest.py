"""Converts logs to tidy tables: runs, epochs, evals, phases, ranks, experts, systems. Columns and units:
docs/tables.md.

Nothing is repaired silently and nothing is dropped. A log that ended early, was resumed or pruned is a row with a
column that says so. Scores are not computed here (see mlhpc.analysis.results.decompose).

Reads one log into rows of the tables: run, epochs, evals, phases, ranks, experts.

No pandas: worker processes start fast.

Spreads work over forked processes. Results keep the order of items.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from mlhpc.analysis.tables.run_row import (
    LARGEST_PLAUSIBLE,
    OVERLAPPED_PARTS,
    STEP_PARTS,
    UNKNOWN,
    EpochCount,
    LogContent,
    build_run_row,
    remove_surrogates,
)
from mlhpc.suite.card import FULL, Card, Target
from mlhpc.suite.compliance.check import CheckedLog, find_rulesets_of_logs, judge_log
from mlhpc.suite.compliance.package_files import compute_sha256
from mlhpc.suite.compliance.ruleset import find_target, read_ruleset
from mlhpc.suite.files import read_bytes
from mlhpc.suite.log import mllog
from mlhpc.suite.log.facts import render_text
from mlhpc.suite.log.reader import Log, parse_float, read_events, read_limits
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.results_tree import LogFile, SkippedPath, find_logs
from mlhpc.suite.log.timeline import Timeline, compute_timeline
from mlhpc.suite.machine.system import describe_system, make_system_description, read_nodes

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


Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_PROCESSES = 16


def run_in_processes(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    chunk: int = 1,
    *,
    tell: Callable[[int, int], None] = lambda done, total: None,
    alone: bool = False,
) -> list[Result]:
    """Call ``work`` for every item, in as many processes as there are cores. Only items and results are pickled.

    ``tell`` is called with items done and in total. With ``alone`` this process does it all, which is faster for little
    work. An exception of the work is raised here. OSError if a process ends before its work, as one does that is out of
    memory.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if alone or count < 2 or multiprocessing.current_process().daemon:
        # A daemon may not start processes (Python forbids it)
        return _collect(map(work, items), len(items), tell)
    # Processes and not threads, because decoding holds the GIL. They are forked, because a spawned process would import
    # all modules again and could not be given a closure or a table without pickling it.
    pool = ProcessPoolExecutor(
        # No more processes than chunks
        min(count, MOST_PROCESSES, -(-len(items) // chunk)),
        multiprocessing.get_context("fork"),
        initializer=_start,
        initargs=(work,),
    )
    try:
        with warnings.catch_warnings():
            # The children only read and compute; no thread of the parent matters to them.
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            results = pool.map(_call, items, chunksize=chunk)
        return _collect(results, len(items), tell)
    except BrokenProcessPool:
        raise OSError("a process that was to share the work ended before it: is there enough memory?") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(results: Iterator[Result], total: int, tell: Callable[[int, int], None]) -> list[Result]:
    found = []
    for result in results:
        found.append(result)
        tell(len(found), total)
    return found


_work: Callable[[Any], Any]  # of a worker, which inherits it: a pool would pickle what it is given to call


def _start(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its children


def _call(item: Any) -> Any:
    return _work(item)


CHUNK_LOGS = 12  # logs that a worker is given at a time
POOL_FROM_LOGS = 100  # fewer are read sooner by one process


@dataclass(frozen=True)
class Tables:
    """Holds the tidy tables. Keys are ``run`` of a log, ``group`` of a result and ``system_key`` of a system.

    ``records`` by run and ``targets`` by group are the input of mlhpc.suite.log.score. ``skipped``: paths that were not
    followed. ``judged`` has what the checker says of each log by itself, by the log's path, if it was asked.
    """

    runs: pd.DataFrame
    epochs: pd.DataFrame
    evals: pd.DataFrame
    phases: pd.DataFrame
    ranks: pd.DataFrame
    experts: pd.DataFrame
    systems: pd.DataFrame
    records: Mapping[str, RunRecord]
    targets: Mapping[str, Target | None]
    skipped: Sequence[SkippedPath] = ()
    judged: Mapping[Path, CheckedLog] = field(default_factory=dict)

    def named(self) -> dict[str, pd.DataFrame]:
        """Return every table by name."""
        names = ("runs", "epochs", "evals", "phases", "ranks", "experts", "systems")
        return {name: getattr(self, name) for name in names}


def read_tables(
    paths: Sequence[Path],
    cards: Mapping[str, Card],
    tell: Callable[[int, int], None] = lambda done, total: None,
    *,
    judging: bool = False,
) -> Tables:
    """Read every log under the paths. ValueError for a path without logs; the content of a log never raises.

    ``tell`` is called with logs read and in total. With ``judging`` each log is judged by itself while it is read.
    """
    logs, skipped = find_logs(paths)
    rules = {log: name for path in paths for log, name in find_rulesets_of_logs(path).items()} if judging else {}
    # Long logs first, so that no process ends long after the others.
    places = sorted(range(len(logs)), key=lambda place: logs[place].path.stat().st_size, reverse=True)
    found = run_in_processes(
        partial(read_log, cards, rules),
        [logs[place] for place in places],
        CHUNK_LOGS,
        tell=tell,
        alone=len(logs) < POOL_FROM_LOGS,
    )
    read = dict(zip(places, found, strict=True))
    # Back in the order of the paths: the same logs give the same tables
    readings = [read[place] for place in range(len(logs))]
    runs = [reading.run for reading in readings]
    systems: dict[str, dict[str, Any]] = {}
    for log, row in zip(logs, runs, strict=True):
        # One row per system; its first log stands for all
        if row["system_key"] not in systems:
            systems[row["system_key"]] = remove_surrogates(_system_row(log, row))
    _mark_repeats(runs)
    _add_system_facts(runs, systems)
    return Tables(
        runs=pd.DataFrame(_transpose(runs)),
        epochs=_frame(EPOCH_COLUMNS, runs, [reading.epochs for reading in readings]),
        evals=_frame(EVAL_COLUMNS, runs, [reading.evals for reading in readings]),
        phases=_frame(PHASE_COLUMNS, runs, [reading.phases for reading in readings]),
        ranks=_frame(RANK_COLUMNS, runs, [reading.ranks for reading in readings]),
        experts=_frame(EXPERT_COLUMNS, runs, [reading.experts for reading in readings]),
        systems=pd.DataFrame(list(systems.values())),
        records={reading.run["run"]: reading.record for reading in readings},
        targets={reading.run["group"]: reading.target for reading in readings},
        skipped=skipped,
        judged={log.path: reading.checked for log, reading in zip(logs, readings, strict=True) if reading.checked},
    )


def _transpose(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Convert rows with the same names to columns by name."""
    return dict(zip(rows[0], map(list, zip(*map(itemgetter(*rows[0]), rows), strict=True)), strict=True))


def _frame(names: Sequence[str], runs: Sequence[Mapping[str, Any]], parts: Sequence[Columns]) -> pd.DataFrame:
    """Build the table of the columns of all runs; the first column is the run's name."""
    filled = [(row["run"], columns) for row, columns in zip(runs, parts, strict=True) if columns]
    named = chain.from_iterable(repeat(run, len(columns[0])) for run, columns in filled)
    whole = [named, *map(chain.from_iterable, zip(*(columns for _, columns in filled), strict=True))]
    data = dict(zip(names, map(list, whole), strict=True)) if filled else None
    return pd.DataFrame(data, columns=list(names))


def parse_mapping(text: object) -> dict[str, Any]:
    """Parse a JSON column that holds a mapping; empty where the cell is empty (None or NaN)."""
    value = json.loads(text) if isinstance(text, str) else {}
    return value if isinstance(value, dict) else {}


def parse_counts(text: str) -> list[float]:
    """Parse the numbers of a ``tokens_per_expert`` cell."""
    return [float(value) for value in json.loads(text)]


def _system_row(place: LogFile, row: Mapping[str, Any]) -> dict[str, Any]:
    """Build the row of a system: as its package describes it, else as the run collected it.

    Fields are text; absent fields are left out.
    """
    described = place.description
    fields, problem = _collected(place, row) if place.kind == "run" else ({}, None)
    if described is not None:
        try:
            content = read_bytes(described, read_limits().json).decode("utf-8", "replace")
            # strict=False accepts line breaks inside of texts, and raw_decode ignores what follows the object
            fields, _ = json.JSONDecoder(strict=False).raw_decode(content.strip())
        except OSError as error:
            problem = f"{described.name}: cannot be read: {error.strerror}"
        except (ValueError, RecursionError) as error:
            problem = f"{described.name}: not JSON: {error}"
        if not isinstance(fields, dict):
            fields, problem = {}, f"{described.name}: not a JSON object"
    return {
        "system_key": row["system_key"],
        "round": row["round"],
        "submitter": row["submitter"],
        "system": place.system,
        "described_by": described.name if described else "facts of the run" if fields else None,
        "problem": problem,
        "name": render_text(fields.get("system_name")) or row["platform"] or place.system,
        "division": render_text(fields.get("division")),
        "nodes": parse_float(fields.get("number_of_nodes")),
        "accelerators_per_node": parse_float(fields.get("accelerators_per_node")),
        "processors_per_node": parse_float(fields.get("host_processors_per_node")),
        "accelerator": render_text(fields.get("accelerator_model_name")),
        "accelerator_memory": render_text(fields.get("accelerator_memory_capacity")),
        "processor": render_text(fields.get("host_processor_model_name")),
        "memory": render_text(fields.get("host_memory_capacity")),
        "storage": render_text(fields.get("host_storage_type")),
        "network": render_text(fields.get("host_networking")),
        "topology": render_text(fields.get("host_networking_topology")),
        "framework": render_text(fields.get("framework")),
        "operating_system": render_text(fields.get("operating_system")),
        "software": render_text(fields.get("other_software_stack")),
    }


def _collected(place: LogFile, row: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Collect the facts of a run folder's nodes as an MLPerf system description, or the reason why there is none."""
    try:
        nodes = read_nodes(place.package)
    except ValueError as error:
        return {}, str(error).replace(f"{place.package.parent}/", "")
    fields = make_system_description(
        describe_system(nodes),
        submitter=row["submitter"],
        division=row["division"],
        status="",
        nodes=len(nodes),
        accelerators_per_node=row["accelerators_per_node"],
    )
    # An MLPerf description must fill in every field; a table must not show placeholders as facts
    return {name: value for name, value in fields.items() if value not in ("unknown", "N/A")}, None


def _mark_repeats(runs: list[dict[str, Any]]) -> None:
    """Mark runs published before: same benchmark, run_start and length; the same file if a run has no end.

    Else the hash may differ, because names were edited.
    """
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(runs, key=lambda r: (r["round"], r["mode"], r["run"])):
        row["carried_over_from"] = row["repeats"] = None
        if row["run_start_ms"] is None:
            continue
        same = row["sha256"] if row["run_s"] is None else row["run_s"]
        original = first.setdefault((row["benchmark"], row["run_start_ms"], same), row)
        # Two instances of one result may start in the same millisecond and take as long; their files differ
        coincidence = original["group"] == row["group"] and original["sha256"] != row["sha256"]
        if original is not row and not coincidence:
            row["repeats"] = original["run"]
            row["carried_over_from"] = original["round"] if original["round"] != row["round"] else None


def _add_system_facts(runs: list[dict[str, Any]], systems: Mapping[str, Mapping[str, Any]]) -> None:
    """Fill in scale and division from the system description.

    Where the log says otherwise both are kept and flagged.
    """
    # Instances that ran at the same time share the described machine
    members = Counter(row["group"] for row in runs if not row["pruned"])
    for row in runs:
        system = systems[row["system_key"]]
        described = _units(system["nodes"], system["accelerators_per_node"], system["processors_per_node"])
        logged = _units(row["nodes"], row["accelerators_per_node"], system["processors_per_node"]) or row["ranks"]
        row["division_logged"] = row["division"]
        row["division"] = system["division"] or row["division"]
        row["units_described"], row["units_logged"] = described, logged
        if row["mode"] == "strong":
            row["units"] = described or logged
        else:
            row["units"] = _instance_units(logged, row["ranks"], described, members[row["group"]])
        nodes = row["nodes"]
        if nodes is None or (row["mode"] == "strong" and system["nodes"] is not None):
            row["nodes"] = system["nodes"]
        row["scale_suspect"] = (logged is not None and row["units"] != logged) or nodes not in (None, row["nodes"])


def _units(nodes: float | None, accelerators: float | None, processors: float | None) -> float | None:
    """Compute the compute units: accelerators, or processors where there are none. None: not known."""
    per_node = accelerators or processors
    return nodes * per_node if nodes and per_node else None


def _instance_units(logged: float | None, ranks: float | None, described: float | None, instances: int) -> float | None:
    """Compute the units of one of several concurrent runs.

    Some logs give the whole system's nodes, which cannot hold all instances. Then the ranks count, or an equal share.
    """
    if logged is None or described is None or instances < 2 or logged * instances <= described:
        return logged
    return ranks if ranks and ranks < logged else logged if logged < described else described // instances
