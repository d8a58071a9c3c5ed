"""The MoE layer (router, dispatch, experts, combine) and its dispatcher, on one rank or over an `ExpertMesh`.

The parameter layout is the same for every execution. A rank holds 1 / (ranks per expert) of the hidden width of its
experts. Weights are gathered as r requires. So changing r, the overlap degree or the all-to-all moves no parameter and
no optimizer state.

T tokens, D width, E experts, N rows of this rank's buffer, J chunks. W ranks, L experts per rank, s ranks per expert.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.cuda_graphs import after_pass
from mlhpc.suite.training.parallel.recompute import is_computed_again
from mlhpc.workloads.moe import phases
from mlhpc.workloads.moe.config import Algorithm, Backend, MoEConfig, count_ranks_per_expert, list_valid_r
from mlhpc.workloads.moe.experts import (
    Experts,
    SelectedBackend,
    Weights,
    find_host_read,
    run_experts,
    run_experts_on_tokens,
)
from mlhpc.workloads.moe.mesh import ExpertMesh, Group
from mlhpc.workloads.moe.phases import Marker, NoMarker
from mlhpc.workloads.moe.router import (
    DispatchPlan,
    ExpertLoad,
    Permutation,
    Router,
    Routing,
    list_counts_on_host,
    make_permutation,
)
from mlhpc.workloads.moe.routes import (
    Copies,
    MultiHopTransfer,
    Route,
    SumOverReplicas,
    Traffic,
    compute_even_traffic,
    compute_known_traffic,
    gather_counts,
    gather_slices,
    join_ranges,
    plan_routes,
    split_buffer,
)

# Takes the experts of each layer that is built to another memory (docs/offload.md). None: they stay.
KEEPER: ContextVar[Callable[[MoELayer], None] | None] = ContextVar("keeper", default=None)


@dataclass(frozen=True)
class Execution:
    """How the built-in dispatcher runs a layer; the autotuner chooses it. It does not change the function computed."""

    r: int = 1
    degree: int = 1
    algorithm: Algorithm = "linear"


@dataclass(frozen=True)
class Output:
    """``y_TD`` and the router's auxiliary loss of this rank's tokens."""

    y_TD: Tensor
    auxiliary_loss: Tensor


@dataclass(frozen=True)
class Dispatched:
    """What a dispatcher returns: ``y_TD``, the weighted sum of each token's experts, and the counts that are logged.

    ``assigned_E`` (integers) counts the router's choices per expert, dropped ones included. ``kept`` (no dimensions)
    counts the choices that were not dropped. ``rows`` counts all rows computed, empty ones included.
    """

    y_TD: Tensor
    assigned_E: Tensor
    kept: Tensor
    rows: int


class Dispatcher(Protocol):
    """Sends tokens to their experts and combines the results; differentiable. `dispatch` is the built-in one.

    It is called in evaluation too (``layer.training`` is False), where ranks may have different numbers of batches. A
    dispatcher that communicates hands those calls to `dispatch_locally`. It may mark its phases on ``layer.marker``. If
    it does not, its time is logged as unpermute and permute_backward.
    """

    def __call__(self, layer: MoELayer, x_TD: Tensor, routing: Routing) -> Dispatched:
        """Compute the experts of ``layer`` that ``routing`` chose for each token, and add them up by its weights."""
        ...


class MoELayer(nn.Module):
    """A mixture of experts in place of an FFN: (T, D) to (T, D).

    With a mesh the experts are spread over its ranks, and all ranks call `forward` and `backward` together. Gradients
    of expert parameters then hold the *sum* over all ranks' tokens and must not be reduced again. The router's
    gradients are of this rank's tokens. Entering evaluation gathers all weights on each rank, so ranks may evaluate
    different batches.

    ``dispatcher`` replaces the built-in way from tokens to experts and back, for example by a communication library.
    """

    def __init__(
        self, width: int, config: MoEConfig, mesh: ExpertMesh | None = None, dispatcher: Dispatcher | None = None
    ) -> None:
        super().__init__()
        self.dispatcher: Dispatcher = dispatch if dispatcher is None else dispatcher
        self.config, self.width = config, width
        self.mesh = mesh if mesh is not None and mesh.size > 1 else None
        self.marker: Marker = NoMarker()
        self.execution = Execution(config.parallel_r, config.overlap_degree, config.all_to_all)
        self.backend: Backend | SelectedBackend = config.backend
        self.router = Router(width, config)
        self.experts = Experts(config.experts, width, config.hidden, config.activation, bias=config.bias)
        self.sharers = 1
        if self.mesh is not None:
            self.sharers = count_ranks_per_expert(config.experts, self.mesh.size)
            # with fewer experts than ranks, consecutive ranks share an expert
            each = max(1, config.experts // self.mesh.size)
            first = self.mesh.rank // self.sharers * each
            self.experts.keep(slice(first, first + each), self.mesh.rank % self.sharers, self.sharers)
            self.use(self.execution)
        self.share_shapes = {name: share.shape for name, share in self.experts.named_parameters()}
        self.load = ExpertLoad(config.experts)
        # assignments of the last training step; they move the selection bias, which balances without a loss
        self.step_load_E: Tensor | None = None
        self._all_weights: Weights | None = None
        self._computed: torch.dtype | None = None  # the type of the last pass: an evaluation gathers the weights in it
        self._last_schedule: tuple[object, Schedule] | None = None  # of a capacity layer: the same until a size changes
        if (keep := KEEPER.get()) is not None:
            keep(self)

    def use(self, execution: Execution) -> None:
        """Set how the layer is executed from now on; every rank calls. InputError if this r does not exist."""
        if self.mesh is not None:
            choices = list_valid_r(self.config.experts, self.mesh.size)
            if execution.r not in choices:
                raise InputError(
                    f"parallel_r is {execution.r}; {self.config.experts} experts on {self.mesh.size} ranks allow "
                    f"{', '.join(map(str, choices))}"
                )
        self.execution = execution

    def forward(self, x_TD: Tensor) -> Output:
        """Route the tokens, dispatch them and, in training, count the load."""
        marker = self.marker
        x_TD = marker.boundary(x_TD, None, phases.GATE)
        routing = self.router(x_TD)
        self._computed = self.compute_dtype(x_TD)
        rows_TD = marker.boundary(x_TD.to(self._computed), phases.GATE, phases.PERMUTE)
        dispatched = self.dispatcher(self, rows_TD, routing)
        y_TD = marker.boundary(dispatched.y_TD, phases.UNPERMUTE, None)
        # checkpointing runs the forward pass twice, and the tokens must count once
        if self.training and not is_computed_again():
            after_pass(partial(self._count, dispatched.rows), dispatched.assigned_E, dispatched.kept)
        return Output(y_TD.to(x_TD.dtype), routing.auxiliary_loss)

    def train(self, mode: bool = True) -> MoELayer:
        """Enter or leave training. With a mesh, entering evaluation gathers all weights: every rank calls."""
        super().train(mode)
        self._all_weights = None
        if not mode and self.mesh is not None:
            with torch.no_grad():
                self._all_weights = self.experts.weights().map(lambda weight: self._gather_all(weight, self._computed))
        return self

    def update_bias(self, everyone: Group | None) -> None:
        """Move the selection bias by the last step's load of all ranks, after an optimizer step with balance ``bias``.

        Without expert parallelism the load of ``everyone`` counts, by default of all ranks of torch.distributed, if
        any.
        """
        assert self.step_load_E is not None
        group = everyone or (dist.group.WORLD if dist.is_initialized() else None)
        if self.mesh is not None:
            group = self.mesh.all_ranks
        self.router.update_bias(self.step_load_E, group)
        self.step_load_E = None

    def permutation(self) -> Permutation:
        """Return the rule by which this layer orders, drops and pads rows. In evaluation nothing drops."""
        config = self.config
        if not self.training:
            return make_permutation("dropless", None)  # else a sample's result would depend on the others in its batch
        reduce = torch.clone if self.mesh is None else self.mesh.maximum
        # so that a queue divides into equal parts for all ranks and chunks
        alignment = self.sharers * self.execution.degree
        return make_permutation(config.dispatch, config.capacity_factor, alignment=alignment, over_ranks=reduce)

    def run_experts(self, rows_ND: Tensor, rows_E: Tensor, weights: Weights, host_E: Tensor | None = None) -> Tensor:
        """Compute the experts on rows sorted by expert, in the rows' data type. ``rows_E``: rows of each expert.

        ``host_E`` is the same on the host, None if unknown. Back ends that multiply expert by expert read it.
        """
        weights = weights.map(lambda weight: weight.to(rows_ND.dtype))
        return run_experts(rows_ND, rows_E, weights, self.config.activation, self.backend, host_E)

    def weights(self) -> Weights:
        """Return the weights on this rank: its share in training, all weights in evaluation.

        Gradients of a share are summed over the ranks of other meshes that hold the same.
        """
        if self._all_weights is not None:
            return self._all_weights
        local = self.experts.weights()
        if self.mesh is None or self.mesh.twins is None:
            return local
        names = [name for name, weight in vars(local).items() if weight is not None]
        shares = (getattr(local, name) for name in names)
        summed = SumOverReplicas.apply(self.mesh.twins, *shares)  # type: ignore[no-untyped-call]
        return replace(local, **dict(zip(names, summed, strict=True)))

    def gathered_weights(self, mesh: ExpertMesh, dtype: torch.dtype | None = None) -> Weights:
        """Gather the weights this rank computes with under the current r, as ``dtype``. Every rank calls."""
        local, r = self.weights(), self.execution.r
        if r == 0:
            return local.map(lambda weight: self._gather_all(weight, dtype))
        parts = self.sharers // r
        weights = local.map(lambda weight: gather_slices(weight, mesh.blocks[parts], 1, parts, dtype))
        if local.down_bias_ED is None:
            return weights
        whole = gather_slices(local.down_bias_ED, mesh.blocks[self.sharers], 1, self.sharers, dtype)
        # each of the r classes adds the output bias to its partial sum
        return Weights(weights.up_EHD, weights.down_EHD, weights.gate_EHD, weights.up_bias_EH, whole / r)

    def _gather_all(self, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
        assert self.mesh is not None
        return gather_slices(weight, self.mesh.world, self.mesh.size // self.sharers, self.sharers, dtype)

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """Return the type in which the experts compute tokens ``x``: autocast's where it is on, else that of ``x``."""
        device = x.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype

    def schedule(self, mesh: ExpertMesh, plan: DispatchPlan) -> Schedule:
        """Plan what is sent where. With a capacity the host knows it all and reuses the last step's schedule."""
        execution, device = self.execution, plan.rows_E.device
        if mesh.is_rehearsed:
            return self._rehearsed_schedule(mesh, plan)
        if plan.capacity is None:
            begins_JWL, counts_JWL = split_buffer(plan.rows_E, mesh.size, self.sharers, execution.r, execution.degree)
            traffic = gather_counts(mesh, counts_JWL, execution.algorithm)
            return Schedule.create(mesh, traffic, begins_JWL, plan.rows, self.sharers, execution)
        capacity_W = mesh.every(plan.capacity)
        key = (capacity_W.tolist(), execution, device)
        if self._last_schedule is None or self._last_schedule[0] != key:
            assert plan.host_E is not None
            begins_JWL, _ = split_buffer(plan.host_E, mesh.size, self.sharers, execution.r, execution.degree)
            form = execution.r, execution.degree, execution.algorithm
            traffic = compute_known_traffic(mesh, capacity_W, self.config.experts, self.sharers, *form, device)
            begins_JWL = begins_JWL.to(device, non_blocking=True)
            schedule = Schedule.create(mesh, traffic, begins_JWL, plan.rows, self.sharers, execution)
            self._last_schedule = key, schedule
        return self._last_schedule[1]

    def _rehearsed_schedule(self, mesh: ExpertMesh, plan: DispatchPlan) -> Schedule:
        """Plan a rehearsal: where counts depend on the routing, all experts have equally many rows, on every rank."""
        execution, counts = self.execution, list_counts_on_host(plan.rows_E, plan.rows) if plan.host_E is None else None
        # sizes of messages are numbers on the host, which fake tensors do not have
        with unset_fake_temporarily():
            if counts is None:
                assert plan.capacity is not None
                counts = [plan.capacity] * self.config.experts
            form = self.sharers, execution.r, execution.degree
            begins_JWL, counts_JWL = split_buffer(torch.tensor(counts), mesh.size, *form)
            traffic = compute_even_traffic(mesh, counts_JWL, execution.algorithm, exchanged=plan.capacity is None)
            return Schedule.create(mesh, traffic, begins_JWL, plan.rows, self.sharers, execution)

    def _count(self, rows: int, assigned_E: Tensor, kept: Tensor) -> None:
        self.load.add(assigned_E, kept, rows)
        if self.config.balance == "bias":  # of all parts of a step
            self.step_load_E = assigned_E if self.step_load_E is None else self.step_load_E + assigned_E

    def find_graph_problem(self, *, bfloat16: bool) -> str | None:
        """Find why a training pass cannot be a CUDA graph on one GPU. ``bfloat16``: what the experts compute in."""
        if self.dispatcher is not dispatch:
            return "the experts have a dispatcher of their own"
        if self.config.offload is not None:
            return "offload loads experts from the host"
        factor = self.config.capacity_factor
        if factor is not None and factor <= 0:
            return f"capacity_factor {factor:g} makes the host read the longest queue"
        return find_host_read(self.backend, counts_known=self.config.dispatch != "dropless", bfloat16=bfloat16)


