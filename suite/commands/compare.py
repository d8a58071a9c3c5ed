"""`mlhpc compare`: says whether a result is slower than a baseline, faster, equivalent, or inconclusive."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from mlhpc.suite.cli.options import JSON, busy_option, card_option, format_option, tolerance_option
from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.verdict import PairVerdict, Standing, Task, assess, judge_pair
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, render_duration, render_printable
from mlhpc.suite.log.other_work import render_busy_warning
from mlhpc.suite.log.score import Throughput
from mlhpc.suite.statistics import CONFIDENCE, Outcome
from mlhpc.suite.statistics.sessions import render_sessions


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
class Side:
    """One result: its folder, what it is, its score as text, and a warning if other programs used the CPUs."""

    folder: str
    standing: Standing
    score: str
    busy: str


@dataclass(frozen=True)
class Pair:
    """One result B compared with its baseline A. ``energy`` is set if both results have one; the verdict is on time."""

    a: Side
    b: Side
    verdict: PairVerdict
    energy: EnergyRatio | None = None
    energy_reasons: tuple[str, ...] = ()

    @property
    def busy(self) -> list[str]:
        """Warnings of sides whose runs shared their CPUs with other programs."""
        return [f"{name}, {side.folder}: {side.busy}" for name, side in (("A", self.a), ("B", self.b)) if side.busy]

    @property
    def reasons(self) -> tuple[str, ...]:
        """What a person should know with the verdict."""
        return (*self.verdict.reasons, *self.energy_reasons)


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
@busy_option()
@tolerance_option()
@format_option()
def compare(
    paths: tuple[Path, ...], baseline: Path | None, any_runs: bool, busy: bool, tolerance: float, style: str
) -> None:
    """Say whether results are faster or slower than a baseline of the same benchmark and size.

    PATHS are run folders, results folders or packages; the first one is the baseline.

    The ratio compares the geometric means of time to train of all converged runs (Welch's t test on log time). Where a
    side has several sessions, the session is the unit: a machine differs more from day to day than from run to run.
    A result during which other programs used more than 5 % of the CPUs is inconclusive.
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
    if same := [path for path in others if path.resolve() == first.resolve()]:
        print_line(f"note: {first} and {same[0]} are the same runs; give the path of other ones", error=True)
    found, confidence = compare_results(first, others, tolerance, any_runs=any_runs, busy=busy)
    if style == JSON:
        rows = [convert_to_data(item) for item in found]
        document = {"version": 1, "tolerance_percent": tolerance, "confidence": confidence, "comparisons": rows}
        print_line(json.dumps(document, indent=1))
    else:
        several = len(others) > 1
        lines = [
            line
            for item in found
            for line in (render_pair(item, tolerance, confidence, named=several), *(f"  {text}" for text in item.busy))
        ]
        print_line("\n".join(map(render_printable, lines)))
    code = _choose_exit_code(found)
    if code != ExitCode.OK:
        raise click.exceptions.Exit(code)


def _choose_exit_code(found: Sequence[Pair]) -> ExitCode:
    """Return the exit code of all comparisons; a slower result outweighs one that could not be compared."""
    codes = {item.verdict.code for item in found}
    urgent = (ExitCode.FINDINGS, ExitCode.NO_SCORE, ExitCode.INCONCLUSIVE)
    return next((code for code in urgent if code in codes), ExitCode.OK)


def compare_results(
    baseline: Path, others: Sequence[Path], tolerance: float = 0.0, *, any_runs: bool = False, busy: bool = False
) -> tuple[list[Pair], float]:
    """Compare each of ``others`` with ``baseline``. Also return the confidence of each interval."""
    pairs = [pair for other in others for pair in _pair_results(baseline, other)]
    # Bonferroni: the intervals of all pairs hold together
    confidence = 1.0 - (1.0 - CONFIDENCE) / len(pairs)
    found = []
    for a, b in pairs:
        one, other = (_make_side(result) for result in (a, b))
        verdict = judge_pair(
            one.standing,
            other.standing,
            margin=tolerance / 100.0,
            confidence=confidence,
            any_runs=any_runs,
            busy=busy,
        )
        found.append(Pair(one, other, verdict, *(_compare_energy(a, b) if verdict.ratio else ())))
    return found, confidence


def _make_side(result: Result) -> Side:
    busy = render_busy_warning([run.company for run in result.runs])
    return Side(str(result.group.folder), assess(result), _render_score(result), busy)


def convert_to_data(item: Pair) -> dict[str, Any]:
    """Convert one comparison to data for --format json. An interval without an upper end becomes null."""
    compared, verdict = item.verdict.compared, item.verdict
    return {
        "what": str(item.a.standing.task),
        "a": item.a.folder,
        "b": item.b.folder,
        "verdict": verdict.outcome,
        "reasons": item.reasons,
        "scores": verdict.scores,
        "ratio": verdict.ratio,
        "ratio_of": f"time of {item.b.folder} / time of {item.a.folder}",
        "interval": [compared.low, compared.high] if compared is not None and math.isfinite(compared.high) else None,
        "assumes": verdict.assumes,
        **{
            f"{name}_{letter}": value
            for letter, side in (("a", item.a), ("b", item.b))
            for name, value in (
                ("runs", len(side.standing.runs)),
                ("sessions", side.standing.sessions),
                ("score", side.score),
                ("disturbed", side.standing.disturbed),
            )
        },
        "busy": item.busy,
        "by_session": compared is not None and compared.by_session,
        "smallest_ratio_found": compared.detectable if compared is not None else None,
        "runs_needed": compared.needed._asdict() if compared is not None else None,
        "energy": asdict(item.energy) if item.energy else None,
    }


def render_pair(item: Pair, tolerance: float, confidence: float, *, named: bool) -> str:
    """Render one comparison as a line. With ``named`` it has the folder of B, for several comparisons."""
    a, b, verdict, compared = item.a, item.b, item.verdict, item.verdict.compared
    what, outcome = a.standing.task, verdict.outcome
    reasons = "".join(f"; {reason}" for reason in (*item.reasons, *([verdict.assumes] if verdict.assumes else [])))
    if verdict.ratio is None:
        return f"{what}: {b.folder}: {outcome}{reasons}" if named else f"{what}: {outcome}{reasons}"
    level = f"{100 * confidence:.4g} % [{compared.low:.4f}, {compared.high:.4f}]" if compared else "no interval"
    more = f" by more than {tolerance:g} %" if tolerance and outcome == Outcome.SLOWER else ""
    within = f" within {tolerance:g} %" if outcome == Outcome.EQUIVALENT else ""
    # Reasons speak of A and B
    names = (f"{a.folder} (A)", f"{b.folder} (B)") if reasons else (a.folder, b.folder)
    runs = [render_sessions(len(side.standing.runs), side.standing.sessions) for side in (b, a)]
    return (
        f"{what}: {names[1]} takes {verdict.ratio:.4f} times as long as {names[0]}, {level} ({runs[0]} and {runs[1]},"
        f" {b.score} and {a.score}): {outcome}{more}{within}{reasons}{_render_energy(item.energy)}"
    )


def _render_energy(energy: EnergyRatio | None) -> str:
    if energy is None:
        return ""
    ends = (
        f"[{energy.interval[0]:.4g}, {energy.interval[1]:.4g}] by both intervals" if energy.interval else "no interval"
    )
    return f"; energy {energy.ratio:.4g} times, {ends} ({energy.b_j:.4g} and {energy.a_j:.4g} J, {energy.of})"


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
                raise InputError(f"{path} has {len(results[kind])} results of {kind}; give one of them: {names}")
    return [(first[kind][0], second[kind][0]) for kind in shared]


def _group_by_kind(path: Path) -> dict[Task, list[Result]]:
    results: dict[Task, list[Result]] = {}
    verdict = check([path])
    verdict.print_unread()
    for scored in verdict.results:
        results.setdefault(assess(scored).task, []).append(scored)
    return results


def _compare_energy(a: Result, b: Result) -> tuple[EnergyRatio | None, tuple[str, ...]]:
    """Compare two results' energies. Return the ratio, or None and why. Without any energy, None and no reason."""
    found = {"A": a.energy, "B": b.energy}
    # Without a meter on either side there is nothing to explain.
    if not any(found.values()):
        return None, ()
    for name, energy in found.items():
        if energy is None:
            return None, (f"energy is not compared: {name} has none",)
        if energy.mean_j is None or energy.reason is not None:  # an energy with a reservation is not compared
            return None, (f"energy is not compared: {name}: {energy.reason}",)
    one, other = found["A"], found["B"]
    assert one is not None
    assert other is not None
    assert one.mean_j is not None
    assert other.mean_j is not None
    if one.what != other.what:
        return None, (f"energy is not compared: A is of {one.what}, B of {other.what}",)
    ends_a, ends_b = one.interval_j, other.interval_j
    # The ends lie as far apart as both intervals allow: conservative, and needs no model.
    interval = (ends_b[0] / ends_a[1], ends_b[1] / ends_a[0]) if ends_a and ends_b and ends_a[0] > 0 else None
    return EnergyRatio(other.mean_j / one.mean_j, interval, one.what, one.mean_j, other.mean_j), ()


def _render_score(scored: Result) -> str:
    result = scored.score
    if not result.valid:
        return "no score"
    if isinstance(result, Throughput):
        return f"{result.models_per_minute or 0.0:.3g} models/min"
    return f"score {render_duration(result.mean_s or 0.0)}"


def _render_kinds(results: dict[Task, list[Result]]) -> str:
    return ", ".join(map(str, results)) or "no result_*.txt"
