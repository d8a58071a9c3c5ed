"""Reads one protein chain from an mmCIF file and renders one: the first model, heavy atoms of the twenty amino acids.

It reads ``_entity_poly_seq`` or ``_pdbx_poly_seq_scheme`` for the sequence (so that residues without atoms keep their place)
and ``_atom_site``. Alternative locations: the one with the highest occupancy. MSE counts as MET. Errors name file and line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from suite.errors import InputError
from workloads.openfold import residues

MODIFIED = {"MSE": "MET"}  # the modified residue OpenFold reads as its parent
_RENAMED_ATOMS = {("MSE", "SE"): "SD"}
REQUIRED = ("label_atom_id", "label_comp_id", "label_asym_id", "label_seq_id", "Cartn_x", "Cartn_y", "Cartn_z")
_RESIDUE_OF = {name: number for number, name in enumerate(residues.NAMES)}


@dataclass(frozen=True)
class Chain:
    """Sequence and heavy atoms; unknown atoms are masked and zero. ``name`` is the author's name of the chain, if present."""

    name: str
    aatype: NDArray[np.int8]  # (L,)
    residue_index: NDArray[np.int32]  # (L,): place in the sequence from 0
    atoms: NDArray[np.float32]  # (L, 14, 3), angstrom
    atom_mask: NDArray[np.int8]  # (L, 14)


@dataclass(frozen=True)
class _Row:
    line: int
    values: dict[str, str]


def read_chain(path: Path, name: str | None = None) -> Chain:
    """Read a chain by its author or label name, by default the first with amino acids. InputError names file and line."""
    tables = _tables(path)
    sites = tables.get("_atom_site", [])
    if not sites:
        raise InputError(f"{path}: line 1: no _atom_site loop: not an mmCIF file of a structure")
    missing = [key for key in REQUIRED if key not in sites[0].values]
    if missing:
        raise InputError(f"{path}: line {sites[0].line}: _atom_site has no {missing[0]}")
    label = _choose(path, sites, name)
    atom_rows = [
        row for row in sites if row.values["label_asym_id"] == label and row.values["label_seq_id"] not in ".?"
    ]
    model = atom_rows[0].values.get("pdbx_PDB_model_num")
    atom_rows = [row for row in atom_rows if row.values.get("pdbx_PDB_model_num") == model]
    sequence = _sequence(path, tables, label, atom_rows)
    aatype = np.array([_residue(each) for each in sequence], np.int8)
    atoms = np.zeros((len(sequence), residues.ATOMS, 3), np.float32)
    occupancy = np.full((len(sequence), residues.ATOMS), -1.0)
    for row in atom_rows:
        position, atom = _position(path, row, sequence), _atom(row)
        slots = residues.ATOM_NAMES[aatype[position]]
        if not atom or atom not in slots:
            continue  # hydrogens, terminal oxygens
        share = _number(path, row, "occupancy") if "occupancy" in row.values else 1.0
        slot = slots.index(atom)
        if share > occupancy[position, slot]:
            occupancy[position, slot] = share
            atoms[position, slot] = [_number(path, row, f"Cartn_{axis}") for axis in "xyz"]
    mask = (occupancy >= 0).astype(np.int8)
    return Chain(
        atom_rows[0].values.get("auth_asym_id", label), aatype, np.arange(len(sequence), dtype=np.int32), atoms, mask
    )


def mmcif_text(name: str, aatype: NDArray[np.int8], atoms: NDArray[np.float32], atom_mask: NDArray[np.int8]) -> str:
    """Render one chain, named A, as mmCIF that `read_chain` can read."""
    names = [residues.NAMES[each] if each < residues.UNKNOWN else "UNK" for each in aatype.tolist()]
    lines = [
        f"data_{name}",
        "#",
        "loop_",
        "_entity_poly_seq.entity_id",
        "_entity_poly_seq.num",
        "_entity_poly_seq.mon_id",
    ]
    lines += [f"1 {position} {each}" for position, each in enumerate(names, start=1)]
    columns = (
        "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id label_seq_id "
        "Cartn_x Cartn_y Cartn_z occupancy auth_asym_id pdbx_PDB_model_num"
    )
    lines += ["#", "loop_", *(f"_atom_site.{column}" for column in columns.split())]
    serial = 0
    for position, residue in enumerate(aatype.tolist()):
        for slot in np.flatnonzero(atom_mask[position]).tolist():
            serial += 1
            atom = residues.ATOM_NAMES[residue][slot]
            x, y, z = atoms[position, slot].tolist()
            lines.append(
                f"ATOM {serial} {atom[0]} {atom} . {names[position]} A 1 {position + 1} {x:.3f} {y:.3f} {z:.3f} 1.00 A 1"
            )
    return "\n".join([*lines, "#"]) + "\n"


def _choose(path: Path, sites: list[_Row], name: str | None) -> str:
    """Find the label of the requested chain."""
    for row in sites:
        values = row.values
        if values["label_seq_id"] in ".?" or _residue(values["label_comp_id"]) == residues.UNKNOWN:
            continue
        if name is None or name in (values.get("auth_asym_id"), values["label_asym_id"]):
            return values["label_asym_id"]
    raise InputError(f"{path}: line {sites[0].line}: no chain{f' {name!r}' if name else ''} of amino acids")


