"""Bradley and Terry's strengths of entries, from the order of their times in each block, with profile-likelihood intervals.

Each block is one ranking (Plackett and Luce's form of the model, whose pairs are Bradley and Terry's): pairs of one block share
runs and are no independent games. Runs that did not finish share the last place, without an order among them. A normal prior
of deviation `PRIOR` keeps the strength of an entry that always wins finite; its mean is the mean of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PRIOR = 3.0  # of log strength: odds of 20 to 1 between two entries are one deviation
DEVIANCE = 3.841458820694124  # 95 % quantile of chi squared with one degree of freedom
STEPS, ENOUGH = 100, 1e-9
WIDEST = 20.0  # of log strength: odds of half a billion

Floats = npt.NDArray[np.float64]
Ranking = tuple[Floats, Floats]
"""Per place that was won: one row that marks its winner, and one that marks all who were left, the winner among them."""


@dataclass(frozen=True)
class Strength:
    """Log odds of an entry against the mean entry, and its 95 % interval."""

    value: float
    low: float
    high: float

    @staticmethod
    def chance(odds: float) -> float:
        """The chance to be faster than the mean entry in a block."""
        return 1.0 / (1.0 + math.exp(-odds))


def fit(names: Sequence[str], blocks: Sequence[Mapping[str, float]]) -> dict[str, Strength]:
    """Fit the strength of each entry. Times of a block by entry; infinite: did not finish. Equal times are half a win each."""
    ranking = _rankings(names, blocks)
    count = len(names)
    best = _maximum(ranking, count, None)
    top = _log_posterior(ranking, best)
    return {
        name: Strength(float(best[place]), *(_end(ranking, best, top, place, side) for side in (-1.0, 1.0)))
        for place, name in enumerate(names)
    }


def _rankings(names: Sequence[str], blocks: Sequence[Mapping[str, float]]) -> Ranking:
    """The places of all blocks. A tie of finished runs is broken in both ways, each with half of the weight."""
    won, left = [], []
    for times in blocks:
        waiting = sorted(times, key=times.__getitem__)
        while len(waiting) > 1 and math.isfinite(times[waiting[0]]):
            tied = [name for name in waiting if times[name] == times[waiting[0]]]
            winner = np.array([(name in tied) / len(tied) for name in names])
            won.append(winner)
            left.append(np.array([float(name in waiting) for name in names]))
            waiting = [name for name in waiting if name not in tied] if len(tied) > 1 else waiting[1:]
    shape = (len(won), len(names))
    return np.array(won).reshape(shape), np.array(left).reshape(shape)


def _log_posterior(ranking: Ranking, strengths: Floats) -> float:
    won, left = ranking
    rest = np.log(left @ np.exp(strengths)) if len(left) else np.zeros(0)
    return float((won @ strengths).sum() - rest.sum() - 0.5 * (strengths**2).sum() / PRIOR**2)


def _maximum(ranking: Ranking, count: int, fixed: tuple[int, float] | None) -> Floats:
    """The strengths of the largest posterior, their sum zero, one of them perhaps ``fixed`` to a value: Newton with halving."""
    won, left = ranking
    at = np.zeros(count)
    constraints = [np.ones(count)]
    if fixed is not None:
        at = np.full(count, -fixed[1] / (count - 1))
        at[fixed[0]] = fixed[1]
        constraints.append(np.eye(count)[fixed[0]])
    a = np.array(constraints)
    zeros = np.zeros((len(a), len(a)))
    here = _log_posterior(ranking, at)
    for _ in range(STEPS):
        shares = left * np.exp(at)
        shares /= shares.sum(axis=1, keepdims=True)
        gradient = (won - shares).sum(axis=0) - at / PRIOR**2
        hessian = shares.T @ shares - np.diag(shares.sum(axis=0)) - np.eye(count) / PRIOR**2
        step = np.linalg.solve(np.block([[hessian, a.T], [a, zeros]]), np.concatenate([-gradient, np.zeros(len(a))]))[
            :count
        ]
        scale = 1.0
        while (there := _log_posterior(ranking, at + scale * step)) < here and scale > 1e-6:
            scale /= 2
        at, gain, here = at + scale * step, there - here, there
        if gain < ENOUGH:
            break
    return at


def _end(ranking: Ranking, best: Floats, top: float, place: int, side: float) -> float:
    """Where the deviance of the profile reaches its 95 % quantile, by bisection."""
    if len(best) < 2:
        return float(best[place])

    def inside(value: float) -> bool:
        return 2.0 * (top - _log_posterior(ranking, _maximum(ranking, len(best), (place, value)))) < DEVIANCE

    near, far = float(best[place]), float(best[place]) + side
    while inside(far) and abs(far) < WIDEST:
        near, far = far, far + side
    for _ in range(20):
        middle = (near + far) / 2
        near, far = (middle, far) if inside(middle) else (near, middle)
    return far
