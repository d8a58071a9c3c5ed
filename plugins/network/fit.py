"""Fits a machine's links to a measured sweep and predicts with the fitted `cost_model.Network`. docs/network.md
explains it.

`fit_sweep` leaves some measured sizes out of the fit and reports its error on them. Its back tests give the errors of a
law on grids of ranks that its fit did not see: each grid across nodes in turn is taken for the largest one. The law is
fitted to the grids up to it and predicts all larger ones. The errors grow with the doublings of ranks between. Their
growth gives the intervals beyond the largest measured grid.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlhpc.plugins.network.law import Law, build_points, fit_law
from mlhpc.plugins.network.sweep import Layer, LayerRun, Measurement, Sweep, parse_sweep
from mlhpc.suite.errors import InputError
from mlhpc.suite.performance.cost_model import (
    Algorithm,
    Execution,
    LayerShape,
    Network,
    compute_einsum_flops,
    list_executions,
    predict_layer_time_s,
)
from mlhpc.suite.statistics import compute_t_quantile

Quantity = Literal["linear", "2dh", "ratio", "layer"]
CONFIDENCE = 0.9
# The prior: standard deviation of an error after one doubling, in log seconds. It counts as much as PRIOR_TESTS back
# tests. These numbers and NEAR were chosen on 160 drawn networks. The coverage in docs/network.md is that of others.
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
        student = compute_t_quantile(0.5 + CONFIDENCE / 2, PRIOR_TESTS + tests)
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


LAYER_VARIANTS = (
    "masks (GShard)",
    "sorted rows",
    "and 2DH",
    "and best r",
    "and pipelining",
)  # each includes those before it
HELD_OUT_EVERY = 3  # one of three sizes of a grid is left out of the fit


@dataclass(frozen=True)
class FitComparison:
    """Holds a measurement and the seconds that the model predicts for it."""

    measurement: Measurement
    model_s: float

    @property
    def error(self) -> float:
        """Return model over measurement, minus 1."""
        return self.model_s / self.measurement.seconds - 1


@dataclass(frozen=True)
class Fit:
    """Holds a network fitted to a sweep, with its errors.

    ``fitted`` has the measurements that the fit used, ``held_out`` the others. ``next_grid`` compares the largest grid
    with a second fit, to the smaller grids only. ``errors`` are those of laws fitted to smaller grids, on larger ones:
    empty if there is one grid. ``r_squared`` is of log seconds over ``fitted``.
    """

    sweep: Sweep
    law: Law
    r_squared: float
    fitted: tuple[FitComparison, ...]
    held_out: tuple[FitComparison, ...]
    next_grid: tuple[FitComparison, ...]
    errors: dict[Quantity, Errors]

    @property
    def network(self) -> Network:
        """Return the fitted links."""
        return self.law.network

    @property
    def flops_per_s(self) -> float:
        """Return the FLOP/s of one rank on the largest grid."""
        return self.sweep.layers[-1].flops_per_s

    def grid_network(self, ranks: int) -> Network:
        """Return the fitted network on ``ranks`` ranks. Fewer ranks than a node has are one node."""
        return replace(self.network, ranks_per_node=min(self.network.ranks_per_node, ranks))

    def layer_shape(self, ranks: int) -> LayerShape:
        """Return the measured layer on ``ranks`` ranks, with as many experts per rank as on the largest grid."""
        last = self.sweep.layers[-1]
        # The number of experts grows with the ranks, as expert parallelism is scaled
        return replace(last.shape, experts=max(1, last.shape.experts * ranks // last.ranks))


def fit_sweep(sweep: Sweep) -> Fit:
    """Fit latencies and bandwidths (Hockney's form, inside and across nodes) by least squares in log seconds.

    Raises InputError if no grid has several nodes.
    """
    # Inside one node only the intra-node links are used: the others would keep their start values
    if all(m.ranks <= m.ranks_per_node for m in sweep.measurements):
        raise InputError(
            f"{sweep.name}: no all-to-all across nodes ({sweep.ranks} ranks, {sweep.ranks_per_node} per node), so "
            "nothing to extrapolate from: more nodes, or --ranks-per-node to count ranks of one node as several"
        )
    # The held-out sizes are used in no fit, also not in the back test
    used, held_out = _split(sweep.measurements)
    law = fit_law(sweep, used)
    fitted = tuple(_compare(law, used))
    errors, without_largest = compute_back_test(sweep, used)
    # On that grid the law without it is tested: the nearest to a prediction for more ranks
    largest_grid = max(m.ranks for m in sweep.measurements if m.ranks > m.ranks_per_node)
    largest = [m for m in sweep.measurements if m.ranks == largest_grid]
    next_grid = tuple(_compare(without_largest, largest)) if without_largest else ()
    return Fit(sweep, law, _r_squared(fitted), fitted, tuple(_compare(law, held_out)), next_grid, errors)


def read_fit(path: Path, document: dict[str, Any]) -> Fit:
    """Fit the sweep of a file among a report's paths. Raises InputError as `parse_sweep` and `fit_sweep`."""
    return fit_sweep(parse_sweep(path, document))


def compute_median_max_error(compared: Iterable[FitComparison]) -> tuple[float, float]:
    """Compute the median and the largest absolute relative error (0.1 is 10 %). NaN without measurements."""
    errors = [abs(item.error) for item in compared]
    return (statistics.median(errors), max(errors)) if errors else (float("nan"), float("nan"))


def choose_execution(fit: Fit, shape: LayerShape, ranks: int) -> Execution:
    """Find the (r, degree, algorithm) with the smallest predicted time of a layer on the fitted machine."""
    return list_executions(shape, fit.network, ranks, fit.flops_per_s)[0]


def predict_variants_s(fit: Fit, ranks: int) -> dict[str, float]:
    """Predict seconds of the layer's forward and backward pass on ``ranks`` ranks, adding Tutel's ideas one by one.

    The layer is `Fit.layer_shape`. The time of gate and permutation is that of the largest grid.
    """
    shape, rate, outside_s = fit.layer_shape(ranks), fit.flops_per_s, fit.sweep.layers[-1].outside_s
    choices = list_executions(shape, fit.network, ranks, rate)
    # Tutel's switches all off: r = 1, no overlap, linear all-to-all
    plain = predict_layer_time_s(shape, fit.network, ranks, rate, r=1, degree=1, algorithm="linear")
    # GShard multiplies by one-hot masks in place of sorting rows: more FLOPs, the same all-to-alls
    masks = compute_einsum_flops(shape.tokens, shape.width, shape.top_k, shape.capacity_factor) / rate
    chain = {
        LAYER_VARIANTS[0]: masks + plain,
        LAYER_VARIANTS[1]: plain,
        LAYER_VARIANTS[2]: min(choice.seconds for choice in choices if choice.r == 1 and choice.degree == 1),
        LAYER_VARIANTS[3]: min(choice.seconds for choice in choices if choice.degree == 1),
        LAYER_VARIANTS[4]: choices[0].seconds,
    }
    return {idea: outside_s + seconds for idea, seconds in chain.items()}


def find_measured_variants(layer: Layer) -> dict[str, LayerRun]:
    """Find for each idea of `predict_variants_s` the fastest measured run that uses no later idea, on one grid.

    An idea without a run is absent. The masks are never measured.
    """
    plain = [run for run in layer.runs if (run.r, run.degree, run.algorithm) == (1, 1, "linear")]
    allowed = {
        LAYER_VARIANTS[1]: plain,
        LAYER_VARIANTS[2]: [run for run in layer.runs if run.r == 1 and run.degree == 1],
        LAYER_VARIANTS[3]: [run for run in layer.runs if run.degree == 1],
        LAYER_VARIANTS[4]: list(layer.runs),
    }
    return {idea: min(runs, key=lambda run: run.seconds) for idea, runs in allowed.items() if runs}


def _split(measurements: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Split measurements into those to fit and those to leave out: the middle one of every three sizes."""
    sizes = sorted({m.size_bytes for m in measurements})
    # The smallest and the largest size stay: without them the held-out sizes would be extrapolated
    inner = list(enumerate(sizes))[1:-1]
    out = {size for i, size in inner if i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2}
    return [m for m in measurements if m.size_bytes not in out], [m for m in measurements if m.size_bytes in out]


def _compare(law: Law, measurements: Sequence[Measurement]) -> list[FitComparison]:
    if not measurements:
        return []
    predicted = law.seconds(build_points(measurements)).tolist()
    return [FitComparison(m, seconds) for m, seconds in zip(measurements, predicted, strict=True)]


def _r_squared(compared: Sequence[FitComparison]) -> float:
    measured = np.log([item.measurement.seconds for item in compared])
    residuals = np.log([item.model_s for item in compared]) - measured
    spread = measured - measured.mean()  # zero if all medians are equal: then there is nothing to explain
    # NaN and not 0 or 1: without a spread there is no share of it
    return float(1 - residuals @ residuals / (spread @ spread)) if len(measured) > 1 and spread.any() else float("nan")
