"""The MoE layer: router, dispatch, experts, combine, on one rank or over an `ExpertMesh`, pipelined, with any r.

One parameter layout for every execution: a rank holds 1 / (ranks per expert) of the hidden width of its experts. Weights
are gathered as r asks for it, so changing r, the overlap degree or the all-to-all moves no tensor and no optimizer state.

T tokens, D width, E experts, W ranks, L experts per rank, s ranks per expert, J chunks, N rows of this rank's buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workloads.moe import phases
from workloads.moe.all_to_all import ExpertMesh, Journey, Reorder, gather_slices, plan_routes, ranges, reorder
from workloads.moe.config import Algorithm, MoEConfig, ranks_per_expert, valid_r
from workloads.moe.dispatch import Permutation, Plan, permutation
from workloads.moe.experts import Experts, Weights, run_experts
from workloads.moe.phases import Load, Marker, NoMarker
from workloads.moe.router import Router, Routing


@dataclass(frozen=True)
class Execution:
    """How a layer is executed: what the autotuner chooses. It does not change which function is computed."""

    r: int = 1
    degree: int = 1
    algorithm: Algorithm = "linear"


@dataclass(frozen=True)
class Output:
    """``y_TD`` and the router's auxiliary loss of this rank's tokens."""

    y_TD: Tensor
    auxiliary_loss: Tensor


class Dispatcher(Protocol):
    """Tokens to their experts and back. Ours is `Local` or `Parallel`; a library (DeepEP, say) is another one."""

    def __call__(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Plan]:
        """The weighted sum of each token's experts, and the plan that was followed."""
        ...


