"""Connects MoE layers to the harness's world: the mesh, sharded parameters, tuning, statistics per window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.step_timing import Clock
from mlhpc.suite.world import World
from mlhpc.workloads.moe.autotune import Autotuner, make_trial_timer, measure_flops, measure_network
from mlhpc.workloads.moe.config import MoEConfig, count_ranks_per_expert, list_valid_r
from mlhpc.workloads.moe.layer import MoELayer
from mlhpc.workloads.moe.mesh import ExpertMesh
from mlhpc.workloads.moe.phases import COMMUNICATION, EXPERTS, LayerTimer
from mlhpc.workloads.moe.router import ExpertLoad, LoadTotals


def make_expert_mesh(
    config: MoEConfig, world: World, ranks: int | None = None, *, cuda: bool, sharing: int = 1
) -> ExpertMesh:
    """Create the mesh of ``ranks`` ranks, by default all, with the groups for every r. ``sharing``: see `ExpertSpread`.

    InputError if nodes are not equally large. InputError also if neither of a mesh's ranks and a node's ranks divides
    the other. The harness gives every rank equally many samples in a training step, and samples have equally many
    tokens.
    """
    ranks = ranks or world.size
    sharers = count_ranks_per_expert(config.experts, ranks)
    # with r copies of a token, sharers / r ranks gather their slices of an expert
    sizes = {sharers // r for r in list_valid_r(config.experts, ranks) if r}
    per_node = count_node_ranks(config.ranks_per_node or world.local_size, ranks, world.size, sharing)
    device_type, copies = "cuda" if cuda else "cpu", world.size // (ranks * sharing)
    return ExpertMesh.create(
        device_type, ranks_per_node=per_node, block_sizes=sorted(sizes), even=True, copies=copies, sharing=sharing
    )


def count_node_ranks(per_node: int, ranks: int, size: int, sharing: int = 1) -> int:
    """Compute how many of a mesh's ``ranks`` lie on one node. A node has ``per_node`` ranks, the run ``size``.

    InputError if that is not the same everywhere. ``sharing`` consecutive ranks belong to different meshes.
    """
    if per_node % sharing and sharing % per_node:
        raise InputError(f"tensor={sharing}: a node has {per_node} ranks; one of the two must divide the other")
    # from here on, counted in ranks of one mesh
    per_node, size = max(1, per_node // sharing), size // sharing
    if ranks == size or ranks % per_node == 0:
        return per_node
    if per_node % ranks:
        raise InputError(f"expert={ranks}: a node has {per_node} ranks; one of the two must divide the other")
    return ranks


def list_expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters of experts that are spread over a mesh; each rank has a different share."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer) and module.mesh is not None]
    return [parameter for layer in layers for parameter in layer.experts.parameters()]


def locate_expert_shares(model: nn.Module) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
    """Locate the parameters of spread experts among those of all experts.

    Maps each parameter's name to the position of its first value, in each dimension, and the shape of the whole.

    Ranks are ordered by expert; ranks that share one hold consecutive slices of dimension 1. A plan may divide further.
    """
    found: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, MoELayer) and layer.mesh is not None:
            owner, part = divmod(layer.mesh.rank, layer.sharers)
            for name, (each, width, *rest) in layer.share_shapes.items():
                begin = (owner * each, part * width, *(0 for _ in rest))
                found[f"{path}.experts.{name}"] = begin, (layer.config.experts, width * layer.sharers, *rest)
    return found


def run_autotuner(model: nn.Module, *, tokens: int) -> Autotuner:
    """Tune on random tokens with the first MoE layer.

    The result is used in all layers, which have the same shape.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer) and module.mesh is not None]
    first = layers[0]
    assert first.mesh is not None
    device = first.experts.up_EHD.device
    # the mean load of an expert, from one rank
    rows = -(-tokens * first.config.top_k // first.config.experts)
    # an expert computes the rows of all ranks
    tuner = Autotuner(measure_network(first.mesh, device), measure_flops(first, rows * first.mesh.size))
    x_TD = torch.randn(tokens, first.width, device=device, dtype=first.experts.up_EHD.dtype)
    decision = tuner.decide(first, rows, tokens, make_trial_timer(first, x_TD))
    for layer in layers:
        layer.use(decision.chosen)
    return tuner


def find_expert_copy(model: nn.Module) -> tuple[int, int]:
    """Find which copy of the experts this rank holds a share of, and how many copies there are."""
    meshes = [layer.mesh for layer in model.modules() if isinstance(layer, MoELayer) and layer.mesh is not None]
    return (meshes[0].copy, meshes[0].copies) if meshes else (0, 1)


class MoEMonitor:
    """Times and counts all MoE layers of a model between two flushes. ``sharing``: ranks that have the same tokens."""

    def __init__(self, layers: Mapping[str, MoELayer], clock: Clock, sharing: int = 1) -> None:
        self._layers, self._sharing = layers, sharing
        self._timer = LayerTimer(clock)
        for layer in layers.values():
            layer.marker = self._timer

    def flush(self, world: World) -> dict[str, Any]:
        """Return the statistics over all ranks since the last flush, and reset them. Every rank calls.

        ``phases``: seconds, mean over ranks. ``load``: per layer. ``efficiency`` has the seconds that the layers waited
        for communication. It also has the experts' TFLOP/s per rank while they ran: of rows that hold a token, and of
        all rows. Without ``phases`` and ``efficiency`` if CUDA graphs were replayed.
        """
        if not self._layers:
            return {}
        complete = self._timer.complete
        total = world.sum(self._timer.flush())
        phases = {name: value / world.size for name, value in total.items()}
        loads, useful, executed = {}, 0.0, 0.0
        for name, layer in self._layers.items():
            load, config = _over_ranks(layer.load.read(), world, self._sharing), layer.config
            loads[name] = load.report()
            # TFLOP of a row on each rank: 2 FLOPs per multiply-add, and backward is twice forward
            flops = 6e-12 * (3 if config.activation == "swiglu" else 2) * layer.width * config.hidden / world.size
            useful, executed = useful + flops * load.kept, executed + flops * load.rows
            layer.load = ExpertLoad(config.experts)
        if not complete:  # the run has one rank
            return {"load": loads}
        seconds = phases[EXPERTS] + phases[f"{EXPERTS}_backward"]
        efficiency = {
            "exposed_communication_s": sum(phases[name] for name in COMMUNICATION),
            "useful_tflops": useful / seconds if seconds else 0.0,
            "executed_tflops": executed / seconds if seconds else 0.0,
        }
        return {"phases": phases, "load": loads, "efficiency": efficiency}


def _over_ranks(mine: LoadTotals, world: World, sharing: int) -> LoadTotals:
    values = (*mine.assigned_E, mine.kept, mine.rows)
    total = world.sum({str(i): value for i, value in enumerate(values)}).values()
    # ranks with the same tokens count each of them
    *assigned, kept, rows = (value / sharing for value in total)
    return LoadTotals(assigned, kept, rows, world.summary(mine.needed_factor)["max"])
