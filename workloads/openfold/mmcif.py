"""Reads the protein chains of an mmCIF file: the first model, heavy atoms of the twenty amino acids.

The sequence comes from ``_entity_poly_seq`` or ``_pdbx_poly_seq_scheme``, so that residues without atoms keep their
position; atoms come from ``_atom_site``. Of alternative locations the one with the highest occupancy counts. MSE counts
as MET, another modified residue as the parent in ``_pdbx_struct_mod_residue``. gemmi parses the file; an error names
the file and the row of a table.

Reads FASTA and A3M files to residue types, and merges alignments of one chain. Errors name file and line.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError, explain_not_installed
from mlhpc.workloads.openfold import residues

MODIFIED = {"MSE": "MET"}  # the modified residue OpenFold reads as its parent
_RENAMED_ATOMS = {("MSE", "SE"): "SD"}
REQUIRED = ("label_atom_id", "label_comp_id", "label_asym_id", "label_seq_id", "Cartn_x", "Cartn_y", "Cartn_z")
RESOLUTIONS = (  # of X-ray and neutron refinement, of a map, of the data: the first table that the file has
    ("_refine", "ls_d_res_high"),
    ("_em_3d_reconstruction", "resolution"),
    ("_reflns", "d_resolution_high"),
)
WANTED = (
    *("_entry", "_atom_site", "_entity_poly_seq", "_pdbx_poly_seq_scheme", "_pdbx_struct_mod_residue"),
    *("_pdbx_audit_revision_history", *(category for category, _ in RESOLUTIONS)),
)
_RESIDUE_OF = {name: number for number, name in enumerate(residues.NAMES)}

UNSET = (".", "?")  # not applicable, unknown


@dataclass(frozen=True)
class Row:
    """One row of a table: item names without the category to texts. ``place`` names it in errors."""

    place: str
    values: dict[str, str]


Tables = Mapping[str, list[Row]]


@dataclass(frozen=True)
class Chain:
    """Sequence and heavy atoms of a chain; unknown atoms are masked and zero. ``name``: the author's, if present."""

    name: str
    label: str  # the file's own name of it
    labels: tuple[str, ...]  # and of all that the author calls ``name``: water and ligands too
    entity: str  # number of the molecule in its file
    aatype: NDArray[np.int8]  # (L,)
    residue_index: NDArray[np.int32]  # (L,): place in the sequence from 0
    atoms: NDArray[np.float32]  # (L, 14, 3), angstrom
    atom_mask: NDArray[np.int8]  # (L, 14)


@dataclass(frozen=True)
class Entry:
    """One file: identifier in lower case ("" if absent), first release, resolution, protein chains with atoms."""

    name: str
    release_date: str | None  # YYYY-MM-DD
    resolution: float  # angstrom; nan: none is stated, as for NMR
    chains: tuple[Chain, ...]

    def find(self, name: str | None = None) -> Chain | None:
        """Find a chain by its author's name, else by the file's own label; without a name the first. None if absent."""
        by_author = (each for each in self.chains if name in (None, each.name))
        return next(by_author, next((each for each in self.chains if each.label == name), None))


def read_chain(path: Path, name: str | None = None) -> tuple[Entry, Chain]:
    """Read a chain by its author's name, else by its label; by default the first. InputError names file and row."""
    entry = read_entry(path)
    chain = entry.find(name)
    if chain is None:
        there = ", ".join(each.name for each in entry.chains) or "none"
        raise InputError(f"{path}: no chain{f' {name!r}' if name else ''} of amino acids; chains: {there}")
    return entry, chain


def read_entry(path: Path) -> Entry:
    """Read all protein chains of a file, in the order of its molecules. InputError names file and row."""
    tables = _read_tables(path)
    sites = tables.get("_atom_site", [])
    if not sites:
        raise InputError(f"{path}: no _atom_site loop: not an mmCIF file of a structure")
    missing = [key for key in REQUIRED if key not in sites[0].values]
    if missing:
        raise InputError(f"{path}: _atom_site has no {missing[0]}")
    parents = MODIFIED | {
        row.values["label_comp_id"]: row.values["parent_comp_id"]
        for row in tables.get("_pdbx_struct_mod_residue", [])
        if row.values.keys() >= {"label_comp_id", "parent_comp_id"}
    }
    chains = _chains(path, tables, sites, parents)
    # the order of the benchmark's table: entity by entity
    listed = list(dict.fromkeys(row.values.get("entity_id") for row in tables.get("_entity_poly_seq", [])))
    chains.sort(key=lambda chain: listed.index(chain.entity) if chain.entity in listed else len(listed))
    name = tables["_entry"][0].values.get("id", "") if "_entry" in tables else ""
    return Entry(name.lower(), _release_date(path, tables), _resolution(tables), tuple(chains))


def _chains(path: Path, tables: Tables, sites: list[Row], parents: Mapping[str, str]) -> list[Chain]:
    """Read the chains with at least one amino acid, in the order of their atoms."""
    polymers: dict[str, list[Row]] = {}
    labels: dict[str, dict[str, None]] = {}  # by author's name; a dict keeps the order of its keys
    for row in sites:
        label = row.values["label_asym_id"]
        labels.setdefault(row.values.get("auth_asym_id", label), {})[label] = None
        if row.values["label_seq_id"] not in UNSET:  # water and ligands have no place in a sequence
            polymers.setdefault(label, []).append(row)
    chains = []
    for label, rows in polymers.items():
        if any(_residue(row.values["label_comp_id"], parents) != residues.UNKNOWN for row in rows):
            author = rows[0].values.get("auth_asym_id", label)
            chains.append(_chain(path, tables, rows, parents, tuple(labels[author])))
    return chains


