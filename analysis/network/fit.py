"""A machine's links fitted to sweeps of `mlhpc moe-bench --sweep-network`, and an MoE layer simulated on them. Reads JSON only.

`fit_sweep` makes a `cost_model.Network` from measured all-to-alls and keeps some sizes out to say how wrong it is. The
`simulated_*` functions run messages over each rank's ports one by one: balanced they equal the closed forms, and unlike
them they know unequal loads. n ranks, m per node, R ranks as an array dimension. Formulas and results: docs/moe.md.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from numpy.typing import NDArray

from suite.performance.cost_model import (
    ALGORITHMS,
    AZURE_NDV4,
    BACKWARD_FACTOR,
    SPLIT_LOSS,
    Algorithm,
    Choice,
    LayerShape,
    Network,
    all_to_all,
    best_r,
    einsum_flops,
    layer_s,
    linear_all_to_all,
    pipelined_s,
    ranked,
    two_level_all_to_all,
)

SWEEP_KIND = "mlhpc all-to-all sweep"
SWEEP_VERSION = 2
HELD_OUT_EVERY = 3  # of the sizes of a grid: one of three is left out of the fit
EXTRAPOLATED_RANKS = (64, 512, 2048, 4096)
PRIOR = (
    1e-2  # pulls a parameter that the data say nothing about to its start: weight of a factor e against one measurement
)
KIB, MIB = 2.0**10, 2.0**20
IDEAS = ("masks (GShard)", "sorted rows", "and 2DH", "and best r", "and pipelining")  # each keeps those before it

Floats = NDArray[np.float64]
Kind = Literal["FIT", "PRED", "MISMATCH", "OPEN"]


@dataclass(frozen=True)
class Measurement:
    """One all-to-all: median of ``repeats``, of the slowest rank. ``size_bytes`` one rank sends, its own part included."""

    ranks: int
    ranks_per_node: int
    algorithm: Algorithm
    size_bytes: float
    seconds: float
    fastest_s: float
    slowest_s: float
    repeats: int


@dataclass(frozen=True)
class LayerRun:
    """Forward and backward of the layer, executed one way: median of ``repeats``, of the slowest rank."""

    r: int
    degree: int
    algorithm: Algorithm
    seconds: float
    repeats: int


@dataclass(frozen=True)
class Layer:
    """The MoE layer on one grid. ``outside_s``: gate, permutation and counts of one pass; ``flops_per_s`` of one rank."""

    ranks: int
    shape: LayerShape
    flops_per_s: float
    outside_s: float
    runs: tuple[LayerRun, ...]


@dataclass(frozen=True)
class Sweep:
    """What one file holds. ``nodes`` is what the launch had: fewer than ranks / ranks_per_node if nodes were pretended."""

    name: str
    ranks: int
    ranks_per_node: int
    nodes: int
    cores_per_node: int
    backend: str
    device: str
    memory_bandwidth: float
    measurements: tuple[Measurement, ...]
    layers: tuple[Layer, ...]

    @property
    def pretended(self) -> bool:
        """True if what counts as a link between nodes was one inside a node."""
        return self.nodes < self.ranks // self.ranks_per_node

    def describe(self) -> str:
        """One line."""
        pretended = ", nodes pretended" if self.pretended else ""
        crowded = max(self.ranks // self.nodes, 1) > self.cores_per_node and self.device == "cpu"
        return (
            f"{self.name}: {self.ranks} ranks, {self.ranks_per_node} per node{pretended}, {self.backend}, {self.device}"
            + (f", more ranks than the {self.cores_per_node} cores" if crowded else "")
        )


@dataclass(frozen=True)
class Compared:
    """A measurement beside the model's seconds."""

    measurement: Measurement
    model_s: float

    @property
    def error(self) -> float:
        """Model over measurement, minus 1."""
        return self.model_s / self.measurement.seconds - 1


