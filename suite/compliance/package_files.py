"""Renders, reads and compares manifest.sha256, the list of a package's files with their checksums. Writes nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from mlhpc.suite.files import open_regular_file, render_repr
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.log.results_tree import MANIFEST, list_files

MANIFEST_VERSION = 1
# What sha256sum -c reads: two blanks, or a blank and an asterisk (binary); the form of --tag; capitals; paths with ./
_LINE = re.compile(
    r"(?:(?P<sum>[0-9a-fA-F]{64}) [ *]|SHA256 \()(?:\./)*+(?P<name>.+?)(?(sum)|\) = (?P<tagged>[0-9a-fA-F]{64}))"
)


def render_package_manifest(package: Path) -> str:
    """Render the manifest of a package's files as they are now, in the form of sha256sum."""
    files = [path for path in list_files(package) if path.is_file() and path.name != MANIFEST]
    lines = [f"# mlhpc manifest version {MANIFEST_VERSION}: sha256sum -c {MANIFEST}"]
    lines += [f"{compute_sha256(path)}  {path.relative_to(package).as_posix()}" for path in files]
    return "\n".join(lines) + "\n"


def read_package_manifest(path: Path) -> dict[str, str] | None:
    """Map each relative path to its sha256. None unless the file has the form of sha256sum, and each path once."""
    found: dict[str, str] = {}
    try:
        # A limit, because a package may come from anybody. Line by line, because it may have a million.
        with open_regular_file(path, read_limits().manifest) as file:
            for line in file:
                text = line.decode().rstrip("\r\n")
                if not text or text.startswith("#"):
                    continue
                match = _LINE.fullmatch(text)
                if match is None or match["name"] in found:
                    return None
                found[match["name"]] = (match["sum"] or match["tagged"]).lower()
    except (OSError, UnicodeDecodeError):
        return None
    return found


def compute_sha256(path: Path) -> str:
    """Compute the sha256 of a file, in hexadecimal. OSError if the file exceeds the limit in mlhpc.suite.log.reader."""
    with open_regular_file(path, read_limits().file) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_manifest(package: Path) -> Iterator[tuple[str, Path, str]]:
    """Compare a package's files with its manifest and yield (rule, path, message) for each difference."""
    path = package / MANIFEST
    if path.is_symlink() or (path.exists() and not path.is_file()):
        yield "manifest-changed", path, "is not a file"
        return
    if not path.exists():
        yield "manifest-missing", package, f"no {MANIFEST}"
        return
    listed = read_package_manifest(path)
    if listed is None:
        yield "manifest-changed", path, "not a manifest in the form of sha256sum"
        return
    # Links are entries too: a link that is not in the manifest must not hide what it points to.
    present = {entry.relative_to(package).as_posix(): entry for entry in list_files(package)}
    present.pop(MANIFEST, None)
    for name in sorted(listed.keys() - present.keys()):
        yield "manifest-changed", path, f"{render_repr(name)} is listed but not there"
    for name in sorted(present.keys() - listed.keys()):
        yield "manifest-changed", present[name], "is not in the manifest"
    for name in sorted(present.keys() & listed.keys()):
        entry = present[name]
        try:
            same = not entry.is_symlink() and entry.is_file() and compute_sha256(entry) == listed[name]
        except OSError as error:
            yield "manifest-changed", entry, f"cannot be compared with the manifest: {error.strerror}"
            continue
        if not same:
            yield "manifest-changed", entry, "differs from its sha256 in the manifest"
