"""Converts logs to tidy tables: runs, epochs, evals, phases, ranks, experts, systems. Columns and units:
docs/tables.md.

Nothing is repaired silently and nothing is dropped. A log that ended early, was resumed or pruned is a row with a
column that says so. Scores are not computed here (see mlhpc.analysis.results.decompose).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from mlhpc.analysis.tables.reading import (
    EPOCH_COLUMNS,
    EVAL_COLUMNS,
    EXPERT_COLUMNS,
    PHASE_COLUMNS,
    RANK_COLUMNS,
    Columns,
    read_log,
)
from mlhpc.analysis.tables.run_row import remove_surrogates, render_text
from mlhpc.analysis.tables.workers import run_in_processes
from mlhpc.suite.card import Card, Target
from mlhpc.suite.compliance.check import CheckedLog, find_rulesets_of_logs
from mlhpc.suite.files import read_bytes
from mlhpc.suite.log.limits import read_limits
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import LogFile, SkippedPath, find_logs
from mlhpc.suite.log.values import parse_float
from mlhpc.suite.machine.system import describe_system, make_system_description, read_nodes

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
    """Mark runs published before: same benchmark, run_start and length.

    Their hash may differ, because names were edited.
    """
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(runs, key=lambda r: (r["round"], r["mode"], r["run"])):
        row["carried_over_from"] = row["repeats"] = None
        if row["run_start_ms"] is None or row["run_s"] is None:
            continue
        original = first.setdefault((row["benchmark"], row["run_start_ms"], row["run_s"]), row)
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
        row["scale_suspect"] = logged is not None and row["units"] != logged
        row["nodes"] = row["nodes"] if row["nodes"] is not None else system["nodes"]


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
