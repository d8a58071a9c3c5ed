"""Does a training go as healthy ones went? Compares a run's numbers, in order, with those of other runs.

Two questions per number: is it like those of healthy runs, and is it so after what came before it? The second sees what
leaves every number in its range: a validation metric too good for its loss. Each is a t test, and all together accuse
`RATE` of healthy runs at most (Bonferroni), if tails are no longer than those of `MOST_DOF`. Runs on the same data are
alike, so a new run's spread has a part of data sets, with few degrees of freedom, and one of runs (Satterthwaite).
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlhpc.suite.statistics import compute_t_cdf

RATE = 0.01  # of healthy runs that are accused
FEWEST_RUNS, FEWEST_SETS = 10, 3
SHRINKAGE = 0.3  # of correlations towards none: there are more numbers than runs
LEAST_REST = 0.4  # of a deviation that the numbers before leave open, as the shrinkage does
MOST_DOF = 8.0  # tails of healthy numbers are longer than normal ones (benchmarks/results/2026-11-29-courses.txt)
LEAST_LOG, LEAST_SHARE = 1e-4, 0.005  # deviations that count as one: of logarithms, of numbers that may be 0
LARGEST = 1e9  # deviations

Row = list[float]


class Deviation(NamedTuple):
    """A number that is unlike those of healthy runs. ``p`` is that of all tests together.

    ``low`` and ``high`` are the extremes of the healthy runs. ``before``: it is unlike them after what came before it.
    """

    name: str
    value: float
    low: float
    high: float
    runs: int
    before: bool
    p: float

    def render(self) -> str:
        """Render as ``weight norm of epoch 2: 4.1, in 25 healthy runs 4.9 to 5.2``."""
        inside = ", but not after such numbers before it" if self.before and self.low <= self.value <= self.high else ""
        return f"{self.name}: {self.value:.4g}, in {self.runs} healthy runs {self.low:.4g} to {self.high:.4g}{inside}"


@dataclass(frozen=True)
class Band:
    """What healthy runs are like. Columns are in the order of training; ``logs``: those whose logarithm is taken."""

    names: Sequence[str]
    logs: Sequence[bool]
    extremes: Sequence[tuple[float, float]]
    means: Row
    spreads: Row
    dofs: Row
    factor: Sequence[Row]
    rests: Row  # deviations of what the numbers before leave open
    runs: int

    def standardise(self, run: Mapping[str, float]) -> list[float | None]:
        """Return each number in units of a healthy run's deviation; None for one that the run lacks."""
        return [
            None if (value := run.get(name)) is None else _limit((_convert(value, log) - mean) / spread)
            for name, log, mean, spread in zip(self.names, self.logs, self.means, self.spreads, strict=True)
        ]


def build_band(runs: Sequence[Mapping[str, float]], data: Sequence[str], shares: Container[str] = ()) -> Band | None:
    """Build the band of healthy runs; ``data`` names each one's data set. None if there are too few of them.

    ``shares`` are numbers that may be 0 in a run though none was: the logarithm of a few weights of a million says nothing.

    Numbers that some run lacks are left out: the later epochs of runs that ended at the target are those of slow runs.
    """
    if len(runs) < FEWEST_RUNS or len(set(data)) < FEWEST_SETS:
        return None
    names = [name for name in max(runs, key=len) if all(name in run for run in runs)]
    logs = [min(run[name] for run in runs) > (LEAST_SHARE if name in shares else 0.0) for name in names]
    rows = [[_convert(run[name], log) for name, log in zip(names, logs, strict=True)] for run in runs]
    means, spreads, dofs = _measure(rows, data, logs)
    # What a run is like after its own numbers is judged by the runs on other data.
    rests: list[Row] = []
    for each in dict.fromkeys(data):
        others = [row for row, of in zip(rows, data, strict=True) if of != each]
        middle, scale, _ = _measure(others, [of for of in data if of != each], logs)
        factor = _factorise(_standardise(others, middle, scale))
        here = [row for row, of in zip(rows, data, strict=True) if of == each]
        rests += [_solve(factor, row)[0] for row in _standardise(here, middle, scale)]
    return Band(
        names=names,
        logs=logs,
        extremes=[(min(run[name] for run in runs), max(run[name] for run in runs)) for name in names],
        means=means,
        spreads=spreads,
        dofs=dofs,
        factor=_factorise(_standardise(rows, means, spreads)),
        rests=[
            max(LEAST_REST, math.sqrt(statistics.fmean(rest[at] ** 2 for rest in rests))) for at in range(len(names))
        ],
        runs=len(runs),
    )


