"""Reads what the paths of a report hold: logs, and JSON files whose key "kind" selects one of `READERS`.

To add a kind of file, add its reader to `READERS` and what becomes of it to `read_sources`. Each file is opened once.

Defines ceilings and counters files, and finds those of the systems of a report. Formats: docs/ceilings.md.

A file belongs to a result if its system id is one of the names of the result's system. If the files name one system
only, it is used for every result, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from mlhpc.suite.documents import NotNegative, Positive, YamlSource
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import open_regular_file, read_json
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.performance.ceilings_file import Ceilings
from mlhpc.suite.plugins import (
    FAILURES,
    SOURCES,
    explain_missing_wing,
    explain_unusable,
    find_plugins,
    list_missing_wings,
)


class Kernel(Struct, frozen=True, kw_only=True):
    """Holds all launches of one kernel in the counted steps.

    ``bytes`` is by memory level, named as in the ceilings file.
    """

    name: str
    count: Annotated[float, Meta(ge=0)]
    seconds: Positive
    flops: NotNegative
    bytes: Mapping[str, NotNegative]


class Counters(Struct, frozen=True, kw_only=True):
    """Holds a counters file: hardware counters of one rank over ``steps`` training steps of a workload."""

    version: Literal[1]
    kind: Literal["counters"]
    system: str
    benchmark: str
    size: str
    tool: str
    steps: Annotated[float, Meta(gt=0)]
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Inputs:
    """Holds the files of a report that are not logs. ``what_if`` are the ceilings of machines to predict for."""

    ceilings: tuple[Ceilings, ...] = ()
    what_if: tuple[Ceilings, ...] = ()
    counters: tuple[Counters, ...] = ()

    def of_system(self, names: Iterable[str], ranks: float, nodes: float) -> tuple[Ceilings, str] | str:
        """Find the ceilings file of a system that has these names, with a remark for the reader.

        Text says why there is none. Of several files of one system, the one with the nearest number of ranks on a node
        is used.
        """
        # A run names its system by its platform, its system file or its folder, in any spelling
        known = {name.casefold() for name in names if name}
        systems = sorted({file.system for file in self.ceilings})
        matching = [system for system in systems if system.casefold() in known]
        # Two machines under one name: a guess would judge the run by the wrong one
        if len(matching) > 1:
            return f"ceilings of several systems go by this system's names: {', '.join(matching)}"
        remark = ""
        if not matching:
            if len(systems) != 1:
                return f"no ceilings of this system; there are those of {', '.join(systems)}" if systems else NONE_GIVEN
            # One machine and files of one system: most likely the same one, but the reader must know
            remark = f"The ceilings are those of {systems[0]!r}, the only ones given: no system here has that name"
            matching = systems
        files = [file for file in self.ceilings if file.system == matching[0]]
        per_node = ranks / nodes
        # By ratio of ranks per node, because they share the node's bandwidth; then ranks, then the oldest file
        best = min(files, key=lambda f: (abs(math.log(f.ranks_per_node / per_node)), abs(f.ranks - ranks), f.date))
        return best, remark


NONE_GIVEN = (
    "no ceilings given: `mlhpc ceilings -o ceilings.json` measures them, and the file goes among the report's paths"
)


VERSION = 1  # of all kinds that are Structs
_TOKEN = mllog.TOKEN.strip().encode()  # begins an event of a log
_PIECE_BYTES = 2**20


class Step(Struct, frozen=True, kw_only=True):
    """Holds a step of `mlhpc demo`. ``reason`` is one line about its failure; "" if it went well."""

    title: str
    command: str
    exit_code: int | None
    reason: str


class Steps(Struct, frozen=True, kw_only=True):
    """Holds a file of steps, as the demo writes it."""

    version: Literal[1]
    kind: Literal["steps"]
    steps: tuple[Step, ...]


Document = dict[str, Any]
Reader = Callable[[Path, Document], object]
Kind = TypeVar("Kind")


def make_struct_reader(model: type[Struct]) -> Reader:
    """Return a reader that converts a document of version 1 into a Struct."""

    def read(path: Path, document: Document) -> object:
        if document.get("version") != VERSION:
            found = f"field `version` of the {document['kind']} file is {document.get('version')!r}"
            raise InputError(f"{path}: {found}; this suite reads {VERSION}")
        return YamlSource(path, document, {}).convert(model)

    return read


READERS: Mapping[str, Reader] = {
    "ceilings": make_struct_reader(Ceilings),  # mlhpc ceilings
    "counters": make_struct_reader(Counters),  # mlhpc ceilings counters
    "steps": make_struct_reader(Steps),  # mlhpc demo
}


def list_readers() -> dict[str, Reader]:
    """List the readers by kind: `READERS`, those of wings and other packages (entry points of ``mlhpc.sources``)."""
    return {
        **READERS,
        **{kind: partial(_read_by_plugin, kind) for kind in find_plugins(SOURCES) if kind not in READERS},
    }


def _read_by_plugin(kind: str, path: Path, document: Document) -> object:
    """Read a file by a plug-in's model (a Struct) or function. It is imported only now."""
    plugin = find_plugins(SOURCES)[kind]
    try:
        reader = plugin.point.load()
    except FAILURES as error:
        raise InputError(f"{path}: kind {kind!r} of package {plugin.package}: {explain_unusable(error)}") from error
    return (make_struct_reader(reader) if isinstance(reader, type) else reader)(path, document)


