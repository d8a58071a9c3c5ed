"""The command `mlhpc preflight simulate`: published fleets under no, periodic, full and selected checks of nodes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from analysis.commands.hours import hours
from analysis.fleet.fleets import Fleet, published
from analysis.fleet.incidents import TOLD, Node, interval_for_gain, together_mtbi_h
from analysis.fleet.simulation import (
    LEAST,
    POLICIES,
    Estimate,
    Outcome,
    Policy,
    Setting,
    learn_selector,
    observe,
    simulate,
)
from analysis.page.digits import with_interval
from suite.cli.options import JSON, format_option
from suite.documents import plain
from suite.errors import unknown
from suite.files import print_line

MOST_NODES = 4_000_000  # nodes times replicas: 1 GiB


@dataclass(frozen=True)
class Case:
    """One fleet and share of degraded time, under all policies. ``chosen``: the checks that may be selected; None: none pays."""

    name: str
    setting: Setting
    outcomes: tuple[Outcome, ...]
    chosen: tuple[str, ...] | None

    @property
    def node(self) -> Node:
        """The two-stage model of a node without earlier incidents."""
        mtbi, share = self.setting.fleet.mtbi_h.value, self.setting.degraded
        return Node((1.0 - share) * mtbi, share * mtbi)


@click.command(name="simulate")
@click.option("--fleet", "names", multiple=True, metavar="NAME", help="A published fleet; may be repeated. [all]")
@click.option(
    "--degraded", "shares", multiple=True, type=click.FloatRange(0, 0.9), default=(0.0, 0.1, 0.5), show_default=True,
    help="Share of the time between incidents in which a node is degraded, so that checks can find it. Nobody published it.",
)  # fmt: skip
@click.option("--job", metavar="TIME", default="24h", show_default=True, help="How long a job trains.")
@click.option("--nodes", type=click.IntRange(1, 100_000), default=16, show_default=True, help="Nodes of a job.")
@click.option("--jobs", "groups", type=click.IntRange(1, 10_000), default=16, show_default=True, help="Jobs at a time.")
@click.option(
    "--time", "lasts", metavar="TIME", default="90d", show_default=True, help="How long the fleet is simulated."
)
@click.option("--every", metavar="TIME", default="7d", show_default=True, help="Time between periodic checks.")
@click.option("--check", metavar="TIME", help="What all checks together take. [39min, assumed check by check]")
@click.option("--checkpoint", metavar="TIME", default="1h", show_default=True, help="Time between checkpoints.")
@click.option("--restart", metavar="TIME", default="15min", show_default=True, help="What a restart takes.")
@click.option("--replicas", type=click.IntRange(3, 1000), default=10, show_default=True, help="Fleets of each kind.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="The same seed prints the same.")
@format_option()
def simulate_(
    names: tuple[str, ...], shares: tuple[float, ...], job: str, nodes: int, groups: int, lasts: str, every: str,
    check: str | None, checkpoint: str, restart: str, replicas: int, seed: int, style: str,
) -> None:  # fmt: skip
    """Simulate published fleets and say what checks of nodes before jobs would gain and cost.

    Policies: none; periodic, all checks before the first job after --every; full, all checks before each job; selected, those that
    `mlhpc preflight select` would choose before each job after watching such a fleet without checks for as long. Gains are printed
    with the rates that they belong to: they are theirs.
    """
    known = published().fleets
    for name in names:
        if name not in known:
            raise click.UsageError(f"--fleet: {unknown('fleet', name, known)}")
    if nodes * groups * replicas > MOST_NODES:
        raise click.UsageError(
            f"--nodes x --jobs x --replicas = {nodes * groups * replicas:,}: expected up to {MOST_NODES:,}"
        )
    common: dict[str, Any] = {
        "groups": groups, "job_nodes": nodes, "hours": hours("--time", lasts), "replicas": replicas,
        "job_h": hours("--job", job), "every_h": hours("--every", every),
        "checkpoint_h": hours("--checkpoint", checkpoint, zero=True), "restart_h": hours("--restart", restart, zero=True),
        "check_h": None if check is None else hours("--check", check, zero=True),
    }  # fmt: skip
    if common["hours"] / common["job_h"] > 100_000:
        raise click.UsageError(f"--time {lasts} of jobs of {job}: expected up to 100,000 jobs one after another")
    cases = (
        run_case(name, Setting(fleet=known[name], degraded=share, **common), seed)
        for name in dict.fromkeys(names or known)
        for share in dict.fromkeys(shares)
    )
    if style == JSON:
        print_line(json.dumps({"version": 1, "seed": seed, "cases": [as_dict(case) for case in cases]}, indent=1))
        return
    told = ""
    for case in cases:
        for line in () if told else assumptions(case.setting, seed):
            print_line(line)
        for line in () if told == case.name else fleet_lines(case.name, case.setting):
            print_line(line)
        told = case.name
        for line in case_lines(case):
            print_line(line)


def run_case(name: str, setting: Setting, seed: int) -> Case:
    """Simulate all policies, each with random numbers of its own."""
    stream = [seed, zlib.crc32(name.encode()), round(1e6 * setting.degraded)]
    watched = Setting(**{**vars(setting), "replicas": 1})
    chosen = learn_selector(watched, observe(watched, [*stream, len(POLICIES)]))
    outcomes = [simulate(setting, policy, [*stream, place], chosen) for place, policy in enumerate(POLICIES)]
    return Case(name, setting, tuple(outcomes), None if chosen is None else tuple(step.name for step in chosen.steps))


def assumptions(setting: Setting, seed: int) -> Iterator[str]:
    """What holds for all fleets, and where checks are from."""
    found = published().checks
    minutes = sum(each for _, each in setting.steps)
    source = f"{found.minutes.source} ({found.minutes.mark})" if setting.check_h is None else "as stated"
    yield (
        f"simulated: {setting.replicas} fleets of {setting.groups} jobs at a time, {setting.job_nodes} nodes each, for "
        f"{setting.hours:g} h, seed {seed}; no node was measured"
    )
    yield (
        f"assumed: jobs of {setting.job_h:g} h, a checkpoint every {setting.checkpoint_h:g} h, a restart {setting.restart_h:g} h; "
        f"all nodes wait for checks; periodic: every {setting.every_h:g} h"
    )
    yield f"checks: {len(setting.steps)}, {minutes:.3g} min together: {source}; what each finds: {found.source} ({found.mark})"


def fleet_lines(name: str, setting: Setting) -> Iterator[str]:
    """The parameters of a fleet with their sources, and what they say of jobs."""
    fleet = setting.fleet
    yield f"\n{name}: {fleet.about}"
    parts = (
        ("hours to a node's first incident", fleet.mtbi_h),
        ("power of (1 + incidents) by which they fall", fleet.ages),
        ("Weibull shape of the time until a node degrades", fleet.shape),
        ("share of degraded nodes at the start", fleet.defective),
    )
    for what, each in parts:
        value = "" if each.value is None else f" {each.value:g}"
        yield f"  {what}{value}: {each.source} ({each.mark})"
    yield f"  a job of {setting.job_nodes} nodes has one every {_job_h(fleet, setting.job_nodes):.4g} h by the first of these"
    if fleet.measured_h is not None:
        of = fleet.measured_h
        yield f"  a job of {of.nodes} nodes every {_job_h(fleet, of.nodes):.3g} h, but {of.hours:g} h were measured ({of.source})"


def case_lines(case: Case) -> Iterator[str]:
    """A table of the policies, under the rates that it holds for."""
    setting, node = case.setting, case.node
    yield (
        f"  healthy for {node.healthy_h:.4g} h, then degraded for {node.degraded_h:.4g} h ({setting.degraded:.0%}, assumed); "
        "means and 95 % intervals over fleets"
    )
    if not node.degraded_h:
        yield "    incidents come without warning: no check gains anything, by the closed form 1.000 times"
    elif setting.fleet.is_constant:
        minutes = sum(each for _, each in setting.steps)
        yield f"    closed form: {'; '.join(_needs(node, gain, minutes) for gain in TOLD)}"
    rows: list[tuple[str, ...]] = [
        ("", "hours between incidents", "closed form", "gain", "useful", "checks", "incidents", "repaired")
    ]
    rows += [_row(case, outcome) for outcome in case.outcomes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if case.chosen is None:
        yield "    selected: no check would have found any incident's node before its job; running nothing is best"


def closed_form_h(case: Case, outcome: Outcome) -> float | None:
    """Hours between incidents in the long run, for fleets of constant rates: without checks, and before jobs as long as these."""
    if not case.setting.fleet.is_constant or outcome.policy not in ("none", "full"):
        return None
    if outcome.policy == "none":
        return case.node.healthy_h + case.node.degraded_h
    jobs = outcome.useful_h.sum() / case.setting.job_h
    return together_mtbi_h(case.node, float(outcome.total_h.sum() / jobs))


def as_dict(case: Case) -> dict[str, Any]:
    """A case as JSON, with every parameter and its source."""
    setting = case.setting
    numbers = {name: value for name, value in vars(setting).items() if name != "fleet"}
    policies: dict[Policy, Any] = {}
    for outcome in case.outcomes:
        policies[outcome.policy] = {
            "mtbi_h": outcome.mtbi_h,
            "gain": None if outcome is case.outcomes[0] else outcome.gain(case.outcomes[0]),
            "closed_form_h": closed_form_h(case, outcome),
            "useful": outcome.share(outcome.useful_h),
            "checking": outcome.share(outcome.checking_h),
            "incidents": outcome.incidents.tolist(),
            "repaired": outcome.repaired.tolist(),
        }
    parameters = plain(setting.fleet) | {"name": case.name}
    rates = {"healthy_h": case.node.healthy_h, "degraded_h": case.node.degraded_h}
    return {
        "fleet": parameters,
        **numbers,
        **rates,
        "checks": dict(setting.steps),
        "policies": policies,
        "chosen": case.chosen,
    }


def _job_h(fleet: Fleet, nodes: int) -> float:
    return fleet.mtbi_h.value / nodes


def _needs(node: Node, gain: float, minutes: float) -> str:
    every = interval_for_gain(node, gain)
    if every is None:
        return f"no checks gain {gain:g} times"
    return f"{gain:g} times needs checks every {every:.3g} h, of which they take {minutes / 60.0 / every:.1%}"


def _row(case: Case, outcome: Outcome) -> tuple[str, ...]:
    closed, plain = closed_form_h(case, outcome), case.outcomes[0]
    gain = None if outcome is plain else outcome.gain(plain)
    few = f"fewer than {LEAST} incidents"
    return (
        outcome.policy,
        _text(outcome.mtbi_h, "h") if outcome.mtbi_h else few,
        "" if closed is None else f"{closed:,.0f} h",
        "" if outcome is plain else _text(gain, "times") if gain else few,
        _text(outcome.share(outcome.useful_h), "%", 100),
        _text(outcome.share(outcome.checking_h), "%", 100),
        f"{outcome.incidents.sum():,.0f}",
        f"{outcome.repaired.sum():,.0f}",
    )


def _text(estimate: Estimate, unit: str, scale: float = 1.0) -> str:
    return with_interval(scale * estimate.value, scale * estimate.low, scale * estimate.high, unit)