def judge_course(band: Band, run: Mapping[str, float], rate: float = RATE) -> list[Deviation]:
    """Find the numbers of a run that are unlike those of healthy runs, the least likely first. Empty: none is."""
    scores = band.standardise(run)
    rests, known = _solve(band.factor, scores)
    tests = 2 * sum(score is not None for score in scores)
    found = []
    for at, name in enumerate(band.names):
        if scores[at] is None:
            continue
        for before, t in ((False, known[at]), (True, rests[at] / band.rests[at])):
            p = min(1.0, tests * 2.0 * (1.0 - compute_t_cdf(abs(t), band.dofs[at])))
            if p < rate:
                found.append(Deviation(name, run[name], *band.extremes[at], band.runs, before, p))
    return sorted(found, key=lambda each: (each.p, each.before))


def _convert(value: float, log: bool) -> float:
    return math.log(max(value, 1e-300)) if log else value


def _limit(score: float) -> float:
    return max(-LARGEST, min(LARGEST, score))


def _standardise(rows: Sequence[Row], means: Row, spreads: Row) -> list[Row]:
    return [
        [_limit((value - mean) / spread) for value, mean, spread in zip(row, means, spreads, strict=True)]
        for row in rows
    ]


def _measure(rows: Sequence[Row], data: Sequence[str], logs: Sequence[bool]) -> tuple[Row, Row, Row]:
    """Return the mean of each column, the deviation of a new run from it, and the degrees of freedom of that."""
    sets = [[at for at, of in enumerate(data) if of == each] for each in dict.fromkeys(data)]
    means, spreads, dofs = [], [], []
    for column, log in zip(zip(*rows, strict=True), logs, strict=True):
        mean, parts = statistics.fmean(column), [[column[at] for at in each] for each in sets]
        own = [statistics.fmean(part) for part in parts]
        between = sum(len(part) * (each - mean) ** 2 for part, each in zip(parts, own, strict=True)) / (len(sets) - 1)
        rest = max(1, len(column) - len(sets))  # with one run of each set nothing varies within it
        within = sum((value - each) ** 2 for part, each in zip(parts, own, strict=True) for value in part) / rest
        size = len(column) / len(sets)
        of_sets, of_runs = between / size, within * (1.0 - 1.0 / size)
        variance = of_sets + of_runs
        free = of_sets**2 / (len(sets) - 1) + of_runs**2 / rest
        least = LEAST_LOG if log else LEAST_SHARE
        means.append(mean)
        spreads.append(math.sqrt(max(least**2, variance + between / len(column))))
        dofs.append(min(MOST_DOF, variance**2 / free if free else float(len(column) - 1)))
    return means, spreads, dofs


def _factorise(rows: Sequence[Row]) -> list[Row]:
    """Return the lower triangle L with L L' the shrunk correlations of standardised columns."""
    columns = list(zip(*rows, strict=True))
    norms = [math.sqrt(math.fsum(value * value for value in column)) or 1.0 for column in columns]
    factor: list[Row] = []
    for at, column in enumerate(columns):
        row: Row = []
        for other in range(at):
            alike = sum(map(operator.mul, column, columns[other])) / (norms[at] * norms[other])
            alike = (1.0 - SHRINKAGE) * alike - sum(map(operator.mul, row, factor[other]))
            row.append(alike / factor[other][other])
        row.append(math.sqrt(max(1e-9, 1.0 - sum(value * value for value in row))))
        factor.append(row)
    return factor


def _solve(factor: Sequence[Row], scores: Sequence[float | None]) -> tuple[Row, Row]:
    """Return what the scores before leave open of each score, in its own unit, and the scores.

    One that is unknown gets the value that those before suggest.
    """
    rests: Row = []
    known: Row = []
    for row, score in zip(factor, scores, strict=True):
        due = sum(map(operator.mul, row, rests))
        known.append(due if score is None else score)
        rests.append((known[-1] - due) / row[-1])
    return rests, known
