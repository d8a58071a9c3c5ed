"""OpenFold's network and losses beside mlcommons/hpc: same weights, same features, forward, loss and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.reference.openfold_code import openfold_code
from tests.workloads.openfold.conftest import SMALL_NET
from workloads.openfold import geometry, residues
from workloads.openfold.config import OpenFoldConfig
from workloads.openfold.features import Protein, sample
from workloads.openfold.geometry import Frame, atoms_of, group_frames
from workloads.openfold.losses import losses, sample_lddt_ca
from workloads.openfold.model import OpenFoldNet, extra_msa_features, msa_features, target_features
from workloads.openfold.proteins import Families, families
from workloads.openfold.public.structures import ATOMS_37
from workloads.openfold.structure import frame_update

Record = Callable[[str, str, float, float], None]
RENAMED = (  # theirs to ours, in this order
    ("evoformer_stack.", "evoformer."),
    ("extra_msa_embedder.linear.", "extra_msa_embedder."),
    ("template_pair_embedder.", "template_stack."),
    ("template_pair_stack.blocks.", "template_stack.pair_stack."),
    ("template_pair_stack.", "template_stack."),
    ("template_pointwise_attention.mha.", "template_stack.pointwise."),
    (".core.msa_transition.", ".msa_transition."),
    (".core.outer_product_mean.", ".outer_product_mean."),
    (".core.", ".pair."),
    (".global_attention.", "."),
    ("tri_att_start.linear.", "tri_att_start.linear_z."),
    ("tri_att_end.linear.", "tri_att_end.linear_z."),
    ("bb_update.linear.", "bb_update."),
    ("auxiliary_heads.", "heads."),
    ("heads.distogram.linear.", "heads.distogram."),
    ("heads.masked_msa.linear.", "heads.masked_msa."),
    ("heads.experimentally_resolved.linear.", "heads.experimentally_resolved."),
)


@pytest.fixture
def code(reference: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Modules of the reference; ours have its table of ideal coordinates while the test runs."""
    names = ("config", "loss", "model.alphafold", "data.transforms", "data.residue_constants")
    with openfold_code(reference("mlcommons/hpc")):
        found = {name.rpartition(".")[2]: importlib.import_module(f"openfold.{name}") for name in names}
        constants = found["residue_constants"]
        monkeypatch.setattr(residues, "GROUP_FRAME", constants.RESTYPE_RIGID_GROUP_DEFAULT_FRAME.astype(np.float32))
        monkeypatch.setattr(
            residues, "ATOM_POSITION", constants.RESTYPE_ATOM14_RIGID_GROUP_POSITIONS.astype(np.float32)
        )
        geometry.table.cache_clear()
        yield SimpleNamespace(**found)
    geometry.table.cache_clear()


def our_name(theirs: str) -> str:
    """Our name of one of the reference's parameters."""
    if ".angle_resnet.layers." in theirs:
        return theirs.replace(".linear_1.", ".0.").replace(".linear_2.", ".1.")
    for old, new in RENAMED:
        theirs = theirs.replace(old, new)
    return theirs


