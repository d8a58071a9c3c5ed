"""`mlhpc score`: prints the scores of run folders, result folders and packages, as text or JSON. Reads only."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from suite.cli.options import JSON, card_option, format_option
from suite.compliance.check import check
from suite.compliance.result import Result, first_named
from suite.compliance.ruleset import ruleset
from suite.exit_codes import ExitCode
from suite.files import print_line, printable
from suite.log.score import JudgedRun, Throughput, TimeToTrain, minutes, run_name


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@card_option
@click.option("--explain", is_flag=True, help="Say of every run whether it is scored and why.")
@format_option()
@click.option("--ruleset", "ruleset_name", help="Judge by this ruleset instead of the one found from the content.")
def score(paths: tuple[Path, ...], explain: bool, style: str, ruleset_name: str | None) -> None:
    """Score runs by the MLPerf HPC rules: olympic mean of time to train, or throughput of concurrent instances.

    PATH is a run folder, a results folder, a package or a round. The score with staging stands beside the score, and under it
    whether the result is compliant. Exit code 0 if everything found is the score of a compliant result, 1 if not.

    \b
    Examples:
      mlhpc score runs/cosmoflow-mini-20260101T120000Z --explain
      mlhpc score submissions/ACME --format json
    """
    if ruleset_name is not None:
        ruleset(ruleset_name)
    scored = check(list(paths), ruleset_name).results
    if style == JSON:
        from suite.compliance.exchange.result_document import result_documents

        document = {"version": 1, "groups": result_documents(scored)}
        print_line(json.dumps(document, indent=1))
    else:
        for item in scored:
            print_line("\n".join(map(printable, lines(item, explain=explain or not item.score.valid))))
        if not scored:
            print_line(f"mlhpc: no result_*.txt under {', '.join(map(str, paths))}: nothing to score", error=True)
    if not scored or not all(item.valid for item in scored):
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def lines(scored: Result, *, explain: bool) -> list[str]:
    """One result for a terminal; with ``explain`` a line for each run."""
    from suite.data.baselines import beside

    first, runs = first_named(scored.runs), scored.score.runs
    benchmark = scored.group.benchmark or first.benchmark or "no benchmark"
    size = f" {first.size}" if first.size else ""
    text = [
        str(scored.group.folder),
        f"  {benchmark}{size}, {scored.division or 'no division'}, {scored.scenario}",
        f"  {_headline(scored)}",
        *([f"  {scored.verdict}"] if scored.verdict else []),
        *[f"  {t}" for t in dict.fromkeys(t for run in scored.runs for t in beside(run.baselines, run.attainable))],
    ]
    if explain:
        width = max(len(run_name(run)) for run in runs)
        text += [f"    {run_name(run):{width}}  {_run_time(run)}  {_fate(run)}" for run in runs]
    return text


def _headline(scored: Result) -> str:
    result = scored.score
    if not result.valid:
        return str(result.reason)
    if isinstance(result, Throughput):
        return _throughput_headline(result)
    assert result.mean_s is not None
    factor = scored.scale_factor
    scaled = f"; with the shipped scaling.json {minutes(result.mean_s * factor):.6g} min" if factor else ""
    return (
        f"score {minutes(result.mean_s):.6g} min, with staging {minutes(result.mean_with_staging_s):.6g} min{scaled}; "
        f"n={len(result.scored)} of {len(result.runs)}, {_spread(result)}"
    )


def _spread(result: TimeToTrain) -> str:
    if result.std_s is None or result.interval_s is None:
        return "one run has no spread"
    low, high = result.interval_s
    return (
        f"std {minutes(result.std_s):.3g}, {minutes(result.fastest_s):.6g} to {minutes(result.slowest_s):.6g}, "
        f"95 % [{minutes(low):.6g}, {minutes(high):.6g}]"
    )


def _throughput_headline(result: Throughput) -> str:
    assert result.time_to_train_all_s is not None
    scale = f"{result.instances} models, {result.instance_scale} of {result.total_scale} units each"
    staged = result.time_to_train_all_with_staging_s or math.nan
    return (
        f"score {result.models_per_minute:.6g} models/min ({scale}, all in {minutes(result.time_to_train_all_s):.6g}"
        f" min; with staging {minutes(staged):.6g} min)"
    )


def _run_time(run: JudgedRun) -> str:
    seconds = run.record.time_to_train_s
    return f"{minutes(seconds):12.6f} min" if seconds is not None else f"{'-':>12}    "


def _fate(run: JudgedRun) -> str:
    if run.dropped is not None:
        return f"dropped: {run.dropped}"
    return run.failure or "scored"
