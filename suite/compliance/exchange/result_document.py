"""Renders a result as JSON, version 1, with its score and figures of merit. Renders the document's schema too.

`mlhpc score --format json` prints these documents.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from mlhpc.suite.compliance.exchange.merit import BetterDirection, compute_figures_of_merit, make_result_names
from mlhpc.suite.compliance.result import Result, find_named_run
from mlhpc.suite.log.score import JudgedRun, Throughput, TimeToTrain, convert_to_minutes, find_log_name

RESULT_SCHEMA = Path(__file__).parent / "result.schema.json"
SCHEMA_ID: Literal["mlhpc-result-1"] = "mlhpc-result-1"


class _StrictStruct(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class FigureEntry(_StrictStruct, frozen=True, kw_only=True):
    """One figure of merit."""

    key: str
    value: float
    unit: Annotated[str, Meta(description="UCUM")]
    better: Annotated[BetterDirection | None, Meta(description="which values are better; null: neither")]
    low: Annotated[float | None, Meta(description="lower end of the 95 % interval")]
    high: Annotated[float | None, Meta(description="upper end of the 95 % interval")]
    n: Annotated[int | None, Meta(description="runs that it is of")]


class RunEntry(_StrictStruct, frozen=True, kw_only=True):
    """One run of a result. Times in minutes."""

    file: str
    seed: int | None
    time_min: float | None
    time_with_staging_min: float | None
    converged: bool
    failure: Annotated[str | None, Meta(description="why the run did not converge")]
    dropped: Annotated[str | None, Meta(description="why the score leaves the run out")]


class ResultDocument(_StrictStruct, frozen=True, kw_only=True):
    """One result. Times in minutes; a number that does not exist is null."""

    schema_id: Literal["mlhpc-result-1"] = field(name="schema")
    result: Annotated[
        str, Meta(description="system/benchmark-size/scenario/nodesxranks, the same for every run of the same thing")
    ]
    path: str
    round: str | None
    submitter: str | None
    system: str | None
    scenario: Literal["strong", "weak"]
    benchmark: str | None
    size: str | None
    division: str | None
    valid: Annotated[bool, Meta(description="this is the score of a compliant result")]
    reason: str | None
    compliant: bool
    errors: int
    runs: int
    runs_converged: int
    runs_scored: int
    runs_required: int
    score_min: float | None
    score_scaled_min: float | None
    scaling_factor: float | None
    score_with_staging_min: float | None
    std_min: float | None
    fastest_min: float | None
    slowest_min: float | None
    interval95_min: list[float] | None
    instances: int | None
    instance_scale: int | None
    instance_scale_claimed: int | None
    total_scale: int | None
    ttta_min: float | None
    ttta_with_staging_min: float | None
    models_per_min: float | None
    run_list: list[RunEntry]
    figures: list[FigureEntry]


def build_result_documents(scored: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the documents of some results, in their order."""
    return [_build_document(item, name) for item, name in zip(scored, make_result_names(scored), strict=True)]


def render_result_schema() -> str:
    """Render result.schema.json."""
    return json.dumps(msgspec.json.schema(ResultDocument), indent=1) + "\n"


def _build_document(scored: Result, name: str) -> dict[str, Any]:
    group, result, first = scored.group, scored.score, find_named_run(scored.runs)
    return {
        "schema": SCHEMA_ID,
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
