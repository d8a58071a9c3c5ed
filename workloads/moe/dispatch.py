"""The order in which tokens queue at experts, which ones drop, and the rows they become. One rank; sends nothing.

Queues are Tutel's: all first choices in token order (or by score), then all second choices. A row is one assignment of a
token to an expert; rows lie sorted by expert, then by place in its queue.
T tokens, K choices, E experts, C capacity, D width, N rows of the buffer, R rows that hold a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from workloads.moe.config import DEFAULT_CAPACITY_FACTOR, DispatchMode
from workloads.moe.router import Routing, tally

LARGE_ALIGNMENT, LARGE_STEP = 256, 128  # Tutel: an alignment above 256 becomes a multiple of 128


@dataclass(frozen=True)
class Plan:
    """Where every row comes from. ``choices_R`` indexes the flat (T, K) weights, ``places_R`` the buffer.

    ``places_R`` is None where rows fill the buffer in order. ``rows_E`` counts buffer rows per expert, padding included,
    ``assigned_E`` what the router asked for, drops included.
    """

    tokens: int
    tokens_R: Tensor
    choices_R: Tensor
    places_R: Tensor | None
    rows: int
    rows_E: Tensor
    assigned_E: Tensor
    capacity: int | None


class Permutation(Protocol):
    """Tokens to rows and back; differentiable."""

    def plan(self, routing: Routing, experts: int) -> Plan:
        """Decide the rows."""
        ...

    def encode(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """The buffer (N, D): row by row the tokens, zeros where a place is empty."""
        ...

    def decode(self, rows_ND: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
        """Tokens (T, D): the weighted sum of their rows; a token whose rows all dropped is zero."""
        ...


@dataclass(frozen=True)
class Dropless:
    """Every assignment is a row and there is no other row (MegaBlocks)."""

    def plan(self, routing: Routing, experts: int) -> Plan:
        """Sort by expert."""
        queue = _queue(routing, experts)
        count = queue.tokens_R.numel()
        return Plan(
            routing.experts_TK.shape[0],
            queue.tokens_R,
            queue.choices_R,
            None,
            count,
            queue.assigned_E,
            queue.assigned_E,
            None,
        )

    def encode(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """Gather."""
        return x_TD.index_select(0, plan.tokens_R)  # not x[...]: index_select's backward is index_add

    def decode(self, rows_ND: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
        """Scale and add."""
        return _scale_and_add(rows_ND, plan, weights_TK)


@dataclass(frozen=True)
class Capacity:
    """C rows for each expert; later assignments drop, empty places are padding.

    ``over_ranks`` gives the maximum of a number over ranks (Tutel's capacity factors <= 0 need it).
    """

    factor: float | None = None
    alignment: int = 1
    over_ranks: Callable[[int], int] = int

    def plan(self, routing: Routing, experts: int) -> Plan:
        """Queue, cut at the capacity."""
        tokens, top_k = routing.experts_TK.shape
        queue = _queue(routing, experts)
        needed = 0
        if self.factor is not None and self.factor <= 0:
            needed = self.over_ranks(int(queue.assigned_E.max()))
        capacity = capacity_of(self.factor, tokens, experts, top_k, needed, self.alignment)
        kept = queue.locations_R < capacity
        places_R = (queue.experts_R * capacity + queue.locations_R)[kept]
        rows_E = torch.full_like(queue.assigned_E, capacity)
        return Plan(
            tokens,
            queue.tokens_R[kept],
            queue.choices_R[kept],
            places_R,
            experts * capacity,
            rows_E,
            queue.assigned_E,
            capacity,
        )

    def encode(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """Gather into a buffer of zeros."""
        assert plan.places_R is not None
        rows_RD = x_TD.index_select(0, plan.tokens_R)
        return x_TD.new_zeros(plan.rows, x_TD.shape[1]).index_copy(0, plan.places_R, rows_RD)

    def decode(self, rows_ND: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
        """Scale and add the rows that hold a token."""
        assert plan.places_R is not None
        return _scale_and_add(rows_ND.index_select(0, plan.places_R), plan, weights_TK)


@dataclass(frozen=True)
class Einsum(Capacity):
    """GShard's form: the same rows as `Capacity` through (T, E*C) masks, O(T E C D) work. The stated baseline."""

    def encode(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """Multiply by the dispatch mask."""
        return _mask(plan, torch.ones_like(plan.tokens_R, dtype=x_TD.dtype)).t() @ x_TD

    def decode(self, rows_ND: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
        """Multiply by the weighted mask."""
        weights_R = weights_TK.reshape(-1).index_select(0, plan.choices_R).to(rows_ND.dtype)
        return _mask(plan, weights_R) @ rows_ND


def permutation(
    mode: DispatchMode, factor: float | None, *, alignment: int = 1, over_ranks: Callable[[int], int] = int
) -> Permutation:
    """The permutation a config asks for."""
    if mode == "dropless":
        return Dropless()
    return {"capacity": Capacity, "einsum": Einsum}[mode](factor, alignment, over_ranks)


def capacity_of(
    factor: float | None, tokens: int, experts: int, top_k: int, needed: int = 0, alignment: int = 1
) -> int:
    """Tutel's capacity. ``needed`` is the longest queue over all ranks; it counts for factors of zero and below.

    factor > 0: top_k * int(factor * ceil(tokens / experts)), truncated before the product; 0: ``needed``; < 0: ``needed``,
    but at most what -factor gives. None is the default factor, so that 0 can be asked for.
    """
    factor = DEFAULT_CAPACITY_FACTOR if factor is None else factor
    bound = top_k * int(abs(factor) * -(-tokens // experts))
    capacity = bound if factor > 0 else needed if factor == 0 else min(needed, bound)
    if alignment > LARGE_ALIGNMENT:
        alignment = -(-alignment // LARGE_STEP) * LARGE_STEP
    return -(-capacity // alignment) * alignment


@dataclass(frozen=True)
class _Queue:
    tokens_R: Tensor
    choices_R: Tensor
    experts_R: Tensor
    locations_R: Tensor
    assigned_E: Tensor


def _queue(routing: Routing, experts: int) -> _Queue:
    """All assignments sorted by expert, in each in queue order."""
    tokens, top_k = routing.experts_TK.shape
    experts_TK, order_T = routing.experts_TK, None
    if routing.priority_T is not None:
        order_T = routing.priority_T.argsort(descending=True, stable=True)
        experts_TK = experts_TK.index_select(0, order_T)
    flat_R = experts_TK.t().reshape(-1)  # choice-major: all first choices, then all second ones
    experts_R, order_R = flat_R.sort(stable=True)
    tokens_R, slot_R = order_R.remainder(max(tokens, 1)), order_R.div(max(tokens, 1), rounding_mode="floor")
    if order_T is not None:
        tokens_R = order_T.index_select(0, tokens_R)
    assigned_E = tally(flat_R, experts)
    begins_E = assigned_E.cumsum(0) - assigned_E
    locations_R = torch.arange(len(flat_R), device=flat_R.device) - begins_E.index_select(0, experts_R)
    return _Queue(tokens_R, tokens_R * top_k + slot_R, experts_R, locations_R, assigned_E)


def _scale_and_add(rows_RD: Tensor, plan: Plan, weights_TK: Tensor) -> Tensor:
    weights_R = weights_TK.reshape(-1).index_select(0, plan.choices_R).to(rows_RD.dtype)
    return _ScaleAndAdd.apply(rows_RD, weights_R, plan.tokens_R, plan.tokens)  # type: ignore[no-any-return]


class _ScaleAndAdd(torch.autograd.Function):
    """Tokens from their weighted rows. Autograd's own form keeps and makes two more buffers of all rows."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_R: Tensor, tokens_R: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_R, tokens_R)
        return rows_RD.new_zeros(tokens, rows_RD.shape[1]).index_add_(0, tokens_R, rows_RD * weights_R[:, None])

    @staticmethod
    def backward(ctx: Any, d_out_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RD, weights_R, tokens_R = ctx.saved_tensors
        d_rows_RD = d_out_TD.index_select(0, tokens_R)
        d_weights_R = torch.linalg.vecdot(d_rows_RD, rows_RD)
        return d_rows_RD.mul_(weights_R[:, None]), d_weights_R, None, None


def _mask(plan: Plan, values_R: Tensor) -> Tensor:
    assert plan.places_R is not None
    mask_TN = values_R.new_zeros(plan.tokens, plan.rows)
    return mask_TN.index_put((plan.tokens_R, plan.places_R), values_R)
