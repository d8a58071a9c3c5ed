"""Computes a result's figures of merit: named numbers with UCUM units, one per line, matched by one expression.

    MLHPC_FOM 1 <result> <key> <value> <unit>

A line has six words with one space between them. Version 1 keeps names, units and the form, and may get new keys
(docs/exchange.md).
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from mlhpc.suite.compliance.result import Result, find_named_run
from mlhpc.suite.log.score import MINUTE_S, Throughput, TimeToTrain

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
