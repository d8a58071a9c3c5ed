"""Finds the public data below a folder, selects chains and makes proteins of them.

Parts may be in either layout. Original: ``pdb_mmcif/original/{raw/<2>/<id>.cif.gz, clusters-by-entity-40.txt,
obsolete.dat}`` and ``open_protein_set/original/{pdb/<id>_<chain>/{a3m,hhr}/*, duplicate_pdb_chains.txt}``. Preprocessed
by the benchmark: ``pdb_mmcif/processed/{chains.csv, dicts/<2>, obsolete.dat}`` and
``open_protein_set/processed/pdb_alignments/{super.index, *.db}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlhpc.suite.data.build import VALIDATION_INDEX
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.clusters import read_clusters
from mlhpc.workloads.openfold.features import Protein
from mlhpc.workloads.openfold.mmcif import Alignment, merge
from mlhpc.workloads.openfold.public.selection import (
    NO_CLUSTER,
    ChainRecord,
    Dates,
    build_chain_table,
    read_chains,
    read_targets,
    select_training_chains,
    select_validation_chains,
)
from mlhpc.workloads.openfold.public.structures import (
    DATABASES,
    TEMPLATE_HITS,
    AlignmentDatabase,
    AlignmentFolders,
    Alignments,
    Library,
    MmcifFiles,
    PickleFiles,
    Structures,
    find_templates,
    list_alignment_folders,
    list_mmcif_files,
)
from mlhpc.workloads.openfold.shard_form import NO_TEMPLATES

# folders that may hold a part; the preprocessed form wins because it is read faster
FOLDERS = (
    *("", "pdb_mmcif/processed", "pdb_mmcif/original", "pdb_mmcif"),
    *("open_protein_set/processed", "open_protein_set/original", "open_protein_set"),
)
CLUSTERS = "clusters-by-entity-40.txt"
TARGETS = ("cameo_targets.json", "cameo_targets.py")
TEMPLATES_NEEDED = 4  # of a chain, as in the benchmark


@dataclass(frozen=True)
class PublicData:
    """The selected chains and where to read them. ``facts`` counts what was left out; runs may log ``stated``."""

    structures: Structures
    alignments: Alignments
    library: Library
    chains: dict[str, list[ChainRecord]]  # by split
    facts: dict[str, Any]
    stated: dict[str, Any]

    def families(self, split: str) -> list[int]:
        """List the cluster of each chain of a split; a chain without a cluster gets one of its own."""
        return [
            record.cluster if record.cluster != NO_CLUSTER else VALIDATION_INDEX + number
            for number, record in enumerate(self.chains[split])
        ]

    def protein(self, record: ChainRecord) -> Protein:
        """Read a chain with its merged alignments and its templates. InputError if they do not belong together."""
        chain = next((c for c in self.structures.entry(record.entry).chains if c.name == record.chain), None)
        if chain is None or len(chain.aatype) != len(record.sequence):
            raise InputError(f"{record.name}: the structure has no such chain of {len(record.sequence)} residues")
        texts = self.alignments.read(record.name)
        msa, deletions = _alignment(record, texts)
        hits, where = texts.get(TEMPLATE_HITS, ""), f"{TEMPLATE_HITS} of {record.name}"
        templates = find_templates(hits, where, record, self.library, TEMPLATES_NEEDED)
        kinds, atoms, mask = (np.stack(each) for each in zip(*templates, strict=True)) if templates else NO_TEMPLATES
        known = chain.aatype, chain.residue_index, chain.atoms, chain.atom_mask
        return Protein(*known, msa, deletions, kinds, atoms, mask, record.resolution)


def _alignment(record: ChainRecord, texts: dict[str, str]) -> Alignment:
    """Merge a chain's alignments; without any the chain is its only row."""
    files = [(f"{name} of {record.name}", texts[name]) for name in DATABASES if texts.get(name)]
    msa, deletions = merge(files or [("", f">{record.name}\n{record.sequence}\n")])
    if msa.shape[1] != len(record.sequence):
        raise InputError(f"{files[0][0]}: {msa.shape[1]} columns, but the chain has {len(record.sequence)} residues")
    own, row = residues.encode_aligned(record.sequence.encode()), msa[0]
    if ((own != row) & (own < residues.UNKNOWN) & (row < residues.UNKNOWN)).any():
        raise InputError(f"{files[0][0]}: its first row is not the chain's sequence")
    return msa, deletions


