"""Computes back tests: the errors of a law on grids of ranks that its fit did not see.

Each grid across nodes in turn is taken for the largest one. The law is fitted to the grids up to it and predicts all
larger ones. The errors grow with the doublings of ranks between. Their growth gives the intervals beyond the largest
measured grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mlhpc.analysis.network.law import Law, build_points, fit_law
from mlhpc.analysis.network.sweep import Layer, Measurement, Sweep
from mlhpc.suite.performance.cost_model import Algorithm, Network, predict_layer_time_s
from mlhpc.suite.statistics import student_t

Quantity = Literal["linear", "2dh", "ratio", "layer"]
CONFIDENCE = 0.9
# The prior: standard deviation of an error after one doubling, in log seconds. It counts as much as PRIOR_TESTS back
# tests. These numbers and NEAR were chosen on 160 drawn networks. The coverage in docs/moe.md is that of others.
PRIOR_ERROR: dict[Quantity, float] = {"linear": 0.05, "2dh": 0.05, "ratio": 0.03, "layer": 0.06}
PRIOR_TESTS = 3.0
# Standard deviation, in doublings of bytes, of the weight that an error has for messages of other sizes
SIZE_WEIGHT_DOUBLINGS = 1.5

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Errors:
    """Holds the errors of one quantity: log of measured over predicted, one entry per prediction of a back test.

    ``fitted_to`` is the largest grid that the fit saw, and ``ranks`` the grid predicted. ``message`` is the bytes of a
    message of a linear all-to-all. ``noise`` is the squared error of the measurement itself: the mean square of the
    fit's residuals.
    """

    fitted_to: Floats
    ranks: Floats
    message: Floats
    error: Floats
    noise: Floats

    @property
    def tests(self) -> int:
        """Return the number of back tests: pairs of a largest grid fitted to and a grid predicted."""
        return len(set(zip(self.fitted_to.tolist(), self.ranks.tolist(), strict=True)))

    @property
    def doublings(self) -> Floats:
        """Return the doublings of ranks from the fit to the prediction."""
        return np.asarray(np.log2(self.ranks / self.fitted_to))

    def half_width(self, quantity: Quantity, doublings: float, message: Floats, variance: Floats) -> Floats:
        """Compute half the interval of log seconds after ``doublings``. ``variance`` is that of the parameters.

        The variance of an error grows in proportion to the doublings, as a sum of independent errors does. It is
        estimated as a mean over the back tests, weighted by the similarity of their messages. The quantile is
        Student's.
        """
        tests = self.tests
        # Errors contain the noise of the measurement, which does not grow with ranks: it is subtracted first
        growth = np.maximum(self._near_mean((self.error**2 - self.noise) / self.doublings, message), 0.0)
        # A weighted mean of prior and back tests: with few tests the prior decides
        spread = (PRIOR_TESTS * PRIOR_ERROR[quantity] ** 2 + tests * growth) / (PRIOR_TESTS + tests)
        student = student_t.compute_quantile(0.5 + CONFIDENCE / 2, PRIOR_TESTS + tests)
        return np.asarray(student * np.sqrt(variance + doublings * spread))

    def trend(self, message: Floats) -> Floats:
        """Average the signed errors of the newest back test: measured over predicted time, as a logarithm (positive:
        too short).

        The newest back test is the one that predicts the largest grid of ranks from all smaller grids. If times grow
        faster with ranks than the fitted law, the error at the next doubling is at least as large.
        """
        largest = self.ranks == self.ranks.max()
        newest = largest & (self.fitted_to == self.fitted_to[largest].max())
        return self._near_mean(self.error, message, newest)

    def _near_mean(self, values: Floats, message: Floats, among: NDArray[np.bool_] | None = None) -> Floats:
        """Average values over entries, weighted by the similarity of their messages to each of ``message``."""
        chosen = np.ones(len(values), bool) if among is None else among
        # The cap of the exponent keeps a weight above zero, so that the mean exists where no message is similar
        distance = np.log2(message[:, None] / self.message[None, chosen]) / SIZE_WEIGHT_DOUBLINGS
        near = np.exp(-np.minimum(distance**2 / 2, 50.0))
        return np.asarray(near @ values[chosen] / near.sum(1))


def compute_back_test(sweep: Sweep, used: Sequence[Measurement]) -> tuple[dict[Quantity, Errors], Law | None]:
    """Compute errors by quantity, and the law fitted to all grids but the largest.

    Fits use the measurements ``used``. Errors are those of all measurements on larger grids. If only one grid has
    several nodes, there are no errors and no law.
    """
    across = sorted({m.ranks for m in sweep.measurements if m.ranks > m.ranks_per_node})
    rows: dict[Quantity, list[tuple[float, ...]]] = {"linear": [], "2dh": [], "ratio": [], "layer": []}
    law = None
    # Only smaller grids are in the fit, whatever was measured later: as a prediction is made
    for largest in across[:-1]:
        law = fit_law(sweep, [m for m in used if m.ranks <= largest])
        later = [m for m in sweep.measurements if m.ranks > largest]
        errors = np.log([m.seconds for m in later]) - np.log(law.seconds(build_points(later)))
        # The mean square of the residuals on the grids that the fit saw
        noise = law.squares / law.count
        found = {(m.ranks, m.size_bytes, m.algorithm): float(e) for m, e in zip(later, errors, strict=True)}
        for (ranks, size, algorithm), error in found.items():
            rows[algorithm].append((largest, ranks, size / ranks, error, noise))
            # Of a ratio the errors are a difference, and the noises of two measurements add up
            if algorithm == "linear" and (ranks, size, "2dh") in found:
                rows["ratio"].append((largest, ranks, size / ranks, error - found[ranks, size, "2dh"], 2 * noise))
        rows["layer"] += _collect_layer_errors(sweep, law.network, largest)
    return {name: Errors(*np.array(own).T) for name, own in rows.items() if own}, law


def predict_layer_s(layer: Layer, network: Network, r: int, degree: int, algorithm: Algorithm) -> float:
    """Predict seconds of a measured layer: the closed form plus the measured time of gate and permutation."""
    inside_s = predict_layer_time_s(
        layer.shape, network, layer.ranks, layer.flops_per_s, r=r, degree=degree, algorithm=algorithm
    )
    return layer.outside_s + inside_s


def _collect_layer_errors(sweep: Sweep, network: Network, largest: int) -> list[tuple[float, ...]]:
    """Collect the errors of the layer on larger grids.

    The layer is seldom measured often enough to know its noise, so all of the error counts.
    """
    rows: list[tuple[float, ...]] = []
    for layer in (layer for layer in sweep.layers if layer.ranks > largest):
        # What one rank sends to one other, as for a linear all-to-all
        message = layer.shape.dispatch_bytes / layer.ranks
        for run in (run for run in layer.runs if run.seconds):
            predicted = predict_layer_s(layer, network, run.r, run.degree, run.algorithm)
            rows.append((float(largest), float(layer.ranks), message, math.log(run.seconds / predicted), 0.0))
    return rows
