"""FAPE, torsions and lDDT against slow references and under rigid motion; ideal geometry against chemistry."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.data import OpenFoldData
from mlhpc.workloads.openfold.features import SYNTHETIC_RESOLUTION
from mlhpc.workloads.openfold.geometry import (
    Frame,
    compute_atoms,
    compute_backbone_frames,
    compute_dihedral,
    compute_group_frames,
    compute_known_groups,
    compute_torsions_of,
    load_residue_table,
)
from mlhpc.workloads.openfold.losses import (
    EPS,
    Naming,
    compute_backbone_fape,
    compute_distogram_loss,
    compute_fape,
    compute_losses,
    compute_mean_distance,
    compute_sidechain_fape,
    rename_atoms,
)
from mlhpc.workloads.openfold.metric import compute_lddt_ca, compute_sample_lddt_ca
from mlhpc.workloads.openfold.model import OpenFoldNet
from mlhpc.workloads.openfold.structure import compute_frame_update
from tests.workloads.openfold.conftest import SMALL_NET


def chain(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Residue types, atoms, mask and the torsions they were made of; frames lie anywhere."""
    generator = torch.Generator().manual_seed(seed)
    aatype = torch.randint(0, 20, (1, length), generator=generator)
    angle = torch.randn(1, length, 7, 2, generator=generator, dtype=torch.float64)
    angle = angle / angle.norm(dim=-1, keepdim=True)
    update = torch.randn(1, length, 6, generator=generator, dtype=torch.float64)
    frame = compute_frame_update(update * torch.tensor([1.0, 1, 1, 8, 8, 8]))
    atoms = compute_atoms(aatype, compute_group_frames(aatype, frame, angle))
    return aatype, atoms, load_residue_table("ATOM_MASK", torch.device("cpu"))[aatype].double(), angle


def moved(points: Tensor, seed: int = 4) -> Tensor:
    turn = compute_frame_update(torch.randn(6, generator=torch.Generator().manual_seed(seed)).to(points)).rotation
    return points @ turn.T + torch.tensor([5.0, -7.0, 11.0]).to(points)


def test_torsions_and_frames_are_found_again_in_the_atoms_they_made() -> None:
    aatype, atoms, mask, angle = chain(200)
    found = compute_torsions_of(aatype, atoms, mask)
    error = ((found.angle - angle) * found.mask[..., None])[..., 2:, :]
    assert float(error.abs().max()) < 1e-6
    assert found.mask[..., 3:].sum() == load_residue_table("CHI_MASK", aatype.device)[aatype].sum()


@pytest.mark.parametrize(
    ("residue", "pair", "length"),
    [("F", ("CE2", "CZ"), 1.38), ("W", ("CH2", "CZ3"), 1.40), ("H", ("CE1", "NE2"), 1.32)],
)
def test_rings_that_no_bond_length_was_given_for_close(residue: str, pair: tuple[str, str], length: float) -> None:
    """0.05 angstrom is what mean values of different structures leave."""
    aatype = torch.tensor([[residues.LETTERS.index(residue)]])
    angle = torch.tensor([0.0, 1.0], dtype=torch.float64).expand(1, 1, 7, 2).clone()
    frame = Frame(torch.eye(3, dtype=torch.float64).expand(1, 1, 3, 3), torch.zeros(1, 1, 3, dtype=torch.float64))
    atoms = compute_atoms(aatype, compute_group_frames(aatype, frame, angle))[0, 0]
    names = residues.ATOM_NAMES[int(aatype)]
    distance = float((atoms[names.index(pair[0])] - atoms[names.index(pair[1])]).norm())
    assert distance == pytest.approx(length, abs=0.05)


def test_amino_acids_are_left_handed() -> None:
    aatype, atoms, _, _ = chain(60)
    n, ca, c, cb = (atoms[:, :, k] for k in (residues.N, residues.CA, residues.C, residues.CB))
    handed = (torch.linalg.cross(n - ca, c - ca) * (cb - ca)).sum(-1)
    not_glycine = aatype != residues.LETTERS.index("G")
    assert bool((handed[not_glycine] > 0).all())  # the CORN rule, seen from hydrogen


def test_dihedral_has_the_sign_of_iupac() -> None:
    points = [torch.tensor(p) for p in ([0.0, 1, 0], [0.0, 0, 0], [1.0, 0, 0], [1.0, 0, 1])]
    torch.testing.assert_close(compute_dihedral(*points), torch.tensor([1.0, 0.0]))  # clockwise, seen along the bond


