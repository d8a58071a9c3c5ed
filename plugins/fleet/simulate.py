"""The command `mlhpc preflight simulate`: what no, periodic, full and selected checks of nodes gain and cost in
published fleets.

A node is healthy, then degrades. A degraded node has an incident after an exponential time. Groups of nodes run jobs
one after another. An incident stops its job, and the work since the last checkpoint is lost. The node is repaired, and
the job goes on after a restart. Before a job the whole group may wait for checks. A degraded node that a check finds is
repaired. Each defect is found by a set of checks of its own.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import click
import msgspec
import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray
from scipy import optimize, stats

from mlhpc.analysis.drawing.view import render_interval
from mlhpc.plugins.fleet import select
from mlhpc.plugins.fleet.select import parse_hours
from mlhpc.suite.cli.options import JSON, IntegerRange, PercentRange, format_option
from mlhpc.suite.errors import explain_unknown_name
from mlhpc.suite.files import align_columns, print_line, render_duration

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Policy = Literal["none", "periodic", "full", "selected"]
POLICIES: tuple[Policy, ...] = ("none", "periodic", "full", "selected")
LEAST_INCIDENTS = 10  # incidents: with fewer no rate is stated
INTERVAL_TAIL = 0.025  # of intervals, on each side
DUE_TOLERANCE_H = 1e-6  # a periodic check is due that much early, because sums of hours are rounded


class SourcedValue(Struct, frozen=True):
    """Holds a number, its source, and how certain it is (``mark``: see fleets.yaml)."""

    value: float
    source: str
    mark: str


class InitialShare(Struct, frozen=True):
    """Holds the share of degraded nodes at the start. None: as in the long run without checks."""

    value: float | None
    source: str
    mark: str


class Fleet(Struct, frozen=True):
    """Describes a fleet. ``mtbi_h``: mean hours to a node's first incident. They fall as (1 + incidents)^-``ages``.

    ``shape`` is that of the Weibull distribution of the time until a node degrades.
    """

    about: str
    mtbi_h: SourcedValue
    ages: SourcedValue
    shape: SourcedValue
    defective: InitialShare
    note: str = ""


class FleetChecks(Struct, frozen=True):
    """Holds the ``shares`` of nodes in which each check found a defect, and the share in which any check did
    (``defective``).
    """

    source: str
    mark: str
    defective: float
    shares: dict[str, float]
    minutes_of: dict[str, float]

    def defects(self) -> tuple[Bools, Floats]:
        """List all sets of checks (D, K) that can find a defect, with their cumulative probabilities (D,).

        Checks find a defect independently, each with its published share of the defects that any check finds.
        """
        each = np.array(list(self.shares.values())) / self.defective
        # Of all defects, checks find the share u. Each alone finds u * each, and all miss a defect with 1 - u
        any_of = optimize.brentq(lambda u: 1.0 - float(np.prod(1.0 - u * each)) - u, 1e-6, 1.0)
        # Without the empty set: published are only the defects that some check found
        sets = np.array(list(itertools.product((False, True), repeat=len(each))))[1:]
        likely = np.where(sets, any_of * each, 1.0 - any_of * each).prod(axis=1)
        below = np.cumsum(likely / likely.sum())
        below[-1] = 1.0  # not 1 - 1e-16: a drawn number must be below it
        return sets, below


class FleetsFile(Struct, frozen=True):
    """Holds the content of fleets.yaml."""

    version: Literal[1]
    fleets: dict[str, Fleet]
    checks: FleetChecks


@cache
def read_fleets() -> FleetsFile:
    """Read the published fleets."""
    return msgspec.yaml.decode(Path(__file__).with_name("fleets.yaml").read_bytes(), type=FleetsFile)


@dataclass(frozen=True)
class Setting:
    """Holds a case to simulate. ``degraded``: share of the time between a node's incidents in which it is degraded.

    Times are hours: ``job_h`` of a job, ``every_h`` between periodic checks, ``restart_h`` after an incident.
    ``checkpoint_h`` is the time between checkpoints (0: no work is lost). ``check_h`` is that of all checks (None: as
    published).
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

    @property
    def minutes(self) -> dict[str, float]:
        """Return the minutes of each check."""
        known = read_fleets().checks.minutes_of
        # The stated duration is of all checks together: each keeps its share
        scale = 1.0 if self.check_h is None else 60.0 * self.check_h / math.fsum(known.values())
        return {name: scale * each for name, each in known.items()}


