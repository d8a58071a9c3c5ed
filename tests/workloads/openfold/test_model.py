"""The network is AlphaFold 2's, part by part; what must not matter (padding, batch mates, rigid motions) does not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.data import OpenFoldData
from mlhpc.workloads.openfold.evoformer import (
    Attention,
    OuterProductMean,
    TriangleAttention,
    TriangleMultiplication,
    encode_distances,
)
from mlhpc.workloads.openfold.features import Protein, build_sample
from mlhpc.workloads.openfold.geometry import Frame, load_residue_table
from mlhpc.workloads.openfold.losses import compute_losses
from mlhpc.workloads.openfold.model import PSI, OpenFoldNet, compute_template_features
from mlhpc.workloads.openfold.proteins import Families, make_proteins
from mlhpc.workloads.openfold.structure import InvariantPointAttention, compute_frame_update
from mlhpc.workloads.openfold.work import compute_work, count_forward
from tests.workloads.openfold.conftest import SMALL_NET

# reference: mlcommons/hpc openfold; its log says model_parameters_count 93229082
PARTS = {
    "input_embedder": 33_024,
    "recycling_embedder": 2_816,
    "template_angle_embedder": 80_640,
    "template_stack": 5_696 + 218_368 + 24_704,  # embedder, pair stack, pointwise attention
    "extra_msa_embedder": 1_664,
    "extra_msa_stack": 2_805_248,
    "evoformer": 87_936_384,
    "structure_module": 2_019_116,
    "heads": 101_422,
}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def scrambled(module: nn.Module, seed: int = 0) -> nn.Module:
    """With random weights everywhere: the final layers start at zero, which hides mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


