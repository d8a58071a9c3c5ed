"""How likely a node has an incident: Weibull with covariates, or a constant rate, by maximum likelihood with censored times.

The cumulative hazard of a node after t hours of a spell is (t / u)^k exp(b0 + b x), u hours being the unit. k = 1 and no covariates
is a constant rate. x are the logarithm of one more than the earlier incidents, and what the node lacked in speed where all spells
tell it. The Weibull model is used only where it describes nodes that it did not see surely better than the constant rate: otherwise
a fleet without memory would be given one by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, optimize, stats

from analysis.fleet.spells import INCIDENT, Spell
from suite.errors import InputError

FOLDS = 5  # nodes are dealt to them in turn
LEAST_INCIDENTS, LEAST_NODES = 20, 10  # with fewer no more than a constant rate is tried
ALARM = 0.05  # how often a fleet of constant rate is given the Weibull model, at most
PULL = 1e-3  # of log k and b to 0: keeps them finite where the data do not
DRAWS = 400  # of the parameters, for intervals
TINY = 1e-12  # units of time: what is shorter counts as that
EARLIER, SLOWER = "earlier incidents", "slower"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """Spells as numbers: ``hours`` (N,), ``ended`` in an incident (N,), covariates ``x`` (N, K) named ``names``, ``node`` (N,)."""

    hours: Floats
    ended: NDArray[np.bool_]
    x: Floats
    names: tuple[str, ...]
    node: NDArray[np.int64]

    def part(self, rows: NDArray[np.bool_]) -> Table:
        """Some of the spells."""
        return Table(self.hours[rows], self.ended[rows], self.x[rows], self.names, self.node[rows])


@dataclass(frozen=True)
class Hazard:
    """A fitted model. ``theta``: log k, b0, then b of the covariates ``names`` after (x - ``middle``) / ``scale``.

    ``covariance`` is that of ``theta``; a constant rate has log k = 0 without spread.
    """

    theta: Floats
    covariance: Floats
    unit_h: float
    names: tuple[str, ...]
    middle: Floats
    scale: Floats

    @property
    def shape(self) -> float:
        """k: below 1 incidents become rarer with the time since the last one, above 1 more frequent."""
        return float(math.exp(self.theta[0]))

    def cumulative(self, hours: Floats, x: Floats, theta: Floats | None = None) -> Floats:
        """Expected incidents (N,) until ``hours`` (N,) of spells with covariates (N, K)."""
        given = self.theta if theta is None else theta
        eta = given[1] + ((x - self.middle) / self.scale) @ given[2:]
        with np.errstate(over="ignore"):
            return np.asarray((hours / self.unit_h) ** np.exp(given[0]) * np.exp(np.minimum(eta, 300.0)))

    def during(self, ages: Floats, job_h: float, x: Floats, theta: Floats | None = None) -> Floats:
        """Expected incidents (N,) of nodes of those ages in the next ``job_h`` hours."""
        return self.cumulative(ages + job_h, x, theta) - self.cumulative(ages, x, theta)

    def interval(self, ages: Floats, job_h: float, x: Floats, confidence: float = 0.9) -> tuple[float, float]:
        """Interval of the probability that any of the nodes has an incident, from the spread of the parameters."""
        chance = np.random.default_rng(0)
        draws = chance.multivariate_normal(self.theta, self.covariance, DRAWS, method="eigh")
        found = [-math.expm1(-float(self.during(ages, job_h, x, theta).sum())) for theta in draws]
        low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
        return float(low), float(high)

    def log_likelihood(self, table: Table) -> Floats:
        """Of each spell (N,), time in units of ``unit_h``."""
        scaled = table.hours / self.unit_h
        eta = self.theta[1] + ((table.x - self.middle) / self.scale) @ self.theta[2:]
        k = self.shape
        logs = np.log(np.where(table.ended, np.maximum(scaled, TINY), 1.0))
        rate = np.where(table.ended, self.theta[0] + (k - 1.0) * logs + eta, 0.0)
        return np.asarray(rate - self.cumulative(table.hours, table.x))


@dataclass(frozen=True)
class Learned:
    """The model that is used, and why. ``better``: log likelihood per incident that the Weibull model gains over a constant
    rate on nodes that it did not see, ``error`` its standard error; None where it was not tried."""

    hazard: Hazard
    constant: Hazard
    spells: int
    nodes: int
    incidents: int
    better: float | None = None
    error: float | None = None

    @property
    def remembers(self) -> bool:
        """Whether the state of a node tells anything of its incidents."""
        return self.hazard is not self.constant


def tabulate(spells: Sequence[Spell], names: Sequence[str] | None = None) -> Table:
    """Spells as numbers. Covariates that do not vary, or that some spells lack, are left out, unless ``names`` are given."""
    columns = {EARLIER: [math.log1p(spell.incidents) for spell in spells]}
    if all(spell.slower is not None for spell in spells):
        columns[SLOWER] = [spell.slower or 0.0 for spell in spells]
    kept = [name for name, values in columns.items() if max(values) > min(values)] if names is None else list(names)
    numbers = {node: number for number, node in enumerate(sorted({spell.node for spell in spells}))}
    return Table(
        hours=np.array([spell.hours for spell in spells], dtype=np.float64),
        ended=np.array([spell.ended == INCIDENT for spell in spells]),
        x=np.array([columns[name] for name in kept], dtype=np.float64).reshape(len(kept), len(spells)).T,
        names=tuple(kept),
        node=np.array([numbers[spell.node] for spell in spells]),
    )


def learn(table: Table) -> Learned:
    """Choose between a constant rate and the Weibull model. InputError if no spell ended in an incident."""
    incidents, nodes = int(table.ended.sum()), len(np.unique(table.node))
    if not incidents:
        raise InputError("no spell ended in an incident, so no rate can be learned: state it with --mtbi")
    constant = _constant(table)
    if incidents < LEAST_INCIDENTS or len(np.unique(table.node[table.ended])) < LEAST_NODES:
        return Learned(constant, constant, len(table.hours), nodes, incidents)
    gains = np.zeros(nodes)
    _, place = np.unique(table.node, return_inverse=True)
    dealt = np.argsort(np.argsort(-np.bincount(place, weights=table.ended), kind="stable"))  # incidents in every fold
    for fold in range(FOLDS):
        out = dealt[place] % FOLDS == fold
        seen, unseen = table.part(~out), table.part(out)
        plain = _constant(seen)
        full = _in_unit(fit(seen), plain.unit_h)
        np.add.at(gains, place[out], full.log_likelihood(unseen) - plain.log_likelihood(unseen))
    error = float(gains.std(ddof=1)) * math.sqrt(nodes)
    total = float(gains.sum())
    sure = total > float(stats.norm.isf(ALARM)) * error
    return Learned(
        fit(table) if sure else constant,
        constant, len(table.hours), nodes, incidents, total / incidents, error / incidents,
    )  # fmt: skip


def constant_rate(mtbi_h: float, names: tuple[str, ...] = (), incidents: float = math.inf) -> Hazard:
    """A constant rate, learned from ``incidents`` or stated. ``names``: covariates that callers give and that change nothing."""
    theta, covariance = np.zeros(2 + len(names)), np.zeros((2 + len(names), 2 + len(names)))
    covariance[1, 1] = 1.0 / incidents
    return Hazard(theta, covariance, mtbi_h, names, np.zeros(len(names)), np.ones(len(names)))


def fit(table: Table) -> Hazard:
    """Fit the Weibull model with all covariates of the table."""
    middle, scale = table.x.mean(axis=0), table.x.std(axis=0)
    scale = np.where(scale > 0.0, scale, 1.0)
    unit = float(table.hours.sum()) / max(1, int(table.ended.sum()))
    design = np.column_stack([np.ones(len(table.hours)), (table.x - middle) / scale])
    logs = np.log(np.maximum(table.hours / unit, TINY))
    d = table.ended.astype(np.float64)
    pull = PULL * np.array([1.0, 0.0, *np.ones(table.x.shape[1])])

    def cost(theta: Floats) -> tuple[float, Floats, Floats]:
        k, eta = math.exp(min(theta[0], 5.0)), design @ theta[1:]
        gathered = np.exp(np.minimum(k * logs + eta, 300.0))
        kl = k * logs
        value = float((gathered - d * (math.log(k) + (k - 1.0) * logs + eta)).sum() + 0.5 * pull @ theta**2)
        gradient = np.array([(kl * gathered - d * (1.0 + kl)).sum(), *(design.T @ (gathered - d))]) + pull * theta
        across = design.T @ (kl * gathered)
        hessian = np.empty((len(theta), len(theta)))
        hessian[0, 0] = ((kl + kl**2) * gathered - d * kl).sum()
        hessian[0, 1:] = hessian[1:, 0] = across
        hessian[1:, 1:] = design.T @ (design * gathered[:, None])
        return value, gradient, hessian + np.diag(pull)

    found = optimize.minimize(
        lambda theta: cost(theta)[0], np.zeros(2 + table.x.shape[1]), method="trust-exact",
        jac=lambda theta: cost(theta)[1], hess=lambda theta: cost(theta)[2],
    )  # fmt: skip
    theta = np.asarray(found.x, dtype=np.float64)
    return Hazard(theta, linalg.pinvh(cost(theta)[2]), unit, table.names, middle, scale)


def _constant(table: Table) -> Hazard:
    incidents = int(table.ended.sum())
    return constant_rate(float(table.hours.sum()) / incidents, table.names, incidents)


def _in_unit(hazard: Hazard, unit_h: float) -> Hazard:
    """The same model with time in another unit, so that log likelihoods can be compared."""
    theta = hazard.theta.copy()
    theta[1] += hazard.shape * math.log(unit_h / hazard.unit_h)
    return replace(hazard, theta=theta, unit_h=unit_h)
