"""Families depend on seed and number alone. They are proteins, and only pairs of columns tell their fold."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from benchmarks.baselines.openfold import compute_affinity, fit_contact_potential
from mlhpc.suite.data.build import VALIDATION_INDEX
from mlhpc.suite.data.manifest import compare_files, read_manifest
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import DESCRIPTOR, features, proteins, residues
from mlhpc.workloads.openfold import generate as generator
from mlhpc.workloads.openfold.data import OpenFoldData
from mlhpc.workloads.openfold.features import SLOT_ARRAYS, build_alignment, build_sample, choose_recycles
from mlhpc.workloads.openfold.metric import compute_sample_lddt_ca
from mlhpc.workloads.openfold.proteins import (
    HELIX,
    KINDS,
    STRAND,
    Families,
    Family,
    build_atoms,
    build_backbone,
    make_family,
    make_proteins,
)
from mlhpc.workloads.openfold.shard_form import convert_to_proteins
from tests.workloads.openfold.conftest import SMALL_NET

FOLDS = Families(20, 24, 16, hairpins_per_helix=3)
KIND_OF = np.array([next(k for k, kind in enumerate(KINDS) if letter in kind) for letter in residues.LETTERS])


def test_the_result_is_complete_and_described(tiny_data: Path) -> None:
    manifest = read_manifest(tiny_data)
    assert compare_files(tiny_data, deep=True) == []
    assert {split: manifest.samples(split) for split in manifest.splits} == {"train": 6, "validation": 4}
    assert manifest.attributes["train_mean_rows"] == 6
    assert manifest.attributes["train_templates"] is True


def test_a_family_does_not_depend_on_its_shard() -> None:
    together = make_proteins(FOLDS, 7, range(5, 9))
    alone = make_proteins(FOLDS, 7, range(7, 8))[0]
    np.testing.assert_allclose(alone.atoms, together[2].atoms, atol=1e-5)
    np.testing.assert_array_equal(alone.msa, together[2].msa)


def test_other_seeds_and_sizes_are_refused_or_different(
    tiny: generator.DataSize, tiny_data: Path, world: World
) -> None:
    with pytest.raises(InputError, match="holds a data set with seed = 3, not 4"):
        generator.generate(tiny_data, "smoke", seed=4, world=world)
    with pytest.raises(InputError, match="unknown size 'huge'; sizes: smoke, mini"):
        generator.generate(tiny_data, "huge", seed=3, world=world)
    assert not np.array_equal(make_family(FOLDS, 0, 0).msa[:, :20], make_family(FOLDS, 1, 0).msa[:, :20])


def test_chains_have_the_geometry_of_the_peptide_bond() -> None:
    for protein in make_proteins(FOLDS, 0, range(4)):
        ca, c, n = (protein.atoms[:, k] for k in (residues.CA, residues.C, residues.N))
        np.testing.assert_allclose(np.linalg.norm(ca[1:] - ca[:-1], axis=1), 3.80, atol=0.03)
        np.testing.assert_allclose(np.linalg.norm(n[1:] - c[:-1], axis=1), residues.C_N, atol=2e-3)  # rounded to 0.001


def test_an_all_helix_chain_rises_as_an_alpha_helix() -> None:
    ca = build_backbone(np.tile([-57.0, -47.0], (1, 40, 1)))[0, :, 1]
    ends = ca[36] - ca[0]
    assert np.linalg.norm(ends) / 36 == pytest.approx(1.5, abs=0.1)  # angstrom per residue
    assert np.linalg.norm(ca[4:] - ca[:-4], axis=1).mean() == pytest.approx(6.2, abs=0.3)


def test_a_column_alone_says_nothing_of_the_fold() -> None:
    """Helices, strands and all others have the same letters and keep the chain's as often: a column alone has nothing."""
    drawn = [make_family(FOLDS, 0, number) for number in range(1200)]
    letters = np.concatenate([each.msa[1:6].T for each in drawn])  # (residues, rows)
    conserved = letters == np.concatenate([each.sequence for each in drawn])[:, None]
    elements = np.concatenate([each.elements for each in drawn])
    shares = {
        kind: np.append(np.bincount(letters[chosen].ravel(), minlength=residues.MSA_CLASSES), conserved[chosen].sum())
        / letters[chosen].size
        for kind, chosen in (("helix", elements == HELIX), ("strand", elements == STRAND), ("other", elements > STRAND))
    }
    for kind in ("strand", "other"):
        np.testing.assert_allclose(shares[kind], shares["helix"], atol=0.012)  # a quarter of a letter's share