def _read_tables(path: Path) -> dict[str, list[Row]]:
    """Read the wanted categories of a file, which may be gzipped. A single item is a table of one row."""
    try:
        from gemmi import cif
    except ImportError:
        raise InputError(f"openfold: mmCIF files cannot be read: {explain_not_installed('gemmi')}") from None
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    try:
        document = cif.read_string(text)
    except ValueError as error:  # such as "string:4:0(18): unterminated text field"
        _, line, _, problem = str(error).split(":", 3)
        raise InputError(f"{path}: line {line}: {problem.strip()}") from None
    tables: dict[str, list[Row]] = {}
    for category in WANTED if len(document) else ():
        columns: dict[str, list[str | bool | None]] = document[0].get_mmcif_category(f"{category}.")
        if columns:
            # gemmi gives None for a bare ? and False for a bare dot.
            bare: dict[object, str] = {None: "?", False: "."}
            texts = [[bare.get(each, str(each)) for each in column] for column in columns.values()]
            tables[category] = [
                Row(f"{category} row {number}", dict(zip(columns, values, strict=True)))
                for number, values in enumerate(zip(*texts, strict=True), start=1)
            ]
    return tables


def _chain(path: Path, tables: Tables, rows: list[Row], parents: Mapping[str, str], labels: tuple[str, ...]) -> Chain:
    first = rows[0].values
    label, model = first["label_asym_id"], first.get("pdbx_PDB_model_num")
    rows = [row for row in rows if row.values.get("pdbx_PDB_model_num") == model]
    sequence = _sequence(path, tables, label, rows)
    aatype = np.array([_residue(each, parents) for each in sequence], np.int8)
    atoms = np.zeros((len(sequence), residues.ATOMS, 3), np.float32)
    # -1 is below any occupancy, so the first location of an atom is taken even at occupancy 0
    occupancy = np.full((len(sequence), residues.ATOMS), -1.0)
    for row in rows:
        position, atom = _position(path, row, sequence), _find_atom_name(row)
        slots = residues.ATOM_NAMES[aatype[position]]
        if not atom or atom not in slots:
            continue  # hydrogens, terminal oxygens
        share = _number(path, row, "occupancy") if "occupancy" in row.values else 1.0
        slot = slots.index(atom)
        if share > occupancy[position, slot]:
            occupancy[position, slot] = share
            atoms[position, slot] = [_number(path, row, f"Cartn_{axis}") for axis in "xyz"]
    return Chain(
        first.get("auth_asym_id", label),
        label,
        labels,
        first.get("label_entity_id", ""),
        aatype,
        np.arange(len(sequence), dtype=np.int32),
        atoms,
        (occupancy >= 0).astype(np.int8),
    )


def _sequence(path: Path, tables: Tables, label: str, atom_rows: list[Row]) -> list[str]:
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
        raise InputError(f"{path}: {atom_rows[0].place}: residue number {min(names)}: expected numbers from 1")
    # a number that the table skips is a residue that nobody named
    return [names.get(position, "UNK") for position in range(1, max(names) + 1)]


def _position(path: Path, row: Row, sequence: list[str]) -> int:
    position = _whole(path, row, "label_seq_id") - 1
    if not 0 <= position < len(sequence):
        raise InputError(f"{path}: {row.place}: residue {position + 1} of a sequence of {len(sequence)}")
    return position


def _find_atom_name(row: Row) -> str:
    atom = row.values["label_atom_id"]
    return _RENAMED_ATOMS.get((row.values["label_comp_id"], atom), atom)


def _residue(name: str, parents: Mapping[str, str]) -> int:
    return _RESIDUE_OF.get(parents.get(name, name), residues.UNKNOWN)


def _release_date(path: Path, tables: Tables) -> str | None:
    """Find the earliest revision: the first release."""
    rows = tables.get("_pdbx_audit_revision_history", [])
    dates = [row.values.get("revision_date", "") for row in rows]
    for row, text in zip(rows, dates, strict=True):
        try:
            date.fromisoformat(text)
        except ValueError:
            raise InputError(f"{path}: {row.place}: revision_date is {text!r}, expected YYYY-MM-DD") from None
    return min(dates, default=None)


def _resolution(tables: Tables) -> float:
    """Find the worst resolution of the first table that states one. nan if none does."""
    for category, item in RESOLUTIONS:
        texts = [row.values[item] for row in tables.get(category, []) if item in row.values]
        if texts:
            return max((float(text) for text in texts if _is_number(text)), default=math.nan)
    return math.nan


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _number(path: Path, row: Row, key: str) -> float:
    try:
        value = float(row.values[key])
    except ValueError:
        raise InputError(f"{path}: {row.place}: {key} is {row.values[key]!r}, expected a number") from None
    if not np.isfinite(value):
        raise InputError(f"{path}: {row.place}: {key} is {row.values[key]!r}, expected a finite number")
    return value


def _whole(path: Path, row: Row, key: str) -> int:
    try:
        return int(row.values.get(key, ""))
    except ValueError:
        raise InputError(f"{path}: {row.place}: {key} is {row.values.get(key)!r}, expected a whole number") from None


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
