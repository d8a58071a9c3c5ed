"""The command `mlhpc preflight select`: chooses the checks to run on the nodes of a job before it, or none."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from mlhpc.analysis.commands.hours import parse_hours
from mlhpc.analysis.fleet import select as model
from mlhpc.suite.cli.options import JSON, format_option
from mlhpc.suite.files import print_line, render_duration, render_printable

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
    checks = model.read_checks(known)
    steps = model.plan_check_order(checks)
    periods = model.read_node_intervals(files)
    table = model.build_interval_table(periods)
    learned = None
    if mtbi is None:
        learned = model.choose_hazard(table)
        hazard = learned.hazard
    else:
        hazard = model.make_constant_rate(parse_hours("--mtbi", mtbi))
    in_job = [period.ended == "open" for period in periods]
    nodes = table["node"][in_job].tolist()
    ages, earlier = table["hours"][in_job].to_numpy(), table["earlier"][in_job].to_numpy()
    expected = hazard.during(ages, job_h, earlier)
    # The choice is by node: older or often repaired nodes may need more checks
    plan = model.choose(expected, steps, lost_h, waiting=waiting)
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


def render_hazard(learned: model.HazardChoice) -> str:
    """Render the learned rate of incidents and its basis."""
    rate = f"an incident of a node every {render_duration(3600 * learned.mtbi_h)}"
    basis = f"{learned.incidents} incidents in {learned.periods} periods of {learned.nodes} nodes"
    if learned.p is None:
        return f"{rate}, whatever its state: {basis} are too few to learn more"
    if learned.p >= model.FALSE_ALARM_RATE:
        return f"{rate}, whatever its state: {basis}; a Weibull model is not surely better (p = {learned.p:.2g})"
    return (
        f"Weibull of shape {learned.hazard.shape:.2f}, rate times (1 + earlier incidents) to the power "
        f"{learned.hazard.power:.2f}: {basis}; better than a constant rate (p = {learned.p:.2g})"
    )


def render_costs(
    checks: model.Checks, steps: tuple[model.RankedCheck, ...], lost_h: float, nodes: int, waiting: bool
) -> Iterator[str]:
    """Render the costs, and the chance of an incident above which each check pays."""
    who = "all nodes wait for it" if waiting else "on its node; the others do not wait"
    yield f"costs: an incident {render_duration(3600 * lost_h)} of all {nodes} nodes, a check its minutes, {who}"
    of = "P(incident) of the job" if waiting else "a node's P(incident)"
    for step in steps:
        at = -math.expm1(-model.compute_break_even(step, lost_h, nodes, waiting=waiting))
        yield (
            f"  {step.name}: {render_duration(60 * step.minutes)}, finds {step.alone:.1%} of {checks.count} incidents, "
            f"{step.adds:.1%} more than those above, {step.together:.1%} [{step.low:.1%}, {step.high:.1%}] together; "
            f"pays where {of} is above {at:.2g}"
        )
    useless = sorted(set(checks.minutes) - {step.name for step in steps})
    if useless:
        yield f"  add nothing to those: {', '.join(useless)}"


def render_selection(
    plan: model.Selection, runs: dict[str, list[str]], steps: tuple[model.RankedCheck, ...]
) -> Iterator[str]:
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
