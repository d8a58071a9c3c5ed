"""`mlhpc score`: the scores of run folders, result folders and packages. Reads only."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from suite.compliance.check import made_for
from suite.compliance.ruleset import Benchmark, ruleset
from suite.log.reader import read_events
from suite.log.record import RunRecord, summarise
from suite.log.results_tree import Group, SystemFile, find, read_system
from suite.log.score import MINUTE_S, JudgedRun, Throughput, TimeToTrain, throughput, time_to_train
from suite.log.values import finite


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--explain", is_flag=True, help="Say of every run whether it is scored and why.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, version 1.")
@click.option("--ruleset", "ruleset_name", help="Judge by this ruleset instead of the one found from the content.")
def score(paths: tuple[Path, ...], explain: bool, as_json: bool, ruleset_name: str | None) -> None:
    """Score runs by the MLPerf HPC rules: olympic mean of time to train, or throughput of concurrent instances.

    PATH is a run folder, a results folder, a package or a round. The score with staging stands beside the score.
    Exit code 0 if everything found is a score, 1 if not.

    \b
    Examples:
      mlhpc score runs/cosmoflow-mini-20260101T120000Z --explain
      mlhpc score submissions/ACME --json
    """
    if ruleset_name is not None:
        ruleset(ruleset_name)
    scored = [score_group(group, ruleset_name) for path in paths for group in find(path).groups if group.logs]
    if as_json:
        document = {"version": 1, "groups": [item.as_dict() for item in scored]}
        click.echo(json.dumps(document, indent=1))
    else:
        for item in scored:
            click.echo("\n".join(item.lines(explain=explain or not item.result.valid)))
        if not scored:
            click.echo(f"no result_*.txt under {', '.join(map(str, paths))}: nothing to score")
    if not scored or not all(item.result.valid for item in scored):
        raise click.exceptions.Exit(1)


@dataclass(frozen=True)
class ScoredGroup:
    """One result and its score."""

    group: Group
    records: tuple[RunRecord, ...]
    system: SystemFile | None
    result: TimeToTrain | Throughput

    @property
    def scale_factor(self) -> float | None:
        """The factor of a scaling.json that the package ships."""
        path = self.group.folder / "scaling.json"
        return finite(read_system(path).fields.get("scaling_factor")) if path in self.group.others else None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form of a group; every number that does not exist is null."""
        result = self.result
        strong = result if isinstance(result, TimeToTrain) else None
        weak = result if isinstance(result, Throughput) else None
        first = telling(self.records)
        stated = self.system.fields.get("division") if self.system else None
        factor = self.scale_factor
        return {
            "path": str(self.group.folder),
            "round": self.group.round,
            "submitter": self.group.submitter or first.org,
            "system": self.group.system or first.platform,
            "scenario": "weak" if weak else "strong",
            "benchmark": self.group.benchmark or first.benchmark,
            "size": first.size,
            "division": stated if isinstance(stated, str) else first.division,
            "valid": result.valid,
            "reason": result.reason,
            "runs": len(result.runs),
            "runs_converged": result.converged,
            "runs_scored": len(strong.scored) if strong else result.converged if result.valid else 0,
            "runs_required": result.required_runs,
            "score_min": _minutes(strong.mean_s) if strong else None,
            "score_scaled_min": _minutes(strong.mean_s * factor) if strong and strong.mean_s and factor else None,
            "scaling_factor": factor,
            "score_with_staging_min": _minutes(strong.mean_with_staging_s) if strong else None,
            "std_min": _minutes(strong.std_s) if strong else None,
            "fastest_min": _minutes(strong.fastest_s) if strong else None,
            "slowest_min": _minutes(strong.slowest_s) if strong else None,
            "interval95_min": [_minutes(bound) for bound in strong.interval_s]
            if strong and strong.interval_s
            else None,
            "instances": weak.instances if weak else None,
            "instance_scale": weak.instance_scale if weak else None,
            "instance_scale_claimed": weak.instance_scale_claimed if weak else None,
            "total_scale": weak.total_scale if weak else None,
            "ttta_min": _minutes(weak.time_to_train_all_s) if weak else None,
            "ttta_with_staging_min": _minutes(weak.time_to_train_all_with_staging_s) if weak else None,
            "models_per_min": weak.models_per_minute if weak else None,
            "run_list": [_run_dict(run) for run in result.runs],
        }

    def lines(self, *, explain: bool) -> list[str]:
        """The group for a terminal."""
        data = self.as_dict()
        size = f" {data['size']}" if data["size"] else ""
        lines = [
            f"{self.group.folder!s}".encode("utf-8", "replace").decode(),
            f"  {data['benchmark'] or 'no benchmark'}{size}, {data['division'] or 'no division'}, {data['scenario']}",
        ]
        lines += [f"  {self._headline()}"]
        if explain:
            width = max(len(_run_name(run)) for run in self.result.runs)
            lines += [f"    {_run_name(run):{width}}  {_run_time(run)}  {_fate(run)}" for run in self.result.runs]
        return lines

    def _headline(self) -> str:
        result = self.result
        if not result.valid:
            return str(result.reason)
        if isinstance(result, Throughput):
            assert result.time_to_train_all_s is not None
            scale = f"{result.instances} models, {result.instance_scale} of {result.total_scale} units each"
            staged = result.time_to_train_all_with_staging_s or math.nan
            return (
                f"score {result.models_per_minute:.6g} models/min ({scale}, all in {_minutes(result.time_to_train_all_s):.6g}"
                f" min; with staging {_minutes(staged):.6g} min)"
            )
        assert result.mean_s is not None
        low, high = result.interval_s or (math.nan, math.nan)
        scaled = (
            f"; with the shipped scaling.json {_minutes(result.mean_s * self.scale_factor):.6g} min"
            if self.scale_factor
            else ""
        )
        return (
            f"score {_minutes(result.mean_s):.6g} min, with staging {_minutes(result.mean_with_staging_s):.6g} min{scaled}; "
            f"n={len(result.scored)} of {len(result.runs)}, std {_minutes(result.std_s):.3g}, "
            f"{_minutes(result.fastest_s):.6g} to {_minutes(result.slowest_s):.6g}, "
            f"95 % [{_minutes(low):.6g}, {_minutes(high):.6g}]"
        )


