"""Reads what is kept of a run folder: each file once, by the reader that one table gives its name. Writes nothing."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct

from mlhpc.suite import NO_SUBMITTER
from mlhpc.suite.card import read_card
from mlhpc.suite.data.manifest import read_manifest_file
from mlhpc.suite.documents import YamlSource, convert_to_plain_data, read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_bytes, read_json
from mlhpc.suite.log.mllog import convert_to_json
from mlhpc.suite.log.origin.sources import DIFF_BYTES, ENVIRONMENT_VERSION, Environment, read_sources
from mlhpc.suite.log.reader import read_events, read_limits
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.results_tree import Group, list_files
from mlhpc.suite.log.run_folder import JOB_VERSION, JobInfo, RunFolder, RunInfo
from mlhpc.suite.machine.facts import Facts, parse_samples, read_facts
from mlhpc.suite.machine.system import System
from mlhpc.suite.training.parallel.plan import read_plan

ORIGIN_FILE, ORIGIN_VERSION = "origin.json", 2
CONFIG, PLAN, CARD = "config.yaml", "plan.yaml", "card.yaml"
# What identifies code, environment and data has no words to redact: copied as it is.
VERBATIM = ("sources.json", "environment.json", "data.json", PLAN)
LARGEST_SETTINGS = 2**16  # bytes of a file of settings
MOST_SETTINGS = 2**13  # values of one: the slow reader of YAML takes a second for more
# Only a script that the template made has these two lines; a person's own script may begin and end otherwise.
TEMPLATE_COMMENT, TEMPLATE_END = "# Read it, edit it, ", 'exit "$status"\n'
_NOTHING = hashlib.sha256(b"").hexdigest()
_MARK = re.compile(r"REDACTED(?:-ACCOUNT)?|\bnode[0-9]+\b")  # what redaction leaves in place of a word
Kind = TypeVar("Kind")


class Origin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of origin.json, which only a package has: what became of a run folder.

    ``logs`` maps each log to its name in the package. ``redacted`` has the sha256 of changed files before it.
    ``description`` is that of the system file. ``late_submitter`` was named when the package was built, not before.
    """

    version: int
    folder: str
    logs: dict[str, str]
    redacted: dict[str, str]
    description: System | None = None
    late_submitter: str | None = None


class KeptFile(NamedTuple):
    """A file that was read: its ``value``, or the ``problem`` why it has none; the sha256 of its bytes."""

    value: Any
    problem: str | None
    sha256: str | None
    text: str


@dataclass(frozen=True)
class KeptFolder:
    """A run folder, or what a package keeps of one (``packaged``). Links of a package are not followed."""

    path: Path
    packaged: bool = True

    @cached_property
    def files(self) -> Mapping[str, KeptFile]:
        """The files by their names below the folder, in the order of the table."""
        readers = _READERS | (_ONLY_IN_PACKAGE if self.packaged else {})
        found = ((path, read) for pattern, read in readers.items() for path in _list_matches(self.path, pattern))
        return {
            path.relative_to(self.path).as_posix(): _read(path, read)
            for path, read in found
            if not (self.packaged and path.is_symlink())  # other rules report it
        }

    def read(self, name: str, kind: type[Kind]) -> Kind | None:
        """Return the value of a file. None without one."""
        value = self.files[name].value if name in self.files else None
        return value if isinstance(value, kind) else None

    @property
    def info(self) -> RunInfo | None:
        """The content of run.json."""
        return self.read("run.json", RunInfo)

    @property
    def origin(self) -> Origin | None:
        """The content of origin.json."""
        return self.read(ORIGIN_FILE, Origin)

    @property
    def nodes(self) -> list[Facts]:
        """The facts of all nodes."""
        return [file.value for file in self.files.values() if isinstance(file.value, Facts)]

    def list_hosts(self) -> list[object]:
        """List what tells the nodes from those of other folders: their names, unless these were redacted."""
        redacted = self.origin is not None and any(name.startswith("facts/") for name in self.origin.redacted)
        return [(self.path, node.node) if redacted else node.node for node in self.nodes]

    @property
    def surplus(self) -> list[str]:
        """The logs of runs that are not scored."""
        return [name for name in self.files if name.startswith("result_")] if self.packaged else []

    def list_problems(self, records: Sequence[RunRecord] = ()) -> Iterator[tuple[Path, str]]:
        """Yield (path, problem) for each file that its reader refuses, or that ``records`` or run.json contradict."""
        for name, file in self.files.items():
            if file.problem is not None:
                yield self.path / name, file.problem
        if self.packaged:
            known = {self.path / name for name in self.files}
            if self.info is not None and self.info.loop is None:
                known.discard(self.path / CARD)  # its workload has one
            if ORIGIN_FILE not in self.files:
                yield self.path / ORIGIN_FILE, "there is no such file"
            unread = (path for path in list_files(self.path) if path not in known and not path.is_symlink())
            yield from ((path, "is no file that a package keeps: nobody reads it") for path in unread)
        yield from ((self.path / name, problem) for name, problem in self._list_changed(records))

    def list_required(self, records: Sequence[RunRecord]) -> set[str]:
        """List the files that have to be there: the settings, and what run.json states; in a package all stated."""
        return {
            name
            for name, sha256, who in self._list_stated(records)
            if sha256 not in (None, _NOTHING)
            and name != "data.json"
            and (name == CONFIG or who == "run.json says" or self.packaged)
        }

    def _list_stated(self, records: Sequence[RunRecord]) -> set[tuple[str, str | None, str]]:
        """List each stated sha256 of a file, by a log or run.json: name, sha256 and who says so."""
        stated: set[tuple[str, str | None, str]] = {
            (name, sha256, "the logs say") for record in records for name, sha256 in _list_digests(record)
        }
        git = self.info and self.info.git
        if git:
            stated.add(("changes.diff", git.diff_sha256, "run.json says"))
        return stated

    def _list_changed(self, records: Sequence[RunRecord]) -> Iterator[tuple[str, str]]:
        """Yield the files whose sha256 is not as a log or run.json states."""
        required = self.list_required(records)
        redacted = self.origin.redacted if self.origin is not None else {}
        for name, sha256, who in sorted(self._list_stated(records), key=str):
            file = self.files.get(name)
            found = None if file is None else redacted.get(name, file.sha256)
            if found is None and sha256 not in (None, _NOTHING) and name in required:
                yield name, "there is no such file"
            elif found is not None and found != sha256 and not _is_shortened(name, file):
                wanted = f"{sha256[:12]}..." if sha256 else "that nothing was changed"
                yield name, f"its sha256 is {found[:12]}..., {who} {wanted}"
        for name in redacted:
            file = self.files.get(name)
            if name in VERBATIM or file is None or not _MARK.search(file.text):
                yield name, "is called redacted, and nothing in it is"


