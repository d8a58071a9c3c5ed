"""`mlhpc compare`: says whether a result is slower than a baseline, faster, equivalent, or inconclusive."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from mlhpc.suite.cli.options import JSON, card_option, format_option, tolerance_option
from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.result import Result, find_named_run
from mlhpc.suite.errors import ExitCode, InputError
from mlhpc.suite.files import print_line, render_duration, render_printable
from mlhpc.suite.log.other_work import render_busy_warning
from mlhpc.suite.log.score import Throughput, list_differences
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.comparison import (
    MAX_PROPOSED_RUNS,
    TimedRun,
    TimeRatio,
    compare_times,
    estimate_runs_needed,
)
from mlhpc.suite.statistics.comparison import Comparison as TimeComparison

CONFIDENCE = 0.95  # of all intervals of one command together
ALLOWED_TO_MISS = 1  # runs that may miss the target: the rules count one as the slowest


@dataclass(frozen=True)
class EnergyRatio:
    """Energy to solution of B over that of A. ``a_j`` and ``b_j`` are joules.

    ``of`` names what both meters measure: scope, AC or DC. ``interval`` divides the ends of both 95 % intervals: lower
    end of B over upper end of A, and the reverse. It is None if one of them has no interval.
    """

    ratio: float
    interval: tuple[float, float] | None
    of: str
    a_j: float
    b_j: float


@dataclass(frozen=True)
class Comparison:
    """One result B compared with its baseline A. ``ratio`` is time of B over time of A, None if there is none.

    ``reasons`` say why the verdict is inconclusive, or what else a person should know. ``scores`` is false if a side is
    not a score of a compliant result. Then the verdict is inconclusive. ``assumes`` says what the verdict rests on. The
    verdict is on time alone. ``energy`` is set if both results have one. ``busy`` warns of runs that other programs may
    have slowed.
    """

    what: str
    a: str
    b: str
    verdict: Outcome
    reasons: tuple[str, ...]
    scores: bool = True
    ratio: TimeRatio | None = None
    assumes: str | None = None
    runs_a: int = 0
    runs_b: int = 0
    score_a: str | None = None
    score_b: str | None = None
    energy: EnergyRatio | None = None
    busy: tuple[str, ...] = ()


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="A B...", type=click.Path(exists=True, path_type=Path))
@card_option
@click.option(
    "--baseline",
    metavar="PATH",
    type=click.Path(exists=True, path_type=Path),
    help="Compare all PATHS with this result. [the first of PATHS]",
)
@click.option(
    "--any",
    "any_runs",
    is_flag=True,
    help="Compare the runs that reached the target even if a result is not compliant or has too few runs.",
)
@tolerance_option()
@format_option()
def compare(paths: tuple[Path, ...], baseline: Path | None, any_runs: bool, tolerance: float, style: str) -> None:
    """Say whether results are faster or slower than a baseline of the same benchmark and size.

    PATHS are run folders, results folders or packages; the first one is the baseline.

    The ratio compares the geometric means of time to train of all converged runs (Welch's t test on log time).
    Throughput results are compared by their instances. All intervals of one command together hold with 95 %.
    Comparing many results gives no more false alarms than comparing two. Energy is shown if both results have the same
    kind of it. The verdict is on time.

    Exit code 0: each is faster, or equivalent within the tolerance. Exit code 1: one is slower. Exit code 2: usage.
    Exit code 3: one is not a score of a compliant result (--any compares it anyway). Exit code 4: one is inconclusive.

    \b
    Examples:
      mlhpc compare runs/before runs/after --tolerance 5
      mlhpc compare runs/today runs/yesterday runs/new-driver --baseline submissions/ACME/results/cluster
      mlhpc compare runs/smoke-before runs/smoke-after --any --format json
    """
    first, others = (paths[0], paths[1:]) if baseline is None else (baseline, paths)
    if not others:
        raise click.UsageError(f"{first} has nothing to be compared with: give a second path")
    found, confidence = compare_results(first, others, tolerance, any_runs=any_runs)
    if style == JSON:
        rows = [convert_to_data(item) for item in found]
        document = {"version": 1, "tolerance_percent": tolerance, "confidence": confidence, "comparisons": rows}
        print_line(json.dumps(document, indent=1))
    else:
        several = len(others) > 1
        lines = []
        for item in found:
            lines += [
                render_comparison(item, tolerance, confidence, named=several),
                *(f"  {text}" for text in item.busy),
            ]
        print_line("\n".join(map(render_printable, lines)))
    code = _choose_exit_code(found)
    if code != ExitCode.OK:
        raise click.exceptions.Exit(code)


def _choose_exit_code(found: Sequence[Comparison]) -> ExitCode:
    """Return the exit code of all comparisons; a slower result outweighs one that could not be compared."""
    if any(item.verdict == Outcome.SLOWER for item in found):
        return ExitCode.FINDINGS
    if not all(item.scores for item in found):
        return ExitCode.NO_SCORE
    if any(item.verdict == Outcome.INCONCLUSIVE for item in found):
        return ExitCode.INCONCLUSIVE
    return ExitCode.OK


def compare_results(
    baseline: Path, others: Sequence[Path], tolerance: float = 0.0, *, any_runs: bool = False
) -> tuple[list[Comparison], float]:
    """Compare each of ``others`` with ``baseline``. Also return the confidence of each interval."""
    pairs = [pair for other in others for pair in _pair_results(baseline, other)]
    # Bonferroni: the intervals of all pairs hold together
    confidence = 1.0 - (1.0 - CONFIDENCE) / len(pairs)
    return [_compare(one, other, tolerance, confidence, any_runs) for one, other in pairs], confidence


def convert_to_data(item: Comparison) -> dict[str, Any]:
    """Convert one comparison to data for --format json. An interval without an upper end becomes null."""
    ratio = item.ratio
    # JSON has no infinity.
    bounded = ratio is not None and math.isfinite(ratio.high)
    return asdict(item) | {
        "ratio": ratio.ratio if ratio is not None else None,
        "ratio_of": f"time of {item.b} / time of {item.a}",
        "interval": [ratio.low, ratio.high] if ratio is not None and bounded else None,
    }


def render_comparison(item: Comparison, tolerance: float, confidence: float, *, named: bool) -> str:
    """Render one comparison as a line. With ``named`` it has the folder of B, for several comparisons."""
    reasons = "".join(f"; {reason}" for reason in (*item.reasons, *([item.assumes] if item.assumes else [])))
    if item.ratio is None:
        return f"{item.what}: {item.b}: {item.verdict}{reasons}" if named else f"{item.what}: {item.verdict}{reasons}"
    # `_compute_ratio` sets the lower end to 0 if the runs show no spread.
    level = (
        f"{100 * confidence:.4g} % [{item.ratio.low:.4f}, {item.ratio.high:.4f}]" if item.ratio.low else "no interval"
    )
    more = f" by more than {tolerance:g} %" if tolerance and item.verdict == Outcome.SLOWER else ""
    within = f" within {tolerance:g} %" if item.verdict == Outcome.EQUIVALENT else ""
    a, b = (f"{item.a} (A)", f"{item.b} (B)") if reasons else (item.a, item.b)  # reasons speak of A and B
    return (
        f"{item.what}: {b} takes {item.ratio.ratio:.4f} times as long as {a}, {level} ({item.runs_b} and {item.runs_a}"
        f" runs, {item.score_b} and {item.score_a}): {item.verdict}{more}{within}{reasons}{_render_energy(item.energy)}"
    )


def _render_energy(energy: EnergyRatio | None) -> str:
    if energy is None:
        return ""
    ends = (
        f"[{energy.interval[0]:.4g}, {energy.interval[1]:.4g}] by both intervals" if energy.interval else "no interval"
    )
    return f"; energy {energy.ratio:.4g} times, {ends} ({energy.b_j:.4g} and {energy.a_j:.4g} J, {energy.of})"


_Kind = tuple[str | None, str | None, str]  # benchmark, size, scenario


def _pair_results(a: Path, b: Path) -> list[tuple[Result, Result]]:
    """Pair the results of both paths by benchmark, size and scenario. InputError if none match or several do."""
    first, second = _group_by_kind(a), _group_by_kind(b)
    shared = [kind for kind in first if kind in second]
    if not shared:
        raise InputError(
            f"{a} and {b} have no benchmark and size in common: {a} has {_render_kinds(first)}; {b} has"
            f" {_render_kinds(second)}"
        )
    for path, results in ((a, first), (b, second)):
        for kind in shared:
            if len(results[kind]) > 1:
                names = ", ".join(str(item.group.folder) for item in results[kind])
                raise InputError(
                    f"{path} has {len(results[kind])} results of {_render_kind(kind)}; give one of them: {names}"
                )
    return [(first[kind][0], second[kind][0]) for kind in shared]


def _group_by_kind(path: Path) -> dict[_Kind, list[Result]]:
    results: dict[_Kind, list[Result]] = {}
    for scored in check([path]).results:
        results.setdefault(_kind_of(scored), []).append(scored)
    return results


def _kind_of(scored: Result) -> _Kind:
    first = find_named_run(scored.runs)
    return first.benchmark, first.size, scored.scenario


def _compare(a: Result, b: Result, tolerance: float, confidence: float, any_runs: bool) -> Comparison:
    what, name_a, name_b = _render_kind(_kind_of(a)), str(a.group.folder), str(b.group.folder)
    bad = _reasons_against_scores(a, b)
    runs_a, runs_b = _timed_runs(a), _timed_runs(b)
    times_a, times_b = ([time for _, time in runs] for runs in (runs_a, runs_b))
    if not times_a or not times_b or not (any_runs or (a.score.valid and b.score.valid)):
        return Comparison(
            what, name_a, name_b, Outcome.INCONCLUSIVE, tuple(bad), scores=False, busy=_list_busy_warnings(a, b)
        )
    # Other rules make other times: the ratio is shown, but says nothing of the machine.
    apart = list_differences(_find_round(a), _find_round(b), a.division, b.division)
    compared = compare_times(
        runs_a, runs_b, confidence=confidence, margin=tolerance / 100.0, resolution_s=_resolution_s(a, b)
    )
    lost = _describe_missed_runs("A", a) + _describe_missed_runs("B", b)
    scores = any_runs or not bad
    judged = compared is not None and scores and not apart and not lost
    verdict = compared.outcome if compared is not None and judged else Outcome.INCONCLUSIVE
    doubts = _describe_doubts(compared, times_a, times_b)
    if compared is not None and judged and not doubts and verdict == Outcome.INCONCLUSIVE:
        doubts = [_describe_needed_runs(compared)]
    energy, unknown = _compare_energy(a, b)
    return Comparison(
        what=what,
        a=name_a,
        b=name_b,
        verdict=verdict,
        reasons=(*apart, *lost, *bad, *doubts, *unknown),
        scores=scores,
        ratio=_compute_ratio(compared, times_a, times_b),
        assumes=_describe_assumption(runs_a, runs_b) if verdict != Outcome.INCONCLUSIVE else None,
        runs_a=len(times_a),
        runs_b=len(times_b),
        score_a=_render_score(a),
        score_b=_render_score(b),
        energy=energy,
        busy=_list_busy_warnings(a, b),
    )


def _list_busy_warnings(a: Result, b: Result) -> tuple[str, ...]:
    """Warn of a side whose runs shared their CPUs with other programs."""
    found = (("A", a), ("B", b))
    texts = ((side, item.group.folder, render_busy_warning([run.company for run in item.runs])) for side, item in found)
    return tuple(f"{side}, {folder}: {text}" for side, folder, text in texts if text)


def _timed_runs(scored: Result) -> list[TimedRun]:
    """List when each converged run began and how long it took."""
    records = [run.record for run in scored.score.runs if run.converged]
    return [(record.run_start_s or 0.0, record.time_to_train_s or 0.0) for record in records]


def _resolution_s(a: Result, b: Result) -> float:
    """Return the resolution of the times in seconds: 1 if all runs begin and end at whole seconds, else 0.001."""
    times = [time for scored in (a, b) for run in scored.runs for time in (run.run_start_s, run.run_stop_s) if time]
    return 1.0 if all(time == int(time) for time in times) else 0.001


def _describe_missed_runs(side: str, scored: Result) -> list[str]:
    """Say that more runs missed the target than the rules allow. The other times alone would favour that side."""
    judged = [run for run in scored.score.runs if not run.record.resumed]
    missed = sum(not run.converged for run in judged)
    if missed <= ALLOWED_TO_MISS:
        return []
    return [f"{missed} of {len(judged)} runs of {side} missed the target, so its other times alone favour {side}"]


def _describe_doubts(compared: TimeComparison | None, a: Sequence[float], b: Sequence[float]) -> list[str]:
    """Say why the runs are not enough for a verdict, or what widens the interval."""
    if compared is not None:
        return list(compared.doubts)
    alone = [f"{side} has one run, which has no spread" for side, times in (("A", a), ("B", b)) if len(times) == 1]
    return alone or ["all runs take the same time, so their spread is not known"]


def _describe_needed_runs(compared: TimeComparison) -> str:
    enough = estimate_runs_needed(compared)
    if enough is None:
        return f"more than {MAX_PROPOSED_RUNS} runs each would be needed to show a ratio of {compared.ratio:.4f}"
    return f"about {enough} runs each would show a ratio of {compared.ratio:.3f}"


def _describe_assumption(a: Sequence[TimedRun], b: Sequence[TimedRun]) -> str | None:
    """Say what a verdict rests on if all runs of one side began before those of the other."""
    if max(a) < min(b) or max(b) < min(a):
        return "assumes that the machine was the same in both sessions (mlhpc ab runs them in turn)"
    return None


def _compute_ratio(compared: TimeComparison | None, a: Sequence[float], b: Sequence[float]) -> TimeRatio:
    """Return the ratio with its interval. If the runs show no spread, it is of geometric means, without an interval."""
    if compared is not None:
        return TimeRatio(compared.ratio, compared.low, compared.high, compared.p)
    means = [math.fsum(map(math.log, times)) / len(times) for times in (a, b)]
    return TimeRatio(math.exp(means[1] - means[0]), 0.0, math.inf)


def _reasons_against_scores(a: Result, b: Result) -> list[str]:
    """Say why a side is not a score of a compliant result."""
    sides = (("A", a), ("B", b))
    invalid = [f"{side} is {item.score.reason}" for side, item in sides if not item.score.valid]
    return invalid + [f"{side} is {item.verdict}" for side, item in sides if item.verdict]


def _find_round(scored: Result) -> str | None:
    """Return the round of a result, else its ruleset. Results of different rounds are not compared."""
    return scored.group.round or find_named_run(scored.runs).ruleset


def _compare_energy(a: Result, b: Result) -> tuple[EnergyRatio | None, list[str]]:
    """Compare two results' energies. Return the ratio, or None and why. Without any energy, None and no reason."""
    found = {"A": a.energy, "B": b.energy}
    # Without a meter on either side there is nothing to explain.
    if not any(found.values()):
        return None, []
    for name, energy in found.items():
        if energy is None:
            return None, [f"energy is not compared: {name} has none"]
        if energy.mean_j is None or energy.reason is not None:  # an energy with a reservation is not compared
            return None, [f"energy is not compared: {name}: {energy.reason}"]
    one, other = found["A"], found["B"]
    assert one is not None
    assert other is not None
    assert one.mean_j is not None
    assert other.mean_j is not None
    if one.what != other.what:
        return None, [f"energy is not compared: A is of {one.what}, B of {other.what}"]
    ends_a, ends_b = one.interval_j, other.interval_j
    # The ends lie as far apart as both intervals allow: conservative, and needs no model.
    interval = (ends_b[0] / ends_a[1], ends_b[1] / ends_a[0]) if ends_a and ends_b and ends_a[0] > 0 else None
    return EnergyRatio(other.mean_j / one.mean_j, interval, one.what, one.mean_j, other.mean_j), []


def _render_score(scored: Result) -> str:
    result = scored.score
    if not result.valid:
        return "no score"
    if isinstance(result, Throughput):
        return f"{result.models_per_minute or 0.0:.3g} models/min"
    return f"score {render_duration(result.mean_s or 0.0)}"


def _render_kind(kind: _Kind) -> str:
    benchmark, size, scenario = kind
    return " ".join(str(part) for part in (benchmark or "no known benchmark,", size, scenario) if part is not None)


def _render_kinds(results: dict[_Kind, list[Result]]) -> str:
    return ", ".join(_render_kind(kind) for kind in results) or "no result_*.txt"
