"""OpenFold's losses (FAPE, torsions, distogram, masked alignment, pLDDT) per sample.

AlphaFold 2's supplement 1.9. Legend: N samples, T iterations, F frames, P points,
L residues. Each loss is (N,), so a batch's mean does not depend on how samples are batched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.geometry import (
    Frame,
    compute_backbone_frames,
    compute_known_groups,
    compute_torsions_of,
    load_residue_table,
    select_pseudo_beta,
)
from mlhpc.workloads.openfold.metric import compute_lddt_ca
from mlhpc.workloads.openfold.model import DISTOGRAM_BINS, PLDDT_BINS, Prediction

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch

FAPE_CLAMP = 10.0  # angstrom
FAPE_UNIT = 10.0
EPS = 1e-4
DISTOGRAM_RANGE = (2.3125, 21.6875)
PLDDT_RESOLUTION = (0.1, 3.0)  # angstrom


def compute_losses(config: OpenFoldConfig, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
    """Compute each term (N,) and ``total``, their weighted sum times the square root of the sample's length."""
    aatype, mask14 = batch["aatype"], batch["atom_mask"]
    structure = prediction.structure
    naming = rename_atoms(structure.atoms.detach(), aatype, batch["atoms"], mask14)
    terms = {
        "fape_backbone": compute_backbone_fape(structure.frames, batch["atoms"], mask14, batch["clamp_fape"]),
        "fape_sidechain": compute_sidechain_fape(
            structure.groups, structure.atoms, aatype, batch["atoms"], mask14, naming
        ),
        "supervised_chi": compute_torsion_loss(
            config, structure.angles, structure.raw_angles, aatype, batch["atoms"], mask14, batch["mask"]
        ),
        "distogram": compute_distogram_loss(prediction.distogram, aatype, batch["atoms"], mask14),
        "masked_msa": compute_masked_msa_loss(prediction.masked_msa, batch),
        "plddt": compute_plddt_loss(
            prediction.plddt, structure.atoms.detach(), batch["atoms"], mask14, batch["resolution"]
        ),
    }
    weights = {
        "fape_backbone": config.fape_loss_weight * config.fape_backbone_weight,
        "fape_sidechain": config.fape_loss_weight * config.fape_sidechain_weight,
        "supervised_chi": config.supervised_chi_loss_weight,
        "distogram": config.distogram_loss_weight,
        "masked_msa": config.masked_msa_loss_weight,
        "plddt": config.plddt_loss_weight,
    }
    total = torch.stack([weights[name] * term for name, term in terms.items()]).sum(0)
    unused = 0.0 * prediction.experimentally_resolved.float().sum()  # DDP needs a gradient of every parameter
    return terms | {"total": total * batch["mask"].sum(-1).sqrt() + unused}


def compute_fape(frames: Frame, points: Tensor, true_frames: Frame, true_points: Tensor) -> Tensor:
    """Compute vectors (..., F, 3, P) from true to predicted points (..., P, 3), in angstrom.

    They are seen from frames (..., F).

    One matrix product gives prediction minus truth. It multiplies the inverse frames of both, side by side, by the
    points of both.
    """
    inverse, true_inverse = frames.rotation.transpose(-1, -2), true_frames.rotation.transpose(-1, -2)
    shift = true_inverse @ true_frames.translation[..., None] - inverse @ frames.translation[..., None]
    left = torch.cat([inverse, -true_inverse, shift], -1)  # (..., F, 3, 7)
    right = torch.cat([points, true_points, torch.ones_like(points[..., :1])], -1).transpose(-1, -2)
    return torch.unflatten(left.flatten(-3, -2) @ right, -2, (-1, 3))


def compute_mean_distance(vectors: Tensor, limit: Tensor, row_mask: Tensor, column_mask: Tensor) -> Tensor:
    """Compute the mean length (...) of vectors (..., F, 3, P), each cut off at ``limit``.

    The mean is over frames (``row_mask``) and points (``column_mask``) with mask 1.

    It is 0 if there are none.
    """
    return _MeanDistance.apply(vectors, limit, row_mask, column_mask)  # type: ignore[no-any-return, no-untyped-call]