def their_net(code: Any, own: OpenFoldConfig) -> nn.Module:
    """The reference's network of our widths."""
    c = code.config
    msa, pair, single, extra, template = (
        own.msa_channels,
        own.pair_channels,
        own.single_channels,
        own.extra_msa_channels,
        own.template_channels,
    )
    stack = {
        "c_z": pair,
        "c_hidden_opm": own.outer_channels,
        "c_hidden_tri_mul": pair,
        "c_hidden_tri_att": own.pair_head_channels,
        "num_heads_msa": own.msa_heads,
        "num_heads_tri": own.pair_heads,
        "transition_n": own.transition_factor,
    }
    heads = c.AuxiliaryHeadsConfig(
        per_residue_lddt_ca_predictor_config=c.PerResidueLDDTCaPredictorConfig(c_s=single, c_hidden=own.plddt_channels),
        distogram_head_config=c.DistogramHeadConfig(c_z=pair),
        masked_msa_head_config=c.MaskedMSAHeadConfig(c_m=msa),
        experimentally_resolved_head_config=c.ExperimentallyResolvedHeadConfig(c_s=single),
    )
    settings = c.AlphaFoldConfig(
        input_embedder_config=c.InputEmbedderConfig(c_z=pair, c_m=msa),
        recycling_embedder_config=c.RecyclingEmbedderConfig(c_m=msa, c_z=pair),
        template_angle_embedder_config=c.TemplateAngleEmbedderConfig(c_m=msa),
        template_pair_embedder_config=c.TemplatePairEmbedderConfig(c_t=template),
        template_pair_stack_config=c.TemplatePairStackConfig(
            c_t=template,
            c_hidden_tri_att=own.template_head_channels,
            c_hidden_tri_mul=template,
            num_blocks=own.template_blocks,
            num_heads_tri=own.pair_heads,
        ),
        template_pointwise_attention_config=c.TemplatePointwiseAttentionConfig(
            c_t=template, c_z=pair, c_hidden=own.template_head_channels, num_heads=own.pair_heads
        ),
        extra_msa_embedder_config=c.ExtraMSAEmbedderConfig(c_e=extra),
        extra_msa_stack_config=c.ExtraMSAStackConfig(
            c_e=extra, c_hidden_msa_att=own.extra_msa_head_channels, num_blocks=own.extra_msa_blocks, **stack
        ),
        evoformer_stack_config=c.EvoformerStackConfig(
            c_m=msa, c_s=single, c_hidden_msa_att=own.msa_head_channels, num_blocks=own.evoformer_blocks, **stack
        ),
        structure_module_config=c.StructureModuleConfig(
            c_s=single,
            c_z=pair,
            c_hidden_ipa=own.ipa_channels,
            c_hidden_ang_res=own.angle_channels,
            num_heads_ipa=own.ipa_heads,
            num_qk_points=own.ipa_query_points,
            num_v_points=own.ipa_value_points,
            num_blocks=own.structure_iterations,
        ),
        auxiliary_heads_config=heads,
    )
    net: nn.Module = code.alphafold.AlphaFold(settings)
    return net


def ideal(protein: Protein, seed: int) -> Protein:
    """With atoms in the ideal geometry of the table, some of them unknown: then frames of true side chains are exact in both."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.from_numpy(protein.aatype).long()
    length = len(protein)
    turn = torch.randn(length, 6, generator=generator)
    steps = torch.nn.functional.normalize(turn[:, 3:], dim=-1) * 3.8
    backbone = Frame(frame_update(turn).rotation, steps.cumsum(0))
    angle = torch.nn.functional.normalize(torch.randn(length, 7, 2, generator=generator), dim=-1)
    atoms = atoms_of(kinds, group_frames(kinds, backbone, angle))
    mask = torch.from_numpy(residues.ATOM_MASK)[kinds] * (torch.rand(length, 14, generator=generator) > 0.03)
    known = {"atoms": (atoms * mask[..., None]).numpy(), "atom_mask": mask.numpy().astype(np.int8)}
    return Protein(**(vars(protein) | known))


def in_37(kinds: Tensor, atoms: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Atoms and mask in the reference's 37 slots of a residue."""
    wide, known = atoms.new_zeros(*kinds.shape, 37, 3), atoms.new_zeros(*kinds.shape, 37)
    for place in np.ndindex(*kinds.shape):
        for slot, name in enumerate(residues.ATOM_NAMES[min(int(kinds[place]), residues.UNKNOWN)]):
            if name and mask[(*place, slot)]:
                wide[(*place, ATOMS_37.index(name))] = atoms[(*place, slot)]
                known[(*place, ATOMS_37.index(name))] = 1
    return wide, known


