"""OpenFold's metric, lDDT-CA, per sample (Mariani et al. 2013). Legend: N samples, L residues."""

from __future__ import annotations

import torch
from torch import Tensor

LDDT_CUTOFF = 15.0
LDDT_THRESHOLDS = (0.5, 1.0, 2.0, 4.0)


def compute_lddt_ca(predicted: Tensor, true: Tensor, mask: Tensor) -> Tensor:
    """Compute lDDT (N, L), 0 to 1, of each residue from CA positions (N, L, 3). No superposition is needed."""
    scored, preserved = _pairs(_distances(predicted), _distances(true), mask)
    # a residue with no other in range scores 1
    return (1e-10 + preserved.sum(-1)) / (1e-10 + scored.sum(-1))


def compute_sample_lddt_ca(predicted: Tensor, true: Tensor, mask: Tensor) -> Tensor:
    """Compute lDDT-CA (N,) of whole chains: the fraction of distances preserved, over all pairs within the cutoff."""
    return compute_distance_lddt_ca(_distances(predicted), _distances(true), mask)


def compute_distance_lddt_ca(predicted: Tensor, true: Tensor, mask: Tensor) -> Tensor:
    """Compute lDDT-CA (N,) of whole chains from the distances (N, L, L) of their CA."""
    scored, preserved = _pairs(predicted, true, mask)
    return (1e-10 + preserved.sum((-1, -2))) / (1e-10 + scored.sum((-1, -2)))


def _pairs(predicted: Tensor, true: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (N, L, L) twice: 1 for pairs within the true cutoff; the fraction of thresholds above their error."""
    both = mask[:, :, None] * mask[:, None]
    itself = torch.eye(true.shape[1], device=true.device, dtype=true.dtype)
    scored = (true < LDDT_CUTOFF) * both * (1 - itself)
    error = (true - predicted).abs()
    within = torch.stack([(error < threshold).to(true.dtype) for threshold in LDDT_THRESHOLDS]).mean(0)
    return scored, scored * within


def _distances(position: Tensor) -> Tensor:
    """Compute distances (N, L, L), without a matrix product, whose rounding errors would show below an angstrom."""
    return (position[:, :, None] - position[:, None]).square().sum(-1).sqrt()
