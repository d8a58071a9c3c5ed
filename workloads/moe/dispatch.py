"""Permutes tokens to rows sorted by expert, with or without capacity. Works on one rank; no communication.

Queues are Tutel's: all first choices in token order (or by score), then all second choices. A row is one assignment of
a token to an expert, or empty. Rows are sorted by expert, then by position in its queue. Shapes depend on the number of
tokens only, so the host does not wait for the device. The exception is a capacity factor of zero or below (`Capacity`).
No two rows are added into the same place at once. Each token gathers its rows and adds them in the order of choice, in
float32 at least. So results do not depend on the order in which a GPU's threads end. T tokens, K choices, R = T * K
assignments. E experts, C capacity, D width, N rows of the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mlhpc.suite.training.parallel.skeleton import has_values
from mlhpc.workloads.moe.config import DispatchMode, compute_capacity
from mlhpc.workloads.moe.router import Routing, count_experts


@dataclass(frozen=True)
class DispatchPlan:
    """Holds the source of every row: its token, and its index in the flat (T, K) weights. For an empty row these are T
    and T * K.

    ``place_TK`` is the row of every choice. Where a choice was dropped it is any row, and ``kept_TK`` is false (None:
    nothing was dropped). ``rows_E`` counts buffer rows per expert, empty ones included. ``host_E`` is the same on the
    host, if it is known there without waiting. ``assigned_E`` counts the router's choices, dropped ones included;
    ``kept`` (no dimensions) counts rows that hold a token.
    """

    tokens: int
    tokens_N: Tensor
    choices_N: Tensor
    place_TK: Tensor
    kept_TK: Tensor | None
    rows_E: Tensor
    host_E: Tensor | None
    assigned_E: Tensor
    kept: Tensor
    capacity: int | None

    @property
    def rows(self) -> int:
        """Return N, the number of rows of the buffer."""
        return len(self.tokens_N)


class Permutation(Protocol):
    """Converts tokens to rows and back; differentiable."""

    def plan(self, routing: Routing, experts: int) -> DispatchPlan:
        """Decide which rows exist and where they come from."""
        ...

    def encode(self, x_TD: Tensor, plan: DispatchPlan) -> Tensor:
        """Build the buffer (N, D): the token of each row, zeros in empty rows."""
        ...

    def decode(self, rows_ND: Tensor, plan: DispatchPlan, weights_TK: Tensor) -> Tensor:
        """Sum the weighted rows of each token to (T, D). A token whose assignments all dropped is zero."""
        ...


@dataclass(frozen=True)
class Dropless:
    """One row per assignment and no empty rows (MegaBlocks)."""

    def plan(self, routing: Routing, experts: int) -> DispatchPlan:
        """Sort by expert."""
        queue = _queue(routing, experts)
        (tokens, top_k), assigned_E = routing.experts_TK.shape, queue.assigned_E
        rows_R = torch.arange(tokens * top_k, device=assigned_E.device)
        return DispatchPlan(
            tokens=tokens,
            tokens_N=queue.tokens_R,
            choices_N=queue.choices_R,
            place_TK=_find_rows(rows_R, queue, top_k),
            kept_TK=None,
            rows_E=assigned_E,
            host_E=None,
            assigned_E=assigned_E,
            kept=torch.full((), tokens * top_k, device=assigned_E.device),
            capacity=None,
        )

    def encode(self, x_TD: Tensor, plan: DispatchPlan) -> Tensor:
        """Gather."""
        return _Encode.apply(x_TD, plan)  # type: ignore[no-any-return, no-untyped-call]

    def decode(self, rows_ND: Tensor, plan: DispatchPlan, weights_TK: Tensor) -> Tensor:
        """Gather, scale and add."""
        return _Decode.apply(rows_ND, weights_TK, plan)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class Capacity(Dropless):
    """C rows for each expert; later assignments drop, missing ones are padded with empty rows.

    ``over_ranks`` computes the maximum of a number over ranks. Factors <= 0 need it, and the longest queue on the host:
    their number of rows depends on the routing.
    """

    factor: float | None = None
    alignment: int = 1
    over_ranks: Callable[[Tensor], Tensor] = torch.clone

    def plan(self, routing: Routing, experts: int) -> DispatchPlan:
        """Cut the queues at the capacity."""
        tokens, top_k = routing.experts_TK.shape
        queue = _queue(routing, experts)
        assigned_E, device = queue.assigned_E, queue.assigned_E.device
        needed = 0
        if self.factor is not None and self.factor <= 0:
            needed = int(self.over_ranks(assigned_E.max()))
        capacity = compute_capacity(self.factor, tokens, experts, top_k, needed, self.alignment)
        rows, choices = experts * capacity, tokens * top_k
        begin_E = assigned_E.cumsum(0) - assigned_E
        turn_R = torch.arange(choices, device=device) - begin_E.index_select(0, queue.experts_R)
        row_R = torch.where(turn_R < capacity, torch.add(turn_R, queue.experts_R, alpha=capacity), rows)
        # all that drop write to one entry behind the last row, in any order; it is cut off
        choices_N = torch.full((rows + 1,), choices, device=device).scatter_(0, row_R, queue.choices_R)[:rows]
        place_TK = _find_rows(row_R, queue, top_k)
        return DispatchPlan(
            tokens=tokens,
            tokens_N=choices_N.div(top_k, rounding_mode="floor"),
            choices_N=choices_N,
            place_TK=place_TK.clamp(max=max(rows - 1, 0)),
            kept_TK=place_TK < rows,
            rows_E=torch.full((experts,), capacity, device=device),
            host_E=torch.full((experts,), capacity),
            assigned_E=assigned_E,
            kept=assigned_E.clamp(max=capacity).sum(),
            capacity=capacity,
        )


@dataclass(frozen=True)
class Einsum(Capacity):
    """GShard's form: the rows of `Capacity` through (T, E*C) masks, O(T E C D) work. A baseline to compare with."""

    def encode(self, x_TD: Tensor, plan: DispatchPlan) -> Tensor:
        """Multiply by the dispatch mask."""
        return _mask(plan, x_TD.new_ones(plan.rows)).t() @ x_TD

    def decode(self, rows_ND: Tensor, plan: DispatchPlan, weights_TK: Tensor) -> Tensor:
        """Multiply by the weighted mask."""
        return _mask(plan, _weights(plan, weights_TK).to(rows_ND.dtype)) @ rows_ND


