"""Fits a machine's links to a measured sweep and predicts with the fitted `cost_model.Network`. Reads no files.

`fit_sweep` leaves some measured sizes out of the fit and reports its error on them. docs/moe.md has the formulas.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlhpc.analysis.network.held_out import Errors, Quantity, compute_back_test
from mlhpc.analysis.network.law import Law, build_points, fit_law
from mlhpc.analysis.network.sweep import Layer, LayerRun, Measurement, Sweep
from mlhpc.suite.errors import InputError
from mlhpc.suite.performance.cost_model import (
    Execution,
    LayerShape,
    Network,
    compute_einsum_flops,
    list_executions,
    predict_layer_time_s,
)

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
