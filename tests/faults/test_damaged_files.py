"""Every file of a run and of a package is damaged in every way: a command names it, none crashes, none hangs.

The long form damages every file (`make test-long`), the short form a sample.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlhpc.suite.commands.check import check
from mlhpc.suite.commands.package import package
from mlhpc.suite.commands.reproduce import reproduce
from mlhpc.suite.commands.score import score
from mlhpc.suite.commands.status import status
from mlhpc.suite.errors import InputError
from mlhpc.suite.package.build import build_package
from tests.fixtures.once import made_once
from tests.suite.package.test_kept_files import full_run

SAMPLE = 14  # damages of the short form


def _cut(part: float) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * part)])

    return apply


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        path.unlink()
        make(path)

    return apply


def _zero_block(path: Path) -> None:
    """A block that never reached the disk."""
    content = bytearray(path.read_bytes())
    third = len(content) // 3
    content[third : 2 * third] = bytes(third)
    path.write_bytes(content)


def _flipped(path: Path) -> None:
    """One bit of every hundredth byte."""
    content = bytearray(path.read_bytes())
    for place in range(7, len(content), 100):
        content[place] ^= 0x80
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": _cut(0),
    "half": _cut(0.5),
    "a tenth": _cut(0.1),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a block of zeros": _zero_block,
    "flipped bits": _flipped,
    "noise": lambda path: path.write_bytes(random.Random(1).randbytes(2000)),
    "UTF-16": lambda path: path.write_bytes(path.read_bytes().decode().encode("utf-16")),
    "null": lambda path: path.write_text("null"),
    "a list": lambda path: path.write_text("[1]"),
    "nested 100,000 deep": lambda path: path.write_text("[" * 100_000),
    "a number of 5,000 digits": lambda path: path.write_text('{"version": ' + "9" * 5000 + "}"),
    "a link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "a link to nothing": _replaced(lambda path: path.symlink_to("nothing")),
    "a FIFO": _replaced(os.mkfifo),
    "a folder": _replaced(Path.mkdir),
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, and its package."""
    return made_once(tmp_path_factory, "damaged_files", _make)


def _make(folder: Path) -> None:
    build_package([full_run(folder / "run")], system="bed", out=folder / "ACME")


def _files(folder: Path) -> list[Path]:
    """The files that are read; output is for people."""
    found = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [path for path in found if path.parts[0] != "output"]


def _said(result: Result, what: str) -> bool:
    """True if a command found something. Fails if it crashed, or ended with the code of a defect."""
    if isinstance(result.exception, InputError | OSError):  # `mlhpc` prints both as one line and ends with 2
        assert "\n" not in str(result.exception), what
        return True
    assert result.exception is None or isinstance(result.exception, SystemExit), (what, result.exception)
    assert result.exit_code in (0, 1, 2), (what, result.output)
    return result.exit_code != 0


def _commands(folder: Path, kind: str, out: Path) -> Iterator[tuple[str, Result]]:
    runner = CliRunner()
    for command in (check, score):
        yield str(command.name), runner.invoke(command, [str(folder)])
    if kind == "run":
        words = [str(folder), "--system", "bed", "--submitter", "ACME", "-o", str(out / "packed" / "ACME")]
        yield "package", runner.invoke(package, words)
        yield "status", runner.invoke(status, [str(folder)])
    else:
        yield "verify", runner.invoke(package, ["--verify", str(folder)])
        yield "reproduce", runner.invoke(reproduce, [str(folder), "--level", "0", "-o", str(out / "again")])


def _try(stage: Path, kind: str, file: Path, damage: str, out: Path) -> set[str]:
    """Damage a file of a copy and return the commands that found it."""
    folder = shutil.copytree(stage / ("run" if kind == "run" else "ACME"), out / ("run" if kind == "run" else "ACME"))
    try:
        DAMAGES[damage](folder / file)
        return {name for name, result in _commands(folder, kind, out) if _said(result, f"{kind} {file}: {damage}")}
    finally:
        shutil.rmtree(out)


def _is_silent(kind: str, found: set[str]) -> bool:
    """True if nobody who would look at the result is told: the checker, and who packages or judges a package."""
    return not found & {"check", "package"} if kind == "run" else not found >= {"check", "verify", "reproduce"}


def _is_whole(kind: str, file: Path, damage: str) -> bool:
    """True for what is no damage: a text of code that is another text, and a log that a kill left empty or cut."""
    if kind == "package":  # its manifest finds every change
        return False
    cut = damage in ("empty", "half", "a tenth")
    texts = ("null", "a list", "nested 100,000 deep", "a number of 5,000 digits")
    return (cut and file.name.startswith(("resumed", "failed"))) or (
        file.parts[0] == "code" and (cut or damage in texts)
    )


def _campaign(stage: Path, out: Path, most: int | None) -> list[str]:
    cases = [
        (kind, file, damage)
        for kind, folder in (("run", "run"), ("package", "ACME"))
        for file, damage in product(_files(stage / folder), DAMAGES)
    ]
    assert len(cases) >= 440
    cases = [case for case in cases if not _is_whole(*case)]
    chosen = cases if most is None else random.Random(44).sample(cases, most)
    return [
        f"{kind} {file}: {damage}: {sorted(found)}"
        for n, (kind, file, damage) in enumerate(chosen)
        if _is_silent(kind, found := _try(stage, kind, file, damage, out / str(n)))
    ]


@pytest.mark.timeout(240)
def test_a_sample_of_damaged_files_is_named(stage: Path, tmp_path: Path) -> None:
    assert _campaign(stage, tmp_path, SAMPLE) == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_damaged_file_is_named(stage: Path, tmp_path: Path) -> None:
    assert _campaign(stage, tmp_path, None) == []