def test_fape_equals_the_definition_and_does_not_change_under_rigid_motion() -> None:
    _, one, _, _ = chain(6, 1)
    _, other, _, _ = chain(6, 2)
    frames, true = compute_backbone_frames(one), compute_backbone_frames(other)
    got = compute_fape(frames, one[:, :, 1], true, other[:, :, 1])
    for i in range(6):
        for j in range(6):
            seen = [f.rotation[0, i].T @ (x[0, j, 1] - f.translation[0, i]) for f, x in ((frames, one), (true, other))]
            torch.testing.assert_close(got[0, i, :, j], seen[0] - seen[1])
    motion = compute_backbone_frames(moved(one))
    again = compute_fape(motion, moved(one)[:, :, 1], true, other[:, :, 1])
    torch.testing.assert_close(again, got, atol=1e-6, rtol=1e-6)


def test_the_mean_distance_and_its_gradient_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(3, 2, 5, 3, 7, generator=generator, dtype=torch.float64).requires_grad_()
    rows, columns = (torch.rand(2, n, generator=generator) > 0.3 for n in (5, 7))
    limit = torch.tensor([1.5, math.inf], dtype=torch.float64)[:, None, None]
    found = compute_mean_distance(vectors, limit, rows.double(), columns.double())
    distance = torch.minimum((vectors.square().sum(-2) + EPS).sqrt(), limit)
    both = (rows[:, :, None] & columns[:, None]).double()
    expected = (distance * both).sum((-1, -2)) / (both.sum((-1, -2)) + EPS)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    weights = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, vectors, weights)[0] for each in (found, expected)), rtol=1e-12, atol=1e-15
    )


def test_fape_of_the_truth_is_nothing_and_of_the_mirror_image_is_not() -> None:
    aatype, atoms, mask, _ = chain(12)
    clamp = torch.ones(1, dtype=torch.float64)

    def both(predicted: Tensor) -> tuple[float, float]:
        frames = compute_backbone_frames(predicted)
        held = compute_known_groups(aatype, predicted, mask, torch.zeros(1, 12))[0]
        pair = [torch.cat([each[:, :, :1], each[:, :, :1], each[:, :, :1], each[:, :, 1:]], 2) for each in held]
        groups = Frame(*pair)  # those of omega and phi hold nothing
        naming = Naming(atoms, mask, torch.zeros(1, 12))
        stacked = Frame(frames.rotation[None], frames.translation[None])
        return (
            float(compute_backbone_fape(stacked, atoms, mask, clamp)),
            float(compute_sidechain_fape(groups, predicted, aatype, atoms, mask, naming)),
        )

    assert max(both(moved(atoms))) < 0.0011  # sqrt(1e-4) angstrom over 10
    assert min(both(atoms * torch.tensor([1.0, 1, -1]))) > 0.05


def test_backbone_fape_is_clamped_only_where_asked() -> None:
    _, atoms, mask, _ = chain(8)
    far = atoms.clone()
    far[:, 4:] += 1000.0
    frames = compute_backbone_frames(far)
    stacked = Frame(frames.rotation[None], frames.translation[None])
    clamped, free = (float(compute_backbone_fape(stacked, atoms, mask, torch.tensor([c]).double())) for c in (1.0, 0.0))
    assert clamped < 1.0 < free


def test_symmetric_side_chains_take_the_better_name() -> None:
    aatype = torch.tensor([[residues.LETTERS.index(letter) for letter in "FDAYE"]])
    _, atoms, _, _ = chain(5)
    angle = torch.randn(1, 5, 7, 2, dtype=torch.float64)
    frame = compute_backbone_frames(atoms)
    atoms = compute_atoms(aatype, compute_group_frames(aatype, frame, angle / angle.norm(dim=-1, keepdim=True)))
    mask = load_residue_table("ATOM_MASK", aatype.device)[aatype].double()
    swapped = atoms.gather(2, load_residue_table("SWAP", aatype.device)[aatype][..., None].expand_as(atoms))
    assert float((swapped - atoms).abs().max()) > 1
    back = rename_atoms(atoms, aatype, swapped, mask)
    torch.testing.assert_close(back.atoms, atoms)
    assert back.swapped.tolist() == [[True, True, False, True, True]]
    same = rename_atoms(swapped, aatype, swapped, mask)
    torch.testing.assert_close(same.atoms, swapped)
    assert not same.swapped.any()
    # the frames of the truth are then those of the atoms with the better names
    frames = [
        compute_known_groups(aatype, *pair)[0] for pair in ((swapped, mask, back.swapped), (atoms, mask, same.swapped))
    ]
    torch.testing.assert_close(frames[0].rotation, frames[1].rotation)


