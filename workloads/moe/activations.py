"""Activations of an expert's hidden layer, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mlhpc.workloads.moe.config import Activation

ACTIVATION_GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "relu": lambda gradient, value, grad_input: torch.ops.aten.threshold_backward(
        gradient, value, 0, grad_input=grad_input
    ),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def compute_activation(up: Tensor, gate: Tensor | None, activation: Activation) -> Tensor:
    """Apply the activation of the hidden layer; swiglu is silu(gate) * up."""
    if activation == "swiglu":
        assert gate is not None
        return F.silu(gate) * up
    return _ACTIVATIONS[activation](up)