@dataclass(frozen=True)
class Provenance:
    """What a package has of the run folders of one result; outside of a package the run folder itself, if it is one."""

    group: Group
    folders: tuple[KeptFolder, ...]

    @cached_property
    def by_log(self) -> Mapping[str, KeptFolder]:
        """The folder of each log, by its name below the folder of the result. The first that names a log has it."""
        found: dict[str, KeptFolder] = {}
        for folder in self.folders:
            for name in folder.origin.logs.values() if folder.origin is not None else ():
                found.setdefault(name, folder)
        return found

    def folder_of(self, record: RunRecord) -> KeptFolder | None:
        """Return what is kept of a log's run folder: the folder whose origin.json names the log, else the first."""
        name = record.path.relative_to(self.group.folder).as_posix() if record.path is not None else ""
        return self.by_log.get(name) or next(iter(self.folders), None)

    @cached_property
    def facts(self) -> list[Facts]:
        """The facts of each node, once."""
        return list({node.node: node for folder in reversed(self.folders) for node in folder.nodes}.values())[::-1]

    def find_added_submitter(self, record: RunRecord) -> str | None:
        """Return the submitter that the package states for a log without one. None if there is no such statement."""
        folder = self.folder_of(record) if record.org in (None, NO_SUBMITTER) else None
        return folder.origin.late_submitter if folder is not None and folder.origin is not None else None


def read_provenance(group: Group) -> Provenance:
    """Find the provenance of a result. Links are not followed."""
    if group.package is None:
        ours = (group.folder / "run.json").is_file()
        return Provenance(group, (KeptFolder(group.folder, packaged=False),) if ours else ())
    folders = []
    if group.system is not None and group.benchmark is not None:
        code = group.package / "benchmarks" / Path(group.benchmark).name / "implementations"
        for folder in sorted(code.glob("mlhpc-*/*/*/provenance/run_*"), key=lambda path: (len(path.name), path)):
            inside = (path for path in (folder, *folder.parents) if group.package in path.parents)
            linked = any(path.is_symlink() for path in inside)
            if folder.relative_to(code).parts[1:3] == (group.system, group.scenario) and not linked:
                folders.append(KeptFolder(folder))
    return Provenance(group, tuple(folders))


