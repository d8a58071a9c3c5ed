"""AlphaFold 2's monomer network as OpenFold trains it: embedders, recycling, stacks, structure module, heads. No loss.

Legend: N samples, R recycling slots, S and E rows of the main and the extra alignment, L residues, T templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.evoformer import (
    TEMPLATE_ANGLE_FEATURES,
    EvoformerStack,
    Linear,
    TemplateStack,
    compute_pair_mask,
    encode_distances,
)
from mlhpc.workloads.openfold.geometry import rename_torsions, select_pseudo_beta
from mlhpc.workloads.openfold.structure import Structure, StructureModule

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch

TARGET_FEATURES = 22
MSA_FEATURES = 49
EXTRA_MSA_FEATURES = 25
RELATIVE_POSITIONS = 32
RECYCLED_BINS = (3.25, 20.75, 15, 1e4)
TEMPLATE_BINS = (3.25, 50.75, 39, 1e5**0.5)
PLDDT_BINS, DISTOGRAM_BINS, RESOLVED_ATOMS = 50, 64, 37
UNIT_OF_DELETIONS = 3.0
PSI = 2  # its mask is that of a template's row in the alignment
UNUSED_PAIR_FEATURES = 3  # a direction, which the benchmark's configuration switches off


class InputEmbedder(nn.Module):
    """Embeds sequence and main alignment as the initial m and z (algorithms 3 and 4)."""

    def __init__(self, config: OpenFoldConfig) -> None:
        super().__init__()
        self.linear_tf_z_i = Linear(TARGET_FEATURES, config.pair_channels)
        self.linear_tf_z_j = Linear(TARGET_FEATURES, config.pair_channels)
        self.linear_tf_m = Linear(TARGET_FEATURES, config.msa_channels)
        self.linear_msa_m = Linear(MSA_FEATURES, config.msa_channels)
        self.linear_relpos = Linear(2 * RELATIVE_POSITIONS + 1, config.pair_channels)

    def forward(self, target_NLF: Tensor, msa_NSLF: Tensor, residue_index_NL: Tensor) -> tuple[Tensor, Tensor]:
        """Return m and z."""
        offset = (residue_index_NL[:, :, None] - residue_index_NL[:, None]).clamp(
            -RELATIVE_POSITIONS, RELATIVE_POSITIONS
        )
        weight, bias = self.linear_relpos.weight, self.linear_relpos.bias
        z = F.embedding(offset + RELATIVE_POSITIONS, weight.t()) + bias  # equals a linear layer of a one-hot vector
        z = z + self.linear_tf_z_i(target_NLF)[:, :, None] + self.linear_tf_z_j(target_NLF)[:, None]
        return self.linear_msa_m(msa_NSLF) + self.linear_tf_m(target_NLF)[:, None], z


class RecyclingEmbedder(nn.Module):
    """Embeds the previous iteration's first row, pair map and pseudo-CB distances (algorithm 32)."""

    def __init__(self, config: OpenFoldConfig) -> None:
        super().__init__()
        self.linear = Linear(RECYCLED_BINS[2], config.pair_channels)
        self.layer_norm_m, self.layer_norm_z = nn.LayerNorm(config.msa_channels), nn.LayerNorm(config.pair_channels)

    def forward(self, m_NLM: Tensor, z_NIJZ: Tensor, beta_NL3: Tensor) -> tuple[Tensor, Tensor]:
        """Return the updates of the first row of m and of z."""
        distance = encode_distances(beta_NL3, *RECYCLED_BINS)
        return self.layer_norm_m(m_NLM), self.layer_norm_z(z_NIJZ) + self.linear(distance)


class TemplateAngleEmbedder(nn.Module):
    """Embeds the torsions of each template as one more row of m."""

    def __init__(self, config: OpenFoldConfig) -> None:
        super().__init__()
        self.linear_1 = Linear(TEMPLATE_ANGLE_FEATURES, config.msa_channels, init="relu")
        self.linear_2 = Linear(config.msa_channels, config.msa_channels, init="relu")

    def forward(self, features: Tensor) -> Tensor:
        """Return rows (N, T, L, M)."""
        return self.linear_2(F.relu(self.linear_1(features)))  # type: ignore[no-any-return]