def _sequence(path: Path, tables: dict[str, list[_Row]], label: str, atom_rows: list[_Row]) -> list[str]:
    """Read the residue names in order, from the polymer tables if the file has any, else from the atoms."""
    entity = atom_rows[0].values.get("label_entity_id")
    scheme = [row for row in tables.get("_pdbx_poly_seq_scheme", []) if row.values.get("asym_id") == label]
    names = {_whole(path, row, "seq_id"): row.values.get("mon_id", "") for row in scheme}
    if not names:
        rows = [row for row in tables.get("_entity_poly_seq", []) if row.values.get("entity_id") == entity]
        names = {_whole(path, row, "num"): row.values.get("mon_id", "") for row in rows}
    if not names:
        names = {_whole(path, row, "label_seq_id"): row.values["label_comp_id"] for row in atom_rows}
    if min(names) < 1:
        raise InputError(f"{path}: line {atom_rows[0].line}: residue number {min(names)}: expected numbers from 1")
    return [names.get(position, "UNK") for position in range(1, max(names) + 1)]


def _position(path: Path, row: _Row, sequence: list[str]) -> int:
    position = _whole(path, row, "label_seq_id") - 1
    if not 0 <= position < len(sequence):
        raise InputError(f"{path}: line {row.line}: residue {position + 1} of a sequence of {len(sequence)}")
    return position


def _atom(row: _Row) -> str:
    atom = row.values["label_atom_id"]
    return _RENAMED_ATOMS.get((row.values["label_comp_id"], atom), atom)


def _residue(name: str) -> int:
    return _RESIDUE_OF.get(MODIFIED.get(name, name), residues.UNKNOWN)


def _number(path: Path, row: _Row, key: str) -> float:
    try:
        value = float(row.values[key])
    except ValueError:
        raise InputError(f"{path}: line {row.line}: {key} is {row.values[key]!r}, expected a number") from None
    if not np.isfinite(value):
        raise InputError(f"{path}: line {row.line}: {key} is {row.values[key]!r}, expected a finite number")
    return value


def _whole(path: Path, row: _Row, key: str) -> int:
    try:
        return int(row.values.get(key, ""))
    except ValueError:
        raise InputError(
            f"{path}: line {row.line}: {key} is {row.values.get(key)!r}, expected a whole number"
        ) from None


WANTED = ("_atom_site", "_entity_poly_seq", "_pdbx_poly_seq_scheme")


def _tables(path: Path) -> dict[str, list[_Row]]:
    """Read the loops of the `WANTED` categories."""
    tables: dict[str, list[_Row]] = {}
    tokens = list(_tokens(path))
    position = 0
    while position < len(tokens):
        line, token, quoted = tokens[position]
        if quoted or token.lower() != "loop_":
            position += 1
            continue
        position += 1
        keys: list[str] = []
        while position < len(tokens) and _is_name(tokens[position]):
            keys.append(tokens[position][1])
            position += 1
        begin = position
        while position < len(tokens) and not _ends_loop(tokens[position]):
            position += 1
        category = keys[0].partition(".")[0] if keys else ""
        if category not in WANTED:
            continue
        names = [key.partition(".")[2] for key in keys]
        if (position - begin) % len(names):
            last = tokens[position - 1][0]
            raise InputError(
                f"{path}: line {last}: the {category} loop from line {line} has {position - begin} values, "
                f"not rows of {len(names)}: broken or cut off"
            )
        tables[category] = [
            _Row(tokens[at][0], dict(zip(names, (token[1] for token in tokens[at : at + len(names)]), strict=True)))
            for at in range(begin, position, len(names))
        ]
    return tables


def _is_name(token: tuple[int, str, bool]) -> bool:
    return not token[2] and token[1].startswith("_")


def _ends_loop(token: tuple[int, str, bool]) -> bool:
    return not token[2] and token[1].lower().startswith(("_", "loop_", "data_", "save_"))


def _tokens(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, quoted) of every value: words, quotes that end before white space, text between semicolons."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    number = 0
    while number < len(lines):
        text, number = lines[number], number + 1
        if text.startswith(";"):
            begin, field = number, [text[1:]]
            while number < len(lines) and not lines[number].startswith(";"):
                field.append(lines[number])
                number += 1
            if number == len(lines):
                raise InputError(f"{path}: line {begin}: text field without its closing semicolon")
            yield begin, "\n".join(field), True
            text, number = lines[number][1:], number + 1
        if "'" not in text and '"' not in text and "#" not in text:
            for word in text.split():
                yield number, word, False
            continue
        yield from _quoted(path, text, number)


def _quoted(path: Path, text: str, number: int) -> Iterator[tuple[int, str, bool]]:
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text[at] == "#":
            return
        elif text[at] in "'\"":
            end = at + 1
            while end < len(text) and not (text[end] == text[at] and (end + 1 == len(text) or text[end + 1].isspace())):
                end += 1
            if end == len(text):
                raise InputError(f"{path}: line {number}: quote {text[at:][:20]!r} does not end")
            yield number, text[at + 1 : end], True
            at = end + 1
        else:
            end = at
            while end < len(text) and not text[end].isspace():
                end += 1
            yield number, text[at:end], False
            at = end
