"""Finds templates of a chain: HHsearch's hits in the PDB, filtered, best first, laid on the chain's residues.

AlphaFold 2's supplement 1.2.3. A hit whose sequence differs from its entry's is realigned, here by `clusters.align`;
the reference runs the program kalign.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.alignment_files import read_text
from mlhpc.workloads.openfold.clusters import find_alignment
from mlhpc.workloads.openfold.features import SHUFFLED_TEMPLATES
from mlhpc.workloads.openfold.mmcif import Chain, Entry
from mlhpc.workloads.openfold.public.chains import ChainRecord
from mlhpc.workloads.openfold.public.structures import Structures

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
