"""The experts: their weights in one layout for every way of running them, and three back ends for the products. Sends nothing.

N rows sorted by expert, E experts here, H hidden width here, D model width. All weights are (E, H, D), so that a slice of
the hidden width is a slice of dimension 1 of each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.moe.config import Activation, Backend

GROUPED_ALIGNMENT_BYTES = 16  # F.grouped_mm refuses other strides
GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Weights:
    """Weights of the experts a rank computes with. ``gate_EHD`` exists for swiglu, the biases where asked for."""

    up_EHD: Tensor
    down_EHD: Tensor
    gate_EHD: Tensor | None = None
    up_bias_EH: Tensor | None = None
    down_bias_ED: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Weights:
        """The same function of each weight that exists."""
        present = {name: function(value) for name, value in vars(self).items() if value is not None}
        return replace(self, **present)


class Experts(nn.Module):
    """Parameters of the experts on this rank: ``experts`` of them, each a ``1 / sharers`` slice of the hidden width.

    ``down_bias`` is sliced over the model width. Initialised with the bounds of nn.Linear from torch's current seed.
    """

    def __init__(self, experts: int, width: int, hidden: int, activation: Activation, *, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        up_bound, down_bound = 1 / math.sqrt(width), 1 / math.sqrt(hidden)
        shape = (experts, hidden, width)
        self.up_EHD = _uniform(shape, up_bound)
        self.down_EHD = _uniform(shape, down_bound)
        self.gate_EHD = _uniform(shape, up_bound) if activation == "swiglu" else None
        self.up_bias_EH = _uniform((experts, hidden), up_bound) if bias else None
        self.down_bias_ED = _uniform((experts, width), down_bound) if bias else None

    @torch.no_grad()
    def keep(self, experts: slice, part: int, parts: int) -> None:
        """Keep some experts and of them one part of ``parts`` of dimension 1. ValueError if it cannot be divided."""
        for name, parameter in list(self.named_parameters()):
            length = parameter.shape[1]
            if length % parts:
                raise ValueError(f"{name}: {length} cannot be divided among {parts} ranks that share an expert")
            step = length // parts
            setattr(self, name, nn.Parameter(parameter[experts, part * step : (part + 1) * step].clone()))

    def weights(self) -> Weights:
        """The parameters."""
        return Weights(self.up_EHD, self.down_EHD, self.gate_EHD, self.up_bias_EH, self.down_bias_ED)


def run_experts(rows_ND: Tensor, rows_E: Tensor, weights: Weights, activation: Activation, backend: Backend) -> Tensor:
    """Each expert's FFN on its rows, in the order of the rows. ``auto`` takes grouped_mm on a GPU, else the loop."""
    if backend == "auto":
        backend = "grouped_mm" if rows_ND.is_cuda and grouped_problem(rows_ND, weights) is None else "loop"
    return _BACKENDS[backend](rows_ND, rows_E, weights, activation)


def activate(up: Tensor, gate: Tensor | None, activation: Activation) -> Tensor:
    """The activation of the hidden layer; swiglu is silu(gate) * up."""
    if activation == "swiglu":
        assert gate is not None
        return F.silu(gate) * up
    return _ACTIVATIONS[activation](up)


def grouped_problem(rows_ND: Tensor, weights: Weights) -> str | None:
    """Why F.grouped_mm cannot take these, or None."""
    if not hasattr(F, "grouped_mm"):
        return "this torch has no F.grouped_mm"
    if rows_ND.dtype not in GROUPED_DTYPES:
        return f"it has no {rows_ND.dtype}"
    for size in weights.up_EHD.shape[1:]:
        if size * rows_ND.element_size() % GROUPED_ALIGNMENT_BYTES:
            return f"a width of {size} {rows_ND.dtype} is not a multiple of {GROUPED_ALIGNMENT_BYTES} bytes"
    return None


def _uniform(shape: tuple[int, ...], bound: float) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def _loop(rows_ND: Tensor, rows_E: Tensor, weights: Weights, activation: Activation) -> Tensor:
    """One product per expert on its slice of the rows. `unbind`, never W[e]: each select would write a whole zero gradient."""
    outputs = []
    parts = _split(weights, len(rows_E))
    for rows, part in zip(rows_ND.split(rows_E.tolist()), parts, strict=True):
        up = F.linear(rows, part.up_EHD, part.up_bias_EH)
        gate = None if part.gate_EHD is None else F.linear(rows, part.gate_EHD)
        outputs.append(_down(activate(up, gate, activation), part))
    return torch.cat(outputs)


