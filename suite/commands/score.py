"""`mlhpc score`: prints the scores of run folders, result folders and packages, as text or JSON. Reads only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from suite.cli.options import JSON, card_option, format_option
from suite.compliance.ruleset import ruleset
from suite.compliance.scoring import ScoredGroup, first_named, score_results
from suite.data.baselines import beside
from suite.files import print_line, printable
from suite.log.score import MINUTE_S, JudgedRun, Throughput, TimeToTrain

HELP_GROUP = "Judge"
HELP_ORDER = 3


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
    scored = score_results(list(paths), ruleset_name)
    if style == JSON:
        document = {"version": 1, "groups": [as_dict(item) for item in scored]}
        print_line(json.dumps(document, indent=1))
    else:
        for item in scored:
            print_line("\n".join(map(printable, lines(item, explain=explain or not item.result.valid))))
        if not scored:
            print_line(f"mlhpc: no result_*.txt under {', '.join(map(str, paths))}: nothing to score", error=True)
    if not scored or not all(item.valid for item in scored):
        raise click.exceptions.Exit(1)


def as_dict(scored: ScoredGroup) -> dict[str, Any]:
    """The JSON form of one result; a number that does not exist is null."""
    group, result, first = scored.group, scored.result, first_named(scored.records)
    return {
        "path": str(group.folder),
        "round": group.round,
        "submitter": group.submitter or first.org,
        "system": group.system or first.platform,
        "scenario": scored.scenario,
        "benchmark": group.benchmark or first.benchmark,
        "size": first.size,
        "division": scored.division,
        "valid": scored.valid,
        "reason": result.reason or scored.verdict,
        "compliant": not scored.errors,
        "errors": scored.errors,
        "runs": len(result.runs),
        "runs_converged": result.converged,
        "runs_scored": _runs_scored(result),
        "runs_required": result.required_runs,
        **_time_to_train_fields(result, scored.scale_factor),
        **_throughput_fields(result),
        "run_list": [_run_dict(run) for run in result.runs],
    }


def lines(scored: ScoredGroup, *, explain: bool) -> list[str]:
    """One result for a terminal; with ``explain`` a line for each run."""
    first, runs = first_named(scored.records), scored.result.runs
    benchmark = scored.group.benchmark or first.benchmark or "no benchmark"
    size = f" {first.size}" if first.size else ""
    text = [
        str(scored.group.folder),
        f"  {benchmark}{size}, {scored.division or 'no division'}, {scored.scenario}",
        f"  {_headline(scored)}",
        *([f"  {scored.verdict}"] if scored.verdict else []),
        *[f"  {t}" for t in dict.fromkeys(t for run in scored.records for t in beside(run.baselines, run.attainable))],
    ]
    if explain:
        width = max(len(_run_name(run)) for run in runs)
        text += [f"    {_run_name(run):{width}}  {_run_time(run)}  {_fate(run)}" for run in runs]
    return text


def _runs_scored(result: TimeToTrain | Throughput) -> int:
    if isinstance(result, TimeToTrain):
        return len(result.scored)
    return result.converged if result.valid else 0


def _time_to_train_fields(result: TimeToTrain | Throughput, factor: float | None) -> dict[str, Any]:
    times = result if isinstance(result, TimeToTrain) else TimeToTrain((), 0, None)  # one whose numbers are all None
    return {
        "score_min": _minutes(times.mean_s),
        "score_scaled_min": _minutes(times.mean_s * factor) if times.mean_s and factor else None,
        "scaling_factor": factor,
        "score_with_staging_min": _minutes(times.mean_with_staging_s),
        "std_min": _minutes(times.std_s),
        "fastest_min": _minutes(times.fastest_s),
        "slowest_min": _minutes(times.slowest_s),
        "interval95_min": [_minutes(bound) for bound in times.interval_s] if times.interval_s else None,
    }


def _throughput_fields(result: TimeToTrain | Throughput) -> dict[str, Any]:
    rate = result if isinstance(result, Throughput) else Throughput((), 0, None)  # one whose numbers are all None
    return {
        "instances": rate.instances,
        "instance_scale": rate.instance_scale,
        "instance_scale_claimed": rate.instance_scale_claimed,
        "total_scale": rate.total_scale,
        "ttta_min": _minutes(rate.time_to_train_all_s),
        "ttta_with_staging_min": _minutes(rate.time_to_train_all_with_staging_s),
        "models_per_min": rate.models_per_minute,
    }


def _headline(scored: ScoredGroup) -> str:
    result = scored.result
    if not result.valid:
        return str(result.reason)
    if isinstance(result, Throughput):
        return _throughput_headline(result)
    assert result.mean_s is not None
    factor = scored.scale_factor
    scaled = f"; with the shipped scaling.json {_minutes(result.mean_s * factor):.6g} min" if factor else ""
    return (
        f"score {_minutes(result.mean_s):.6g} min, with staging {_minutes(result.mean_with_staging_s):.6g} min{scaled}; "
        f"n={len(result.scored)} of {len(result.runs)}, {_spread(result)}"
    )


def _spread(result: TimeToTrain) -> str:
    if result.std_s is None or result.interval_s is None:
        return "one run has no spread"
    low, high = result.interval_s
    return (
        f"std {_minutes(result.std_s):.3g}, {_minutes(result.fastest_s):.6g} to {_minutes(result.slowest_s):.6g}, "
        f"95 % [{_minutes(low):.6g}, {_minutes(high):.6g}]"
    )


def _throughput_headline(result: Throughput) -> str:
    assert result.time_to_train_all_s is not None
    scale = f"{result.instances} models, {result.instance_scale} of {result.total_scale} units each"
    staged = result.time_to_train_all_with_staging_s or math.nan
    return (
        f"score {result.models_per_minute:.6g} models/min ({scale}, all in {_minutes(result.time_to_train_all_s):.6g}"
        f" min; with staging {_minutes(staged):.6g} min)"
    )


def _run_dict(run: JudgedRun) -> dict[str, Any]:
    return {
        "file": _run_name(run),
        "seed": run.record.seed,
        "time_min": _minutes(run.record.time_to_train_s),
        "time_with_staging_min": _minutes(run.record.time_with_staging_s),
        "converged": run.converged,
        "failure": run.failure,
        "dropped": run.dropped,
    }


def _run_name(run: JudgedRun) -> str:
    return run.record.path.name if run.record.path else "?"


def _run_time(run: JudgedRun) -> str:
    seconds = run.record.time_to_train_s
    return f"{_minutes(seconds):12.6f} min" if seconds is not None else f"{'-':>12}    "


def _fate(run: JudgedRun) -> str:
    if run.dropped is not None:
        return f"dropped: {run.dropped}"
    return run.failure or "scored"


def _minutes(seconds: float | None) -> Any:
    return None if seconds is None else seconds / MINUTE_S