def make_permutation(
    mode: DispatchMode,
    factor: float | None,
    *,
    alignment: int = 1,
    over_ranks: Callable[[Tensor], Tensor] = torch.clone,
) -> Permutation:
    """Create the permutation of a dispatch mode."""
    if mode == "dropless":
        return Dropless()
    return {"capacity": Capacity, "einsum": Einsum}[mode](factor, alignment, over_ranks)


def add_choices(rows_ND: Tensor, place_TK: Tensor, scale_TK: Tensor | None) -> Tensor:
    """Add the rows that each token has at K places, times ``scale_TK``, in this order: (T, D).

    A bag of embeddings is this in one kernel, which adds bfloat16 in float32.
    """
    tokens, top_k = place_TK.shape
    if not tokens or not len(rows_ND):  # without rows all is dropped, and there is no row to point to
        return rows_ND.new_zeros(tokens, rows_ND.shape[1])
    begins_T = torch.arange(0, tokens * top_k, top_k, device=place_TK.device)
    scale = None if scale_TK is None else scale_TK.detach().to(rows_ND.dtype).reshape(-1)
    return F.embedding_bag(place_TK.reshape(-1), rows_ND.detach(), begins_T, mode="sum", per_sample_weights=scale)


@dataclass(frozen=True)
class _Queue:
    experts_R: Tensor
    tokens_R: Tensor
    choices_R: Tensor
    assigned_E: Tensor


def _queue(routing: Routing, experts: int) -> _Queue:
    """Sort all assignments by expert, and by queue order within each."""
    tokens, top_k = routing.experts_TK.shape
    experts_TK, order_T = routing.experts_TK, None
    if routing.priority_T is not None:
        # stable: tokens with equal scores keep their order, on every device
        order_T = routing.priority_T.argsort(descending=True, stable=True)
        experts_TK = experts_TK.index_select(0, order_T)
    flat_R = experts_TK.t().reshape(-1)  # choice-major: all first choices, then all second ones
    experts_R, order_R = flat_R.sort(stable=True)
    # a rank may have no token
    tokens_R, slot_R = order_R.remainder(max(tokens, 1)), order_R.div(max(tokens, 1), rounding_mode="floor")
    if order_T is not None:
        tokens_R = order_T.index_select(0, tokens_R)
    return _Queue(experts_R, tokens_R, tokens_R * top_k + slot_R, count_experts(flat_R, experts))


