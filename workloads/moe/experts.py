"""The experts: weights in one layout for every execution, and the back ends that multiply. No communication.

N rows sorted by expert, E experts on this rank, H hidden width on this rank, D model width. All weights are (E, H, D).
So a slice of the hidden width is a slice of dimension 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.suite.errors import InputError
from mlhpc.suite.machine.choice.layout import compute_onednn_product, has_onednn
from mlhpc.suite.training.parallel.meta_init import has_values
from mlhpc.workloads.moe import phases
from mlhpc.workloads.moe.config import Activation, Backend
from mlhpc.workloads.moe.kernels.fused import Source, find_problem, run_fused
from mlhpc.workloads.moe.phases import Marker, NoMarker
from mlhpc.workloads.moe.router import DispatchPlan, Permutation, list_counts_on_host

GROUPED_ALIGNMENT_BYTES = 16  # F.grouped_mm refuses other strides
ONEDNN_ROWS = 8  # oneDNN compiles a kernel per shape, 0.4 ms each, so the number of rows is a multiple of this
GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# padded rows over rows up to which a GPU multiplies all experts at once: 2.2 times as fast as 16 experts in turn
PADDED_UP_TO = 1.5
NEARLY_EVEN = 1.05  # padded rows over rows, up to which bmm is the best on a CPU where nothing was measured
READ_ON_HOST = ("loop", "onednn", "bmm")
NO_MARKER = NoMarker()

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Weights:
    """Weights of the experts that a rank computes. ``gate_EHD`` exists for swiglu, biases if the config has them."""

    up_EHD: Tensor
    down_EHD: Tensor
    gate_EHD: Tensor | None = None
    up_bias_EH: Tensor | None = None
    down_bias_ED: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Weights:
        """Apply a function to each weight that exists."""
        present = {name: function(value) for name, value in vars(self).items() if value is not None}
        return replace(self, **present)


@dataclass(frozen=True)
class ExpertBackend:
    """One way to multiply. ``problem`` explains why it cannot multiply such rows; None if it can.

    ``pads``: every expert costs as much as that with the most rows.
    """

    run: Callable[[Tensor, Tensor, Weights, Activation], Tensor]
    problem: Callable[[Tensor, Weights], str | None]
    pads: bool = False


@dataclass(frozen=True)
class SelectedBackend:
    """The back end measured to be fastest: ``padded`` while padded rows are at most ``up_to`` times N, else ``name``.

    As text, which logs have: ``loop``, or ``loop, bmm to 1.5``.
    """

    name: str
    padded: str | None = None
    up_to: float = 0.0

    def for_load(self, rows_E: Tensor, rows: int) -> str:
        """Name the back end for these rows of each expert. With a padded one the host reads the longest queue."""
        if self.padded is not None and int(rows_E.max()) * len(rows_E) <= self.up_to * rows:
            return self.padded
        return self.name

    def __str__(self) -> str:
        """Render the choice as text."""
        return self.name if self.padded is None else f"{self.name}, {self.padded} to {self.up_to:g}"

    @staticmethod
    def parse(text: str) -> SelectedBackend | None:
        """Read the text. None if it is another, or names a back end that is not there."""
        found = re.fullmatch(r"(\w+)(?:, (\w+) to (\d{1,6}(?:\.\d{1,6})?))?", text)
        if found is None or not {found[1], found[2] or found[1]} <= BACKENDS.keys():
            return None
        return SelectedBackend(found[1], found[2], float(found[3] or 0))


class Experts(nn.Module):
    """Parameters of the experts on this rank. There are ``experts`` of them, each with a slice of the hidden width.

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
        """Keep some experts, and of each one of ``parts`` slices of dimension 1. InputError if it cannot be divided."""
        for name, parameter in list(self.named_parameters()):
            length = parameter.shape[1]
            if length % parts:
                raise InputError(f"{name}: {length} cannot be divided among {parts} ranks that share an expert")
            step = length // parts
            # a clone: a slice would keep the memory of all experts
            setattr(self, name, nn.Parameter(parameter[experts, part * step : (part + 1) * step].clone()))

    def weights(self) -> Weights:
        """Return the parameters."""
        return Weights(self.up_EHD, self.down_EHD, self.gate_EHD, self.up_bias_EH, self.down_bias_ED)


