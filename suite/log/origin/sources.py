"""Reads which code a run is made of: commit, uncommitted changes, digests of the suite's own files. Writes nothing.

Reads the environment of a run: every installed distribution with the digest of its wheel's files. Writes nothing.

pip does not keep the sha256 of a wheel that it installed from an index. It keeps RECORD, with the sha256 of every file
of the wheel. The digest of that list is the same for the wheel and for its installed files, whichever tool installed
them. So environments can be compared with each other, and with wheels, without the wheels' own hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

import mlhpc
from mlhpc.suite import VERSION
from mlhpc.suite.documents import convert_to_plain_data, read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.plugins import read_name_and_version

SOURCES_VERSION: Final = 1
DIFF_BYTES = 2**20  # of the uncommitted changes that are kept; their sha256 is that of all
PARTS = ("suite", "workloads", "analysis", "plugins")  # folders of the package mlhpc; in a checkout they are links
KINDS = frozenset({".py", ".yaml", ".json", ".j2", ".sbatch", ".sh", ".html", ".css", ".js", ".npz"})
# Without the configuration of a checkout that could make git run a program of its own on the files
_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")


class Sources(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of sources.json. ``sha256`` is that of the list of files (`compute_files_digest`)."""

    version: Literal[1] = SOURCES_VERSION
    suite_version: str
    sha256: str
    files: dict[str, str]

    def __post_init__(self) -> None:
        if compute_files_digest(self.files) != self.sha256:
            raise InputError("its files have another sha256 together than its own field sha256 says")


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
    # Of a hook or a CI job: GIT_DIR and its like name another repository, GIT_CONFIG_* programs that git runs.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(arguments: Sequence[str]) -> bytes | None:
        try:
            command = ["git", "-c", "core.fsmonitor=", "-C", str(here), *arguments]
            done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
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


ENVIRONMENT_VERSION: Final = 1
NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?"
VERSION_TEXT = r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,98}"
_SHA256 = r"^[0-9a-f]{64}\Z"
# What an installer writes beside the files of the wheel
_INSTALLER_FILES = re.compile(
    r"\.dist-info/(?:INSTALLER|REQUESTED|RECORD|RECORD\.jws|direct_url\.json|uv_\w+\.json)$|\.pyc$"
)


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class InstalledPackage(_Part, frozen=True, kw_only=True, omit_defaults=True):
    """One distribution.

    ``record_sha256``: digest of its wheel's files (`compute_record_digest`); None without a RECORD. ``wheel_sha256``:
    of the wheel; known only if it was installed from a file or an address. ``source``: index, file (or an address), or
    editable.
    """

    name: Annotated[str, Meta(pattern=rf"^{NAME}\Z")]
    version: Annotated[str, Meta(pattern=rf"^{VERSION_TEXT}\Z")]
    record_sha256: Annotated[str, Meta(pattern=_SHA256)] | None = None
    wheel_sha256: Annotated[str, Meta(pattern=_SHA256)] | None = None
    tags: tuple[str, ...] = ()
    source: Literal["index", "file", "editable"] = "index"


class Environment(_Part, frozen=True, kw_only=True, omit_defaults=True):
    """All distributions of a Python environment, by name."""

    version: Literal[1] = ENVIRONMENT_VERSION
    python: str
    machine: str
    distributions: tuple[InstalledPackage, ...]

    def text(self) -> str:
        """Return the content of the environment's file."""
        return json.dumps(convert_to_plain_data(self) | {"version": self.version}, indent=1) + "\n"

    def by_name(self) -> Mapping[str, InstalledPackage]:
        """Return the distributions by normal name."""
        return {convert_distribution_name(item.name): item for item in self.distributions}


def read_environment(found: Iterable[Distribution] | None = None) -> Environment:
    """Read the environment of this process, or of given distributions.

    If two have the same name, the first on the path counts.
    """
    items: dict[str, InstalledPackage] = {}
    for each in distributions() if found is None else found:
        name, version = read_name_and_version(each)
        if (
            re.fullmatch(NAME, name)
            and re.fullmatch(VERSION_TEXT, version)
            and convert_distribution_name(name) not in items
        ):
            items[convert_distribution_name(name)] = _describe_package(each, name, version)
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return Environment(
        python=python,
        machine=f"{sys.platform} {platform.machine()}",
        distributions=tuple(items[name] for name in sorted(items)),
    )


def convert_distribution_name(name: str) -> str:
    """Return the normal spelling of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def compute_record_digest(text: str) -> str | None:
    """Compute the digest of a RECORD's files: the same for a wheel and its installed files. None if it lists none.

    Leaves out what an installer adds or rewrites: compiled files, its own notes, scripts and other files outside of
    site-packages (``../`` of an environment, ``.data/`` of a wheel).
    """
    lines = []
    for line in text.splitlines():
        path, hashed, rest = line.rpartition(",sha256=")  # a path with a comma is in quotes, equally in the wheel
        if (
            hashed
            and not path.startswith(("../", "/", '"../'))
            and ".data/" not in path
            and not _INSTALLER_FILES.search(path)
        ):
            lines.append(f"{rest.partition(',')[0]}  {path}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest() if lines else None


def _describe_package(each: Distribution, name: str, version: str) -> InstalledPackage:
    origin = _parse_origin(each.read_text("direct_url.json"))
    editable = bool(origin.get("dir_info", {}).get("editable"))
    archive = str(origin.get("archive_info", {}).get("hashes", {}).get("sha256", ""))
    tags = tuple(re.findall(r"^Tag: (\S+)$", each.read_text("WHEEL") or "", re.MULTILINE))
    return InstalledPackage(
        name=name,
        version=version,
        record_sha256=None if editable else compute_record_digest(each.read_text("RECORD") or ""),
        wheel_sha256=archive if re.fullmatch(r"[0-9a-f]{64}", archive) else None,
        tags=tags[:8],
        source="editable" if editable else "file" if origin else "index",
    )


def _parse_origin(text: str | None) -> dict[str, Any]:
    """Return the content of direct_url.json; an empty object if it is absent or damaged."""
    try:
        data = json.loads(text or "{}")
    except ValueError:
        return {}
    parts = ("dir_info", "archive_info")
    if not isinstance(data, dict) or not all(isinstance(data.get(part, {}), dict) for part in parts):
        return {}
    hashes = data.get("archive_info", {}).get("hashes", {})
    return data if isinstance(hashes, dict) else {}