def _find_rows(row_R: Tensor, queue: _Queue, top_k: int) -> Tensor:
    """Return the row of each choice, (T, K), from that of each assignment in the order of the queues."""
    return torch.empty_like(row_R).scatter_(0, queue.choices_R, row_R).view(-1, top_k)


class _Encode(torch.autograd.Function):
    """Tokens to rows. A token's gradient sums those of its rows in order; index_select would add them in any order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        return _gather_tokens(x_TD, plan)

    @staticmethod
    def backward(ctx: Any, d_rows_ND: Tensor) -> tuple[Tensor, None]:
        plan: DispatchPlan = ctx.plan
        return add_choices(d_rows_ND, plan.place_TK, plan.kept_TK), None


class _Decode(torch.autograd.Function):
    """Weighted rows to tokens. The same in autograd operations keeps two more buffers of all rows."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, weights_TK: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.save_for_backward(rows_ND, weights_TK)
        ctx.plan = plan
        scale_TK = weights_TK if plan.kept_TK is None else weights_TK * plan.kept_TK
        return add_choices(rows_ND, plan.place_TK, scale_TK)

    @staticmethod
    def backward(ctx: Any, d_out_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        (rows_ND, weights_TK), plan = ctx.saved_tensors, ctx.plan
        d_rows_ND = _gather_tokens(d_out_TD.to(rows_ND.dtype), plan)
        if not len(rows_ND):
            return d_rows_ND, torch.zeros_like(weights_TK), None
        wide = torch.promote_types(rows_ND.dtype, torch.float32)
        # vecdot adds in the rows' type; shorter types are added in float32
        same = rows_ND.dtype == wide
        d_weights_N = torch.linalg.vecdot(d_rows_ND, rows_ND) if same else (d_rows_ND * rows_ND).sum(1, dtype=wide)
        d_weights_TK = d_weights_N.index_select(0, plan.place_TK.view(-1)).view_as(plan.place_TK)
        if plan.kept_TK is not None:
            d_weights_TK = d_weights_TK * plan.kept_TK
        # multiplied in one type: of two types it takes a GPU three times as long
        d_rows_ND.mul_(_weights(plan, weights_TK).to(rows_ND.dtype)[:, None])
        return d_rows_ND, d_weights_TK.to(weights_TK.dtype), None


def list_counts_on_host(rows_E: Tensor, rows: int) -> list[int]:
    """List the rows of each expert. Tensors without values (before a run) give all experts equally many rows."""
    if has_values(rows_E):
        return rows_E.tolist()
    each, rest = divmod(rows, len(rows_E))
    return [each + (expert < rest) for expert in range(len(rows_E))]


def _gather_tokens(x_TD: Tensor, plan: DispatchPlan) -> Tensor:
    """Gather the token of each row; an empty row reads a row of zeros appended to the tokens."""
    x_TD = x_TD if plan.kept_TK is None else _append_entry(x_TD, 0)
    return x_TD.index_select(0, plan.tokens_N)


def _weights(plan: DispatchPlan, weights_TK: Tensor) -> Tensor:
    """Look up the weight of each row; zero for empty rows."""
    weights_R = weights_TK.reshape(-1)
    return (weights_R if plan.kept_TK is None else _append_entry(weights_R, 0)).index_select(0, plan.choices_N)


def _append_entry(values: Tensor, last: int) -> Tensor:
    """Append one entry, which empty rows point to."""
    return torch.cat((values, values.new_full((1, *values.shape[1:]), last)))


def _mask(plan: DispatchPlan, values_N: Tensor) -> Tensor:
    mask_TN = values_N.new_zeros(plan.tokens + 1, plan.rows)
    return mask_TN.scatter(0, plan.tokens_N[None], values_N[None])[: plan.tokens]