def _down(hidden: Tensor, part: Weights) -> Tensor:
    if part.down_bias_ED is None:
        return hidden @ part.down_EHD
    return torch.addmm(part.down_bias_ED, hidden, part.down_EHD)


def _split(weights: Weights, experts: int) -> list[Weights]:
    unbound = {name: value.unbind(0) for name, value in vars(weights).items() if value is not None}
    return [Weights(**{name: values[e] for name, values in unbound.items()}) for e in range(experts)]


def _bmm(rows_ND: Tensor, rows_E: Tensor, weights: Weights, activation: Activation) -> Tensor:
    """One batched product; experts with fewer rows than the longest are padded with zeros."""
    counts = rows_E.tolist()
    longest, width = max(counts), rows_ND.shape[1]
    if min(counts) == longest:
        places_N, padded_ND = None, rows_ND
    else:
        begins_E = rows_E.cumsum(0) - rows_E
        shift_E = torch.arange(len(counts), device=rows_E.device) * longest - begins_E
        places_N = torch.arange(len(rows_ND), device=rows_E.device) + shift_E.repeat_interleave(rows_E)
        padded_ND = rows_ND.new_zeros(len(counts) * longest, width).index_copy(0, places_N, rows_ND)
    rows_ECD = padded_ND.view(len(counts), longest, width)
    up = _batched(rows_ECD, weights.up_EHD.transpose(1, 2), weights.up_bias_EH)
    gate = None if weights.gate_EHD is None else rows_ECD @ weights.gate_EHD.transpose(1, 2)
    out_ECD = _batched(activate(up, gate, activation), weights.down_EHD, weights.down_bias_ED)
    out_ND = out_ECD.reshape(-1, width)
    return out_ND if places_N is None else out_ND.index_select(0, places_N)


def _batched(x_ECD: Tensor, weight_EDH: Tensor, bias_EH: Tensor | None) -> Tensor:
    if bias_EH is None:
        return torch.bmm(x_ECD, weight_EDH)
    return torch.baddbmm(bias_EH.unsqueeze(1), x_ECD, weight_EDH)


def _grouped_mm(rows_ND: Tensor, rows_E: Tensor, weights: Weights, activation: Activation) -> Tensor:
    """F.grouped_mm with its traps guarded: strides, gradients that are not contiguous, rows beyond the last offset.

    Rows beyond offs[-1] would be uninitialised in the output and in the gradient: there are none, N is the sum of rows_E.
    """
    problem = grouped_problem(rows_ND, weights)
    if problem is not None:
        raise ValueError(f"backend grouped_mm: {problem}; choose loop or bmm")
    ends_E = rows_E.cumsum(0).to(device=rows_ND.device, dtype=torch.int32)
    rows_ND = rows_ND.contiguous()
    up = _grouped(rows_ND, weights.up_EHD.transpose(1, 2), ends_E)
    gate = None if weights.gate_EHD is None else _grouped(rows_ND, weights.gate_EHD.transpose(1, 2), ends_E)
    if weights.up_bias_EH is not None:
        up = up + _per_row(weights.up_bias_EH, rows_E, len(rows_ND))
    out_ND = _grouped(activate(up, gate, activation), weights.down_EHD, ends_E)
    if weights.down_bias_ED is not None:
        out_ND = out_ND + _per_row(weights.down_bias_ED, rows_E, len(rows_ND))
    return out_ND


def _grouped(rows: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    return _ContiguousGradient.apply(F.grouped_mm(rows, weight, offs=ends_E))


def _per_row(bias_EX: Tensor, rows_E: Tensor, rows: int) -> Tensor:
    return bias_EX.repeat_interleave(rows_E.to(bias_EX.device), dim=0, output_size=rows)


class _ContiguousGradient(torch.autograd.Function):
    """Identity. An expanded gradient (of a sum, say) makes grouped_mm's backward fail with "Invalid strides"."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
_BACKENDS: dict[str, Callable[[Tensor, Tensor, Weights, Activation], Tensor]] = {
    "loop": _loop,
    "bmm": _bmm,
    "grouped_mm": _grouped_mm,
}
