"""Predicts the time of a step under a plan from a machine's rates, with an interval: rates from files, closed forms.

Reads a machine's rates for a plan's time from a ceilings file and from a fit of its network. No torch.

The ceilings file is that of `mlhpc ceilings` (docs/ceilings.md). The fit is the output of `mlhpc moe fit SWEEP --format
json`.

Predicts the time of a step under a plan from a machine's rates, with an interval. Closed forms.

Neighbours exchange at once: latency plus bytes over bandwidth per call. All-gather, reduce-scatter and all-reduce are
the rings of `mlhpc.suite.performance.cost_model`. Ranks of one sample, and ranks that hold states together, are
consecutive. As many as a node has exchange inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlhpc.plugins.axes.predict import GRADIENTS, Cost, Exchange
from mlhpc.suite.documents import NotNegative, read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.performance.ceilings_file import Ceiling, Ceilings, Curve
from mlhpc.suite.performance.cost_model import Network, predict_all_gather, predict_all_reduce


@dataclass(frozen=True)
class Estimate:
    """A value with its lower and upper bound."""

    low: float
    value: float
    high: float

    @staticmethod
    def of(low: float, high: float) -> Estimate:
        """Return the span whose value is the geometric mean of its ends."""
        return Estimate(low, (low * high) ** 0.5, high)

    def fastest_first(self) -> tuple[float, float, float]:
        """The rates in the order of the times they give: the highest rate gives the shortest."""
        return self.high, self.value, self.low

    def times(self, other: Estimate) -> Estimate:
        """Return the product, with both errors in the same direction."""
        return Estimate(self.low * other.low, self.value * other.value, self.high * other.high)


@dataclass(frozen=True)
class Machine:
    """Rates of one rank while all work: FLOP/s; memory and storage in bytes/s (None: unknown); links; sources.

    ``is_reached``: ``flops`` is what the workload reaches, so the longest time is known; otherwise it is a ceiling.
    Times on the network are known within a factor of ``network_factor``, those of rings within ``ring_factor`` (None:
    the same factor). This holds on up to ``measured_ranks`` ranks: a switch level beyond makes times longer.
    """

    flops: Estimate
    network: Network
    memory: Estimate | None = None
    storage: Estimate | None = None
    is_reached: bool = True
    network_factor: float = 1.0
    ring_factor: float | None = None
    measured_ranks: int | None = None
    sources: tuple[str, ...] = ()


def make_uniform_network(bandwidth: float, latency_s: float) -> Network:
    """Return links with this bandwidth (bytes/s) and latency (s), equal inside and between nodes."""
    return Network(
        ranks_per_node=1,
        inter_latency_s=latency_s,
        inter_bandwidth=bandwidth,
        intra_latency_s=latency_s,
        intra_bandwidth=bandwidth,
        memory_bandwidth=bandwidth,
        launch_s=0.0,
        two_level_latency_s=latency_s,
    )


class _LenientStruct(Struct, frozen=True, kw_only=True):
    """The base class of the parts of the document."""


class _Errors(_LenientStruct, frozen=True, kw_only=True):
    largest: NotNegative


class _Fit(_LenientStruct, frozen=True, kw_only=True):
    sweep: str
    ranks: Annotated[int, Meta(ge=1)]
    network: dict[str, Any]
    errors: Annotated[tuple[_Errors, ...], Meta(min_length=1)]


class _Fits(_LenientStruct, frozen=True, kw_only=True):
    version: Literal[1]
    fits: Annotated[tuple[_Fit, ...], Meta(min_length=1, max_length=1)]


def read_machine(ceilings: Path, network: Path, precision: str, reached: Estimate | None) -> Machine:
    """Read a machine. ``reached``: the part of the compute ceiling that a step reaches; None: not known.

    InputError if a file is damaged or lacks the number format.
    """
    file = read_json_document(ceilings, Ceilings, "ceilings", 1)
    flops = find_compute_rate(file, precision, ceilings)
    # The last level has no capacity: it is main memory, which large tensors stream from.
    last = [roof for roof in _list_highest_first(file, "memory") if roof.capacity_bytes is None]
    # The data set of a real run does not fit the page cache.
    cold = [roof for roof in _list_highest_first(file, "storage_read") if roof.mode == "cold"]
    fit = read_json_document(network, _Fits, "output of mlhpc moe fit SWEEP --format json", 1).fits[0]
    links = _read_links(fit, network)
    rings = _compute_ring_factor(file.curves, links)
    compared = "rings compared with its all-reduces" if rings else "no all-reduce in it: rings may be further off"
    return Machine(
        flops=flops if reached is None else flops.times(reached),
        network=links,
        memory=find_span(last[0]) if last else None,
        storage=find_span(cold[0]) if cold else None,
        is_reached=reached is not None,
        network_factor=1 + max(errors.largest for errors in fit.errors),
        ring_factor=rings,
        measured_ranks=fit.ranks,
        sources=(f"ceilings of {file.system}, {file.date} ({compared})", f"network of {fit.sweep}"),
    )


def _list_highest_first(file: Ceilings, resource: str) -> list[Ceiling]:
    return sorted(file.of(resource), key=lambda roof: -roof.value)


def find_span(roof: Ceiling) -> Estimate:
    """Return the span from the slowest rank's median to the best repetition."""
    return Estimate(min(roof.slowest or roof.value, roof.value), roof.value, max(roof.best or roof.value, roof.value))


