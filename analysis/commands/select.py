"""The command `mlhpc preflight select`: which checks to run on which nodes before a job, and when to run none."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from analysis.commands.hours import hours
from analysis.fleet import hazard as model
from analysis.fleet import selector
from analysis.fleet.spells import OPEN, Spell, read_spells
from suite.cli.options import JSON, format_option
from suite.files import duration_text, print_line, printable

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
MANY_NODES = 12  # of which the names are printed


@click.command()
@click.option("--nodes", "files", multiple=True, required=True, type=_FILE, help="Spells of the job's nodes.")
@click.option("--job", metavar="TIME", required=True, help="How long the job will run, e.g. 24h.")
@click.option("--checks", "known", required=True, type=_FILE, help="YAML file: minutes of checks, and what they found.")
@click.option("--lost", metavar="TIME", help="What an incident costs the job, restart included. [half of the job]")
@click.option(
    "--risk", type=click.FloatRange(0, 1, min_open=True, max_open=True), help="Check until P(incident) is this."
)
@click.option("--waiting", is_flag=True, help="The whole job waits for checks: all nodes get the same ones at once.")
@click.option("--mtbi", metavar="TIME", help="Mean time between incidents of a node. [learned from the spells]")
@format_option()
def select(
    files: tuple[Path, ...],
    job: str,
    known: Path,
    lost: str | None,
    risk: float | None,
    waiting: bool,
    mtbi: str | None,
    style: str,
) -> None:
    """Choose the checks to run on each node before a job: those that remove most incidents per minute and save more than they cost.

    The job's nodes are those with an open spell in --nodes (JSON Lines or CSV, docs/fleet.md); the other spells are what is learned
    from. A node's state counts only where it tells more of nodes that were not seen than a constant rate does.
    """
    job_h = hours("--job", job)
    lost_h = job_h / 2 if lost is None else hours("--lost", lost)
    steps = selector.order_checks(checks := selector.read_checks(known))
    spells = read_spells(files)
    table = model.tabulate(spells)
    stated = None if mtbi is None else model.constant_rate(hours("--mtbi", mtbi), table.names)
    learned = None if stated is not None else model.learn(table)
    used = stated if learned is None else learned.hazard
    assert used is not None
    rows = np.array([spell.ended == OPEN for spell in spells])
    nodes = [spell for spell in spells if spell.ended == OPEN]
    expected = used.during(table.hours[rows], job_h, table.x[rows])
    plan = selector.select(expected, steps, lost_h, waiting=waiting, risk=risk)
    interval = None if learned is None else used.interval(table.hours[rows], job_h, table.x[rows])
    if style == JSON:
        data = as_dict(plan, nodes, expected.tolist(), steps)
        data |= {"risk_interval": interval, "shape": used.shape, "better_per_incident": learned and learned.better}
        print_line(json.dumps(data | {"job_h": job_h, "lost_h": lost_h, "waiting": waiting}, indent=1))
        return
    text = [hazard_line(used, learned), *reasons(plan, nodes, steps, checks, job_h, lost_h, interval, waiting)]
    print_line("\n".join(map(printable, [*text, *advice(plan, [spell.node for spell in nodes], steps, risk)])))


def hazard_line(used: model.Hazard, learned: model.Learned | None) -> str:
    """What is said of incidents, and what it rests on."""
    rate = f"an incident of a node every {used.unit_h:.4g} h"
    if learned is None:
        return f"{rate}, as stated"
    basis = f"{learned.incidents} incidents in {learned.spells} spells of {learned.nodes} nodes"
    if learned.better is None or learned.error is None:
        return f"{rate}, whatever its state: {basis} are too few to learn more"
    by = f"by {learned.better:.3f} ± {learned.error:.3f} log likelihood per incident"
    if not learned.remembers:
        return f"{rate}, whatever its state: {basis}; a Weibull model is not surely better for nodes not seen ({by})"
    factors = np.exp(used.theta[2:] / used.scale).tolist()
    each = {model.EARLIER: "(1 + earlier incidents) to the power {:.2f}", model.SLOWER: "{:.2f} per 1 % slower"}
    what = [
        each[name].format(math.log(factor) if name == model.EARLIER else factor**0.01)
        for name, factor in zip(used.names, factors, strict=True)
    ]
    times = f", rate times {' times '.join(what)}" if what else ""
    return f"Weibull of shape {used.shape:.2f}{times}: {basis}; better than a constant rate for nodes not seen {by}"


def reasons(
    plan: selector.Plan, nodes: list[Spell], steps: tuple[selector.Step, ...], checks: selector.Checks,
    job_h: float, lost_h: float, interval: tuple[float, float] | None, waiting: bool,
) -> list[str]:  # fmt: skip
    """The risk, the model of costs, and from which chance on each check pays."""
    who = "all nodes wait for it" if waiting else "on the node that it runs on; the others do not wait"
    within = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
    text = [
        f"P(incident) of the job, {job_h:g} h on {len(nodes)} nodes: {plan.risk[0]:.3f}{within}",
        f"costs: an incident {duration_text(3600 * lost_h)} of all {len(nodes)} nodes, a check its minutes, {who}; "
        "an exchanged node nothing more",
    ]
    of = "P(incident) of the job" if waiting else "a node's P(incident)"
    for step in steps:
        at = -math.expm1(-selector.pays_from(step, lost_h, len(nodes), waiting=waiting))
        text.append(
            f"  {step.name}: {step.minutes:g} min, finds {step.alone:.1%} of {checks.count} incidents, {step.adds:.1%} more than "
            f"those above, {step.together:.1%} [{step.low:.1%}, {step.high:.1%}] together; pays where {of} is above {at:.2g}"
        )
    useless = sorted(set(checks.minutes) - {step.name for step in steps})
    if useless:
        text.append(f"  add nothing to those: {', '.join(useless)}")
    return text


def advice(plan: selector.Plan, nodes: list[str], steps: tuple[selector.Step, ...], risk: float | None) -> list[str]:
    """What to run where, or that nothing is best."""
    if not plan.cost_h:
        if risk is not None:
            why = f"the risk is no more than {risk:g}" if plan.met else "no check finds anything"
        else:
            why = "every check costs more than it saves" if steps else "no check finds anything"
        return [f"run nothing: {why}"]
    text = []
    for count, named in selector.groups(plan, nodes).items():
        who = (
            ",".join(named)
            if len(named) <= MANY_NODES
            else f"{','.join(named[:MANY_NODES])} and {len(named) - MANY_NODES} more"
        )
        what = ", ".join(step.name for step in steps[:count]) or "nothing"
        text.append(f"run {what} on {len(named)} nodes: {who}")
    text.append(
        f"then P(incident) is {plan.risk[1]:.3f}; checks take {plan.cost_h:.3g} node hours and save {plan.saved_h:.3g} on average"
    )
    if risk is not None and not plan.met:
        text.append(f"all checks that find anything leave more than the {risk:g} asked for")
    return text


def as_dict(
    plan: selector.Plan, nodes: list[Spell], expected: list[float], steps: tuple[selector.Step, ...]
) -> dict[str, Any]:
    """The choice as JSON."""
    names = [step.name for step in steps]
    return {
        "version": 1,
        "risk_before": plan.risk[0],
        "risk_after": plan.risk[1],
        "cost_node_h": plan.cost_h,
        "saved_node_h": plan.saved_h,
        "met": plan.met,
        "checks": [asdict(step) for step in steps],
        "nodes": {
            spell.node: {"risk": -math.expm1(-each), "run": names[:count]}
            for spell, each, count in zip(nodes, expected, plan.checks, strict=True)
        },
    }
