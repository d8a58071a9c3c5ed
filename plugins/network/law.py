"""Fits the parameters of the closed forms of `mlhpc.suite.performance.cost_model`, written as matrices, to all-to-alls.

Two numbers are found by search: the onset of congestion, and the size from which messages wait for their receiver.
Given these, two sums are linear in the parameters. The seconds are the larger of them.
`tests/plugins/network/test_law.py` compares them with the closed forms. Array dimensions: M measurements, P
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mlhpc.plugins.network.sweep import KIB, MIB, Measurement, Sweep
from mlhpc.suite.performance.cost_model import ALGORITHMS, Algorithm, Network
from mlhpc.suite.statistics import compute_t_quantile

# Parameters are seconds or seconds per byte. These six are positive and fitted as logarithms.
POSITIVE = ("launch", "intra_latency", "intra_byte", "inter_latency", "inter_byte", "two_level_latency")
# These may be absent or negative. They are fitted in these units, so that all steps are of one scale.
OPTIONAL = {"rendezvous": 1e-6, "congested_byte": 1e-10, "two_level_congested_byte": 1e-10}
# Weight of a parameter that is a factor of e away from its start value, against one measurement that is off by as
# much. It keeps a parameter that no measurement depends on at its start value.
PRIOR = 1e-2
# Searching many places would find something by chance in one of them
SIGNIFICANCE = 0.01  # of a test for an optional parameter, divided by the number of places where it was looked for
GRID_AGREEMENT_FACTOR = 2.0  # congestion seen on two grids differs by at most this factor
RENDEZVOUS_BYTES = (0.5 * KIB, MIB)  # a switch of protocols is looked for among messages of these bytes
MOST_STEPS = 100  # a fit that still improves after so many is used as it is

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Form:
    """Names the optional parameters that a law has. ``onset``: congestion begins above this number of ranks."""

    ranks_per_node: int
    memory_bandwidth: float
    onset: int = Network.congestion_from
    rendezvous_from: float = math.inf
    congested: tuple[Algorithm, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters in the order of the matrices' columns."""
        present = (self.rendezvous_from < math.inf, "linear" in self.congested, "2dh" in self.congested)
        return (*POSITIVE, *(name for name, has in zip(OPTIONAL, present, strict=True) if has))


@dataclass(frozen=True)
class Law:
    """Holds a form with its parameters and their covariance: of logarithms for `POSITIVE`, in its unit for
    `OPTIONAL`.
    """

    form: Form
    values_P: Floats
    covariance_PP: Floats
    squares: float
    count: int

    @property
    def information(self) -> float:
        """Return Schwarz's criterion (BIC), to choose among laws that a test asks for. Less is better."""
        # The limit keeps the logarithm finite for data that the law fits exactly
        return self.count * math.log(max(self.squares, 1e-300)) + len(self.values_P) * math.log(self.count)

    @property
    def network(self) -> Network:
        """Return the law as parameters of the closed forms."""
        found = dict(zip(self.form.names, self.values_P.tolist(), strict=True))
        return Network(
            ranks_per_node=self.form.ranks_per_node,
            inter_latency_s=found["inter_latency"],
            inter_bandwidth=1 / found["inter_byte"],
            intra_latency_s=found["intra_latency"],
            intra_bandwidth=1 / found["intra_byte"],
            memory_bandwidth=self.form.memory_bandwidth,
            launch_s=found["launch"],
            two_level_latency_s=found["two_level_latency"],
            congestion=found.get("congested_byte", 0.0) / found["inter_byte"],
            congestion_from=self.form.onset,
            two_level_congestion=found.get("two_level_congested_byte", 0.0) / found["inter_byte"],
            rendezvous_from=self.form.rendezvous_from,
            rendezvous_s=found.get("rendezvous", 0.0),
        )

    def seconds(self, at: Points) -> Floats:
        """Predict the seconds of each all-to-all."""
        return _seconds(self.form, at, self.values_P)[0]

    def slopes(self, at: Points) -> Floats:
        """Compute derivatives of the logarithms of the seconds (M, P), for ``covariance_PP``."""
        seconds, slopes = _seconds(self.form, at, self.values_P)
        return np.asarray(slopes / seconds[:, None])

    def variance(self, slopes_MP: Floats) -> Floats:
        """Compute the variance of log seconds, or of any sum of them, that comes from the parameters' errors."""
        return np.asarray(np.einsum("mp,pq,mq->m", slopes_MP, self.covariance_PP, slopes_MP))