def find_compute_rate(file: Ceilings, precision: str, path: Path) -> Estimate:
    """Return the rate in a number format. The value is sustained, the upper bound is a burst."""
    roofs = _list_highest_first(file, "compute")
    fitting = [roof for roof in roofs if roof.dtype == precision]
    if not fitting:
        measured = sorted({str(roof.dtype) for roof in roofs}) or ["none"]
        raise InputError(f"{path}: no compute roof in {precision}, only in {', '.join(measured)}")
    # A step of training lasts longer than a burst: clocks have fallen by then.
    sustained = next((roof for roof in fitting if roof.mode == "sustained"), fitting[0])
    return Estimate(find_span(sustained).low, sustained.value, find_span(fitting[0]).high)


def _compute_ring_factor(curves: Sequence[Curve], network: Network) -> float | None:
    """Return the largest factor between measured all-reduces and a ring's closed form. None if none was measured.

    All-reduces on one node say nothing about links between nodes, and the other way round.
    """
    largest = None
    for curve in curves:
        if curve.resource != "all_reduce" or curve.ranks is None:
            continue
        same_links = (curve.nodes == 1) == (curve.ranks <= network.ranks_per_node)
        if not same_links:
            continue
        for point in curve.points:
            form = predict_all_reduce(network, curve.ranks, point.x).total_s
            if point.seconds is not None and form > 0:
                largest = max(largest or 0.0, point.seconds / form, form / point.seconds)
    return largest


def _read_links(fit: _Fit, path: Path) -> Network:
    known = {name: value for name, value in fit.network.items() if value is not None}
    try:
        network = Network(**known)
        finite = all(abs(float(value)) < float("inf") for value in known.values())
    except (TypeError, ValueError):
        raise InputError(
            f"{path}: network has other parameters than those of this version: fit the sweep again"
        ) from None
    if not finite or min(network.inter_bandwidth, network.intra_bandwidth, network.ranks_per_node) <= 0:
        raise InputError(f"{path}: network has a bandwidth that is not positive: fit the sweep again")
    return network


