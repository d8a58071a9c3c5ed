"""Baselines without a network: fixed folds, copied training chains, regressions on columns and on pairs of columns.

Regressions are fitted on the training split. At most the first `MOST_CHAINS` chains of each split are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from suite.data.shards import ShardReader
from suite.workload import Baseline
from workloads.openfold import residues
from workloads.openfold.features import Protein
from workloads.openfold.geometry import compute_torsions_of
from workloads.openfold.losses import compute_distance_lddt_ca
from workloads.openfold.proteins import HELIX, STRAND, TORSIONS, Floats, build_backbone
from workloads.openfold.shard_form import convert_to_proteins

MOST_CHAINS = 1024
MOST_ROWS = 64  # of an alignment
MEDOIDS = 32  # training chains of a length of which the most typical one is chosen
WINDOW = 4  # columns on each side whose letters a torsion is predicted from
PATCH = 3  # columns on each side of both residues whose affinity a distance is predicted from
CONTACT, CONTACT_SEPARATION = 8.0, 3  # angstrom between the CA of residues in contact, at least as far along the chain
SEPARATIONS = 32  # steps along the chain with coefficients of their own; what is further apart shares the last ones
PENALTY = 1.0  # of the ridge regressions
CLASSES = residues.GAP + 1

Predictor = Callable[[Protein], Floats]  # distances (L, L) of a chain's CA; they need not fit into space


def measure_baselines(root: Path) -> dict[str, Baseline]:
    """Measure each baseline's lDDT-CA, 0 to 1: the mean over the validation chains that have a known CA."""
    train, validation = _proteins(root, "train"), _proteins(root, "validation")
    predictors: dict[str, Predictor] = {
        "all_helix": lambda chain: _build_chain(np.tile(TORSIONS[HELIX], (len(chain), 1))),
        "all_strand": lambda chain: _build_chain(np.tile(TORSIONS[STRAND], (len(chain), 1))),
        "typical_chain": _typical_chain(train),
        "nearest_chain": _nearest_chain(train),
        "profile_regression": _profile_regression(train),
        "pair_regression": _pair_regression(train),
    }
    return {
        name: Baseline.mean([_score(predict(chain), chain) for chain in validation])
        for name, predict in predictors.items()
    }


def _proteins(root: Path, split: str) -> list[Protein]:
    """Read the first chains of a split that have a known CA."""
    reader = ShardReader(root, split)
    proteins = convert_to_proteins(reader.read(np.arange(min(len(reader), MOST_CHAINS))))
    return [each for each in proteins if each.atom_mask[:, residues.CA].any()]


def _score(predicted: Floats, chain: Protein) -> float:
    mask = torch.from_numpy(chain.atom_mask[None, :, residues.CA]).double()
    return float(
        compute_distance_lddt_ca(
            torch.from_numpy(predicted[None]), torch.from_numpy(_compute_known_distances(chain)[None]), mask
        )
    )


def _compute_known_distances(chain: Protein) -> Floats:
    """Compute the distances (L, L) of a chain's CA."""
    return _distances(chain.atoms[:, residues.CA].astype(float))


def _distances(positions: Floats) -> Floats:
    return np.asarray(np.linalg.norm(positions[:, None] - positions[None], axis=-1))


def _build_chain(torsions: Floats) -> Floats:
    """Build a chain from phi and psi (L, 2), degrees, and compute the distances (L, L) of its CA."""
    return _distances(build_backbone(torsions[None])[0, :, residues.CA])


def _typical_chain(train: Sequence[Protein]) -> Predictor:
    """Copy a typical training chain. Among the chains nearest in length it is the one most like the others."""
    chains = _complete(train)
    typical: dict[int, Floats] = {}
    for length in {len(each) for each in chains}:
        known = torch.from_numpy(np.stack([_compute_known_distances(each) for each in chains if len(each) == length]))
        every = known.new_ones(known.shape[:2])
        likeness = [
            float(compute_distance_lddt_ca(each.expand_as(known), known, every).mean()) for each in known[:MEDOIDS]
        ]
        typical[length] = known[int(np.argmax(likeness))].numpy()

    def predict(chain: Protein) -> Floats:
        nearest = min(typical, key=lambda length: (abs(length - len(chain)), length))
        return _copy_distances(typical[nearest], len(chain))

    return predict


def _nearest_chain(train: Sequence[Protein]) -> Predictor:
    """Copy the training chain whose alignment has the most similar columns, from its first residue on."""
    chains = _complete(train)
    lengths = np.array([len(each) for each in chains])
    columns = int(lengths.max())
    profiles = np.stack([_columns(each, columns) for each in chains])

    def predict(chain: Protein) -> Floats:
        likeness = (profiles @ _columns(chain, columns)) / np.maximum(lengths, len(chain))
        return _copy_distances(_compute_known_distances(chains[int(np.argmax(likeness))]), len(chain))

    return predict


def _columns(chain: Protein, columns: int) -> Floats:
    """Compute the profile of exactly this many columns, zero behind the chain's end, as one vector."""
    own = compute_profile(chain.msa)[:columns]
    return np.pad(own, ((0, columns - len(own)), (0, 0))).ravel()


def _complete(train: Sequence[Protein]) -> list[Protein]:
    """List the chains with every CA known, or all chains if there is none."""
    return [each for each in train if each.atom_mask[:, residues.CA].all()] or list(train)


