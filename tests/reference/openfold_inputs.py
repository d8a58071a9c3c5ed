"""The reference's OpenFold network of our widths, and its features of our batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.model import compute_extra_msa_features, compute_msa_features, compute_target_features
from mlhpc.workloads.openfold.public.structures import ATOMS_37


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
            "target_feat": compute_target_features(ours["aatype"])[0],
            "seq_length": torch.tensor(len(kinds)),
            "resolution": ours["resolution"][0],
            "use_clamped_fape": ours["clamp_fape"][0],
            "true_msa": ours["true_msa"][0].long(),
            "bert_mask": ours["hidden_mask"][0],
        }
    )
    batch = {name: torch.stack([value] * slots, -1)[None] for name, value in fixed.items()}
    per_slot = {
        "msa_feat": [compute_msa_features(ours, slot)[0] for slot in range(slots)],
        "msa_mask": [ours["msa_mask"][0, slot] for slot in range(slots)],
        "extra_msa": [ours["extra_msa"][0, slot].long() for slot in range(slots)],
        "extra_has_deletion": [compute_extra_msa_features(ours, slot)[0, ..., -2] for slot in range(slots)],
        "extra_deletion_value": [compute_extra_msa_features(ours, slot)[0, ..., -1] for slot in range(slots)],
        "extra_msa_mask": [ours["extra_msa_mask"][0, slot] for slot in range(slots)],
    }
    return batch | {name: torch.stack(values, -1)[None] for name, values in per_slot.items()}
