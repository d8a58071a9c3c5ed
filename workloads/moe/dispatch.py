"""Permutes tokens to rows sorted by expert, with or without capacity. Works on one rank; no communication.

Queues are Tutel's: all first choices in token order (or by score), then all second choices. A row is one assignment of a
token to an expert, or empty. Rows are sorted by expert, then by position in its queue. Shapes depend on the number of tokens
only, so the host does not wait for the device, except for a capacity factor of zero or below (`Capacity`).
T tokens, K choices, E experts, C capacity, D width, R = T * K assignments, N rows of the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from workloads.moe.config import DispatchMode, capacity_of
from workloads.moe.router import Routing, tally


@dataclass(frozen=True)
class Plan:
    """The source of every row: its token, and its index in the flat (T, K) weights; T and T * K for an empty row.

    ``rows_E`` counts buffer rows per expert, empty ones included; it is on the host if there is a capacity. ``assigned_E``
    counts the router's choices, dropped ones included; ``kept`` (no dimensions) counts rows that hold a token.
    """

    tokens: int
    tokens_N: Tensor
    choices_N: Tensor
    rows_E: Tensor
    assigned_E: Tensor
    kept: Tensor
    capacity: int | None

    @property
    def rows(self) -> int:
        """N."""
        return len(self.tokens_N)


class Permutation(Protocol):
    """Converts tokens to rows and back; differentiable."""

    def plan(self, routing: Routing, experts: int) -> Plan:
        """Decide which rows exist and where they come from."""
        ...

    def encode(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """Build the buffer (N, D): the token of each row, zeros in empty rows."""
        ...

    def decode(self, rows_ND: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
        """Sum the weighted rows of each token to (T, D). A token whose assignments all dropped is zero."""
        ...


@dataclass(frozen=True)
class Dropless:
    """One row per assignment and no empty rows (MegaBlocks)."""

    def plan(self, routing: Routing, experts: int) -> Plan:
        """Sort by expert."""
        queue = _queue(routing, experts)
        tokens, assigned_E = len(routing.experts_TK), queue.assigned_E
        return Plan(tokens, queue.tokens_R, queue.choices_R, assigned_E, assigned_E, assigned_E.sum(), None)

    def encode(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """Gather."""
        return x_TD.index_select(
            0, plan.tokens_N
        )  # not x[...]: the backward of index_select is index_add, that of indexing the slower index_put

    def decode(self, rows_ND: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
        """Scale and add."""
        weights_N = weights_TK.reshape(-1).index_select(0, plan.choices_N).to(rows_ND.dtype)
        return _ScaleAndAdd.apply(rows_ND, weights_N, plan.tokens_N, plan.tokens)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class Capacity:
    """C rows for each expert; later assignments drop, missing ones are padded with empty rows.

    ``over_ranks`` computes the maximum of a number over ranks. Factors <= 0 need it and the longest queue on the host,
    because there the number of rows depends on the routing.
    """

    factor: float | None = None
    alignment: int = 1
    over_ranks: Callable[[int], int] = int

    def plan(self, routing: Routing, experts: int) -> Plan:
        """Cut the queues at the capacity."""
        tokens, top_k = routing.experts_TK.shape
        queue = _queue(routing, experts)
        assigned_E = queue.assigned_E
        needed = 0
        if self.factor is not None and self.factor <= 0:
            needed = self.over_ranks(int(assigned_E.max()))
        capacity = capacity_of(self.factor, tokens, experts, top_k, needed, self.alignment)
        place_C = torch.arange(capacity, device=assigned_E.device)
        source_EC = (assigned_E.cumsum(0) - assigned_E)[:, None] + place_C
        source_N = torch.where(place_C < assigned_E[:, None], source_EC, tokens * top_k).reshape(-1)
        return Plan(
            tokens,
            _with_last(queue.tokens_R, tokens).index_select(0, source_N),
            _with_last(queue.choices_R, tokens * top_k).index_select(0, source_N),
            torch.full((experts,), capacity),
            assigned_E,
            assigned_E.clamp(max=capacity).sum(),
            capacity,
        )

    def encode(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """Gather; an empty row reads a row of zeros appended to the tokens."""
        return _with_last(x_TD, 0).index_select(0, plan.tokens_N)

    def decode(self, rows_ND: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
        """Scale and add; empty rows are added to an extra token that is cut off."""
        added_TD: Tensor = _ScaleAndAdd.apply(  # type: ignore[no-untyped-call]
            rows_ND, _weights(plan, weights_TK, rows_ND), plan.tokens_N, plan.tokens + 1
        )
        return added_TD[: plan.tokens]


@dataclass(frozen=True)
class Einsum(Capacity):
    """GShard's form: the same rows as `Capacity` through (T, E*C) masks, O(T E C D) work. A baseline to compare with."""

    def encode(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """Multiply by the dispatch mask."""
        return _mask(plan, x_TD.new_ones(plan.rows)).t() @ x_TD

    def decode(self, rows_ND: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
        """Multiply by the weighted mask."""
        return _mask(plan, _weights(plan, weights_TK, rows_ND)) @ rows_ND


def permutation(
    mode: DispatchMode, factor: float | None, *, alignment: int = 1, over_ranks: Callable[[int], int] = int
) -> Permutation:
    """Create the permutation of a dispatch mode."""
    if mode == "dropless":
        return Dropless()
    return {"capacity": Capacity, "einsum": Einsum}[mode](factor, alignment, over_ranks)


@dataclass(frozen=True)
class _Queue:
    tokens_R: Tensor
    choices_R: Tensor
    assigned_E: Tensor


def _queue(routing: Routing, experts: int) -> _Queue:
    """Sort all assignments by expert, and by queue order within each."""
    tokens, top_k = routing.experts_TK.shape
    experts_TK, order_T = routing.experts_TK, None
    if routing.priority_T is not None:
        order_T = routing.priority_T.argsort(descending=True, stable=True)
        experts_TK = experts_TK.index_select(0, order_T)
    flat_R = experts_TK.t().reshape(-1)  # choice-major: all first choices, then all second ones
    order_R = flat_R.argsort(stable=True)
    tokens_R, slot_R = order_R.remainder(max(tokens, 1)), order_R.div(max(tokens, 1), rounding_mode="floor")
    if order_T is not None:
        tokens_R = order_T.index_select(0, tokens_R)
    return _Queue(tokens_R, tokens_R * top_k + slot_R, tally(flat_R, experts))


class _ScaleAndAdd(torch.autograd.Function):
    """Computes tokens from their weighted rows. The same in autograd operations keeps two more buffers of all rows."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, weights_N: Tensor, tokens_N: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(rows_ND, weights_N, tokens_N)
        return rows_ND.new_zeros(tokens, rows_ND.shape[1]).index_add_(0, tokens_N, rows_ND * weights_N[:, None])

    @staticmethod
    def backward(ctx: Any, d_out_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_ND, weights_N, tokens_N = ctx.saved_tensors
        d_rows_ND = d_out_TD.index_select(0, tokens_N)
        d_weights_N = torch.linalg.vecdot(d_rows_ND, rows_ND)
        return d_rows_ND.mul_(weights_N[:, None]), d_weights_N, None, None


def _weights(plan: Plan, weights_TK: Tensor, rows_ND: Tensor) -> Tensor:
    """Look up the weight of each row; zero for empty rows."""
    return _with_last(weights_TK.reshape(-1), 0).index_select(0, plan.choices_N).to(rows_ND.dtype)


def _with_last(values: Tensor, last: int) -> Tensor:
    """Append one entry, which empty rows point to."""
    return torch.cat((values, values.new_full((1, *values.shape[1:]), last)))


def _mask(plan: Plan, values_N: Tensor) -> Tensor:
    mask_TN = values_N.new_zeros(plan.tokens + 1, plan.rows)
    return mask_TN.scatter(0, plan.tokens_N[None], values_N[None])[: plan.tokens]