def run_experts(
    rows_ND: Tensor,
    rows_E: Tensor,
    weights: Weights,
    activation: Activation,
    backend: Backend | SelectedBackend,
    host_E: Tensor | None = None,
) -> Tensor:
    """Compute each expert's FFN on its rows with a back end.

    ``rows_E`` counts the rows of each expert, on the rows' device. ``host_E`` is the same on the host, for the back
    ends in `READ_ON_HOST`. ``auto`` follows a rule and measures nothing. The rule also replaces a measured back end
    that cannot multiply these rows. InputError if a back end that the user named cannot.
    """
    name, host_E = _select_for_load(backend, rows_ND, weights, rows_E, len(rows_ND), host_E)
    if name in READ_ON_HOST and host_E is not None:
        rows_E = host_E
    return BACKENDS[name].run(rows_ND, rows_E, weights, activation)


def run_experts_on_tokens(
    x_TD: Tensor,
    weights_TK: Tensor,
    permute: Permutation,
    plan: DispatchPlan,
    weights: Weights,
    activation: Activation,
    backend: Backend | SelectedBackend,
    marker: Marker = NO_MARKER,
) -> Tensor:
    """Compute the weighted sum of each token's experts: (T, D) to (T, D). This rank has all experts.

    The kernels in Triton also gather the tokens and add up the rows, unless rows are empty. For other back ends tokens
    are copied to rows and back. Weights are cast to the tokens' type. Else as `run_experts`.
    """
    name, host_E = _select_for_load(backend, x_TD, weights, plan.rows_E, plan.rows, plan.host_E)
    if name == "triton" and plan.capacity is None:
        # a view of its own: hooks on one tensor run in their order, and this one must see its gradient first
        x_TD = marker.boundary(x_TD.view_as(x_TD), phases.PERMUTE, phases.EXPERTS)
        source = Source(plan.rows_E, plan.tokens_N, plan.choices_N)
        y_TD = run_fused_experts(x_TD, weights_TK, source, weights.map(lambda each: each.to(x_TD.dtype)), activation)
        return marker.boundary(y_TD, phases.EXPERTS, phases.UNPERMUTE)
    rows_ND = marker.boundary(permute.encode(x_TD, plan), phases.PERMUTE, phases.EXPERTS)
    weights = weights.map(lambda weight: weight.to(x_TD.dtype))
    rows_ND = run_experts(rows_ND, plan.rows_E, weights, activation, name, host_E)  # type: ignore[arg-type]
    return permute.decode(marker.boundary(rows_ND, phases.EXPERTS, phases.UNPERMUTE), plan, weights_TK)


def _select_for_load(
    backend: Backend | SelectedBackend, x: Tensor, weights: Weights, rows_E: Tensor, rows: int, host_E: Tensor | None
) -> tuple[str, Tensor | None]:
    """Name the back end for rows of the type of ``x``. Return ``host_E`` too, which may have been read for it."""
    if backend == "auto":
        backend = choose_unmeasured_backend(x, weights)
    if not isinstance(backend, SelectedBackend):
        return backend, host_E
    if backend.padded is not None and host_E is None and rows_E.is_cuda:
        host_E = rows_E.cpu()  # once, for the choice and for what is chosen
    name = backend.for_load(rows_E if host_E is None else host_E, rows)
    if BACKENDS[name].problem(x, weights) is not None:
        return _select_for_load(choose_unmeasured_backend(x, weights), x, weights, rows_E, rows, host_E)
    return name, host_E


def choose_unmeasured_backend(rows_ND: Tensor, weights: Weights) -> SelectedBackend:
    """Return the back end to use without measuring.

    On a GPU: grouped_mm in bfloat16, else bmm if it pads little; torch has GPU kernels for bfloat16 only, and for other
    types grouped_mm reads the counts in every call. On a CPU: grouped_mm where it can, bmm for even loads (docs/moe.md
    has how near that is to the best); otherwise the loop.
    """
    grouped = explain_grouped_problem(rows_ND, weights) is None
    if rows_ND.is_cuda and (rows_ND.dtype != torch.bfloat16 or not grouped):
        return SelectedBackend("loop", "bmm", PADDED_UP_TO)
    # Without values, as `mlhpc plan` computes, torch knows the shapes of bfloat16 only
    if not grouped or not has_values(rows_ND):
        return SelectedBackend("loop")
    return SelectedBackend("grouped_mm") if rows_ND.is_cuda else SelectedBackend("grouped_mm", "bmm", NEARLY_EVEN)


