"""What an MoE layer must compute, said slowly: queues and drops in plain Python, experts as dense float64 FFNs on all tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mlhpc.workloads.moe.experts import Weights


def kept_choices(
    experts_TK: Sequence[Sequence[int]], experts: int, capacity: int | None, priority_T: Sequence[float] | None
) -> set[tuple[int, int]]:
    """(token, choice) of every assignment that finds a place: first choices queue first, in token order or by score."""
    tokens = range(len(experts_TK))
    order = list(tokens)
    if priority_T is not None:
        order.sort(key=lambda token: -priority_T[token])  # stable
    queue = [0] * experts
    kept = set()
    for choice in range(len(experts_TK[0]) if experts_TK else 0):
        for token in order:
            expert = experts_TK[token][choice]
            if capacity is None or queue[expert] < capacity:
                kept.add((token, choice))
            queue[expert] += 1
    return kept


def queue_lengths(experts_TK: Sequence[Sequence[int]], experts: int) -> list[int]:
    flat = [expert for row in experts_TK for expert in row]
    return [flat.count(expert) for expert in range(experts)]


def tutel_capacity(factor: float, tokens: int, experts: int, top_k: int, longest: int, alignment: int) -> int:
    """Written from the reference's words, not from the code under test."""
    per_expert = tokens // experts + (1 if tokens % experts else 0)
    if factor > 0:
        capacity = top_k * int(factor * per_expert)
    elif factor == 0:
        capacity = longest
    else:
        capacity = min(longest, top_k * int(-factor * per_expert))
    if alignment > 256:
        alignment = (alignment + 127) // 128 * 128
    while capacity % alignment:
        capacity += 1
    return capacity


@dataclass(frozen=True)
class Dense:
    """One rank's tokens through all experts."""

    y_TD: Tensor
    kept: set[tuple[int, int]]


def dense_layer(
    x_TD: Tensor,
    gate_ED: Tensor,
    weights: Weights,
    activation: str,
    top_k: int,
    capacity: int | None,
    *,
    prioritised: bool = False,
) -> Dense:
    """Every expert on every token, then the weighted sum of what was kept. Differentiable."""
    scores_TE = (x_TD @ gate_ED.t()).softmax(dim=1)
    experts_TK = scores_TE.topk(top_k, dim=1).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    if top_k > 1:
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
    priority = scores_TE.amax(dim=1).tolist() if prioritised else None
    kept = kept_choices(experts_TK.tolist(), len(gate_ED), capacity, priority)
    mask_TK = torch.zeros_like(weights_TK)
    for token, choice in kept:
        mask_TK[token, choice] = 1.0
    share_TE = torch.zeros_like(scores_TE).scatter_add(1, experts_TK, weights_TK * mask_TK)
    y_TD = x_TD * 0
    for expert in range(len(gate_ED)):
        y_TD = y_TD + share_TE[:, expert : expert + 1] * ffn(x_TD, weights, expert, activation)
    return Dense(y_TD, kept)


def ffn(x_TD: Tensor, weights: Weights, expert: int, activation: str) -> Tensor:
    up = x_TD @ weights.up_EHD[expert].t()
    if weights.up_bias_EH is not None:
        up = up + weights.up_bias_EH[expert]
    if activation == "swiglu":
        hidden = F.silu(x_TD @ weights.gate_EHD[expert].t()) * up
    else:
        hidden = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[activation](up)
    out = hidden @ weights.down_EHD[expert]
    return out if weights.down_bias_ED is None else out + weights.down_bias_ED[expert]
