"""A machine's links fitted to a measured sweep, and what the fitted `cost_model.Network` predicts. Pure: no files.

`fit_sweep` leaves some measured sizes out of the fit and reports its error on them. Formulas and results: docs/moe.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from analysis.network.sweep import Layer, LayerRun, Measurement, Sweep
from suite.errors import InputError
from suite.performance.cost_model import (
    Algorithm,
    Choice,
    LayerShape,
    Network,
    all_to_all,
    einsum_flops,
    layer_s,
    ranked,
)

EXTRAPOLATED_RANKS = (64, 512, 2048, 4096)
IDEAS = ("masks (GShard)", "sorted rows", "and 2DH", "and best r", "and pipelining")  # each includes those before it
HELD_OUT_EVERY = 3  # one of three sizes of a grid is left out of the fit
# Weight of an error by a factor e in a start value, against the same error in one measurement. It keeps a parameter that no
# measurement depends on at its start value.
PRIOR = 1e-2
PARAMETERS = (
    "launch_s",
    "intra_latency_s",
    "intra_bandwidth",
    "inter_latency_s",
    "inter_bandwidth",
    "two_level_latency_s",
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Compared:
    """A measurement and the seconds that the model predicts for it."""

    measurement: Measurement
    model_s: float

    @property
    def error(self) -> float:
        """Model over measurement, minus 1."""
        return self.model_s / self.measurement.seconds - 1


@dataclass(frozen=True)
class Fit:
    """A network fitted to a sweep, with its errors.

    ``fitted`` are the measurements that the fit used, ``held_out`` those that it did not use. ``next_grid`` compares the
    largest grid with a second fit that used only smaller grids. ``r_squared`` is of log seconds over ``fitted``.
    """

    sweep: Sweep
    network: Network
    r_squared: float
    fitted: tuple[Compared, ...]
    held_out: tuple[Compared, ...]
    next_grid: tuple[Compared, ...]

    @property
    def flops_per_s(self) -> float:
        """FLOP/s of one rank on the largest grid."""
        return self.sweep.layers[-1].flops_per_s

    def grid_network(self, ranks: int) -> Network:
        """The fitted network for so many ranks; fewer ranks than a node has are one node."""
        return replace(self.network, ranks_per_node=min(self.network.ranks_per_node, ranks))

    def layer_shape(self, ranks: int) -> LayerShape:
        """The measured layer on so many ranks, with as many experts per rank as on the largest grid."""
        last = self.sweep.layers[-1]
        return replace(last.shape, experts=max(1, last.shape.experts * ranks // last.ranks))


def fit_sweep(sweep: Sweep) -> Fit:
    """Fit latencies and bandwidths (Hockney's form, inside and across nodes) by least squares in log seconds.

    Raises InputError if no grid has several nodes.
    """
    if all(m.ranks <= m.ranks_per_node for m in sweep.measurements):
        raise InputError(
            f"{sweep.name}: no all-to-all across nodes ({sweep.ranks} ranks, {sweep.ranks_per_node} per node), so nothing "
            "to extrapolate from: more nodes, or --ranks-per-node to count ranks of one node as several"
        )
    used, held_out = _split(sweep.measurements)
    network = _fit_network(sweep, used)
    fitted = tuple(_compare(network, used))
    across = sorted({m.ranks for m in sweep.measurements if m.ranks > m.ranks_per_node})
    smaller = [m for m in sweep.measurements if m.ranks < across[-1]]
    largest = [m for m in sweep.measurements if m.ranks == across[-1]]
    next_grid = _compare(_fit_network(sweep, smaller), largest) if len(across) > 1 else ()
    return Fit(sweep, network, _r_squared(fitted), fitted, tuple(_compare(network, held_out)), tuple(next_grid))


def typical_error(compared: Iterable[Compared]) -> tuple[float, float]:
    """Median and largest absolute relative error (0.1 is 10 %); NaN without measurements."""
    errors = [abs(item.error) for item in compared]
    return (statistics.median(errors), max(errors)) if errors else (float("nan"), float("nan"))


def crossover_bytes(network: Network, ranks: int, up_to: float = 2.0**34) -> float | None:
    """The largest bytes per rank at which 2DH is faster than the linear all-to-all; None if it never is.

    Returns ``up_to`` if 2DH is faster at every size.
    """
    sizes = np.geomspace(16.0, up_to, 400)
    wins = [s for s in sizes if _all_to_all_s(network, ranks, s, "2dh") < _all_to_all_s(network, ranks, s, "linear")]
    return float(max(wins)) if wins else None


def predicted_layer_s(layer: Layer, network: Network, r: int, degree: int, algorithm: Algorithm) -> float:
    """Predicted seconds of a measured layer: the closed form plus the measured time of gate and permutation."""
    inside_s = layer_s(layer.shape, network, layer.ranks, layer.flops_per_s, r=r, degree=degree, algorithm=algorithm)
    return layer.outside_s + inside_s


def best_choice(fit: Fit, shape: LayerShape, ranks: int) -> Choice:
    """The (r, degree, algorithm) with the smallest predicted time of a layer on the fitted machine."""
    return ranked(shape, fit.network, ranks, fit.flops_per_s)[0]


def ideas_s(fit: Fit, ranks: int) -> dict[str, float]:
    """Predicted seconds of the layer's forward and backward pass on ``ranks`` ranks, as Tutel's ideas are added one by one.

    The layer is `Fit.layer_shape`; the time of gate and permutation is that of the largest grid.
    """
    shape, rate, outside_s = fit.layer_shape(ranks), fit.flops_per_s, fit.sweep.layers[-1].outside_s
    choices = ranked(shape, fit.network, ranks, rate)
    plain = layer_s(shape, fit.network, ranks, rate, r=1, degree=1, algorithm="linear")
    masks = einsum_flops(shape.tokens, shape.width, shape.top_k, shape.capacity_factor) / rate
    chain = {
        IDEAS[0]: masks + plain,
        IDEAS[1]: plain,
        IDEAS[2]: min(choice.seconds for choice in choices if choice.r == 1 and choice.degree == 1),
        IDEAS[3]: min(choice.seconds for choice in choices if choice.degree == 1),
        IDEAS[4]: choices[0].seconds,
    }
    return {idea: outside_s + seconds for idea, seconds in chain.items()}


def measured_ideas_s(layer: Layer) -> dict[str, LayerRun]:
    """Measured counterpart of `ideas_s` on one grid: for each idea the fastest run that uses no later idea.

    An idea without such a run is absent; the masks are never measured.
    """
    plain = [run for run in layer.runs if (run.r, run.degree, run.algorithm) == (1, 1, "linear")]
    allowed = {
        IDEAS[1]: plain,
        IDEAS[2]: [run for run in layer.runs if run.r == 1 and run.degree == 1],
        IDEAS[3]: [run for run in layer.runs if run.degree == 1],
        IDEAS[4]: list(layer.runs),
    }
    return {idea: min(runs, key=lambda run: run.seconds) for idea, runs in allowed.items() if runs}


def _fit_network(sweep: Sweep, measurements: Sequence[Measurement]) -> Network:
    """Fit the logarithms of the parameters, which keeps the parameters positive, with Levenberg and Marquardt's method."""
    measured = np.log([m.seconds for m in measurements])
    small = min(m.seconds for m in measurements)
    largest = max(measurements, key=lambda m: m.size_bytes)
    rate = largest.size_bytes / largest.seconds
    names = (*PARAMETERS, "congestion") if sweep.ranks > Network.congestion_from else PARAMETERS
    start = np.log([small / 2, small / 2, rate, small / 2, rate, small / 2, 0.1][: len(names)])

    def network(logs: Floats) -> Network:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        return Network(ranks_per_node=sweep.ranks_per_node, memory_bandwidth=sweep.memory_bandwidth, **values)

    def residuals(logs: Floats) -> Floats:
        model = np.log([_predict_s(network(logs), m) for m in measurements])
        return np.concatenate([model - measured, PRIOR * (logs - start)])

    return network(_minimise(residuals, start))


def _minimise(residuals: Callable[[Floats], Floats], start: Floats, steps: int = 200) -> Floats:
    """The arguments with the smallest sum of squared residuals (Levenberg-Marquardt, forward differences)."""
    at, damping = start, 1e-2
    value = residuals(at)
    for _ in range(steps):
        jacobian = np.stack([(residuals(at + shift) - value) / 1e-5 for shift in 1e-5 * np.eye(len(at))], axis=1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ value
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slope)
        candidate = residuals(at + step)
        if candidate @ candidate < value @ value:
            at, gain, value, damping = at + step, value @ value - candidate @ candidate, candidate, damping / 3
            if gain < 1e-12:
                break
        elif damping > 1e9:
            break
        else:
            damping *= 4
    return at


def _predict_s(network: Network, measurement: Measurement) -> float:
    """Predicted seconds of a measured all-to-all. A grid with fewer ranks than a node is one node."""
    grid = replace(network, ranks_per_node=min(network.ranks_per_node, measurement.ranks_per_node))
    return _all_to_all_s(grid, measurement.ranks, measurement.size_bytes, measurement.algorithm)


def _all_to_all_s(network: Network, ranks: int, size_bytes: float, algorithm: Algorithm) -> float:
    return all_to_all(network, ranks, size_bytes, algorithm).total_s


def _split(measurements: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Measurements to fit and to leave out: the middle one of every three sizes, never the smallest or largest."""
    sizes = sorted({m.size_bytes for m in measurements})
    out = {size for i, size in enumerate(sizes) if i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 and 0 < i < len(sizes) - 1}
    return [m for m in measurements if m.size_bytes not in out], [m for m in measurements if m.size_bytes in out]


def _compare(network: Network, measurements: Sequence[Measurement]) -> list[Compared]:
    return [Compared(m, _predict_s(network, m)) for m in measurements]


def _r_squared(compared: Sequence[Compared]) -> float:
    measured = np.log([item.measurement.seconds for item in compared])
    residuals = np.log([item.model_s for item in compared]) - measured
    spread = measured - measured.mean()
    return float(1 - residuals @ residuals / (spread @ spread)) if len(measured) > 1 and spread.any() else float("nan")
