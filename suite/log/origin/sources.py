"""Reads which code a run is made of: commit, uncommitted changes, digests of the suite's own files. Writes nothing."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

import mlhpc
from mlhpc.suite import VERSION
from mlhpc.suite.documents import read_json_document
from mlhpc.suite.errors import InputError

SOURCES_VERSION: Final = 1
DIFF_BYTES = 2**20  # of the uncommitted changes that are kept; their sha256 is that of all
PARTS = ("suite", "workloads", "analysis")  # folders of the package mlhpc; in a checkout they are links
KINDS = frozenset({".py", ".yaml", ".json", ".j2", ".sbatch", ".html", ".css", ".js", ".npz"})
# Without the configuration of a checkout that could make git run a program of its own on the files
_DIFF = ("-c", "core.fsmonitor=", "diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")


class Sources(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of sources.json. ``sha256`` is that of the list of files (`compute_files_digest`)."""

    version: Literal[1] = SOURCES_VERSION
    suite_version: str
    sha256: str
    files: dict[str, str]

    def __post_init__(self) -> None:
        if compute_files_digest(self.files) != self.sha256:
            raise InputError("expected files whose list has the stated sha256")


@dataclass(frozen=True)
class GitState:
    """The commit of a checkout, and its changes in tracked files: the first `DIFF_BYTES`, and the digest of all."""

    commit: str
    diff: str
    diff_sha256: str | None

    def logged(self) -> dict[str, Any]:
        """Return the form of run.json."""
        state: dict[str, Any] = {"commit": self.commit, "dirty": self.diff_sha256 is not None}
        return state if self.diff_sha256 is None else state | {"diff_sha256": self.diff_sha256}


def read_git_state(cwd: Path | None = None) -> GitState | None:
    """Read the state of the checkout that holds ``cwd``, by default this suite's.

    None without a checkout or without git.
    """
    here = cwd or Path(__file__).resolve().parent

    def git(arguments: Sequence[str]) -> bytes | None:
        try:
            command = ["git", "-C", str(here), *arguments]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git(["rev-parse", "HEAD"])
    if commit is None:
        return None
    changes = git(_DIFF) if git(["status", "--porcelain", "--untracked-files=no"]) else b""
    if not changes:
        return GitState(commit.decode().strip(), "", None if changes is not None else hashlib.sha256(b"").hexdigest())
    text = changes[:DIFF_BYTES].decode("utf-8", "replace")
    if len(changes) > DIFF_BYTES:
        text += f"\n[the first {DIFF_BYTES} of {len(changes)} bytes]\n"
    return GitState(commit.decode().strip(), text, hashlib.sha256(changes).hexdigest())


def compute_suite_digests(folders: Mapping[str, Path] | None = None) -> dict[str, Any]:
    """Compute the digests of the suite's files: ``{"version", "suite_version", "sha256", "files": {path: sha256}}``.

    ``sha256`` is that of the list of files as sha256sum prints it. ``folders``: the packages by name; None: the
    installed ones.
    """
    found: dict[str, str] = {}
    for name, folder in (_list_package_folders() if folders is None else folders).items():
        for path in sorted(folder.rglob("*")):
            if path.suffix in KINDS and path.is_file():
                key = f"{name}/{path.relative_to(folder).as_posix()}"
                found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"version": SOURCES_VERSION, "suite_version": VERSION, "sha256": compute_files_digest(found), "files": found}


def read_sources(path: Path) -> Sources:
    """Read sources.json. InputError names the file, what was expected and what it holds."""
    return read_json_document(path, Sources, "the digests of the suite", SOURCES_VERSION)


def compute_files_digest(files: Mapping[str, str]) -> str:
    """Compute the sha256 of a list of files with their digests, in the form and order of sha256sum."""
    return hashlib.sha256("".join(f"{files[name]}  {name}\n" for name in sorted(files)).encode()).hexdigest()


def _list_package_folders() -> dict[str, Path]:
    """Return the folders of the package mlhpc that is imported, by name."""
    return {name: Path(mlhpc.__path__[0]) / name for name in PARTS}
