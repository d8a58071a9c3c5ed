"""Counts the FLOPs of torch code while it runs, with torch's counter and our formulas where torch's are missing or
wrong.

A multiply-add is two FLOPs. Products count (matrices, convolutions, attention, sparse sums). By convention elementwise
operators, reductions, normalisations and moves of data do not. Every other operator without a formula is listed by
name.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
Shape = Sequence[int]

# Operators that are not counted by convention, besides those that torch tags as pointwise or as views
UNCOUNTED_OPERATORS = frozenset(
    """
    sum mean amax amin max min prod var var_mean std linalg_vector_norm any all argmax argmin cumsum cumprod sort
    topk median logsumexp norm count_nonzero dist _softmax _log_softmax _softmax_backward_data
    _log_softmax_backward_data logcumsumexp native_layer_norm native_layer_norm_backward native_batch_norm
    native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional native_group_norm
    native_group_norm_backward batch_norm_backward _batch_norm_with_update _fused_rms_norm _fused_rms_norm_backward
    cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm miopen_batch_norm_backward nll_loss_forward
    nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward
    binary_cross_entropy_with_logits smooth_l1_loss smooth_l1_loss_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool2d
    avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_nearest2d upsample_nearest2d_backward embedding
    embedding_dense_backward native_dropout native_dropout_backward index index_put index_put_ _unsafe_index_put
    index_select index_add index_add_ index_copy index_copy_ gather scatter scatter_ scatter_add scatter_add_
    scatter_reduce index_fill index_fill_ masked_select masked_scatter nonzero unique_consecutive _unique2
    unique_dim bincount histc searchsorted bucketize repeat_interleave roll flip tril triu cat stack clone copy_
    _to_copy contiguous repeat constant_pad_nd new_zeros new_empty new_ones new_full new_empty_strided zeros ones
    full empty empty_strided arange linspace eye scalar_tensor zeros_like ones_like full_like empty_like rand randn
    rand_like randn_like randint randperm bernoulli_ uniform_ normal_ zero_ fill_ _local_scalar_dense resize_ set_
    equal detach_ lift_fresh select_backward slice_backward select_scatter slice_scatter unfold_backward
    diagonal_backward _pin_memory is_pinned record_stream _reshape_alias split_with_sizes_copy _foreach_norm
    _amp_foreach_non_finite_check_and_unscale_ _fused_sdp_choice _sparse_compressed_tensor_unsafe
    _sparse_csr_tensor_unsafe _sparse_coo_tensor_unsafe _to_sparse _to_sparse_csr _coalesce crow_indices col_indices
    values _nnz _indices _values dim is_coalesced _validate_sparse_compressed_tensor_args _unsafe_view to_sparse_csr
    aminmax linalg_cross as_strided_ _safe_softmax glu glu_backward
    """.split()  # noqa: SIM905  a list of strings would fill two pages
)


@dataclass(frozen=True)
class Count:
    """FLOPs in total, by operator, and by module path (its calls, without their backward pass).

    ``uncovered``: the number of calls of each operator without a formula.
    """

    flops: int
    by_operator: Mapping[str, int]
    by_module: Mapping[str, int]
    uncovered: Mapping[str, int]

    def lines(self) -> list[str]:
        """Render the count for people: operators by FLOPs, then those without a formula."""
        text = [f"{self.flops:,} FLOPs"]
        text += [f"  {name:<44}{flops:>24,}" for name, flops in sorted(self.by_operator.items(), key=lambda i: -i[1])]
        calls = ", ".join(f"{name} ({count} calls)" for name, count in sorted(self.uncovered.items()))
        return [*text, f"  operators without a formula: {calls or 'none'}"]


def count(run: Callable[[], object], model: nn.Module | None = None) -> Count:
    """Run once and count, also by module of ``model``. Do not time it: the counter slows execution."""
    seen = _OperatorCounter()
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    by_module: dict[str, int] = {}
    with _count_modules(model, counter, by_module), seen, counter:
        run()
    totals = counter.get_flop_counts().get("Global", {})
    by_operator = {str(packet).removeprefix("aten."): int(flops) for packet, flops in totals.items()}
    covered = set(counter.flop_registry)
    uncovered = {str(packet): calls for packet, calls in seen.calls.items() if packet not in covered}
    return Count(int(counter.get_total_flops()), by_operator, by_module, uncovered)


@contextmanager
def _count_modules(model: nn.Module | None, counter: FlopCounterMode, by_module: dict[str, int]) -> Iterator[None]:
    """Within the body the FLOPs of each module's calls are added to ``by_module``.

    torch's own module tracker is not used: it charges backward operators to modules that did not cause them.
    """
    begins: list[int] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        begins.append(counter.get_total_flops())

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            by_module[path] = by_module.get(path, 0) + counter.get_total_flops() - begins.pop()

        return hook

    hooks = []
    for path, module in model.named_modules() if model is not None else ():
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave(path), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def list_flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return for each operator the function that computes its FLOPs from its arguments and its result ``out_val``."""
    return dict(FlopCounterMode(display=False, custom_mapping=FORMULAS).flop_registry)