@pytest.mark.parametrize("size", ["smoke", "mini", "small", "full"])
def test_relatives_are_as_like_the_chain_as_in_real_families(size: str) -> None:
    """Relatives differ in that by more than chance, and a column's letters tell a hidden one."""
    alike, spread, guessed = [], [], []
    for number in range(24):
        one = make_family(generator.SIZES[size].families, 0, number)
        rows = one.msa[1:33]
        shares = (rows == one.sequence).mean(1)
        mean = shares.mean()
        alike.append(mean)
        spread.append(
            shares.var() / (mean * (1 - mean) / len(one.sequence))
        )  # 1 if all had the same share, but for chance
        votes = np.eye(residues.MSA_CLASSES)[rows]
        others = votes.sum(0) - votes  # what a profile without the row has
        guessed.append((others.argmax(-1) == rows).mean())
    assert 0.3 < np.mean(alike) < 0.6
    assert np.mean(spread) > 1.4
    assert np.mean(guessed) > 0.3  # 0.05 in unrelated sequences


def test_relatives_descend_from_the_ancestors_of_clades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proteins, "RELATIVE_KEEPS", (1.0, 1.0))
    for rate in ("DRIFT_RATE", "GAP_RATE"):
        monkeypatch.setattr(proteins, rate, 0.0)
    alike = []
    for number in range(20):
        one = make_family(Families(100, 100, 64), 0, number)
        ancestors = np.unique(one.msa, axis=0)
        assert len(ancestors) == proteins.CLADES
        alike.append((ancestors[:, None] == ancestors).mean(-1)[~np.eye(proteins.CLADES, dtype=bool)].mean())
    assert np.mean(alike) == pytest.approx(proteins.CLADE_KEEPS**2, abs=0.04)  # and 0.02 by chance


def test_coupled_residues_touch_and_have_fitting_letters() -> None:
    fitting = []
    for number in range(20):
        one = make_family(FOLDS, 0, number)
        ca = build_backbone(one.torsions)[0, :, residues.CA]
        coupled = np.flatnonzero(one.partner > np.arange(len(one.partner)))
        assert np.array_equal(one.partner[one.partner], np.arange(len(one.partner)))
        assert np.linalg.norm(ca[coupled] - ca[one.partner[coupled]], axis=-1).max(initial=0) < 8.5
        first, second = one.msa[:, coupled], one.msa[:, one.partner[coupled]]
        known = (first < residues.UNKNOWN) & (second < residues.UNKNOWN)
        fitting.append((KIND_OF[first[known]] ^ 1) == KIND_OF[second[known]])
    assert 0.94 < np.concatenate(fitting).mean() < 0.99  # but for drift


def test_alignments_show_what_one_sequence_hides() -> None:
    potential = fit_contact_potential(make_proteins(FOLDS, 0, range(100)))
    drawn = [make_family(FOLDS, 0, number) for number in range(100, 160)]
    assert _partners_found(drawn, potential, 16) > 0.7
    assert _partners_found(drawn, potential, 1) < 0.4


def _partners_found(drawn: list[Family], potential: np.ndarray, rows: int) -> float:
    """Compute how often a coupled residue's column fits its partner's best of all that are not its neighbours."""
    found = []
    for each in drawn:
        index = np.arange(len(each.sequence))
        fit = compute_affinity(each.msa[:rows], potential)
        fit[np.abs(index[:, None] - index) < 3] = -np.inf
        coupled = each.partner != index
        found.append((fit.argmax(1) == each.partner)[coupled])
    return float(np.concatenate(found).mean())


def test_the_torsions_without_noise_are_far_above_every_target() -> None:
    drawn = [make_family(FOLDS, 0, VALIDATION_INDEX + number) for number in range(64)]
    sequences, chi = [each.sequence for each in drawn], [each.chi[0] for each in drawn]
    truth = build_atoms(sequences, [each.torsions[0] for each in drawn], chi)
    oracle = build_atoms(sequences, [each.mean_torsions for each in drawn], chi)
    pairs = [[torch.from_numpy(x[None, :, residues.CA]) for x in both] for both in zip(oracle, truth, strict=True)]
    assert np.mean([float(compute_sample_lddt_ca(*both, torch.ones(both[0].shape[:2]))) for both in pairs]) > 0.93