class PlddtHead(nn.Module):
    """Predicts logits of the lDDT-CA of each residue."""

    def __init__(self, single: int, hidden: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(single)
        self.linear_1, self.linear_2 = Linear(single, hidden, init="relu"), Linear(hidden, hidden, init="relu")
        self.linear_3 = Linear(hidden, PLDDT_BINS, init="final")

    def forward(self, s: Tensor) -> Tensor:
        """Return (N, L, 50)."""
        x = F.relu(self.linear_1(self.layer_norm(s)))
        return self.linear_3(F.relu(self.linear_2(x)))  # type: ignore[no-any-return]


class Heads(nn.Module):
    """pLDDT, distogram, masked alignment and experimentally resolved atoms."""

    def __init__(self, config: OpenFoldConfig) -> None:
        super().__init__()
        self.plddt = PlddtHead(config.single_channels, config.plddt_channels)
        self.distogram = Linear(config.pair_channels, DISTOGRAM_BINS, init="final")
        self.masked_msa = Linear(config.msa_channels, residues.MSA_CLASSES, init="final")
        self.experimentally_resolved = Linear(config.single_channels, RESOLVED_ATOMS, init="final")


@dataclass(frozen=True)
class Prediction:
    """The outputs of the last recycling iteration."""

    structure: Structure
    plddt: Tensor  # (N, L, 50)
    distogram: Tensor  # (N, L, L, 64), symmetric
    masked_msa: Tensor  # (N, S, L, 23)
    experimentally_resolved: Tensor  # (N, L, 37); its loss has weight 0 in initial training


class OpenFoldNet(nn.Module):
    """The network. A sample with fewer recycles starts at a later iteration: all samples of a batch end together."""

    def __init__(self, config: OpenFoldConfig) -> None:
        super().__init__()
        self.config = config
        self.input_embedder = InputEmbedder(config)
        self.recycling_embedder = RecyclingEmbedder(config)
        self.template_angle_embedder = TemplateAngleEmbedder(config) if config.max_templates else None
        self.template_stack = TemplateStack(config) if config.max_templates else None
        self.extra_msa_embedder = Linear(EXTRA_MSA_FEATURES, config.extra_msa_channels)
        self.extra_msa_stack = EvoformerStack(config, extra=True)
        self.evoformer = EvoformerStack(config)
        self.structure_module = StructureModule(config)
        self.heads = Heads(config)

    def forward(self, batch: Batch) -> Prediction:
        """Predict. The batch's number of slots is the number of iterations, so the host does not wait for the device.

        Only the last iteration has gradients. A sample with t recycles fewer than the most starts at iteration t.
        """
        recycles = batch["msa"].shape[1] - 1
        N, L = batch["aatype"].shape
        m_NLM = batch["atoms"].new_zeros(N, L, self.config.msa_channels)
        z_NIJZ = m_NLM.new_zeros(N, L, L, self.config.pair_channels)
        beta_NL3 = m_NLM.new_zeros(N, L, 3)
        for iteration in range(recycles):
            with torch.no_grad():
                m_NSLM, z, single = self._trunk(batch, iteration, m_NLM, z_NIJZ, beta_NL3)
                atoms = self._structure(single, z, batch).atoms
                started = (recycles - batch["recycles"] <= iteration).to(m_NLM.dtype)[:, None, None]
                m_NLM, z_NIJZ = m_NSLM[:, 0] * started, z * started[..., None]
                known = (batch["aatype"] != residues.UNKNOWN).to(atoms.dtype)[..., None].expand(atoms.shape[:-1])
                beta_NL3 = select_pseudo_beta(batch["aatype"], atoms * known[..., None], known)[0] * started
        m_NSLM, z, single = self._trunk(batch, recycles, m_NLM, z_NIJZ, beta_NL3)
        structure = self._structure(single, z, batch)
        logits = self.heads.distogram(z)
        return Prediction(
            structure,
            self.heads.plddt(structure.single),
            logits + logits.transpose(1, 2),
            # without the rows that templates appended
            self.heads.masked_msa(m_NSLM[:, : batch["msa"].shape[2]]),
            self.heads.experimentally_resolved(single),
        )

    def _structure(self, single: Tensor, z: Tensor, batch: Batch) -> Structure:
        # positions of tens of angstrom need float32, whatever the rest computes in
        with torch.autocast(z.device.type, enabled=False):
            structure: Structure = self.structure_module(single.float(), z.float(), batch["aatype"], batch["mask"])
        return structure

    def _trunk(
        self, batch: Batch, slot: int, m_before: Tensor, z_before: Tensor, beta_before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute m, z and the single representation of one iteration."""
        mask_NL = batch["mask"]
        mask_NIJ = compute_pair_mask(mask_NL)
        msa_mask = batch["msa_mask"][:, slot]
        m, z = self.input_embedder(
            compute_target_features(batch["aatype"]), compute_msa_features(batch, slot), batch["residue_index"]
        )
        m_update, z_update = self.recycling_embedder(m_before, z_before, beta_before)
        m = torch.cat([(m[:, 0] + m_update)[:, None], m[:, 1:]], 1)
        z = z + z_update
        if self.template_stack is not None and self.template_angle_embedder is not None:
            pair, angle = compute_template_features(batch)
            z = z + self.template_stack(pair, z, mask_NIJ, batch["template_mask"])
            m = torch.cat([m, self.template_angle_embedder(angle)], 1)
            msa_mask = torch.cat([msa_mask, batch["template_angle_mask"][..., PSI]], 1)
        extra = self.extra_msa_embedder(compute_extra_msa_features(batch, slot))
        z = self.extra_msa_stack(extra, z, batch["extra_msa_mask"][:, slot], mask_NIJ)[1]
        m, z, single = self.evoformer(m, z, msa_mask, mask_NIJ)
        return m, z, single


def compute_target_features(aatype: Tensor) -> Tensor:
    """Return (N, L, 22): a flag for chain breaks, always 0, and the residue type."""
    return F.pad(one_hot(aatype, residues.RESIDUE_CLASSES), (1, 0))


def compute_msa_features(batch: Batch, slot: int) -> Tensor:
    """Return (N, S, L, 49): residue, deletions, and the profile and mean deletions of the cluster of each row."""
    letters = one_hot(batch["msa"][:, slot], residues.MSA_CLASSES)
    deletions = batch["deletions"][:, slot].float()[..., None]
    mean = compute_deletion_values(batch["cluster_deletions"][:, slot])[..., None]
    return torch.cat(
        [
            letters,
            (deletions > 0).float(),
            compute_deletion_values(deletions),
            batch["cluster_profile"][:, slot].float(),
            mean,
        ],
        -1,
    )


def compute_extra_msa_features(batch: Batch, slot: int) -> Tensor:
    """Return (N, E, L, 25): residue and deletions."""
    letters = one_hot(batch["extra_msa"][:, slot], residues.MSA_CLASSES)
    deletions = batch["extra_deletions"][:, slot].float()[..., None]
    return torch.cat([letters, (deletions > 0).float(), compute_deletion_values(deletions)], -1)


def one_hot(classes: Tensor, number: int) -> Tensor:
    """Encode one-hot in float32 (..., number). torch's own checks the values, for which the host waits."""
    return (classes[..., None] == torch.arange(number, device=classes.device, dtype=classes.dtype)).float()


def compute_deletion_values(deletions: Tensor) -> Tensor:
    """Map numbers of deletions to 0 .. 1."""
    return torch.atan(deletions / UNIT_OF_DELETIONS) * (2 / torch.pi)


def compute_template_features(batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute pair features (N, T, L, L, 88) and torsion features (N, T, L, 57) of templates.

    Pair features are 0 where a backbone is unknown.
    """
    aatype, atoms, atom_mask = batch["template_aatype"], batch["template_atoms"], batch["template_atom_mask"]
    N, T, L = aatype.shape
    types = one_hot(aatype, TARGET_FEATURES).to(atoms.dtype)
    flat_types = types.flatten(0, 1)
    beta, beta_mask = select_pseudo_beta(*(each.flatten(0, 1) for each in (aatype, atoms, atom_mask)))
    backbone = compute_pair_mask(atom_mask.flatten(0, 1)[..., : residues.OXYGEN].amin(-1))[..., None]
    pair = torch.cat(
        [
            encode_distances(beta, *TEMPLATE_BINS),
            compute_pair_mask(beta_mask)[..., None],
            flat_types[:, None].expand(-1, L, -1, -1),
            flat_types[:, :, None].expand(-1, -1, L, -1),
            backbone.new_zeros(()).expand(*backbone.shape[:-1], UNUSED_PAIR_FEATURES),
            backbone,
        ],
        -1,
    )
    angles = batch["template_angles"]
    other = rename_torsions(aatype.clamp(max=residues.UNKNOWN), angles)  # a gap has no side chain
    angle = torch.cat([types, angles.flatten(-2), other.flatten(-2), batch["template_angle_mask"]], -1)
    return torch.unflatten(pair * backbone, 0, (N, T)), angle
