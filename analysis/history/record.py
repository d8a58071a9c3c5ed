"""Keeps results over time in a folder: one JSON file for each result, computed from its logs. Files are only added."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from mlhpc.suite.compliance.result import Result, find_named_run
from mlhpc.suite.documents import convert_to_plain_data, read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import quote_path, render_duration, write_file_of_folder
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.log.score import Throughput, find_round_group
from mlhpc.suite.machine.facts import UNKNOWN, Facts, read_facts
from mlhpc.suite.path_kinds import is_of_known_kind

VERSION: Final = 1
SUFFIX = ".json"


class _Document(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class Series(_Document, frozen=True, kw_only=True):
    """What results must share to be one series: like is compared with like. None: the logs do not say."""

    benchmark: str | None
    size: str | None
    scenario: str
    division: str | None
    rules: str
    system: str | None
    nodes: int | None
    ranks: int | None

    @property
    def title(self) -> str:
        """Render the series as text."""
        many = ", ".join(
            f"{'?' if count is None else count} {what}{'' if count == 1 else 's'}"
            for count, what in ((self.nodes, "node"), (self.ranks, "rank"))
        )
        kind = " ".join(filter(None, (self.benchmark or "no known benchmark", self.size, self.scenario, self.division)))
        return f"{kind}, {self.system or 'unknown system'}, {many}, times as in {self.rules}"


class Record(_Document, frozen=True, kw_only=True):
    """Holds one result. Times are in seconds, one for each converged run.

    ``epoch_s`` is the median time of a complete epoch of each run, without its evaluation. ``begin_s`` is when each run
    began, in Unix time. ``date`` is that of the first. ``disturbed`` is the largest share of the CPUs that other
    programs used in a run, 0 if no log says it. ``facts`` are texts by name, of the nodes or else of the system.
    """

    version: Literal[1] = VERSION
    date: str
    added: str
    source: str
    series: Series
    score: Annotated[str | None, Meta(description="the score as text; None if the runs are none")]
    compliant: bool
    time_s: tuple[float, ...]
    epoch_s: tuple[float, ...]
    begin_s: tuple[float, ...] = ()
    disturbed: float = 0.0
    logs: Annotated[dict[str, str], Meta(description="sha256 of each log by name")]
    facts: dict[str, str]
    facts_sha256: str
    suite_version: str | None

    @property
    def name(self) -> str:
        """Return the name of its file: date, benchmark, and the beginning of a digest of its logs."""
        stamp = datetime.fromisoformat(self.date).strftime("%Y%m%dT%H%M%SZ")
        # Of the logs and not of the record: the same result added twice gets the same name
        total = hashlib.sha256("".join(sorted(self.logs.values())).encode()).hexdigest()[:8]
        kind = "-".join(part for part in (self.series.benchmark, self.series.size, self.series.scenario) if part)
        return f"{stamp}-{''.join(c if c.isalnum() or c in '-_' else '_' for c in kind)}-{total}{SUFFIX}"


def compute_record(scored: Result, now: datetime) -> Record:
    """Compute the record of a result. InputError if none of its runs converged."""
    first, folder = find_named_run(scored.runs), scored.group.folder
    converged = [run.record for run in scored.score.runs if run.converged]
    starts = [run.run_start_s for run in converged if run.run_start_s is not None]
    if not converged or not starts:
        raise InputError(
            f"{folder}: no run reached the target, so there is no time to add; `mlhpc check` says what each run lacks"
        )
    facts = _facts(scored, first)
    return Record(
        # The date of the runs, not of the command: results may be added later and in any order
        date=datetime.fromtimestamp(min(starts), UTC).isoformat(timespec="seconds"),
        added=now.isoformat(timespec="seconds"),
        source=str(folder),
        series=Series(
            benchmark=first.benchmark,
            size=first.size,
            scenario=scored.scenario,
            division=scored.division,
            rules=find_round_group(scored.group.round or first.ruleset),
            system=scored.group.system or _find_system(first.platform, facts),
            nodes=first.nodes,
            ranks=first.ranks,
        ),
        score=_score(scored),
        compliant=not scored.errors,
        time_s=tuple(run.time_to_train_s for run in converged if run.time_to_train_s is not None),
        epoch_s=tuple(seconds for run in converged if (seconds := compute_epoch_seconds(run)) is not None),
        begin_s=tuple(starts),
        disturbed=max((run.company.share for run in converged if run.company is not None), default=0.0),
        logs={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in scored.group.logs},
        facts=facts,
        facts_sha256=_compute_digest(facts),
        suite_version=first.suite_version,
    )


def compute_epoch_seconds(run: RunRecord) -> float | None:
    """Compute the median time in seconds that a complete epoch trained; None if the log has none."""
    seconds = [epoch.train_s for epoch in run.epochs if epoch.complete and epoch.train_s > 0.0]
    return statistics.median(seconds) if seconds else None


def read_history(folder: Path) -> list[Record]:
    """Read the records of a folder by date. InputError if there is no folder, a file in it is not a record, or two
    have the same run.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no history here; begin one with: mlhpc history add RUNS -o {quote_path(folder)}")
    if is_of_known_kind(folder):
        raise InputError(
            f"{folder}: not a history; expected a folder of records that mlhpc history add wrote, or a new one"
        )
    paths = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and not path.name.startswith("."))
    records = [_read(path) for path in paths]
    owners: dict[str, Path] = {}
    for path, record in zip(paths, records, strict=True):
        for digest in record.logs.values():
            if (other := owners.setdefault(digest, path)) != path:
                raise InputError(
                    f"{path}: holds a run that {other} has too; a run counts once: remove one of the files"
                )
    return sorted(records, key=lambda record: (record.date, record.name))