def find_host_read(backend: Backend | SelectedBackend, *, counts_known: bool, bfloat16: bool) -> str | None:
    """Find what makes the host read each expert's rows from a GPU. ``counts_known``: the host has them anyway."""
    if backend == "auto":  # not measured: the rule
        backend = SelectedBackend("grouped_mm") if bfloat16 else SelectedBackend("loop", "bmm", PADDED_UP_TO)
    if not isinstance(backend, SelectedBackend):
        backend = SelectedBackend(backend)
    names = {backend.name, backend.padded or backend.name}
    if "grouped_mm" in names and not bfloat16:
        return "the experts' back end grouped_mm reads their load on the host, except in bfloat16"
    if not counts_known and (backend.padded is not None or not names.isdisjoint(READ_ON_HOST)):
        return f"the experts' back end {backend} reads their load on the host"
    return None


def register(name: str, backend: ExpertBackend) -> None:
    """Add a back end, for example of fused kernels. It is measured too wherever it can multiply the rows."""
    assert re.fullmatch(r"\w+", name)
    BACKENDS[name] = backend


def explain_grouped_problem(rows_ND: Tensor, weights: Weights) -> str | None:
    """Explain why F.grouped_mm cannot multiply these. None if it can."""
    if not hasattr(F, "grouped_mm"):
        return "this torch has no F.grouped_mm"
    if rows_ND.dtype not in GROUPED_DTYPES:
        return f"it has no {rows_ND.dtype}"
    for size in weights.up_EHD.shape[1:]:
        if size * rows_ND.element_size() % GROUPED_ALIGNMENT_BYTES:
            return f"a width of {size} {rows_ND.dtype} is not a multiple of {GROUPED_ALIGNMENT_BYTES} bytes"
    return None


def explain_onednn_problem(rows_ND: Tensor) -> str | None:
    """Explain why oneDNN cannot multiply these. None if it can."""
    if rows_ND.device.type != "cpu" or rows_ND.dtype != torch.float32:
        return f"it is for float32 on a CPU, not {rows_ND.dtype} on {rows_ND.device.type}"
    if not has_onednn():
        return "this torch has no oneDNN product"
    return None


def explain_triton_problem(rows_ND: Tensor, weights: Weights) -> str | None:
    """Explain why the kernels in Triton cannot multiply these. None if they can."""
    return find_problem(rows_ND, len(weights.up_EHD))


def run_fused_experts(
    x: Tensor, weights_TK: Tensor | None, source: Source, weights: Weights, activation: Activation
) -> Tensor:
    """Compute the experts with kernels in Triton: (T, D) to (T, D).

    The kernels gather tokens, and weigh and add rows.

    Without tokens in ``source`` rows (N, D) become rows. InputError if the kernels cannot.
    """
    problem = explain_triton_problem(x, weights)
    if problem is not None:
        raise InputError(f"backend triton: {problem}; choose auto, grouped_mm or loop")
    return run_fused(x, weights_TK, source, activation, tuple(vars(weights).values()))


def _uniform(shape: tuple[int, ...], bound: float) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def _loop(rows_ND: Tensor, rows_E: Tensor, weights: Weights, activation: Activation) -> Tensor:
    """Multiply expert by expert on its slice of the rows, writing each product into the result."""
    return _multiply_in_loop(rows_ND, rows_E, weights, activation, _aten_product, 1)


def _onednn(rows_ND: Tensor, rows_E: Tensor, weights: Weights, activation: Activation) -> Tensor:
    """Multiply expert by expert with oneDNN's products, which torch has for float32 convolutions but not for matrix
    products.
    """
    problem = explain_onednn_problem(rows_ND)
    if problem is not None:
        raise InputError(f"backend onednn: {problem}; choose loop or bmm")
    return _multiply_in_loop(rows_ND, rows_E, weights, activation, _onednn_product, ONEDNN_ROWS)


def _multiply_in_loop(
    rows_ND: Tensor, rows_E: Tensor, weights: Weights, activation: Activation, product: Product, step: int
) -> Tensor:
    counts = list_counts_on_host(rows_E, len(rows_ND))
    tensors = vars(weights).values()
    out_ND: Tensor = _Loop.apply(rows_ND, counts, activation, product, step, *tensors)  # type: ignore[no-untyped-call]
    return out_ND


