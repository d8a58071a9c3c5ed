"""What predictors without a network reach on the data of each workload. Needs lightgbm: pip install 'lightgbm>=4.5'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# Parameters that every workload's boosting gives to LightGBM. One thread and one seed, so that its trees repeat.
LIGHTGBM: Final = {
    "learning_rate": 0.05,
    "num_leaves": 15,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "feature_fraction": 0.3,
    "num_threads": 1,
    "verbose": -1,
    "seed": 0,
}


class Baseline(float):
    """The metric of a predictor, with its standard error over the evaluation samples, or None if that is not known."""

    standard_error: float | None

    def __new__(cls, value: float, standard_error: float | None = None) -> Baseline:
        made = super().__new__(cls, value)
        made.standard_error = None if standard_error is None else float(standard_error)
        return made


def compute_mean(of_samples: Sequence[float] | NDArray[Any]) -> Baseline:
    """Compute mean and standard error of a metric that is the mean over samples."""
    values = np.asarray(of_samples, dtype=np.float64)
    return Baseline(values.mean(), values.std(ddof=1) / len(values) ** 0.5)