@dataclass(frozen=True)
class Schedule:
    """What a rank sends in one pass: one route per chunk. ``copies``: the rows sent; None: they are the buffer."""

    routes: list[Route]
    sizes: list[int]
    copies: Copies | None

    @staticmethod
    def create(
        mesh: ExpertMesh, traffic: Traffic, begins_JWL: Tensor, rows: int, sharers: int, execution: Execution
    ) -> Schedule:
        """Plan the routes, and which of the buffer's ``rows`` are sent; ``begins_JWL``: where each block begins."""
        sizes = traffic.sent.host.sum((0, 2)).tolist()
        copies = None
        # one copy in one chunk is sent in the order of the buffer, so nothing needs copying
        if (execution.r, execution.degree) != (1, 1):
            copies = _copies(begins_JWL, traffic.sent.here.transpose(0, 1), rows, sharers, execution.r)
        return Schedule(plan_routes(mesh, traffic, execution.algorithm), sizes, copies)


def dispatch(layer: MoELayer, x_TD: Tensor, routing: Routing) -> Dispatched:
    """Dispatch over the layer's mesh in training, if it has one, else on this rank alone."""
    if layer.mesh is None or not layer.training:
        return dispatch_locally(layer, x_TD, routing)
    return _dispatch_over_mesh(layer, layer.mesh, x_TD, routing)


