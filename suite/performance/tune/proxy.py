"""Predicts the time of points that were not measured: log(measured / closed form) as a Gaussian process of scikit-learn.

The closed form is the prior mean, so the first trial needs no measurement. A wide smooth kernel learns what each value costs,
a narrow rough one what values cost together, and a white one the noise of a measurement.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlhpc.suite.performance.tune.space import Point, Space, Value, key_of

if TYPE_CHECKING:
    import numpy as np

NOISE = 0.03  # of log time, before it was learned
FEWEST = 4  # measured points from which the kernel's parameters are learned


def encode(space: Space, points: Sequence[Point]) -> np.ndarray:
    """Return a row per point: a column for each value of a tunable, and one for the logarithm of numbers.

    An inactive tunable has zeros.
    """
    import numpy as np

    columns = [np.zeros(len(points))]
    for name, tunable in space.tunables.items():
        if len(tunable.values) > 1:
            keys = [key_of(point[name]) if name in point else "" for point in points]
            columns += [np.array([float(key == key_of(value)) for key in keys]) for value in tunable.values]
            if is_numeric(tunable.values):
                columns.append(_scale_numbers(name, tunable.values, points))
    return np.stack(columns, axis=1)


def _scale_numbers(name: str, values: Sequence[Value], points: Sequence[Point]) -> np.ndarray:
    """Return the logarithms of numbers, from -1 to 1 over their values."""
    import numpy as np

    logs = [math.log(float(value)) for value in values]  # type: ignore[arg-type]
    middle, half = (max(logs) + min(logs)) / 2, (max(logs) - min(logs)) / 2
    known = ((math.log(float(point[name])) - middle) / half if name in point else 0.0 for point in points)  # type: ignore[arg-type]
    return np.array(list(known))


def is_numeric(values: Sequence[Value]) -> bool:
    """Return True if values are positive numbers, not flags."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values)


@dataclass(frozen=True)
class Prediction:
    """Of each point, mean and standard deviation of log(time / default's time). ``noise``: what a measurement adds."""

    mean: np.ndarray
    std: np.ndarray
    noise: float


class Proxy:
    """The proxy of a pool of points. ``prior``: log of each point's closed form over the default's."""

    def __init__(self, space: Space, pool: Sequence[Point], prior: Sequence[float]) -> None:
        import numpy as np

        self.rows, self.prior = encode(space, pool), np.array(prior)

    def predict(self, measured: Mapping[int, Sequence[float]]) -> Prediction:
        """Predict every point of the pool. ``measured``: logs of the measured ratios by position in the pool."""
        import numpy as np
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        places = [place for place, values in measured.items() for _ in values]
        logs = np.array([value for values in measured.values() for value in values])
        if not places:
            return Prediction(self.prior, np.full(len(self.prior), 0.5), NOISE)
        rest = logs - self.prior[places]
        kernel = (
            ConstantKernel(0.1, (1e-3, 10.0)) * Matern(10.0, (3.0, 50.0), nu=2.5)
            + ConstantKernel(0.02, (1e-4, 10.0)) * Matern(2.0, (0.5, 10.0), nu=0.5)
            + WhiteKernel(NOISE**2, (1e-5, 0.1))
        )
        process = GaussianProcessRegressor(
            kernel,
            optimizer="fmin_l_bfgs_b" if len(measured) >= FEWEST else None,
            random_state=0,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a parameter at its bound is as good
            process.fit(self.rows[places], rest)
        mean, std = process.predict(self.rows, return_std=True)
        noise = float(process.kernel_.k2.noise_level)
        return Prediction(mean + self.prior, np.sqrt(np.maximum(std**2 - noise, 0.0)), math.sqrt(noise))


def choose_expected_improvement(found: Prediction, best: float, allowed: Sequence[int]) -> tuple[int, float]:
    """Return the allowed position with the largest expected improvement of the logarithm below ``best``, and that."""
    import numpy as np
    from scipy import stats

    places = np.array(allowed)
    gap, spread = best - found.mean[places], np.maximum(found.std[places], 1e-9)
    gain = gap * stats.norm.cdf(gap / spread) + spread * stats.norm.pdf(gap / spread)
    return int(places[int(np.argmax(gain))]), float(np.max(gain))