def _aten_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return torch.mm(a, b.t(), out=out)


def _onednn_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return compute_onednn_product(a, b)


class _Loop(torch.autograd.Function):
    """The loop with a hand-written backward pass.

    Autograd of W[e] would write a zero gradient of all experts for each expert, O(E^2). `unbind` would still stack the
    gradients in a second copy. The rows and the inputs of the activation are saved. The backward pass recomputes the
    hidden layer one expert at a time, so it stays in the cache (as MegaBlocks' memory-optimised MLP).

    ``product(a, b, out)`` is a times b transposed, in ``out`` or in a new tensor. It gets a multiple of ``step`` rows:
    a window of the buffer. The window may include a neighbour's rows; their results are discarded. Buffer sizes do not
    depend on the routing. With new sizes in every step the heap would grow by megabytes per step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        counts: list[int],
        activation: Activation,
        product: Product,
        step: int,
        *tensors: Tensor | None,
    ) -> Tensor:
        weights = Weights(*tensors)  # type: ignore[arg-type]
        rows = rows.contiguous()
        up_NH = rows.new_empty(len(rows), weights.up_EHD.shape[1])
        gate_NH = torch.empty_like(up_NH) if weights.gate_EHD is not None else None
        out_ND, scratch_NH = torch.empty_like(rows), torch.empty_like(up_NH)
        for e, here, window, mine in _windows(counts, step, len(rows)):
            up = product(rows[window], weights.up_EHD[e], up_NH[window])
            if weights.up_bias_EH is not None:
                up += weights.up_bias_EH[e]
            gate = None
            if gate_NH is not None and weights.gate_EHD is not None:
                gate = product(rows[window], weights.gate_EHD[e], gate_NH[window])
                # oneDNN returns a new tensor, and a window may include rows of a neighbour
                _copy_if_needed(gate_NH[here], gate[mine])
            hidden = _compute_hidden(up, gate, activation, scratch_NH)
            _copy_if_needed(up_NH[here], up[mine])
            out = product(hidden, weights.down_EHD[e].t(), out_ND[window])
            if weights.down_bias_ED is not None:
                out += weights.down_bias_ED[e]
            _copy_if_needed(out_ND[here], out[mine])
        ctx.save_for_backward(rows, up_NH, gate_NH, *tensors)
        ctx.counts, ctx.activation, ctx.product, ctx.step = counts, activation, product, step
        return out_ND

    @staticmethod
    def backward(ctx: Any, d_out_ND: Tensor) -> tuple[Tensor | None, ...]:
        rows, up_NH, gate_NH, *tensors = ctx.saved_tensors
        weights, activation, product = Weights(*tensors), ctx.activation, ctx.product
        d_out_ND = d_out_ND.contiguous()
        d_rows, d_weights = torch.empty_like(rows), weights.map(torch.empty_like)
        # only the rows of the largest window are ever written
        hidden_NH, d_up_NH, d_gate_NH = (torch.empty_like(up_NH) for _ in range(3))
        # an expert without rows is in no window below, so nothing else writes its gradient
        for gradient_E in vars(d_weights).values():
            for e, count in enumerate(ctx.counts):
                if gradient_E is not None and not count:
                    gradient_E[e].zero_()
        for e, here, window, mine in _windows(ctx.counts, ctx.step, len(rows)):
            x, up, gate = rows[window], up_NH[window], None if gate_NH is None else gate_NH[window]
            # zero in a neighbour's rows, so that all gradients from them are zero
            d_out = _zero_other_rows(d_out_ND[window], mine)
            hidden = up if activation == "relu" else _compute_hidden(up, gate, activation, hidden_NH)
            _copy_if_needed(d_weights.down_EHD[e], product(hidden.t(), d_out.t(), d_weights.down_EHD[e]))
            # holds d_hidden until the activation's gradient is applied below
            d_up = product(d_out, weights.down_EHD[e], d_up_NH[: len(x)])
            d_gate = None
            if gate is None:
                ACTIVATION_GRADIENTS[activation](d_up, up, grad_input=d_up)
            else:
                assert d_weights.gate_EHD is not None
                d_gate = torch.mul(d_up, up, out=d_gate_NH[: len(x)])
                torch.ops.aten.silu_backward(d_gate, gate, grad_input=d_gate)
                d_up *= torch.ops.aten.silu(gate, out=hidden_NH[: len(x)])
                _copy_if_needed(d_weights.gate_EHD[e], product(d_gate.t(), x.t(), d_weights.gate_EHD[e]))
            _copy_if_needed(d_weights.up_EHD[e], product(d_up.t(), x.t(), d_weights.up_EHD[e]))
            d_x = product(d_up, weights.up_EHD[e].t(), d_rows[window])
            if d_gate is not None and weights.gate_EHD is not None:
                d_x += product(d_gate, weights.gate_EHD[e].t(), torch.empty_like(d_x))
            _copy_if_needed(d_rows[here], d_x[mine])
            for bias, gradient in ((d_weights.up_bias_EH, d_up), (d_weights.down_bias_ED, d_out)):
                if bias is not None:
                    torch.sum(gradient, 0, out=bias[e])
        return d_rows, None, None, None, None, *vars(d_weights).values()


def _windows(counts: list[int], step: int, rows: int) -> Iterator[tuple[int, slice, slice, slice]]:
    """Yield experts that have rows: their rows, the window around these, and the rows' position in the window.

    The length of a window is a multiple of ``step``, and of a sixteenth to a thirty-second of itself. So few lengths
    occur and few kernels are compiled.
    """
    end = 0
    for e, count in enumerate(counts):
        begin, end = end, end + count
        unit = max(step, 1 << count.bit_length() >> 5) if step > 1 else 1
        length = -(-count // unit) * unit
        if length > rows:  # few rows in all: exactly these
            length = count
        # the window of the last experts reaches back instead of beyond the buffer
        first = min(begin, rows - length)
        if count:
            yield e, slice(begin, end), slice(first, first + length), slice(begin - first, end - first)


def _compute_hidden(up: Tensor, gate: Tensor | None, activation: Activation, scratch_NH: Tensor) -> Tensor:
    """Compute the hidden layer: relu in place, since its backward needs only its output; others in the scratch."""
    if activation == "relu":
        return up.relu_()
    out = scratch_NH[: len(up)]
    if activation == "swiglu":
        assert gate is not None
        return torch.ops.aten.silu(gate, out=out).mul_(up)  # type: ignore[no-any-return]
    function = {"gelu": torch.ops.aten.gelu, "silu": torch.ops.aten.silu}[activation]
    return function(up, out=out)  # type: ignore[no-any-return]


def _zero_other_rows(window: Tensor, mine: slice) -> Tensor:
    """Return the window with zeros in place of the rows that are not mine."""
    if mine == slice(0, len(window)):
        return window
    alone = torch.zeros_like(window)
    alone[mine] = window[mine]
    return alone


def _copy_if_needed(place: Tensor, value: Tensor) -> None:
    """Copy, unless it was written there."""
    if not has_values(place) or place.data_ptr() != value.data_ptr():
        place.copy_(value)


def _bmm(rows_ND: Tensor, rows_E: Tensor, weights: Weights, activation: Activation) -> Tensor:
    """Multiply in one batched product; experts with fewer rows than the longest are padded with zeros."""
    counts = list_counts_on_host(rows_E, len(rows_ND))
    longest, width = max(counts), rows_ND.shape[1]
    if min(counts) == longest:
        # all queues are equally long: the rows are the padded buffer already
        places_N, padded_ND = None, rows_ND
    else:
        here_E = rows_E.to(rows_ND.device, non_blocking=True)
        shift_E = torch.arange(len(counts), device=here_E.device) * longest - (here_E.cumsum(0) - here_E)
        shift_N = shift_E.repeat_interleave(here_E, output_size=len(rows_ND))
        places_N = torch.arange(len(rows_ND), device=here_E.device) + shift_N
        padded_ND = rows_ND.new_zeros(len(counts) * longest, width).index_copy(0, places_N, rows_ND)
    rows_ECD = padded_ND.view(len(counts), longest, width)
    up = _Batched.apply(rows_ECD, weights.up_EHD, weights.up_bias_EH)  # type: ignore[no-untyped-call]
    gate = None
    if weights.gate_EHD is not None:
        gate = _Batched.apply(rows_ECD, weights.gate_EHD, None)  # type: ignore[no-untyped-call]
    out_ECD = _batched(compute_activation(up, gate, activation), weights.down_EHD, weights.down_bias_ED)
    out_ND = out_ECD.reshape(-1, width)
    return out_ND if places_N is None else out_ND.index_select(0, places_N)


def _batched(x_ECD: Tensor, weight_EDH: Tensor, bias_EH: Tensor | None) -> Tensor:
    """Multiply (E, C, D) by (E, D, H) to (E, C, H), and add the bias if there is one."""
    if bias_EH is None:
        return torch.bmm(x_ECD, weight_EDH)
    return torch.baddbmm(bias_EH.unsqueeze(1), x_ECD, weight_EDH)


class _Batched(torch.autograd.Function):
    """Rows times each expert's weight transposed, plus its bias. The weight's gradient lies as the weight does.

    Autograd's would lie transposed and be copied. With few rows of many experts that takes a quarter of the pass.
    """

    @staticmethod
    def forward(ctx: Any, x_ECD: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None) -> Tensor:
        """Multiply (E, C, D) by weights (E, H, D) to (E, C, H)."""
        ctx.save_for_backward(x_ECD, weight_EHD)
        ctx.biased = bias_EH is not None
        return _batched(x_ECD, weight_EHD.transpose(1, 2), bias_EH)

    @staticmethod
    def backward(ctx: Any, d_ECH: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of rows, weights and bias."""
        x_ECD, weight_EHD = ctx.saved_tensors
        d_weight_EHD = torch.bmm(d_ECH.transpose(1, 2), x_ECD)
        return torch.bmm(d_ECH, weight_EHD), d_weight_EHD, d_ECH.sum(1) if ctx.biased else None


