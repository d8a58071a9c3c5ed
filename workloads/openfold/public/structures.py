"""Reads structures of the Protein Data Bank: mmCIF files, or the dictionaries that the benchmark makes of them.

A pickle can name any function and so run a program. The unpickler here rejects every name: the dictionaries need none.

Finds templates of a chain: HHsearch's hits in the PDB, filtered, best first, laid on the chain's residues.

AlphaFold 2's supplement 1.2.3. A hit whose sequence differs from its entry's is realigned, here by `clusters.align`;
the reference runs the program kalign.

Alignments and template hits of chains: OpenProteinSet's folders, or the benchmark's concatenation of them.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.data.pickles import PlainUnpickler, explain_damage
from mlhpc.suite.errors import InputError
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.clusters import find_alignment
from mlhpc.workloads.openfold.features import SHUFFLED_TEMPLATES
from mlhpc.workloads.openfold.mmcif import Chain, Entry, read_entry, read_text
from mlhpc.workloads.openfold.public.selection import ChainRecord

MOST_CACHED_ENTRIES = 64  # templates recur
MOST_CACHED_GROUPS = 4  # a file of dictionaries has some 200 entries

# the 37 names that a heavy atom of a chain can have, in AlphaFold's order
ATOMS_37 = (
    *("N", "CA", "C", "CB", "O", "CG", "CG1", "CG2", "OG", "OG1", "SG", "CD", "CD1", "CD2", "ND1", "ND2", "OD1", "OD2"),
    *("SD", "CE", "CE1", "CE2", "CE3", "NE", "NE1", "NE2", "OE1", "OE2", "CH2", "NH1", "NH2", "OH", "CZ", "CZ2"),
    *("CZ3", "NZ", "OXT"),
)


class Structures(Protocol):
    """Entries by identifier."""

    def entry(self, name: str) -> Entry:
        """Read an entry. InputError if it is absent or damaged."""
        ...


def list_mmcif_files(folder: Path) -> list[Path]:
    """List the ``<id>.cif.gz`` in a folder and in its folders. InputError if there is none.

    The order is that of the benchmark's table: by the two middle letters, then by name.
    """
    files = [*folder.glob("*.cif.gz"), *folder.glob("*/*.cif.gz")]
    if not files:
        raise InputError(f"{folder}: no *.cif.gz file in it or in a folder of it")
    return sorted(files, key=lambda path: (_group(path.name), path.name))


class MmcifFiles:
    """The files of `list_mmcif_files`."""

    def __init__(self, folder: Path, paths: Sequence[Path]) -> None:
        self._folder = folder
        self._by_name = {path.name.partition(".")[0]: path for path in paths}
        self._read = lru_cache(MOST_CACHED_ENTRIES)(read_entry)

    def entry(self, name: str) -> Entry:
        """Read an entry. InputError if it is absent or damaged."""
        if name not in self._by_name:
            raise InputError(f"{self._folder}: no {name}.cif.gz")
        return self._read(self._by_name[name])


class PickleFiles:
    """The benchmark's ``dicts`` folder: a pickle for each pair of middle letters of an identifier."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups = lru_cache(MOST_CACHED_GROUPS)(self._read_group)
        self._read = lru_cache(MOST_CACHED_ENTRIES)(self._read_entry)

    def entry(self, name: str) -> Entry:
        """Read an entry. InputError if it is absent or damaged."""
        return self._read(name)

    def _read_group(self, group: str) -> Mapping[str, Any]:
        path = self._folder / group
        try:
            content = PlainUnpickler(path.read_bytes()).load()
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        except Exception as error:  # a damaged pickle can raise any exception
            raise InputError(f"{path}: not a pickle of plain data: {explain_damage(error)}") from None
        if not isinstance(content, dict):
            raise InputError(f"{path}: holds a {type(content).__name__}, expected a dictionary of entries")
        return content

    def _read_entry(self, name: str) -> Entry:
        group = self._groups(_group(name))
        if name not in group:
            raise InputError(f"{self._folder / _group(name)}: no entry {name}")
        try:
            return _entry(group[name])
        except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
            raise InputError(f"{self._folder / _group(name)}: entry {name} is damaged: {error!r}") from None


def _group(name: str) -> str:
    return name[1:3]


