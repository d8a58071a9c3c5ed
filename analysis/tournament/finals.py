"""Re-runs the finalists of a tournament: packages their runs and gives the package to `mlhpc reproduce`, each as a command."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import Struct

from analysis.tournament.outcome import Outcome
from analysis.tournament.ranking import Ranking
from analysis.tournament.runner import data_root
from suite.documents import convert
from suite.errors import InputError
from suite.files import read_json
from suite.launch.local import suite_command
from suite.log.limits import limits


class _Lenient(Struct, frozen=True, kw_only=True):
    """The base class of the parts of the document."""


class _Level(_Lenient, frozen=True, kw_only=True):
    level: int
    verdict: str
    reason: str


class _Result(_Lenient, frozen=True, kw_only=True):
    levels: tuple[_Level, ...] = ()


class _Document(_Lenient, frozen=True, kw_only=True):
    """What is read of reproduction.json."""

    version: Literal[1]
    reproduced: bool
    results: tuple[_Result, ...] = ()


Execute = Callable[[Sequence[str]], tuple[int, str]]


@dataclass(frozen=True)
class Final:
    """What became of a finalist: ``reproduced`` as reproduction.json says, None if there is none.

    ``reason`` is one line: each level that was not reproduced, or where the document is.
    """

    entry: str
    reproduced: bool | None
    reason: str
    folder: Path


def run_finals(ranking: Ranking, level: int, output: Path, execute: Execute | None = None) -> list[Final]:
    """Package and reproduce each entry that is still in the race, one after the other, into new folders of ``output``.

    InputError while the race is not over, with findings, and if ``output`` exists.
    """
    if ranking.findings or not ranking.race.over:
        raise InputError(f"{ranking.tournament.root}: {ranking.verdict}: no finals before that")
    if output.exists():
        raise InputError(f"{output}: exists already; finals never write into an earlier folder (choose another -o)")
    return [_final(ranking, entry, level, output / entry, execute or _execute) for entry in ranking.race.survivors]


def final_commands(ranking: Ranking, entry: str, level: int, folder: Path) -> list[list[str]]:
    """The command lines of a finalist: of its finished runs a package, of the package a reproduction."""
    tournament = ranking.tournament
    finished = [each for turn, each in ranking.outcomes.items() if turn.entry == entry and each.finished]
    if not finished:
        raise InputError(f"{tournament.root}: entry {entry!r} finished no run: there is nothing to reproduce")
    runs = [str(tournament.run(each.turn.block, entry).root) for each in finished]
    submitter = _org(finished[0])
    package = folder / submitter
    return [
        suite_command("package", *runs, "--system", "this-machine", "--submitter", submitter, "-o", str(package)),
        suite_command(
            *("reproduce", str(package), "--run", "--level", str(level), "--data", str(data_root(tournament))),
            *("--ranks", str(tournament.settings.ranks), "-o", str(folder / "reproduction")),
        ),
    ]


def _final(ranking: Ranking, entry: str, level: int, folder: Path, execute: Execute) -> Final:
    for command in final_commands(ranking, entry, level, folder):
        code, last = execute(command)
        if code not in (0, 1):
            return Final(entry, None, last or f"exit code {code}", folder)
    path = folder / "reproduction" / "reproduction.json"
    try:
        document = convert(read_json(path, limits().json), _Document)
    except (OSError, ValueError):
        return Final(entry, None, last or f"{path}: cannot be read", folder)
    levels = [level for result in document.results for level in result.levels if level.verdict != "reproduced"]
    why = "; ".join(f"level {each.level} {each.verdict}: {each.reason}" for each in levels)
    return Final(entry, document.reproduced, why or str(path), folder)


def _org(outcome: Outcome) -> str:
    return (outcome.record.org if outcome.record else None) or "unknown"


def _execute(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1].removeprefix("mlhpc: ")