class MoELayer(nn.Module):
    """A mixture of experts in place of an FFN: (T, D) to (T, D).

    With a mesh the experts are spread over its ranks and every rank calls `forward` and `backward` together. Gradients of
    expert parameters then hold the *sum* over all ranks' tokens and must not be reduced again; the router's are the
    rank's own. In evaluation each rank has all weights, gathered when it is entered, so ranks may take different batches.
    """

    def __init__(self, width: int, config: MoEConfig, mesh: ExpertMesh | None = None) -> None:
        super().__init__()
        self.config, self.width = config, width
        self.mesh = mesh if mesh is not None and mesh.size > 1 else None
        self.marker: Marker = NoMarker()
        self.execution = Execution(config.parallel_r, config.overlap_degree, config.all_to_all)
        self.router = Router(width, config)
        self.experts = Experts(config.experts, width, config.hidden, config.activation, bias=config.bias)
        self.sharers = 1
        if self.mesh is not None:
            self.sharers = ranks_per_expert(config.experts, self.mesh.size)
            each = max(1, config.experts // self.mesh.size)
            first = self.mesh.rank // self.sharers * each
            self.experts.keep(slice(first, first + each), self.mesh.rank % self.sharers, self.sharers)
            self.use(self.execution)
        self.load = Load.empty(config.experts, torch.device("cpu"))
        self.step_load_E: Tensor | None = None  # of the last training step: what the aux-loss-free bias is moved by
        self._all_weights: Weights | None = None

    def use(self, execution: Execution) -> None:
        """Execute so from now on. ValueError if r is not one of those that exist. Every rank calls."""
        if self.mesh is not None:
            choices = valid_r(self.config.experts, self.mesh.size)
            if execution.r not in choices:
                raise ValueError(
                    f"parallel_r {execution.r}: {self.config.experts} experts on {self.mesh.size} ranks allow {choices}"
                )
        self.execution = execution

    def forward(self, x_TD: Tensor) -> Output:
        """The layer."""
        marker = self.marker
        x_TD = marker.boundary(x_TD, None, phases.GATE)
        routing = self.router(x_TD)
        rows_TD = marker.boundary(self._compute_dtype(x_TD), phases.GATE, phases.PERMUTE)
        dispatcher = self._dispatcher()
        y_TD, plan = dispatcher(rows_TD, routing)
        y_TD = marker.boundary(y_TD, phases.UNPERMUTE, None)
        if self.training:
            self._count(plan)
        return Output(y_TD.to(x_TD.dtype), routing.auxiliary_loss)

    def train(self, mode: bool = True) -> MoELayer:
        """Enter or leave training. With a mesh, entering evaluation gathers all weights: every rank calls."""
        super().train(mode)
        self._all_weights = None
        if not mode and self.mesh is not None:
            with torch.no_grad():
                self._all_weights = self.experts.weights().map(self._gather_all)
        return self

    def update_bias(self) -> None:
        """After an optimizer step with balance ``bias``: move the selection bias by the last step's load of all ranks.

        Without expert parallelism the ranks of torch.distributed, if any, are data parallel: all of them count.
        """
        assert self.step_load_E is not None
        group = self.mesh.world if self.mesh is not None else dist.group.WORLD if dist.is_initialized() else None
        self.router.update_bias(self.step_load_E, group)

    def _dispatcher(self) -> Dispatcher:
        if self.mesh is None or not self.training:
            return partial(_local, self)
        return partial(_parallel, self, self.mesh)

    def _permutation(self) -> Permutation:
        own = self.config
        if not self.training:
            return permutation("dropless", None)  # a metric must not depend on who shares a batch
        reduce = _no_reduction if self.mesh is None else partial(_maximum, self.mesh)
        alignment = self.sharers * self.execution.degree
        return permutation(own.dispatch, own.capacity_factor, alignment=alignment, over_ranks=reduce)

    def _run(self, rows_ND: Tensor, rows_E: Tensor, weights: Weights) -> Tensor:
        weights = weights.map(lambda weight: weight.to(rows_ND.dtype))
        return run_experts(rows_ND, rows_E, weights, self.config.activation, self.config.backend)

    def _local_weights(self) -> Weights:
        return self.experts.weights() if self._all_weights is None else self._all_weights

    def _gathered(self, mesh: ExpertMesh) -> Weights:
        """The weights this rank computes with under the current r; its own down bias counts 1 / r (r partial sums follow)."""
        own, r = self.experts.weights(), self.execution.r
        if r == 0:
            return own.map(self._gather_all)
        parts = self.sharers // r
        weights = own.map(lambda weight: gather_slices(weight, mesh.blocks[parts], 1, parts))
        if own.down_bias_ED is None:
            return weights
        whole = gather_slices(own.down_bias_ED, mesh.blocks[self.sharers], 1, self.sharers)
        return Weights(weights.up_EHD, weights.down_EHD, weights.gate_EHD, weights.up_bias_EH, whole / r)

    def _gather_all(self, weight: Tensor) -> Tensor:
        assert self.mesh is not None
        return gather_slices(weight, self.mesh.world, self.mesh.size // self.sharers, self.sharers)

    def _compute_dtype(self, x_TD: Tensor) -> Tensor:
        device = x_TD.device.type
        if torch.is_autocast_enabled(device):
            return x_TD.to(torch.get_autocast_dtype(device))
        return x_TD

    def _count(self, plan: Plan) -> None:
        if self.load.assigned_E.device != plan.assigned_E.device:
            self.load = Load.empty(self.config.experts, plan.assigned_E.device)
        self.load.add(plan.assigned_E, plan.kept, plan.rows)
        self.step_load_E = plan.assigned_E


def _local(layer: MoELayer, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Plan]:
    """All experts are here."""
    marker, permute = layer.marker, layer._permutation()
    plan = permute.plan(routing, layer.config.experts)
    rows_ND = marker.boundary(permute.encode(x_TD, plan), phases.PERMUTE, phases.EXPERTS)
    rows_ND = layer._run(rows_ND, plan.rows_E, layer._local_weights())
    rows_ND = marker.boundary(rows_ND, phases.EXPERTS, phases.UNPERMUTE)
    return permute.decode(rows_ND, plan, routing.weights_TK), plan


def _parallel(layer: MoELayer, mesh: ExpertMesh, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Plan]:
    """Experts spread over the mesh: rows travel to them and back (r >= 1), or all weights come here (r = 0)."""
    marker, permute = layer.marker, layer._permutation()
    plan = permute.plan(routing, layer.config.experts)
    rows_ND = marker.boundary(permute.encode(x_TD, plan), phases.PERMUTE, phases.GATHER)
    weights = layer._gathered(mesh)
    marker.mark(phases.GATHER)
    if layer.execution.r == 0:
        rows_ND = marker.boundary(rows_ND, None, phases.EXPERTS)
        rows_ND = marker.boundary(layer._run(rows_ND, plan.rows_E, weights), phases.EXPERTS, phases.UNPERMUTE)
    else:
        rows_ND = marker.boundary(rows_ND, None, phases.DISPATCH)
        rows_ND = _travel(layer, mesh, rows_ND, plan.rows_E, weights)
        rows_ND = marker.boundary(rows_ND, phases.COMBINE, phases.UNPERMUTE)
    return permute.decode(rows_ND, plan, routing.weights_TK), plan


def _travel(layer: MoELayer, mesh: ExpertMesh, rows_ND: Tensor, rows_E: Tensor, weights: Weights) -> Tensor:
    """Rows to their experts in chunks, each chunk's transfer under way while others are computed, and back in place."""
    marker, execution = layer.marker, layer.execution
    begins_JWL, counts_JWL = shares(rows_E, mesh.size, layer.sharers, execution.r, execution.degree)
    routes = plan_routes(mesh, counts_JWL, execution.algorithm, rows_ND.device)
    marker.mark(phases.COUNTS)
    places_M = ranges(begins_JWL.reshape(-1), counts_JWL.reshape(-1)).to(rows_ND.device)
    chunks = torch.split(_take(rows_ND, places_M, execution), counts_JWL.sum((1, 2)).tolist())
    going = [Journey(rows, route.hops) for rows, route in zip(chunks, routes, strict=True)]
    for journey in going:
        journey.advance()
    coming: list[Journey] = []
    for journey, route in zip(going, routes, strict=True):
        rows = marker.boundary(journey.end(), phases.DISPATCH, phases.EXPERTS)
        rows = layer._run(rows, route.rows_L, weights)
        coming.append(Journey(marker.boundary(rows, phases.EXPERTS, phases.COMBINE), route.back))
        if len(coming) > 1:
            coming[-2].advance()
    coming[-1].advance()
    returned_MD = torch.cat([journey.end() for journey in coming])
    return _put(returned_MD, places_M, len(rows_ND), execution)


def shares(rows_E: Tensor, ranks: int, sharers: int, r: int, degree: int) -> tuple[Tensor, Tensor]:
    """Which rows of the buffer go in which chunk to which rank's which expert: begins and counts (J, W, L).

    The s ranks of an expert are r classes of s / r. A class holds 1 / r of the hidden width and gets every row once, its
    ranks get equal parts of the rows; each part is cut in ``degree`` chunks.
    """
    device, parts = rows_E.device, sharers // r
    ends_E = rows_E.cumsum(0)
    rank_W = torch.arange(ranks, device=device)
    each = max(1, len(rows_E) // ranks)
    expert_WL = (rank_W // sharers * each)[:, None] + torch.arange(each, device=device)
    part_W1 = (rank_W % sharers % parts)[:, None]
    rows_WL, first_WL = rows_E[expert_WL], (ends_E - rows_E)[expert_WL]
    cut_J11 = torch.arange(degree + 1, device=device)[:, None, None]
    pieces = parts * degree
    cuts_JWL = (part_W1 * degree + cut_J11) * rows_WL // pieces
    return first_WL + cuts_JWL[:-1], cuts_JWL[1:] - cuts_JWL[:-1]


def _take(rows_ND: Tensor, places_M: Tensor, execution: Execution) -> Tensor:
    if execution.r == 1:
        return rows_ND if execution.degree == 1 else reorder(rows_ND, _permuted(places_M))
    return rows_ND.index_select(0, places_M)


def _put(rows_MD: Tensor, places_M: Tensor, rows: int, execution: Execution) -> Tensor:
    """Rows back in their places; the r partial sums of a row are added."""
    if execution.r == 1:
        return rows_MD if execution.degree == 1 else reorder(rows_MD, _permuted(places_M).reversed())
    return rows_MD.new_zeros(rows, rows_MD.shape[1]).index_add(0, places_M, rows_MD)


def _permuted(places_M: Tensor) -> Reorder:
    inverse = torch.empty_like(places_M)
    inverse[places_M] = torch.arange(len(places_M), device=places_M.device)
    return Reorder(places_M, inverse)


def _no_reduction(value: int) -> int:
    return value


def _maximum(mesh: ExpertMesh, value: int) -> int:
    device = "cuda" if dist.get_backend(mesh.world) == "nccl" else "cpu"
    box = torch.tensor(value, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=mesh.world)
    return int(box)
