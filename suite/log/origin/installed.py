"""Reads the environment of a run: every installed distribution with the digest of its wheel's files. Writes nothing.

pip does not keep the sha256 of a wheel that it installed from an index. It keeps RECORD, with the sha256 of every file
of the wheel. The digest of that list is the same for the wheel and for its installed files, whichever tool installed
them. So environments can be compared with each other, and with wheels, without the wheels' own hashes.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.plugins import read_name_and_version

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
