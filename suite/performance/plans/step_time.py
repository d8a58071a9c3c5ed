"""Predicts the time of a step under a plan from a machine's rates, with an interval. Closed forms.

Neighbours exchange at once: latency plus bytes over bandwidth per call. All-gather, reduce-scatter and all-reduce are
the rings of `mlhpc.suite.performance.cost_model`. Ranks of one sample, and ranks that hold states together, are
consecutive. As many as a node has exchange inside it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mlhpc.suite.performance.cost_model import predict_all_gather, predict_all_reduce
from mlhpc.suite.performance.plans.machine import Estimate, Machine
from mlhpc.suite.performance.plans.predict import GRADIENTS, Cost, Exchange

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