@pytest.mark.parametrize("itself", [True, False])
def test_attention_and_its_gradient_are_those_of_the_definition(itself: bool) -> None:
    layer = scrambled(Attention(6, 6 if itself else 5, 4, 3, gated=itself)).double()
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 7, 4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    key = query if itself else torch.randn(2, 7, 5, 5, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(3, 2, 1, key.shape[-2], 4, generator=generator, dtype=torch.float64).requires_grad_()
    q, k, v = (
        torch.unflatten(x @ linear.weight.t(), -1, (3, 4)).transpose(-2, -3)
        for x, linear in ((query, layer.linear_q), (key, layer.linear_k), (key, layer.linear_v))
    )
    attention = (q @ k.transpose(-1, -2) / 2 + bias.movedim(0, 2).transpose(-1, -2)).softmax(-1)
    expected = (attention @ v).transpose(-2, -3).flatten(-2)
    if layer.linear_g is not None:
        expected = expected * layer.linear_g(query).sigmoid()
    expected, found = layer.linear_o(expected), layer(query, key, bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    weights, inputs = torch.randn(found.shape, generator=generator, dtype=torch.float64), {query, key, bias}
    for one, other in zip(
        *(torch.autograd.grad(each, [*inputs, *layer.parameters()], weights) for each in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def rotation(seed: int) -> Tensor:
    return compute_frame_update(torch.randn(6, generator=torch.Generator().manual_seed(seed)).double()).rotation


def positions(prediction) -> Tensor:
    return prediction.structure.atoms


def test_the_full_network_has_the_parameters_of_the_reference_part_by_part() -> None:
    with torch.device("meta"):
        net = OpenFoldNet(OpenFoldConfig())
    assert {name: count(part) for name, part in net.named_children()} == PARTS
    assert count(net) == 93_229_082


def test_closed_forms_give_the_reference_s_operations_and_parameters() -> None:
    full = count_forward(OpenFoldConfig(), residues=256)
    assert full.parameters == 93_229_082
    assert 2 * full.multiply_adds == pytest.approx(11.80e12, rel=1e-3)
    checkpointed = compute_work(OpenFoldConfig(checkpointing=True), global_batch_size=128, element_bytes=2)
    assert checkpointed.executed_flops == pytest.approx(65e12, rel=0.01)


@pytest.mark.parametrize("templates", [0, 2])
def test_closed_forms_equal_torch_s_counter(train: OpenFoldData, templates: int) -> None:
    own = structs.replace(SMALL_NET, max_templates=templates, num_recycling_iters=0, crop_size=12)
    net = OpenFoldNet(own)
    batch = dict(train.load([0], seed=0, epoch=1))
    batch |= {name: batch[name][:, -1:] for name in ("msa", "deletions", "cluster_profile", "cluster_deletions")}
    batch |= {name: batch[name][:, -1:] for name in ("msa_mask", "extra_msa", "extra_deletions", "extra_msa_mask")}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(batch)
    counted = count_forward(own, residues=SMALL_NET.crop_size)
    assert counted.parameters == count(net)
    assert counter.get_total_flops() == pytest.approx(2 * counted.multiply_adds, rel=0.03)  # and 3 x 3 frames


def test_every_parameter_gets_a_gradient(train: OpenFoldData) -> None:
    net = scrambled(OpenFoldNet(SMALL_NET))
    batch = train.load([0, 1], seed=0, epoch=1)
    compute_losses(SMALL_NET, net(batch), batch)["total"].mean().backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []


def test_checkpointing_gives_the_same_gradients(train: OpenFoldData) -> None:
    gradients = []
    batch = train.load([0, 1], seed=0, epoch=2)
    for checkpointing in (False, True):
        own = structs.replace(SMALL_NET, checkpointing=checkpointing, msa_dropout=0.2, pair_dropout=0.2)
        net = scrambled(OpenFoldNet(own))
        torch.manual_seed(5)
        compute_losses(own, net(batch), batch)["total"].mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
    torch.testing.assert_close(*gradients)


def test_a_prediction_does_not_depend_on_batch_mates_recycles_or_padding(train: OpenFoldData) -> None:
    net = scrambled(OpenFoldNet(SMALL_NET)).eval()
    together = train.load(range(6), seed=1, epoch=1)
    assert len(set(together["recycles"].tolist())) > 1
    with torch.no_grad():
        joint = positions(net(together))
        for index in range(6):
            alone = train.load([index], seed=1, epoch=1)
            assert alone["msa"].shape[1] == 1 + int(alone["recycles"])
            torch.testing.assert_close(positions(net(alone))[0], joint[index], atol=2e-4, rtol=1e-4)


def test_padded_residues_change_nothing(validation: OpenFoldData) -> None:
    net = scrambled(OpenFoldNet(SMALL_NET)).eval()
    batch = validation.load(range(4), seed=0, epoch=0)
    lengths = batch["mask"].sum(1).int().tolist()
    assert len(set(lengths)) > 1
    with torch.no_grad():
        joint = positions(net(batch))
        for index, length in enumerate(lengths):
            alone = positions(net(validation.load([index], seed=0, epoch=0)))[0]
            assert len(alone) == length
            torch.testing.assert_close(alone, joint[index, :length], atol=2e-4, rtol=1e-4)


def test_initially_every_residue_stays_at_the_origin(train: OpenFoldData) -> None:
    batch = train.load([0], seed=0, epoch=1)
    structure = OpenFoldNet(SMALL_NET)(batch).structure
    assert float(structure.frames.translation.detach().abs().max()) == 0.0


def test_point_attention_is_invariant_under_rigid_motion() -> None:
    torch.manual_seed(0)
    layer = scrambled(InvariantPointAttention(SMALL_NET)).double()
    single, pair = SMALL_NET.single_channels, SMALL_NET.pair_channels
    s, z, mask = torch.randn(2, 7, single).double(), torch.randn(2, 7, 7, pair).double(), torch.ones(2, 7).double()
    frame = Frame(compute_frame_update(torch.randn(2, 7, 6).double()).rotation, torch.randn(2, 7, 3).double())
    turn, shift = rotation(1), torch.tensor([3.0, -1.0, 2.0]).double()
    moved = Frame(turn @ frame.rotation, frame.translation @ turn.T + shift)
    bias = layer.pair_bias(z, mask)
    torch.testing.assert_close(layer(s, z, frame, bias), layer(s, z, moved, bias))


def test_frame_updates_are_rotations() -> None:
    turn = compute_frame_update(torch.randn(50, 6)).rotation
    torch.testing.assert_close(turn @ turn.mT, torch.eye(3).expand(50, 3, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.linalg.det(turn), torch.ones(50))


def test_a_frame_update_turns_as_its_quaternion() -> None:
    b, c, d = vector = (0.3, -1.2, 0.7)
    norm = 1 + sum(each * each for each in vector)
    expected = [
        [1 + b * b - c * c - d * d, 2 * (b * c - d), 2 * (b * d + c)],
        [2 * (b * c + d), 1 - b * b + c * c - d * d, 2 * (c * d - b)],
        [2 * (b * d - c), 2 * (c * d + b), 1 - b * b - c * c + d * d],
    ]
    found = compute_frame_update(torch.tensor([*vector, 4.0, 5.0, 6.0], dtype=torch.float64))
    torch.testing.assert_close(found.rotation, torch.tensor(expected, dtype=torch.float64) / norm)
    assert found.translation.tolist() == [4.0, 5.0, 6.0]


@pytest.mark.parametrize("outgoing", [True, False])
def test_triangle_multiplication_sums_over_third_residues(outgoing: bool) -> None:
    torch.manual_seed(0)
    layer = scrambled(TriangleMultiplication(4, 6, outgoing=outgoing))
    z, mask = torch.randn(1, 5, 5, 4), (torch.rand(1, 5, 5) > 0.3).float()
    n = layer.layer_norm_in(z)
    a = layer.linear_a_p(n) * layer.linear_a_g(n).sigmoid() * mask[..., None]
    b = layer.linear_b_p(n) * layer.linear_b_g(n).sigmoid() * mask[..., None]
    slow = torch.zeros(1, 5, 5, 6)
    for i in range(5):
        for j in range(5):
            for k in range(5):
                slow[:, i, j] += a[:, i, k] * b[:, j, k] if outgoing else a[:, k, i] * b[:, k, j]
    expected = layer.linear_z(layer.layer_norm_out(slow)) * layer.linear_g(n).sigmoid()
    torch.testing.assert_close(layer(z, mask), expected)


def test_attention_around_the_ending_node_is_that_of_the_transposed_map() -> None:
    start = scrambled(TriangleAttention(4, 3, 2, starting=True))
    end = TriangleAttention(4, 3, 2, starting=False)
    end.load_state_dict(start.state_dict())
    z, mask = torch.randn(1, 5, 5, 4), (torch.rand(1, 5, 5) > 0.3).float()
    torch.testing.assert_close(end(z, mask), start(z.transpose(1, 2), mask.transpose(1, 2)).transpose(1, 2))


def test_outer_product_mean_counts_known_rows_only() -> None:
    layer = scrambled(OuterProductMean(4, 3, 2))
    m, mask = torch.randn(1, 6, 5, 4), (torch.rand(1, 6, 5) > 0.4).float()
    n = layer.layer_norm(m)
    a, b = layer.linear_1(n) * mask[..., None], layer.linear_2(n) * mask[..., None]
    outer = torch.einsum("nsic,nsjd->nijcd", a, b).flatten(-2)
    known = torch.einsum("nsi,nsj->nij", mask, mask)
    torch.testing.assert_close(layer(m, mask), layer.linear_out(outer) / (known[..., None] + 1e-3))


def template_batch(protein: Protein, crop: int, *, seed: int = 0, training: bool = False) -> dict[str, Tensor]:
    settings = structs.replace(SMALL_NET, max_templates=1, num_recycling_iters=0)
    arrays = build_sample(protein, settings, np.random.default_rng(seed), length=crop, training=training)
    return {name: torch.from_numpy(value)[None] for name, value in arrays.items()}


def test_templates_are_seen_only_where_their_backbone_is_known_and_without_directions() -> None:
    whole = make_proteins(Families(20, 20, 4, 1), 3, range(1))[0]
    kinds, mask = np.tile(whole.aatype, (1, 1)), np.tile(residues.ATOM_MASK[whole.aatype], (1, 1, 1)).astype(np.int8)
    mask[0, 4, residues.C] = 0  # no backbone
    mask[0, 6, residues.OXYGEN] = 0  # a backbone, but no psi
    atoms = np.where(mask[..., None] > 0, whole.atoms[None], 0).astype(np.float32)
    protein = replace(whole, template_aatype=kinds, template_atoms=atoms, template_mask=mask)
    batch = template_batch(protein, 20)
    pair, angle = compute_template_features(batch)
    assert float(pair[0, 0, 4].abs().sum() + pair[0, 0, :, 4].abs().sum()) == 0  # residue types too
    types = pair[0, 0, :, :, 40:62].argmax(-1)
    known = [n for n in range(20) if n != 4]
    assert types[0, known].tolist() == kinds[0, known].tolist()
    assert float(pair[..., 84:87].abs().sum()) == 0
    assert float(pair[0, 0, 5, 6, 87]) == 1
    missing = [n for n in range(20) if batch["template_angle_mask"][0, 0, n, PSI] == 0]
    assert missing == [4, 6]
    unknown = batch["template_angle_mask"][0, 0, 5, 1]  # phi behind the residue without C: the angle is not hidden
    assert float(unknown) == 0
    assert float(angle[0, 0, 5, 24:26].abs().sum()) > 0


def test_a_crop_of_a_template_has_the_torsions_of_the_whole_chain() -> None:
    protein = make_proteins(Families(40, 40, 4, 1), 3, range(1))[0]
    kinds, mask = protein.aatype[None], residues.ATOM_MASK[protein.aatype][None].astype(np.int8)
    protein = replace(protein, template_aatype=kinds, template_atoms=protein.atoms[None], template_mask=mask)
    for seed in range(20):
        batch = template_batch(protein, 10, seed=seed, training=True)
        begin = int(batch["residue_index"][0, 0])
        if float(batch["template_mask"].sum()) == 1 and begin > 0:
            break
    assert batch["template_angle_mask"][0, 0, 0, :3].tolist() == [1, 1, 1]
    full = template_batch(protein, 40)
    torch.testing.assert_close(batch["template_angles"], full["template_angles"][:, :, begin : begin + 10])


def test_a_template_without_known_atoms_in_the_crop_still_is_a_template() -> None:
    protein = make_proteins(Families(40, 40, 4, 1), 3, range(1))[0]
    mask = np.zeros_like(protein.template_mask)
    batch = template_batch(replace(protein, template_mask=mask), 40)
    assert batch["template_mask"].tolist() == [[1.0]]


def test_distances_fall_into_one_bin_or_none() -> None:
    position = torch.tensor([[[0.0, 0, 0], [4.0, 0, 0], [1.0, 0, 0], [500.0, 0, 0]]])
    bins = encode_distances(position, 3.25, 20.75, 15, 600.0)
    assert bins[0, 0].sum(-1).tolist() == [0, 1, 0, 1]
    assert bins[0, 0, 3, 14] == 1
    assert bins[0, 0, 1, 0] == 1


def test_tables_of_a_prediction_without_values_are_not_used_in_training() -> None:
    cpu = torch.device("cpu")
    with FakeTensorMode():
        assert isinstance(load_residue_table("CHI_MASK", cpu), FakeTensor)
    real = load_residue_table("CHI_MASK", cpu)
    assert not isinstance(real, FakeTensor)
    assert load_residue_table("CHI_MASK", cpu) is real
    with FakeTensorMode():
        assert isinstance(load_residue_table("CHI_MASK", cpu), FakeTensor)