@dataclass(frozen=True)
class Points:
    """Holds all-to-alls as columns."""

    ranks: Floats
    per_node: Floats
    size: Floats
    two_level: NDArray[np.bool_]

    @staticmethod
    def of(rows: Sequence[tuple[int, int, float, Algorithm]]) -> Points:
        """Make columns of rows (ranks, ranks per node, bytes, algorithm)."""
        numbers = np.array([row[:3] for row in rows], dtype=float)
        return Points(numbers[:, 0], numbers[:, 1], numbers[:, 2], np.array([row[3] == "2dh" for row in rows]))

    @property
    def message(self) -> Floats:
        """Return the bytes of a message to another node."""
        # 2DH gathers the messages of a node before it sends them: they are ranks-per-node times as large
        return np.where(self.two_level, self.size * self.per_node, self.size) / self.ranks


def build_points(measurements: Sequence[Measurement]) -> Points:
    """Put measured all-to-alls into columns."""
    return Points.of([(m.ranks, m.ranks_per_node, m.size_bytes, m.algorithm) for m in measurements])


def fit_law(sweep: Sweep, measurements: Sequence[Measurement]) -> Law:
    """Fit the parameters in log seconds. A switch of protocols and congestion enter only where a test asks for them.

    Congestion must also be seen on two grids that agree about it: one slow grid may be a disturbance.
    """
    at, measured = build_points(measurements), np.log([m.seconds for m in measurements])
    law = _fit_parameters(Form(sweep.ranks_per_node, sweep.memory_bandwidth), at, measured)
    law = _add_rendezvous(law, at, measured)
    congested = _add_congestion(law, at, measured)
    # Each can hide the other. Once congestion is known, the switch is looked for again
    return congested if congested is law else _add_rendezvous(congested, at, measured)


def _add_rendezvous(law: Law, at: Points, measured: Floats) -> Law:
    across = at.ranks > at.per_node
    # Only messages to other nodes: inside a node protocols switch elsewhere
    sizes = sorted({float(size) for size in at.message[across] if RENDEZVOUS_BYTES[0] < size <= RENDEZVOUS_BYTES[1]})
    found = law
    for size in sizes:
        # The plain law is the start, so that the candidate is never worse than it
        candidate = _fit_parameters(replace(law.form, rendezvous_from=size), at, measured, law)
        if _is_significant(law, candidate, extra=2, places=len(sizes)) and candidate.squares < found.squares:
            found = candidate
    return found


def _add_congestion(law: Law, at: Points, measured: Floats) -> Law:
    across = sorted({int(n) for n in at.ranks[at.ranks > at.per_node]})
    # Two grids or more must lie above an onset, so the two largest are none
    choices = [(onset, names) for onset in across[:-2] for names in (ALGORITHMS, ALGORITHMS[:1], ALGORITHMS[1:])]
    found = law
    for onset, names in choices:
        candidate = _fit_parameters(replace(law.form, onset=onset, congested=names), at, measured, law)
        if (
            candidate.information < found.information
            and _is_significant(law, candidate, extra=len(names) + 1, places=len(choices))
            and all(_is_congested_on_all_grids(candidate, at, measured, name) for name in names)
        ):
            found = candidate
    return found


def _is_significant(plain: Law, richer: Law, *, extra: int, places: int) -> bool:
    """Test whether ``extra`` more parameters are significant (F test).

    The tail is that of two parameters, which has a closed form and is above that of three.
    """
    free = richer.count - len(richer.values_P)
    if free < 1 or richer.squares <= 0:
        return False
    ratio = (plain.squares - richer.squares) / extra / (richer.squares / free)
    return ratio > 0 and (1 + 2 * ratio / free) ** (-free / 2) < SIGNIFICANCE / places


