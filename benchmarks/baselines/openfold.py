"""Baselines without a network: fixed folds, copied training chains, regressions on columns and on couplings.

Regressions are fitted on the training split. At most the first `MOST_CHAINS` chains of each split are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.baselines import LIGHTGBM, Baseline, compute_mean
from mlhpc.suite.data.shards import ShardReader
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.features import Protein
from mlhpc.workloads.openfold.geometry import compute_torsions_of
from mlhpc.workloads.openfold.metric import compute_distance_lddt_ca
from mlhpc.workloads.openfold.proteins import HELIX, STRAND, TORSIONS, Floats, build_backbone
from mlhpc.workloads.openfold.shard_form import convert_to_proteins

MOST_CHAINS = 1024
MOST_ROWS = 64  # of an alignment
MEDOIDS = 32  # training chains of a length of which the most typical one is chosen
NEIGHBOURS = 8  # training chains with the most similar couplings of which the most typical one is chosen
WINDOW = 4  # columns on each side whose letters a torsion is predicted from
COUPLED_WINDOW = 6  # columns on each side whose affinities a torsion is predicted from
CONTACT, CONTACT_SEPARATION = 8.0, 3  # angstrom between the CA of residues in contact, at least as far along the chain
PENALTY = 1.0  # of the ridge regressions
BOOSTING_TREES = 100
BOOSTING = LIGHTGBM | {"objective": "l2", "learning_rate": 0.1}
CLASSES = residues.GAP + 1

Fit = Callable[[Floats, Floats], Callable[[Floats], Floats]]  # features and targets to a predictor of targets
Predictor = Callable[[Protein], Floats]  # distances (L, L) of a chain's CA; they need not fit into space


def measure_baselines(root: Path) -> dict[str, Baseline]:
    """Measure each baseline's lDDT-CA, 0 to 1: the mean over the validation chains that have a known CA."""
    train, validation = _proteins(root, "train"), _proteins(root, "validation")
    couplings = partial(_couplings, potential=fit_contact_potential(_complete(train)))
    predictors: dict[str, Predictor] = {
        "all_helix": lambda chain: _build_chain(np.tile(TORSIONS[HELIX], (len(chain), 1))),
        "all_strand": lambda chain: _build_chain(np.tile(TORSIONS[STRAND], (len(chain), 1))),
        "typical_chain": _typical_chain(train),
        "profile_regression": _torsion_regression(train, _windows, _fit_ridge),
        "coupling_regression": _torsion_regression(train, couplings, _fit_ridge),
        "coupling_neighbours": _coupling_neighbours(train),
        "coupling_boosting": _torsion_regression(train, couplings, _fit_boosting),
    }
    return {
        name: compute_mean([_score(predict(chain), chain) for chain in validation])
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
    typical = {length: _find_most_typical(group) for length, group in _group_by_length(train).items()}
    return lambda chain: _copy_distances(typical[_nearest_length(typical, chain)], len(chain))


def _coupling_neighbours(train: Sequence[Protein]) -> Predictor:
    """Copy the most typical of the training chains whose couplings are most like the chain's.

    Only chains nearest in length are compared.
    """
    groups, potential = _group_by_length(train), fit_contact_potential(_complete(train))
    affinities = {
        length: np.stack([compute_affinity(each.msa, potential).astype(np.float32) for each in group])
        for length, group in groups.items()
    }

    def predict(chain: Protein) -> Floats:
        length = _nearest_length(groups, chain)
        first, second = np.triu_indices(min(length, len(chain)), CONTACT_SEPARATION)
        own = compute_affinity(chain.msa, potential)
        difference = ((affinities[length][:, first, second] - own[first, second]) ** 2).sum(1)
        neighbours = [groups[length][number] for number in np.argsort(difference)[:NEIGHBOURS]]
        return _copy_distances(_find_most_typical(neighbours), len(chain))

    return predict


def _find_most_typical(chains: Sequence[Protein]) -> Floats:
    """Find the chain that is most like the others, of the first `MEDOIDS`. Returns its distances."""
    known = torch.from_numpy(np.stack([_compute_known_distances(each) for each in chains]))
    every = known.new_ones(known.shape[:2])
    likeness = [float(compute_distance_lddt_ca(each.expand_as(known), known, every).mean()) for each in known[:MEDOIDS]]
    return np.asarray(known[int(np.argmax(likeness))].numpy())


def _group_by_length(train: Sequence[Protein]) -> dict[int, list[Protein]]:
    groups: dict[int, list[Protein]] = {}
    for each in _complete(train):
        groups.setdefault(len(each), []).append(each)
    return groups


def _nearest_length(lengths: Iterable[int], chain: Protein) -> int:
    return min(lengths, key=lambda length: (abs(length - len(chain)), length))


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


def _torsion_regression(train: Sequence[Protein], describe: Callable[[Protein], Floats], fit: Fit) -> Predictor:
    """Predict sine and cosine of phi and psi from the features of each residue, then build the chain."""
    features, targets = [], []
    for chain in train:
        tensors = (chain.aatype.astype(np.int64), chain.atoms.astype(float), chain.atom_mask.astype(float))
        truth = compute_torsions_of(*(torch.from_numpy(each)[None] for each in tensors))
        known = truth.mask[0, :, 1:3].amin(-1).numpy() > 0
        features.append(describe(chain)[known])
        targets.append(truth.angle[0, :, 1:3].flatten(-2).numpy()[known])
    estimate = fit(np.concatenate(features), np.concatenate(targets))

    def predict(chain: Protein) -> Floats:
        sine_cosine = estimate(describe(chain)).reshape(len(chain), 2, 2)
        return _build_chain(np.degrees(np.arctan2(sine_cosine[..., 0], sine_cosine[..., 1])))

    return predict


def _windows(chain: Protein) -> Floats:
    """Collect the features of each residue (L, features): its own and its alignment's letters in a window, and 1."""
    columns = np.concatenate([np.eye(CLASSES)[chain.aatype], compute_profile(chain.msa)], -1)
    padded = np.pad(columns, ((WINDOW, WINDOW), (0, 0)))
    shifted = [padded[begin : begin + len(chain)] for begin in range(2 * WINDOW + 1)]
    return np.concatenate([*shifted, np.ones((len(chain), 1))], -1)


def _couplings(chain: Protein, potential: Floats) -> Floats:
    """Collect the features of each residue (L, features): the affinities of every two columns in a window, and 1."""
    padded = np.pad(compute_affinity(chain.msa, potential), COUPLED_WINDOW)
    first, second = np.triu_indices(2 * COUPLED_WINDOW + 1, CONTACT_SEPARATION)
    begins = np.arange(len(chain))[:, None]
    return np.concatenate([padded[begins + first, begins + second], np.ones((len(chain), 1))], -1)


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


def _fit_ridge(features: Floats, targets: Floats) -> Callable[[Floats], Floats]:
    """Fit weights that minimise the squared error plus the penalty."""
    square = features.T @ features + PENALTY * np.eye(features.shape[1])
    weights = np.linalg.solve(square, features.T @ targets)
    return lambda described: np.asarray(described @ weights)


def _fit_boosting(features: Floats, targets: Floats) -> Callable[[Floats], Floats]:
    """Fit gradient-boosted trees, one model per target."""
    import lightgbm

    models = [lightgbm.train(BOOSTING, lightgbm.Dataset(features, each), BOOSTING_TREES) for each in targets.T]
    return lambda described: np.stack([model.predict(described) for model in models], axis=-1)