def _grouped_mm(rows_ND: Tensor, rows_E: Tensor, weights: Weights, activation: Activation) -> Tensor:
    """F.grouped_mm with its traps guarded: strides, gradients that are not contiguous, rows beyond the last offset.

    Rows beyond offs[-1] would be uninitialised in output and gradient. There are none: N is the sum of rows_E.
    """
    problem = explain_grouped_problem(rows_ND, weights)
    if problem is not None:
        raise InputError(f"backend grouped_mm: {problem}; choose loop or bmm")
    ends_E = rows_E.cumsum(0).to(device=rows_ND.device, dtype=torch.int32)
    rows_ND = rows_ND.contiguous()
    up = _grouped(rows_ND, weights.up_EHD.transpose(1, 2), ends_E)
    gate = None if weights.gate_EHD is None else _grouped(rows_ND, weights.gate_EHD.transpose(1, 2), ends_E)
    if weights.up_bias_EH is not None:
        up = up + _repeat_by_rows(weights.up_bias_EH, rows_E, len(rows_ND))
    out_ND = _grouped(compute_activation(up, gate, activation), weights.down_EHD, ends_E)
    if weights.down_bias_ED is not None:
        out_ND = out_ND + _repeat_by_rows(weights.down_bias_ED, rows_E, len(rows_ND))
    return out_ND


