"""`mlhpc score`: prints the scores of run folders, result folders and packages, as text or JSON. Reads only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlhpc.suite.card import render_baselines
from mlhpc.suite.cli.options import JSON, card_option, format_option
from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.exchange.figures_of_merit import build_result_documents, render_lines
from mlhpc.suite.compliance.result import Result, find_named_run
from mlhpc.suite.compliance.ruleset import list_rulesets, read_ruleset
from mlhpc.suite.compliance.verdict import assess
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, render_duration, render_duration_range, render_printable
from mlhpc.suite.log.other_work import render_busy_warning
from mlhpc.suite.log.results_tree import describe_near_logs
from mlhpc.suite.log.run_folder import find_continue_command
from mlhpc.suite.log.score import JudgedRun, Throughput, TimeToTrain, find_log_name
from mlhpc.suite.statistics.sessions import describe_order

if TYPE_CHECKING:
    from mlhpc.suite.log.energy.score import EnergyToSolution

FOM = "fom"
_KWH_J = 3.6e6  # joules of a kilowatt hour
_LISTED_NOTES = 8  # lines of notes at most; --format json has all


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@card_option
@click.option("--explain", is_flag=True, help="Show for each run its time, and whether and why it counts in the score.")
@format_option(
    FOM, meaning="; fom prints a line for each figure of merit, as benchmark drivers read them (docs/exchange.md)"
)
@click.option(
    "--energy",
    is_flag=True,
    help="Also show the energy to solution (joules from run_start to run_stop) of each run and of the result.",
)
@click.option(
    "--ruleset",
    "ruleset_name",
    metavar="NAME",
    help=f"Judge by these rules: {', '.join(list_rulesets())}. [those of the log or its folder]",
)
def score(paths: tuple[Path, ...], explain: bool, style: str, energy: bool, ruleset_name: str | None) -> None:
    """Compute scores by the MLPerf HPC rules: olympic mean of time to train, or throughput of instances.

    PATHS are run folders, results folders, packages or rounds. Each score says whether its result is compliant.

    Exit code 0: every result is compliant and has a score, with --energy also one of energy. Exit code 1: one has not.
    Exit code 2: usage, or nothing to score.

    \b
    Examples:
      mlhpc score runs/cosmoflow-mini-20260101T120000Z --explain
      mlhpc score runs/cosmoflow-mini-20260101T120000Z --energy
      mlhpc score submissions/ACME --format json
    """
    if ruleset_name is not None:
        read_ruleset(ruleset_name)
    verdict = check(list(paths), ruleset_name)
    scored, unread = verdict.results, verdict.print_unread()
    if style == JSON:
        print_line(json.dumps({"version": 1, "groups": _build_documents(scored, energy=energy)}, indent=1))
    elif style == FOM:
        print_line(render_lines(scored), end="")
    else:
        for item in scored:
            _print_result(item, explain=explain, energy=energy)
    # JSON has an empty list for a program to read, so only the exit code says it.
    without = next((finding for finding in verdict.findings if finding.rule == "round-known"), None)
    if not scored and without is not None and style != JSON:
        raise InputError(f"{without.file}: {without.message}")
    if not scored and style != JSON:
        raise InputError(
            f"no result_*.txt under {', '.join(map(str, paths))}: nothing to score{describe_near_logs(paths)}; "
            "expected run folders, results folders or packages"
        )
    if not scored:
        raise click.exceptions.Exit(ExitCode.USAGE)
    if unread or not all(_is_scored(item, energy=energy) for item in scored):
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def _print_result(item: Result, *, explain: bool, energy: bool) -> None:
    text = render_result(item, explain=explain or not item.score.valid)
    if energy:
        text += render_energy(item)
    print_line("\n".join(map(render_printable, text)))


def _build_documents(scored: Sequence[Result], *, energy: bool) -> list[dict[str, Any]]:
    """Return all results for --format json."""
    groups = build_result_documents(scored)
    if energy:
        for group, item in zip(groups, scored, strict=True):
            group["energy"] = build_energy_document(item)
    return groups


def _is_scored(item: Result, *, energy: bool) -> bool:
    """Return True if a result is compliant and has a score, with ``energy`` also one of energy."""
    return item.valid and (not energy or (item.energy is not None and item.energy.valid))


def render_result(scored: Result, *, explain: bool) -> list[str]:
    """Render one result for a terminal. With ``explain`` each run has a line."""
    first, runs = find_named_run(scored.runs), scored.score.runs
    benchmark = scored.group.benchmark or first.benchmark or "no benchmark"
    size = f" {first.size}" if first.size else ""
    text = [
        str(scored.group.folder),
        f"  {benchmark}{size}, {scored.division or 'no division'}, {scored.scenario}",
        f"  {_render_headline(scored)}",
    ]
    if scored.verdict:
        text.append(f"  {scored.verdict}")
    if busy := render_busy_warning([run.company for run in scored.runs]):
        text.append(f"  {busy}")
    if slept := [(run.trial, run.suspended_s) for run in scored.runs if run.suspended_s]:
        text.append("  suspended: " + ", ".join(f"run {trial} for {render_duration(s)}" for trial, s in slept))
    standing = assess(scored)
    if standing.disturbed:
        text.append(f"  not ranked: {standing.disturbed}")
    if isinstance(scored.score, TimeToTrain) and standing.sessions == 1:
        text += [f"  in their order: {each}" for each in describe_order(standing.runs, "this result").texts]
    baselines: dict[str, None] = {}  # each line once: the runs of a result log the same baselines
    for run in scored.runs:
        # A dict keeps the order of the lines.
        baselines |= dict.fromkeys(render_baselines(run.baselines, run.oracle_baselines))
    text += [f"  {line}" for line in baselines]
    if first.suite_version and not any(run.baselines for run in scored.runs):
        text.append("  simple predictors: not logged (the card of this size states none)")
    ended = [run for run in runs if run.record.path not in scored.unfinished_logs]
    if not explain:  # the one run that may fail, or a log that was cut
        text += [f"  {find_log_name(run)} did not converge: {run.failure}" for run in ended if run.failure is not None]
    if explain:
        width = max(len(find_log_name(run)) for run in runs)
        fates = [_describe_use(run) if run in ended else "under way" for run in runs]
        text += [
            f"    {find_log_name(run):{width}}  {_render_run_time(run)}  {fate}"
            for run, fate in zip(runs, fates, strict=True)
        ]
    return text


def _render_headline(scored: Result) -> str:
    result = scored.score
    if not result.valid:
        missing = result.required_runs - sum(not run.record.resumed for run in result.runs)
        alone = scored.group.package is None and not scored.under_way and isinstance(result, TimeToTrain)
        way = find_continue_command(scored.group.folder, more=missing) if alone and missing > 0 else None
        return f"{result.reason}; to go on: {way}" if way else str(result.reason)
    if isinstance(result, Throughput):
        return _render_throughput(result)
    assert result.mean_s is not None
    factor = scored.scale_factor  # of a scaling.json that the package ships
    scaled = f"; with the shipped scaling.json {render_duration(result.mean_s * factor)}" if factor else ""
    return (
        f"score {render_duration(result.mean_s)} ({_render_time(result.mean_with_staging_s)} with staging){scaled}: "
        f"mean of {len(result.scored)} of {len(result.runs)} runs, {_render_spread(result)}"
    )


def _render_spread(result: TimeToTrain) -> str:
    if result.std_s is None or result.interval_s is None or result.fastest_s is None or result.slowest_s is None:
        return "one run has no spread"
    low, high = result.interval_s
    return (
        f"{render_duration_range(result.fastest_s, result.slowest_s, like_s=result.mean_s)}, "
        f"std {render_duration(result.std_s)}; "
        f"{render_duration_range(low, high, like_s=result.mean_s)} {result.interval_words}"
    )


def _render_throughput(result: Throughput) -> str:
    assert result.time_to_train_all_s is not None
    scale = f"{result.instances} models, {result.instance_scale} of {result.total_scale} units each"
    staged = _render_time(result.time_to_train_all_with_staging_s)
    every = render_duration(result.time_to_train_all_s)
    return f"score {result.models_per_minute:.3g} models/min ({scale}, all in {every}; with staging {staged})"


def _render_time(seconds: float | None) -> str:
    return "not known" if seconds is None else render_duration(seconds)


def _render_run_time(run: JudgedRun) -> str:
    seconds = run.record.time_to_train_s
    return f"{render_duration(seconds) if seconds is not None else '-':>12}"


def _describe_use(run: JudgedRun) -> str:
    if run.dropped is not None:
        return f"dropped: {run.dropped}"
    return run.failure or "scored"


def build_energy_document(scored: Result) -> dict[str, Any]:
    """Return the energy of one result as JSON; a number that does not exist is null."""
    result = scored.energy
    if result is None:
        return {"valid": False, "reason": "no power readings and no counters"}
    return {
        "valid": result.valid,
        "reason": result.reason,
        "joules": result.mean_j,
        "interval95_j": result.interval_j,
        "scope": result.scope,
        "current": result.current,
        "nodes": result.nodes,
        "interconnect_estimated": result.estimated,
        "seconds": result.mean_s,
        "joule_seconds": result.delay_product_js,
        "watts_per_node": result.watts_per_node,
        "joules_per_sample": result.joules_per_sample,
        "idle_share": result.idle_share,
        "phases_j": dict(result.phases),
        "run_list": [
            {
                "file": run.path.name if run.path else None,
                "kept": run.path in result.kept,
                "joules": run.joules,
                "nodes_j": run.nodes_j,
                "interconnect_j": run.interconnect_j,
                "halfwidth95_j": run.halfwidth_j,
                "uncovered_s": run.uncovered_s,
                "reason": run.reason,
                "notes": list(run.notes),
            }
            for run in result.runs
        ],
    }


def render_energy(scored: Result) -> list[str]:
    """Return the energy of one result for a terminal."""
    result = scored.energy
    if result is None:
        return ["  no power readings and no counters: docs/energy.md says how to measure"]
    if result.mean_j is None:
        return [f"  no energy: {result.reason}", *_render_run_energies(result)]
    interval = result.interval_j
    between = f", 95 % [{interval[0]:.6g}, {interval[1]:.6g}]" if interval else ", no interval"
    text = [f"  {result.mean_j:.6g} J ({result.mean_j / _KWH_J:.4g} kWh), {result.what}, n={len(result.kept)}{between}"]
    if result.reason:
        text.append(f"  {result.reason}")
    if result.estimated:
        text.append("  the network is estimated: stated power x time")
    if scored.scale_factor:
        text.append(f"  with the shipped scaling.json {result.mean_j * scored.scale_factor:.6g} J")
    text.append(f"  {', '.join(_render_derived_energies(result))}")
    if result.phases:
        phases = ", ".join(f"{name} {joules:.4g} J" for name, joules in result.phases.items())
        text.append(f"  nodes by phase: {phases}")
    return [*text, *_render_run_energies(result)]


def _render_derived_energies(result: EnergyToSolution) -> list[str]:
    """List what follows from the energy: power, energy x delay, energy a sample, the share of idle power."""
    text = []
    if result.watts_per_node:
        text.append(f"{result.watts_per_node:.5g} W a node")
    if result.delay_product_js:
        text.append(f"energy x delay {result.delay_product_js:.5g} J s")
    if result.joules_per_sample:
        text.append(f"{result.joules_per_sample:.4g} J a sample")
    idle = result.idle_share
    text.append("idle power not measured" if idle is None else f"idle power would be {idle:.0%} of it")
    return text


def _render_run_energies(result: EnergyToSolution) -> list[str]:
    rows = []
    for run in result.runs:
        name = run.path.name if run.path else "?"
        kept = "" if run.path in result.kept else ", not in the score"
        half = f" ± {run.halfwidth_j:.3g}" if run.halfwidth_j is not None else ""
        number = f"{run.joules:.6g}{half} J" if run.joules is not None else "no energy"
        rows.append(f"    {name}  {number}{kept}{f': {run.reason}' if run.reason else ''}")
    notes = dict.fromkeys(note for run in result.runs for note in run.notes)
    return rows + [f"    note: {note}" for note in notes][:_LISTED_NOTES]
