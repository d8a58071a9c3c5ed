"""Chooses the experts and weights of each token, and computes the losses that balance the experts. Moves no token.

T tokens of this rank, D model width, E experts. K choices per token, P width of the cosine projection.

Permutes tokens to rows sorted by expert, with or without capacity. Works on one rank; no communication. Counts the load
of each expert, dropped tokens and padding.

Queues are Tutel's: all first choices in token order (or by score), then all second choices. A row is one assignment of
a token to an expert, or empty. Rows are sorted by expert, then by position in its queue. Shapes depend on the number of
tokens only, so the host does not wait for the device. The exception is a capacity factor of zero or below (`Capacity`).
No two rows are added into the same place at once. Each token gathers its rows and adds them in the order of choice, in
float32 at least. So results do not depend on the order in which a GPU's threads end. T tokens, K choices, R = T * K
assignments. E experts, C capacity, D width, N rows of the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.suite.training.parallel.meta_init import has_values
from mlhpc.workloads.moe.config import DispatchMode, MoEConfig, compute_capacity
from mlhpc.workloads.moe.mesh import DryRunGroup, Group

KEPT_STEPS = 512  # a load that nobody reads adds up its steps
COSINE_WIDTH = 256  # Tutel's proj_dim, initial temperature and bound of 1 / temperature
COSINE_TEMPERATURE = 0.5
COSINE_MAX_SCALE = 100.0


@dataclass(frozen=True)
class Routing:
    """The router's decision: ``experts_TK`` in order of choice; ``priority_T`` if queues are served by score."""

    experts_TK: Tensor
    weights_TK: Tensor
    auxiliary_loss: Tensor
    priority_T: Tensor | None = None