class Estimate(NamedTuple):
    """Holds a value and its 95 % interval over replicas."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """Holds sums over each replica (R,).

    ``node_h`` are hours of nodes and ``total_h`` hours of groups. Jobs take ``useful_h`` of them and checks
    ``checking_h``. ``repaired`` counts degraded nodes that checks found.
    """

    policy: Policy
    node_h: Floats
    total_h: Floats
    useful_h: Floats
    checking_h: Floats
    incidents: Floats
    repaired: Floats

    @property
    def mtbi_h(self) -> Estimate | None:
        """Estimate the mean hours between incidents of a node; None with fewer than `LEAST_INCIDENTS` incidents."""
        if self.incidents.sum() < LEAST_INCIDENTS:
            return None
        # The error of the logarithm, by the jackknife. If one replica has all incidents, half an incident is left
        count, left = len(self.incidents), np.maximum(0.5, self.incidents.sum() - self.incidents)
        without = np.log((self.node_h.sum() - self.node_h) / left)
        error = math.sqrt((count - 1) / count * float(((without - without.mean()) ** 2).sum()))
        value, factor = (
            float(self.node_h.sum() / self.incidents.sum()),
            math.exp(stats.t.isf(INTERVAL_TAIL, count - 1) * error),
        )
        return Estimate(value, value / factor, value * factor)

    def share(self, hours: Floats) -> Estimate:
        """Estimate the mean share of the groups' time that ``hours`` are."""
        each = hours / self.total_h
        half = float(stats.t.isf(INTERVAL_TAIL, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each)))
        return Estimate(float(each.mean()), float(each.mean()) - half, float(each.mean()) + half)


@dataclass(frozen=True)
class Selector:
    """Holds the learned hazard, the ordered checks, and the expected incidents above which each of them pays."""

    hazard: select.Hazard
    steps: tuple[select.RankedCheck, ...]
    thresholds: Floats