@dataclass(frozen=True)
class Fit:
    """``fitted`` went into the network, ``held_out`` did not, ``next_grid`` is the largest grid predicted from the smaller ones.

    ``r_squared`` is of log seconds over ``fitted``.
    """

    sweep: Sweep
    network: Network
    r_squared: float
    fitted: tuple[Compared, ...]
    held_out: tuple[Compared, ...]
    next_grid: tuple[Compared, ...]

    @property
    def flops_per_s(self) -> float:
        """Of one rank on the largest grid."""
        return self.sweep.layers[-1].flops_per_s

    def grid_network(self, ranks: int) -> Network:
        """The network of the first ranks: fewer than a node has are one node."""
        return replace(self.network, ranks_per_node=min(self.network.ranks_per_node, ranks))

    def layer_shape(self, ranks: int) -> LayerShape:
        """The measured layer with as many experts per rank as on the largest grid."""
        last = self.sweep.layers[-1]
        return replace(last.shape, experts=max(1, last.shape.experts * ranks // last.ranks))


def is_sweep(path: Path) -> bool:
    """True for a JSON file that says it is a sweep; never raises for what it is not."""
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("kind") == SWEEP_KIND


def read_sweep(path: Path) -> Sweep:
    """A sweep's file. ValueError names the file and what is wrong with it."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("kind") != SWEEP_KIND:
        raise ValueError(f"{path}: not a sweep; `mlhpc moe-bench --sweep-network -o FILE` makes one")
    if document.get("version") != SWEEP_VERSION:
        raise ValueError(f"{path}: sweep of version {document.get('version')}, this reads {SWEEP_VERSION}")
    try:
        return _sweep(path.stem, document)
    except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError, statistics.StatisticsError) as error:
        raise ValueError(f"{path}: damaged sweep: {type(error).__name__} {error}") from None


def fit_sweep(sweep: Sweep) -> Fit:
    """Least squares in log seconds (Hockney's form, two levels). ValueError if no grid has several nodes."""
    if all(m.ranks <= m.ranks_per_node for m in sweep.measurements):
        raise ValueError(
            f"{sweep.name}: no all-to-all across nodes ({sweep.ranks} ranks, {sweep.ranks_per_node} per node), so nothing "
            "to extrapolate from: more nodes, or --ranks-per-node to count ranks of one node as several"
        )
    kept, out = _split(sweep.measurements)
    network = _fitted(sweep, kept)
    fitted = tuple(_compare(network, kept))
    across = sorted({m.ranks for m in sweep.measurements if m.ranks > m.ranks_per_node})
    smaller = [m for m in sweep.measurements if m.ranks < across[-1]]
    largest = [m for m in sweep.measurements if m.ranks == across[-1]]
    next_grid = _compare(_fitted(sweep, smaller), largest) if len(across) > 1 else ()
    return Fit(sweep, network, _r_squared(fitted), fitted, tuple(_compare(network, out)), tuple(next_grid))


def typical_error(compared: Iterable[Compared]) -> tuple[float, float]:
    """Median and largest size of the errors: 0.1 is 10 %. NaN without measurements."""
    errors = [abs(item.error) for item in compared]
    return (statistics.median(errors), max(errors)) if errors else (float("nan"), float("nan"))


def crossover_bytes(network: Network, ranks: int, up_to: float = 2.0**34) -> float | None:
    """The largest bytes per rank at which 2DH is the faster all-to-all, or None if it never is; ``up_to`` if always."""
    sizes = np.geomspace(16.0, up_to, 400)
    wins = [s for s in sizes if _a2a_s(network, ranks, s, "2dh") < _a2a_s(network, ranks, s, "linear")]
    return float(max(wins)) if wins else None


def predicted_layer_s(layer: Layer, network: Network, r: int, degree: int, algorithm: Algorithm) -> float:
    """Closed form of a layer that was measured, with its gate and permutation."""
    parts = layer_s(layer.shape, network, layer.ranks, layer.flops_per_s, r=r, degree=degree, algorithm=algorithm)
    return layer.outside_s + parts


def best_choice(fit: Fit, shape: LayerShape, ranks: int) -> Choice:
    """The fastest predicted way to execute a layer on the fitted machine."""
    return ranked(shape, fit.network, ranks, fit.flops_per_s)[0]


def ideas_s(fit: Fit, ranks: int) -> dict[str, float]:
    """Predicted seconds of the layer's forward and backward with one idea of Tutel after the other, on as many ranks.

    The layer is `Fit.layer_shape`; gate and permutation are taken from the largest grid.
    """
    shape, rate, outside_s = fit.layer_shape(ranks), fit.flops_per_s, fit.sweep.layers[-1].outside_s
    ways = ranked(shape, fit.network, ranks, rate)
    plain = layer_s(shape, fit.network, ranks, rate, r=1, degree=1, algorithm="linear")
    masks = einsum_flops(shape.tokens, shape.width, shape.top_k, shape.capacity_factor) / rate
    chain = {
        IDEAS[0]: masks + plain,
        IDEAS[1]: plain,
        IDEAS[2]: min(way.seconds for way in ways if way.r == 1 and way.degree == 1),
        IDEAS[3]: min(way.seconds for way in ways if way.degree == 1),
        IDEAS[4]: ways[0].seconds,
    }
    return {idea: outside_s + seconds for idea, seconds in chain.items()}


def measured_ideas_s(layer: Layer) -> dict[str, LayerRun]:
    """What of `ideas_s` was measured on one grid: the fastest run that each idea allows."""
    plain = [run for run in layer.runs if (run.r, run.degree, run.algorithm) == (1, 1, "linear")]
    allowed = {
        IDEAS[1]: plain,
        IDEAS[2]: [run for run in layer.runs if run.r == 1 and run.degree == 1],
        IDEAS[3]: [run for run in layer.runs if run.degree == 1],
        IDEAS[4]: list(layer.runs),
    }
    return {idea: min(runs, key=lambda run: run.seconds) for idea, runs in allowed.items() if runs}


# --- simulation -------------------------------------------------------------------------------------------------------


def simulated_all_to_all(
    network: Network, begin_R: Floats, bytes_RR: Floats, algorithm: Algorithm, *, ranks_per_node: int | None = None
) -> Floats:
    """When each rank has sent and received everything, if it begins at ``begin_R`` and sends ``bytes_RR[from, to]``.

    A rank has a port to the other nodes and one inside its node, each sends one message at a time and receives one at a
    time, in the order of a schedule that is free of contention if all messages are equal.
    """
    run = {"linear": _linear, "2dh": _two_level}[algorithm]
    return run(network, begin_R, bytes_RR, min(ranks_per_node or network.ranks_per_node, len(begin_R)))


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
    """Forward and backward of the slowest rank, as `cost_model.layer_s`, with ``load_E`` of the rows to each expert (sum 1)."""
    load = np.full(shape.experts, 1 / shape.experts) if load_E is None else load_E
    compute_s = shape.forward_flops / flops_per_s
    begin_R = np.zeros(ranks)
    if r == 0:
        gathered_R = _ring(network, begin_R, shape.experts * shape.expert_bytes)
        computed_R = gathered_R + (1 + BACKWARD_FACTOR) * compute_s
        return float(_ring(network, computed_R, shape.experts * shape.expert_bytes).max())
    sharers, local = max(1, ranks // shape.experts), max(1, shape.experts // ranks)
    parts = sharers // r
    # ranks of one expert are r classes of s / r ranks; a class gets every row once, divided among its ranks
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
    ranks = len(begin_R)
    slow = network.slowdown(ranks)
    return _rounds(
        begin_R + network.launch_s,
        bytes_RR,
        per_node,
        across=(network.inter_latency_s, slow / network.inter_bandwidth),
        inside=(network.intra_latency_s, 1 / network.intra_bandwidth),
    )


def _two_level(network: Network, begin_R: Floats, bytes_RR: Floats, per_node: int) -> Floats:
    """Copy, exchange inside the node by destination's local rank, copy, exchange across nodes."""
    ranks = len(begin_R)
    nodes = ranks // per_node
    by_place = bytes_RR.reshape(nodes, per_node, nodes, per_node)  # [from node, from device, to node, to device]
    held = by_place.sum(1).transpose(0, 2, 1).reshape(ranks, nodes)  # [relay = from node and to device, to node]
    first = np.zeros((ranks, ranks))
    second = np.zeros((ranks, ranks))
    inside = by_place.sum(2)  # [from node, from device, to device]
    for node in range(nodes):
        rows = slice(node * per_node, (node + 1) * per_node)
        first[rows, rows] = inside[node]
    for device in range(per_node):
        members = np.arange(nodes) * per_node + device
        second[np.ix_(members, members)] = held[members]
    launches = 2 * network.launch_s
    both = {
        "across": (network.two_level_latency_s, 1 / network.inter_bandwidth),
        "inside": (network.intra_latency_s, 1 / network.intra_bandwidth),
    }
    copied_R = begin_R + launches + 2 * bytes_RR.sum(1) / network.memory_bandwidth
    there_R = _rounds(copied_R, first, per_node, only="inside", **both)
    copied_R = there_R + launches + 2 * held.sum(1) / network.memory_bandwidth
    return _rounds(copied_R, second, per_node, only="across", **both)


def _rounds(
    begin_R: Floats,
    bytes_RR: Floats,
    per_node: int,
    *,
    across: tuple[float, float],
    inside: tuple[float, float],
    only: Literal["inside", "across"] | None = None,
) -> Floats:
    """Messages in rounds (shift of node, shift of device); a message starts when its sender and its receiver are free."""
    ranks = len(begin_R)
    nodes = ranks // per_node
    node_R, device_R = np.divmod(np.arange(ranks), per_node)
    finish_R = begin_R
    for kind, (latency, per_byte) in (("inside", inside), ("across", across)):
        if only not in (None, kind):
            continue
        sends_R, receives_R = begin_R.copy(), begin_R.copy()
        shifts_N = range(1) if kind == "inside" else range(1, nodes)
        shifts_D = range(1, per_node) if kind == "inside" else range(1 if only == "across" else per_node)
        for by_node in shifts_N:
            for by_device in shifts_D:
                to_R = (node_R + by_node) % nodes * per_node + (device_R + by_device) % per_node
                end_R = np.maximum(sends_R, receives_R[to_R]) + latency + bytes_RR[np.arange(ranks), to_R] * per_byte
                sends_R = end_R
                receives_R = np.empty_like(end_R)
                receives_R[to_R] = end_R
        finish_R = np.maximum(finish_R, np.maximum(sends_R, receives_R))
    return finish_R


def _pipelined(
    network: Network, begin_R: Floats, bytes_RR: Floats, work_R: Floats, degree: int, algorithm: Algorithm
) -> Floats:
    """Dispatch, experts, combine of one pass in chunks: one stream of transfers and one of computation on each rank."""
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
    """All-gather that ends with ``size_bytes`` on each rank, or its mirror image: n - 1 steps to the next rank."""
    ranks = len(begin_R)
    if ranks == 1:
        return begin_R
    per_node = min(network.ranks_per_node, ranks)
    crossing_R = np.arange(ranks) // per_node != np.roll(np.arange(ranks), 1) // per_node  # from the rank before
    chunk = size_bytes / ranks
    step_R = np.where(
        crossing_R,
        network.inter_latency_s + chunk / network.inter_bandwidth,
        network.intra_latency_s + chunk / network.intra_bandwidth,
    )
    have_R = begin_R + network.launch_s
    for _ in range(ranks - 1):
        have_R = np.maximum(have_R, np.roll(have_R, 1)) + step_R
    return have_R


def _blocks(network: Network, begin_R: Floats, size_bytes: float, block: int) -> Floats:
    """`_ring` in each block of consecutive ranks. A block inside a node uses its links alone."""
    if block == 1:
        return begin_R
    return np.concatenate([_ring(network, part, size_bytes) for part in begin_R.reshape(-1, block)])


# --- fit --------------------------------------------------------------------------------------------------------------

PARAMETERS = (
    "launch_s",
    "intra_latency_s",
    "intra_bandwidth",
    "inter_latency_s",
    "inter_bandwidth",
    "two_level_latency_s",
)


def _fitted(sweep: Sweep, measurements: Sequence[Measurement]) -> Network:
    """Levenberg and Marquardt's method in the logarithms of the parameters."""
    seen = np.log([m.seconds for m in measurements])
    small = min(m.seconds for m in measurements)
    largest = max(measurements, key=lambda m: m.size_bytes)
    rate = largest.size_bytes / largest.seconds
    names = (*PARAMETERS, "congestion") if sweep.ranks > Network.congestion_from else PARAMETERS
    start = np.log([small / 2, small / 2, rate, small / 2, rate, small / 2, 0.1][: len(names)])

    def network(logs: Floats) -> Network:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        return Network(ranks_per_node=sweep.ranks_per_node, memory_bandwidth=sweep.memory_bandwidth, **values)

    def residuals(logs: Floats) -> Floats:
        own = network(logs)
        model = np.log([_a2a_s(_for(own, m), m.ranks, m.size_bytes, m.algorithm) for m in measurements])
        return np.concatenate([model - seen, PRIOR * (logs - start)])

    return network(_minimised(residuals, start))


def _minimised(residuals: Callable[[Floats], Floats], start: Floats, steps: int = 200) -> Floats:
    """The parameters with the least sum of squares; numeric derivatives."""
    at, damping = start, 1e-2
    value = residuals(at)
    for _ in range(steps):
        jacobian = np.stack([(residuals(at + shift) - value) / 1e-5 for shift in 1e-5 * np.eye(len(at))], axis=1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ value
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slope)
        tried = residuals(at + step)
        if tried @ tried < value @ value:
            at, gain, value, damping = at + step, value @ value - tried @ tried, tried, damping / 3
            if gain < 1e-12:
                break
        elif damping > 1e9:
            break
        else:
            damping *= 4
    return at


def _for(network: Network, measurement: Measurement) -> Network:
    """A grid with fewer ranks than a node is one node."""
    return replace(network, ranks_per_node=min(network.ranks_per_node, measurement.ranks_per_node))


def _a2a_s(network: Network, ranks: int, size_bytes: float, algorithm: Algorithm) -> float:
    return all_to_all(network, ranks, size_bytes, algorithm).total_s


def _split(measurements: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Those to fit and those to keep out: every third size, in the middle of three, never the smallest or largest."""
    sizes = sorted({m.size_bytes for m in measurements})
    out = {size for i, size in enumerate(sizes) if i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 and 0 < i < len(sizes) - 1}
    return [m for m in measurements if m.size_bytes not in out], [m for m in measurements if m.size_bytes in out]


def _compare(network: Network, measurements: Sequence[Measurement]) -> list[Compared]:
    return [Compared(m, _a2a_s(_for(network, m), m.ranks, m.size_bytes, m.algorithm)) for m in measurements]


def _r_squared(compared: Sequence[Compared]) -> float:
    seen = np.log([item.measurement.seconds for item in compared])
    left = np.log([item.model_s for item in compared]) - seen
    spread = seen - seen.mean()
    return float(1 - left @ left / (spread @ spread)) if len(seen) > 1 and spread.any() else float("nan")


def _sweep(name: str, document: dict[str, Any]) -> Sweep:
    measurements, layers = [], []
    for grid in document["grids"]:
        ranks, per_node = int(grid["ranks"]), int(grid["ranks_per_node"])
        for row in grid["all_to_all"]:
            seconds = [float(value) for value in row["seconds"]]
            if row["algorithm"] not in ALGORITHMS:
                raise TypeError(f"algorithm {row['algorithm']!r}")
            measurements.append(
                Measurement(
                    ranks,
                    per_node,
                    row["algorithm"],
                    float(row["bytes"]),
                    statistics.median(seconds),
                    min(seconds),
                    max(seconds),
                    len(seconds),
                )
            )
        layers.append(_layer(ranks, grid["layer"]))
    return Sweep(
        name=name,
        ranks=int(document["ranks"]),
        ranks_per_node=int(document["ranks_per_node"]),
        nodes=int(document["nodes"]),
        cores_per_node=int(document["cores_per_node"]),
        backend=str(document["backend"]),
        device=str(document["device"]),
        memory_bandwidth=float(document["grids"][-1]["copy_bytes_per_s"]),
        measurements=tuple(measurements),
        layers=tuple(layers),
    )


def _layer(ranks: int, row: dict[str, Any]) -> Layer:
    shape, moe = row["shape"], row["shape"]["moe"]
    own = LayerShape(
        tokens=int(shape["tokens"]),
        width=int(shape["width"]),
        hidden=int(moe["hidden"]),
        experts=int(moe["experts"]),
        top_k=int(moe["top_k"]),
        matrices=3 if moe["activation"] == "swiglu" else 2,
        element_bytes=int(row["element_bytes"]),
    )
    runs = tuple(
        LayerRun(
            int(run["r"]),
            int(run["degree"]),
            run["algorithm"],
            statistics.median(run["seconds"]),
            len(run["seconds"]),
        )
        for run in row["runs"]
    )
    return Layer(ranks, own, float(row["flops_per_s"]), float(row["outside_s"]), runs)


# --- the paper --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperRow:
    """A number of Tutel's paper (arXiv:2206.03382) and the model's. FIT: a parameter was chosen from it; PRED: it was not.

    MISMATCH: the model says otherwise. OPEN: nothing to compute it from. ``remark`` says why.
    """

    claim: str
    paper: float | None
    model: float | None
    kind: Kind
    remark: str = ""

    @property
    def error(self) -> float | None:
        """Model over paper, minus 1."""
        return None if self.model is None or self.paper is None else self.model / self.paper - 1


TABLE_2 = LayerShape(65536, 4096, 4096, 16, 2, element_bytes=4)  # float32 and top-2 inferred
TABLE_2_MS: tuple[tuple[int, float, Kind], ...] = ((16, 189.1, "PRED"), (64, 323.8, "FIT"), (256, 491.3, "FIT"))
FIGURE_14 = LayerShape(16384, 2048, 2048, 32, 2)  # 16,384 tokens per step, D = H = 2048, top-2
FIGURE_12_BASE = LayerShape(4096, 2048, 2048, 16, 1)
FIGURE_12_LARGE = LayerShape(1024, 2048, 32768, 16, 1)
PAPER_FFN_FLOPS, PAPER_EINSUM_FLOPS = 140e12, 220e12  # assumed, of 312 TFLOP/s
PAPER_QUICK_2DH_S = 9.5e-6  # per message, its other protocol


def paper_rows() -> list[PaperRow]:
    """The rows of section 4.3 of the reference: what the model reproduces, with its error, and what it does not."""
    rows = [
        PaperRow(f"Table 2, all-to-all of a step on {ranks} GPUs [ms]", paper, 4e3 * linear, kind)
        for ranks, paper, kind in TABLE_2_MS
        for linear in [linear_all_to_all(AZURE_NDV4, ranks, TABLE_2.dispatch_bytes).total_s]
    ]
    quick = replace(AZURE_NDV4, two_level_latency_s=PAPER_QUICK_2DH_S)
    small = linear_all_to_all(AZURE_NDV4, 2048, MIB).total_s
    linear, level2 = (all_to_all(AZURE_NDV4, 2048, FIGURE_14.dispatch_bytes, name).total_s for name in ALGORITHMS)
    near = linear_all_to_all(AZURE_NDV4, 16, FIGURE_14.dispatch_bytes)
    once = FIGURE_14.forward_flops / PAPER_FFN_FLOPS
    masks = einsum_flops(FIGURE_14.tokens, FIGURE_14.width, FIGURE_14.top_k) / PAPER_EINSUM_FLOPS
    sparse = 3 * once + 4 * near.total_s
    slowest = 3 * once + 4 * linear
    gains = {d: pipelined_s(once, near, 1) / pipelined_s(once, near, d) for d in (2, 4, 8, 16)}
    rows += [
        PaperRow("2DH against linear, 2,048 GPUs, 1 MiB assumed [x]", 20.7,
                 small / two_level_all_to_all(quick, 2048, MIB).total_s, "FIT",
                 remark="cost per message 9.5 µs, its other protocol"),
        PaperRow("the same with one cost per message [x]", 20.7,
                 small / two_level_all_to_all(AZURE_NDV4, 2048, MIB).total_s, "MISMATCH",
                 remark="bounded by about m = 8: 20.7x needs the other protocol"),
        PaperRow("2DH on the layer, 2,048 GPUs [x]", 4.25, slowest / (3 * once + 4 * level2), "FIT"),
        PaperRow("sparse encode and decode on the layer, 16 GPUs [x]", 3.52, (sparse + masks) / sparse, "PRED"),
        PaperRow("pipelining on the layer, 16 GPUs [x]", 1.43, gains[2], "PRED"),
        PaperRow("degree 16 against 8 on that layer [x]", None, gains[16] / gains[8], "PRED",
                 remark="paper: degrees above 8 do not pay"),
        *(PaperRow(f"2DH at 256 MiB, {ranks} GPUs [x]", None, gain, "PRED", remark=said)
          for ranks, said in ((16, "paper: loses"), (64, "paper: loses at 128"), (256, "paper: wins"))
          for gain in [_a2a_s(AZURE_NDV4, ranks, 256 * MIB, "linear") / _a2a_s(AZURE_NDV4, ranks, 256 * MIB, "2dh")]),
        *(PaperRow(f"Fig. 12, {name}: r at k f = {load}", None, float(best_r(replace(shape, capacity_factor=load), 64)),
                   "PRED", remark="paper: 0, then 1, then more as the capacity falls")
          for name, shape in (("Base", FIGURE_12_BASE), ("Large", FIGURE_12_LARGE)) for load in (16, 8, 4, 2, 1)),
        PaperRow("sparse encode and decode on the layer, 2,048 GPUs [x]", 1.04, (slowest + masks) / slowest, "MISMATCH",
                 remark="1.04x needs about 180 µs per peer, and then 2DH 6.9x"),
        PaperRow("parallelism, 1.74x; v2 up to 14.57x", None, None, "OPEN", remark="the configuration is not in the text"),
        PaperRow("pipelining, 2.00x", None, None, "OPEN",
                 remark="the bound of overlap where transfer and computation are equal; the configuration is not in the text"),
    ]  # fmt: skip
    return rows


# --- command ----------------------------------------------------------------------------------------------------------


HELP_GROUP = "Compare"
HELP_ORDER = 4


@click.command(
    "network",
    epilog="""\b
Examples:
  srun -n 64 mlhpc moe-bench --sweep-network -o sweep.json
  mlhpc network sweep.json
  mlhpc network --paper
  mlhpc report runs/mine sweep.json
""",
)
@click.argument("sweeps", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--paper", is_flag=True, help="What the model says of the numbers of Tutel's paper.")
def command(sweeps: tuple[Path, ...], paper: bool) -> None:
    """Fit a machine's links to all-to-all sweeps, say how wrong the fit is, and extrapolate the MoE layer to many ranks."""
    if not sweeps and not paper:
        raise click.UsageError("give a sweep (mlhpc moe-bench --sweep-network -o FILE) or --paper")
    for path in sweeps:
        click.echo("\n".join(fit_lines(fit_sweep(read_sweep(path)))))
    if paper:
        click.echo("\n".join(paper_lines()))


def fit_lines(fit: Fit) -> list[str]:
    """Parameters, errors where the fit did not look, the layer as measured and predicted, and what is extrapolated."""
    own = fit.network
    lines = [
        fit.sweep.describe(),
        f"  launch {1e6 * own.launch_s:.1f} us; inside a node {1e6 * own.intra_latency_s:.1f} us per message, "
        f"{own.intra_bandwidth / 1e9:.3g} GB/s; across {1e6 * own.inter_latency_s:.1f} us, "
        f"{own.inter_bandwidth / 1e9:.3g} GB/s, in 2DH {1e6 * own.two_level_latency_s:.1f} us; "
        f"copies {own.memory_bandwidth / 1e9:.3g} GB/s (measured); a linear all-to-all loses {100 * own.congestion:.0f} % per "
        f"doubling above {own.congestion_from} ranks" + ("" if own.congestion else " (not seen on so few)"),
        f"  R2 of log seconds {fit.r_squared:.3f} over {len(fit.fitted)} fitted all-to-alls",
    ]
    for title, compared in (
        ("fitted", fit.fitted),
        ("sizes left out", fit.held_out),
        ("largest grid from smaller ones", fit.next_grid),
    ):
        for algorithm in ALGORITHMS:
            chosen = [item for item in compared if item.measurement.algorithm == algorithm]
            if chosen:
                middle, worst = typical_error(chosen)
                lines.append(
                    f"  error, {title}, {algorithm:6s}: median {100 * middle:.0f} %, largest {100 * worst:.0f} % "
                    f"(n = {len(chosen)})"
                )
    for layer in fit.sweep.layers:
        lines += [f"  {line}" for line in _layer_lines(layer, fit)]
    lines.append(f"  extrapolated from {fit.sweep.ranks} ranks, not measured:")
    for ranks in EXTRAPOLATED_RANKS:
        best = best_choice(fit, fit.layer_shape(ranks), ranks)
        edge = crossover_bytes(fit.network, ranks)
        wins = "2DH never wins" if edge is None else f"2DH wins up to {edge / MIB:.3g} MiB per rank"
        lines.append(
            f"    {ranks:,} ranks: {wins}; the layer fastest with r {best.r}, degree {best.degree}, {best.algorithm}: "
            f"{best.seconds:.3g} s"
        )
    return lines


def _layer_lines(layer: Layer, fit: Fit) -> list[str]:
    network = fit.grid_network(layer.ranks)
    pairs = [
        (run, predicted_layer_s(layer, network, run.r, run.degree, run.algorithm)) for run in layer.runs if run.seconds
    ]
    errors = [abs(model / run.seconds - 1) for run, model in pairs]
    fastest, predicted = min(pairs, key=lambda pair: pair[0].seconds)[0], min(pairs, key=lambda pair: pair[1])[0]
    return [
        f"layer on {layer.ranks} ranks, predicted against measured, {len(pairs)} ways: error median "
        f"{100 * statistics.median(errors):.0f} %, largest {100 * max(errors):.0f} %; fastest measured {_way(fastest)} "
        f"({1e3 * fastest.seconds:.1f} ms), the predicted best {_way(predicted)} took {1e3 * predicted.seconds:.1f} ms"
    ]


def _way(run: LayerRun) -> str:
    return f"r {run.r}, degree {run.degree}, {run.algorithm}"


def paper_lines() -> list[str]:
    """The rows as text."""
    lines = [f"{'Tutel, arXiv:2206.03382':56s} {'paper':>8s} {'model':>8s} {'error':>7s}"]
    for row in paper_rows():
        paper, model = ("–" if value is None else f"{value:.4g}" for value in (row.paper, row.model))
        error = "" if row.error is None else f"{100 * row.error:+.0f} %"
        lines.append(f"{row.claim:56s} {paper:>8s} {model:>8s} {error:>7s} {row.kind:8s} {row.remark}".rstrip())
    return lines
