"""Reads FASTA and A3M files to residue types, and merges alignments of one chain. Errors name file and line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError
from mlhpc.workloads.openfold import residues

MOST_DELETIONS = 255
LOWER_CASE = (ord("a"), ord("z"))

Alignment = tuple[NDArray[np.int8], NDArray[np.uint8]]


def read_text(path: Path) -> str:
    """Read a whole text file. InputError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def read_fasta(path: Path) -> list[tuple[str, str]]:
    """Read names and sequences, at least one."""
    records = [(name, text) for name, text, _ in _records(read_text(path), str(path))]
    if not records:
        raise InputError(f"{path}: line 1: no sequence in it; expected '>' and a name")
    return records


def read_a3m(path: Path) -> Alignment:
    """Read rows (M, L) of residue types, the query first, and the number of letters inserted before each column.

    Lower-case letters are insertions. InputError if rows have different numbers of columns.
    """
    return merge([(str(path), read_text(path))])


def merge(files: Sequence[tuple[str, str]]) -> Alignment:
    """Merge (name, text) pairs of A3M alignments of one chain. A row equal to an earlier one is left out.

    The first row is the query. Insertions do not distinguish rows. InputError, which uses the name, if rows have
    different numbers of columns.
    """
    rows: list[NDArray[np.int8]] = []
    deletions: list[NDArray[np.uint8]] = []
    seen: set[bytes] = set()
    width, first = 0, ""
    for where, text in files:
        number = 0
        for name, row, line in _records(text, where):
            number += 1
            letters = np.frombuffer(row.encode("utf-8"), np.uint8)
            places = np.flatnonzero((letters < LOWER_CASE[0]) | (letters > LOWER_CASE[1]))
            columns = letters[places].tobytes()
            if not rows:
                width, first = len(columns), name
                _check_query(columns, where, first)
            elif len(columns) != width:
                raise InputError(
                    f"{where}: line {line}: row {number} ({name}) has {len(columns)} columns, "
                    f"row 1 ({first}) has {width}"
                )
            if columns in seen:
                continue
            # `columns` lacks the insertions, so rows that differ only there count as equal
            seen.add(columns)
            try:
                rows.append(residues.encode_aligned(columns))
            except ValueError as error:
                raise InputError(f"{where}: line {line}: {error}") from None
            # the letters skipped between two columns
            inserted = np.diff(places, prepend=-1) - 1
            deletions.append(np.minimum(inserted, MOST_DELETIONS).astype(np.uint8))
        if number == 0:
            raise InputError(f"{where}: line 1: no row in it; expected '>' and a name")
    return np.stack(rows), np.stack(deletions)


def _check_query(columns: bytes, where: str, name: str) -> None:
    if not columns:
        raise InputError(f"{where}: line 1: row 1 ({name}) is empty")
    if b"-" in columns:
        raise InputError(f"{where}: line 1: row 1 ({name}) is the chain itself and cannot have gaps")


def _records(text: str, where: str) -> Iterator[tuple[str, str, int]]:
    """Yield name, sequence and line number of the name."""
    name, line, parts = None, 0, list[str]()
    for number, content in enumerate(text.splitlines(), start=1):
        if content.startswith(">"):
            if name is not None:
                yield name, "".join(parts), line
            name, line, parts = (content[1:].split() or [""])[0], number, []
        elif content.strip() and not content.startswith("#"):
            if name is None:
                raise InputError(f"{where}: line {number}: expected '>' and a name before {content[:20]!r}")
            parts.append(content.strip())
    if name is not None:
        yield name, "".join(parts), line