class _Simulation:
    """Simulates one policy on all groups (G,) of nodes (G, J) of all replicas. Times are hours; K checks."""

    def __init__(self, setting: Setting, policy: Policy, seed: Sequence[int], chosen: Selector | None) -> None:
        self.setting, self.policy, self.chosen = setting, policy, chosen
        self.chance = np.random.default_rng(list(seed))
        self.sets, self.below = read_fleets().checks.defects()
        shape = setting.groups * setting.replicas, setting.job_nodes
        self.now, self.checked = np.zeros(shape[0]), np.zeros(shape[0])
        self.earlier = np.zeros(shape, dtype=np.int64)  # incidents
        # When a node degrades, has its next incident, and was last known to be healthy
        self.begins, self.fails, self.known = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.found_by = np.zeros((*shape, self.sets.shape[1]), dtype=bool)  # the checks that find a node's defect
        self.useful, self.checking, self.incidents, self.repaired = (np.zeros(shape[0]) for _ in range(4))
        self.periods: list[Floats] = []  # the log of an operator, from which the policy selected learns
        self.would_find: list[Bools] = []
        names = list(setting.minutes)
        order = names if chosen is None else [step.name for step in chosen.steps]
        self.order = [names.index(name) for name in order]
        self.hours = np.cumsum([0.0, *(setting.minutes[name] / 60.0 for name in order)])
        rows, columns = np.indices(shape).reshape(2, -1)
        self.renew(rows, columns, self.now[rows])
        defective = setting.fleet.defective.value
        if setting.degraded > 0.0:
            # Some nodes are degraded at the start, and have their incident that much earlier
            start = self.chance.random(shape) < (setting.degraded if defective is None else defective)
            self.fails[start] -= self.begins[start]
            self.begins[start] = 0.0

    def renew(self, rows: Ints, columns: Ints, when: Floats) -> None:
        """Draw the next degradation, incident and defect of nodes that are healthy from ``when`` on."""
        fleet, share = self.setting.fleet, self.setting.degraded
        # Division by gamma(1 + 1 / k) below gives a Weibull draw the mean 1
        mean = fleet.mtbi_h.value * (1.0 + self.earlier[rows, columns]) ** -fleet.ages.value
        weibull = self.chance.weibull(fleet.shape.value, len(rows)) / math.gamma(1.0 + 1.0 / fleet.shape.value)
        self.begins[rows, columns] = when + (1.0 - share) * mean * weibull
        degraded = share * mean * self.chance.standard_exponential(len(rows))
        self.fails[rows, columns] = self.begins[rows, columns] + degraded
        self.known[rows, columns] = when
        self.found_by[rows, columns] = self.sets[np.searchsorted(self.below, self.chance.random(len(rows)))]

    def check(self, active: Bools) -> None:
        """Run the checks that the policy wants before the next job of the active groups."""
        if self.policy == "none" or (self.policy == "selected" and self.chosen is None):
            return
        count = np.full(len(self.now), len(self.order))
        if self.policy == "periodic":
            # All checks or none: the policy knows only the time since the last checks
            count[self.now - self.checked < self.setting.every_h - DUE_TOLERANCE_H] = 0
        elif self.policy == "selected" and self.chosen is not None:
            hazard, ages = self.chosen.hazard, np.maximum(0.0, self.now[:, None] - self.known)
            expected = hazard.during(ages, self.setting.job_h, np.log1p(self.earlier)).sum(axis=1)
            count = np.asarray(np.searchsorted(self.chosen.thresholds, expected))
        count[~active] = 0
        self.now += self.hours[count]
        self.checking += self.hours[count]
        ran = count > 0
        # From the begin of the checks: otherwise their own duration would delay every following one
        self.checked[ran] = self.now[ran] - self.hours[count][ran]
        now = self.now[:, None]
        ordered = self.found_by[:, :, self.order]
        in_time = ordered.any(axis=2) & (ordered.argmax(axis=2) < count[:, None])
        # A node whose incident is due fails in the job: it is not counted as found
        found = (self.begins <= now) & (now < self.fails) & in_time
        # A node that passed checks counts as younger, by the share of incidents that these checks find
        passed = ran.astype(np.float64)
        if self.chosen is not None:
            passed = np.array([0.0, *(step.together for step in self.chosen.steps)])[count]
        self.known = np.where(ran[:, None], now - (now - self.known) * (1.0 - passed[:, None]), self.known)
        rows, columns = np.nonzero(found)
        np.add.at(self.repaired, rows, 1)
        self.renew(rows, columns, self.now[rows])

    def work(self, active: Bools) -> None:
        """Run one job on every active group, through all its incidents."""
        setting, began, done = self.setting, self.now.copy(), np.zeros(len(self.now))
        doing = active.copy()
        while doing.any():
            # The first node to fail stops its whole group
            column = self.fails.argmin(axis=1)
            fails = self.fails[np.arange(len(column)), column]
            end = self.now + (setting.job_h - done)
            over = doing & (fails >= end)
            self.now[over] = end[over]
            doing &= ~over
            rows = np.nonzero(doing)[0]
            # An incident that was due during checks or a restart happens when the job goes on
            when = np.maximum(self.now[rows], fails[rows])
            worked = when - self.now[rows]
            # Work since the last checkpoint is lost. 0 means that a checkpoint is always there
            if setting.checkpoint_h > 0.0:
                worked = np.floor(worked / setting.checkpoint_h) * setting.checkpoint_h
            done[rows] += worked
            columns = column[rows]
            np.add.at(self.incidents, rows, 1)
            seen = (self.begins[rows, columns] <= began[rows]) & (setting.degraded > 0.0)
            # Only a defect that was there when the job began could have been found by checks
            self.would_find.append(self.found_by[rows, columns] & seen[:, None])
            self.note(rows, columns, when, ended=True)
            self.now[rows] = when + setting.restart_h
            self.earlier[rows, columns] += 1
            self.renew(rows, columns, self.now[rows])
        # Only the work of the job itself: what incidents repeated is in the total time
        self.useful[active] += setting.job_h

    def note(self, rows: Ints, columns: Ints, when: Floats, *, ended: bool) -> None:
        """Write down the periods of nodes up to ``when``."""
        # The fit leaves out periods of no hours, and would lose the incident with them
        hours = np.maximum(1e-9, when - self.known[rows, columns])
        node, earlier = rows * self.setting.job_nodes + columns, np.log1p(self.earlier[rows, columns])
        self.periods.append(np.column_stack([node, hours, np.full(len(rows), ended), earlier]))

    def run(self) -> Outcome:
        """Run jobs until all groups have had their hours."""
        while (active := self.now < self.setting.hours).any():
            self.check(active)
            self.work(active)
        rows, columns = np.indices(self.known.shape).reshape(2, -1)
        # Nodes that are in a job at the end have not failed yet: without these times the rate would be too high
        self.note(rows, columns, self.now[rows], ended=False)
        each = (self.now, self.useful, self.checking, self.incidents, self.repaired)
        total, *others = (values.reshape(self.setting.replicas, -1).sum(axis=1) for values in each)
        return Outcome(self.policy, self.setting.job_nodes * total, total, *others)


def run_simulation(setting: Setting, policy: Policy, seed: Sequence[int], chosen: Selector | None = None) -> Outcome:
    """Simulate a policy. ``chosen`` is for the policy `selected`, which runs no check without it."""
    return _Simulation(setting, policy, seed, chosen if policy == "selected" else None).run()


