"""Reads what `mlhpc package` kept of a result's run folders: run.json and the facts of the nodes.

They are in benchmarks/<benchmark>/implementations/mlhpc-<version>/<system>/<scenario>/provenance/run_<n>/ of the
package.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mlhpc.suite import NO_SUBMITTER, REDACTED
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_bytes, render_repr
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import Group, SystemFile, read_system


@dataclass(frozen=True)
class Provenance:
    """What the run folders of one result left: each run.json, each node's facts by name, and the number of
    other logs.
    """

    infos: tuple[SystemFile, ...]
    facts: Mapping[str, SystemFile]
    logs: int

    def sound_facts(self) -> list[SystemFile]:
        """Return the facts that could be read."""
        return [document for document in self.facts.values() if not document.problem]


def read_provenance(group: Group) -> Provenance:
    """Read the provenance of a result. Links are not followed; an unreadable file has a ``problem``."""
    infos: list[SystemFile] = []
    facts: dict[str, SystemFile] = {}
    logs = 0
    if group.package is not None and group.system is not None and group.benchmark is not None:
        code = group.package / "benchmarks" / Path(group.benchmark).name / "implementations"
        for folder in sorted(code.glob("mlhpc-*/*/*/provenance/run_*")):
            below = folder.relative_to(code).parts
            if below[1:3] != (group.system, group.scenario) or _is_linked(folder, group.package):
                continue
            infos.append(read_system(folder / "run.json"))
            logs += len(list(folder.glob("result_*.txt")))
            for path in sorted((folder / "facts").glob("*.json")):
                document = read_system(path)
                facts.setdefault(str(document.fields.get("node", path.name)), document)
    return Provenance(tuple(infos), facts, logs)


def find_kept_folder(folders: Sequence[Path], log: str) -> Path | None:
    """Find what a package keeps of a log's run folder: the folder whose origin.json names the log, else the first."""
    for folder in folders:
        logs = read_system(folder / "origin.json").fields.get("logs")
        if isinstance(logs, dict) and log in logs.values():
            return folder
    return folders[0] if folders else None


LATE_SUBMITTER = "late_submitter"  # in origin.json: who was named as submitter when the package was built, not before


def find_added_submitter(folders: Sequence[Path], record: RunRecord) -> str | None:
    """Return the submitter that the package states for a log without one. None if there is no such statement."""
    if record.path is None or record.org not in (None, NO_SUBMITTER):
        return None
    folder = find_kept_folder(folders, record.path.name)
    stated = None if folder is None else read_system(folder / "origin.json").fields.get(LATE_SUBMITTER)
    return stated if isinstance(stated, str) else None


def find_config_problem(folder: Path, record: RunRecord) -> str | None:
    """Return why a kept folder lacks the settings file that a log states. None if it has it, or the log states none.

    A copy that origin.json calls redacted has another sha256. It must still hold the settings of the log's run_config.
    """
    if record.config_file is None:
        return None
    name, sha256 = record.config_file
    redacted = read_system(folder / "origin.json").fields.get("redacted")
    path = folder / name
    if not path.is_file() or path.is_symlink():
        return "there is no such file"
    try:
        found = hashlib.sha256(read_bytes(path, read_limits().json)).hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found == sha256:
        return None
    if isinstance(redacted, list) and name in redacted:
        return _find_redaction_problem(path, record.config or {})
    return f"its sha256 is {found[:12]}..., the log says {sha256[:12]}..."


def _find_redaction_problem(path: Path, logged: Mapping[str, Any]) -> str | None:
    """Return what was changed besides words. Logs are never edited, so they have the words before redaction."""
    try:
        kept = YamlSource.read(path).data
    except InputError as error:
        return f"is called redacted, and is no file of settings: {str(error).partition(': ')[2]}"
    open_parts: list[tuple[str, Any, Any]] = [("", logged, kept)]
    while open_parts:
        at, said, found = open_parts.pop()
        if isinstance(said, Mapping) and isinstance(found, Mapping):
            open_parts += [(f"{at}.{key}".lstrip("."), value, found.get(key)) for key, value in said.items()]
        elif said != found and said not in ({}, []) and not may_be_redacted(said, found):
            return (
                f"is called redacted, and has {render_repr(at)} = {render_repr(found)}; the log says"
                f" {render_repr(said)}"
            )
    return None


def may_be_redacted(said: object, found: object) -> bool:
    """Return True if a setting may be the redacted form of another. A log has only the last part of a path."""
    if not isinstance(said, str) or not isinstance(found, str):
        return False
    return PurePosixPath(found).name == said or REDACTED in found or re.search(r"\bnode[0-9]+\b", found) is not None


def _is_linked(path: Path, package: Path) -> bool:
    """Return True if the path or a folder above it inside the package is a symbolic link."""
    inside = (path, *path.parents)
    return any(item.is_symlink() for item in inside[: inside.index(package)])
