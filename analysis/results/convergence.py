"""Computes the reference's epochs to target by batch size, from the rulesets and the cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlhpc.suite import RULESET
from mlhpc.suite.compliance.rcp_limit import RcpLimit, compute_limit
from mlhpc.suite.compliance.ruleset import list_rulesets, read_ruleset


def find_reference_points(
    benchmark: str, size: str, round_: str, train_samples: float
) -> Mapping[int, Sequence[float]]:
    """Find the epochs to target of reference runs, by global batch size; empty if none were recorded.

    If the rules count convergence in samples (OpenFold), they are divided by the result's ``train_samples``.
    """
    # Rulesets of public rounds are named by version: round v3.0 has ruleset 3.0.0
    public = f"{round_.removeprefix('v')}.0"
    name = public if round_.startswith("v") and public in list_rulesets() else RULESET
    rules = read_ruleset(name).benchmark(benchmark, size)
    if rules is None:
        return {}
    if not rules.epoch_counts_samples:
        return rules.reference_points
    # Written so that NaN, the value where no log states the samples, ends here too
    if not train_samples > 0:
        return {}
    return {batch: [seen / train_samples for seen in points] for batch, points in rules.reference_points.items()}


def compute_reference_limit(
    benchmark: str, size: str, round_: str, train_samples: float, batch: float, required_runs: float
) -> RcpLimit | None:
    """Compute the reference's mean epochs and the least allowed mean at a batch size.

    None: the batch size is outside the reference points, or is not known.
    """
    points = find_reference_points(benchmark, size, round_, train_samples)
    # NaN, a batch that no log states, does not equal itself
    return compute_limit(points, int(batch), int(required_runs)) if points and batch == batch else None