def dispatch_locally(layer: MoELayer, x_TD: Tensor, routing: Routing) -> Dispatched:
    """Compute all experts on this rank, which has all weights: without a mesh, or in evaluation."""
    permute = layer.permutation()
    plan = permute.plan(routing, layer.config.experts)
    return _compute_here(layer, x_TD, permute, plan, routing, layer.weights())


def _dispatch_over_mesh(layer: MoELayer, mesh: ExpertMesh, x_TD: Tensor, routing: Routing) -> Dispatched:
    """Send rows to the ranks of their experts and back (r >= 1).

    With r = 0 gather all weights here instead.
    """
    marker, permute = layer.marker, layer.permutation()
    plan = permute.plan(routing, layer.config.experts)
    if layer.execution.r == 0:
        # a view, since hooks on one tensor run in their order, and this one must see its gradient first
        x_TD = marker.boundary(x_TD.view_as(x_TD), phases.PERMUTE, phases.GATHER)
        weights = layer.gathered_weights(mesh, x_TD.dtype)
        marker.mark(phases.GATHER)
        return _compute_here(layer, marker.boundary(x_TD, None, phases.PERMUTE), permute, plan, routing, weights)
    rows_ND = marker.boundary(permute.encode(x_TD, plan), phases.PERMUTE, phases.GATHER)
    weights = layer.gathered_weights(mesh, rows_ND.dtype)
    marker.mark(phases.GATHER)
    rows_ND = marker.boundary(rows_ND, None, phases.DISPATCH)
    rows_ND = _send_and_compute(layer, mesh, rows_ND, plan, weights)
    rows_ND = marker.boundary(rows_ND, phases.COMBINE, phases.UNPERMUTE)
    return _dispatched(permute.decode(rows_ND, plan, routing.weights_TK), plan)


