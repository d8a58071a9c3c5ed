"""The experts: their weights in one layout for every way of running them, and three back ends for the products. Sends nothing.

N rows sorted by expert, E experts here, H hidden width here, D model width. All weights are (E, H, D), so that a slice of
the hidden width is a slice of dimension 1 of each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
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
    """Expert by expert on its slice of the rows, every product written where it belongs."""
    return _Loop.apply(rows_ND, rows_E.tolist(), activation, *vars(weights).values())


class _Loop(torch.autograd.Function):
    """Autograd of the loop, written out: W[e] in a graph would write a whole zero gradient per expert, O(E^2), and `unbind`
    still stacks the gradients in a second copy. Keeps rows and what the activation was given; the hidden layer of one
    expert at a time is computed again in the backward pass (MegaBlocks' memory-optimised MLP) and stays in the cache.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], activation: Activation, *tensors: Tensor | None) -> Tensor:
        weights = Weights(*tensors)  # type: ignore[arg-type]
        rows = rows.contiguous()
        up_NH = rows.new_empty(len(rows), weights.up_EHD.shape[1])
        gate_NH = torch.empty_like(up_NH) if weights.gate_EHD is not None else None
        out_ND = torch.empty_like(rows)
        for e, here in _slices(counts):
            up = up_NH[here]
            _product(rows[here], weights.up_EHD[e].t(), weights.up_bias_EH, e, out=up)
            gate = None
            if gate_NH is not None and weights.gate_EHD is not None:
                gate = torch.mm(rows[here], weights.gate_EHD[e].t(), out=gate_NH[here])
            hidden = (
                up.relu_() if activation == "relu" else activate(up, gate, activation)
            )  # relu: keep its value instead
            _product(hidden, weights.down_EHD[e], weights.down_bias_ED, e, out=out_ND[here])
        ctx.save_for_backward(rows, up_NH, gate_NH, *tensors)
        ctx.counts, ctx.activation = counts, activation
        return out_ND

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, up_NH, gate_NH, *tensors = ctx.saved_tensors
        weights, activation = Weights(*tensors), ctx.activation
        d_out = d_out.contiguous()
        d_rows, d_weights = torch.empty_like(rows), weights.map(torch.empty_like)
        scratch = up_NH.new_empty(max(ctx.counts), up_NH.shape[1])
        for e, here in _slices(ctx.counts):
            up, gate = up_NH[here], None if gate_NH is None else gate_NH[here]
            hidden = up if activation == "relu" else activate(up, gate, activation)
            torch.mm(hidden.t(), d_out[here], out=d_weights.down_EHD[e])
            d_up = torch.mm(
                d_out[here], weights.down_EHD[e].t(), out=scratch[: len(up)]
            )  # until the next line: d_hidden
            if gate is None:
                _ACTIVATION_GRADIENTS[activation](d_up, up, grad_input=d_up)
            else:
                assert weights.gate_EHD is not None
                assert d_weights.gate_EHD is not None
                d_gate = torch.ops.aten.silu_backward(d_up * up, gate)
                d_up *= F.silu(gate)
                torch.mm(d_gate.t(), rows[here], out=d_weights.gate_EHD[e])
                torch.mm(d_gate, weights.gate_EHD[e], out=d_rows[here])
            torch.mm(d_up.t(), rows[here], out=d_weights.up_EHD[e])
            torch.addmm(d_rows[here], d_up, weights.up_EHD[e], beta=0 if gate is None else 1, out=d_rows[here])
            for bias, gradient in ((d_weights.up_bias_EH, d_up), (d_weights.down_bias_ED, d_out[here])):
                if bias is not None:
                    torch.sum(gradient, 0, out=bias[e])
        return d_rows, None, None, *vars(d_weights).values()


def _slices(counts: list[int]) -> list[tuple[int, slice]]:
    ends = list(accumulate(counts))
    return [(e, slice(end - count, end)) for e, (count, end) in enumerate(zip(counts, ends, strict=True))]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, e: int, *, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias[e], x, weight, out=out)


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
_ACTIVATION_GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "relu": lambda gradient, value, grad_input: torch.ops.aten.threshold_backward(
        gradient, value, 0, grad_input=grad_input
    ),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
}
_BACKENDS: dict[str, Callable[[Tensor, Tensor, Weights, Activation], Tensor]] = {
    "loop": _loop,
    "bmm": _bmm,
    "grouped_mm": _grouped_mm,
}
