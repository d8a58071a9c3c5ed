"""Reads a machine's rates for a plan's time from a ceilings file and from a fit of its network. No torch.

The ceilings file is that of `mlhpc ceilings` (docs/ceilings.md). The fit is the output of `mlhpc moe fit SWEEP --format
json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlhpc.suite.documents import NotNegative, read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.performance.ceilings_file import Ceiling, Ceilings, Curve
from mlhpc.suite.performance.cost_model import Network, predict_all_reduce


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
    flops = _find_compute_rate(file, precision, ceilings)
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
        memory=_find_span(last[0]) if last else None,
        storage=_find_span(cold[0]) if cold else None,
        is_reached=reached is not None,
        network_factor=1 + max(errors.largest for errors in fit.errors),
        ring_factor=rings,
        measured_ranks=fit.ranks,
        sources=(f"ceilings of {file.system}, {file.date} ({compared})", f"network of {fit.sweep}"),
    )


def _list_highest_first(file: Ceilings, resource: str) -> list[Ceiling]:
    return sorted(file.of(resource), key=lambda roof: -roof.value)


def _find_span(roof: Ceiling) -> Estimate:
    """Return the span from the slowest rank's median to the best repetition."""
    return Estimate(min(roof.slowest or roof.value, roof.value), roof.value, max(roof.best or roof.value, roof.value))


def _find_compute_rate(file: Ceilings, precision: str, path: Path) -> Estimate:
    """Return the rate in a number format. The value is sustained, the upper bound is a burst."""
    roofs = _list_highest_first(file, "compute")
    fitting = [roof for roof in roofs if roof.dtype == precision]
    if not fitting:
        measured = sorted({str(roof.dtype) for roof in roofs}) or ["none"]
        raise InputError(f"{path}: no compute roof in {precision}, only in {', '.join(measured)}")
    # A step of training lasts longer than a burst: clocks have fallen by then.
    sustained = next((roof for roof in fitting if roof.mode == "sustained"), fitting[0])
    return Estimate(_find_span(sustained).low, sustained.value, _find_span(fitting[0]).high)


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
