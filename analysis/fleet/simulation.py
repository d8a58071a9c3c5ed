"""Fleets that run jobs, simulated: what checks before jobs gain and cost.

A node is healthy, degrades after a time, and a degraded node has an incident after an exponential time. Groups of nodes run jobs
one after another. An incident stops its job: what was done since the last checkpoint is lost, and after a restart the job goes on,
with that node repaired, which has one incident more. Before a job all nodes of the group may be checked, and wait for it; a
degraded node that a check finds is repaired. Defects differ in which checks find them; one that a set of checks cannot find stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from analysis.fleet import hazard, selector
from analysis.fleet.fleets import Fleet, defect_table, published
from analysis.fleet.spells import Spell

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Policy = Literal["none", "periodic", "full", "selected"]
POLICIES: tuple[Policy, ...] = ("none", "periodic", "full", "selected")
NEVER = 1_000_000  # the step that finds a defect that no step finds
LEAST = 10  # incidents, with fewer of which nothing is said of their rate
TAIL = 0.025  # of intervals, on each side
EARLY = 1e-6  # hours: a check is due that much before its time, for sums of hours are rounded


@dataclass(frozen=True)
class Setting:
    """What is simulated. ``degraded``: the share of the time between incidents of a node in which it is degraded.

    Hours: ``job_h`` of a job, ``every_h`` between checks under the policy periodic, ``checkpoint_h`` between checkpoints (0:
    nothing is lost; infinite: a job begins anew), ``restart_h`` after an incident, ``check_h`` of all checks. ``warm_h`` of the
    ``hours`` are not counted. ``finds``: how likely a check finds what it can find.
    """

    fleet: Fleet
    degraded: float
    groups: int
    job_nodes: int
    hours: float
    replicas: int
    job_h: float = 24.0
    every_h: float = 168.0
    checkpoint_h: float = 1.0
    restart_h: float = 0.25
    check_h: float | None = None
    warm_h: float = 0.0
    finds: float = 1.0

    @property
    def steps(self) -> tuple[tuple[str, float], ...]:
        """Every check and its minutes, those of ``check_h`` shared out where that is given."""
        found = published().checks
        scale = 1.0 if self.check_h is None else 60.0 * self.check_h / found.all_minutes
        return tuple((name, scale * found.minutes_of[name]) for name in found.names)


class Estimate(NamedTuple):
    """A value and its 95 % interval over replicas."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """Sums of each replica (R,): hours of groups ``total_h``, of which jobs ``useful_h`` and checks ``checking_h``; ``incidents``,
    and degraded nodes that checks found, ``repaired``; ``node_h`` of nodes."""

    policy: Policy
    total_h: Floats
    useful_h: Floats
    checking_h: Floats
    node_h: Floats
    incidents: Floats
    repaired: Floats

    @property
    def mtbi_h(self) -> Estimate | None:
        """Mean hours between incidents of a node; None with fewer than `LEAST` incidents in all replicas."""
        return None if self.incidents.sum() < LEAST else _estimate(*self._log_mtbi(), len(self.incidents) - 1)

    def gain(self, plain: Outcome) -> Estimate | None:
        """How many times as long as that of ``plain`` that is; None if either had fewer than `LEAST` incidents."""
        if min(self.incidents.sum(), plain.incidents.sum()) < LEAST:
            return None
        (one, error), (other, more) = self._log_mtbi(), plain._log_mtbi()
        return _estimate(one - other, math.hypot(error, more), len(self.incidents) - 1)

    def share(self, hours: Floats) -> Estimate:
        """Mean of a part of the time of groups."""
        each = hours / self.total_h
        half = float(stats.t.isf(TAIL, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each)))
        return Estimate(float(each.mean()), float(each.mean()) - half, float(each.mean()) + half)

    def _log_mtbi(self) -> tuple[float, float]:
        """The logarithm of all node hours over all incidents, and its error by the jackknife over replicas."""
        left = np.maximum(
            0.5, self.incidents.sum() - self.incidents
        )  # half an incident where one replica has all of them
        without = np.log((self.node_h.sum() - self.node_h) / left)
        count = len(left)
        error = math.sqrt((count - 1) / count * float(((without - without.mean()) ** 2).sum()))
        return math.log(self.node_h.sum() / self.incidents.sum()), error


@dataclass
class History:
    """What an operator of a fleet without checks would know: spells, and which checks would have found each incident's node."""

    spells: list[Spell] = field(default_factory=list)
    found_by: list[int] = field(default_factory=list)

    def checks(self, steps: Sequence[tuple[str, float]]) -> selector.Checks | None:
        """The table of checks to choose by; None without an incident."""
        if not self.found_by:
            return None
        names = [name for name, _ in steps]
        sets, counts = np.unique(self.found_by, return_counts=True)
        found = [
            selector.Incidents(
                found_by=frozenset(name for bit, name in enumerate(names) if each >> bit & 1), count=int(count)
            )
            for each, count in zip(sets.tolist(), counts, strict=True)
        ]
        return selector.Checks(minutes=dict(steps), incidents=tuple(found))


