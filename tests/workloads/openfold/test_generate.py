"""Families depend on seed and number alone. They are proteins and can be learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from suite.data.build import VALIDATION_INDEX
from suite.data.manifest import read_manifest, verify
from suite.data.shards import ShardReader
from suite.errors import InputError
from suite.world import World
from tests.workloads.openfold.conftest import SMALL_NET
from workloads.openfold import DESCRIPTOR, features, residues
from workloads.openfold import generate as generator
from workloads.openfold.baselines import baselines, column_vote
from workloads.openfold.data import OpenFoldData
from workloads.openfold.features import SLOTTED, alignment, drawn_recycles, sample
from workloads.openfold.losses import sample_lddt_ca
from workloads.openfold.proteins import HELIX, Families, build_atoms, build_backbone, draw, families
from workloads.openfold.shard_form import proteins_of

FOLDS = Families(20, 24, 16)


def test_the_result_is_complete_and_described(tiny_data: Path) -> None:
    manifest = read_manifest(tiny_data)
    assert verify(tiny_data, deep=True) == []
    assert {split: manifest.samples(split) for split in manifest.splits} == {"train": 6, "validation": 4}
    assert manifest.attributes["train_mean_rows"] == 6
    assert manifest.attributes["train_templates"] is True


def test_a_family_does_not_depend_on_its_shard() -> None:
    together = families(FOLDS, 7, range(5, 9))
    alone = families(FOLDS, 7, range(7, 8))[0]
    np.testing.assert_allclose(alone.atoms, together[2].atoms, atol=1e-5)
    np.testing.assert_array_equal(alone.msa, together[2].msa)


def test_other_seeds_and_sizes_are_refused_or_different(
    tiny: generator.DataSize, tiny_data: Path, world: World
) -> None:
    with pytest.raises(InputError, match="holds other data: seed is 3, not 4"):
        generator.generate(tiny_data, "smoke", seed=4, world=world)
    with pytest.raises(InputError, match="unknown size 'huge'; sizes: smoke, mini"):
        generator.generate(tiny_data, "huge", seed=3, world=world)
    assert not np.array_equal(draw(FOLDS, 0, 0).msa[:, :20], draw(FOLDS, 1, 0).msa[:, :20])


def test_chains_have_the_geometry_of_the_peptide_bond() -> None:
    for protein in families(FOLDS, 0, range(4)):
        ca, c, n = (protein.atoms[:, k] for k in (residues.CA, residues.C, residues.N))
        np.testing.assert_allclose(np.linalg.norm(ca[1:] - ca[:-1], axis=1), 3.80, atol=0.03)
        np.testing.assert_allclose(np.linalg.norm(n[1:] - c[:-1], axis=1), residues.C_N, atol=1e-3)


def test_an_all_helix_chain_rises_as_an_alpha_helix() -> None:
    ca = build_backbone(np.tile([-57.0, -47.0], (1, 40, 1)))[0, :, 1]
    ends = ca[36] - ca[0]
    assert np.linalg.norm(ends) / 36 == pytest.approx(1.5, abs=0.1)  # angstrom per residue
    assert np.linalg.norm(ca[4:] - ca[:-4], axis=1).mean() == pytest.approx(6.2, abs=0.3)


def test_alignments_show_what_one_sequence_hides() -> None:
    drawn = [draw(FOLDS, 0, number) for number in range(200)]
    right = {
        rows: np.mean(np.concatenate([column_vote(each.msa[:rows]) == each.elements for each in drawn]))
        for rows in (1, 16)
    }
    assert right[16] > right[1] + 0.02


def test_the_oracle_is_far_above_every_baseline(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(generator.SIZES, "mini", generator.DataSize(FOLDS, 8, 64, 64))
    generator.generate(tmp_path / "d", "mini", seed=0, world=world)
    values = baselines(tmp_path / "d")
    drawn = [draw(FOLDS, 0, VALIDATION_INDEX + number) for number in range(64)]
    sequences, chi = [each.sequence for each in drawn], [each.chi[0] for each in drawn]
    truth = list(proteins_of(ShardReader(tmp_path / "d", "validation").read(range(64))))

    def score(torsions: list[np.ndarray]) -> float:
        chains = build_atoms(sequences, torsions, chi)
        ca = [
            (torch.from_numpy(x[None, :, 1]), torch.from_numpy(t.atoms[None, :, 1]))
            for x, t in zip(chains, truth, strict=True)
        ]
        return float(np.mean([float(sample_lddt_ca(one, other, torch.ones(one.shape[:2]))) for one, other in ca]))

    helix = score([np.tile([-63.0, -42.0], (len(each.sequence), 1)) for each in drawn])
    assert values["all_helix"] == pytest.approx(helix, abs=1e-3)
    assert values["all_strand"] < values["all_helix"] < values["column_vote"] < 0.75
    assert score([each.mean_torsions for each in drawn]) > 0.93
    assert HELIX == 0


def test_the_target_of_mini_lies_beyond_its_baselines(tmp_path: Path, world: World) -> None:
    generator.generate(tmp_path, "mini", seed=0, world=world)
    assert DESCRIPTOR.card().size("mini").threshold > max(baselines(tmp_path).values())


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
    protein = families(Families(40, 40, 12), 5, range(1))[0]
    settings = SMALL_NET.model_copy(update={"max_templates": 0})
    got = sample(protein, settings, np.random.default_rng(7), length=10, training=True)
    rng = np.random.default_rng(7)
    recycles = drawn_recycles(settings, rng)
    rng.random()  # of the clamp
    begin = int(rng.integers(31))
    slots = [alignment(protein.msa, protein.deletions, settings, rng) for _ in range(recycles + 1)]
    for name in SLOTTED:
        np.testing.assert_array_equal(got[name], np.stack([slot[name][:, begin : begin + 10] for slot in slots]))
    np.testing.assert_array_equal(got["true_msa"], slots[-1]["true_msa"][:, begin : begin + 10])


def test_deep_alignments_are_clustered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    protein = families(Families(20, 20, 40), 5, range(1))[0]
    whole = alignment(protein.msa, protein.deletions, SMALL_NET, np.random.default_rng(1))
    monkeypatch.setattr(features, "ROWS_AT_ONCE", 7)
    parts = alignment(protein.msa, protein.deletions, SMALL_NET, np.random.default_rng(1))
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
        list(proteins_of(arrays))
