"""`mlhpc compare`: says in one line whether one result is slower than another, faster, or not distinguishable."""

from __future__ import annotations

import math
from pathlib import Path

import click

from suite.cli import card_option
from suite.compliance.scoring import ScoredGroup, first_named, score_results
from suite.errors import InputError
from suite.files import print_line, printable
from suite.log.comparable import unlike
from suite.log.score import Throughput, TimeRatio, time_ratio

HELP_GROUP = "Compare"
HELP_ORDER = 1


@click.command()
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
@card_option
@click.option(
    "--tolerance",
    type=click.FloatRange(0.0),
    default=0.0,
    show_default=True,
    metavar="PERCENT",
    help="Call B slower only if it is certainly slower by more than this.",
)
def compare(a: Path, b: Path, tolerance: float) -> None:
    """Compare the result B with the result A: run folders, results folders or packages that share a benchmark and size.

    The ratio is that of the geometric means of time to train of all converged runs, with its 95 % interval (Welch's t on
    log time). Of throughput results it is that of the instances; models/min stand beside it.

    Exit code 0: B is not slower, as far as these runs can tell; 1: B is slower, or one of the two is not a score; 2: usage.

    \b
    Examples:
      mlhpc compare runs/before runs/after
      mlhpc compare submissions/ACME/results/cluster/strong/cosmoflow runs/today --tolerance 2
    """
    if not math.isfinite(tolerance):
        raise click.UsageError(f"--tolerance {tolerance:g}: expected a number of percent")
    verdicts = [_verdict(one, other, tolerance) for one, other in _pairs(a, b)]
    print_line("\n".join(printable(line) for line, _ in verdicts))
    if any(worse for _, worse in verdicts):
        raise click.exceptions.Exit(1)


def verdict(ratio: TimeRatio, tolerance: float = 0.0) -> str:
    """slower, faster or not distinguishable: B against A, decided by the interval of their ratio alone."""
    if ratio.low > 1.0 + tolerance / 100.0:
        return "slower"
    return "faster" if ratio.high < 1.0 else "not distinguishable"


_Kind = tuple[str | None, str | None, str]  # benchmark, size, scenario


def _pairs(a: Path, b: Path) -> list[tuple[ScoredGroup, ScoredGroup]]:
    """Pair the results of both paths by benchmark, size and scenario. InputError if none match or a match is ambiguous."""
    first, second = _results(a), _results(b)
    shared = [kind for kind in first if kind in second]
    if not shared:
        raise InputError(f"nothing in common: {a} has {_kinds(first)}; {b} has {_kinds(second)}")
    for path, results in ((a, first), (b, second)):
        for kind in shared:
            if len(results[kind]) > 1:
                names = ", ".join(str(item.group.folder) for item in results[kind])
                raise InputError(f"{path}: {len(results[kind])} results of {_kind(kind)}; choose one of {names}")
    return [(first[kind][0], second[kind][0]) for kind in shared]


def _results(path: Path) -> dict[_Kind, list[ScoredGroup]]:
    results: dict[_Kind, list[ScoredGroup]] = {}
    for scored in score_results([path]):
        results.setdefault(_kind_of(scored), []).append(scored)
    return results


def _kind_of(scored: ScoredGroup) -> _Kind:
    first = first_named(scored.records)
    return first.benchmark, first.size, scored.scenario


def _verdict(a: ScoredGroup, b: ScoredGroup, tolerance: float) -> tuple[str, bool]:
    """The line to print, and True if B is slower or one of the two is no score."""
    what = _kind(_kind_of(a))
    for name, result in (("A", a.result), ("B", b.result)):
        if not result.valid:
            return f"{what}: {name} is {result.reason}", True
    times = _times(a), _times(b)
    ratio = time_ratio(*times)
    word = verdict(ratio, tolerance)
    more = f" by more than {tolerance:g} %" if tolerance and word == "slower" else ""
    return (
        f"{what}: B takes {ratio.ratio:.4f} times as long as A, 95 % [{ratio.low:.4f}, {ratio.high:.4f}], "
        f"n={len(times[0])} and {len(times[1])}, {_score(a)} and {_score(b)}: {word}{more}{_unlike(a, b)}{_not_compliant(a, b)}",
        word == "slower",
    )


def _unlike(a: ScoredGroup, b: ScoredGroup) -> str:
    """Why the two are not ranked against each other, as the end of the line."""
    round_a, round_b = (item.group.round or first_named(item.records).ruleset for item in (a, b))
    reasons = unlike(round_a, round_b, a.division, b.division)
    return "".join(f"; {reason}" for reason in reasons)


def _not_compliant(a: ScoredGroup, b: ScoredGroup) -> str:
    """Which of the two is not compliant, as the end of the line."""
    return "".join(f"; {name} is {item.verdict}" for name, item in (("A", a), ("B", b)) if item.verdict)


def _times(scored: ScoredGroup) -> list[float]:
    return [run.record.time_to_train_s or 0.0 for run in scored.result.runs if run.converged]


def _score(scored: ScoredGroup) -> str:
    result = scored.result
    if isinstance(result, Throughput):
        return f"{result.models_per_minute or 0.0:.4g} models/min"
    return f"score {(result.mean_s or 0.0) / 60.0:.4g} min"


def _kind(kind: _Kind) -> str:
    benchmark, size, scenario = kind
    return " ".join(str(part) for part in (benchmark or "no known benchmark,", size, scenario) if part is not None)


def _kinds(results: dict[_Kind, list[ScoredGroup]]) -> str:
    return ", ".join(_kind(kind) for kind in results) or "no result_*.txt"
