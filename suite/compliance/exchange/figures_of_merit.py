"""Computes a result's figures of merit: named numbers with UCUM units, one per line, matched by one expression.

    MLHPC_FOM 1 <result> <key> <value> <unit>

A line has six words with one space between them. Version 1 keeps names, units and the form, and may get new keys
(docs/exchange.md).

Renders a result as JSON, version 1, with its score and figures of merit. Its schema is result.schema.json.

`mlhpc score --format json` prints these documents.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from mlhpc.suite.compliance.result import Result, find_named_run
from mlhpc.suite.log.score import MINUTE_S, JudgedRun, Throughput, TimeToTrain, convert_to_minutes, find_log_name

# ReFrame and other harnesses match this expression, so names, units and form may not change within a version.
FOM_VERSION = 1
FOM_PATTERN = r"^MLHPC_FOM 1 (\S+) ([a-z0-9_]+) (-?[0-9][0-9.e+-]*) (\S+)$"
BetterDirection = Literal["lower", "higher"]


class FigureOfMerit(NamedTuple):
    """One figure of merit. ``unit`` is UCUM; ``low`` and ``high`` are a 95 % interval; ``n`` counts its runs."""

    key: str
    value: float
    unit: str
    better: BetterDirection | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None


def compute_figures_of_merit(scored: Result) -> list[FigureOfMerit]:
    """Compute the figures of a result. Only a compliant result has ``score`` or ``models_per_minute``."""
    result = scored.score
    found = [
        FigureOfMerit("valid", float(scored.valid), "1", "higher"),
        FigureOfMerit("compliant", float(not scored.errors), "1", "higher"),
        FigureOfMerit("errors", float(scored.errors), "1", "lower"),
        FigureOfMerit("runs", float(len(result.runs)), "1"),
        FigureOfMerit("runs_converged", float(result.converged), "1", "higher"),
        FigureOfMerit("runs_required", float(result.required_runs), "1"),
    ]
    if scored.valid:
        found += _compute_time_figures(result) if isinstance(result, TimeToTrain) else _compute_rate_figures(result)
    converged = [run.record for run in result.runs if run.converged]
    found += _compute_spread("time_to_train", [run.time_to_train_s for run in converged], "s", "lower")
    found += _compute_spread("staging", [run.staging_s for run in converged], "s", "lower")
    # The expression matches no "inf" or "nan".
    return [figure for figure in found if math.isfinite(figure.value)]


def make_result_names(scored: Sequence[Result]) -> list[str]:
    """Name each result ``system/benchmark-size/scenario/nodesxranks``, so that repetitions of a result have one name.

    A name has no blanks. The second of two results with one name ends with ``~2``.
    """
    seen: Counter[str] = Counter()
    names = []
    for item in scored:
        name = _make_result_name(item)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}~{seen[name]}")
    return names


def render_lines(scored: Sequence[Result]) -> str:
    """Render the lines of all results."""
    return "".join(
        f"MLHPC_FOM {FOM_VERSION} {name} {figure.key} {figure.value!r} {figure.unit}\n"
        for name, item in zip(make_result_names(scored), scored, strict=True)
        for figure in compute_figures_of_merit(item)
    )


def _compute_time_figures(result: TimeToTrain) -> Iterator[FigureOfMerit]:
    """Yield the score with its interval, which is over all runs that converged (mlhpc.suite.log.score)."""
    low, high = result.interval_s or (None, None)
    scored = len(result.scored)
    if result.mean_s is not None and result.mean_with_staging_s is not None:
        ends = [None if end is None or not math.isfinite(end) else end / MINUTE_S for end in (low, high)]
        # MLPerf publishes minutes.
        yield FigureOfMerit("score", result.mean_s / MINUTE_S, "min", "lower", ends[0], ends[1], scored)
        yield FigureOfMerit("score_with_staging", result.mean_with_staging_s / MINUTE_S, "min", "lower", n=scored)


def _compute_rate_figures(result: Throughput) -> Iterator[FigureOfMerit]:
    if result.models_per_minute is not None and result.time_to_train_all_s is not None:
        yield FigureOfMerit("models_per_minute", result.models_per_minute, "{model}/min", "higher", n=result.instances)
        yield FigureOfMerit(
            "time_to_train_all", result.time_to_train_all_s / MINUTE_S, "min", "lower", n=result.instances
        )


def _compute_spread(
    key: str, values: Sequence[float | None], unit: str, better: BetterDirection
) -> Iterator[FigureOfMerit]:
    """Yield mean, extremes and standard deviation (n - 1) of the known values. One value has no deviation."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return
    count = len(known)
    yield FigureOfMerit(f"{key}_mean", statistics.fmean(known), unit, better, n=count)
    yield FigureOfMerit(f"{key}_min", min(known), unit, better, n=count)
    yield FigureOfMerit(f"{key}_max", max(known), unit, better, n=count)
    if count > 1:
        # One value has no deviation, and 0 would look exact.
        yield FigureOfMerit(f"{key}_std", statistics.stdev(known), unit, "lower", n=count)


