"""Each baseline finds what it looks for where it is there to be found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from workloads.openfold import residues
from workloads.openfold.baselines import (
    _nearest_chain,
    _pair_regression,
    _profile_regression,
    _score,
    _typical_chain,
)
from workloads.openfold.features import Protein
from workloads.openfold.proteins import HELIX, Families, make_family, make_proteins

FOLDS = Families(12, 14, 16, hairpins_per_helix=1)
NUMBERS = range(120)


@pytest.fixture(scope="module")
def chains() -> list[Protein]:
    return make_proteins(FOLDS, 0, NUMBERS)


def test_the_nearest_chain_is_copied(chains: list[Protein]) -> None:
    predict = _nearest_chain(chains)
    assert [_score(predict(each), each) for each in chains[:10]] == [1.0] * 10
    shorter = next(each for each in chains if len(each) == 12)
    longer = next(each for each in chains if len(each) == 14)
    assert _nearest_chain([shorter])(longer).shape == (14, 14)  # what is missing at the end is filled


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
    score = np.mean([_score(_profile_regression(told[:90])(each), each) for each in told[90:]])
    hidden = np.mean([_score(_profile_regression(chains[:90])(each), each) for each in chains[90:]])
    assert score > 0.85
    assert hidden < score - 0.2


def _backbone(chain: Protein) -> np.ndarray:
    mask = np.zeros_like(chain.atom_mask)
    mask[:, : residues.CB] = 1
    return mask


def test_the_pair_regression_finds_what_varies_together(chains: list[Protein]) -> None:
    predict = _pair_regression(chains[:90])
    coupled, other = [], []
    for chain, number in zip(chains[90:], NUMBERS[90:], strict=True):
        distances, partner = predict(chain), make_family(FOLDS, 0, number).partner
        for first in range(len(chain) - 7):
            (coupled if partner[first] == first + 7 else other).append(distances[first, first + 7])
    assert len(coupled) > 5
    assert np.mean(coupled) < np.mean(other) - 2  # angstrom, at the same separation


def test_unknown_atoms_are_left_out(chains: list[Protein]) -> None:
    broken = replace(chains[0], atom_mask=chains[0].atom_mask.copy(), atoms=chains[0].atoms.copy())
    broken.atom_mask[3], broken.atoms[3] = 0, 0
    for build in (_typical_chain, _nearest_chain, _profile_regression, _pair_regression):
        distances = build([broken, *chains[1:40]])(broken)
        assert np.isfinite(distances).all()
        assert 0 <= _score(distances, broken) <= 1