class _Unseen:
    """Keeps operators of the body from all modes. One thread at a time.

    A DTensor runs an operator on fake tensors of the whole extents, to learn the shape of its result.
    """

    def __init__(self) -> None:
        self._lock, self._disabled = threading.Lock(), ExitStack()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._disabled.enter_context(_disable_current_modes())

    def __exit__(self, *_: object) -> None:
        self._disabled.close()
        self._lock.release()


class FlopSum(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the FLOPs of every operator in the body to `flops`, by the formulas that ``known`` returns."""

    def __init__(self, known: Callable[[], dict[Any, Callable[..., int]]] = list_flop_formulas) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._formulas = known()
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor._sharding_prop import ShardingPropagator

            # torch enters it for this; a test with threads puts a lock there
            ShardingPropagator._fake_mode_lock = _UNSEEN  # type: ignore[assignment]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled within, and to guard against it takes as long as an operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented  # what the DTensor calls for its local part comes here again
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=found)
        return found


class _OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of each operator that convention does not exclude (`_is_excluded_by_convention`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _is_excluded_by_convention(func):
            self.calls[func.overloadpacket] += 1
        return func(*args, **kwargs or {})


_UNSEEN = _Unseen()


def _is_excluded_by_convention(func: Any) -> bool:
    name = func.overloadpacket.__name__
    if func.namespace in {"prim", "prims", "c10d", "_c10d_functional", "profiler"}:
        return True  # bookkeeping and collectives
    if func.namespace != "aten":
        return False  # a custom operator can be anything
    if name in UNCOUNTED_OPERATORS or name.startswith("_foreach_") or torch.Tag.pointwise in func.tags or func.is_view:
        return True
    # In-place ("add_") and backward forms are excluded like the operator itself
    return any(_is_pointwise(name.removesuffix(suffix)) for suffix in ("", "_", "_backward") if name.endswith(suffix))


def _is_pointwise(name: str) -> bool:
    """True if torch tags any overload of the operator as pointwise: it tags only some of the overloads."""
    packet = getattr(aten, name, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def count_convolution_backward_flops(
    grad_out: Shape,
    x: Shape,
    weight: Shape,
    bias: Shape | None,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    transposed: bool,
    output_padding: Shape,
    groups: int,
    output_mask: Sequence[bool],
    *,
    out_shape: object = None,
    **_: object,
) -> int:
    """Count the two gradients, by input and by weight. Each costs as much as the forward pass, for any number of
    groups.

    torch (2.13) counts a grouped convolution's weight gradient as a full one: ``groups`` times too much.
    """
    pixels = (x if transposed else grad_out)[2:]
    forward = 2 * x[0] * prod(weight) * prod(pixels)
    return forward * (bool(output_mask[0]) + bool(output_mask[1]))


def count_grouped_mm_flops(left: Shape, right: Shape, *_: object, **__: object) -> int:
    """Count products of groups of rows (T K, E K N), of groups of columns, or of a batch. Offsets do not matter.

    torch counts none of them.
    """
    if len(left) == 2 and len(right) == 2:  # (M, K of all groups) x (K of all groups, N) -> (E, M, N)
        return 2 * left[0] * left[1] * right[1]
    if len(left) == 2:  # (T, K) x (E, K, N)
        return 2 * left[0] * left[1] * right[2]
    return 2 * prod(left) * right[-1]  # (E, M, K) x (K, N of all groups) or (E, K, N)


def count_attention_flops(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Count scores and weighted values over all pairs. CPU kernels compute the masked half of causal attention too."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def count_attention_backward_flops(
    grad_out: Shape, query: Shape, key: Shape, value: Shape, *_: object, **__: object
) -> int:
    """Count five products: the scores again, and the gradients of values, weights, queries and keys."""
    return int(sdpa_backward_flop_count(grad_out, query, key, value))  # type: ignore[no-untyped-call]


def count_product_flops(*arguments: Any, **_: object) -> int:
    """Count the product of the last two tensors. Of a sparse one only stored values count; torch counts it as dense."""
    left, right = [argument for argument in arguments if isinstance(argument, torch.Tensor)][-2:]
    if left.layout != torch.strided:
        return 2 * _count_stored(left) * right.shape[1]
    if right.layout != torch.strided:
        return 2 * _count_stored(right) * left.shape[0]
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


def count_embedding_bag_flops(weight: Shape, indices: Shape, *arguments: Any, **keywords: Any) -> int:
    """Count weighted sums of rows as products with a sparse matrix. Sums without weights only add and do not count."""
    per_row = keywords.get("per_sample_weights", arguments[4] if len(arguments) > 4 else None)
    return 0 if per_row is None else 2 * prod(indices) * weight[1]


def _count_stored(sparse: torch.Tensor) -> int:
    return int(sparse._nnz())


def count_linear_flops(x: Shape, weight: Shape, *_: object, **__: object) -> int:
    """Count rows times a matrix (outputs, inputs). Operators that are fused with it do not count."""
    return 2 * prod(x) * weight[0]


def count_distance_flops(left: Shape, right: Shape, *_: object, **__: object) -> int:
    """Count distances of all pairs: one product of coordinates, with both squared lengths as two more columns."""
    return 2 * prod(left[:-1]) * right[-2] * (left[-1] + 2)


count_product_flops._get_raw = True  # type: ignore[attr-defined]  # torch's mark: it takes tensors

FORMULAS: dict[Any, Callable[..., int]] = {
    aten.convolution_backward: count_convolution_backward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: count_attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: count_attention_backward_flops,
    aten.mv: lambda matrix, vector, **_: 2 * prod(matrix),
    aten.addmv: lambda _bias, matrix, vector, **_: 2 * prod(matrix),
    aten.dot: lambda left, right, **_: 2 * prod(left),
    aten.vdot: lambda left, right, **_: 2 * prod(left),
    aten.addbmm: lambda _bias, left, right, **_: 2 * prod(left) * right[-1],
    aten._addmm_activation: lambda _bias, left, right, **_: 2 * prod(left) * right[-1],
    aten.mm: count_product_flops,
    aten.addmm: count_product_flops,
    aten._embedding_bag: count_embedding_bag_flops,
    aten._embedding_bag_forward_only: count_embedding_bag_flops,
    aten._euclidean_dist: count_distance_flops,
    aten._sparse_mm: count_product_flops,
    aten._sparse_addmm: count_product_flops,
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    FORMULAS[torch.ops.mkldnn._linear_pointwise] = count_linear_flops
for _name in ("_grouped_mm", "_scaled_grouped_mm"):  # newer than the oldest torch the suite runs on
    if hasattr(aten, _name):
        FORMULAS[getattr(aten, _name)] = count_grouped_mm_flops
