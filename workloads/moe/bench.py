"""Measures one MoE layer against a dense FFN of equal FLOPs in the same run, and sweeps a network. Prints nothing.

Layer and dense FFN alternate, so that disturbances of the machine affect both. Times are the slowest rank's.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn

from mlhpc.suite import VERSION
from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.machine.choice.chooser import make_measuring_chooser
from mlhpc.suite.performance.cost_model import ALGORITHMS
from mlhpc.suite.training.step_timing import CudaClock, HostClock
from mlhpc.suite.world import World
from mlhpc.workloads.moe import phases
from mlhpc.workloads.moe.autotune import measure_flops, measure_memory
from mlhpc.workloads.moe.backend_selection import ExpertShape, choose_backend
from mlhpc.workloads.moe.config import Layout, MoEConfig, list_valid_r
from mlhpc.workloads.moe.experts import compute_activation
from mlhpc.workloads.moe.layer import Execution, MoELayer
from mlhpc.workloads.moe.mesh import ExpertMesh, resolve_process_group
from mlhpc.workloads.moe.parallel import make_expert_mesh
from mlhpc.workloads.moe.phases import LayerTimer, NoMarker
from mlhpc.workloads.moe.router import Router
from mlhpc.workloads.moe.routes import MultiHopTransfer, gather_counts, plan_routes

BENCH_VERSION = 3
SWEEP_VERSION = 2  # read by plugins/network/sweep.py
SWEEP_KIND = "mlhpc all-to-all sweep"
SWEEP_FROM_BYTES = 1 << 10
SWEEP_DEGREES = (1, 2, 4)
OUTSIDE_PHASES = (
    phases.GATE, phases.PERMUTE, phases.COUNTS, phases.UNPERMUTE,
    *(f"{name}_backward" for name in (phases.GATE, phases.PERMUTE, phases.UNPERMUTE)),
)  # fmt: skip
# share of tokens that choose expert 0 first in skewed routing: with 64 experts and k = 2, max / mean is 21
HOT_SHARE = 0.66
ERROR_UNITS = 32  # units of the type's resolution: two products, and weights that are sums of rounded scores
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

Load = Literal["router", "uniform", "skewed"]


@dataclass(frozen=True)
class Shape:
    """The layer to measure. ``tokens`` are per rank; with ``load`` "router" the layer's router routes random tokens."""

    tokens: int
    width: int
    moe: MoEConfig
    load: Load = "router"
    dtype: str = "float32"


