"""Chooses r, the overlap degree and the all-to-all of an MoE layer.

A cost model makes a short list, and timing decides.

Every rank calls and gets the same result, because measured times are the slowest rank's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlhpc.suite.performance.cost_model import LayerShape, Network, list_executions
from mlhpc.workloads.moe.experts import run_experts
from mlhpc.workloads.moe.layer import Execution, MoELayer
from mlhpc.workloads.moe.mesh import ExpertMesh, resolve_process_group
from mlhpc.workloads.moe.phases import NoMarker

BUCKET_CAPACITY = 128  # as in Tutel: one decision for all capacities c with the same floor(c / 128)
SHORTLIST = 6
REPEATS = 3
SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 22


@dataclass(frozen=True)
class Trial:
    """One candidate of the short list: predicted and measured seconds."""

    execution: Execution
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Decision:
    """The execution chosen for one bucket of capacities, and all trials."""

    capacity: int
    chosen: Execution
    trials: tuple[Trial, ...]

    def event(self) -> dict[str, Any]:
        """Convert to the form that is logged."""
        return {
            "capacity_bucket": self.capacity // BUCKET_CAPACITY,
            **asdict(self.chosen),
            "trials": [
                {**asdict(t.execution), "predicted_s": t.predicted_s, "measured_s": t.measured_s} for t in self.trials
            ],
        }


@dataclass
class Autotuner:
    """Makes and keeps one decision per bucket of capacities. ``flops_per_s``: rate of one rank's expert products."""

    network: Network
    flops_per_s: float
    shortlist: int = SHORTLIST
    decisions: dict[int, Decision] = field(default_factory=dict)

    def decide(self, layer: MoELayer, capacity: int, tokens: int, measure: Callable[[Execution], float]) -> Decision:
        """Return the decision for the bucket of ``capacity`` rows per expert. Measures only the first time."""
        bucket = capacity // BUCKET_CAPACITY
        if bucket not in self.decisions:
            candidates = self.candidates(layer, capacity, tokens)
            trials = [Trial(execution, predicted, measure(execution)) for execution, predicted in candidates]
            best = min(trials, key=lambda trial: trial.measured_s)
            self.decisions[bucket] = Decision(capacity, best.execution, tuple(trials))
        return self.decisions[bucket]

    def candidates(self, layer: MoELayer, capacity: int, tokens: int) -> list[tuple[Execution, float]]:
        """List candidates with predicted seconds: the fastest, and the best of every r, since these differ most."""
        assert layer.mesh is not None
        config = layer.config
        shape = LayerShape(
            tokens=tokens,
            width=layer.width,
            hidden=layer.experts.up_EHD.shape[1] * layer.sharers,
            experts=config.experts,
            top_k=config.top_k,
            matrices=3 if config.activation == "swiglu" else 2,
            capacity_factor=max(1.0, capacity * config.experts / (config.top_k * max(1, tokens))),
            element_bytes=layer.compute_dtype(layer.experts.up_EHD).itemsize,
        )
        order = list_executions(shape, self.network, layer.mesh.size, self.flops_per_s)
        # reversed: of each r the fastest is written last and stays
        first_of_r = {choice.r: choice for choice in reversed(order)}
        listed = {(c.r, c.degree, c.algorithm): c for c in (*first_of_r.values(), *order[: self.shortlist])}
        chosen = sorted(listed.values(), key=lambda choice: choice.seconds)
        return [(Execution(c.r, c.degree, c.algorithm), c.seconds) for c in chosen]


def make_trial_timer(layer: MoELayer, x_TD: Tensor, repeats: int = REPEATS) -> Callable[[Execution], float]:
    """Return a function that times forward and backward of the layer on these tokens under an execution.

    It returns the median of ``repeats`` on the slowest rank, after one warm-up. Gradients, load counts and the layer's
    execution are left unchanged.
    """
    mesh = layer.mesh
    assert mesh is not None

    def measure(execution: Execution) -> float:
        before = layer.execution, layer.marker, layer.load, layer.step_load_E
        layer.marker, layer.load = NoMarker(), type(layer.load)(layer.config.experts)
        layer.use(execution)
        seconds = []
        for _ in range(1 + repeats):
            x = x_TD.detach().clone().requires_grad_()
            _synchronise(x)
            dist.barrier(resolve_process_group(mesh.all_ranks))
            begin = time.perf_counter()
            y_TD = layer.forward(x).y_TD  # what a plan puts around a layer is not called: x is whole
            # not backward(): that would add to the parameters' gradients
            torch.autograd.grad(y_TD.sum(), [x, *layer.experts.parameters()])
            _synchronise(x)
            seconds.append(time.perf_counter() - begin)
        layer.execution, layer.marker, layer.load, layer.step_load_E = before
        return _slowest(statistics.median(seconds[1:]), mesh, x_TD.device)

    return measure