class Router(nn.Module):
    """Scores, selection and auxiliary loss, in float32 at least: bfloat16 gives one token in 35 other experts.

    Its parameters stay in float32 when the module is converted to a shorter type.
    """

    bias_E: Tensor

    def __init__(self, width: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        if config.router == "cosine":
            self.projection = nn.Linear(width, COSINE_WIDTH, bias=False)
            self.centroids_EP = nn.Parameter(torch.randn(config.experts, COSINE_WIDTH) * 0.01)
            self.log_scale = nn.Parameter(torch.tensor(math.log(1 / COSINE_TEMPERATURE)))
        else:
            self.gate = nn.Linear(width, config.experts, bias=False)
        self.register_buffer("bias_E", torch.zeros(config.experts))

    # torch calls this for .to(), .half() and .bfloat16()
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        def keep_long(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            shortened = tensor.dtype.is_floating_point and found.dtype.itemsize < min(tensor.dtype.itemsize, 4)
            return tensor.to(found.device) if shortened else found

        return super()._apply(keep_long, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def forward(self, x_TD: Tensor) -> Routing:
        """Route tokens."""
        with torch.autocast(x_TD.device.type, enabled=False):
            return self._route(self._logits(x_TD))

    def _logits(self, x_TD: Tensor) -> Tensor:
        weight = next(self.parameters())
        x_TD = x_TD.to(weight.dtype)
        if self.config.router == "softmax":
            result: Tensor = self.gate(x_TD)
            return result
        x_TP = F.normalize(self.projection(x_TD), dim=1)
        scale = self.log_scale.clamp(max=math.log(COSINE_MAX_SCALE)).exp()
        return x_TP @ F.normalize(self.centroids_EP, dim=1).t() * scale

    def _route(self, clean_TE: Tensor) -> Routing:
        config = self.config
        noise = config.gate_noise / config.experts if self.training else 0.0
        logits_TE = clean_TE + noise * torch.randn_like(clean_TE) if noise else clean_TE
        scores_TE = logits_TE.softmax(dim=1)
        experts_TK = self._select(scores_TE.detach())
        weights_TK = scores_TE.gather(1, experts_TK)
        if config.top_k > 1 and config.normalise_gates:
            weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights_TK.dtype).eps)
        loss = torch.zeros((), dtype=scores_TE.dtype, device=scores_TE.device)
        if len(scores_TE):  # the mean over no tokens would be NaN
            if config.balance == "gshard":
                loss = loss + config.balance_coefficient * compute_gshard_loss(scores_TE, experts_TK[:, 0])
            elif config.balance == "importance_load" and noise:
                balance = compute_importance_load_loss(clean_TE, logits_TE, config.top_k, noise)
                loss = loss + config.balance_coefficient * balance
            if config.z_coefficient:
                loss = loss + config.z_coefficient * compute_z_loss(logits_TE)
        priority_T = scores_TE.detach().amax(dim=1) if config.batch_prioritised else None
        return Routing(experts_TK, weights_TK, loss, priority_T)

    def _select(self, scores_TE: Tensor) -> Tensor:
        if self.config.balance == "bias":
            # the bias moves the choice only; the weights are those of the scores without it
            scores_TE = scores_TE + self.bias_E
        return scores_TE.topk(self.config.top_k, dim=1).indices

    @torch.no_grad()
    def update_bias(self, assigned_E: Tensor, group: Group | None) -> None:
        """Raise the selection bias of experts below the mean load, lower the others; after an optimizer step.

        ``assigned_E`` is this rank's load of the step and is summed over the group. arXiv:2408.15664.
        """
        load_E = assigned_E.to(self.bias_E.dtype)
        if isinstance(group, DryRunGroup):
            group("all_reduce", load_E.nbytes)
        elif group is not None:
            dist.all_reduce(load_E, group=group)
        step_E = self.config.balance_coefficient * torch.sign(load_E.mean() - load_E)
        # a shift of all experts would change no choice and let the bias drift
        self.bias_E += step_E - step_E.mean()


def count_experts(ids: Tensor, experts: int) -> Tensor:
    """Count how often each expert occurs. bincount would make the host wait for a GPU."""
    return ids.new_zeros(experts).scatter_add(0, ids, torch.ones_like(ids))


def compute_gshard_loss(scores_TE: Tensor, first_T: Tensor) -> Tensor:
    """Compute E * sum over experts of (mean score) * (share of first choices): 1 if balanced. arXiv:2006.16668."""
    tokens, experts = scores_TE.shape
    share_E = count_experts(first_T, experts).to(scores_TE.dtype) / tokens
    return experts * (scores_TE.mean(dim=0) * share_E).sum()


def compute_importance_load_loss(clean_TE: Tensor, noisy_TE: Tensor, top_k: int, noise: float) -> Tensor:
    """Compute the mean of the squared coefficients of variation of importance and load. arXiv:2106.05974, appendix A.

    The load is the probability that an expert is chosen if only its noise were drawn again. Tutel compares *scores*
    with the threshold on *logits* here; in the paper and below both are logits.
    """
    threshold_T1 = noisy_TE.topk(top_k, dim=1).values[:, -1:]
    load_E = torch.special.ndtr((clean_TE - threshold_T1) / noise).sum(dim=0)
    return 0.5 * (_squared_variation(clean_TE.softmax(dim=1).sum(dim=0)) + _squared_variation(load_E))


def compute_z_loss(logits_TE: Tensor) -> Tensor:
    """Compute the mean squared logsumexp, which keeps logits small. arXiv:2202.08906."""
    return logits_TE.logsumexp(dim=1).square().mean()


def _squared_variation(value_E: Tensor) -> Tensor:
    # the variance of a single value is NaN
    if len(value_E) == 1:
        return value_E.sum() * 0.0
    return value_E.var() / (value_E.mean().square() + 1e-10)


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


class ExpertLoad:
    """What the steps of a window routed: ``assigned_E`` counts the router's choices.

    A step keeps its counts as they are and launches no kernel. They are added up when they are read or numerous; only
    reading waits for the device.
    """

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._sums: Tensor | None = None  # of each expert, and of the rows that were kept
        self._needed: Tensor | None = None
        self.rows = 0

    def add(self, assigned_E: Tensor, kept: Tensor, rows: int) -> None:
        """One step of one layer: ``kept`` rows hold a token, ``rows`` were computed."""
        self._steps.append((assigned_E, kept))
        self.rows += rows
        if len(self._steps) >= KEPT_STEPS:
            self._fold()

    def read(self) -> LoadTotals:
        """Return the totals; waits for the device."""
        self._fold()
        if self._sums is None or self._needed is None:
            return LoadTotals([0.0] * self._experts, 0.0, 0.0, 0.0)
        *assigned, kept = map(float, self._sums.tolist())
        return LoadTotals(assigned, kept, float(self.rows), float(self._needed))

    def _fold(self) -> None:
        if not self._steps:
            return
        counts_SE, kept_S = (torch.stack(list(each)) for each in zip(*self._steps, strict=True))
        needed = (counts_SE.amax(1).double() * self._experts / counts_SE.sum(1).clamp(min=1)).amax()
        sums = torch.cat((counts_SE.sum(0), kept_S.sum()[None]))
        self._sums = sums if self._sums is None else self._sums + sums
        self._needed = needed if self._needed is None else torch.maximum(self._needed, needed)
        self._steps.clear()


@dataclass(frozen=True)
class LoadTotals:
    """Sums over the steps of a window, of one rank or of all. ``needed_factor`` is the largest of a step."""

    assigned_E: list[float]
    kept: float
    rows: float
    needed_factor: float

    def report(self) -> dict[str, Any]:
        """Compute the logged load: ``imbalance`` is max / mean, ``needed_capacity`` the largest of a step."""
        assigned = math.fsum(self.assigned_E)
        mean = assigned / len(self.assigned_E)
        return {
            "tokens_per_expert": [round(value) for value in self.assigned_E],
            "imbalance": max(self.assigned_E) / mean if assigned else 1.0,
            "drop_rate": 1 - self.kept / assigned if assigned else 0.0,
            "needed_capacity": self.needed_factor,
            "padding_waste": 1 - self.kept / self.rows if self.rows else 0.0,
        }
