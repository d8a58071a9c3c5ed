"""Computes products of float32 matrices on a processor by oneDNN; torch calls Intel's MKL.

On other makers' processors MKL leaves half of the vector units unused; oneDNN does not. Results differ only in
rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_onednn_product(left: Tensor, right: Tensor) -> Tensor:
    """Compute left right^T of two float32 matrices on a processor. Each may be transposed in memory."""
    left, right = (
        each if each.is_contiguous() or each.t().is_contiguous() else each.contiguous() for each in (left, right)
    )
    return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")  # type: ignore[no-any-return]


def has_onednn() -> bool:
    """Return True if this torch has oneDNN's product."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