def _entry(content: Mapping[str, Any]) -> Entry:
    labels: dict[str, list[str]] = defaultdict(list)
    for label, author in content["mmcif_chain_id_to_author_chain_id"].items():
        labels[author].append(label)
    chains = []
    for name, sequence in content["sequences"].items():
        aatype = residues.encode(sequence)
        stored = content["atoms"][name]
        wide = _array(stored["all_atom_positions"], np.float32).reshape(len(aatype), len(ATOMS_37), 3)
        known = _array(stored["all_atom_mask"], np.bool_).reshape(len(aatype), len(ATOMS_37))
        mask = _HAS_SLOT[aatype] & np.take_along_axis(known, SLOTS_37[aatype], 1)
        atoms = np.take_along_axis(wide, SLOTS_37[aatype][..., None], 1) * mask[..., None]
        place = np.arange(len(aatype), dtype=np.int32)
        chains.append(Chain(name, "", tuple(labels[name]), "", aatype, place, atoms, mask.astype(np.int8)))
    return Entry(content["pdb_id"], content["release_date"], float(content["resolution"]), tuple(chains))


def _array(stored: tuple[bytes, tuple[int, ...]], kind: type[np.generic]) -> NDArray[Any]:
    content, shape = stored
    return np.frombuffer(zlib.decompress(content), kind).reshape(shape)


# (21, 14): positions among the 37; 0 where there is no atom, which _HAS_SLOT masks
SLOTS_37 = np.array([[ATOMS_37.index(name) if name else 0 for name in names] for names in residues.ATOM_NAMES])
_HAS_SLOT = residues.ATOM_MASK > 0


LEAST_AGE = timedelta(days=60)  # than the chain
DUPLICATE_SHARE = 0.95  # a template that is a piece of the chain longer than this shows the answer
LEAST_ALIGNED = 0.1  # of the chain
LEAST_RESIDUES = 10
LEAST_ATOMS = 5
FARTHEST_NEIGHBOURS = 150.0  # angstrom between CA atoms
LEAST_IDENTITY = 0.9  # of a hit with its entry
NAME = re.compile(r"([a-zA-Z\d]{4})_([a-zA-Z0-9.]+)")
SUMMARY = re.compile(r"Aligned_cols=\s*(\d+).*Sum_probs=\s*([\d.]+)")
ALIGNED = re.compile(r"\s*(\d+) ([A-Z-]+)\s*(\d+) \(\d+\)")
NAME_COLUMNS = 17  # "Q " or "T ", then the name
NOT_SEQUENCES = ("ss_dssp", "ss_pred", "ss_conf", "Consensus")

Template = tuple[
    NDArray[np.int8], NDArray[np.float32], NDArray[np.int8]
]  # types, atoms and mask of the chain's residues


@dataclass(frozen=True)
class Hit:
    """One paragraph of an hhr file; the sequences have gaps, the places are 0-based."""

    entry: str
    chain: str
    aligned_columns: int
    sum_probs: float
    query: str
    template: str
    query_begin: int
    template_begin: int

    @property
    def residues(self) -> str:
        """Return the template's residues without gaps."""
        return self.template.replace("-", "")


@dataclass(frozen=True)
class Library:
    """Possible templates: all chains of the PDB, release dates by entry, new names of obsolete entries."""

    chains: frozenset[str]
    release_dates: Mapping[str, str]
    successors: Mapping[str, str]
    structures: Structures

    @classmethod
    def of(cls, records: Sequence[ChainRecord], obsolete: Path | None, structures: Structures) -> Library:
        """Make the library of a table of chains and, if there is one, the PDB's file of obsolete entries."""
        days = {record.entry: record.release_date for record in records}
        return cls(frozenset(r.name for r in records), days, read_obsolete(obsolete) if obsolete else {}, structures)

    def entry_of(self, hit: Hit) -> str:
        """Return the present identifier of the hit's entry."""
        return hit.entry if hit.entry in self.release_dates else self.successors.get(hit.entry, hit.entry)


def read_obsolete(path: Path) -> dict[str, str]:
    """Read ``obsolete.dat``: identifier to its replacement, in lower case. Entries without one are left out."""
    lines = (line.split() for line in read_text(path).splitlines() if line.startswith("OBSLTE"))
    return {words[2].lower(): words[3].lower() for words in lines if len(words) > 3}


def read_hits(text: str, where: str) -> list[Hit]:
    """Read the hits of an hhr file. InputError names ``where`` and line."""
    lines = text.splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("No ")]
    return [_hit(lines[begin:end], f"{where}: line {begin + 1}") for begin, end in pairwise([*begins, len(lines)])]