def test_a_side_chain_s_frame_needs_only_its_own_atoms() -> None:
    """As in the reference; real structures lack atoms, and their geometry is not ideal."""
    aatype, atoms, mask, angle = chain(20)
    groups = compute_group_frames(aatype, compute_backbone_frames(atoms), angle)
    frames, known = compute_known_groups(aatype, atoms, mask, torch.zeros(1, 20))
    for number, group in enumerate((0, 3, 4, 5, 6, 7)):
        there = known[..., number] > 0
        torch.testing.assert_close(frames.rotation[:, :, number][there], groups.rotation[:, :, group][there])
        torch.testing.assert_close(frames.translation[:, :, number][there], groups.translation[:, :, group][there])
    without_n = mask.clone()
    without_n[..., residues.N] = 0
    lost = known - compute_known_groups(aatype, atoms, without_n, torch.zeros(1, 20))[1]
    assert lost[..., 0].all()
    assert float(lost[..., 1:].abs().sum()) == 0


def slow_lddt(predicted: np.ndarray, true: np.ndarray, mask: np.ndarray) -> tuple[list[float], float]:
    """Mariani et al. 2013, pair by pair: per residue, and over all pairs."""
    per, kept, total = [], 0.0, 0
    for i in range(len(true)):
        own, pairs = 0.0, 0
        for j in range(len(true)):
            if i == j or not (mask[i] and mask[j]) or np.linalg.norm(true[i] - true[j]) >= 15:
                continue
            error = abs(np.linalg.norm(true[i] - true[j]) - np.linalg.norm(predicted[i] - predicted[j]))
            own += sum(error < limit for limit in (0.5, 1, 2, 4)) / 4
            pairs += 1
        per.append(own / pairs if pairs else math.nan)
        kept, total = kept + own, total + pairs
    return per, kept / total


def test_lddt_equals_the_definition_and_does_not_change_under_rigid_motion() -> None:
    rng = np.random.default_rng(0)
    true = np.cumsum(rng.normal(size=(30, 3)) * 3, axis=0)
    predicted = true + rng.normal(size=(30, 3))
    mask = (rng.random(30) > 0.2).astype(float)
    tensors = [torch.from_numpy(each)[None] for each in (predicted, true, mask)]
    per, whole = slow_lddt(predicted, true, mask)
    known = mask > 0
    np.testing.assert_allclose(compute_lddt_ca(*tensors)[0].numpy()[known], np.array(per)[known], atol=1e-8)
    assert float(compute_sample_lddt_ca(*tensors)) == pytest.approx(whole)
    assert float(compute_sample_lddt_ca(moved(tensors[0]), tensors[1], tensors[2])) == pytest.approx(whole)
    assert float(compute_sample_lddt_ca(tensors[1], tensors[1], tensors[2])) == 1.0


def test_distogram_loss_is_least_at_the_true_bins() -> None:
    aatype, atoms, mask, _ = chain(10)
    edges = torch.linspace(2.3125, 21.6875, 63)
    cb = torch.where((aatype == 7)[..., None], atoms[:, :, 1], atoms[:, :, 4])
    bins = (torch.cdist(cb, cb)[..., None] > edges).sum(-1)
    sharp = 50 * torch.nn.functional.one_hot(bins, 64).float()
    assert float(compute_distogram_loss(sharp, aatype, atoms, mask)) < 1e-3
    assert float(compute_distogram_loss(torch.zeros_like(sharp), aatype, atoms, mask)) == pytest.approx(
        math.log(64), rel=1e-4
    )


def test_plddt_is_learned_from_structures_of_good_resolution_only(train: OpenFoldData) -> None:
    torch.manual_seed(0)
    batch = dict(train.load(range(6), seed=0, epoch=1))
    assert (batch["resolution"] == SYNTHETIC_RESOLUTION).all()  # synthetic
    prediction = OpenFoldNet(SMALL_NET)(batch)
    every = compute_losses(SMALL_NET, prediction, batch)["plddt"].detach()
    assert float(every.min()) > 0
    batch["resolution"] = torch.tensor([0.05, 0.1, 2.0, 3.0, 3.1, math.nan])
    some = compute_losses(SMALL_NET, prediction, batch)["plddt"].detach()
    torch.testing.assert_close(some, every * torch.tensor([0.0, 1, 1, 1, 0, 0]))


def test_the_total_has_the_weights_of_the_rules(train: OpenFoldData) -> None:
    torch.manual_seed(0)
    batch = train.load(range(3), seed=0, epoch=1)
    terms = compute_losses(SMALL_NET, OpenFoldNet(SMALL_NET)(batch), batch)
    expected = (
        0.5 * terms["fape_backbone"]
        + 0.5 * terms["fape_sidechain"]
        + terms["supervised_chi"]
        + 0.3 * terms["distogram"]
        + 2.0 * terms["masked_msa"]
        + 0.01 * terms["plddt"]
    )
    torch.testing.assert_close(terms["total"], expected * batch["mask"].sum(-1).sqrt())
