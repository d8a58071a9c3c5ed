"""Measures how much the runs of one result differ, and what the reference needs at its batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mlhpc.suite import RULESET
from mlhpc.suite.compliance.rcp_limit import RcpLimit, compute_limit
from mlhpc.suite.compliance.ruleset import list_rulesets, read_ruleset


@dataclass(frozen=True)
class RunSpread:
    """Holds the spread of the training time E·tau over runs.

    ``variance_epochs``, ``variance_epoch_time`` and ``covariance_twice`` (natural logs) sum to the variance of
    log(E·tau). ``axis_1`` and ``axis_2`` are the variances (log10²) along the principal axes of (log10 E, log10 tau),
    larger first. ``along_epochs`` is the squared epochs component of the first axis' direction (1: all spread is
    convergence). ``correlation`` is that of the logs, NaN if one of them does not vary.
    """

    n: int
    variance_epochs: float
    variance_epoch_time: float
    covariance_twice: float
    axis_1: float
    axis_2: float
    along_epochs: float
    correlation: float

    @property
    def axis_1_share(self) -> float:
        """Return the share of the variance along the first axis."""
        return self.axis_1 / (self.axis_1 + self.axis_2) if self.axis_1 + self.axis_2 > 0 else math.nan


def compute_run_spread(epochs: pd.Series, tau_s: pd.Series) -> RunSpread | None:
    """Compute the spread of runs; None for fewer than two runs."""
    usable = epochs.notna() & tau_s.notna() & (epochs > 0) & (tau_s > 0)
    if usable.sum() < 2:
        return None
    # The axes are in log10; the variances of the parts are converted to natural logs below
    logs = np.log10(np.stack([epochs[usable].to_numpy(float), tau_s[usable].to_numpy(float)]))
    covariance = np.cov(logs, ddof=1)
    variances, axes = np.linalg.eigh(covariance)
    natural = covariance * math.log(10) ** 2
    varies = bool((logs.std(axis=1) > 0).all())
    return RunSpread(
        n=int(usable.sum()),
        variance_epochs=float(natural[0, 0]),
        variance_epoch_time=float(natural[1, 1]),
        covariance_twice=float(2 * natural[0, 1]),
        # eigh sorts ascending, and rounding may give a variance just below 0
        axis_1=float(max(variances[1], 0.0)),
        axis_2=float(max(variances[0], 0.0)),
        along_epochs=float(axes[0, 1] ** 2),
        correlation=float(np.corrcoef(logs)[0, 1]) if varies else math.nan,
    )


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