def measure_network(mesh: ExpertMesh, device: torch.device, repeats: int = REPEATS) -> Network:
    """Measure latency and bandwidth of both levels by small and large all-to-alls, and of memory by a copy."""
    levels: list[tuple[float, float] | None] = []
    for group, size in ((mesh.within_node, mesh.devices), (mesh.across_nodes, mesh.nodes)):
        if size == 1:
            levels.append(None)
            continue
        level, sizes = resolve_process_group(group), (SMALL_BYTES, LARGE_BYTES)
        small, large = (_all_to_all_s(level, size, each, mesh, device, repeats) for each in sizes)
        # a small all-to-all is size - 1 messages, one after the other
        latency = small / (size - 1)
        slope = max(large - small, 1e-9) / ((LARGE_BYTES - SMALL_BYTES) * (size - 1) / size)
        levels.append((latency, 1 / slope))
    # a level with one rank has no links to measure: it gets the other level's numbers
    intra, inter = (level or levels[1 - i] or (1e-6, 1e9) for i, level in enumerate(levels))
    return Network(
        ranks_per_node=mesh.devices,
        inter_latency_s=inter[0],
        inter_bandwidth=inter[1],
        intra_latency_s=intra[0],
        intra_bandwidth=intra[1],
        memory_bandwidth=measure_memory(mesh, device, repeats),
        launch_s=intra[0],
        two_level_latency_s=inter[0],
    )


def measure_memory(mesh: ExpertMesh, device: torch.device, repeats: int = REPEATS) -> float:
    """Measure bytes/s read plus written by a copy while all ranks copy; the slowest rank's."""
    source = torch.zeros(LARGE_BYTES // 4, device=device)
    # a copy reads and writes
    return 2 * LARGE_BYTES / _slowest(_median_s(source.clone, source, repeats), mesh, device)


def measure_flops(layer: MoELayer, rows: int, repeats: int = REPEATS) -> float:
    """Measure FLOP/s of this rank's experts, forward, on ``rows`` rows each; return the slowest rank's.

    The layer's back end multiplies. Rows and weights have the type that the layer computes in: autocast's where it is
    on.
    """
    assert layer.mesh is not None
    dtype = layer.compute_dtype(layer.experts.up_EHD)
    weights = layer.experts.weights().map(lambda weight: weight.detach().to(dtype))
    experts, hidden, width = weights.up_EHD.shape
    host_E = torch.full((experts,), max(1, rows))
    x_ND = weights.up_EHD.new_ones(int(host_E.sum()), width)
    rows_E, config = host_E.to(x_ND.device), layer.config
    seconds = _slowest(
        _median_s(lambda: run_experts(x_ND, rows_E, weights, config.activation, config.backend, host_E), x_ND, repeats),
        layer.mesh,
        x_ND.device,
    )
    matrices = 3 if weights.gate_EHD is not None else 2
    return 2.0 * matrices * len(x_ND) * width * hidden / seconds


def _all_to_all_s(
    group: dist.ProcessGroup, size: int, size_bytes: int, mesh: ExpertMesh, device: torch.device, repeats: int
) -> float:
    rows = torch.zeros(size, size_bytes // size // 4, device=device)
    out = torch.empty_like(rows)
    return _slowest(_median_s(lambda: dist.all_to_all_single(out, rows, group=group), rows, repeats), mesh, device)


def _median_s(call: Callable[[], object], on: Tensor, repeats: int) -> float:
    seconds: list[float] = []
    for _ in range(1 + repeats):
        _synchronise(on)
        begin = time.perf_counter()
        call()
        _synchronise(on)
        seconds.append(time.perf_counter() - begin)
    return max(statistics.median(seconds[1:]), 1e-9)


def _slowest(seconds: float, mesh: ExpertMesh, device: torch.device) -> float:
    """Return the largest value of all ranks, so that all copies of the mesh decide alike."""
    box = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=resolve_process_group(mesh.all_ranks))
    return float(box)


def _synchronise(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