def fit_selector(setting: Setting, seed: Sequence[int]) -> Selector | None:
    """Watch the fleet without checks, and learn from it as an operator would.

    None if no check would have found anything.
    """
    # An operator without checks sees every incident, and so which checks would have found its node
    watched = _Simulation(setting, "none", seed, None)
    watched.run()
    sets, counts = np.unique(np.concatenate(watched.would_find), axis=0, return_counts=True)
    if not sets.any():
        return None
    names = np.array(list(setting.minutes))
    incidents = tuple(
        select.Incidents(frozenset(names[found].tolist()), int(count))
        for found, count in zip(sets, counts, strict=True)
    )
    steps = select.plan_check_order(select.Checks(setting.minutes, incidents))
    periods = pd.DataFrame(np.concatenate(watched.periods), columns=["node", "hours", "ended", "earlier"])
    periods["ended"] = periods["ended"].astype(bool)
    # On average an incident comes in the middle between two checkpoints
    # A checkpoint interval longer than a job loses at most the job
    lost_h = setting.restart_h + min(setting.checkpoint_h, setting.job_h) / 2
    at = [select.compute_break_even(step, lost_h, setting.job_nodes, waiting=True) for step in steps]
    # Thresholds must not fall, because searchsorted counts how many of them the expectation exceeds
    return Selector(select.choose_hazard(periods).hazard, steps, np.maximum.accumulate(at))


MOST_NODES = 4_000_000  # nodes times replicas: 1 GiB


@click.command(name="simulate")
@click.option(
    "--fleet", "names", multiple=True, metavar="NAME", help="A published fleet, such as rsc-1; repeatable. [all]"
)
@click.option(
    "--degraded", "shares", multiple=True, type=PercentRange(0, 90), default=("0%", "10%", "50%"), show_default=True,
    metavar="PERCENT",
    help="Share of the time between incidents in which a check can find the fault. "
    "It is not published, so several are tried.",
)  # fmt: skip
@click.option("--job", metavar="TIME", default="24h", show_default=True, help="How long a job trains, such as 24h.")
@click.option("--nodes", type=IntegerRange(1, 100_000), default=16, show_default=True, help="Number of nodes of a job.")
@click.option(
    "--jobs", "groups", type=IntegerRange(1, 10_000), default=16, show_default=True, help="Number of jobs at a time."
)
@click.option(
    "--time", "lasts", metavar="TIME", default="90d", show_default=True, help="How long to simulate, such as 90d."
)
@click.option(
    "--every", metavar="TIME", default="7d", show_default=True, help="Time between checks of the policy `periodic`."
)
@click.option(
    "--check",
    metavar="TIME",
    help="Duration of all checks together, such as 30min. [39min, the sum of assumed durations]",
)
@click.option(
    "--checkpoint",
    metavar="TIME",
    default="1h",
    show_default=True,
    help="Time between checkpoints; 0h: no work is lost.",
)
@click.option(
    "--restart", metavar="TIME", default="15min", show_default=True, help="Time of a restart after an incident."
)
@click.option(
    "--replicas",
    type=IntegerRange(3, 1000),
    default=10,
    show_default=True,
    help="Number of simulated fleets of each kind.",
)
@click.option(
    "--seed",
    type=IntegerRange(0),
    default=1,
    show_default=True,
    help="Random seed; the same seed gives the same output.",
)
@format_option()
def simulate_(
    names: tuple[str, ...], shares: tuple[float, ...], job: str, nodes: int, groups: int, lasts: str, every: str,
    check: str | None, checkpoint: str, restart: str, replicas: int, seed: int, style: str,
) -> None:  # fmt: skip
    """Simulate published fleets, to see the gain and cost of checking nodes before jobs.

    Policies: none; periodic: all checks before the first job after --every; full: all checks before each job; selected:
    before each job the checks that `mlhpc preflight select` chooses. It learns from a fleet without checks.
    """
    fleets = read_fleets().fleets
    for name in names:
        if name not in fleets:
            raise click.UsageError(explain_unknown_name("fleet", name, fleets))
    if nodes * groups * replicas > MOST_NODES:
        raise click.UsageError(
            f"--nodes x --jobs x --replicas is {nodes * groups * replicas:,} nodes; expected at most {MOST_NODES:,}"
        )
    job_h, hours_h = parse_hours("--job", job), parse_hours("--time", lasts)
    if hours_h / job_h > 100_000:
        raise click.UsageError(f"--time {lasts} with --job {job}: expected at most 100,000 jobs one after another")
    cases = []
    for name in dict.fromkeys(names or fleets):
        for share in dict.fromkeys(shares):
            setting = Setting(
                fleets[name], share, groups, nodes, hours_h, replicas, job_h,
                every_h=parse_hours("--every", every), checkpoint_h=parse_hours("--checkpoint", checkpoint, zero=True),
                restart_h=parse_hours("--restart", restart, zero=True),
                check_h=None if check is None else parse_hours("--check", check, zero=True),
            )  # fmt: skip
            # Random numbers of its own: a case gives the same whichever others are simulated
            stream = [seed, zlib.crc32(name.encode()), round(1e6 * share)]
            # Learned on a fleet of its own, with another random stream: a policy must not be tried on its training data
            chosen = fit_selector(replace(setting, replicas=1), [*stream, len(POLICIES)])
            outcomes = [
                run_simulation(setting, policy, [*stream, place], chosen) for place, policy in enumerate(POLICIES)
            ]
            if style == JSON:
                cases.append(convert_case_to_dict(name, setting, outcomes))
                continue
            for line in render_case(name, setting, outcomes, nothing_pays=chosen is None):
                print_line(line)
    if style == JSON:
        print_line(json.dumps({"version": 1, "seed": seed, "cases": cases}, indent=1))


