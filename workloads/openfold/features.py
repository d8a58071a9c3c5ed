"""Computes the network's input of one protein and its alignment: clusters, masked residues, crop, templates.

AlphaFold 2's supplement 1.2. Every random choice comes from the generator passed in. Dimensions are L residues of the
chain, C of the crop, and M rows of the alignment. S and E are rows of the main and the extra alignment, R slots, T
templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.geometry import compute_torsions_of

Arrays = dict[str, NDArray[Any]]

# arrays with one entry for each recycling iteration
SLOT_ARRAYS = (
    *("msa", "deletions", "cluster_profile", "cluster_deletions", "msa_mask"),
    *("extra_msa", "extra_deletions", "extra_msa_mask"),
)
LAST_SLOT_ARRAYS = ("true_msa", "hidden_mask")  # only the loss of the last iteration needs these

MASK_PROBABILITY, PROFILE_PROBABILITY, UNIFORM_PROBABILITY = (
    0.7,
    0.1,
    0.1,
)  # probabilities for a chosen residue; otherwise it stays as it is
ROWS_AT_ONCE = 512  # one-hot rows of a deep alignment are hundreds of megabytes
SYNTHETIC_RESOLUTION = 0.1  # resolution of a synthetic structure, angstrom: the best that counts as measured
SHUFFLED_TEMPLATES = 20  # training draws from this many of the best


@dataclass(frozen=True)
class Protein:
    """A chain with its alignment (first row: itself) and templates; unknown atoms are masked and zero."""

    aatype: NDArray[np.int8]  # (L,)
    residue_index: NDArray[np.int32]  # (L,)
    atoms: NDArray[np.float32]  # (L, 14, 3), angstrom
    atom_mask: NDArray[np.int8]  # (L, 14)
    msa: NDArray[np.int8]  # (M, L)
    deletions: NDArray[np.uint8]  # (M, L): letters left out before this column
    template_aatype: NDArray[np.int8]  # (T, L)
    template_atoms: NDArray[np.float32]  # (T, L, 14, 3)
    template_mask: NDArray[np.int8]  # (T, L, 14)
    resolution: float = SYNTHETIC_RESOLUTION  # angstrom; nan: unknown

    def __len__(self) -> int:
        return len(self.aatype)


def build_sample(
    protein: Protein, config: OpenFoldConfig, rng: np.random.Generator, *, length: int, training: bool
) -> Arrays:
    """Compute the arrays of one sample, padded to ``length`` residues; a longer chain is cropped at random.

    Rows are clustered by all columns of the chain, then cropped. Arrays of `SLOT_ARRAYS` have recycles + 1 slots.
    """
    recycles = choose_recycles(config, rng) if training else config.num_recycling_iters
    clamp = float(rng.random() < config.fape_clamp_probability) if training else 1.0
    begin = int(rng.integers(max(len(protein) - length, 0) + 1))
    crop = slice(begin, begin + length)
    residues_kept = min(length, len(protein) - begin)
    # each recycling iteration draws its own rows and hides its own residues, as in the reference
    slots = [build_alignment(protein.msa, protein.deletions, config, rng) for _ in range(recycles + 1)]
    arrays: Arrays = {
        "aatype": _pad(protein.aatype[crop], length).astype(np.int64),
        "residue_index": _pad(protein.residue_index[crop], length).astype(np.int64),
        "mask": _pad(np.ones(residues_kept, np.float32), length),
        "atoms": _pad(protein.atoms[crop], length),
        "atom_mask": _pad(protein.atom_mask[crop], length).astype(np.float32),
        "recycles": np.array(recycles),
        "clamp_fape": np.array(clamp, np.float32),
        "resolution": np.array(protein.resolution, np.float32),
    }
    for name in slots[0]:
        arrays[name] = _pad(np.stack([slot[name][:, crop] for slot in slots]), length, 2)
    for name in LAST_SLOT_ARRAYS:
        arrays[name] = arrays[name][-1]
    if config.max_templates:
        arrays |= _templates(protein, config, rng, crop, length, training=training)
    return arrays


def choose_recycles(config: OpenFoldConfig, rng: np.random.Generator) -> int:
    """Draw how often a training sample is recycled. It is the generator's first draw, so it is known before loading."""
    return int(rng.integers(config.num_recycling_iters + 1))


def build_alignment(
    msa: NDArray[np.int8], deletions: NDArray[np.uint8], config: OpenFoldConfig, rng: np.random.Generator
) -> Arrays:
    """Compute one slot: draw rows as cluster centres, hide some of their residues, assign the other rows to centres."""
    rows, columns = msa.shape
    order = np.concatenate([[0], 1 + rng.permutation(rows - 1)])
    chosen, others = order[: config.max_msa_clusters], order[config.max_msa_clusters :]
    true = msa[chosen]
    hidden, corrupted = _mask_residues(true, msa, config.masked_msa_fraction, rng)
    profile, mean = _compute_cluster_features(true, corrupted, deletions[chosen], msa[others], deletions[others])
    extra = others[: config.max_extra_msa]
    clusters = config.max_msa_clusters
    return {
        "msa": _pad(corrupted, clusters),
        "true_msa": _pad(true, clusters),
        "hidden_mask": _pad(hidden.astype(np.float32), clusters),
        "deletions": _pad(deletions[chosen], clusters),
        "cluster_profile": _pad(profile, clusters),
        "cluster_deletions": _pad(mean, clusters),
        "msa_mask": _pad(np.ones(true.shape, np.float32), clusters),
        "extra_msa": _pad(msa[extra], config.max_extra_msa),
        "extra_deletions": _pad(deletions[extra], config.max_extra_msa),
        "extra_msa_mask": _pad(np.ones((len(extra), columns), np.float32), config.max_extra_msa),
    }