def write_record(folder: Path, record: Record, known: Iterable[Record]) -> Path | None:
    """Add a record to a folder and return its path; None if it is there already. Nothing that is there is changed.

    InputError if some of its logs, but not the same ones, are in another record: the same runs would count twice.
    """
    for earlier in known:
        if shared := set(record.logs.values()) & set(earlier.logs.values()):
            # The same result again: adding it a second time changes nothing, so a nightly job may repeat it
            if shared == set(record.logs.values()) == set(earlier.logs.values()):
                return None
            name = next(name for name, digest in record.logs.items() if digest in shared)
            raise InputError(
                f"{record.source}: {name} is in {folder / earlier.name} already, with other logs; a run counts once"
            )
    path = folder / record.name
    try:
        write_file_of_folder(path, json.dumps(convert_to_plain_data(record), indent=1) + "\n", overwrite=False)
    except FileExistsError:  # another process added it meanwhile
        if _read(path).logs != record.logs:
            raise InputError(
                f"{path}: the record exists already, with other logs, and is never overwritten; move it away and add"
                " again"
            ) from None
        return None
    return path


def group_by_series(records: Sequence[Record]) -> dict[Series, list[Record]]:
    """Group records by series; each group stays in order."""
    found: dict[Series, list[Record]] = {}
    for record in records:
        found.setdefault(record.series, []).append(record)
    return found


def list_changed_facts(before: Record, after: Record) -> list[str]:
    """List the facts that differ between two records, each as ``name: old -> new``."""
    names = sorted(before.facts.keys() | after.facts.keys())
    texts = [(name, before.facts.get(name, "none"), after.facts.get(name, "none")) for name in names]
    return [f"{name}: {old} -> {new}" for name, old, new in texts if old != new]


def _read(path: Path) -> Record:
    record = read_json_document(path, Record, "a record of a history", VERSION)
    try:
        when = datetime.fromisoformat(record.date)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise InputError(
            f"{path}: field `date` is {record.date!r}; expected a date and time with its zone, such as"
            " 2026-09-21T02:00:00+00:00"
        )
    # An edited fact would name a false cause of a change
    if record.facts_sha256 != _compute_digest(record.facts):
        raise InputError(
            f"{path}: field `facts_sha256` does not match the facts: the file was edited; restore it, or delete it and"
            " add the result again"
        )
    for name, seconds in (("time_s", record.time_s), ("epoch_s", record.epoch_s)):
        # A judge takes logarithms of these times, and adds to them
        wrong = next((each for each in seconds if not 1e-9 <= each <= 1e9), None)
        if wrong is not None:
            raise InputError(f"{path}: field `{name}` has {wrong}; expected seconds from 1e-09 to 1e+09")
    return record


def _find_system(platform: str | None, facts: Mapping[str, str]) -> str | None:
    """Find the name of the system in the logs.

    Without one its hardware is the name, so two machines are never one series.
    """
    # A site that names its system decides what is one series, whatever the hardware says
    if platform not in (None, "", UNKNOWN) or "processor" not in facts:
        return platform
    names = (facts.get("accelerators"), facts["processor"], f"{facts.get('cores', '?')} cores")
    return ", ".join(name for name in names if name)


def _compute_digest(facts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def _score(scored: Result) -> str | None:
    result = scored.score
    if not result.valid:
        return None
    if isinstance(result, Throughput):
        return f"{result.models_per_minute or 0.0:.3g} models/min"
    return render_duration(result.mean_s or 0.0)


def _facts(scored: Result, first: RunRecord) -> dict[str, str]:
    """Collect what may explain a change: settings that every log states, and facts of nodes or else of the system."""
    settings = {
        "batch": first.global_batch_size,
        "suite": first.suite_version,
        # The beginning of the digest is enough to see that the data changed
        "data": (first.data_manifest or "")[:12] or None,
        "cache": first.cache_state,
    }
    stated = {name: str(value) for name, value in settings.items() if value is not None}
    nodes = [read_facts(path) for path in RunFolder(scored.group.folder).node_facts()]
    if nodes:
        # What the nodes report comes before the description in a package
        return stated | collect_node_facts(nodes)
    fields: Mapping[str, Any] = scored.system.fields if scored.system else {}
    return stated | {name: str(value) for name, value in fields.items() if value not in (None, "")}


def collect_node_facts(nodes: Sequence[Facts]) -> dict[str, str]:
    """Collect the facts that stay until somebody changes a machine. Values that differ between nodes are joined."""
    found: dict[str, set[str]] = {}
    for node in nodes:
        flat = {
            "processor": node.cpu.model,
            "cores": node.cpu.cores,
            "governor": node.cpu.governor,
            # Rounded, so that a few MiB more or less are no changed fact
            "memory GiB": None if node.memory.total_gib is None else round(node.memory.total_gib),
            "cpus allowed": node.limits.cpus_allowed,
            "accelerators": ", ".join(f"{each.model} (driver {each.driver})" for each in node.accelerators),
            "network": ", ".join(sorted({each.link_text for each in node.network})),
            "operating system": node.software.operating_system,
            "kernel": node.software.kernel,
            "container": node.software.container,
            "python": node.software.python,
            "MPI": node.software.mpi,
            **{f"package {name}": version for name, version in node.software.packages.items()},
            **{f"tuning {name}": value for name, value in node.tuning.items()},
        }
        for name, value in flat.items():
            if value not in (None, ""):
                found.setdefault(name, set()).add(str(value))
    return {name: " | ".join(sorted(values)) for name, values in found.items()}