def _copy_distances(distances: Floats, length: int) -> Floats:
    """Cut distances to ``length`` residues. What is missing at the end is as far away as the last residue is."""
    index = np.minimum(np.arange(length), len(distances) - 1)
    return np.asarray(distances[np.ix_(index, index)])


def compute_profile(msa: NDArray[np.int8]) -> Floats:
    """Compute how often each column has each residue type or a gap (L, 22)."""
    return np.asarray(np.eye(CLASSES)[msa[:MOST_ROWS]].mean(0))


def _profile_regression(train: Sequence[Protein]) -> Predictor:
    """Predict sine and cosine of phi and psi, then build the chain.

    The prediction is linear in the letters of a window of columns.
    """
    features, targets = [], []
    for chain in train:
        tensors = (chain.aatype.astype(np.int64), chain.atoms.astype(float), chain.atom_mask.astype(float))
        truth = compute_torsions_of(*(torch.from_numpy(each)[None] for each in tensors))
        known = truth.mask[0, :, 1:3].amin(-1).numpy() > 0
        features.append(_windows(chain)[known])
        targets.append(truth.angle[0, :, 1:3].flatten(-2).numpy()[known])
    weights = _ridge(features, targets)

    def predict(chain: Protein) -> Floats:
        sine_cosine = (_windows(chain) @ weights).reshape(len(chain), 2, 2)
        return _build_chain(np.degrees(np.arctan2(sine_cosine[..., 0], sine_cosine[..., 1])))

    return predict


def _windows(chain: Protein) -> Floats:
    """Collect the features of each residue (L, features): its own and its alignment's letters in a window, and 1."""
    columns = np.concatenate([np.eye(CLASSES)[chain.aatype], compute_profile(chain.msa)], -1)
    padded = np.pad(columns, ((WINDOW, WINDOW), (0, 0)))
    shifted = [padded[begin : begin + len(chain)] for begin in range(2 * WINDOW + 1)]
    return np.concatenate([*shifted, np.ones((len(chain), 1))], -1)


def _pair_regression(train: Sequence[Protein]) -> Predictor:
    """Predict each distance linearly from the affinity of the columns around both residues, and their separation."""
    chains = _complete(train)
    potential = fit_contact_potential(chains)
    weights = _ridge(
        [_patches(each, potential) for each in chains],
        [_compute_known_distances(each).reshape(-1, 1) for each in chains],
    )
    return lambda chain: np.asarray((_patches(chain, potential) @ weights).reshape(len(chain), len(chain)))


def fit_contact_potential(train: Sequence[Protein]) -> Floats:
    """Compute the log odds (22, 22) that two letters are at residues in contact rather than at others.

    This is a statistical potential as of Miyazawa and Jernigan 1985 (Macromolecules 18, 534). It is counted in all rows
    of the alignments.
    """
    # one each: a pair of letters that never occurs would have the logarithm of zero
    counts = np.ones((2, CLASSES * CLASSES))
    for chain in train:
        index = np.arange(len(chain))
        # neighbours along the chain are always close, so they say nothing about letters
        apart = np.abs(index[:, None] - index) >= CONTACT_SEPARATION
        near = _compute_known_distances(chain) < CONTACT
        msa = chain.msa[:MOST_ROWS].astype(np.int64)
        for number, chosen in enumerate((apart & ~near, apart & near)):
            first, second = np.nonzero(chosen)
            pairs = CLASSES * msa[:, first] + msa[:, second]
            counts[number] += np.bincount(pairs.ravel(), minlength=CLASSES * CLASSES)
    share = np.log(counts / counts.sum(1, keepdims=True))
    return np.asarray((share[1] - share[0]).reshape(CLASSES, CLASSES))


def compute_affinity(msa: NDArray[np.int8], potential: Floats) -> Floats:
    """Compute the mean over rows of the potential of the letters of each two columns (L, L)."""
    letters = msa[:MOST_ROWS].astype(np.int64)
    return np.asarray(potential[letters[:, :, None], letters[:, None]].mean(0))


def _patches(chain: Protein, potential: Floats) -> Floats:
    """Collect the features of all pairs (L L, features): affinity around the pair, separation, and their products."""
    length, side = len(chain), 2 * PATCH + 1
    padded = np.pad(compute_affinity(chain.msa, potential), PATCH)
    around = np.stack([padded[a : a + length, b : b + length] for a in range(side) for b in range(side)], -1)
    index = np.arange(length)
    apart = np.eye(SEPARATIONS)[np.minimum(np.abs(index[:, None] - index), SEPARATIONS - 1)]
    own, mean = padded[PATCH:-PATCH, PATCH:-PATCH, None], around.mean(-1, keepdims=True)
    return np.concatenate([around, apart, apart * own, apart * mean], -1).reshape(length * length, -1)


def _ridge(features: Sequence[Floats], targets: Sequence[Floats]) -> Floats:
    """Fit weights (features, targets) that minimise the squared error plus the penalty."""
    square = sum((each.T @ each for each in features), np.zeros((features[0].shape[1],) * 2))
    product = sum((x.T @ y for x, y in zip(features, targets, strict=True)), np.zeros(1))
    return np.asarray(np.linalg.solve(square + PENALTY * np.eye(len(square)), product))