class _MeanDistance(torch.autograd.Function):
    """One pass over the vectors in the backward pass; autograd would make seven."""

    @staticmethod
    def forward(context: Any, vectors: Tensor, limit: Tensor, row_mask: Tensor, column_mask: Tensor) -> Tensor:
        x, y, z = vectors.unbind(-2)
        distance = (x * x).addcmul_(y, y).addcmul_(z, z).add_(EPS).sqrt_()
        row_mask = row_mask / (row_mask.sum(-1, keepdim=True) * column_mask.sum(-1, keepdim=True) + EPS)
        context.save_for_backward(vectors, distance, limit, row_mask, column_mask)
        cut = torch.minimum(distance, limit)
        return (row_mask[..., None, :] @ cut @ column_mask[..., None])[..., 0, 0]

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        vectors, distance, limit, row_mask, column_mask = context.saved_tensors
        rows = row_mask * gradient[..., None]
        of_cut = rows[..., None] @ column_mask.expand(*rows.shape[:-1], -1)[..., None, :]
        # beyond the limit the loss is constant
        of_distance = of_cut.div_(distance).mul_(distance <= limit)
        return vectors * of_distance[..., None, :], None, None, None


def compute_backbone_fape(frames_TNL: Frame, atoms: Tensor, mask14: Tensor, clamp_N: Tensor) -> Tensor:
    """Compute the mean over iterations, frames and CA atoms; clamped for samples with ``clamp_N`` 1."""
    true = compute_backbone_frames(atoms)
    iterations = len(frames_TNL.translation)
    repeated = Frame(*(each.expand(iterations, *each.shape) for each in true))
    mask = mask14[..., : residues.OXYGEN].amin(-1)
    vectors = compute_fape(frames_TNL, frames_TNL.translation, repeated, repeated.translation)
    limit = torch.where(clamp_N > 0, FAPE_CLAMP, torch.inf).to(vectors.dtype)[:, None, None]
    return compute_mean_distance(vectors, limit, mask, mask).mean(0) / FAPE_UNIT


def compute_sidechain_fape(
    groups: Frame, points: Tensor, aatype: Tensor, atoms: Tensor, mask14: Tensor, naming: Naming
) -> Tensor:
    """Compute FAPE, clamped, of all atoms (N, L, 14, 3).

    It is seen from the rigid groups (N, L, 8) that can have atoms.
    """
    true, group_mask = compute_known_groups(aatype, atoms, mask14, naming.swapped)
    flat = Frame(
        _select_groups_with_atoms(groups.rotation).flatten(1, 2),
        _select_groups_with_atoms(groups.translation).flatten(1, 2),
    )
    true_flat = Frame(true.rotation.flatten(1, 2), true.translation.flatten(1, 2))
    vectors = compute_fape(flat, points.flatten(1, 2), true_flat, naming.atoms.flatten(1, 2))
    limit, masks = vectors.new_full((), FAPE_CLAMP), (group_mask.flatten(1), naming.mask.flatten(1))
    return compute_mean_distance(vectors, limit, *masks) / FAPE_UNIT


def _select_groups_with_atoms(groups: Tensor) -> Tensor:
    """Select the groups (..., 8 in dimension 2, ...) that can hold atoms: all but those of omega and phi."""
    return torch.cat([groups[:, :, :1], groups[:, :, 3:]], 2)


class Naming(NamedTuple):
    """The truth with the better names of symmetric side chains' atoms."""

    atoms: Tensor  # (N, L, 14, 3)
    mask: Tensor  # (N, L, 14)
    swapped: Tensor  # (N, L): whether a residue's names changed


