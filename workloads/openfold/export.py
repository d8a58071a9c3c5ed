"""Writes a data set in the layout that the benchmark's reference code preprocesses the public data to, and reads.

    pdb_mmcif/processed/chains.csv, dicts/<two characters>, obsolete.dat     structures: pickles of plain dicts, and a table
    open_protein_set/processed/pdb_alignments/super.index, <number>.db       alignments, joined, and where each begins

Each chain is an entry of its own with one chain A, and so is each template. Names are made up: a digit, a letter and two
characters, as of PDB entries. Dates tell the splits apart, as they do in the public data: the reference trains on chains
released until the first day of `RELEASED`. Families are its clusters; templates are older than all chains and in no cluster.
"""

from __future__ import annotations

import csv
import json
import math
import pickle
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from suite.data.build import SPLITS, Progress
from suite.data.manifest import read_manifest
from suite.data.shards import ShardReader
from suite.errors import InputError
from suite.files import write_whole, written_whole
from workloads.openfold import residues
from workloads.openfold.alignment_files import a3m_text
from workloads.openfold.features import Protein
from workloads.openfold.public.chains import NO_CLUSTER
from workloads.openfold.public.selection import Dates
from workloads.openfold.public.structures import ATOMS_37, SLOTS_37
from workloads.openfold.shard_form import proteins_of

DATES = Dates()
RELEASED = {"train": DATES.train_max_pdb_release_date, "validation": DATES.val_min_cameo_submission_date}
TARGETS = "cameo_targets.json"  # the validation split, as if CAMEO had it; `data convert` reads this file, the reference its own
TEMPLATES_RELEASED = "2000-01-01"  # the reference takes templates 60 days older than the chain
CHAIN = "A"
STRUCTURES, ALIGNMENTS = Path("pdb_mmcif/processed"), Path("open_protein_set/processed/pdb_alignments")
COLUMNS = (
    *("pdb_chain_id", "pdb_id", "author_chain_id", "mmcif_chain_ids", "release_date", "resolution", "pdb_cluster_id"),
    *("sequence_length", "sequence"),
)
ALIGNMENT_NAME, HITS_NAME = "uniref90_hits.a3m", "pdb70_hits.hhr"
OBSOLETE = " LIST OF OBSOLETE COORDINATE ENTRIES AND SUCCESSORS\n"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
PER_DICTS = 9 * len(DIGITS)  # entries with the same two characters in the middle, which lie in one file
LETTERS = (
    "abcdfghijklmnopqrstuvwxyz"  # second characters: with a digit or an e there, tables are read with numbers for names
)
MOST_ENTRIES = PER_DICTS * len(LETTERS) * len(DIGITS)


def export_preprocessed(root: Path, destination: Path, *, progress: Progress | None = None) -> None:
    """Write a data set for the reference's own readers. InputError if it has more chains and templates than there are names."""
    manifest = read_manifest(root)
    if manifest.workload != "openfold":
        raise InputError(f"{root}: holds data of {manifest.workload}, not of openfold")
    total, done = sum(map(manifest.samples, manifest.splits)), 0
    index: dict[str, dict[str, Any]] = {}
    held_out: list[str] = []
    with _Structures(destination / STRUCTURES) as structures:
        for number, (split, reader, samples) in enumerate(_shards(root)):
            with written_whole(destination / ALIGNMENTS / f"{number}.db") as part, part.open("wb") as db:
                for sample in samples:
                    arrays = reader.read([sample])
                    (protein,) = proteins_of(arrays)
                    files = _write_protein(structures, protein, split, int(arrays["family"][0]))
                    index[structures.last_chain] = {"db": f"{number}.db", "files": _append(db, files)}
                    if split == "validation":
                        held_out.append(structures.last_chain.replace("_", " [") + "]")
                    done += 1
                    if progress is not None:
                        progress(done, total)
    write_whole(destination / STRUCTURES / "obsolete.dat", OBSOLETE)
    write_whole(destination / TARGETS, json.dumps({RELEASED["validation"]: held_out}) + "\n")
    write_whole(destination / ALIGNMENTS / "super.index", json.dumps(index))


def _shards(root: Path) -> Iterator[tuple[str, ShardReader, range]]:
    manifest = read_manifest(root)
    for split in SPLITS:
        reader, begin = ShardReader(root, split), 0
        for shard in manifest.splits[split]:
            yield split, reader, range(begin, begin + shard.samples)
            begin += shard.samples


def _write_protein(structures: _Structures, protein: Protein, split: str, family: int) -> dict[str, str]:
    """Write the templates and then the chain. Returns its alignment files: names and texts."""
    sequence, hits = residues.decode(protein.aatype), []
    for kinds, atoms, mask in zip(protein.template_aatype, protein.template_atoms, protein.template_mask, strict=True):
        covered = kinds != residues.GAP
        if covered.any():
            name = structures.add(kinds[covered], atoms[covered], mask[covered], Described(TEMPLATES_RELEASED))
            hits.append((name, residues.decode(kinds)))
    name = structures.add(
        protein.aatype, protein.atoms, protein.atom_mask, Described(RELEASED[split], protein.resolution, family)
    )
    files = {ALIGNMENT_NAME: a3m_text(protein.msa, protein.deletions, name)}
    if hits:
        files[HITS_NAME] = hhr_text(sequence, hits)
    return files