def _hit(lines: list[str], where: str) -> Hit:
    if len(lines) < 3:
        raise InputError(f"{where}: the hit is cut off")
    name, summary = NAME.match(lines[1].removeprefix(">")), SUMMARY.search(lines[2])
    if name is None or summary is None:
        raise InputError(f"{where}: expected a hit's name like >1abc_A and its Aligned_cols and Sum_probs")
    texts, begins = {"Q ": "", "T ": ""}, {"Q ": 0, "T ": 0}
    for line in lines[3:]:
        side = line[:2]
        if side not in texts or line[2:].startswith(NOT_SEQUENCES):
            continue
        row = ALIGNED.match(line[NAME_COLUMNS:])
        if row is None:
            raise InputError(f"{where}: not a row of an alignment: {line[:60]!r}")
        if not texts[side]:
            begins[side] = int(row[1]) - 1
        texts[side] += row[2]
    if len(texts["Q "]) != len(texts["T "]):
        raise InputError(f"{where}: the aligned sequences have {len(texts['Q '])} and {len(texts['T '])} columns")
    return Hit(
        name[1].lower(),
        name[2],
        int(summary[1]),
        float(summary[2]),
        texts["Q "],
        texts["T "],
        begins["Q "],
        begins["T "],
    )


def is_acceptable(hit: Hit, record: ChainRecord, library: Library) -> bool:
    """Check whether a hit may be a template.

    It must be in another, older entry, and cover the chain without being a copy.
    """
    entry = library.entry_of(hit)
    latest = date.fromisoformat(record.release_date) - LEAST_AGE
    copied = hit.residues in record.sequence and len(hit.residues) / len(record.sequence) > DUPLICATE_SHARE
    return (
        f"{entry}_{hit.chain}" in library.chains
        and entry != record.entry
        and library.release_dates[entry] <= latest.isoformat()
        and hit.aligned_columns / len(record.sequence) > LEAST_ALIGNED
        and not copied
        and len(hit.residues) >= LEAST_RESIDUES
    )


def find_templates(text: str, where: str, record: ChainRecord, library: Library, needed: int) -> list[Template]:
    """Find templates in an hhr file, best first.

    Of the 20 best acceptable hits all that fit are taken, of later ones until there are ``needed``.
    """
    hits = [hit for hit in read_hits(text, where) if is_acceptable(hit, record, library)]
    # stable: equally probable hits keep the file's order
    hits.sort(key=lambda hit: -hit.sum_probs)
    found: list[Template] = []
    for number, hit in enumerate(hits):
        if number >= SHUFFLED_TEMPLATES and len(found) >= needed:
            break
        template = build_template(hit, record.sequence, library.structures.entry(library.entry_of(hit)))
        if template is not None:
            found.append(template)
    return found


def build_template(hit: Hit, sequence: str, entry: Entry) -> Template | None:
    """Lay a hit's structure, centred at the origin, on a chain's residues. None if the entry lacks chain or atoms."""
    places = _places(hit, sequence)
    located = _locate(hit, entry)
    letters = residues.encode_aligned(hit.residues.encode())
    if located is None:
        realigned = _realign(hit, entry)
        if realigned is None:
            return None
        chain, new_place = realigned
        letters = residues.encode_aligned(residues.decode(chain.aatype).encode())
        places = {mine: new_place[theirs] for mine, theirs in places.items() if theirs in new_place}
        offset = 0
    else:
        chain, offset = located
    if not places or _has_jump(chain):
        return None
    mine, theirs = (np.array(each) for each in zip(*places.items(), strict=True))
    types = np.full(len(sequence), residues.GAP, np.int8)
    atoms = np.zeros((len(sequence), residues.ATOMS, 3), np.float32)
    mask = np.zeros((len(sequence), residues.ATOMS), np.int8)
    types[mine], mask[mine] = letters[theirs], chain.atom_mask[theirs + offset]
    known = chain.atom_mask > 0
    if not known.any() or mask.sum() < LEAST_ATOMS:
        return None
    centred = (chain.atoms - chain.atoms[known].mean(0)) * known[..., None]
    atoms[mine] = centred[theirs + offset]
    return types, atoms, mask


def _places(hit: Hit, sequence: str) -> dict[int, int]:
    """Map places in the chain to places in the hit's residues, where both are aligned."""
    begin = sequence.find(hit.query.replace("-", ""))
    if begin < 0:
        return {}
    mine, theirs, places = begin, 0, {}
    for one, other in zip(hit.query, hit.template, strict=True):
        if one != "-" and other != "-":
            places[mine] = theirs
        mine += one != "-"
        theirs += other != "-"
    return places


def _locate(hit: Hit, entry: Entry) -> tuple[Chain, int] | None:
    """Find the hit's residues in its chain, else in another chain of the entry.

    If neither has them, find a chain where X stands for any residue.
    """
    named = [chain for chain in entry.chains if chain.name == hit.chain]
    for chain in [*named, *entry.chains]:
        begin = residues.decode(chain.aatype).find(hit.residues)
        if begin >= 0:
            return chain, begin
    pattern = re.compile("".join("." if letter == "X" else f"[{letter}X]" for letter in hit.residues))
    for chain in entry.chains:
        match = pattern.search(residues.decode(chain.aatype))
        if match is not None:
            return chain, match.start()
    return None


