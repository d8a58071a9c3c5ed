"""Predicts times of collectives, pipelining and expert parallelism by alpha-beta models of two kinds of link.

The MoE autotuner and analysis use it; it needs neither torch nor numpy. Below, n is the number of ranks and m the ranks
per node. S is the bytes that one rank sends in one all-to-all, including the part for itself. docs/moe.md has the
formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["linear", "2dh"]

ALGORITHMS: tuple[Algorithm, ...] = ("linear", "2dh")
DEGREES = (1, 2, 4, 8)  # degrees above 8 never paid off, neither in the model nor in Tutel's paper
# Loss of GEMM efficiency for each chunk after the first, because its products are smaller.
SPLIT_LOSS = 0.02
# FLOPs of the backward pass over those of the forward pass: gradients of inputs and of weights.
BACKWARD_FACTOR = 2.0


@dataclass(frozen=True)
class Network:
    """The links of a machine as one rank sees them: latencies per message, bandwidths in bytes/s per rank.

    ``congestion``: the relative slowdown of a linear all-to-all per doubling of the ranks above ``congestion_from``.
    ``two_level_congestion``: that of 2DH. A message of at least ``rendezvous_from`` bytes between nodes waits for its
    receiver. Its latency differs by ``rendezvous_s``, which is negative if copies of smaller messages cost more than
    the wait.
    """

    ranks_per_node: int
    inter_latency_s: float
    inter_bandwidth: float
    intra_latency_s: float
    intra_bandwidth: float
    memory_bandwidth: float
    launch_s: float
    two_level_latency_s: float
    congestion: float = 0.0
    congestion_from: int = 64
    two_level_congestion: float = 0.0
    rendezvous_from: float = math.inf
    rendezvous_s: float = 0.0

    def slowdown(self, ranks: int, algorithm: Algorithm) -> float:
        """Return the factor by which congestion lengthens the inter-node streaming time of an all-to-all."""
        per_doubling = self.congestion if algorithm == "linear" else self.two_level_congestion
        return 1 + per_doubling * max(0.0, math.log2(ranks / self.congestion_from))

    def across_latency_s(self, message_bytes: float, algorithm: Algorithm) -> float:
        """Return the latency of a message of this size to another node."""
        latency_s = self.inter_latency_s if algorithm == "linear" else self.two_level_latency_s
        return latency_s + (self.rendezvous_s if message_bytes >= self.rendezvous_from else 0.0)


# Fitted to Tutel's paper (arXiv:2206.03382; Azure NDm A100 v4, 8 A100 and 8 HDR links per node); docs/moe.md names the
# rows
AZURE_NDV4 = Network(
    ranks_per_node=8,
    inter_latency_s=25e-6,
    inter_bandwidth=23.2e9,
    intra_latency_s=2e-6,
    intra_bandwidth=196e9,
    memory_bandwidth=1.2e12,
    launch_s=15e-6,
    two_level_latency_s=25e-6,
    congestion=0.205,
)


@dataclass(frozen=True)
class Transfer:
    """Seconds of one collective: a latency that does not depend on size, and a part proportional to bytes."""

    latency_s: float
    streaming_s: float

    @property
    def total_s(self) -> float:
        """The time of the whole collective."""
        return self.latency_s + self.streaming_s


@dataclass(frozen=True)
class LayerShape:
    """An MoE layer on one rank. ``tokens`` are the rank's; ``matrices`` is 2 for an FFN, 3 for a gated one."""

    tokens: int
    width: int
    hidden: int
    experts: int
    top_k: int
    matrices: int = 2
    capacity_factor: float = 1.0
    element_bytes: int = 2

    @property
    def rows(self) -> float:
        """Rows sent to experts: this rank's tokens times ``top_k`` times the capacity factor."""
        return self.top_k * self.capacity_factor * self.tokens

    @property
    def dispatch_bytes(self) -> float:
        """S: what one rank sends in one all-to-all at r = 1."""
        return self.rows * self.width * self.element_bytes

    @property
    def expert_bytes(self) -> float:
        """Bytes of the weights of one expert."""
        return float(self.matrices * self.width * self.hidden * self.element_bytes)

    @property
    def forward_flops(self) -> float:
        """FLOPs of the experts' products for this rank's rows, 2 per multiply-add."""
        return 2.0 * self.matrices * self.rows * self.width * self.hidden