def hhr_text(query: str, hits: list[tuple[str, str]]) -> str:
    """Render hits as HHsearch does. A hit is a chain's name and its letters in the query's columns, '-' where it has none.

    The reference takes the hits with the largest sum of probabilities first; here that is the order given.
    """
    lines = ["Query         query", f"Match_columns {len(query)}", ""]
    for number, (name, letters) in enumerate(hits, start=1):
        begin, end = len(letters) - len(letters.lstrip("-")), len(letters.rstrip("-"))
        aligned, count = letters[begin:end], len(letters.replace("-", ""))
        same = sum(one == other for one, other in zip(query, letters, strict=True))
        lines += [
            f"No {number}",
            f">{name}",
            f"Probab=100.00  E-value=0  Score=0.00  Aligned_cols={count}  Identities={100 * same // count}%  "
            f"Similarity=0.000  Sum_probs={len(hits) - number + 1:.1f}  Template_Neff=1.000",
            "",
            f"Q {'query':<14} {begin + 1:>4} {query[begin:end]} {end:>4} ({len(query)})",
            f"T {name:<14} {1:>4} {aligned} {count:>4} ({count})",
            "",
        ]
    return "\n".join(lines) + "\n"


def _append(db: IO[bytes], files: dict[str, str]) -> list[tuple[str, int, int]]:
    """Write files one after the other. Returns name, first byte and size of each."""
    places = []
    for name, text in files.items():
        content = text.encode()
        places.append((name, db.tell(), len(content)))
        db.write(content)
    return places


@dataclass(frozen=True)
class Described:
    """What is known of an entry: day of release, resolution in angstrom (nan: unknown), cluster."""

    released: str
    resolution: float = math.nan
    cluster: int = NO_CLUSTER


class _Structures:
    """Writes entries to the files of dicts, a file at a time, and their rows to chains.csv."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._dicts: dict[str, dict[str, Any]] = {}
        self._files = ExitStack()
        self.last_chain = ""

    def __enter__(self) -> _Structures:
        part = self._files.enter_context(written_whole(self._folder / "chains.csv"))
        rows = self._files.enter_context(part.open("w", newline="", encoding="ascii"))
        self._rows = csv.writer(rows, lineterminator="\n")
        self._rows.writerow(COLUMNS)
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._write_dicts()
        self._files.__exit__(*error)

    def add(
        self,
        aatype: NDArray[np.int8],
        atoms: NDArray[np.float32],
        atom_mask: NDArray[np.int8],
        described: Described,
    ) -> str:
        """Add an entry with one chain. Returns the chain's name."""
        if self._count == MOST_ENTRIES:
            raise InputError(f"there are names of PDB entries for {MOST_ENTRIES:,} chains and templates, and no more")
        entry = entry_name(self._count)
        if self._dicts and entry[1:3] != next(iter(self._dicts))[1:3]:
            self._write_dicts()
        self._count += 1
        self.last_chain, sequence = f"{entry}_{CHAIN}", residues.decode(aatype)
        self._dicts[entry] = {
            "pdb_id": entry,
            "exptl_method": "SYNTHETIC",
            "release_date": described.released,
            "resolution": described.resolution,
            "author_chain_ids": [CHAIN],
            "entity_id_to_mmcif_chain_ids": {"1": [CHAIN]},
            "mmcif_chain_id_to_author_chain_id": {CHAIN: CHAIN},
            "sequences": {CHAIN: sequence},
            "atoms": {CHAIN: _compressed(aatype, atoms, atom_mask)},
        }
        resolution = "" if math.isnan(described.resolution) else described.resolution
        facts = (described.released, resolution, described.cluster)
        self._rows.writerow((self.last_chain, entry, CHAIN, CHAIN, *facts, len(sequence), sequence))
        return self.last_chain

    def _write_dicts(self) -> None:
        if self._dicts:
            name = next(iter(self._dicts))[1:3]
            write_whole(self._folder / "dicts" / name, pickle.dumps(self._dicts, 4))
        self._dicts = {}


def entry_name(number: int) -> str:
    """The name of an entry: 1a00, 2a00, ... 1a01 and so on; entries of one file of dicts follow each other."""
    middle, place = divmod(number, PER_DICTS)
    last, first = divmod(place, 9)
    return f"{first + 1}{LETTERS[middle // 36]}{DIGITS[middle % 36]}{DIGITS[last]}"


def _compressed(
    aatype: NDArray[np.int8], atoms: NDArray[np.float32], atom_mask: NDArray[np.int8]
) -> dict[str, tuple[bytes, tuple[int, ...]]]:
    """Positions (L, 37, 3) and mask (L, 37), compressed with zlib, and their shapes."""
    positions = np.zeros((len(aatype), len(ATOMS_37), 3), np.float32)
    mask = np.zeros((len(aatype), len(ATOMS_37)), bool)
    residue, slot = np.nonzero(atom_mask)
    place = SLOTS_37[aatype[residue], slot]
    positions[residue, place], mask[residue, place] = atoms[residue, slot], True
    arrays = {"all_atom_positions": positions, "all_atom_mask": mask}
    return {name: (zlib.compress(array.tobytes()), array.shape) for name, array in arrays.items()}
