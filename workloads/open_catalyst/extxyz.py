"""Reads the public OC20 download: extended XYZ, compressed with xz, and a text file with one line per frame.

    80
    Lattice="..." Properties=species:S:1:pos:R:3:move_mask:L:1:tags:I:1:forces:R:3 energy=-1.0 pbc="T T T"
    Cu 0.0 0.0 0.0 0 0 0.1 0.2 0.3
    ...

The header may have ``free_energy`` in place of ``energy``. A line of the text file is ``random123,frame7,-301.5``:
system, frame, reference energy to subtract.
"""

from __future__ import annotations

import gzip
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError
from mlhpc.workloads.open_catalyst.structures import Structure

# X stands at 0, so that the position of a symbol is its atomic number
SYMBOLS = re.findall(
    "[A-Z][a-z]?",
    "XHHeLiBeBCNOFNeNaMgAlSiPSClArKCaScTiVCrMnFeCoNiCuZnGaGeAsSeBrKrRbSrYZrNbMoTcRuRhPdAgCdInSnSbTeIXeCsBaLaCePrNdPm"
    "SmEuGdTbDyHoErTmYbLuHfTaWReOsIrPtAuHgTlPbBiPoAtRnFrRaAcThPaUNpPu",
)
NUMBER_OF = {symbol: number for number, symbol in enumerate(SYMBOLS)}
SUFFIXES = (".extxyz", ".extxyz.xz", ".extxyz.gz")

# key=value, where a value with spaces is in quotes of either kind
_KEY = re.compile(r"""([^\s=]+)=(?:"([^"]*)"|'([^']*)'|(\S+))""")
_OPEN: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open, ".extxyz": open}


def read_extxyz(path: Path, *, trajectory: int) -> Iterator[Structure]:
    """Read the frames of one file. ``trajectory`` is their trajectory number if there is no text file.

    InputError names file and frame.
    """
    labels = _labels(path)
    try:
        with _OPEN[path.suffix](path, "rt", encoding="utf-8") as file:
            for index, (header, lines) in enumerate(_frames(path, file)):
                if labels is None:
                    # without a text file there is no reference energy to subtract
                    label = (trajectory, index, 0.0)
                elif index < len(labels):
                    label = labels[index]
                else:
                    raise InputError(f"{path}: structure {index}: the text file has {len(labels)} lines only")
                try:
                    yield _structure(header, lines, *label)
                except (KeyError, ValueError, IndexError) as error:
                    text = f"no {error}" if isinstance(error, KeyError) else str(error)
                    raise InputError(f"{path}: structure {index}: {text}") from None
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _frames(path: Path, file: IO[str]) -> Iterator[tuple[str, list[str]]]:
    index = 0
    while line := file.readline():
        if not line.strip():
            continue
        if not line.strip().isdigit():
            raise InputError(f"{path}: structure {index}: expected a number of atoms, found {line.strip()[:60]!r}")
        atoms = int(line)
        header = file.readline()
        lines = [file.readline() for _ in range(atoms)]
        # readline returns an empty text only at the end of the file
        if lines and not lines[-1]:
            raise InputError(f"{path}: structure {index}: the file ends inside it")
        yield header, lines
        index += 1


def _structure(header: str, lines: list[str], trajectory: int, frame: int, reference: float) -> Structure:
    # one of the three groups has matched; the others are empty
    facts = {
        key: next(value for value in values if value or values[-1] == value) for key, *values in _KEY.findall(header)
    }
    columns = _columns(facts["Properties"], lines)
    cell = np.array(facts["Lattice"].split(), dtype=np.float64).reshape(3, 3)
    species = columns["species"][:, 0].tolist()
    unknown = [symbol for symbol in species if symbol not in NUMBER_OF]
    if unknown:
        raise InputError(f"unknown element {unknown[0]!r}")
    atoms = len(species)
    energy = facts["energy"] if "energy" in facts else facts["free_energy"]
    movable = columns.get("move_mask")
    return Structure(
        position=columns["pos"].astype(np.float64),
        cell=cell,
        number=np.array([NUMBER_OF[symbol] for symbol in species], dtype=np.int64),
        tag=columns["tags"][:, 0].astype(np.int64) if "tags" in columns else np.zeros(atoms, dtype=np.int64),
        # writers differ: a letter, a number or a word
        fixed=np.zeros(atoms, bool) if movable is None else np.isin(movable[:, 0], ("F", "0", "False")),
        force=columns["forces"].astype(np.float64),
        energy=float(energy) - reference,
        trajectory=trajectory,
        frame=frame,
    )


def _columns(properties: str, lines: list[str]) -> dict[str, NDArray[Any]]:
    """Split text columns by name, as ``name:kind:count:...`` describes them."""
    parts = properties.split(":")
    if len(parts) % 3:
        raise InputError(f"Properties {properties!r} are not name:kind:count triples")
    table = [line.split() for line in lines]
    width = sum(int(count) for count in parts[2::3])
    for place, row in enumerate(table):
        if len(row) != width:
            raise InputError(f"atom {place} has {len(row)} columns, Properties say {width}")
    values = np.array(table, dtype=str).reshape(len(table), width)
    columns, begin = {}, 0
    for name, count in zip(parts[::3], map(int, parts[2::3]), strict=True):
        columns[name] = values[:, begin : begin + count]
        begin += count
    return columns


def _labels(path: Path) -> list[tuple[int, int, float]] | None:
    """Read (system, frame, reference energy) per frame from the text file next to ``path``.

    None without such a file.
    """
    stem = path.name.partition(".extxyz")[0]
    for suffix in (".txt", ".txt.xz", ".txt.gz"):
        beside = path.with_name(stem + suffix)
        if beside.exists():
            break
    else:
        return None
    opener = open if suffix == ".txt" else _OPEN[beside.suffix]
    labels = []
    with opener(beside, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            match = re.fullmatch(r"\D*(\d+),\D*(\d+),(\S+)", line.strip())
            try:
                assert match is not None
                labels.append((int(match[1]), int(match[2]), float(match[3])))
            except (AssertionError, ValueError):
                raise InputError(
                    f"{beside}:{number}: expected system,frame,reference energy, found {line.strip()[:60]!r}"
                ) from None
    return labels
