"""Reads every file that a package keeps of a run folder, to find damaged ones. One table names them all.

Renders, reads and compares manifest.sha256, the list of a package's files with their checksums. Writes nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mlhpc.suite.card import read_card
from mlhpc.suite.data.manifest import read_manifest_file
from mlhpc.suite.documents import YamlSource, read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import open_regular_file, read_bytes, read_json, render_repr
from mlhpc.suite.log.origin.sources import DIFF_BYTES, ENVIRONMENT_VERSION, Environment, read_sources
from mlhpc.suite.log.reader import read_events, read_limits
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import MANIFEST, list_files
from mlhpc.suite.log.run_folder import JOB_VERSION, JobInfo, RunFolder
from mlhpc.suite.machine.facts import parse_samples, read_facts

ORIGIN_FILE = "origin.json"  # only in a package: which files redaction changed
# Only a script that the template made has these two lines; a person's own script may begin and end otherwise.
TEMPLATE_COMMENT, TEMPLATE_END = "# Read it, edit it, sbatch it.", 'exit "$status"\n'


def list_kept_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a run folder that a package keeps, in the table's order. Logs of its result are left out.

    An entry that is no file is included if a file is expected there, so that the check finds it.
    """
    for pattern in _READERS:
        yield from _list_matches(folder, pattern)


def check_kept_files(folder: Path, records: Sequence[RunRecord] = ()) -> Iterator[tuple[Path, str]]:
    """Yield (path, problem) for each kept file that its reader refuses, or that ``records`` or run.json contradict.

    ``folder`` is a run folder, or what a package keeps of one. There links are not followed: other rules report them.
    """
    # In a run folder a link is the owner's business; in a package it would lead out of it.
    packaged = os.path.lexists(folder / ORIGIN_FILE)
    for pattern, read in (_READERS | (_ONLY_IN_PACKAGE if packaged else {})).items():
        for path in _list_matches(folder, pattern):
            if packaged and path.is_symlink():
                continue
            problem = _find_problem(path, read)
            if problem is not None:
                yield path, problem
    yield from _check_stated_digests(RunFolder(folder), records, _read_redacted_names(folder))


def _list_matches(folder: Path, pattern: str) -> list[Path]:
    if "*" not in pattern:
        return [folder / pattern] if os.path.lexists(folder / pattern) else []
    above, _, name = pattern.rpartition("/")
    if "*" not in name:  # glob leaves out links to nothing where no name is a pattern
        return [path for each in sorted(folder.glob(above)) if os.path.lexists(path := each / name)]
    found = sorted(folder.glob(pattern))
    # An empty folder stands where a file was: only files are kept.
    return [path for path in found if path.is_symlink() or not path.is_dir() or not any(path.iterdir())]