def _compute_here(
    layer: MoELayer, x_TD: Tensor, permute: Permutation, plan: DispatchPlan, routing: Routing, weights: Weights
) -> Dispatched:
    """Compute all experts on this rank; with the fused kernels all of it counts as the experts' time."""
    form = layer.config.activation, layer.backend, layer.marker
    return _dispatched(run_experts_on_tokens(x_TD, routing.weights_TK, permute, plan, weights, *form), plan)


def _dispatched(y_TD: Tensor, plan: DispatchPlan) -> Dispatched:
    return Dispatched(y_TD, plan.assigned_E, plan.kept, plan.rows)


def _send_and_compute(
    layer: MoELayer, mesh: ExpertMesh, rows_ND: Tensor, plan: DispatchPlan, weights: Weights
) -> Tensor:
    """Send rows to their experts in chunks and return the results in the order of ``rows_ND``.

    While one chunk is computed, the transfers of others are under way.
    """
    marker, schedule = layer.marker, layer.schedule(mesh, plan)
    marker.mark(phases.COUNTS)
    rows_MD = rows_ND if schedule.copies is None else schedule.copies.spread(rows_ND)
    chunks = torch.split(rows_MD, schedule.sizes)
    dispatches = [MultiHopTransfer(rows, route.hops) for rows, route in zip(chunks, schedule.routes, strict=True)]
    # 2dh: begin the second hop of every chunk; a linear transfer has one hop and is under way already
    for transfer in dispatches:
        transfer.advance()
    returns: list[MultiHopTransfer] = []
    for transfer, route in zip(dispatches, schedule.routes, strict=True):
        rows = marker.boundary(transfer.end(), phases.DISPATCH, phases.EXPERTS)
        rows = layer.run_experts(rows, route.rows_L, weights, route.host_L)
        returns.append(MultiHopTransfer(marker.boundary(rows, phases.EXPERTS, phases.COMBINE), route.back))
        if len(returns) > 1:
            # begin the second hop (2dh) of the previous chunk's return, to overlap the next chunk's experts
            returns[-2].advance()
    returns[-1].advance()
    returned_MD = torch.cat([transfer.end() for transfer in returns])
    return returned_MD if schedule.copies is None else schedule.copies.join(returned_MD)


def _copies(begins_JWL: Tensor, counts_JWL: Tensor, rows: int, sharers: int, r: int) -> Copies:
    """Find which buffer rows are sent, and where the r copies of each are in the order of sending.

    The blocks of a class of ranks are the whole buffer. They are ordered by expert, part of the class and chunk.
    """
    chunks, ranks, each = counts_JWL.shape
    counts = counts_JWL.reshape(-1)
    source_M = join_ranges(begins_JWL.reshape(-1), counts, r * rows)
    grid = (chunks, ranks // sharers, r, sharers // r, each)
    begins = (counts.cumsum(0) - counts).view(grid).permute(2, 1, 4, 3, 0).reshape(-1)
    sizes = counts_JWL.reshape(grid).permute(2, 1, 4, 3, 0).reshape(-1)
    return Copies(source_M, join_ranges(begins, sizes, r * rows).view(r, rows).t().contiguous())
