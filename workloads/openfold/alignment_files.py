"""Reads FASTA and A3M files to residue types, and renders A3M. Errors name file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from suite.errors import InputError
from workloads.openfold import residues

MOST_DELETIONS = 255


def read_fasta(path: Path) -> list[tuple[str, str]]:
    """Read names and sequences, at least one."""
    records = [(name, text) for name, text, _ in _records(path)]
    if not records:
        raise InputError(f"{path}: line 1: no sequence in it; expected '>' and a name")
    return records


def read_a3m(path: Path) -> tuple[NDArray[np.int8], NDArray[np.uint8]]:
    """Read rows (M, L) of residue types, the query first, and the number of letters inserted before each column.

    Lower-case letters are insertions. InputError if rows have different numbers of columns.
    """
    rows: list[NDArray[np.int8]] = []
    deletions: list[NDArray[np.uint8]] = []
    width, first = 0, ""
    for name, text, line in _records(path):
        columns = "".join(letter for letter in text if not letter.islower())
        if not rows:
            width, first = len(columns), name
        elif len(columns) != width:
            raise InputError(
                f"{path}: line {line}: row {len(rows) + 1} ({name}) has {len(columns)} columns, row 1 ({first}) has {width}"
            )
        try:
            rows.append(residues.encode(columns))
        except ValueError as error:
            raise InputError(f"{path}: line {line}: {error}") from None
        deletions.append(_deletions(text, width))
    if not rows:
        raise InputError(f"{path}: line 1: no row in it; expected '>' and a name")
    if width == 0:
        raise InputError(f"{path}: line 1: row 1 ({first}) is empty")
    if (rows[0] == residues.GAP).any():
        raise InputError(f"{path}: line 1: row 1 ({first}) is the chain itself and cannot have gaps")
    return np.stack(rows), np.stack(deletions)


def a3m_text(msa: NDArray[np.int8], deletions: NDArray[np.uint8], name: str) -> str:
    """Render an alignment as A3M. Inserted letters are written as 'x', because only their number is stored."""
    lines = []
    for number, (row, inserted) in enumerate(zip(msa, deletions, strict=True)):
        text = "".join(
            "x" * count + letter for letter, count in zip(residues.decode(row), inserted.tolist(), strict=True)
        )
        lines += [f">{name}" if number == 0 else f">{name}_{number}", text]
    return "\n".join(lines) + "\n"


def _records(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield name, text and line number of the name."""
    name, line, parts = None, 0, list[str]()
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    for number, text in enumerate(lines, start=1):
        if text.startswith(">"):
            if name is not None:
                yield name, "".join(parts), line
            name, line, parts = (text[1:].split() or [""])[0], number, []
        elif text.strip() and not text.startswith("#"):
            if name is None:
                raise InputError(f"{path}: line {number}: expected '>' and a name before {text[:20]!r}")
            parts.append(text.strip())
    if name is not None:
        yield name, "".join(parts), line


def _deletions(text: str, width: int) -> NDArray[np.uint8]:
    out, column, count = np.zeros(width, np.uint8), 0, 0
    for letter in text:
        if letter.islower():
            count += 1
        else:
            out[column] = min(count, MOST_DELETIONS)
            column, count = column + 1, 0
    return out
