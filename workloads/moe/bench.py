"""Measures one MoE layer against a dense FFN of equal FLOPs in the same run, and all-to-alls of a network. Prints nothing.

Layer and dense FFN alternate, so that what disturbs the machine disturbs both; a time is the slowest rank's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suite.distributed import World
from suite.timing import CudaClock, HostClock
from workloads.moe.all_to_all import ExpertMesh, Journey, plan_routes
from workloads.moe.config import MoEConfig
from workloads.moe.experts import activate
from workloads.moe.layer import MoELayer
from workloads.moe.parallel import expert_mesh
from workloads.moe.phases import LayerTimer, NoMarker
from workloads.moe.router import Router

BENCH_VERSION = 1
SWEEP_FROM_BYTES = 1 << 10
HOT_SHARE = 0.66  # of the tokens choose expert 0 first in skewed routing: with 64 experts and k = 2 max / mean is 21
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

Load = Literal["router", "uniform", "skewed"]


@dataclass(frozen=True)
class Shape:
    """What is measured. ``tokens`` per rank; ``load`` router: the layer's own choice for random tokens."""

    tokens: int
    width: int
    moe: MoEConfig
    load: Load = "router"
    dtype: str = "float32"


@dataclass(frozen=True)
class Result:
    """Median seconds of forward and backward. ``ratio`` is the median over pairs of dense time / layer time.

    ``useful_tflops`` counts rows that hold a token, ``executed_tflops`` all that were computed; per rank.
    """

    version: int
    shape: dict[str, Any]
    ranks: int
    device: str
    threads: int
    layer_s: float
    dense_s: float
    ratio: float
    useful_tflops: float
    executed_tflops: float
    phases_s: dict[str, float]
    load: dict[str, Any]

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class GivenRouter(Router):
    """The router's work, with experts that were chosen beforehand."""

    experts_TK: Tensor

    def _select(self, scores_TE: Tensor) -> Tensor:
        super()._select(scores_TE)
        return self.experts_TK


class DenseFFN(nn.Module):
    """One FFN as wide as an expert, on as many rows as the experts get."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        own = shape.moe
        self.activation = own.activation
        self.up = nn.Linear(shape.width, own.hidden, bias=own.bias)
        self.gate = nn.Linear(shape.width, own.hidden, bias=False) if own.activation == "swiglu" else None
        self.down = nn.Linear(own.hidden, shape.width, bias=own.bias)

    def forward(self, x_ND: Tensor) -> Tensor:
        """(N, D) to (N, D)."""
        return self.down(activate(self.up(x_ND), None if self.gate is None else self.gate(x_ND), self.activation))


def measure(shape: Shape, world: World, device: torch.device, repeats: int) -> Result:
    """Time the layer; every rank calls."""
    torch.manual_seed(0)
    mesh = expert_mesh(shape.moe, world, cuda=device.type == "cuda") if world.size > 1 else None
    layer, x_TD = make_layer(shape, mesh, world.rank, device)
    dense = DenseFFN(shape).to(device, DTYPES[shape.dtype])
    x_ND = torch.randn(shape.tokens * shape.moe.top_k, shape.width, device=device, dtype=x_TD.dtype)
    call, dense_call = training_pass(layer, x_TD), training_pass(dense, x_ND)
    pairs = timed_pairs(call, dense_call, world, device, repeats)
    layer.marker = timer = LayerTimer(CudaClock() if device.type == "cuda" else HostClock())
    layer.load = type(layer.load).empty(shape.moe.experts, device)
    call()
    phases = world.sum(timer.flush())
    layer.marker = NoMarker()
    load = layer.load
    matrices = 3 if shape.moe.activation == "swiglu" else 2
    flops_per_row = 6.0 * matrices * shape.width * shape.moe.hidden
    layer_s = statistics.median(pair[0] for pair in pairs)
    return Result(
        BENCH_VERSION,
        {**vars(shape), "moe": shape.moe.model_dump()},
        world.size,
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch.get_num_threads(),
        layer_s,
        statistics.median(pair[1] for pair in pairs),
        statistics.median(b / a for a, b in pairs),
        flops_per_row * float(load.kept) / layer_s / 1e12,
        flops_per_row * float(load.rows) / layer_s / 1e12,
        {name: value / world.size for name, value in phases.items()},
        load.report(),
    )


def make_layer(shape: Shape, mesh: ExpertMesh | None, rank: int, device: torch.device) -> tuple[MoELayer, Tensor]:
    """The layer and this rank's tokens."""
    own = shape.moe
    layer = MoELayer(shape.width, own, mesh)
    generator = torch.Generator().manual_seed(1 + rank)
    x_TD = torch.randn(shape.tokens, shape.width, generator=generator)
    if shape.load != "router":
        router = GivenRouter(shape.width, own)
        router.load_state_dict(layer.router.state_dict())
        router.experts_TK = given_experts(shape, generator).to(device)
        layer.router = router
    return layer.to(device, DTYPES[shape.dtype]), x_TD.to(device, DTYPES[shape.dtype])


