"""Reads what the paths of a report hold: logs, and JSON files whose key "kind" selects one of `READERS`.

To add a kind of file, add its reader to `READERS` and what becomes of it to `read_sources`. Each file is opened once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec import Struct

from mlhpc.analysis.network.fit import Fit, fit_sweep
from mlhpc.analysis.network.sweep import SWEEP_KIND, Sweep, parse_sweep
from mlhpc.analysis.sources.ceilings import Ceilings, Counters, Inputs
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import open_regular_file, read_json
from mlhpc.suite.log import mllog
from mlhpc.suite.log.limits import read_limits
from mlhpc.suite.performance.ab.ranking import KIND as RANKING_KIND
from mlhpc.suite.performance.ab.ranking import Ranking
from mlhpc.suite.performance.tune.result import KIND as TUNE_KIND
from mlhpc.suite.performance.tune.result import TuneResult

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
    SWEEP_KIND: parse_sweep,  # mlhpc moe --sweep-network
    "steps": make_struct_reader(Steps),  # mlhpc demo
    RANKING_KIND: make_struct_reader(Ranking),  # mlhpc ab runs show -o
    TUNE_KIND: make_struct_reader(TuneResult),  # mlhpc tune
}


@dataclass(frozen=True)
class Sources:
    """Holds what is at some paths: logs, ceilings and counters, fitted sweeps, steps of demos, rankings of A/B
    contests.
    """

    logs: tuple[Path, ...]
    inputs: Inputs
    networks: tuple[Fit, ...]
    steps: tuple[Step, ...]
    rankings: tuple[Ranking, ...]


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
    found = [read_file(path) for path in files]
    return Sources(
        logs=logs,
        inputs=_inputs(found, what_if),
        networks=tuple(fit_sweep(sweep) for sweep in _select_kind(found, Sweep)),
        steps=tuple(step for steps in _select_kind(found, Steps) for step in steps.steps),
        rankings=_select_kind(found, Ranking),
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
    try:
        document = read_json(path, read_limits().file)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a JSON file: {str(error).splitlines()[0]}") from None
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(kind, str) or kind not in READERS:
        raise InputError(f"{path}: field `kind` is {kind!r}; expected one of {', '.join(map(repr, READERS))}")
    return READERS[kind](path, document)


def _inputs(found: Sequence[object], what_if: Sequence[Path]) -> Inputs:
    return Inputs(
        _select_kind(found, Ceilings),
        tuple(read_ceilings(path) for path in what_if),
        _select_kind(found, Counters),
        _select_kind(found, TuneResult),
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
