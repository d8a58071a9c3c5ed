"""An MoE layer and its all-to-alls simulated message by message. Pure: no files.

Each rank's ports send and receive one message at a time. With equal loads the results equal the closed forms of
`suite.performance.cost_model`; unlike those, a simulation can have unequal loads. Formulas and results: docs/moe.md.
Array dimensions: R ranks, E experts, N nodes, D ranks of a node ("devices").
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from suite.performance.cost_model import BACKWARD_FACTOR, SPLIT_LOSS, Algorithm, LayerShape, Network

Floats = NDArray[np.float64]


def simulated_all_to_all(
    network: Network, begin_R: Floats, bytes_RR: Floats, algorithm: Algorithm, *, ranks_per_node: int | None = None
) -> Floats:
    """Seconds at which each rank has sent and received everything; it begins at ``begin_R`` and sends ``bytes_RR[from, to]``.

    A rank has one port to other nodes and one inside its node. A port sends one message at a time and receives one at a
    time, in the order of a schedule that has no contention if all messages are equal.
    """
    simulate = {"linear": _linear, "2dh": _two_level}[algorithm]
    return simulate(network, begin_R, bytes_RR, min(ranks_per_node or network.ranks_per_node, len(begin_R)))


def simulated_layer_s(
    shape: LayerShape,
    network: Network,
    ranks: int,
    flops_per_s: float,
    *,
    r: int,
    degree: int,
    algorithm: Algorithm,
    load_E: Floats | None = None,
    split_loss: float = SPLIT_LOSS,
) -> float:
    """Seconds of the slowest rank for forward and backward pass, as `cost_model.layer_s`.

    ``load_E`` is the share of the rows that each expert gets (sum 1); None: equal shares.
    """
    load = np.full(shape.experts, 1 / shape.experts) if load_E is None else load_E
    compute_s = shape.forward_flops / flops_per_s
    begin_R = np.zeros(ranks)
    if r == 0:
        gathered_R = _ring(network, begin_R, shape.experts * shape.expert_bytes)
        computed_R = gathered_R + (1 + BACKWARD_FACTOR) * compute_s
        return float(_ring(network, computed_R, shape.experts * shape.expert_bytes).max())
    sharers, local = max(1, ranks // shape.experts), max(1, shape.experts // ranks)
    parts = sharers // r
    # The ranks of one expert form r groups of sharers / r ranks. Each group gets every row once, divided among its ranks.
    share_R = np.repeat(load, sharers) / parts if ranks >= shape.experts else load.reshape(ranks, local).sum(1)
    row_bytes = shape.rows * shape.width * shape.element_bytes
    bytes_RR = np.broadcast_to(row_bytes * share_R, (ranks, ranks))
    compute_R = compute_s * ranks * share_R / r
    weights = local * shape.expert_bytes / r
    now_R = _blocks(network, begin_R, weights, parts)
    for factor in (1.0, BACKWARD_FACTOR):
        work_R = factor * compute_R * (1 + split_loss * (degree - 1))
        now_R = _pipelined(network, now_R, bytes_RR, work_R, degree, algorithm)
    return float(_blocks(network, now_R, weights, parts).max())


def _linear(network: Network, begin_R: Floats, bytes_RR: Floats, per_node: int) -> Floats:
    """Every rank sends to every other rank directly."""
    ranks = len(begin_R)
    slow = network.slowdown(ranks, "linear")
    return _rounds(
        begin_R + network.launch_s,
        bytes_RR,
        per_node,
        across=(_latency_RR(network, bytes_RR, "linear"), slow / network.inter_bandwidth),
        inside=(np.full_like(bytes_RR, network.intra_latency_s), 1 / network.intra_bandwidth),
    )


def _latency_RR(network: Network, bytes_RR: Floats, algorithm: Algorithm) -> Floats:
    """Latency in s of each message between nodes, which depends on its bytes."""
    small, large = (network.across_latency_s(size, algorithm) for size in (0.0, network.rendezvous_from))
    return np.where(bytes_RR >= network.rendezvous_from, large, small)


def _two_level(network: Network, begin_R: Floats, bytes_RR: Floats, per_node: int) -> Floats:
    """2DH: copy, exchange inside the node, copy, exchange across nodes.

    Inside a node, data go to the rank ("relay") that has the destination's local rank, so that across nodes each rank
    exchanges only with the ranks of the same local rank.
    """
    ranks = len(begin_R)
    nodes = ranks // per_node
    bytes_NDND = bytes_RR.reshape(nodes, per_node, nodes, per_node)  # [from node, from device, to node, to device]
    relayed_RN = bytes_NDND.sum(1).transpose(0, 2, 1).reshape(ranks, nodes)  # [relay = (from node, to device), to node]
    inside_NDD = bytes_NDND.sum(2)  # [from node, from device, to device]
    inside_RR = np.zeros((ranks, ranks))
    across_RR = np.zeros((ranks, ranks))
    for node in range(nodes):
        rows = slice(node * per_node, (node + 1) * per_node)
        inside_RR[rows, rows] = inside_NDD[node]
    for device in range(per_node):
        members = np.arange(nodes) * per_node + device
        across_RR[np.ix_(members, members)] = relayed_RN[members]
    launches = 2 * network.launch_s
    links = {
        "across": (_latency_RR(network, across_RR, "2dh"), network.slowdown(ranks, "2dh") / network.inter_bandwidth),
        "inside": (np.full_like(inside_RR, network.intra_latency_s), 1 / network.intra_bandwidth),
    }
    copied_R = begin_R + launches + 2 * bytes_RR.sum(1) / network.memory_bandwidth  # a copy reads and writes each byte
    relay_R = _rounds(copied_R, inside_RR, per_node, only="inside", **links)
    copied_R = relay_R + launches + 2 * relayed_RN.sum(1) / network.memory_bandwidth
    return _rounds(copied_R, across_RR, per_node, only="across", **links)


def _rounds(
    begin_R: Floats,
    bytes_RR: Floats,
    per_node: int,
    *,
    across: tuple[Floats, float],
    inside: tuple[Floats, float],
    only: Literal["inside", "across"] | None = None,
) -> Floats:
    """Seconds at which each rank is done, if messages go in rounds, one per (shift of node, shift of device).

    ``across`` and ``inside`` are (latency in s of a message from each rank to each, s per byte). A message starts when its
    sender and its receiver are free.
    The two kinds of ports work at the same time.
    """
    ranks = len(begin_R)
    nodes = ranks // per_node
    node_R, device_R = np.divmod(np.arange(ranks), per_node)
    finish_R = begin_R
    for kind, (latency_RR, per_byte) in (("inside", inside), ("across", across)):
        if only not in (None, kind):
            continue
        sends_R, receives_R = begin_R.copy(), begin_R.copy()
        shifts_N = range(1) if kind == "inside" else range(1, nodes)
        shifts_D = range(1, per_node) if kind == "inside" else range(1 if only == "across" else per_node)
        for by_node in shifts_N:
            for by_device in shifts_D:
                to_R = (node_R + by_node) % nodes * per_node + (device_R + by_device) % per_node
                wire_R = latency_RR[np.arange(ranks), to_R] + bytes_RR[np.arange(ranks), to_R] * per_byte
                end_R = np.maximum(sends_R, receives_R[to_R]) + wire_R
                sends_R = end_R
                receives_R = np.empty_like(end_R)
                receives_R[to_R] = end_R
        finish_R = np.maximum(finish_R, np.maximum(sends_R, receives_R))
    return finish_R


def _pipelined(
    network: Network, begin_R: Floats, bytes_RR: Floats, work_R: Floats, degree: int, algorithm: Algorithm
) -> Floats:
    """One pass (dispatch, experts, combine) cut in ``degree`` chunks, so that transfers overlap with computation.

    Each rank has one stream of transfers and one of computation.
    """
    chunk_RR = bytes_RR / degree
    wire_R, arrived = begin_R, []
    for _ in range(degree):
        wire_R = simulated_all_to_all(network, wire_R, chunk_RR, algorithm)
        arrived.append(wire_R)
    computed_R = begin_R
    for there_R in arrived:
        computed_R = np.maximum(computed_R, there_R) + work_R / degree
        wire_R = simulated_all_to_all(network, np.maximum(wire_R, computed_R), chunk_RR.T, algorithm)
    return wire_R


def _ring(network: Network, begin_R: Floats, size_bytes: float) -> Floats:
    """Ring all-gather after which each rank has ``size_bytes``; a reduce-scatter takes the same n - 1 steps."""
    ranks = len(begin_R)
    if ranks == 1:
        return begin_R
    per_node = min(network.ranks_per_node, ranks)
    crossing_R = (
        np.arange(ranks) // per_node != np.roll(np.arange(ranks), 1) // per_node
    )  # the previous rank's node differs
    chunk = size_bytes / ranks
    step_R = np.where(
        crossing_R,
        network.inter_latency_s + chunk / network.inter_bandwidth,
        network.intra_latency_s + chunk / network.intra_bandwidth,
    )
    now_R = begin_R + network.launch_s
    for _ in range(ranks - 1):
        now_R = np.maximum(now_R, np.roll(now_R, 1)) + step_R
    return now_R


def _blocks(network: Network, begin_R: Floats, size_bytes: float, block: int) -> Floats:
    """`_ring` in each block of consecutive ranks. A block that lies inside a node uses only links inside the node."""
    if block == 1:
        return begin_R
    return np.concatenate([_ring(network, part, size_bytes) for part in begin_R.reshape(-1, block)])
