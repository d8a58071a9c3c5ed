"""Computes the experts of a layer without drops by the kernels of `products` and `gradients`: tokens in, tokens out.

No row is copied on the way: products gather what they multiply. The host reads nothing back from the device. N rows
sorted by expert, T tokens, K choices, R = T * K assignments. E experts, D model width, H hidden width.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlhpc.suite.errors import explain_not_installed
from mlhpc.workloads.moe.kernels.blocks import Blocks, BlockTimings

if TYPE_CHECKING:  # the kernels need torch and Triton only
    from mlhpc.workloads.moe.config import Activation

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)
DESCRIPTOR_ALIGNMENT = 16
EXPERTS_AT_ONCE = 1024  # a tile finds its expert by looking at the counts of all
TILES_AT_ONCE = 32
ADD_TOKENS, ADD_COLUMNS = 4, 512
BIAS_ROWS, BIAS_COLUMNS = 64, 64
BLOCK_TIMINGS = BlockTimings()


@dataclass(frozen=True)
class Source:
    """Where rows come from. Without ``tokens_N`` they are rows of their own: nothing is gathered, weighted or added up.

    ``tokens_N``: token of each row; ``choices_N``: its index in the flat (T, K) weights; ``rows_E``: rows per expert.
    """

    rows_E: Tensor
    tokens_N: Tensor | None = None
    choices_N: Tensor | None = None
    ends_E: Tensor = field(init=False)
    tiles: dict[int, tuple[Tensor, int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # the dataclass is frozen
        object.__setattr__(self, "ends_E", self.rows_E.cumsum(0, dtype=torch.int32))

    def tiles_of(self, rows: int, size: int) -> tuple[Tensor, int]:
        """List the tiles of ``size`` rows, on the device, and their largest possible number. Cached by ``size``."""
        if size not in self.tiles:
            from mlhpc.workloads.moe.kernels.products import locate_tiles

            experts = len(self.rows_E)
            # each expert that has rows may have one tile that is not full
            most = rows // size + min(experts, rows)
            tiles_P3 = make_output_tensor(self.rows_E, most, 3, dtype=torch.int32)
            grid = (-(-most // TILES_AT_ONCE),)
            locate_tiles[grid](self.rows_E, tiles_P3, experts, most, size, compute_power_of_two(experts), TILES_AT_ONCE)
            self.tiles[size] = tiles_P3, most
        return self.tiles[size]


def find_problem(x: Tensor, experts: int) -> str | None:
    """Explain why the kernels cannot compute these. None if they can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if find_spec("triton") is None:
        return explain_not_installed("triton")
    if not x.is_cuda and not interpreted:
        return f"it is for GPUs, not for {x.device.type} (TRITON_INTERPRET=1 interprets it, slowly)"
    if x.dtype not in DTYPES:
        return f"it has no {x.dtype}"
    if experts > EXPERTS_AT_ONCE:
        return f"it has at most {EXPERTS_AT_ONCE} experts on a device, not {experts}"
    if x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) < LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(x.device)} is older than compute capability 8.0"
    return None