def _find_problem(path: Path, read: Callable[[Path], object]) -> str | None:
    """Return why a file is not what its name says, without its path. None if it is."""
    if not path.is_file():  # a reader might wait at a FIFO
        return "is not a file" if path.exists() else "is a symbolic link to nothing"
    try:
        if path.suffix != ".txt":  # a log may have a line of any bytes
            _read_text(path)
        read(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except InputError as error:
        text = str(error).removeprefix(str(path))
        return re.sub(r"^:(\d+)", r"line \1", text).removeprefix(": ")
    return None


def _check_stated_digests(
    folder: RunFolder, records: Sequence[RunRecord], redacted: Sequence[object]
) -> Iterator[tuple[Path, str]]:
    """Yield the files whose sha256 a log or run.json states and that have another one."""
    for path in (folder.data_path, folder.sources_path, folder.environment_path):
        logged = {_find_logged_digest(record, path) for record in records} - {None}
        # Several different digests cannot all be of this one file.
        if len(logged) == 1 and path.is_file() and path.name not in redacted:
            yield from _check_digest(path, str(*logged), "the logs say")
    try:
        git = folder.read_info().git
    except InputError:
        return
    stated = None if git is None else git.diff_sha256
    if stated is not None and folder.changes_path.name not in redacted:
        yield from _check_digest(folder.changes_path, stated, "run.json says")


def _find_logged_digest(record: RunRecord, path: Path) -> str | None:
    return record.data_manifest if path.name == "data.json" else record.run_files.get(path.name)


def _check_digest(path: Path, stated: str, who: str) -> Iterator[tuple[Path, str]]:
    try:
        content = read_bytes(path, read_limits().json) if path.is_file() else b""
    except OSError:  # `check_kept_files` says so
        return
    # Of long changes only the beginning is kept, and of those in another encoding a text that has replaced characters.
    if len(content) > DIFF_BYTES or "\ufffd".encode() in content:
        return
    found = hashlib.sha256(content).hexdigest()
    if found != stated:
        yield path, f"its sha256 is {found[:12]}..., {who} {stated[:12]}..." if content else "there is no such file"


def _read_redacted_names(folder: Path) -> Sequence[object]:
    try:
        origin = _read_object(folder / ORIGIN_FILE)
    except (OSError, InputError):
        return ()
    redacted = origin.get("redacted")
    return redacted if isinstance(redacted, list) else ()


def _read_text(path: Path) -> str:
    """Read a text. Python's JSON takes UTF-16 too, which the copy in a package would not be."""
    try:
        text = read_bytes(path, read_limits().file).decode()
    except UnicodeDecodeError:
        raise InputError("is not UTF-8 text") from None
    if "\0" in text:
        raise InputError("is not a text: it has a NUL character")
    return text


def _read_code(path: Path) -> None:
    if path.is_symlink():
        raise InputError(
            "is a symbolic link; expected the file itself, because a package has no part of where it leads"
        )
    _read_text(path)


def _read_script(path: Path) -> None:
    text = _read_text(path)
    if not text.startswith("#!"):
        raise InputError("expected a script that begins with #!")
    if not text.endswith("\n"):
        raise InputError("its last line is cut: expected a newline at the end")
    if TEMPLATE_COMMENT in text and not text.endswith(TEMPLATE_END):
        raise InputError(f"its end is missing: expected {TEMPLATE_END.strip()!r} as the last line")


def _read_object(path: Path, *names: str) -> dict[str, object]:
    try:
        data = read_json(path, read_limits().json)
    except ValueError as error:
        raise InputError(f"expected JSON: {error}") from None
    if not isinstance(data, dict) or not data.keys() >= set(names):
        raise InputError(f"expected a JSON object{' with the fields ' if names else ''}{', '.join(names)}")
    return data


def _read_samples(path: Path) -> None:
    if not parse_samples(path, read_bytes(path, read_limits().events)):
        raise InputError("has no sample: expected a JSON object in each line")


def _read_log(path: Path) -> None:
    """Raise InputError for a damaged log.

    A process that was killed may leave an empty one, or half of its last line.
    """
    log = read_events(path, steps=False)
    if log.problems and log.cut_line is None:
        raise InputError(f"line {log.problems[0].line}: {log.problems[0].message}")
    if not log.events and path.stat().st_size:
        raise InputError("expected a log, found no event")


# What a package keeps, as patterns below the run folder, and the reader of each. Paths below preflight are
# <job>/<look>/<node>.jsonl.
_READERS: dict[str, Callable[[Path], object]] = {
    "run.json": lambda path: RunFolder(path.parent).read_info(),
    "config.yaml": YamlSource.read,
    "card.yaml": read_card,
    "job.sbatch": _read_script,
    "job.json": lambda path: read_json_document(path, JobInfo, "a job.json", JOB_VERSION),
    "changes.diff": _read_text,
    "sources.json": read_sources,
    "environment.json": lambda path: read_json_document(path, Environment, "an environment", ENVIRONMENT_VERSION),
    "data.json": read_manifest_file,
    "code/**/*": _read_code,
    "facts/*.json": read_facts,
    "preflight/*/verdict.json": lambda path: _read_object(path, "nodes"),
    "preflight/*/[12]/*.jsonl": _read_samples,
    "resumed_*.txt": _read_log,
    "failed_*.txt": _read_log,
}
_ONLY_IN_PACKAGE: dict[str, Callable[[Path], object]] = {
    ORIGIN_FILE: lambda path: _read_object(path, "logs", "redacted"),
    "result_*.txt": _read_log,
}


MANIFEST_VERSION = 1
_SHA256_DIGITS = 64


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
                # sha256sum writes two blanks, or a blank and an asterisk for binary mode, which `mlhpc package` never
                # writes.
                sha256, _, name = text.partition("  ")
                if not name or len(sha256) != _SHA256_DIGITS or name in found:
                    return None
                found[name] = sha256
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