@dataclass(frozen=True)
class Execution:
    """One way to execute the layer, and its predicted time of forward and backward pass."""

    r: int
    degree: int
    algorithm: Algorithm
    seconds: float


def predict_linear_all_to_all(network: Network, ranks: int, size_bytes: float) -> Transfer:
    """Predict a linear all-to-all: every rank sends S / n to every other. The slower kind of link decides."""
    local = min(network.ranks_per_node, ranks)
    inter = Transfer(
        network.launch_s + (ranks - local) * network.across_latency_s(size_bytes / ranks, "linear"),
        network.slowdown(ranks, "linear") * size_bytes * (ranks - local) / ranks / network.inter_bandwidth,
    )
    intra = Transfer(
        network.launch_s + (local - 1) * network.intra_latency_s,
        size_bytes * (local - 1) / ranks / network.intra_bandwidth,
    )
    return max(inter, intra, key=lambda part: part.total_s)


def predict_two_level_all_to_all(network: Network, ranks: int, size_bytes: float) -> Transfer:
    """Predict 2DH. Local ranks exchange first, by destination. Then each sends n / m - 1 messages, m times as large."""
    local = min(network.ranks_per_node, ranks)
    nodes = ranks / local
    across_s = (nodes - 1) * network.across_latency_s(size_bytes / nodes, "2dh")
    # Four operations: a strided copy and an exchange in the node, then the same between nodes.
    latency = 4 * network.launch_s + (local - 1) * network.intra_latency_s + across_s
    copies = 4 * size_bytes / network.memory_bandwidth  # two strided copies, each read and written
    intra = size_bytes * (local - 1) / local / network.intra_bandwidth
    inter = network.slowdown(ranks, "2dh") * size_bytes * (1 - 1 / nodes) / network.inter_bandwidth
    return Transfer(latency, copies + intra + inter)


def predict_all_to_all(network: Network, ranks: int, size_bytes: float, algorithm: Algorithm) -> Transfer:
    """Predict the all-to-all by the algorithm of this name."""
    return {"linear": predict_linear_all_to_all, "2dh": predict_two_level_all_to_all}[algorithm](
        network, ranks, size_bytes
    )


def predict_all_gather(network: Network, ranks: int, size_bytes: float) -> Transfer:
    """Predict a ring over consecutive ranks, after which each has ``size_bytes``.

    A reduce-scatter takes the same time.
    """
    # Consecutive ranks of one node use its own links alone; a ring that leaves the node is as slow as its slowest link.
    inside = ranks <= network.ranks_per_node
    latency = network.intra_latency_s if inside else network.inter_latency_s
    bandwidth = network.intra_bandwidth if inside else network.inter_bandwidth
    if ranks == 1:
        return Transfer(0.0, 0.0)
    return Transfer(network.launch_s + (ranks - 1) * latency, size_bytes * (1 - 1 / ranks) / bandwidth)


def predict_all_reduce(network: Network, ranks: int, size_bytes: float) -> Transfer:
    """Predict a ring: a reduce-scatter, then an all-gather."""
    half = predict_all_gather(network, ranks, size_bytes)
    return Transfer(2 * half.latency_s, 2 * half.streaming_s)


def predict_pipelined_s(compute_s: float, transfer: Transfer, degree: int, *, split_loss: float = SPLIT_LOSS) -> float:
    """Predict dispatch, experts and combine of one pass in ``degree`` chunks, on one transfer and one compute stream.

    The longer of two cases counts. Either transfers run without a pause, or computation does after the first chunk.
    """
    # Two transfers a chunk: dispatch and combine
    communication_bound = 2 * (degree * transfer.latency_s + transfer.streaming_s)
    computing = compute_s * (1 + split_loss * (degree - 1))
    # The first dispatch and the last combine have nothing to hide behind.
    return max(communication_bound, computing + 2 * (transfer.latency_s + transfer.streaming_s / degree))