def _mask_residues(
    true: NDArray[np.int8], msa: NDArray[np.int8], fraction: float, rng: np.random.Generator
) -> tuple[NDArray[np.bool_], NDArray[np.int8]]:
    """Choose the residues to be predicted, and replace them in the rows that the network gets."""
    hidden = rng.random(true.shape) < fraction
    action = rng.random(true.shape)
    column = np.broadcast_to(np.arange(true.shape[1]), true.shape)
    # the letter of a random row is a draw from the column's profile
    from_profile = msa[rng.integers(len(msa), size=true.shape), column]
    uniform = rng.integers(residues.UNKNOWN, size=true.shape).astype(np.int8)
    visible = np.where(action < MASK_PROBABILITY, np.int8(residues.MASKED), true)
    visible = np.where(
        (action >= MASK_PROBABILITY) & (action < MASK_PROBABILITY + PROFILE_PROBABILITY), from_profile, visible
    )
    visible = np.where(
        (action >= MASK_PROBABILITY + PROFILE_PROBABILITY)
        & (action < MASK_PROBABILITY + PROFILE_PROBABILITY + UNIFORM_PROBABILITY),
        uniform,
        visible,
    )
    return hidden, np.where(hidden, visible, true)


def _compute_cluster_features(
    true: NDArray[np.int8],
    centres: NDArray[np.int8],
    deletions: NDArray[np.uint8],
    others: NDArray[np.int8],
    other_deletions: NDArray[np.uint8],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Compute profile (S, C, 23) and mean deletions (S, C) of each centre and its nearest rows.

    Gaps do not count for what is nearest.
    """
    identity = np.eye(residues.MSA_CLASSES, dtype=np.float32)
    counts = identity[centres]
    sums, members = deletions.astype(np.float32), np.ones(len(centres), np.float32)
    known = identity[:, : residues.GAP]
    centre_letters = known[centres].reshape(len(centres), -1).T
    for begin in range(0, len(others), ROWS_AT_ONCE):
        rows = others[begin : begin + ROWS_AT_ONCE]
        # the number of equal residues; gaps and masked letters are in no column of `known`
        nearest = (known[rows].reshape(len(rows), -1) @ centre_letters).argmax(1)
        np.add.at(counts, nearest, identity[rows])
        np.add.at(sums, nearest, other_deletions[begin : begin + ROWS_AT_ONCE].astype(np.float32))
        np.add.at(members, nearest, 1)
    return counts / members[:, None, None], sums / members[:, None]


def _templates(
    protein: Protein, config: OpenFoldConfig, rng: np.random.Generator, crop: slice, length: int, *, training: bool
) -> Arrays:
    """Choose up to ``max_templates``: training draws number and choice, evaluation takes the first ones.

    Torsions are those of the whole chain: the first one of a crop needs the residue before it.
    """
    there = len(protein.template_aatype)
    if training:
        pool = rng.permutation(min(there, SHUFFLED_TEMPLATES))[: config.max_templates]
        chosen = pool[: int(rng.integers(len(pool) + 1))]
    else:
        chosen = np.arange(min(there, config.max_templates))
    shape = (len(chosen), len(protein))
    kinds = protein.template_aatype[chosen].astype(np.int64).reshape(shape)
    atoms = protein.template_atoms[chosen].reshape(*shape, residues.ATOMS, 3)
    mask = protein.template_mask[chosen].astype(np.float32).reshape(*shape, residues.ATOMS)
    known = torch.from_numpy(kinds).clamp(max=residues.UNKNOWN)
    torsions = compute_torsions_of(known, torch.from_numpy(atoms), torch.from_numpy(mask))
    arrays: Arrays = {
        "template_aatype": kinds,
        "template_atoms": atoms,
        "template_atom_mask": mask,
        "template_angles": torsions.angle.numpy(),
        "template_angle_mask": torsions.mask.numpy(),
    }
    arrays = {name: _pad(_pad(each[:, crop], config.max_templates), length, 1) for name, each in arrays.items()}
    return arrays | {"template_mask": _pad(np.ones(len(chosen), np.float32), config.max_templates)}


def _pad(array: NDArray[Any], length: int, axis: int = 0) -> NDArray[Any]:
    """Pad with zeros at the end of one axis."""
    there = array.shape[axis]
    if there >= length:
        return array
    padded = np.zeros((*array.shape[:axis], length, *array.shape[axis + 1 :]), array.dtype)
    padded[(slice(None),) * axis + (slice(there),)] = array
    return padded
