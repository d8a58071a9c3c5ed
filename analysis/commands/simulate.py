"""The command `mlhpc preflight simulate`: published fleets under no, periodic, full and selected checks of nodes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import click
import msgspec

from mlhpc.analysis.commands.hours import parse_hours
from mlhpc.analysis.drawing.view import render_interval
from mlhpc.analysis.fleet.simulate import (
    LEAST_INCIDENTS,
    POLICIES,
    Estimate,
    Outcome,
    Setting,
    fit_selector,
    read_fleets,
    run_simulation,
)
from mlhpc.suite.cli.options import JSON, FiniteRange, IntegerRange, format_option
from mlhpc.suite.errors import explain_unknown_name
from mlhpc.suite.files import print_line, render_duration

MOST_NODES = 4_000_000  # nodes times replicas: 1 GiB


@click.command(name="simulate")
@click.option(
    "--fleet", "names", multiple=True, metavar="NAME", help="A published fleet, such as rsc-1; repeatable. [all]"
)
@click.option(
    "--degraded", "shares", multiple=True, type=FiniteRange(0, 0.9), default=(0.0, 0.1, 0.5), show_default=True,
    help="Fraction of the time between incidents in which a check can find the fault. "
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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
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