@dataclass(frozen=True)
class Selector:
    """What the policy selected decides by: the hazard learned, the steps, and from how many expected incidents each pays."""

    learned: hazard.Learned
    steps: tuple[selector.Step, ...]
    thresholds: Floats

    def choose(self, ages: Floats, earlier: Ints, job_h: float) -> Ints:
        """How many steps to run for each group (G,) of nodes (G, J) of those ages and earlier incidents."""
        used = self.learned.hazard
        x = np.log1p(earlier).reshape(-1, 1)[:, : len(used.names)]
        expected = used.during(ages.ravel(), job_h, x).reshape(ages.shape).sum(axis=1)
        return np.asarray(np.searchsorted(self.thresholds, expected))


def learn_selector(setting: Setting, history: History) -> Selector | None:
    """Learn from a history. None if there was no incident, or no check would have found any: then nothing is best."""
    checks = history.checks(setting.steps)
    steps = () if checks is None else selector.order_checks(checks)
    if not steps:
        return None
    lost_h = setting.restart_h + min(setting.checkpoint_h, setting.job_h) / 2
    at = [selector.pays_from(step, lost_h, setting.job_nodes, waiting=True) for step in steps]
    return Selector(hazard.learn(hazard.tabulate(history.spells)), steps, np.maximum.accumulate(at))


class _Run:
    """One policy on groups (G,) of nodes (G, J)."""

    def __init__(
        self,
        setting: Setting,
        policy: Policy,
        chance: np.random.Generator,
        chosen: Selector | None,
        history: History | None,
    ) -> None:
        self.setting, self.policy, self.chance, self.chosen, self.history = setting, policy, chance, chosen, history
        groups, nodes = setting.groups * setting.replicas, setting.job_nodes
        self.now, self.checked = np.zeros(groups), np.zeros(groups)
        self.earlier = np.zeros((groups, nodes), dtype=np.int64)
        self.begins, self.fails, self.known = (np.zeros((groups, nodes)) for _ in range(3))
        self.defect = np.zeros((groups, nodes), dtype=np.int64)  # bits of the checks that find it
        self.sums = {name: np.zeros(groups) for name in ("useful_h", "checking_h", "incidents", "repaired")}
        order = [name for name, _ in setting.steps]
        if policy == "selected" and chosen is not None:
            order = [step.name for step in chosen.steps]
        self.first = _first_step(order, [name for name, _ in setting.steps])
        minutes = dict(setting.steps)
        self.hours = np.concatenate([[0.0], np.cumsum([minutes[name] for name in order])]) / 60.0
        if policy == "selected" and chosen is not None:
            self.together = np.array([0.0, *(step.together for step in chosen.steps)])
        every = np.indices((groups, nodes)).reshape(2, -1)
        self.renew(every[0], every[1], np.zeros(every.shape[1]))
        at_start = setting.fleet.defective.value
        start = self.chance.random((groups, nodes)) < (setting.degraded if at_start is None else at_start)
        if setting.degraded > 0.0:
            self.fails[start] -= self.begins[start]
            self.begins[start] = 0.0

    def renew(self, rows: Ints, columns: Ints, when: Floats) -> None:
        """Nodes that are healthy again from ``when`` on."""
        setting, chance = self.setting, self.chance
        mean = setting.fleet.mtbi_h.value * (1.0 + self.earlier[rows, columns]) ** -setting.fleet.ages.value
        shape = setting.fleet.shape.value
        healthy = (1.0 - setting.degraded) * mean * chance.weibull(shape, len(rows)) / math.gamma(1.0 + 1.0 / shape)
        self.begins[rows, columns] = when + healthy
        self.fails[rows, columns] = when + healthy + setting.degraded * mean * chance.standard_exponential(len(rows))
        self.known[rows, columns] = when
        sets, below = defect_table()
        self.defect[rows, columns] = sets[np.searchsorted(below, chance.random(len(rows)))]

    def check(self, active: NDArray[np.bool_]) -> None:
        """Check the groups that the policy wants checked before their next job."""
        if self.policy == "none" or (self.policy == "selected" and self.chosen is None):
            return
        count = np.full(len(self.now), len(self.hours) - 1)
        if self.policy == "periodic":
            count[self.now - self.checked < self.setting.every_h - EARLY] = 0
        elif self.chosen is not None and self.policy == "selected":
            count = self.chosen.choose(
                np.maximum(0.0, self.now[:, None] - self.known), self.earlier, self.setting.job_h
            )
        count[~active] = 0
        took = self.hours[count]
        self.now += took
        self.sums["checking_h"] += self.counted(took)
        ran = count > 0
        self.checked[ran] = self.now[ran] - took[ran]
        now = self.now[:, None]
        found = (self.begins <= now) & (now < self.fails) & (self.first[self.defect] < count[:, None])
        if self.setting.finds < 1.0:
            found &= self.chance.random(found.shape) < self.setting.finds
        passed = self.together[count] if self.policy == "selected" else ran.astype(np.float64)
        self.known = np.where(ran[:, None], now - (now - self.known) * (1.0 - passed[:, None]), self.known)
        rows, columns = np.nonzero(found)
        np.add.at(self.sums["repaired"], rows, self.now[rows] > self.setting.warm_h)
        self.renew(rows, columns, self.now[rows])

    def work(self, active: NDArray[np.bool_]) -> None:
        """Run one job on every active group, through all its incidents."""
        setting = self.setting
        began, doing, done = self.now.copy(), active.copy(), np.zeros(len(self.now))
        finished = np.zeros(len(self.now), dtype=bool)
        while doing.any():
            column = self.fails.argmin(axis=1)
            fails = self.fails[np.arange(len(column)), column]
            end = self.now + (setting.job_h - done)
            over = doing & (fails >= end)
            self.now[over] = end[over]
            doing &= ~over
            finished |= over
            rows = np.nonzero(doing)[0]
            worked = np.maximum(0.0, fails[rows] - self.now[rows])
            done[rows] += _kept(worked, setting.checkpoint_h)
            when = np.maximum(self.now[rows], fails[rows])
            self.incident(rows, column[rows], when, began)
            if math.isinf(setting.checkpoint_h):  # it begins anew, with checks before it
                doing[:] = False
        self.sums["useful_h"] += np.where(finished, self.counted(np.full(len(self.now), setting.job_h)), 0.0)

    def incident(self, rows: Ints, columns: Ints, when: Floats, began: Floats) -> None:
        """Incidents at ``when``: the job restarts, with these nodes repaired."""
        np.add.at(self.sums["incidents"], rows, when > self.setting.warm_h)
        if self.history is not None:
            seen = self.begins[rows, columns] <= began[rows]
            found = np.where(seen & (self.setting.degraded > 0.0), self.defect[rows, columns], 0)
            self.history.found_by += found.tolist()
            self.history.spells += self.spells(rows, columns, when, "incident")
        self.now[rows] = when + self.setting.restart_h
        self.earlier[rows, columns] += 1
        self.renew(rows, columns, self.now[rows])

    def spells(self, rows: Ints, columns: Ints, when: Floats, ended: Literal["incident", "open"]) -> list[Spell]:
        """The spells of nodes up to ``when``."""
        hours = np.maximum(1e-9, when - self.known[rows, columns]).tolist()
        earlier = self.earlier[rows, columns].tolist()
        names = [f"{row}-{column}" for row, column in zip(rows, columns, strict=True)]
        return [
            Spell(node=name, hours=time, incidents=count, ended=ended)
            for name, time, count in zip(names, hours, earlier, strict=True)
        ]

    def counted(self, took: Floats) -> Floats:
        """Those hours of what groups have just done that are after the first ``warm_h``."""
        return np.minimum(took, np.maximum(0.0, self.now - self.setting.warm_h))

    def run(self) -> Outcome:
        """Run jobs until all groups have had their hours."""
        while (active := self.now < self.setting.hours).any():
            self.check(active)
            self.work(active)
        if self.history is not None:
            rows, columns = np.indices(self.known.shape).reshape(2, -1)
            self.history.spells += self.spells(rows, columns, self.now[rows], "open")
        total = self.now - self.setting.warm_h
        sums = {name: self.by_replica(values) for name, values in self.sums.items()}
        node_h = self.setting.job_nodes * self.by_replica(total)
        return Outcome(policy=self.policy, total_h=self.by_replica(total), node_h=node_h, **sums)

    def by_replica(self, values: Floats) -> Floats:
        """Sums (R,) over the groups of each replica."""
        return np.asarray(values.reshape(self.setting.replicas, -1).sum(axis=1))


