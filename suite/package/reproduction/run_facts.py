"""Collects the facts of a run from its log and files, or the facts of this machine.

All files are read as data of bounded size. A file that is a link, or no document of its kind, counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, ValidationError

from mlhpc.suite.documents import convert
from mlhpc.suite.files import read_bytes, read_json
from mlhpc.suite.log import mllog
from mlhpc.suite.log.origin.sources import Environment, compute_suite_digests, read_environment, read_git_state
from mlhpc.suite.log.reader import Log, convert_to_float, parse_int64, read_events, read_limits
from mlhpc.suite.log.record import RunRecord, read_choices
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.machine.facts import Facts

Model = TypeVar("Model", bound=Struct)


@dataclass(frozen=True)
class RunFacts:
    """The known facts of one run. None, or empty, for an unknown fact.

    ``about``: the metadata of run_config. ``sources``: digests of the suite's files by path. ``changes``: the
    uncommitted changes. ``losses``: losses of the first steps. ``evaluations``: the metric's values in order.
    ``choices``: the options that were fastest on its machine.
    """

    config: Mapping[str, Any] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    ranks: int | None = None
    nodes: int | None = None
    data_manifest: str | None = None
    losses: tuple[float, ...] = ()
    evaluations: tuple[float, ...] = ()
    suite_version: str | None = None
    git: Mapping[str, Any] | None = None
    changes: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    environment: Environment | None = None
    facts: Facts | None = None
    choices: Mapping[str, str] = field(default_factory=dict)


def read_run_facts(record: RunRecord, log: Log, folder: Path | None) -> RunFacts:
    """Read the facts of a run from its log and, if ``folder`` is given, from the files of its run folder."""
    configured, first = log.first(mllog.RUN_CONFIG), log.first(mllog.FIRST_LOSSES)
    values = first.value if first is not None and isinstance(first.value, list) else []
    # A stranger's log may list any number; a run logs 20.
    losses = [convert_to_float(value) for value in values[:64]]
    facts = RunFacts(
        config=record.config,
        about=configured.metadata if configured is not None else {},
        seed=record.seed,
        ranks=record.ranks,
        nodes=record.nodes,
        data_manifest=record.data_manifest,
        # With one value missing, the steps of two lists no longer match.
        losses=tuple(loss for loss in losses if loss is not None) if None not in losses else (),
        evaluations=tuple(value.value for value in record.evals),
        suite_version=record.suite_version,
        choices=read_choices(log),
    )
    return facts if folder is None else _add_files(facts, RunFolder(folder))


def read_log(path: Path) -> Log:
    """Read a log without the events of single steps."""
    return read_events(path, steps=False)


def collect_facts_of_this_machine(facts: Facts) -> RunFacts:
    """Collect the facts of this machine and this installed suite without a run."""
    git = read_git_state()
    document = compute_suite_digests()
    return RunFacts(
        suite_version=document["suite_version"],
        git=None if git is None else git.logged(),
        changes="" if git is None else git.diff,
        sources=document["files"],
        environment=read_environment(),
        facts=facts,
    )


def read_small_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a stranger's package. Empty for a link, and for a file that is no JSON object."""
    try:
        data = {} if path.is_symlink() else read_json(path, read_limits().json)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _add_files(facts: RunFacts, folder: RunFolder) -> RunFacts:
    """Add the facts in the files of a run folder to those of its log."""
    info = read_small_json(folder.info_path)
    git = info.get("git")
    sources = read_small_json(folder.sources_path).get("files")
    named = sources.items() if isinstance(sources, dict) else ()
    nodes = [] if folder.facts.is_symlink() else folder.node_facts()[:4096]  # a stranger may add any number
    known = (_read_document(path, Facts) for path in nodes)
    return replace(
        facts,
        git=git if isinstance(git, dict) else None,
        changes=_read_text(folder.changes_path),
        sources={path: sha256 for path, sha256 in named if isinstance(sha256, str)},
        environment=_read_document(folder.environment_path, Environment),
        facts=next((node for node in known if node is not None), None),
        ranks=facts.ranks if facts.ranks is not None else parse_int64(info.get("ranks")),
    )


def _read_document(path: Path, model: type[Model]) -> Model | None:
    try:
        return convert(read_small_json(path), model)
    except ValidationError:
        return None


def _read_text(path: Path) -> str:
    try:
        return "" if path.is_symlink() else read_bytes(path, read_limits().json).decode("utf-8", "replace")
    except OSError:
        return ""
