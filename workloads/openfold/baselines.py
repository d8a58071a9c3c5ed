"""Baselines without a network: all helix, all strand, and secondary structure by a vote of each alignment column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from suite.data.shards import ShardReader
from suite.workload import Baseline
from workloads.openfold import residues
from workloads.openfold.features import Protein
from workloads.openfold.losses import sample_lddt_ca
from workloads.openfold.proteins import CLASS_OF, HELIX, LOOP, LOOP_TORSIONS, STRAND, TORSIONS, build_backbone
from workloads.openfold.shard_form import proteins_of

MOST_CHAINS = 256
COIL = tuple(np.mean(list(LOOP_TORSIONS.values()), axis=0))  # used for every loop residue


def baselines(root: Path) -> dict[str, Baseline]:
    """Measure lDDT-CA on the validation split, on at most its first 256 chains."""
    reader = ShardReader(root, "validation")
    proteins = list(proteins_of(reader.read(np.arange(min(len(reader), MOST_CHAINS)))))
    return {
        "all_helix": _score(proteins, [np.full(len(each), HELIX) for each in proteins]),
        "all_strand": _score(proteins, [np.full(len(each), STRAND) for each in proteins]),
        "column_vote": _score(proteins, [column_vote(each.msa) for each in proteins]),
    }


def column_vote(msa: NDArray[np.int8]) -> NDArray[np.int64]:
    """Predict helix, strand or loop (L,): the most frequent class of a column's letters; neighbouring columns count half."""
    known = msa < residues.UNKNOWN
    votes = np.stack([((CLASS_OF[np.where(known, msa, 0)] == k) & known).sum(0) for k in range(3)]).astype(float)
    padded = np.pad(votes, ((0, 0), (1, 1)))
    return np.asarray((votes + 0.5 * (padded[:, :-2] + padded[:, 2:])).argmax(0))


def _score(proteins: list[Protein], elements: list[NDArray[np.int64]]) -> Baseline:
    torsions = np.array([TORSIONS[HELIX], TORSIONS[STRAND], COIL])
    assert len(torsions) - 1 == LOOP
    scores = []
    for protein, kinds in zip(proteins, elements, strict=True):
        predicted = torch.from_numpy(build_backbone(torsions[kinds][None])[:, :, residues.CA]).float()
        true = torch.from_numpy(protein.atoms[None, :, residues.CA])
        mask = torch.from_numpy(protein.atom_mask[None, :, residues.CA]).float()
        if mask.any():
            scores.append(float(sample_lddt_ca(predicted, true, mask)))
    return Baseline.mean(scores)
