"""Incidents of a fleet over time: what checks of nodes gain, in closed form. simulation has fleets.

A node is healthy, becomes degraded at the rate a, and a degraded node has an incident at the rate b (both per hour). Every tau
hours a check finds a degraded node with probability c, and it is repaired. MTBI is the mean time between incidents of a node.
A node whose incidents come without warning (b without limit) gains nothing from any check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import linalg, optimize

TOLD = (2.0, 10.0, 22.61)  # gains for which commands say how often to check; the last is the one that Anubis reports


@dataclass(frozen=True)
class Node:
    """Mean hours from healthy to degraded and from degraded to the incident; 0 hours degraded: no warning."""

    healthy_h: float
    degraded_h: float


def mtbi_h(node: Node, every_h: float | None = None, found: float = 1.0, visible: float = 1.0) -> float:
    """Mean hours between incidents if a check every ``every_h`` hours finds a degraded node with probability ``found``.

    Checks go on through incidents, after which a node is healthy and its first check is ``every_h`` hours away. ``visible``: the
    share of defects that checks can find; of the others no check ever finds one.
    """
    mean = node.healthy_h + node.degraded_h
    if every_h is None or found * visible == 0.0 or node.degraded_h == 0.0:
        return mean
    a, b = 1.0 / node.healthy_h, 1.0 / node.degraded_h
    stays_healthy, stays_degraded = math.exp(-a * every_h), math.exp(-b * every_h)
    becomes = _both(a, b, every_h)  # healthy at the start, degraded at the end of an interval
    # mean hours in an interval before an incident, starting healthy or degraded
    hours_degraded = (1.0 - stays_degraded) / b
    hours_healthy = (1.0 - stays_healthy) / a + (1.0 - stays_healthy - becomes) / b
    hours_healthy += (1.0 - visible) * becomes / b  # and after it, if no check can find it
    # T_healthy = hours_healthy + (stays_healthy + visible found becomes) T_healthy + visible (1 - found) becomes T_degraded
    # T_degraded = hours_degraded + found stays_degraded T_healthy + (1 - found) stays_degraded T_degraded
    seen, missed = visible * becomes, 1.0 - found
    matrix = np.array(
        [
            [1.0 - stays_healthy - found * seen, -missed * seen],
            [-found * stays_degraded, 1.0 - missed * stays_degraded],
        ]
    )
    return float(np.linalg.solve(matrix, [hours_healthy, hours_degraded])[0])


def together_mtbi_h(node: Node, every_h: float, found: float = 1.0, visible: float = 1.0) -> float:
    """The same in the long run if all nodes are checked at the same times, whenever each had its last incident."""
    if node.degraded_h == 0.0:
        return node.healthy_h
    a, b = 1.0 / node.healthy_h, 1.0 / node.degraded_h
    # healthy, degraded and visible, degraded and not: an incident leads back to healthy
    rates = np.array([[-a, a * visible, a * (1.0 - visible)], [b, -b, 0.0], [b, 0.0, -b]])
    check = np.array([[1.0, 0.0, 0.0], [found, 1.0 - found, 0.0], [0.0, 0.0, 1.0]])
    # (state, hours spent in each state) over an interval
    both = linalg.expm(np.block([[rates * every_h, np.eye(3) * every_h], [np.zeros((3, 6))]]))
    step, hours = both[:3, :3] @ check, both[:3, 3:]
    start = np.linalg.lstsq(np.vstack([(step - np.eye(3)).T, np.ones(3)]), [0.0, 0.0, 0.0, 1.0], rcond=None)[0]
    return float(every_h / (b * (start @ hours)[1:].sum()))


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


def _both(a: float, b: float, hours: float) -> float:
    """Chance that a healthy node is degraded after ``hours``, without an incident."""
    if math.isclose(a, b, rel_tol=1e-9):
        return a * hours * math.exp(-a * hours)
    return a / (b - a) * (math.exp(-a * hours) - math.exp(-b * hours))