def _list_digests(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield from record.run_files.items()
    if record.data_manifest is not None:
        yield "data.json", record.data_manifest
    if record.config_file is not None:
        yield record.config_file


def _is_shortened(name: str, file: KeptFile | None) -> bool:
    """Return True for long changes, of which the beginning is kept, and for changes that were not UTF-8."""
    text = file.text if file is not None and name == "changes.diff" else ""
    return len(text) > DIFF_BYTES or "\ufffd" in text


def _list_matches(folder: Path, pattern: str) -> list[Path]:
    if "*" not in pattern:
        return [folder / pattern] if os.path.lexists(folder / pattern) else []
    above, _, name = pattern.rpartition("/")
    if "*" not in name:  # glob leaves out links to nothing where no name is a pattern
        return [path for each in sorted(folder.glob(above)) if os.path.lexists(path := each / name)]
    found = sorted(folder.glob(pattern))
    # An empty folder stands where a file was: only files are kept.
    return [path for path in found if path.is_symlink() or not path.is_dir() or not any(path.iterdir())]


def _read(path: Path, read: Callable[[Path], object]) -> KeptFile:
    """Read a file that must be what its name says."""
    if not path.is_file():  # a reader might wait at a FIFO
        return KeptFile(None, "is not a file" if path.exists() else "is a symbolic link to nothing", None, "")
    sha256, text = None, ""
    try:
        if path.suffix != ".txt":  # a log may have a line of any bytes
            content = read_bytes(path, read_limits().file)
            sha256, text = hashlib.sha256(content).hexdigest(), _decode(content)
        return KeptFile(read(path), None, sha256, text)
    except OSError as error:
        return KeptFile(None, f"cannot be read: {error.strerror}", sha256, text)
    except InputError as error:
        problem = re.sub(r"^:(\d+)", r"line \1", str(error).removeprefix(str(path))).removeprefix(": ")
        return KeptFile(None, problem, sha256, text)


def _decode(content: bytes) -> str:
    """Decode a text. Python's JSON takes UTF-16 too, which the copy in a package would not be."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise InputError("is not UTF-8 text") from None
    if "\0" in text:
        raise InputError("is not a text: it has a NUL character")
    return text


def _read_info(path: Path) -> RunInfo:
    info = RunFolder(path.parent).read_info()
    read_object(path, *RunInfo.__struct_fields__)  # a run writes those too that have a default
    return info


def _read_settings(path: Path) -> dict[str, Any]:
    content = read_bytes(path, LARGEST_SETTINGS)
    if sum(content.count(mark) for mark in (b",", b":", b"-", b"[", b"{", b"?")) > MOST_SETTINGS:
        raise InputError(f"has more than {MOST_SETTINGS:,} values, the most that settings are")
    return YamlSource.read(path).data


def _read_plan(path: Path) -> dict[str, Any]:
    """Read a plan as a log has it: with what has a default."""
    _read_settings(path)  # within its limits
    found: dict[str, Any] = convert_to_json(convert_to_plain_data(read_plan(path)[0]))
    return found


def _read_code(path: Path) -> None:
    if path.is_symlink():
        raise InputError(
            "is a symbolic link; expected the file itself, because a package has no part of where it leads"
        )


def _read_script(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if not text.startswith("#!"):
        raise InputError("expected a script that begins with #!")
    if not text.endswith("\n"):
        raise InputError("its last line is cut: expected a newline at the end")
    if TEMPLATE_COMMENT in text and not text.endswith(TEMPLATE_END):
        raise InputError(f"its end is missing: expected {TEMPLATE_END.strip()!r} as the last line")


def read_object(path: Path, *names: str) -> dict[str, Any]:
    """Read a JSON object with these fields. InputError if it is none."""
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


def _read_typed(kind: type[Struct], what: str, version: int) -> Callable[[Path], Struct]:
    return lambda path: read_json_document(path, kind, what, version, largest=read_limits().json)


# What a package keeps, as patterns below the run folder, and the reader of each. Paths below preflight are
# <job>/<look>/<node>.jsonl.
_READERS: dict[str, Callable[[Path], object]] = {
    "run.json": _read_info,
    CONFIG: _read_settings,
    PLAN: _read_plan,
    CARD: read_card,
    "job.sbatch": _read_script,
    "job.json": _read_typed(JobInfo, "a job.json", JOB_VERSION),
    "changes.diff": lambda path: None,
    "sources.json": read_sources,
    "environment.json": _read_typed(Environment, "an environment", ENVIRONMENT_VERSION),
    "data.json": read_manifest_file,
    "code/**/*": _read_code,
    "facts/*.json": read_facts,
    "preflight/*/verdict.json": lambda path: read_object(path, "nodes"),
    "preflight/*/[12]/*.jsonl": _read_samples,
    "resumed_*.txt": _read_log,
    "failed_*.txt": _read_log,
}
_ONLY_IN_PACKAGE: dict[str, Callable[[Path], object]] = {
    ORIGIN_FILE: _read_typed(Origin, "an origin.json", ORIGIN_VERSION),
    "result_*.txt": _read_log,
}
