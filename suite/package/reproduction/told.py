"""What a run tells of itself, from its log and the files beside it: of a package, of a run folder, or of this machine now.

Everything is read as data of bounded size. A file that is a link, or no document of its kind, tells nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, ValidationError

from suite.documents import convert
from suite.files import read_bytes, read_json
from suite.log import mllog
from suite.log.limits import limits
from suite.log.origin.installed import Environment, read_environment
from suite.log.origin.sources import digest_suite, read_git_state
from suite.log.reader import Log, read_events
from suite.log.record import RunRecord, read_choices
from suite.log.run_folder import RunFolder
from suite.log.values import finite, whole
from suite.machine.facts import Facts

Model = TypeVar("Model", bound=Struct)


@dataclass(frozen=True)
class Told:
    """What is known of one run. None, or empty: it does not say.

    ``about`` is the metadata of run_config, ``sources`` the digests of the suite's files by path, ``changes`` the uncommitted
    changes. ``losses`` are those of the first steps, ``choices`` what was measured to be fastest on its machine.
    """

    config: Mapping[str, Any] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    ranks: int | None = None
    nodes: int | None = None
    data_manifest: str | None = None
    losses: tuple[float, ...] = ()
    suite_version: str | None = None
    git: Mapping[str, Any] | None = None
    changes: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    environment: Environment | None = None
    facts: Facts | None = None
    choices: Mapping[str, str] = field(default_factory=dict)


def read_told(record: RunRecord, log: Log, folder: Path | None) -> Told:
    """Read what a log and the folder that its run left (run.json and beside it) tell; without a folder only the log."""
    configured, first = log.first(mllog.RUN_CONFIG), log.first(mllog.FIRST_LOSSES)
    values = first.value if first is not None and isinstance(first.value, list) else []
    losses = [finite(value) for value in values[:64]]
    told = Told(
        config=record.config,
        about=configured.metadata if configured is not None else {},
        seed=record.seed,
        ranks=record.ranks,
        nodes=record.nodes,
        data_manifest=record.data_manifest,
        losses=tuple(loss for loss in losses if loss is not None) if None not in losses else (),
        suite_version=record.suite_version,
        choices=read_choices(log),
    )
    return told if folder is None else _beside(told, RunFolder(folder))


def read_log(path: Path) -> Log:
    """Read a log without the events of single steps."""
    return read_events(path, steps=False)


def tell_of_here(facts: Facts) -> Told:
    """What this machine and this installed suite tell, without a run; ``facts`` are those of the machine."""
    git = read_git_state()
    document = digest_suite()
    return Told(
        suite_version=document["suite_version"],
        git=None if git is None else git.logged(),
        changes="" if git is None else git.diff,
        sources=document["files"],
        environment=read_environment(),
        facts=facts,
    )


def read_small_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a stranger's package; empty for a link, and for what is no such file."""
    try:
        data = {} if path.is_symlink() else read_json(path, limits().json)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _beside(told: Told, folder: RunFolder) -> Told:
    info = read_small_json(folder.info_path)
    sources = read_small_json(folder.sources_path).get("files")
    named = sources if isinstance(sources, dict) else {}
    nodes = [path for path in folder.node_facts()[:4096] if not folder.facts.is_symlink()]
    known = (facts for path in nodes if (facts := _document(path, Facts)) is not None)
    git = info.get("git")
    return Told(
        **{
            **vars(told),
            "git": git if isinstance(git, dict) else None,
            "changes": _text(folder.changes_path),
            "sources": {key: value for key, value in named.items() if isinstance(value, str)},
            "environment": _document(folder.environment_path, Environment),
            "facts": next(known, None),
            "ranks": told.ranks if told.ranks is not None else whole(info.get("ranks")),
        }
    )


def _document(path: Path, model: type[Model]) -> Model | None:
    try:
        return convert(read_small_json(path), model)
    except ValidationError:
        return None


def _text(path: Path) -> str:
    try:
        return "" if path.is_symlink() else read_bytes(path, limits().json).decode("utf-8", "replace")
    except OSError:
        return ""