@pytest.mark.parametrize("size", ["smoke", "mini"])
def test_only_couplings_can_reach_the_target(size: str) -> None:
    """The target lies three standard errors beyond every baseline that knows no couplings, as the card states them."""
    card = DESCRIPTOR.card().size(size)
    found = card.baselines.values
    assert {"typical_chain", "profile_regression"} < set(found)
    assert max(found, key=lambda name: found[name].value) == "coupling_neighbours"
    for name, each in found.items():
        assert 0 < each.standard_error < 0.02, name
        assert name.startswith("coupling") or card.threshold > each.value + 3 * each.standard_error, name


def test_samples_are_keyed_by_seed_epoch_and_index(train: OpenFoldData) -> None:
    one = train.load([3], seed=1, epoch=2)
    again = train.load([5, 3, 0], seed=1, epoch=2)
    for name in ("aatype", "atoms", "true_msa", "hidden_mask", "clamp_fape", "recycles"):
        torch.testing.assert_close(one[name][0], again[name][1])
    slots = one["msa"].shape[1]
    torch.testing.assert_close(one["msa"][0], again["msa"][1, -slots:])
    others = [train.load([3], seed=s, epoch=e)["hidden_mask"] for s, e in ((1, 3), (2, 2), (2, 1))]
    assert not any(torch.equal(one["hidden_mask"], other) for other in others)


def test_features_have_the_form_of_the_supplement(train: OpenFoldData) -> None:
    batch = train.load(range(6), seed=0, epoch=1)
    assert batch["aatype"].shape == (6, SMALL_NET.crop_size)  # longer chains are cropped
    profile = batch["cluster_profile"].sum(-1) * batch["msa_mask"]
    torch.testing.assert_close(profile, batch["msa_mask"])
    shown, true, hidden = batch["msa"][:, -1], batch["true_msa"], batch["hidden_mask"] > 0
    assert torch.equal(shown[~hidden], true[~hidden])
    assert 0.05 < hidden.float().mean() < 0.3
    assert (shown[hidden] == residues.MASKED).float().mean() == pytest.approx(0.7, abs=0.2)


def test_rows_are_clustered_by_the_whole_chain_then_cropped() -> None:
    protein = make_proteins(Families(40, 40, 12), 5, range(1))[0]
    settings = structs.replace(SMALL_NET, max_templates=0)
    got = build_sample(protein, settings, np.random.default_rng(7), length=10, training=True)
    rng = np.random.default_rng(7)
    recycles = choose_recycles(settings, rng)
    rng.random()  # of the clamp
    begin = int(rng.integers(31))
    slots = [build_alignment(protein.msa, protein.deletions, settings, rng) for _ in range(recycles + 1)]
    for name in SLOT_ARRAYS:
        np.testing.assert_array_equal(got[name], np.stack([slot[name][:, begin : begin + 10] for slot in slots]))
    np.testing.assert_array_equal(got["true_msa"], slots[-1]["true_msa"][:, begin : begin + 10])


def test_deep_alignments_are_clustered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    protein = make_proteins(Families(20, 20, 40), 5, range(1))[0]
    whole = build_alignment(protein.msa, protein.deletions, SMALL_NET, np.random.default_rng(1))
    monkeypatch.setattr(features, "ROWS_AT_ONCE", 7)
    parts = build_alignment(protein.msa, protein.deletions, SMALL_NET, np.random.default_rng(1))
    for name, array in whole.items():
        np.testing.assert_array_equal(array, parts[name])


def test_validation_is_whole_and_never_random(validation: OpenFoldData) -> None:
    batch = validation.load([0, 1], seed=0, epoch=0)
    assert batch["recycles"].tolist() == [SMALL_NET.num_recycling_iters] * 2
    assert batch["mask"].sum(1).max() == batch["mask"].shape[1]
    torch.testing.assert_close(batch["msa"], validation.load([0, 1], seed=0, epoch=0)["msa"])


def test_damaged_alignments_are_refused(tiny_data: Path) -> None:
    arrays = ShardReader(tiny_data, "train").read([0])
    arrays["alignment.offsets"] = arrays["alignment.offsets"] - np.array([0, 1])
    with pytest.raises(InputError, match="are not rows of"):
        list(convert_to_proteins(arrays))