@dataclass(frozen=True)
class Sources:
    """Holds what is at some paths: logs, ceilings and counters, steps of demos.

    ``documents`` has the files of wings and other packages, as their readers return them, by kind.
    """

    logs: tuple[Path, ...]
    inputs: Inputs
    steps: tuple[Step, ...]
    documents: Mapping[str, tuple[object, ...]]


def read_sources(paths: Sequence[Path], what_if: Sequence[Path] = ()) -> Sources:
    """Read the JSON files among the paths. All others are logs or folders of logs, whose content is not read here.

    ``what_if`` are ceilings files of machines to predict for. InputError if there is no log, and for a file that is
    neither a log nor of a known kind.
    """
    # By suffix, so that no log is opened here
    files = [path for path in paths if path.is_file() and path.suffix == ".json"]
    logs = tuple(path for path in paths if path not in files)
    if not logs:
        raise InputError(f"{paths[0]}: a report needs logs: add run folders, packages or logs to the paths")
    for path in logs:
        # A file without events, such as a wrong path, would be a result without runs
        if path.is_file() and not _has_event(path):
            raise InputError(
                f"{path}: no MLLOG event in this file, so it is no log; expected logs, folders of logs or JSON files"
            )
    by_kind = [read_document(path) for path in files]
    found = [each for _, each in by_kind]
    return Sources(
        logs=logs,
        inputs=_inputs(found, what_if),
        steps=tuple(step for steps in _select_kind(found, Steps) for step in steps.steps),
        documents={
            kind: tuple(each for name, each in by_kind if name == kind) for kind, _ in by_kind if kind not in READERS
        },
    )


def read_inputs(files: Sequence[Path], what_if: Sequence[Path] = ()) -> Inputs:
    """Read ceilings and counters files without logs."""
    return _inputs([read_file(path) for path in files], what_if)


def read_ceilings(path: Path) -> Ceilings:
    """Read one ceilings file. InputError, one line, for any other file."""
    found = read_file(path)
    if not isinstance(found, Ceilings):
        raise InputError(f"{path}: not a ceilings file; expected one that `mlhpc ceilings -o FILE` writes")
    return found


def read_file(path: Path) -> object:
    """Read a JSON file by the reader of its kind.

    InputError, one line that names the file and what is wrong with it.
    """
    return read_document(path)[1]


def read_document(path: Path) -> tuple[str, object]:
    """Return the kind of a JSON file and what its reader makes of it. InputError as of `read_file`."""
    try:
        document = read_json(path, read_limits().file)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a JSON file: {str(error).splitlines()[0]}") from None
    kind = document.get("kind") if isinstance(document, dict) else None
    readers = list_readers()
    if not isinstance(kind, str) or kind not in readers:
        missing = "".join(f"; {explain_missing_wing(wing)}" for wing in list_missing_wings())
        raise InputError(f"{path}: field `kind` is {kind!r}; expected one of {', '.join(map(repr, readers))}{missing}")
    return kind, readers[kind](path, document)


def _inputs(found: Sequence[object], what_if: Sequence[Path]) -> Inputs:
    return Inputs(
        _select_kind(found, Ceilings),
        tuple(read_ceilings(path) for path in what_if),
        _select_kind(found, Counters),
    )


def _select_kind(found: Sequence[object], kind: type[Kind]) -> tuple[Kind, ...]:
    return tuple(each for each in found if isinstance(each, kind))


def _has_event(path: Path) -> bool:
    """Return True once the token of an event is found. Only a file that is no log is read to its end."""
    with open_regular_file(path, read_limits().file) as file:
        tail = b""  # a token may lie across two pieces
        while piece := file.read(_PIECE_BYTES):
            if _TOKEN in tail + piece:
                return True
            tail = piece[-len(_TOKEN) :]
    return False