def compute_traffic_bytes(shape: LayerShape, ranks: int, r: int) -> float:
    """Return bytes that a rank moves in both passes: tokens four times, gathered weights and scattered gradients."""
    if r == 0:
        return 2 * shape.experts * shape.expert_bytes * (1 - 1 / ranks)
    sharers = max(1, ranks // shape.experts)
    # Dispatch and combine, in the forward and in the backward pass.
    return 4 * r * shape.dispatch_bytes + 2 * shape.expert_bytes / r * (1 - r / sharers)


def choose_r(shape: LayerShape, ranks: int) -> int:
    """Return the r with the least traffic; of equal ones the smallest."""
    return min(list_valid_r(shape.experts, ranks), key=lambda r: (compute_traffic_bytes(shape, ranks, r), r))


def list_valid_r(experts: int, ranks: int) -> tuple[int, ...]:
    """List the possible r: 0 and the divisors of the ranks per expert. These are at least 1."""
    sharers = max(1, ranks // experts)
    return (0, *(r for r in range(1, sharers + 1) if sharers % r == 0))


def predict_layer_time_s(
    shape: LayerShape, network: Network, ranks: int, flops_per_s: float, *, r: int, degree: int, algorithm: Algorithm
) -> float:
    """Predict the time of forward and backward pass of the experts with all communication.

    Gate and permutation are left out: they take the same time for every r, degree and algorithm.
    """
    compute_s = shape.forward_flops / flops_per_s
    if r == 0:  # no tokens are sent: every rank gathers all experts, and again for the backward pass
        weights = predict_all_gather(network, ranks, shape.experts * shape.expert_bytes)
        return (1 + BACKWARD_FACTOR) * compute_s + 2 * weights.total_s
    # The ranks of an expert form r groups: tokens go to all of them, and each gathers a part 1/r of the weights.
    block = max(1, ranks // shape.experts) // r
    local_experts = max(1, shape.experts // ranks)
    weights = predict_all_gather(network, block, local_experts * shape.expert_bytes / r)
    # Of a chunk another kind of link may be the slower one than of the whole: the model is evaluated for the chunk
    chunk = predict_all_to_all(network, ranks, r * shape.dispatch_bytes / degree, algorithm)
    transfer = Transfer(chunk.latency_s, degree * chunk.streaming_s)
    passes = (predict_pipelined_s(factor * compute_s, transfer, degree) for factor in (1.0, BACKWARD_FACTOR))
    return sum(passes) + 2 * weights.total_s


def list_executions(
    shape: LayerShape,
    network: Network,
    ranks: int,
    flops_per_s: float,
    *,
    degrees: Iterable[int] = DEGREES,
    algorithms: Iterable[Algorithm] = ALGORITHMS,
) -> list[Execution]:
    """List every way to execute the layer, fastest first. r = 0 occurs once: it uses no all-to-all."""
    choices = [
        Execution(
            0, 1, "linear", predict_layer_time_s(shape, network, ranks, flops_per_s, r=0, degree=1, algorithm="linear")
        )
    ]
    for r in list_valid_r(shape.experts, ranks)[1:]:
        for degree in degrees:
            for algorithm in algorithms:
                seconds = predict_layer_time_s(
                    shape, network, ranks, flops_per_s, r=r, degree=degree, algorithm=algorithm
                )
                choices.append(Execution(r, degree, algorithm, seconds))
    return sorted(choices, key=lambda choice: choice.seconds)


def compute_einsum_flops(tokens: int, width: int, top_k: int, capacity_factor: float = 1.0) -> float:
    """Return FLOPs of GShard's dense encode and decode, both passes. They are 3 x 2 products of (T, kfT) and (T, D)."""
    return 3 * 2 * 2.0 * tokens * (top_k * capacity_factor * tokens) * width