def their_batch(code: Any, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference's features of our batch of one; the last dimension counts recycling slots."""
    slots = ours["msa"].shape[1]
    kinds = ours["aatype"][0]
    wide, known = in_37(kinds, ours["atoms"][0], ours["atom_mask"][0])
    truth: dict[str, Tensor] = {"aatype": kinds, "all_atom_positions": wide, "all_atom_mask": known}
    t = code.transforms
    for step in (
        t.make_atom14_masks,
        t.make_atom14_positions,
        t.atom37_to_frames,
        t.atom37_to_torsion_angles(""),
        t.make_pseudo_beta(""),
        t.get_backbone_frames,
        t.get_chi_angles,
    ):
        truth = step(truth)
    positions, there = in_37(*(ours[f"template_{name}"][0] for name in ("aatype", "atoms", "atom_mask")))
    laid: dict[str, Tensor] = {
        "template_aatype": ours["template_aatype"][0],
        "template_all_atom_positions": positions,
        "template_all_atom_mask": there,
    }
    laid = t.atom37_to_torsion_angles("template_")(t.make_pseudo_beta("template_")(laid))
    fixed = (
        truth
        | laid
        | {
            "template_mask": ours["template_mask"][0],
            "residue_index": ours["residue_index"][0],
            "seq_mask": ours["mask"][0],
            "target_feat": target_features(ours["aatype"])[0],
            "seq_length": torch.tensor(len(kinds)),
            "resolution": ours["resolution"][0],
            "use_clamped_fape": ours["clamp_fape"][0],
            "true_msa": ours["true_msa"][0].long(),
            "bert_mask": ours["hidden_mask"][0],
        }
    )
    batch = {name: torch.stack([value] * slots, -1)[None] for name, value in fixed.items()}
    per_slot = {
        "msa_feat": [msa_features(ours, slot)[0] for slot in range(slots)],
        "msa_mask": [ours["msa_mask"][0, slot] for slot in range(slots)],
        "extra_msa": [ours["extra_msa"][0, slot].long() for slot in range(slots)],
        "extra_has_deletion": [extra_msa_features(ours, slot)[0, ..., -2] for slot in range(slots)],
        "extra_deletion_value": [extra_msa_features(ours, slot)[0, ..., -1] for slot in range(slots)],
        "extra_msa_mask": [ours["extra_msa_mask"][0, slot] for slot in range(slots)],
    }
    return batch | {name: torch.stack(values, -1)[None] for name, values in per_slot.items()}


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max().detach() / theirs.abs().max().detach())


@pytest.mark.filterwarnings("ignore:.*_text is deprecated:DeprecationWarning")
def test_network_losses_and_gradients(code: Any, record: Record) -> None:
    torch.manual_seed(3)
    theirs, ours = their_net(code, SMALL_NET).eval(), OpenFoldNet(SMALL_NET).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    named = {our_name(name): parameter for name, parameter in theirs.named_parameters()}
    ours.load_state_dict({name: value.detach() for name, value in named.items()})

    protein = ideal(families(Families(24, 24, 9, 3), 8, range(1))[0], 1)
    arrays = sample(protein, SMALL_NET, np.random.default_rng(2), length=24, training=False)
    batch = {name: torch.from_numpy(value)[None] for name, value in arrays.items()}
    batch["resolution"] = torch.tensor([2.0])
    prediction = ours(batch)
    their_features = their_batch(code, batch)
    outputs = theirs(their_features)
    structure = prediction.structure
    record("openfold", "atoms of the last iteration", relative(structure.atoms, outputs["sm_positions"][:, -1]), 1e-4)
    record("openfold", "pair map: distogram", relative(prediction.distogram, outputs["distogram_logits"]), 1e-4)
    record(
        "openfold", "alignment: masked residues", relative(prediction.masked_msa, outputs["masked_msa_logits"]), 1e-4
    )
    record("openfold", "pLDDT", relative(prediction.plddt, outputs["lddt_logits"]), 1e-4)

    total = losses(SMALL_NET, prediction, batch)["total"].mean()
    last = {name: value[..., -1] for name, value in their_features.items()}
    their_total, _ = code.loss.AlphaFoldLoss(code.config.LossConfig())(outputs, last)
    record("openfold", "loss", float((total - their_total).abs().detach() / their_total.detach()), 1e-5)
    total.backward()
    their_total.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    scale = max(float(each.grad.abs().max()) for each in named.values() if each.grad is not None)
    worst = max(
        float((gradients[name] - each.grad).abs().max()) / scale
        for name, each in named.items()
        if each.grad is not None
    )
    record("openfold", "gradients of all parameters, over the largest", worst, 1e-3)

    true, mask = batch["atoms"][..., residues.CA, :], batch["atom_mask"][..., residues.CA]
    predicted = structure.atoms[..., residues.CA, :].detach()
    scored = code.loss.lddt_ca(
        all_atom_pred_pos=outputs["final_atom_positions"].detach(),
        all_atom_positions=last["all_atom_positions"],
        all_atom_mask=last["all_atom_mask"],
        eps=1e-10,
        per_residue=False,
    )
    record("openfold", "lDDT-CA of a chain", float((sample_lddt_ca(predicted, true, mask) - scored).abs()), 1e-5)