def simulate(setting: Setting, policy: Policy, seed: Sequence[int], chosen: Selector | None = None) -> Outcome:
    """Simulate a policy. ``chosen`` belongs to selected; without it nothing is best. The same seed gives the same outcome."""
    return _Run(setting, policy, np.random.default_rng(list(seed)), chosen, None).run()


def observe(setting: Setting, seed: Sequence[int]) -> History:
    """What an operator would have written down of the fleet without checks."""
    history = History()
    _Run(setting, "none", np.random.default_rng(list(seed)), None, history).run()
    return history


def _estimate(log: float, error: float, freedom: int) -> Estimate:
    half = float(stats.t.isf(TAIL, freedom)) * error
    return Estimate(math.exp(log), math.exp(log - half), math.exp(log + half))


def _kept(worked: Floats, checkpoint_h: float) -> Floats:
    """How much of the time since a job began or went on is in a checkpoint."""
    if checkpoint_h == 0.0:
        return worked
    return np.zeros_like(worked) if math.isinf(checkpoint_h) else np.floor(worked / checkpoint_h) * checkpoint_h


def _first_step(order: Sequence[str], names: Sequence[str]) -> Ints:
    """By the bits of a defect (2^K,): the first of the steps that finds it."""
    first = np.full(2 ** len(names), NEVER)
    bits = np.arange(2 ** len(names))
    for step, name in reversed(list(enumerate(order))):
        first[bits >> names.index(name) & 1 == 1] = step
    return first
