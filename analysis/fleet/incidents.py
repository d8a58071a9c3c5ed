"""Incidents of a fleet over time: what checks of nodes gain, in closed form and simulated.

A node is healthy, becomes degraded at the rate a, and a degraded node has an incident at the rate b (both per hour). Every tau
hours a check finds a degraded node with probability c, and it is repaired. MTBI is the mean time between incidents of a node.
A node whose incidents come without warning (b without limit) gains nothing from any check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize


@dataclass(frozen=True)
class Node:
    """Mean hours from healthy to degraded and from degraded to the incident; 0 hours degraded: no warning."""

    healthy_h: float
    degraded_h: float


def mtbi_h(node: Node, every_h: float | None = None, found: float = 1.0) -> float:
    """Mean hours between incidents if a check every ``every_h`` hours finds a degraded node with probability ``found``.

    Checks go on through incidents, after which a node is healthy and its first check is ``every_h`` hours away.
    """
    mean = node.healthy_h + node.degraded_h
    if every_h is None or found == 0.0 or node.degraded_h == 0.0:
        return mean
    a, b = 1.0 / node.healthy_h, 1.0 / node.degraded_h
    stays_healthy, stays_degraded = math.exp(-a * every_h), math.exp(-b * every_h)
    becomes = _both(a, b, every_h)  # healthy at the start, degraded at the end of an interval
    # mean hours in an interval before an incident, starting healthy or degraded
    hours_degraded = (1.0 - stays_degraded) / b
    hours_healthy = (1.0 - stays_healthy) / a + (1.0 - stays_healthy - becomes) / b
    # T_healthy = hours_healthy + (stays_healthy + found becomes) T_healthy + (1 - found) becomes T_degraded
    # T_degraded = hours_degraded + found stays_degraded T_healthy + (1 - found) stays_degraded T_degraded
    missed = 1.0 - found
    matrix = np.array(
        [
            [1.0 - stays_healthy - found * becomes, -missed * becomes],
            [-found * stays_degraded, 1.0 - missed * stays_degraded],
        ]
    )
    return float(np.linalg.solve(matrix, [hours_healthy, hours_degraded])[0])


def gain(node: Node, every_h: float, found: float = 1.0) -> float:
    """How many times as long the time between incidents is with checks as without."""
    return mtbi_h(node, every_h, found) / mtbi_h(node)


def interval_for_gain(node: Node, wanted: float, found: float = 1.0) -> float | None:
    """The longest interval of checks, in hours, with that gain; None if no interval has it."""
    shortest = 1e-3
    if gain(node, shortest, found) < wanted:
        return None
    longest = shortest
    while gain(node, longest, found) >= wanted:
        longest *= 2.0
    return float(optimize.brentq(lambda h: gain(node, h, found) - wanted, shortest, longest))


def simulate_mtbi_h(node: Node, every_h: float | None, found: float, incidents: int, seed: int) -> tuple[float, float]:
    """Mean hours between ``incidents`` simulated incidents, and its standard error."""
    chance = np.random.default_rng(seed)
    hours = np.empty(incidents)
    for number in range(incidents):
        hours[number] = _one_incident(node, every_h, found, chance)
    return float(hours.mean()), float(hours.std(ddof=1) / math.sqrt(incidents))


def _one_incident(node: Node, every_h: float | None, found: float, chance: np.random.Generator) -> float:
    now = 0.0
    while True:
        begin = now + chance.exponential(node.healthy_h)
        end = begin + chance.exponential(node.degraded_h) if node.degraded_h else begin
        if every_h is None or found == 0.0:
            return end
        check = (math.floor(begin / every_h) + 1) * every_h
        while check < end and chance.random() >= found:
            check += every_h
        if check >= end:
            return end
        now = check


def _both(a: float, b: float, hours: float) -> float:
    """Chance that a healthy node is degraded after ``hours``, without an incident."""
    if math.isclose(a, b, rel_tol=1e-9):
        return a * hours * math.exp(-a * hours)
    return a / (b - a) * (math.exp(-a * hours) - math.exp(-b * hours))
