"""What a run is measured against: the cards of installed workloads and the constants of the public MLPerf HPC rounds.

A log never states its own target. Sizes of ours are judged by their card; published logs name no size and are "full".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from suite.card import Card
from suite.descriptor import descriptors

FULL = "full"


@dataclass(frozen=True)
class Target:
    """Metric and threshold of one benchmark at one size; ``required_runs`` of a time-to-train result."""

    metric: str
    threshold: float
    direction: str
    required_runs: int
    metric_name: str
    source: str

    def reached(self, value: float) -> bool:
        """True if the value meets the target; an error of zero or an accuracy above one is a broken metric."""
        if self.direction == "min":
            return 0.0 < value <= self.threshold
        return self.threshold <= value <= 1.0


_RULES = "MLPerf HPC v3.0 rules (training_policies/hpc_training_rules.adoc)"
MLPERF = {
    "cosmoflow": Target("eval_error", 0.124, "min", 10, "mean absolute error", _RULES),
    "deepcam": Target("eval_accuracy", 0.82, "max", 5, "intersection over union", _RULES),
    "oc20": Target("eval_error", 0.036, "min", 5, "force mean absolute error", _RULES),
    "openfold": Target("eval_accuracy", 0.8, "max", 10, "lDDT-Cα", _RULES),
}


def find_target(benchmark: str, size: str, cards: Mapping[str, Card]) -> Target | None:
    """The target of a benchmark at a size, None where neither a card nor a public round knows it."""
    card = cards.get(benchmark)
    if card is not None and size in card.sizes:
        entry = card.sizes[size]
        return Target(
            metric=entry.metric,
            threshold=entry.threshold,
            direction=entry.direction,
            required_runs=entry.required_runs,
            metric_name=entry.metric_name,
            source=f"card of {card.workload}, size {size}",
        )
    return MLPERF.get(benchmark) if size == FULL else None


def installed_cards() -> dict[str, Card]:
    """The cards of the installed workloads by MLPerf name."""
    cards = (descriptor.card() for descriptor in descriptors().values())
    return {card.mlperf_name: card for card in cards}