def _make_result_name(scored: Result) -> str:
    first, group = find_named_run(scored.runs), scored.group
    subject = "-".join(filter(None, (group.benchmark or first.benchmark or "unknown", first.size)))
    shape = f"{first.nodes or 0}x{(first.ranks or 0) // max(first.nodes or 1, 1)}"
    parts = (group.system or first.platform or "unknown", subject, scored.scenario, shape)
    # A log may claim any text; blanks would break the six words of a line.
    return "/".join(re.sub(r"[^A-Za-z0-9._+-]", "_", part)[:100] or "_" for part in parts)


def build_result_documents(scored: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the documents of some results, in their order."""
    return [_build_document(item, name) for item, name in zip(scored, make_result_names(scored), strict=True)]


def _build_document(scored: Result, name: str) -> dict[str, Any]:
    group, result, first = scored.group, scored.score, find_named_run(scored.runs)
    return {
        "schema": "mlhpc-result-1",
        "result": name,
        "path": str(group.folder),
        "round": group.round,
        "submitter": group.submitter or first.org,
        "system": group.system or first.platform,
        "scenario": scored.scenario,
        "benchmark": group.benchmark or first.benchmark,
        "size": first.size,
        "division": scored.division,
        "valid": scored.valid,
        # Why there is no score, else why the score is not valid.
        "reason": result.reason or scored.verdict,
        "compliant": not scored.errors,
        "errors": scored.errors,
        "runs": len(result.runs),
        "runs_converged": result.converged,
        "runs_scored": _count_scored_runs(result),
        "runs_required": result.required_runs,
        **_time_to_train_fields(result, scored.scale_factor),
        **_throughput_fields(result),
        "run_list": [_build_run_entry(run) for run in result.runs],
        "figures": [figure._asdict() for figure in compute_figures_of_merit(scored)],
    }


def _count_scored_runs(result: TimeToTrain | Throughput) -> int:
    # A throughput result has no dropped runs: it counts all instances that converged.
    if isinstance(result, TimeToTrain):
        return len(result.scored)
    return result.converged if result.valid else 0


def _time_to_train_fields(result: TimeToTrain | Throughput, factor: float | None) -> dict[str, Any]:
    times = result if isinstance(result, TimeToTrain) else TimeToTrain((), 0, None)  # one whose numbers are all None
    return {
        "score_min": convert_to_minutes(times.mean_s),
        "score_scaled_min": convert_to_minutes(times.mean_s * factor) if times.mean_s and factor else None,
        "scaling_factor": factor,
        "score_with_staging_min": convert_to_minutes(times.mean_with_staging_s),
        "std_min": convert_to_minutes(times.std_s),
        "fastest_min": convert_to_minutes(times.fastest_s),
        "slowest_min": convert_to_minutes(times.slowest_s),
        "interval95_min": [convert_to_minutes(bound) for bound in times.interval_s] if times.interval_s else None,
    }


def _throughput_fields(result: TimeToTrain | Throughput) -> dict[str, Any]:
    rate = result if isinstance(result, Throughput) else Throughput((), 0, None)  # one whose numbers are all None
    return {
        "instances": rate.instances,
        "instance_scale": rate.instance_scale,
        "instance_scale_claimed": rate.instance_scale_claimed,
        "total_scale": rate.total_scale,
        "ttta_min": convert_to_minutes(rate.time_to_train_all_s),
        "ttta_with_staging_min": convert_to_minutes(rate.time_to_train_all_with_staging_s),
        "models_per_min": rate.models_per_minute,
    }


def _build_run_entry(run: JudgedRun) -> dict[str, Any]:
    return {
        "file": find_log_name(run),
        "seed": run.record.seed,
        "time_min": convert_to_minutes(run.record.time_to_train_s),
        "time_with_staging_min": convert_to_minutes(run.record.time_with_staging_s),
        "converged": run.converged,
        "failure": run.failure,
        "dropped": run.dropped,
    }