def _is_congested_on_all_grids(law: Law, at: Points, measured: Floats, algorithm: Algorithm) -> bool:
    """Return True if each grid above the onset shows congestion by itself, and no two differ by more than
    `GRID_AGREEMENT_FACTOR`.
    """
    index = law.form.names.index("congested_byte" if algorithm == "linear" else "two_level_congested_byte")
    if law.values_P[index] <= 0:
        return False
    seen = []
    for ranks in sorted({int(n) for n in at.ranks if n > law.form.onset}):
        own = (at.ranks == ranks) & (at.two_level == (algorithm == "2dh"))
        grid = Points(at.ranks[own], at.per_node[own], at.size[own], at.two_level[own])
        value, error = _fit_one_parameter(law, grid, measured[own], index)
        if value <= 0 or value < compute_t_quantile(1 - SIGNIFICANCE, max(1, int(own.sum()) - 1)) * error:
            return False
        seen.append(value)
    return len(seen) > 1 and max(seen) <= GRID_AGREEMENT_FACTOR * min(seen)


def _fit_one_parameter(law: Law, at: Points, measured: Floats, index: int) -> tuple[float, float]:
    """Fit one parameter to some all-to-alls with the others fixed. Returns it and its standard error."""
    values, unit = law.values_P.copy(), float(_units(law.form, law.values_P)[index])
    residual, weight = np.zeros(len(measured)), 1.0
    for _ in range(20):
        seconds, jacobian = _seconds(law.form, at, values)
        slope, residual = jacobian[:, index] / seconds, np.log(seconds) - measured
        weight = max(float(slope @ slope), 1e-300)
        # Gauss and Newton's step in one parameter; the others stay as fitted to all grids
        step = -float(slope @ residual) / weight
        values[index] = max(0.0, values[index] + unit * step)
    free = max(1, len(measured) - 1)
    return float(values[index]), unit * math.sqrt(float(residual @ residual) / free / weight)


def _seconds(
    form: Form, at: Points, values_P: Floats, matrices: tuple[Floats, Floats, Floats] | None = None
) -> tuple[Floats, Floats]:
    """Compute seconds (M) and their derivatives (M, P).

    A derivative is by the logarithm of a positive parameter, else by its unit.
    """
    across, inside, fixed = matrices or _matrices(form, at)
    sums = np.stack([across @ values_P, inside @ values_P])
    # The derivative of a maximum is that of its larger part
    rows = np.where((sums[0] >= sums[1])[:, None], across, inside)
    return sums.max(0) + fixed, rows * _units(form, values_P)


def _units(form: Form, values_P: Floats) -> Floats:
    return np.array([*values_P[: len(POSITIVE)], *(OPTIONAL[name] for name in form.names[len(POSITIVE) :])])


def _matrices(form: Form, at: Points) -> tuple[Floats, Floats, Floats]:
    """Compute the coefficients of the parts across and inside nodes (M, P each), and the seconds of copies (M).

    The two parts of a linear all-to-all run at the same time, so the slower one counts. 2DH has its parts one after
    another: both of its rows are their sum.
    """
    n, m, size, two = at.ranks, at.per_node, at.size, at.two_level
    nodes, none = n / m, np.zeros(len(n))
    # With rendezvous a message waits until its receiver is ready: a fixed time for each message
    waits = at.message >= form.rendezvous_from
    # Congestion grows with the doublings of ranks above its onset, and is 0 below it
    doublings = np.log2(np.maximum(n / form.onset, 1.0))
    # Bytes that leave the node
    share = size * (1 - m / n)
    peers = np.where(two, nodes - 1, n - m)
    columns = {
        "launch": (np.where(two, 4.0, 1.0), np.where(two, 4.0, 1.0)),
        "intra_latency": (np.where(two, m - 1, none), m - 1),
        "intra_byte": (np.where(two, size * (m - 1) / m, none), np.where(two, size * (m - 1) / m, size * (m - 1) / n)),
        "inter_latency": (np.where(two, none, peers), none),
        "inter_byte": (share, np.where(two, share, none)),
        "two_level_latency": (np.where(two, peers, none), np.where(two, peers, none)),
        "rendezvous": (peers * waits, np.where(two, peers * waits, none)),
        "congested_byte": (np.where(two, none, share * doublings), none),
        "two_level_congested_byte": (np.where(two, share * doublings, none), np.where(two, share * doublings, none)),
    }
    across, inside = (np.stack([columns[name][part] for name in form.names], axis=1) for part in (0, 1))
    return across, inside, np.where(two, 4 * size / form.memory_bandwidth, 0.0)


