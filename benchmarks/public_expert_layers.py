"""Public layers without drops as contestants of `kernels`: same tokens, chosen experts, gates and weights. No main.

Their code comes from clones beside the project (`references`): ScatterMoE (shawntan/scattermoe), which is all Triton; MegaBlocks
(databricks/megablocks, `megablocks_layer`), with torch's grouped products; Tutel, where ``import tutel`` works: its encode, batched
products padded to the longest queue, as its experts have them, and its decode.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import megablocks_layer
from benchmarks.references import find_clone
from mlhpc.workloads.moe.experts import Weights
from mlhpc.workloads.moe.router import DispatchPlan, Routing

Contestant = tuple[Callable[[], Tensor], list[Tensor]]
SCATTERMOE = "shawntan/scattermoe"


def list_peers(
    x: Tensor, routing: Routing, plan: DispatchPlan, weights: Weights, activation: str
) -> dict[str, Contestant | str]:
    """Forward passes and what gradients are wanted of, tokens and gates first; or why a peer cannot take part."""
    found: dict[str, Contestant | str] = {}
    for name, build in {"scattermoe": _scattermoe, "megablocks": _megablocks, "tutel": _tutel}.items():
        try:
            found[name] = build(x, routing, plan, weights, activation)
        except Exception as error:  # each peer has its own needs, and the others still count
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:150]
    return found


def _clone(repository: str) -> Path:
    clone = find_clone(repository)
    if clone is None:
        raise FileNotFoundError(f"no clone of {repository} in MLHPC_REFERENCES")
    return clone


def _leaf(weight: Tensor) -> Tensor:
    return weight.detach().contiguous().clone().requires_grad_()


def _scattermoe(x: Tensor, routing: Routing, plan: DispatchPlan, weights: Weights, activation: str) -> Contestant:
    sys.path.insert(0, str(_clone(SCATTERMOE)))
    mlp: Any = importlib.import_module("scattermoe.mlp")
    experts, hidden, width = weights.up_EHD.shape
    kind = mlp.MLP if weights.gate_EHD is None else mlp.GLUMLP
    function = F.relu if weights.gate_EHD is None else F.silu
    with torch.device("meta"):  # its own weights, which are replaced, would be drawn on the host
        layer = kind(width, hidden, experts, plan.rows // plan.tokens, activation=function)
    both = [weight for weight in (weights.up_EHD, weights.gate_EHD) if weight is not None]
    layer.experts.weight = torch.nn.Parameter(torch.cat(both, 1).detach())
    layer.output_experts.weight = torch.nn.Parameter(weights.down_EHD.detach().transpose(1, 2).contiguous())
    # it multiplies gates and rows, so they have one type
    call = lambda: layer(x, routing.weights_TK.to(x.dtype), routing.experts_TK)  # noqa: E731
    return call, [x, routing.weights_TK, layer.experts.weight, layer.output_experts.weight]


def _megablocks(x: Tensor, routing: Routing, plan: DispatchPlan, weights: Weights, activation: str) -> Contestant:
    experts, hidden, width = weights.up_EHD.shape
    sizes = width, hidden, experts, plan.rows // plan.tokens
    products = "grouped_mm" if x.is_cuda else "loop"
    layer = megablocks_layer.layer(
        _clone(megablocks_layer.REPOSITORY), *sizes, products, activation, x.dtype, x.device.type
    ).experts
    mlp, gate = layer.mlp, weights.gate_EHD
    same = {"w1": weights.up_EHD, "w2": weights.down_EHD} if gate is None else {}
    same |= {"w1": gate, "v1": weights.up_EHD, "w2": weights.down_EHD} if gate is not None else {}
    for name, weight in same.items():
        setattr(mlp, name, torch.nn.Parameter(weight.detach().reshape(-1, width)))
    chosen_TK = routing.experts_TK.int()
    call = lambda: layer.forward_once(x, routing.weights_TK.to(x.dtype), chosen_TK)[0]  # noqa: E731
    return call, [x, routing.weights_TK, *(getattr(mlp, name) for name in same)]


def _tutel(x: Tensor, routing: Routing, plan: DispatchPlan, weights: Weights, activation: str) -> Contestant:
    if importlib.util.find_spec("tutel") is None:
        raise ModuleNotFoundError("tutel is not installed")
    fast: Any = importlib.import_module("tutel.impls.fast_dispatch")
    experts, _, width = weights.up_EHD.shape
    begin_E = plan.rows_E.cumsum(0) - plan.rows_E
    turn_TK = plan.place_TK - begin_E[routing.experts_TK]
    capacity = int(plan.rows_E.max())
    chosen, turns = ([part.contiguous() for part in each.unbind(1)] for each in (routing.experts_TK, turn_TK))
    up, down, gate = (None if w is None else _leaf(w) for w in (weights.up_EHD, weights.down_EHD, weights.gate_EHD))
    assert up is not None
    assert down is not None

    def call() -> Tensor:
        gates = [part.contiguous() for part in routing.weights_TK.unbind(1)]
        dispatcher = fast.TutelMoeFastDispatcher(experts, capacity, width, dispatch_dtype=x.dtype)
        dispatcher.update(chosen, turns, gates, capacity=capacity)
        rows_ECD = dispatcher.encode(x).view(experts, capacity, width)
        inner = torch.matmul(rows_ECD, up.transpose(1, 2))
        inner = F.relu(inner) if gate is None else F.silu(torch.matmul(rows_ECD, gate.transpose(1, 2))) * inner
        return dispatcher.decode(torch.matmul(inner, down).view(-1, width)).view(-1, width)

    return call, [x, routing.weights_TK, *(each for each in (up, down, gate) if each is not None)]