RING_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: FLOPs, memory traffic, exchanges of parts, gradients' all-reduce, reading. None: unknown.

    ``total_s``: the longer of FLOPs and traffic, the bubble of a pipeline, then all exchanges; reading is hidden if it
    is shorter. ``low_s``: all at their best and at once. ``high_s``: one after another at their worst; if it is None,
    `why` gives the reason.
    """

    compute_s: float
    memory_s: float | None
    exchange_s: float
    gradients_s: float
    reading_s: float | None
    low_s: float
    high_s: float | None
    why: str = ""
    bubble_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The time of the step."""
        own = max(self.compute_s, self.memory_s or 0.0) + self.bubble_s + self.exchange_s + self.gradients_s
        return max(own, self.reading_s or 0.0)

    @property
    def bound(self) -> str:
        """The longest part."""
        parts = {
            "computing": self.compute_s,
            "memory": self.memory_s or 0.0,
            "bubble": self.bubble_s,
            "exchange": self.exchange_s,
            "gradients": self.gradients_s,
            "reading": self.reading_s or 0.0,
        }
        return max(parts, key=parts.__getitem__)

    def text(self) -> str:
        """Render one line for people."""
        parts = [("computing", self.compute_s), ("memory", self.memory_s), ("bubble", self.bubble_s or None)]
        parts += [("exchange", self.exchange_s)]
        parts += [("gradients", self.gradients_s), ("reading", self.reading_s)]
        said = ", ".join(f"{name} {seconds * 1e3:.4g}" for name, seconds in parts if seconds is not None)
        low = f"{self.low_s * 1e3:.4g}"
        ends = f"not less than {low} ({self.why})" if self.high_s is None else f"from {low} to {self.high_s * 1e3:.4g}"
        return f"{self.total_s * 1e3:.4g} ms, {ends}: {said}; bound by {self.bound} (modelled)"

    def row(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return asdict(self) | {"total_s": self.total_s, "bound": self.bound}


def predict_time(machine: Machine, cost: Cost) -> StepTime:
    """Predict the time of one step on a machine."""
    gradients = sum(_predict_exchange_s(machine, each) for each in cost.exchanges if each.axis == GRADIENTS)
    exchange = sum(_predict_exchange_s(machine, each) for each in cost.exchanges if each.axis != GRADIENTS)
    rings = sum(_predict_exchange_s(machine, each) for each in cost.exchanges if each.kind in RING_COLLECTIVES)
    sent = gradients + exchange
    straight = sent - rings
    # Rings have a factor of their own where the closed form was compared with measured all-reduces.
    factor = machine.network_factor
    ring_factor = factor if machine.ring_factor is None else machine.ring_factor
    network = Estimate(straight / factor + rings / ring_factor, sent, straight * factor + rings * ring_factor)
    compute = _compute_seconds(cost.flops, machine.flops)
    memory = _compute_seconds(cost.traffic, machine.memory)
    reading = _compute_seconds(cost.reads, machine.storage)
    busy = max((span for span in (compute, memory) if span is not None), key=lambda span: span.value)
    bubble = busy.times(Estimate(cost.bubble, cost.bubble, cost.bubble))
    known = [span for span in (compute, memory, network, reading) if span is not None]
    why = _explain_unbounded(machine, cost, sends=sent > 0)
    return StepTime(
        compute_s=cost.flops / machine.flops.value,
        memory_s=None if memory is None else memory.value,
        exchange_s=exchange,
        gradients_s=gradients,
        reading_s=None if reading is None else reading.value,
        low_s=max(max(span.low for span in known), busy.low + bubble.low),
        high_s=None if why else sum(span.high for span in known) + bubble.high,
        why=why,
        bubble_s=bubble.value,
    )


def _compute_seconds(amount: float | None, rate: Estimate | None) -> Estimate | None:
    """Return the seconds of an amount at a rate; None if either is unknown."""
    if amount is None or rate is None:
        return None
    return Estimate(*(amount / each for each in rate.fastest_first()))


def _explain_unbounded(machine: Machine, cost: Cost, *, sends: bool) -> str:
    """Return why there is no upper bound of the time; empty if there is one."""
    if machine.measured_ranks is not None and sends and cost.ranks > machine.measured_ranks:
        return f"the network was measured on at most {machine.measured_ranks} ranks"
    return "" if machine.is_reached else "what part of the compute roof a step reaches is not stated"


def _predict_exchange_s(machine: Machine, each: Exchange) -> float:
    network, one = machine.network, each.bytes / each.calls
    if each.kind == "all_gather":
        return each.calls * predict_all_gather(network, each.ranks, one * each.ranks).total_s
    # An all-gather backwards: what each rank keeps is what it gives there.
    if each.kind == "reduce_scatter":
        return each.calls * predict_all_gather(network, each.ranks, one).total_s
    if each.kind == "all_reduce":
        return each.calls * predict_all_reduce(network, each.ranks, one).total_s
    # Ranks of one sample are consecutive, so a group that fits a node is on one.
    inside = each.ranks <= network.ranks_per_node
    latency = network.intra_latency_s if inside else network.inter_latency_s
    return each.calls * (
        network.launch_s + latency + one / (network.intra_bandwidth if inside else network.inter_bandwidth)
    )
