"""Predicts the time of a step under a plan from three numbers of a machine. Closed forms, no overlap, no interval: a guide.

Neighbours exchange at once: latency plus bytes over bandwidth per call. All-gather and all-reduce are those of
`suite.performance.cost_model`, with all ranks on nodes of their own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from suite.performance.cost_model import Network, all_gather, all_reduce
from suite.performance.plans.predict import Cost, Exchange


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: computing, exchanges of parts of samples, all-reduce of gradients; none hides another."""

    compute_s: float
    exchange_s: float
    gradients_s: float

    @property
    def total_s(self) -> float:
        """The sum."""
        return self.compute_s + self.exchange_s + self.gradients_s

    @property
    def bound(self) -> str:
        """What takes longest."""
        parts = {"computing": self.compute_s, "exchange": self.exchange_s, "gradients": self.gradients_s}
        return max(parts, key=parts.__getitem__)

    def text(self) -> str:
        """One line for people."""
        return (
            f"{self.total_s * 1e3:.4g} ms = computing {self.compute_s * 1e3:.4g} + exchange {self.exchange_s * 1e3:.4g} "
            f"+ gradients {self.gradients_s * 1e3:.4g}; bound by {self.bound} (modelled, nothing overlaps)"
        )

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"total_s": self.total_s, "bound": self.bound}


@dataclass(frozen=True)
class Machine:
    """FLOP/s that a rank reaches, bytes/s of its link, seconds of a message's latency."""

    flops: float
    bandwidth: float
    latency_s: float

    def predict(self, cost: Cost) -> StepTime:
        """The time of one step."""
        parts = [self._exchange_s(each) for each in cost.exchanges if each.axis != "gradients"]
        gradients = [self._exchange_s(each) for each in cost.exchanges if each.axis == "gradients"]
        return StepTime(cost.flops / self.flops, sum(parts), sum(gradients))

    def _exchange_s(self, each: Exchange) -> float:
        network = Network(
            ranks_per_node=1,
            inter_latency_s=self.latency_s,
            inter_bandwidth=self.bandwidth,
            intra_latency_s=self.latency_s,
            intra_bandwidth=self.bandwidth,
            memory_bandwidth=self.bandwidth,
            launch_s=0.0,
            two_level_latency_s=self.latency_s,
        )
        one = each.bytes / each.calls
        if each.kind == "all_gather":
            return each.calls * all_gather(network, each.ranks, one * each.ranks).total_s
        if each.kind == "all_reduce":
            return each.calls * all_reduce(network, each.ranks, one).total_s
        return each.calls * (self.latency_s + one / self.bandwidth)