def _triton(rows_ND: Tensor, rows_E: Tensor, weights: Weights, activation: Activation) -> Tensor:
    """Run the kernels on rows that lie sorted already: nothing is gathered or added up."""
    return run_fused_experts(rows_ND, None, Source(rows_E.to(rows_ND.device)), weights, activation)


def _grouped(rows: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    product = F.grouped_mm(rows, weight, offs=ends_E)
    return _ContiguousGradient.apply(product)  # type: ignore[no-any-return, no-untyped-call]


def _repeat_by_rows(bias_EX: Tensor, rows_E: Tensor, rows: int) -> Tensor:
    return bias_EX.repeat_interleave(rows_E.to(bias_EX.device), dim=0, output_size=rows)


class _ContiguousGradient(torch.autograd.Function):
    """Identity. An expanded gradient (of a sum, say) makes grouped_mm's backward fail with "Invalid strides"."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


BACKENDS: dict[str, ExpertBackend] = {
    "onednn": ExpertBackend(_onednn, lambda rows_ND, weights: explain_onednn_problem(rows_ND)),
    "grouped_mm": ExpertBackend(_grouped_mm, explain_grouped_problem),
    "loop": ExpertBackend(_loop, lambda rows_ND, weights: None),
    "bmm": ExpertBackend(_bmm, lambda rows_ND, weights: None, pads=True),
    "triton": ExpertBackend(_triton, explain_triton_problem),
}


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