@dataclass(frozen=True)
class Result:
    """Median seconds of forward and backward. ``ratio`` is the median over pairs of dense time / layer time.

    ``pairs_s``: seconds of layer and dense FFN, pair by pair; ``ratio_low`` and ``ratio_high``: the extreme ratios.
    ``useful_tflops`` counts rows that hold a token, ``executed_tflops`` all that were computed; per rank. ``error`` is
    that of the output against float64 (2-norm), on the same routes. Above ``error_bound`` the layer computes wrong.
    """

    version: int
    shape: dict[str, Any]
    ranks: int
    device: str
    threads: int
    layer_s: float
    dense_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    pairs_s: list[tuple[float, float]]
    useful_tflops: float
    executed_tflops: float
    phases_s: dict[str, float]
    load: dict[str, Any]
    error: float
    error_bound: float

    def row(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return asdict(self)


class FixedRouter(Router):
    """Does all the work of a router but returns experts chosen beforehand."""

    experts_TK: Tensor

    def _select(self, scores_TE: Tensor) -> Tensor:
        super()._select(scores_TE)
        return self.experts_TK


class DenseFFN(nn.Module):
    """A dense FFN as wide as one expert. On as many rows as all experts compute, it has equal FLOPs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        moe = shape.moe
        self.activation = moe.activation
        self.up = nn.Linear(shape.width, moe.hidden, bias=moe.bias)
        self.gate = nn.Linear(shape.width, moe.hidden, bias=False) if moe.activation == "swiglu" else None
        self.down = nn.Linear(moe.hidden, shape.width, bias=moe.bias)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Map (N, D) to (N, D)."""
        result: Tensor = self.down(
            compute_activation(self.up(x_ND), None if self.gate is None else self.gate(x_ND), self.activation)
        )
        return result


def measure(shape: Shape, world: World, device: torch.device, repeats: int) -> Result:
    """Measure the layer and the dense FFN. Every rank calls."""
    # every rank makes all experts and keeps its share, so all must draw the same numbers
    torch.manual_seed(0)
    mesh = make_expert_mesh(shape.moe, world, cuda=device.type == "cuda") if world.size > 1 else None
    layer, x_TD = make_layer(shape, mesh, world.rank, device)
    if shape.moe.backend == "auto":
        rows = Layout(1.0, world.size).computed_rows(shape.moe, shape.tokens)
        asked = ExpertShape.of(shape.moe, shape.width, rows, DTYPES[shape.dtype], world.size)
        layer.backend = choose_backend(make_measuring_chooser(world, device), asked)
    dense = DenseFFN(shape).to(device, DTYPES[shape.dtype])
    x_ND = torch.randn(shape.tokens * shape.moe.top_k, shape.width, device=device, dtype=x_TD.dtype)
    call, dense_call = make_training_pass(layer, x_TD), make_training_pass(dense, x_ND)
    pairs = measure_pairs(call, dense_call, world, device, repeats)
    layer.marker = timer = LayerTimer(CudaClock() if device.type == "cuda" else HostClock())
    # the warm-up and the pairs must not count as load of the timed pass
    layer.load = type(layer.load)(shape.moe.experts)
    call()
    seconds = world.sum(timer.flush())
    layer.marker = NoMarker()
    load = layer.load.read()
    matrices = 3 if shape.moe.activation == "swiglu" else 2
    # 2 FLOPs per multiply-add; the backward pass has twice those of the forward pass
    flops_per_row = 6.0 * matrices * shape.width * shape.moe.hidden
    layer_s = statistics.median(pair[0] for pair in pairs)
    ratios = [dense_s / own_s for own_s, dense_s in pairs]
    return Result(
        BENCH_VERSION,
        {**vars(shape), "moe": convert_to_plain_data(shape.moe) | {"backend": str(layer.backend)}},
        world.size,
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch.get_num_threads(),
        layer_s,
        statistics.median(pair[1] for pair in pairs),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        pairs,
        flops_per_row * load.kept / layer_s / 1e12,
        flops_per_row * load.rows / layer_s / 1e12,
        {name: value / world.size for name, value in seconds.items()},
        load.report(),
        max(world.allgather(measure_error(layer, x_TD))),
        ERROR_UNITS * torch.finfo(DTYPES[shape.dtype]).eps,
    )


@torch.no_grad()
def measure_error(layer: MoELayer, x_TD: Tensor) -> float:
    """Compute the relative error of a layer's output against float64 and the back end ``loop``. All ranks call it.

    The layer keeps its routes: a tie in its router is no error. The layer is in float64 afterwards.
    """
    routes: list[Tensor] = []
    handle = layer.router.register_forward_hook(lambda router, inputs, found: routes.append(found.experts_TK))
    found = layer(x_TD).y_TD.double()
    handle.remove()
    layer.double().backend = "loop"
    router = FixedRouter(layer.width, layer.config).to(x_TD.device, torch.float64)
    router.load_state_dict(layer.router.state_dict())
    router.experts_TK = routes[0]
    layer.router = router.train(layer.training)
    right = layer(x_TD.double()).y_TD
    return float((found - right).norm() / right.norm().clamp(min=torch.finfo(torch.float64).tiny))


def make_layer(shape: Shape, mesh: ExpertMesh | None, rank: int, device: torch.device) -> tuple[MoELayer, Tensor]:
    """Build the layer and this rank's tokens."""
    moe = shape.moe
    layer = MoELayer(shape.width, moe, mesh)
    generator = torch.Generator().manual_seed(1 + rank)
    x_TD = torch.randn(shape.tokens, shape.width, generator=generator)
    if shape.load != "router":
        router = FixedRouter(shape.width, moe)
        router.load_state_dict(layer.router.state_dict())
        router.experts_TK = choose_fixed_experts(shape, generator).to(device)
        layer.router = router
    return layer.to(device, DTYPES[shape.dtype]), x_TD.to(device, DTYPES[shape.dtype])


def choose_fixed_experts(shape: Shape, generator: torch.Generator) -> Tensor:
    """Choose distinct experts per token.

    Uniform load uses all equally often. Skewed load uses expert 0 for two thirds of the tokens, the others by Zipf's
    law.
    """
    tokens, experts, top_k = shape.tokens, shape.moe.experts, shape.moe.top_k
    if shape.load == "uniform":
        flat = torch.arange(tokens * top_k).view(tokens, top_k) % experts
        return flat[torch.randperm(tokens, generator=generator)]
    chances_TE = (1 / torch.arange(1, experts + 1)).repeat(tokens, 1)
    hot_T = torch.rand(tokens, generator=generator) < HOT_SHARE
    # expert 0 is the first choice of hot tokens and practically never of others
    chances_TE[:, 0] = torch.where(hot_T, 1e9, 1e-9)
    return torch.multinomial(chances_TE, top_k, generator=generator)


def make_training_pass(module: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward with gradients of input and parameters."""
    gradient = torch.randn_like(x)

    def call() -> None:
        leaf = x.detach().requires_grad_()
        out = module(leaf)
        y = out if isinstance(out, Tensor) else out.y_TD
        y.backward(gradient)
        module.zero_grad(set_to_none=True)

    return call


def measure_pairs(
    first: Callable[[], None], second: Callable[[], None], world: World, device: torch.device, repeats: int
) -> list[tuple[float, float]]:
    """Measure the seconds of both calls, alternating, after a warm-up of each."""
    group = dist.group.WORLD if world.size > 1 else None
    times = measure_calls([first, second] * (1 + repeats), group, device)[2:]
    return list(zip(times[::2], times[1::2], strict=True))


def measure_calls(
    calls: Sequence[Callable[[], None]], group: dist.ProcessGroup | None, device: torch.device
) -> list[float]:
    """Measure the slowest rank's seconds of each call. Ranks begin each call together and exchange times at the end.

    The barrier is torch.distributed's: a rank that waits in MPI keeps its core busy, which other ranks may need.
    """
    seconds = torch.zeros(len(calls), dtype=torch.float64)
    for index, call in enumerate(calls):
        _synchronise(device)
        if group is not None:
            dist.barrier(group)
        begin = time.perf_counter()
        call()
        _synchronise(device)
        seconds[index] = time.perf_counter() - begin
    if group is not None:
        seconds = seconds.to(device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return [float(value) for value in seconds]


def run_network_sweep(
    world: World,
    device: torch.device,
    shape: Shape,
    ranks_per_node: int,
    up_to_bytes: int,
    repeats: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure what plugins/network fits: all-to-alls by message size and an MoE layer, on growing grids of ranks.

    Grids are the first 2, 4, … ranks of one node, then 2, 4, … nodes, and all. Experts grow with the ranks: ``shape``
    has those of the largest grid. Every rank calls. ``progress(done, total)`` counts the ranks of grids measured.
    InputError if the smallest grid has fewer experts than top_k.
    """
    if world.size % ranks_per_node:
        raise InputError(
            f"{world.size} ranks are not a multiple of the {ranks_per_node} of a node: give --ranks-per-node"
        )
    sizes = list_grid_sizes(world.size, ranks_per_node)
    shapes = [_set_experts(shape, shape.moe.experts * ranks // world.size) for ranks in sizes]
    grids = []
    for number, (ranks, grid) in enumerate(zip(sizes, shapes, strict=True), start=1):
        grids.append(_sweep_grid(device, grid, ranks, min(ranks, ranks_per_node), up_to_bytes, repeats))
        progress(sum(sizes[:number]), sum(sizes))
    return {
        "kind": SWEEP_KIND,
        "version": SWEEP_VERSION,
        "suite_version": VERSION,
        "ranks": world.size,
        "ranks_per_node": ranks_per_node,
        "nodes": world.nodes,
        "cores_per_node": len(os.sched_getaffinity(0)),
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "grids": grids,
    }


def _set_experts(shape: Shape, experts: int) -> Shape:
    if experts < shape.moe.top_k:
        raise InputError(
            f"experts grow with the ranks, and the smallest grid would have {experts} for top-k {shape.moe.top_k}: "
            "more --experts or --top-k 1"
        )
    return replace(shape, moe=structs.replace(shape.moe, experts=experts))


def list_grid_sizes(ranks: int, ranks_per_node: int) -> list[int]:
    """List grid sizes: powers of two ranks inside a node, then powers of two nodes. The largest has all ranks."""
    inside = [2**i for i in range(1, ranks_per_node.bit_length()) if 2**i < ranks_per_node]
    nodes = ranks // ranks_per_node
    across = [ranks_per_node * 2**i for i in range(nodes.bit_length()) if 2**i <= nodes]
    return sorted({size for size in (*inside, *across, ranks) if size > 1})


def _sweep_grid(
    device: torch.device, shape: Shape, ranks: int, ranks_per_node: int, up_to_bytes: int, repeats: int
) -> dict[str, Any]:
    """Measure one grid; ranks outside it wait."""
    sharers = {size for size in range(1, ranks + 1) if ranks % size == 0}
    mesh = ExpertMesh.create(
        device.type, ranks=ranks, ranks_per_node=ranks_per_node, block_sizes=sorted(sharers), even=True
    )
    grid: dict[str, Any] = {"ranks": ranks, "ranks_per_node": ranks_per_node}
    if mesh.has_me:
        grid["all_to_all"] = list(_sweep_sizes(mesh, device, up_to_bytes, repeats))
        grid["copy_bytes_per_s"] = measure_memory(mesh, device)
        grid["layer"] = _sweep_layer(mesh, device, shape, repeats)
    # ranks outside the grid wait here, so that the next grid begins on an idle machine
    dist.barrier()
    return grid


def _sweep_sizes(mesh: ExpertMesh, device: torch.device, up_to_bytes: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Measure all-to-alls by message size. ``bytes`` counts what one rank sends, the part for itself included."""
    size = SWEEP_FROM_BYTES
    while size <= up_to_bytes:
        # rows of one float32 number
        each = max(1, size // mesh.size // 4)
        counts_JWL = torch.full((1, mesh.size, 1), each, device=device)
        payload = torch.zeros(each * mesh.size, 1, device=device)
        for algorithm in ALGORITHMS if mesh.nodes > 1 else ALGORITHMS[:1]:
            (route,) = plan_routes(mesh, gather_counts(mesh, counts_JWL, algorithm), algorithm)

            def call(hops: Any = route.hops, payload: Tensor = payload) -> None:
                MultiHopTransfer(payload, hops).end()

            seconds = measure_calls([call] * (1 + repeats), resolve_process_group(mesh.world), device)[1:]
            yield {"algorithm": algorithm, "bytes": each * mesh.size * 4, "seconds": seconds}
        size *= 2


def _sweep_layer(mesh: ExpertMesh, device: torch.device, shape: Shape, repeats: int) -> dict[str, Any]:
    """Measure forward plus backward seconds of a layer by r, degree and algorithm.

    ``outside_s`` is the time of one pass in neither experts nor network: gate, permutation, exchange of counts.
    ``flops_per_s`` is the rate of one rank while all compute.
    """
    torch.manual_seed(0)
    layer, x_TD = make_layer(shape, mesh, mesh.rank, device)
    call = make_training_pass(layer, x_TD)
    runs = []
    for r in list_valid_r(shape.moe.experts, mesh.size):
        degrees = SWEEP_DEGREES if r else (1,)
        for degree, algorithm in product(degrees, ALGORITHMS if r and mesh.nodes > 1 else ALGORITHMS[:1]):
            layer.use(Execution(r, degree, algorithm))
            seconds = measure_calls([call] * (1 + repeats), resolve_process_group(mesh.world), device)[1:]
            runs.append({"r": r, "degree": degree, "algorithm": algorithm, "seconds": seconds})
    # phases are measured in the plainest execution: one chunk, linear
    layer.use(Execution())
    layer.marker = timer = LayerTimer(CudaClock() if device.type == "cuda" else HostClock())
    outside = []
    for _ in range(repeats):
        call()
        seconds_by_phase = timer.flush()
        outside.append(sum(seconds_by_phase[name] for name in OUTSIDE_PHASES))
    rows = shape.tokens * shape.moe.top_k * mesh.size // max(shape.moe.experts, mesh.size)
    return {
        "shape": {**vars(shape), "moe": convert_to_plain_data(shape.moe)},
        "element_bytes": x_TD.element_size(),
        "flops_per_s": measure_flops(layer, rows),
        "outside_s": statistics.median(outside),
        "runs": runs,
    }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