def score_group(group: Group, ruleset_name: str | None = None) -> ScoredGroup:
    """The score of one folder of logs."""
    records = tuple(summarise(read_events(path, steps=False)) for path in group.logs)
    rules = ruleset(ruleset_name or made_for(telling(records), group))
    benchmark = next((found for run in records if (found := rules.benchmark(run.benchmark, run.size))), None)
    system = read_system(group.package / "systems" / f"{group.system}.json") if group.package else None
    return ScoredGroup(group, records, system, _result(group, records, benchmark, system))


def _result(
    group: Group, records: tuple[RunRecord, ...], benchmark: Benchmark | None, system: SystemFile | None
) -> TimeToTrain | Throughput:
    if benchmark is None:
        name, size = telling(records).benchmark, telling(records).size
        what = f"benchmark {name!r}" + (f" of size {size!r}" if size else "") + " is not known"
        why = f"not a score: {what if name else 'no log names a benchmark'}"
        return TimeToTrain(tuple(JudgedRun(run, "benchmark not known") for run in records), 0, why)
    named = [run for run in records if run.benchmark is not None or run.run_start_s is not None]
    other = next((run for run in named if (run.benchmark, run.size) != (benchmark.name, benchmark.size)), None)
    if other is not None:
        why = f"not a score: benchmarks or sizes are mixed ({other.path}: {other.benchmark} {other.size})"
        return TimeToTrain(tuple(JudgedRun(run, None) for run in records), benchmark.required_runs, why)
    weak = group.scenario == "weak" or (group.scenario is None and all(run.mode == "weak" for run in records))
    if weak:
        return throughput(records, benchmark, system.compute_units if system else None)
    return time_to_train(records, benchmark)


def telling(records: Sequence[RunRecord]) -> RunRecord:
    """The first record that names a benchmark, as a run that died before run_start does not; else the first."""
    return next((record for record in records if record.benchmark is not None), records[0])


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