def _fit_parameters(form: Form, at: Points, measured: Floats, near: Law | None = None) -> Law:
    """Fit the parameters to the logs of seconds by least squares (Levenberg and Marquardt's method)."""
    positive = len(POSITIVE)
    # Start values: each latency is half of the fastest all-to-all; the one with most bytes gives the seconds per byte
    small, largest = float(np.exp(measured.min())), int(np.argmax(at.size))
    byte = float(np.exp(measured[largest]) / at.size[largest])
    start = np.array([small / 2, small / 2, byte, small / 2, byte, small / 2])
    values = np.concatenate([start, np.zeros(len(form.names) - positive)])
    if near is not None:
        known = dict(zip(near.form.names, near.values_P.tolist(), strict=True))
        values = np.array([known.get(name, 0.0) for name in form.names])
    matrices = _matrices(form, at)
    units = _units(form, values)[positive:]
    pull = np.zeros((positive, len(values)))
    pull[:, :positive] = PRIOR * np.eye(positive)

    def residuals(values_P: Floats) -> tuple[Floats, Floats] | None:
        """Return residuals and their slopes.

        None: a message takes no time, which on more ranks holds for the all-to-all.
        """
        seconds, jacobian = _seconds(form, at, values_P, matrices)
        by_name = dict(zip(form.names, values_P.tolist(), strict=True))
        smallest_latency = min(by_name["inter_latency"], by_name["two_level_latency"])
        if (seconds <= 0).any() or by_name.get("rendezvous", 0.0) <= -smallest_latency:
            return None
        prior = PRIOR * np.log(values_P[:positive] / start)
        return np.concatenate([np.log(seconds) - measured, prior]), np.concatenate([jacobian / seconds[:, None], pull])

    first = residuals(values)
    assert first is not None, "start values are positive, and those of a law that was fitted before are valid"
    # Levenberg and Marquardt: large damping makes short steps down the gradient, small damping Gauss and Newton's steps
    residual, slope = first
    squares, damping = residual @ residual, 1e-2
    for _ in range(MOST_STEPS):
        normal = slope.T @ slope
        damped = normal + damping * np.diag(np.diag(normal) + 1e-9)
        step = np.linalg.solve(damped, -slope.T @ residual)
        # A positive parameter moves as its logarithm, by at most a factor of e^3
        moved = values[:positive] * np.exp(np.clip(step[:positive], -3, 3))
        candidate = np.concatenate([moved, values[positive:] + units * step[positive:]])
        found = residuals(candidate)
        if found is not None and found[0] @ found[0] < squares:
            gain = squares - found[0] @ found[0]
            values, (residual, slope), damping = candidate, found, damping / 4
            squares = residual @ residual
            if gain < 1e-9 * squares + 1e-15:
                break
        # No step of any length improves the fit
        elif damping > 1e9:
            break
        else:
            damping *= 5
    # Without the prior's residuals, which are no measurements
    own_squares = float(residual[: len(measured)] @ residual[: len(measured)])
    free = max(1, len(measured) - len(values))
    # pinv: a parameter that no measurement depends on makes the matrix singular
    covariance = np.asarray(np.linalg.pinv(slope.T @ slope) * own_squares / free, dtype=np.float64)
    return Law(form, values, covariance, own_squares, len(measured))