def rename_atoms(predicted: Tensor, aatype: Tensor, atoms: Tensor, mask14: Tensor) -> Naming:
    """Rename atoms of symmetric side chains in the truth (N, L, 14, 3).

    Each gets the names that fit the prediction better (algorithm 26).
    """
    swap = load_residue_table("SWAP", atoms.device)[aatype]
    ambiguous = swap != torch.arange(residues.ATOMS, device=atoms.device)
    other = atoms.gather(2, swap[..., None].expand_as(atoms))
    reference = (mask14 * ~ambiguous).flatten(1)[..., None]  # (N, P, 1): atoms with one name only
    slots = slice(residues.SWAPPED[0], residues.SWAPPED[1])  # no other atom has a second name
    fixed = atoms.flatten(1, 2)
    expected = torch.cdist(predicted[:, :, slots].flatten(1, 2), predicted.flatten(1, 2))
    judged = (ambiguous * mask14)[:, :, slots]
    errors = [
        (torch.cdist(naming[:, :, slots].flatten(1, 2), fixed).sub_(expected).abs_() @ reference).view(judged.shape)
        * judged
        for naming in (atoms, other)
    ]
    better = errors[1].sum(-1) < errors[0].sum(-1)
    return Naming(
        torch.where(better[..., None, None], other, atoms),
        torch.where(better[..., None], mask14.gather(2, swap), mask14),
        better,
    )


def compute_torsion_loss(
    config: OpenFoldConfig,
    angles_TNL: Tensor,
    raw_TNL: Tensor,
    aatype: Tensor,
    atoms: Tensor,
    mask14: Tensor,
    mask_NL: Tensor,
) -> Tensor:
    """Compute the squared distance of chis, on the unit circle, to the nearer naming. Add the raw angles' distance from
    the circle.
    """
    truth = compute_torsions_of(aatype, atoms, mask14)
    chi, chi_mask = angles_TNL[..., 3:, :], truth.mask[..., 3:]
    error = torch.minimum(
        (chi - truth.angle[..., 3:, :]).square().sum(-1), (chi - truth.alternative[..., 3:, :]).square().sum(-1)
    )
    chi_loss = (error * chi_mask).sum((-1, -2)) / (chi_mask.sum((-1, -2)) + EPS)
    norm_error = ((raw_TNL.square().sum(-1) + 1e-8).sqrt() - 1).abs() * mask_NL[..., None]
    norm_loss = norm_error.sum((-1, -2)) / (7 * mask_NL.sum(-1) + EPS)
    return (config.chi_weight * chi_loss + config.angle_norm_weight * norm_loss).mean(0)


def compute_distogram_loss(logits: Tensor, aatype: Tensor, atoms: Tensor, mask14: Tensor) -> Tensor:
    """Compute the cross entropy (N,) of the binned distances of pseudo-CB."""
    position, mask = select_pseudo_beta(aatype, atoms, mask14)
    edges = torch.linspace(*DISTOGRAM_RANGE, DISTOGRAM_BINS - 1, device=logits.device).square()
    squared = (position[:, :, None] - position[:, None]).square().sum(-1)
    bins = (squared[..., None] > edges).sum(-1)
    error = F.cross_entropy(logits.float().permute(0, 3, 1, 2), bins, reduction="none")
    both = mask[:, :, None] * mask[:, None]
    return (error * both).sum((-1, -2)) / (both.sum((-1, -2)) + EPS)


def compute_masked_msa_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Compute the cross entropy (N,) of the residues that were hidden."""
    slot = batch["true_msa"]
    error = F.cross_entropy(logits.float().permute(0, 3, 1, 2), slot.long(), reduction="none")
    hidden = batch["hidden_mask"]
    return (error * hidden).sum((-1, -2)) / (hidden.sum((-1, -2)) + EPS)


def compute_plddt_loss(
    logits: Tensor, predicted: Tensor, atoms: Tensor, mask14: Tensor, resolution_N: Tensor
) -> Tensor:
    """Compute the cross entropy (N,) of the predicted pLDDT against the binned lDDT-CA of the prediction.

    It is 0 for structures whose resolution is not in `PLDDT_RESOLUTION` or unknown (nan).
    """
    mask = mask14[..., residues.CA]
    score = compute_lddt_ca(predicted[..., residues.CA, :], atoms[..., residues.CA, :], mask)
    bins = (score * PLDDT_BINS).long().clamp(max=PLDDT_BINS - 1)
    error = F.cross_entropy(logits.float().transpose(1, 2), bins, reduction="none")
    trusted = (resolution_N >= PLDDT_RESOLUTION[0]) & (resolution_N <= PLDDT_RESOLUTION[1])
    return (error * mask).sum(-1) / (mask.sum(-1) + EPS) * trusted
