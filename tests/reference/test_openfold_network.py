"""OpenFold's network and losses beside mlcommons/hpc: same weights, same features, forward, loss and gradients."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mlhpc.workloads.openfold import geometry, residues
from mlhpc.workloads.openfold.features import Protein, build_sample
from mlhpc.workloads.openfold.geometry import Frame, compute_atoms, compute_group_frames
from mlhpc.workloads.openfold.losses import compute_losses
from mlhpc.workloads.openfold.metric import compute_sample_lddt_ca
from mlhpc.workloads.openfold.model import OpenFoldNet
from mlhpc.workloads.openfold.proteins import Families, make_proteins
from mlhpc.workloads.openfold.structure import compute_frame_update
from tests.reference.openfold_code import openfold_code
from tests.reference.openfold_inputs import their_batch, their_net
from tests.workloads.openfold.conftest import SMALL_NET

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
        monkeypatch.setattr(geometry, "load_residue_table", inspect.unwrap(geometry.load_residue_table))
        yield SimpleNamespace(**found)


def our_name(theirs: str) -> str:
    """Our name of one of the reference's parameters."""
    if ".angle_resnet.layers." in theirs:
        return theirs.replace(".linear_1.", ".0.").replace(".linear_2.", ".1.")
    for old, new in RENAMED:
        theirs = theirs.replace(old, new)
    return theirs


def ideal(protein: Protein, seed: int) -> Protein:
    """With atoms in the ideal geometry of the table, some of them unknown: then frames of true side chains are exact in both."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.from_numpy(protein.aatype).long()
    length = len(protein)
    turn = torch.randn(length, 6, generator=generator)
    steps = torch.nn.functional.normalize(turn[:, 3:], dim=-1) * 3.8
    backbone = Frame(compute_frame_update(turn).rotation, steps.cumsum(0))
    angle = torch.nn.functional.normalize(torch.randn(length, 7, 2, generator=generator), dim=-1)
    atoms = compute_atoms(kinds, compute_group_frames(kinds, backbone, angle))
    mask = torch.from_numpy(residues.ATOM_MASK)[kinds] * (torch.rand(length, 14, generator=generator) > 0.03)
    known = {"atoms": (atoms * mask[..., None]).numpy(), "atom_mask": mask.numpy().astype(np.int8)}
    return Protein(**(vars(protein) | known))


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

    protein = ideal(make_proteins(Families(24, 24, 9, 3), 8, range(1))[0], 1)
    arrays = build_sample(protein, SMALL_NET, np.random.default_rng(2), length=24, training=False)
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

    total = compute_losses(SMALL_NET, prediction, batch)["total"].mean()
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
    record(
        "openfold", "lDDT-CA of a chain", float((compute_sample_lddt_ca(predicted, true, mask) - scored).abs()), 1e-5
    )
