"""Measures how much the runs of one result differ, split into epochs and seconds per epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd


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