def is_public(source: Path) -> bool:
    """Check whether a folder has a part of the public data in one of its layouts."""
    return any(_find(source, name) for name in ("chains.csv", "raw", "pdb_alignments", "super.index", "pdb"))


def open_public(source: Path, dates: Dates, world: World) -> PublicData:
    """Find the parts and select the chains. All ranks call it. InputError says which part is missing.

    Without a cluster file chains are grouped by sequence identity.
    """
    structures, records, facts = _structures(source, world)
    alignments = _alignments(source, world)
    library = Library.of(records, _find(source, "obsolete.dat"), structures)
    chosen = {
        "train": select_training_chains(records, dates),
        "validation": select_validation_chains(records, read_targets(_targets(source)), dates),
    }
    facts["chains"] = len(records)
    aligned = {}
    for split, selected in chosen.items():
        aligned[split] = [record for record in selected if record.name in alignments.chains]
        facts[f"{split}_selected"] = len(selected)
        facts[f"{split}_without_alignment"] = len(selected) - len(aligned[split])
        if not aligned[split]:
            raise InputError(
                f"{source}: no chain for the {split} split: of {len(records)} chains {len(selected)} pass its filters"
            )
    both = {record.name for record in aligned["train"]} & {record.name for record in aligned["validation"]}
    if both:
        raise InputError(f"{source}: chain {min(both)} is in both splits, with {len(both) - 1} more: it would leak")
    # the benchmark's splits share clusters; the number says how far validation is from unseen folds
    trained = {record.cluster for record in aligned["train"]}
    facts["validation_in_training_clusters"] = sum(record.cluster in trained for record in aligned["validation"])
    return PublicData(structures, alignments, library, aligned, facts, dates.stated())


def _targets(source: Path) -> Path:
    targets = next(filter(None, (_find(source, name) for name in TARGETS)), None)
    if targets is None:
        raise InputError(
            f"{source}: no {TARGETS[0]}: the targets of CAMEO by day of submission, or the reference's {TARGETS[1]}; "
            "they are the validation set"
        )
    return targets


def _structures(source: Path, world: World) -> tuple[Structures, Sequence[ChainRecord], dict[str, Any]]:
    table, dictionaries = _find(source, "chains.csv"), _find(source, "dicts")
    if table is not None and dictionaries is not None:
        return PickleFiles(dictionaries), read_chains(table), {}
    raw = _find(source, "raw")
    if raw is None:
        raise InputError(f"{source}: no structures: expected pdb_mmcif/original/raw, or chains.csv and dicts")
    paths: list[Path] = world.compute_on_first(partial(list_mmcif_files, raw), list[Path])
    lines = _find(source, CLUSTERS)
    found = build_chain_table(paths, read_clusters(lines) if lines else None, world)
    facts = {"unreadable_structures": found.unreadable, "first_unreadable": found.first_problem}
    return MmcifFiles(raw, paths), found.chains, facts


def _alignments(source: Path, world: World) -> Alignments:
    index = _find(source, "pdb_alignments/super.index") or _find(source, "super.index")
    if index is not None:
        return AlignmentDatabase(index)
    folder = _find(source, "pdb")
    if folder is None:
        raise InputError(
            f"{source}: no alignments: expected open_protein_set/original/pdb, or pdb_alignments/super.index"
        )
    listing = partial(list_alignment_folders, folder, _find(source, "duplicate_pdb_chains.txt"))
    return AlignmentFolders(folder, world.compute_on_first(listing, dict[str, str]))


def _find(source: Path, name: str) -> Path | None:
    """Find a file or folder of the public data in any of its folders."""
    paths = (source / folder / name for folder in FOLDERS)
    return next((path for path in paths if path.exists()), None)
