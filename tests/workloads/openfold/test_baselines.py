"""Each baseline finds what it looks for where it is there to be found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from mlhpc.workloads.openfold import baselines, residues
from mlhpc.workloads.openfold.baselines import (
    Predictor,
    _coupling_neighbours,
    _couplings,
    _fit_boosting,
    _fit_ridge,
    _score,
    _torsion_regression,
    _typical_chain,
    _windows,
    fit_contact_potential,
)
from mlhpc.workloads.openfold.features import Protein
from mlhpc.workloads.openfold.proteins import HELIX, Families, make_family, make_proteins

FOLDS = Families(12, 14, 16, hairpins_per_helix=1)
NUMBERS = range(120)


@pytest.fixture(scope="module")
def chains() -> list[Protein]:
    return make_proteins(FOLDS, 0, NUMBERS)


def profile_regression(train: list[Protein]) -> Predictor:
    return _torsion_regression(train, _windows, _fit_ridge)


def coupling_regression(train: list[Protein]) -> Predictor:
    return _torsion_regression(train, partial(_couplings, potential=fit_contact_potential(train)), _fit_ridge)


def coupling_boosting(train: list[Protein]) -> Predictor:
    return _torsion_regression(train, partial(_couplings, potential=fit_contact_potential(train)), _fit_boosting)


def test_the_chain_with_the_same_couplings_is_copied(chains: list[Protein], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "NEIGHBOURS", 1)
    predict = _coupling_neighbours(chains)
    assert [_score(predict(each), each) for each in chains[:10]] == [1.0] * 10
    shorter = next(each for each in chains if len(each) == 12)
    longer = next(each for each in chains if len(each) == 14)
    assert _coupling_neighbours([shorter])(longer).shape == (14, 14)  # what is missing at the end is filled


def test_the_typical_chain_is_the_most_frequent_fold(chains: list[Protein]) -> None:
    helices = [each for each, number in zip(chains, NUMBERS, strict=True) if _is_helix(number)]
    others = [each for each, number in zip(chains, NUMBERS, strict=True) if not _is_helix(number)]
    assert len(helices) > 3
    predict = _typical_chain([*helices * 3, *others[:3]])
    assert np.mean([_score(predict(each), each) for each in helices]) > 0.8


def _is_helix(number: int) -> bool:
    elements = make_family(FOLDS, 0, number).elements
    return bool((elements == HELIX).sum() >= len(elements) - 3)


@pytest.mark.long
def test_the_profile_regression_learns_a_fold_that_letters_tell(chains: list[Protein]) -> None:
    """With helices written in alanine and all else in glycine it finds the fold; with shuffled couplings it cannot."""
    told = []
    for each, number in zip(chains, NUMBERS, strict=True):
        letters = make_family(FOLDS, 0, number).elements.astype(np.int8)  # one amino acid for each element
        told.append(replace(each, aatype=letters, msa=np.tile(letters, (4, 1)), atom_mask=_backbone(each)))
    score = np.mean([_score(profile_regression(told[:90])(each), each) for each in told[90:]])
    hidden = np.mean([_score(profile_regression(chains[:90])(each), each) for each in chains[90:]])
    assert score > 0.85
    assert hidden < score - 0.2


def _backbone(chain: Protein) -> np.ndarray:
    mask = np.zeros_like(chain.atom_mask)
    mask[:, : residues.CB] = 1
    return mask


@pytest.mark.parametrize("build", [coupling_regression, _coupling_neighbours, coupling_boosting])
def test_couplings_tell_the_fold_and_columns_alone_do_not(chains: list[Protein], build: Any) -> None:
    """Each column of the same letters in another order has no couplings."""
    if build is coupling_boosting:
        pytest.importorskip("lightgbm")
    random = np.random.default_rng(0)
    mixed = [replace(each, msa=random.permuted(each.msa, axis=0)) for each in chains]
    predict = build(chains[:90])
    typical = _mean_score(_typical_chain(chains[:90]), chains[90:], chains[90:])
    assert _mean_score(predict, chains[90:], chains[90:]) > typical + 0.1
    assert _mean_score(predict, mixed[90:], chains[90:]) < typical + 0.05


def _mean_score(predict: Predictor, shown: list[Protein], true: list[Protein]) -> float:
    return float(np.mean([_score(predict(each), chain) for each, chain in zip(shown, true, strict=True)]))


def test_unknown_atoms_are_left_out(chains: list[Protein]) -> None:
    broken = replace(chains[0], atom_mask=chains[0].atom_mask.copy(), atoms=chains[0].atoms.copy())
    broken.atom_mask[3], broken.atoms[3] = 0, 0
    for build in (_typical_chain, _coupling_neighbours, profile_regression, coupling_regression):
        distances = build([broken, *chains[1:40]])(broken)
        assert np.isfinite(distances).all()
        assert 0 <= _score(distances, broken) <= 1
