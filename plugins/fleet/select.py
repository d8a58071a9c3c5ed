"""The command `mlhpc preflight select`: chooses the checks to run on each node before a job, or none.

A check is chosen if it saves more node hours than it costs.

1. The rate of incidents of a node is learned from past periods: a Weibull model (lifelines) or a constant rate.
2. Checks are ordered by how many further incidents each would have found per minute. Several checks may find one
   defect, so the shares of single checks are never added.
3. An incident costs ``lost_h`` on each node of the job. A check costs its minutes on its node, or on all nodes if the
   job waits. Exchanging a node costs nothing more. No check stops an incident that comes without warning.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import click
import msgspec
import numpy as np
import pandas as pd
from msgspec import Meta, Struct
from numpy.typing import NDArray
from scipy import stats

from mlhpc.plugins.fleet.samples import read_table
from mlhpc.suite.cli.options import JSON, format_option
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError, explain_not_installed, explain_unknown_name
from mlhpc.suite.files import print_line, render_duration, render_printable, render_repr

SHORTEST_H, LONGEST_H = 1 / 3600, 1e6  # of times on the command line: 24h, 30min, 7d, 90s
_UNITS = {"min": 1 / 60, "s": 1 / 3600, "h": 1.0, "d": 24.0}


def parse_hours(option: str, text: str, *, zero: bool = False) -> float:
    """Parse a time and return hours. UsageError names the option. With ``zero`` no time at all (0h) is allowed too."""
    for unit, each in _UNITS.items():
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * each
            except ValueError:
                break
            if SHORTEST_H <= value <= LONGEST_H or (zero and value == 0.0):
                return value
    raise click.UsageError(f"{option} {text}: expected a time such as 24h, 30min or 7d, from 1s to {LONGEST_H:.0e}h")


Floats = NDArray[np.float64]
COLUMNS = ("node", "hours", "incidents", "ended")
LEAST_INCIDENTS, LEAST_NODES = 20, 10  # with fewer only a constant rate is learned
FALSE_ALARM_RATE = 0.01  # chance that a fleet with a constant rate is given the Weibull model
PARAMETER_DRAWS = 400  # of the parameters, for an interval


class NodeInterval(Struct, frozen=True, forbid_unknown_fields=True):
    """Holds a time of a node between two events. It begins when the node is known to be healthy; ``ended`` says how it
    ended.

    ``open``: the period lasts, and the node is in the job. ``incidents`` is how many the node had before.
    """

    node: Annotated[str, Meta(min_length=1)]
    hours: Annotated[float, Meta(ge=0, le=1e7)]
    incidents: Annotated[int, Meta(ge=0, le=1_000_000)]
    ended: Literal["incident", "repaired", "removed", "passed", "open"]


def read_node_intervals(paths: Sequence[Path]) -> list[NodeInterval]:
    """Read CSV files of periods.

    InputError names the line. At least one period must be open, and no node may have two.
    """
    found = []
    in_job: dict[str, str] = {}  # place of a node's open period
    for path in paths:
        for where, period in _read_file(path):
            if period.ended == "open":
                if period.node in in_job:
                    raise InputError(
                        f"{where}: node {period.node!r} is in the job twice: {in_job[period.node]} is open too"
                    )
                in_job[period.node] = where
            found.append(period)
    if not in_job:
        raise InputError(
            f"{paths[0]}: no row has ended = open, so the job has no nodes; write open in the last row of its nodes"
        )
    return found


def _read_file(path: Path) -> Iterator[tuple[str, NodeInterval]]:
    """Read the periods of one CSV file, each with its place, ``file:line``."""
    for where, row in read_table(path, COLUMNS):
        # Without empty cells, so that msgspec names a missing field instead of a wrong number
        cells = {name: text for name, text in row.items() if text}
        try:
            period = msgspec.convert(cells, NodeInterval, strict=False)
        except msgspec.ValidationError as error:
            raise InputError(f"{where}: {render_repr(cells, longest=120)}: {error}") from None
        # A Weibull density at time 0 is 0 or infinite unless k = 1, so such a row has no fit
        if period.ended == "incident" and period.hours == 0.0:
            raise InputError(f"{where}: field `hours` is 0 and `ended` is incident; expected a time above 0")
        yield where, period


def build_interval_table(periods: Sequence[NodeInterval]) -> pd.DataFrame:
    """Make a table of periods: node, hours, ended (in an incident), earlier (log of 1 + earlier incidents)."""
    return pd.DataFrame(
        {
            "node": [period.node for period in periods],
            "hours": [period.hours for period in periods],
            "ended": [period.ended == "incident" for period in periods],
            "earlier": [math.log1p(period.incidents) for period in periods],
        }
    )


@dataclass(frozen=True)
class Hazard:
    """Holds a Weibull model: a node has (t / exp(b0 + b earlier))^k expected incidents in t hours.

    A constant rate has k = 1 and b = 0. ``parameters`` are b, b0 and log k, with their ``covariance``.
    """

    parameters: Floats
    covariance: Floats

    @property
    def shape(self) -> float:
        """Return k: below 1 incidents become rarer with the time since the last one, above 1 more frequent."""
        return math.exp(self.parameters[2])

    @property
    def power(self) -> float:
        """Return the power of (1 + earlier incidents) to which the rate is proportional."""
        return -self.shape * float(self.parameters[0])

    def during(self, ages: Floats, job_h: float, earlier: Floats, parameters: Floats | None = None) -> Floats:
        """Compute the expected incidents (N,) of nodes in the next ``job_h`` hours, by their ages."""
        slope, intercept, log_shape = self.parameters if parameters is None else parameters
        scale_h, shape = np.exp(intercept + slope * earlier), math.exp(log_shape)
        # The cumulative hazard up to the end of the job minus that up to now: the node has survived until now
        return np.asarray(((ages + job_h) / scale_h) ** shape - (ages / scale_h) ** shape)

    def interval(self, ages: Floats, job_h: float, earlier: Floats) -> tuple[float, float]:
        """Compute the 90 % interval of the probability that a node has an incident, from draws of the parameters."""
        chance = np.random.default_rng(0)
        draws = chance.multivariate_normal(self.parameters, self.covariance, PARAMETER_DRAWS, method="eigh")
        found = [-math.expm1(-float(self.during(ages, job_h, earlier, draw).sum())) for draw in draws]
        low, high = np.quantile(found, [0.05, 0.95])
        return float(low), float(high)


@dataclass(frozen=True)
class HazardChoice:
    """Holds the chosen model and its basis.

    ``p`` is that of a constant rate against the Weibull model; None: not tested, because the incidents are too few.
    """

    hazard: Hazard
    mtbi_h: float
    periods: int
    nodes: int
    incidents: int
    p: float | None = None


def choose_hazard(table: pd.DataFrame) -> HazardChoice:
    """Choose between a constant rate and the Weibull model. InputError if no period ended in an incident.

    The Weibull model is taken only if the likelihood ratio test rejects a constant rate.
    """
    incidents, nodes = int(table["ended"].sum()), table["node"].nunique()
    if not incidents:
        raise InputError("no row ended in an incident, so no rate can be learned; state it, such as --mtbi 1000h")
    mtbi_h = float(table["hours"].sum()) / incidents
    constant = make_constant_rate(mtbi_h, incidents)
    if incidents < LEAST_INCIDENTS or table.loc[table["ended"], "node"].nunique() < LEAST_NODES:
        return HazardChoice(constant, mtbi_h, len(table), nodes, incidents)
    weibull, log_likelihood = fit(table)
    # A constant rate has the log likelihood -n (log mtbi + 1); twice the difference is chi-squared (Wilks)
    gain = log_likelihood + incidents * (math.log(mtbi_h) + 1.0)
    # Two more parameters than a constant rate, or one if no node had an earlier incident
    p = float(stats.chi2.sf(2.0 * gain, 2 if table["earlier"].nunique() > 1 else 1))
    return HazardChoice(weibull if p < FALSE_ALARM_RATE else constant, mtbi_h, len(table), nodes, incidents, p)


def make_constant_rate(mtbi_h: float, incidents: float = math.inf) -> Hazard:
    """Make a constant rate, learned from ``incidents`` incidents.

    A stated rate has no error, as if from infinitely many.
    """
    # The logarithm of a rate learned from n incidents has variance 1 / n
    return Hazard(np.array([0.0, math.log(mtbi_h), 0.0]), np.diag([0.0, 1.0 / incidents, 0.0]))


def fit(table: pd.DataFrame) -> tuple[Hazard, float]:
    """Fit the Weibull model. Returns its log likelihood too. InputError if lifelines is missing or finds no fit."""
    try:
        from lifelines import WeibullAFTFitter
        from lifelines.exceptions import ConvergenceError
    except ImportError:
        raise InputError(
            f"the rate of incidents cannot be learned: {explain_not_installed('lifelines')}; or state it with --mtbi"
        ) from None
    lasted = table.loc[table["hours"] > 0.0, ["hours", "ended", "earlier"]]  # periods of no hours tell nothing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lifelines calls pandas in ways that pandas will drop
        try:
            formula = "earlier" if lasted["earlier"].nunique() > 1 else "1"
            model = WeibullAFTFitter().fit(lasted, "hours", "ended", formula=formula)
        except ConvergenceError:
            raise InputError("the Weibull model of incidents has no fit: state the rate with --mtbi") from None
    order = [("lambda_", "earlier"), ("lambda_", "Intercept"), ("rho_", "Intercept")]
    parameters = model.params_.reindex(order, fill_value=0.0)
    # Without the covariate, lifelines has no row for it: zeros make it a parameter without an effect
    covariance = model.variance_matrix_.reindex(index=order, columns=order, fill_value=0.0)
    return Hazard(parameters.to_numpy(), covariance.to_numpy()), float(model.log_likelihood_)


class Incidents(Struct, frozen=True, forbid_unknown_fields=True):
    """Holds ``count`` incidents.

    The checks ``found_by`` would have found the node before each of them; empty: none would.
    """

    found_by: frozenset[str]
    count: Annotated[int, Meta(ge=1, le=100_000_000)] = 1


class Checks(Struct, frozen=True, forbid_unknown_fields=True):
    """Holds ``minutes`` of a node that each check takes, and which past incidents the checks would have found."""

    minutes: Annotated[dict[str, Annotated[float, Meta(gt=0, le=100_000)]], Meta(min_length=1)]
    incidents: Annotated[tuple[Incidents, ...], Meta(min_length=1)]

    @property
    def count(self) -> int:
        """Return the number of incidents."""
        return sum(each.count for each in self.incidents)

    def found(self, names: frozenset[str]) -> int:
        """Count the incidents that at least one of the checks would have found."""
        return sum(each.count for each in self.incidents if each.found_by & names)


def read_checks(path: Path) -> Checks:
    """Read a YAML file of `Checks`. InputError names the line."""
    source = YamlSource.read(path)
    checks = source.convert(Checks)
    for each in checks.incidents:
        for name in sorted(each.found_by - set(checks.minutes)):
            raise InputError(
                f"{source.where('incidents')}: {explain_unknown_name('check', name, checks.minutes)}; minutes has those"
            )
    return checks


@dataclass(frozen=True)
class RankedCheck:
    """Holds the next check to add, with shares of incidents.

    It finds ``alone``, and ``adds`` to the checks before it. All checks so far find ``together``, with a 90 % interval
    from ``low`` to ``high``.
    """

    name: str
    minutes: float
    alone: float
    adds: float
    together: float
    low: float
    high: float


def plan_check_order(checks: Checks) -> tuple[RankedCheck, ...]:
    """Order the checks greedily: add the one that finds most further incidents per minute, until none finds any."""
    steps: list[RankedCheck] = []
    chosen: frozenset[str] = frozenset()
    left = dict(sorted(checks.minutes.items()))
    count, found = checks.count, 0
    while left:
        adds = {name: checks.found(chosen | {name}) - found for name in left}
        # Ties go to the first name, because `left` is sorted: the order does not depend on the file
        name = max(left, key=lambda each: adds[each] / left[each])
        if not adds[name]:
            break
        chosen |= {name}
        found += adds[name]
        interval = stats.binomtest(found, count).proportion_ci(0.9)  # Clopper and Pearson
        alone, together = checks.found(frozenset([name])) / count, found / count
        low, high = float(interval.low), float(interval.high)
        steps.append(RankedCheck(name, left.pop(name), alone, adds[name] / count, together, low, high))
    return tuple(steps)


@dataclass(frozen=True)
class Selection:
    """Holds the number of ordered checks to run on each node (``checks``), and what they change.

    ``before`` and ``after`` are the expected incidents of the job. The checks take ``cost_h`` node hours and save
    ``saved_h`` on average.
    """

    checks: tuple[int, ...]
    before: float
    after: float
    cost_h: float
    saved_h: float

    @property
    def risk(self) -> tuple[float, float]:
        """Return the probability of an incident in the job, before and after the checks."""
        return -math.expm1(-self.before), -math.expm1(-self.after)


def choose(expected: Floats, steps: Sequence[RankedCheck], lost_h: float, *, waiting: bool = False) -> Selection:
    """Choose the checks that save more than they cost, for nodes with ``expected`` incidents (N,) in the job.

    ``waiting``: all nodes get the same checks at once.
    """
    nodes, before = len(expected), float(expected.sum())
    units = np.array([before]) if waiting else expected
    # `adds` are shares beyond the checks before, so the incidents removed by several checks can be added
    removed = np.outer(units, [step.adds for step in steps])  # (units, steps): expected incidents
    saved = removed * lost_h * nodes
    hours = np.array([step.minutes / 60.0 for step in steps])
    # If the job waits, a check costs its minutes on every node
    cost = np.broadcast_to(hours * (nodes if waiting else 1), removed.shape)
    # Each step saves less per minute than the step before, so no step pays after the first one that does not
    counts = np.cumprod(saved > cost, axis=1).sum(axis=1)
    run = np.arange(len(steps)) < counts[:, None]
    after, cost_h, saved_h = before - float(removed[run].sum()), float(cost[run].sum()), float(saved[run].sum())
    checks = np.repeat(counts, nodes) if waiting else counts
    return Selection(tuple(checks.tolist()), before, after, cost_h, saved_h)


def compute_break_even(step: RankedCheck, lost_h: float, nodes: int, *, waiting: bool = False) -> float:
    """Compute from how many expected incidents a check saves more than it costs.

    They are those of a node, with ``waiting`` those of all nodes.
    """
    return step.minutes / 60.0 / (step.adds * lost_h * (1 if waiting else nodes))


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
MOST_NAMED_NODES = 12  # of which the names are printed


@click.command()
@click.option(
    "--nodes",
    "files",
    multiple=True,
    required=True,
    type=_FILE,
    help="CSV file with node, hours, incidents, ended: how long nodes ran between them (docs/fleet.md); repeatable.",
)
@click.option("--job", metavar="TIME", required=True, help="How long the job will run, such as 24h.")
@click.option(
    "--checks",
    "known",
    required=True,
    type=_FILE,
    help="YAML file: minutes of each check, and which past incidents it finds.",
)
@click.option(
    "--lost", metavar="TIME", help="Time that an incident costs the job, restart included, such as 2h. [half of --job]"
)
@click.option(
    "--waiting", is_flag=True, help="The whole job waits for checks, so all nodes get the same checks at once."
)
@click.option(
    "--mtbi", metavar="TIME", help="Mean time between incidents of a node, such as 1000h. [learned from --nodes]"
)
@format_option()
def select(
    files: tuple[Path, ...], job: str, known: Path, lost: str | None, waiting: bool, mtbi: str | None, style: str
) -> None:
    """Choose the checks to run on each node before a job. A check is chosen if it saves more node hours than it costs.

    Nodes of the job are those whose last row in --nodes is `open`. The rate of incidents is learned from all rows. It
    depends on a node's age and past only if a test rejects a constant rate.
    """
    job_h = parse_hours("--job", job)
    lost_h = job_h / 2 if lost is None else parse_hours("--lost", lost)
    checks = read_checks(known)
    steps = plan_check_order(checks)
    periods = read_node_intervals(files)
    table = build_interval_table(periods)
    learned = None
    if mtbi is None:
        learned = choose_hazard(table)
        hazard = learned.hazard
    else:
        hazard = make_constant_rate(parse_hours("--mtbi", mtbi))
    in_job = [period.ended == "open" for period in periods]
    nodes = table["node"][in_job].tolist()
    ages, earlier = table["hours"][in_job].to_numpy(), table["earlier"][in_job].to_numpy()
    expected = hazard.during(ages, job_h, earlier)
    # The choice is by node: older or often repaired nodes may need more checks
    plan = choose(expected, steps, lost_h, waiting=waiting)
    # A stated rate has no error, so no interval
    interval = hazard.interval(ages, job_h, earlier) if learned is not None else None
    runs = {node: [step.name for step in steps[:count]] for node, count in zip(nodes, plan.checks, strict=True)}
    if style == JSON:
        data = {
            "version": 1,
            "risk_before": plan.risk[0],
            "risk_interval": interval,
            "risk_after": plan.risk[1],
            "cost_node_h": plan.cost_h,
            "saved_node_h": plan.saved_h,
            "checks": [asdict(step) for step in steps],
            "nodes": {
                node: {"risk": -math.expm1(-each), "run": runs[node]}
                for node, each in zip(nodes, expected.tolist(), strict=True)
            },
            "shape": hazard.shape,
            "p": None if learned is None else learned.p,
            **{"job_h": job_h, "lost_h": lost_h, "waiting": waiting},
        }
        print_line(json.dumps(data, indent=1))
        return
    print_line(f"an incident of a node every {mtbi}, as stated" if learned is None else render_hazard(learned))
    within = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    print_line(
        f"P(incident) of the job, {render_duration(3600 * job_h)} on {len(nodes)} nodes: {plan.risk[0]:.3f}{within}"
    )
    for line in (*render_costs(checks, steps, lost_h, len(nodes), waiting), *render_selection(plan, runs, steps)):
        print_line(render_printable(line))


def render_hazard(learned: HazardChoice) -> str:
    """Render the learned rate of incidents and its basis."""
    rate = f"an incident of a node every {render_duration(3600 * learned.mtbi_h)}"
    basis = f"{learned.incidents} incidents in {learned.periods} periods of {learned.nodes} nodes"
    if learned.p is None:
        return f"{rate}, whatever its state: {basis} are too few to learn more"
    if learned.p >= FALSE_ALARM_RATE:
        return f"{rate}, whatever its state: {basis}; a Weibull model is not surely better (p = {learned.p:.2g})"
    return (
        f"Weibull of shape {learned.hazard.shape:.2f}, rate times (1 + earlier incidents) to the power "
        f"{learned.hazard.power:.2f}: {basis}; better than a constant rate (p = {learned.p:.2g})"
    )


def render_costs(
    checks: Checks, steps: tuple[RankedCheck, ...], lost_h: float, nodes: int, waiting: bool
) -> Iterator[str]:
    """Render the costs, and the chance of an incident above which each check pays."""
    who = "all nodes wait for it" if waiting else "on its node; the others do not wait"
    yield f"costs: an incident {render_duration(3600 * lost_h)} of all {nodes} nodes, a check its minutes, {who}"
    of = "P(incident) of the job" if waiting else "a node's P(incident)"
    for step in steps:
        at = -math.expm1(-compute_break_even(step, lost_h, nodes, waiting=waiting))
        yield (
            f"  {step.name}: {render_duration(60 * step.minutes)}, finds {step.alone:.1%} of {checks.count} incidents, "
            f"{step.adds:.1%} more than those above, {step.together:.1%} [{step.low:.1%}, {step.high:.1%}] together; "
            f"pays where {of} is above {at:.2g}"
        )
    useless = sorted(set(checks.minutes) - {step.name for step in steps})
    if useless:
        yield f"  add nothing to those: {', '.join(useless)}"


def render_selection(plan: Selection, runs: dict[str, list[str]], steps: tuple[RankedCheck, ...]) -> Iterator[str]:
    """Render what to run on which nodes, or that nothing should be run."""
    if not plan.cost_h:
        yield f"run nothing: {'every check costs more than it saves' if steps else 'no check finds anything'}"
        return
    # From the nodes with most checks to those with none
    for count in range(len(steps), -1, -1):
        named = sorted(node for node, names in runs.items() if len(names) == count)
        if named:
            what = ", ".join(step.name for step in steps[:count]) or "nothing"
            more = f" and {len(named) - MOST_NAMED_NODES} more" if len(named) > MOST_NAMED_NODES else ""
            yield f"run {what} on {len(named)} nodes: {','.join(named[:MOST_NAMED_NODES])}{more}"
    yield (
        f"then P(incident) is {plan.risk[1]:.3f}; checks take {plan.cost_h:.3g} node hours and save "
        f"{plan.saved_h:.3g} on average"
    )