def _realign(hit: Hit, entry: Entry) -> tuple[Chain, dict[int, int]] | None:
    """Align the hit's residues with those of its chain (or the entry's only one). None below 90 % identity."""
    named = [chain for chain in entry.chains if chain.name == hit.chain]
    chains = named or (entry.chains if len(entry.chains) == 1 else ())
    if not chains:
        return None
    old = residues.encode_aligned(hit.residues.encode())
    new = residues.encode_aligned(residues.decode(chains[0].aatype).encode())
    pairs = find_alignment(old, new)
    same = int((old[pairs[:, 0]] == new[pairs[:, 1]]).sum())
    if same / min(len(old), len(new)) < LEAST_IDENTITY:
        return None
    return chains[0], dict(pairs.tolist())


def _has_jump(chain: Chain) -> bool:
    """Tell whether neighbours with known CA atoms are impossibly far apart."""
    known = chain.atom_mask[:, residues.CA] > 0
    steps = np.linalg.norm(np.diff(chain.atoms[:, residues.CA], axis=0), axis=-1)
    return bool((steps[known[1:] & known[:-1]] > FARTHEST_NEIGHBOURS).any())


DATABASES = ("uniref90_hits.a3m", "bfd_uniclust_hits.a3m", "mgnify_hits.a3m")  # merged in this order
TEMPLATE_HITS = "pdb70_hits.hhr"


class Alignments(Protocol):
    """Texts by chain, ``<id>_<author's name>``."""

    @property
    def chains(self) -> Collection[str]:
        """Return the chains that have alignments."""
        ...

    def read(self, chain: str) -> dict[str, str]:
        """Read the files of a chain, by name. InputError if one is damaged."""
        ...


def list_alignment_folders(folder: Path, duplicates: Path | None) -> dict[str, str]:
    """Map each chain to the name of its folder. Chains of one sequence share one (``duplicate_pdb_chains.txt``)."""
    # The listing itself says which entries are folders. Path.is_dir would ask about each of some 130,000.
    with os.scandir(folder) as entries:
        own = {entry.name for entry in entries if entry.is_dir()}
    folders = {name: name for name in own}
    for line in read_text(duplicates).splitlines() if duplicates else ():
        names = line.split()
        holder = next((name for name in names if name in own), None)
        if holder is not None:
            folders |= {name: name if name in own else holder for name in names}
    return folders


class AlignmentFolders:
    """``pdb/<id>_<chain>/a3m/*.a3m`` and ``hhr/*.hhr``, with the folders of `list_alignment_folders`."""

    def __init__(self, folder: Path, folders: Mapping[str, str]) -> None:
        self._folder, self._folders = folder, folders

    @property
    def chains(self) -> Collection[str]:
        """Return the chains that have alignments."""
        return self._folders.keys()

    def read(self, chain: str) -> dict[str, str]:
        """Read the files of a chain, by name. InputError if one cannot be read."""
        return {path.name: read_text(path) for path in sorted((self._folder / self._folders[chain]).glob("*/*"))}


class AlignmentDatabase:
    """``super.index`` (JSON: chain to ``{db, files: [[name, start, size], ...]}``) and the ``*.db`` files in the same
    folder.
    """

    def __init__(self, index: Path) -> None:
        self._folder = index.parent
        self._path = index
        try:
            self._index: Mapping[str, Any] = json.loads(read_text(index))
        except json.JSONDecodeError as error:
            raise InputError(f"{index}: not JSON: {error}") from None
        if not isinstance(self._index, dict):
            raise InputError(f"{index}: expected a JSON object of chains")

    @property
    def chains(self) -> Collection[str]:
        """Return the chains that have alignments."""
        return self._index.keys()

    def read(self, chain: str) -> dict[str, str]:
        """Read the files of a chain, by name. InputError if the index and its file do not fit."""
        try:
            # the file lies in the index's folder, whatever folder the index states
            path = self._folder / Path(self._index[chain]["db"]).name
            pieces = [(str(name), int(start), int(size)) for name, start, size in self._index[chain]["files"]]
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{self._path}: chain {chain}: expected db and files: [[name, start, size], ...]"
            ) from None
        texts = {}
        try:
            with path.open("rb") as file:
                length = os.fstat(file.fileno()).st_size
                for name, start, size in pieces:
                    if not 0 <= start <= start + size <= length:  # read() takes the memory before it looks
                        raise InputError(f"{path}: {name} of {chain} ends beyond the file: cut off")
                    file.seek(start)
                    texts[name] = file.read(size).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from None
        return texts
