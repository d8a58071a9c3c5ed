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
from mlhpc.suite.log.origin.sources import Environment, compute_suite_digests, read_environment, read_git_state
from mlhpc.suite.log.reader import parse_int64, read_limits
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.machine.facts import Facts

Model = TypeVar("Model", bound=Struct)


@dataclass(frozen=True)
class RunFacts:
    """The known facts of one run: what its log says, and what the files of its folder say. None, or empty, if unknown.

    ``sources``: digests of the suite's files by path. ``changes``: the uncommitted changes.
    """

    run: RunRecord = field(default_factory=RunRecord)
    git: Mapping[str, Any] | None = None
    changes: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    environment: Environment | None = None
    facts: Facts | None = None


def collect_facts_of_this_machine(facts: Facts) -> RunFacts:
    """Collect the facts of this machine and this installed suite without a run."""
    git = read_git_state()
    document = compute_suite_digests()
    return RunFacts(
        RunRecord(suite_version=document["suite_version"]),
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


def read_run_facts(record: RunRecord, folder: Path | None) -> RunFacts:
    """Add the facts in the files of a run's folder, if there is one, to those of its log."""
    if folder is None:
        return RunFacts(record)
    files = RunFolder(folder)
    info = read_small_json(files.info_path)
    git = info.get("git")
    sources = read_small_json(files.sources_path).get("files")
    named = sources.items() if isinstance(sources, dict) else ()
    nodes = [] if files.facts.is_symlink() else files.node_facts()[:4096]  # a stranger may add any number
    known = (_read_document(path, Facts) for path in nodes)
    ranks = record.ranks if record.ranks is not None else parse_int64(info.get("ranks"))
    return RunFacts(
        replace(record, ranks=ranks),
        git=git if isinstance(git, dict) else None,
        changes=_read_text(files.changes_path),
        sources={path: sha256 for path, sha256 in named if isinstance(sha256, str)},
        environment=_read_document(files.environment_path, Environment),
        facts=next((node for node in known if node is not None), None),
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
