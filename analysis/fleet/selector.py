"""Which checks to run on which nodes before a job: the most incidents per minute, while they save more than they cost.

What a set of checks removes is the share of incidents that any of them would have found before: defects overlap, so shares of
single checks are never added. The model of costs, in node hours: an incident costs ``lost_h`` on each of the job's nodes; a check
costs its minutes on the node that it runs on, or, where the job waits, on all of its nodes. A node that fails a check is exchanged
at no further cost. Checks stop no incident that gives no warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from suite.documents import YamlSource
from suite.errors import InputError, unknown
from suite.statistics.intervals import share_interval

Floats = NDArray[np.float64]
Minutes = Annotated[float, Meta(gt=0, le=100_000)]


class Incidents(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``count`` incidents, before each of which the checks ``found_by`` would have found the node; empty: none would have."""

    found_by: frozenset[str]
    count: Annotated[int, Meta(ge=1, le=100_000_000)] = 1


class Checks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``minutes`` of a node that each check takes, and what they would have found of past incidents."""

    version: Literal[1] = 1
    minutes: Annotated[dict[str, Minutes], Meta(min_length=1)]
    incidents: Annotated[tuple[Incidents, ...], Meta(min_length=1)]

    @property
    def count(self) -> int:
        """How many incidents there are."""
        return sum(each.count for each in self.incidents)

    def found(self, names: frozenset[str]) -> int:
        """How many of them at least one of the checks would have found."""
        return sum(each.count for each in self.incidents if each.found_by & names)


@dataclass(frozen=True)
class Step:
    """The next check to add. ``alone``: the share of incidents that it finds by itself; ``adds``: that which those before it miss;
    ``together``: that of all so far, within ``low`` and ``high`` (90 %)."""

    name: str
    minutes: float
    alone: float
    adds: float
    together: float
    low: float
    high: float


@dataclass(frozen=True)
class Plan:
    """``checks``: how many of the steps to run on each node. Expected incidents of the job ``before`` and ``after`` the checks,
    which take ``cost_h`` node hours and save ``saved_h`` on average. ``met``: whether the risk asked for is met, if one was."""

    checks: tuple[int, ...]
    before: float
    after: float
    cost_h: float
    saved_h: float
    met: bool

    @property
    def risk(self) -> tuple[float, float]:
        """Probability of an incident in the job before and after the checks."""
        return -math.expm1(-self.before), -math.expm1(-self.after)


def read_checks(path: Path) -> Checks:
    """Read a YAML file of `Checks`. InputError names the line."""
    source = YamlSource.read(path)
    found = source.convert(Checks)
    for number, each in enumerate(found.incidents):
        for name in sorted(each.found_by - set(found.minutes)):
            where = source.where("incidents", str(number))
            raise InputError(f"{where}: {unknown('check', name, found.minutes)}; minutes has those")
    return found


def order_checks(checks: Checks) -> tuple[Step, ...]:
    """All checks that find something, each the one that adds most per minute to those before it. Names break ties."""
    steps: list[Step] = []
    chosen: frozenset[str] = frozenset()
    left = dict(sorted(checks.minutes.items()))
    count, found = checks.count, 0
    while left:
        adds = {name: checks.found(chosen | {name}) - found for name in left}
        name = max(left, key=lambda each: adds[each] / left[each])
        if not adds[name]:
            break
        chosen |= {name}
        found += adds[name]
        low, high = share_interval(found, count, 0.9)
        alone = checks.found(frozenset([name])) / count
        steps.append(Step(name, left.pop(name), alone, adds[name] / count, found / count, low, high))
    return tuple(steps)


def select(
    expected: Floats, steps: Sequence[Step], lost_h: float, *, waiting: bool = False, risk: float | None = None
) -> Plan:
    """Choose checks for nodes with ``expected`` incidents (N,) in the job.

    A check on a node is chosen while it saves more than it costs, those with the largest ratio first, or, with ``risk``, until
    the probability of an incident is no more than that, whatever it costs. ``waiting``: all nodes get the same checks at once.
    """
    nodes, before = len(expected), float(expected.sum())
    units = np.array([before]) if waiting else expected
    adds, hours = np.array([step.adds for step in steps]), np.array([step.minutes for step in steps]) / 60.0
    removed = np.outer(units, adds)  # (units, steps): expected incidents
    saved, cost = removed * lost_h * nodes, np.broadcast_to(hours * (nodes if waiting else 1), removed.shape)
    order = np.argsort(
        -(saved / cost), axis=None, kind="stable"
    )  # of a unit's steps the first comes first: it adds most per minute
    counts, after, cost_h, saved_h = np.zeros(len(units), dtype=int), before, 0.0, 0.0
    for place in order:
        unit, step = divmod(int(place), len(steps))
        more = saved[unit, step] > cost[unit, step] if risk is None else -math.expm1(-after) > risk
        if not more or removed[unit, step] <= 0.0:
            break
        counts[unit] = step + 1
        after -= float(removed[unit, step])
        cost_h, saved_h = cost_h + float(cost[unit, step]), saved_h + float(saved[unit, step])
    every = np.repeat(counts, nodes) if waiting else counts
    met = risk is None or -math.expm1(-after) <= risk
    return Plan(tuple(every.tolist()), before, max(0.0, after), cost_h, saved_h, met)


def pays_from(step: Step, lost_h: float, nodes: int, *, waiting: bool = False) -> float:
    """From how many expected incidents on a node (``waiting``: on all of them) a check saves more than it costs."""
    return step.minutes / 60.0 / (step.adds * lost_h * (1 if waiting else nodes))


def groups(plan: Plan, nodes: Sequence[str]) -> Mapping[int, tuple[str, ...]]:
    """The nodes by how many steps to run on them, most first."""
    found: dict[int, list[str]] = {}
    for node, count in zip(nodes, plan.checks, strict=True):
        found.setdefault(count, []).append(node)
    return {count: tuple(sorted(found[count])) for count in sorted(found, reverse=True)}
