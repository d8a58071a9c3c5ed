"""The reference's convergence: epochs to target by batch size of a benchmark, from the rulesets and the cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from suite import RULESET
from suite.compliance.convergence import Limit as Limit
from suite.compliance.convergence import limit
from suite.compliance.ruleset import ruleset, ruleset_names


def reference_points(benchmark: str, size: str, round_: str, train_samples: float) -> Mapping[int, Sequence[float]]:
    """Epochs to target of reference runs by global batch size; empty where nobody recorded any.

    Where the rules count convergence in samples (OpenFold), an epoch is the result's own ``train_samples``.
    """
    public = f"{round_.removeprefix('v')}.0"
    name = public if round_.startswith("v") and public in ruleset_names() else RULESET
    known = ruleset(name).benchmark(benchmark, size)
    if known is None:
        return {}
    if not known.epoch_counts_samples:
        return known.reference_points
    if not train_samples > 0:
        return {}
    return {batch: [seen / train_samples for seen in points] for batch, points in known.reference_points.items()}


def reference_limit(
    benchmark: str, size: str, round_: str, train_samples: float, batch: float, required_runs: float
) -> Limit | None:
    """Mean and least allowed mean of epochs at a batch size; None beyond the reference points."""
    points = reference_points(benchmark, size, round_, train_samples)
    return limit(points, int(batch), int(required_runs)) if points and batch == batch else None