def render_case(name: str, setting: Setting, outcomes: Sequence[Outcome], *, nothing_pays: bool) -> Iterator[str]:
    """Render one fleet and share of degraded time: the parameters with their sources, and a table of the policies."""
    fleet, checks = setting.fleet, read_fleets().checks
    yield f"\n{name}: {fleet.about}; nodes degraded for {setting.degraded:.0%} of the time between incidents (assumed)"
    yield (
        f"  simulated: {setting.replicas} fleets of {setting.groups} jobs at a time, {setting.job_nodes} nodes each, "
        f"for {render_duration(3600 * setting.hours)}; no node was measured"
    )
    yield (
        f"  assumed: jobs of {render_duration(3600 * setting.job_h)}, a checkpoint every "
        f"{render_duration(3600 * setting.checkpoint_h)}, a restart {render_duration(3600 * setting.restart_h)}; "
        f"all nodes wait for checks, {render_duration(60 * sum(setting.minutes.values()))} together; "
        f"periodic: every {render_duration(3600 * setting.every_h)}"
    )
    yield f"  what each check finds: {checks.source} ({checks.mark})"
    parts = (
        ("hours to a node's first incident", fleet.mtbi_h),
        ("power of (1 + incidents) by which they fall", fleet.ages),
        ("Weibull shape of the time until a node degrades", fleet.shape),
        ("share of degraded nodes at the start", fleet.defective),
    )
    for what, each in parts:
        yield f"  {what}{'' if each.value is None else f' {each.value:g}'}: {each.source} ({each.mark})"
    if fleet.note:
        yield f"  {fleet.note}"
    rows = [("", "hours between incidents", "gain", "useful", "checks", "incidents", "repaired")]
    for outcome in outcomes:
        mtbi, plain = outcome.mtbi_h, outcomes[0].mtbi_h
        rows.append(
            (
                outcome.policy,
                _render_estimate(mtbi, "h") if mtbi else f"fewer than {LEAST_INCIDENTS} incidents",
                f"{mtbi.value / plain.value:.3g} times" if mtbi and plain and outcome is not outcomes[0] else "",
                _render_estimate(outcome.share(outcome.useful_h), "%", 100),
                _render_estimate(outcome.share(outcome.checking_h), "%", 100),
                f"{outcome.incidents.sum():,.0f}",
                f"{outcome.repaired.sum():,.0f}",
            )
        )
    yield from (f"    {line}" for line in align_columns(rows))
    if nothing_pays:
        yield "    selected: no check would have found any incident's node before its job; running nothing is best"


def convert_case_to_dict(name: str, setting: Setting, outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Render a case as JSON, with every parameter and its source."""
    policies = {
        outcome.policy: {
            "mtbi_h": outcome.mtbi_h,
            "useful": outcome.share(outcome.useful_h),
            "checking": outcome.share(outcome.checking_h),
            "incidents": outcome.incidents.tolist(),
            "repaired": outcome.repaired.tolist(),
        }
        for outcome in outcomes
    }
    fleet = {"name": name, **msgspec.to_builtins(setting.fleet)}
    return {**vars(setting), "fleet": fleet, "checks": setting.minutes, "policies": policies}


def _render_estimate(estimate: Estimate, unit: str, scale: float = 1.0) -> str:
    return render_interval(scale * estimate.value, scale * estimate.low, scale * estimate.high, unit)