def run_fused(
    x: Tensor, weights_TK: Tensor | None, source: Source, activation: Activation, tensors: tuple[Tensor | None, ...]
) -> Tensor:
    """Compute the experts: tokens (T, D) to weighted sums (T, D).

    Without tokens in ``source``, rows (N, D) become rows.

    ``tensors``: up, down, gate, up_bias and down_bias in the data type of ``x``; the last three may be None.
    """
    # Triton launches on the current device, whatever device the tensors are on
    on_device = torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
    with on_device:
        return _Fused.apply(x, weights_TK, source, activation, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def make_output_tensor(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Make a tensor that a kernel writes whole. Everything that kernels write comes from here."""
    return torch.empty(shape, dtype=like.dtype if dtype is None else dtype, device=like.device)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights_TK: Tensor | None, source: Source, activation: Activation, *tensors: Tensor | None
    ) -> Tensor:
        x = x.contiguous()
        up_w, down_w, gate_w, up_b, down_b = (None if tensor is None else tensor.contiguous() for tensor in tensors)
        assert up_w is not None
        assert down_w is not None
        run = _Launches(x, source, activation, up_w)
        keep = any(ctx.needs_input_grad)
        hidden = make_output_tensor(x, run.N, run.H)
        up = make_output_tensor(x, run.N, run.H) if keep and activation != "relu" else hidden
        gate = make_output_tensor(x, run.N, run.H) if keep and gate_w is not None else up
        run.hidden_rows(x, up_w, gate_w, up_b, up, gate, hidden, keep=keep)
        out = make_output_tensor(x, run.N, run.D)
        run.wide_rows(hidden, None, down_w, None, down_b, out)
        weights_R = places_R = None
        if source.choices_N is not None:
            assert weights_TK is not None
            weights_R = weights_TK.contiguous().view(-1)
            # the inverse permutation: the row of each choice
            places_R = torch.empty_like(source.choices_N)
            places_R.scatter_(0, source.choices_N, torch.arange(run.N, device=x.device))
            out = run.add_rows(out, places_R, weights_R, len(x))
        if keep:
            ctx.save_for_backward(x, up, gate, weights_R, places_R, up_w, down_w, gate_w, up_b, down_b)
            ctx.run, ctx.weights_shape = run, None if weights_TK is None else weights_TK.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        with torch.cuda.device(d_out.device) if d_out.is_cuda else contextlib.nullcontext():
            return _backward(ctx, d_out.contiguous())


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients that are needed, in the order of the arguments of `_Fused.forward`."""
    x, up, gate, weights_R, places_R, up_w, down_w, gate_w, up_b, down_b = ctx.saved_tensors
    run: _Launches = ctx.run
    needs_x, needs_weights, _, _, *needs_tensors = ctx.needs_input_grad
    d_up = make_output_tensor(x, run.N, run.H)
    d_gate = None if gate_w is None else make_output_tensor(x, run.N, run.H)
    own_rows = run.source.tokens_N is None
    # relu kept its output, and without weights the hidden rows are the same again
    hidden = up if own_rows and run.activation == "relu" else make_output_tensor(x, run.N, run.H)
    parts = run.hidden_gradient(d_out, weights_R, down_w, down_b, up, gate, hidden, d_up, d_gate)
    d_x = d_weights = None
    if needs_x:
        d_x = make_output_tensor(x, run.N, run.D)
        run.wide_rows(d_up, d_gate, up_w, gate_w, None, d_x)
        if places_R is not None:
            d_x = run.add_rows(d_x, places_R, None, len(x))
    if needs_weights and parts is not None:
        d_weights = parts.sum(1).view(ctx.weights_shape).to(weights_R.dtype)
    d_up_w = d_down_w = d_gate_w = d_up_b = d_down_b = None
    if any(needs_tensors):
        d_up_w, d_gate_w = run.weight_gradient(d_up, d_gate, x, up_w)
        d_down_w, _ = run.weight_gradient(hidden, None, d_out, down_w)
        if up_b is not None:
            d_up_b = run.bias_gradient(d_up, None, up_b)
        if down_b is not None:
            d_down_b = run.bias_gradient(d_out, weights_R, down_b)
    return d_x, d_weights, None, None, d_up_w, d_down_w, d_gate_w, d_up_b, d_down_b


class _Launches:
    """The kernels, with the sizes and settings of one call of the layer."""

    def __init__(self, x: Tensor, source: Source, activation: Activation, up_w: Tensor) -> None:
        self.E, self.H, self.D = up_w.shape
        self.source, self.activation, self.like = source, activation, x.new_empty(0)
        self.N = len(x) if source.tokens_N is None else len(source.tokens_N)
        # tf32 only where torch's own products may use it too
        precise = x.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
        self.precision = "ieee" if precise else "tf32"
        self.turned = x.dtype == torch.float32 and precise
        self.gather = source.tokens_N is not None
        # block sizes are timed once for all numbers of rows with as many bits
        self.case = (self.E, self.D, self.H, self.N.bit_length(), activation, self.gather, precise)

    def hidden_rows(
        self, x: Tensor, up_w: Tensor, gate_w: Tensor | None, up_b: Tensor | None, up: Tensor, gate: Tensor,
        hidden: Tensor, *, keep: bool,
    ) -> None:  # fmt: skip
        """Write the hidden rows, and to keep them the inputs of the activation."""
        from mlhpc.workloads.moe.kernels.products import hidden_rows

        constants = {"ACTIVATION": self.activation, "GATHER": self.gather, "BIAS": up_b is not None, "KEEP": keep}
        constants["TURNED"] = self.turned
        up_w, gate_w = self._turn(up_w), None if gate_w is None else self._turn(gate_w)

        def pointers(blocks: Blocks) -> tuple[Any, ...]:
            block = self._across(blocks)
            weights = (
                _make_descriptor(up_w, blocks, block),
                _make_descriptor(_choose_tensor(gate_w, up_w), blocks, block),
            )
            return x, self._tokens(x), *weights, _choose_tensor(up_b, up_w), up, gate, hidden

        name = "hidden_rows" if gate_w is None else "hidden_rows_two"
        self._tiled(name, hidden_rows, self.H, self.D, pointers, constants, (up_w, _choose_tensor(gate_w, up_w)))

    def wide_rows(
        self, one: Tensor, two: Tensor | None, one_w: Tensor, two_w: Tensor | None, bias: Tensor | None, out: Tensor
    ) -> None:
        """Write hidden rows times weights, the sum of two such products if there are two."""
        from mlhpc.workloads.moe.kernels.products import wide_rows

        constants = {"TWO": two is not None, "BIAS": bias is not None}
        rows, weights = (one, _choose_tensor(two, one)), (one_w, _choose_tensor(two_w, one_w))

        def pointers(blocks: Blocks) -> tuple[Any, ...]:
            described_rows = (_make_descriptor(each, blocks, (blocks.m, blocks.k)) for each in rows)
            described = (_make_descriptor(each, blocks, (1, blocks.k, blocks.n)) for each in weights)
            return *described_rows, *described, _choose_tensor(bias, one_w), out

        self._tiled("wide_rows", wide_rows, self.D, self.H, pointers, constants, (*rows, *weights))

    def hidden_gradient(
        self, d_out: Tensor, weights_R: Tensor | None, down_w: Tensor, down_b: Tensor | None, up: Tensor, gate: Tensor,
        hidden: Tensor, d_up: Tensor, d_gate: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write the gradients of up and gate and the weighted hidden rows; return the weights' gradient (R, parts)."""
        from mlhpc.workloads.moe.kernels.gradients import bias_share, hidden_gradient

        down_w, parts = self._turn(down_w), make_output_tensor(d_out, 0, 1, dtype=torch.float32)
        shared = self.gather and down_b is not None

        def pointers(blocks: Blocks) -> tuple[Any, ...]:
            nonlocal parts
            if self.gather:
                parts = make_output_tensor(d_out, self.N, -(-self.H // blocks.n) + shared, dtype=torch.float32)
            rows = self._tokens(d_out), self._choices(d_out), _choose_tensor(weights_R, d_out)
            weight = _make_descriptor(down_w, blocks, self._across(blocks))
            return d_out, *rows, weight, up, gate, hidden, d_up, _choose_tensor(d_gate, d_up), parts, parts.shape[1]

        constants = {"ACTIVATION": self.activation, "GATHER": self.gather, "TURNED": self.turned}
        self._tiled("hidden_gradient", hidden_gradient, self.H, self.D, pointers, constants, (down_w,))
        if shared and self.N:
            assert down_b is not None
            tiles_P3, most = self.source.tiles_of(self.N, BIAS_ROWS)
            rows = self._tokens(d_out), self._choices(d_out)
            sizes = {"BLOCK_M": BIAS_ROWS, "BLOCK_D": BIAS_COLUMNS}
            bias_share[(most,)](d_out, *rows, down_b, parts, tiles_P3, self.D, parts.shape[1], **sizes)
        return parts

    def weight_gradient(
        self, one: Tensor, two: Tensor | None, wide: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of a weight, and of a second one if there are two sets of hidden rows."""
        from mlhpc.workloads.moe.kernels.gradients import weight_gradient

        d_one = make_output_tensor(weight, *weight.shape)
        d_two = None if two is None else make_output_tensor(weight, *weight.shape)
        hidden = one, _choose_tensor(two, one)
        constants = {"TWO": two is not None, "GATHER": self.gather, "PRECISION": self.precision}

        def call(blocks: Blocks) -> None:
            grid = (self.E * -(-self.H // blocks.m) * -(-self.D // blocks.n),)
            even = self.H % blocks.m == 0 and self.D % blocks.n == 0
            rows = (_make_descriptor(each, blocks, (blocks.k, blocks.m)) for each in hidden)
            others = wide, self._tokens(wide), self.source.ends_E, d_one, _choose_tensor(d_two, d_one), self.D, self.H
            settings = {**constants, "EVEN": even, "DESCRIBED": blocks.described, **blocks.arguments()}
            weight_gradient[grid](*rows, *others, **settings)

        name = "weight_gradient" if two is None else "weight_gradient_two"
        describable = self.N > 0 and all(_can_describe(each) for each in hidden)
        BLOCK_TIMINGS.run(name, self.case, self.like, call, describable=describable)
        return d_one, d_two

    def bias_gradient(self, rows: Tensor, weights_R: Tensor | None, bias: Tensor) -> Tensor:
        """Return the sums of each expert's rows; with weights, of the rows of its tokens times their weights."""
        from mlhpc.workloads.moe.kernels.gradients import bias_gradient

        d_bias, width = make_output_tensor(bias, *bias.shape), bias.shape[1]
        pointers = (
            rows,
            self._tokens(rows),
            self._choices(rows),
            _choose_tensor(weights_R, rows),
            self.source.ends_E,
            d_bias,
        )
        grid = (self.E, -(-width // BIAS_COLUMNS))
        gather = weights_R is not None
        bias_gradient[grid](*pointers, width, GATHER=gather, BLOCK_N=BIAS_ROWS, BLOCK_X=BIAS_COLUMNS)
        return d_bias

    def add_rows(self, rows: Tensor, places_R: Tensor, weights_R: Tensor | None, tokens: int) -> Tensor:
        """Return the sums (T, D) of each token's rows."""
        from mlhpc.workloads.moe.kernels.products import add_rows

        out = make_output_tensor(rows, tokens, self.D)
        if tokens:
            grid = (-(-tokens // ADD_TOKENS), -(-self.D // ADD_COLUMNS))
            constants = {"K": self.N // tokens, "WEIGHTED": weights_R is not None}
            add_rows[grid](
                rows, places_R, _choose_tensor(weights_R, rows), out, tokens, self.D,
                **constants, BLOCK_T=ADD_TOKENS, BLOCK_D=ADD_COLUMNS,
            )  # fmt: skip
        return out

    def _tiled(
        self, name: str, kernel: Any, columns: int, summed: int, pointers: Callable[[Blocks], tuple[Any, ...]],
        constants: dict[str, Any], in_blocks: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Run a kernel whose programs are tiles of rows by blocks of columns.

        ``summed`` is the length of the dimension summed; ``in_blocks`` are the tensors that may have descriptors.
        """
        if not self.N:
            return

        def call(blocks: Blocks) -> None:
            tiles_P3, most = self.source.tiles_of(self.N, blocks.m)
            grid = (most * -(-columns // blocks.n),)
            even = columns % blocks.n == 0 and summed % blocks.k == 0
            settings = {"PRECISION": self.precision, "EVEN": even, "DESCRIBED": blocks.described, **blocks.arguments()}
            kernel[grid](*pointers(blocks), tiles_P3, most, self.D, self.H, **constants, **settings)

        describable = all(_can_describe(tensor) for tensor in in_blocks)
        BLOCK_TIMINGS.run(name, (*self.case, *constants.values()), self.like, call, describable=describable)

    def _turn(self, weight: Tensor) -> Tensor:
        """Copy a weight as (E, D, H) where that pays. Without tensor cores a product with a turned block is slow."""
        return weight.transpose(1, 2).contiguous() if self.turned else weight

    def _across(self, blocks: Blocks) -> tuple[int, ...]:
        """Return the blocks of a weight whose width D is summed."""
        return (1, blocks.k, blocks.n) if self.turned else (1, blocks.n, blocks.k)

    def _tokens(self, instead: Tensor) -> Tensor:
        return _choose_tensor(self.source.tokens_N, instead)

    def _choices(self, instead: Tensor) -> Tensor:
        return _choose_tensor(self.source.choices_N, instead)


def _can_describe(tensor: Tensor) -> bool:
    """Return whether a GPU of compute capability 9.0 or later can load blocks of this tensor from a descriptor."""
    if not tensor.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(tensor.device) < (9, 0):
        return False
    row_bytes = tensor.shape[-1] * tensor.element_size()
    return row_bytes % DESCRIPTOR_ALIGNMENT == 0 and tensor.data_ptr() % DESCRIPTOR_ALIGNMENT == 0


def _make_descriptor(tensor: Tensor, blocks: Blocks, block: tuple[int, ...]) -> Any:
    """Return a descriptor of the tensor if these blocks want it, else the tensor."""
    if not blocks.described:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def compute_power_of_two(number: int) -> int:
    """Round up to a power of two, as lengths of blocks are."""
    return 1 << max(0, number - 1).bit_length()


def _choose_tensor(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """A kernel gets a pointer that it does not use in place of a tensor that there is not."""
    return instead if tensor is None else tensor