def given_experts(shape: Shape, generator: torch.Generator) -> Tensor:
    """Distinct experts per token: all equally often, or expert 0 for two thirds of the tokens and the others by Zipf's law."""
    tokens, experts, top_k = shape.tokens, shape.moe.experts, shape.moe.top_k
    if shape.load == "uniform":
        flat = torch.arange(tokens * top_k).view(tokens, top_k) % experts
        return flat[torch.randperm(tokens, generator=generator)]
    chances_TE = (1 / torch.arange(1, experts + 1)).repeat(tokens, 1)
    hot_T = torch.rand(tokens, generator=generator) < HOT_SHARE
    chances_TE[:, 0] = torch.where(hot_T, 1e9, 1e-9)
    return torch.multinomial(chances_TE, top_k, generator=generator)


def training_pass(module: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward with gradients of input and parameters."""
    gradient = torch.randn_like(x)

    def call() -> None:
        leaf = x.detach().requires_grad_()
        out = module(leaf)
        y = out if isinstance(out, Tensor) else out.y_TD
        y.backward(gradient)
        module.zero_grad(set_to_none=True)

    return call


def timed_pairs(
    first: Callable[[], None], second: Callable[[], None], world: World, device: torch.device, repeats: int
) -> list[tuple[float, float]]:
    """Seconds of both, alternating, after a warm-up of each."""
    pairs = [(timed(first, world, device), timed(second, world, device)) for _ in range(1 + repeats)]
    return pairs[1:]


def timed(call: Callable[[], None], world: World, device: torch.device) -> float:
    """The slowest rank's seconds."""
    _synchronise(device)
    world.barrier()
    begin = time.perf_counter()
    call()
    _synchronise(device)
    return max(world.allgather(time.perf_counter() - begin))


def sweep_network(
    world: World, device: torch.device, ranks_per_node: int, up_to_bytes: int, repeats: int
) -> dict[str, Any]:
    """Seconds of linear and two-level all-to-alls over message sizes, for a fit: ``bytes`` is what one rank sends in all."""
    mesh = ExpertMesh.create(device.type, ranks_per_node=ranks_per_node)
    rows = []
    size = SWEEP_FROM_BYTES
    while size <= up_to_bytes:
        each = max(1, size // mesh.size // 4)
        counts_JWL = torch.full((1, mesh.size, 1), each, device=device)
        payload = torch.zeros(each * mesh.size, 1, device=device)
        for algorithm in ("linear", "2dh"):
            (route,) = plan_routes(mesh, counts_JWL, algorithm, device)  # type: ignore[arg-type]

            def call(hops: Any = route.hops, payload: Tensor = payload) -> None:
                Journey(payload, hops).end()

            seconds = [timed(call, world, device) for _ in range(1 + repeats)][1:]
            rows.append({"algorithm": algorithm, "bytes": each * mesh.size * 4, "seconds": seconds})
        size *= 4
    return {
        "version": BENCH_VERSION,
        "ranks": mesh.size,
        "ranks_per_node": ranks_per_node,
        "nodes": world.nodes,
        "backend": dist.get_backend(),
        "device": device.type,
        "all_to_all": rows,
    }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
