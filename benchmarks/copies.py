"""Measures how often the search for copies is wrong: on all published pairs of runs, and on copies made of published runs.

    python -m benchmarks.copies ROUND...

ROUND is a checkout of a public MLPerf HPC results repository. Three tables:

1. false alarms: for each pair of different runs of one result, the p value of their most alike stretch; the share of pairs
   with p below a level must not exceed the level. Runs that are known to be one (carried over to a later round, or
   without a seed and with equal values throughout) are left out, and counted.
2. what the bounds of suite/compliance/forensics/copy_rules.py rest on: how often n consecutive values of two runs are within x.
3. power: each run is copied with changed values and times, and looked for among all runs of its result.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mlhpc.suite.compliance.forensics.copy_rules import FALSE_ALARMS, RunIndex, Series, build_series, find_similarity
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import MetricValue, RunRecord, summarise_log
from mlhpc.suite.log.results_tree import find_results

LEVELS = (0.1, 0.01, 1e-3, 1e-4, 1e-5)
CLOSE = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
LENGTHS = (1, 2, 3, 4, 6, 8)
MOST_PAIRS = 4000  # of one result, drawn at random, of which all shifts are compared
COPIES: dict[str, tuple[float, float]] = {  # name: relative change of values, change of times in seconds
    "exact": (0.0, 0.0),
    "values 1e-12, times 50 ms": (1e-12, 0.05),
    "values 1e-5, times 50 ms": (1e-5, 0.05),
    "values 1e-4, times 50 ms": (1e-4, 0.05),
    "values 1e-3, times 50 ms": (1e-3, 0.05),
    "values 1e-2, times 50 ms": (1e-2, 0.05),
    "values 5 %, times as they were": (0.05, 0.0),
    "values 5 %, times 5 ms": (0.05, 0.005),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="+", type=Path)
    results, left_out = read_results(parser.parse_args().rounds)
    count = sum(map(len, results.values()))
    print(f"{count} runs of {len(results)} results; left out as known copies: {left_out}")
    print_false_alarms(results)
    print_closeness(results)
    print_power(results)
    return 0


def read_results(rounds: Sequence[Path]) -> tuple[dict[Path, list[RunRecord]], int]:
    """The different runs of each result with at least two, and the number of runs that were left out as known copies."""
    results: dict[Path, list[RunRecord]] = defaultdict(list)
    seen: set[object] = set()
    left_out = 0
    for folder in rounds:
        for group in find_results(folder).groups:
            runs = [summarise_log(read_events(path, steps=False)) for path in (*group.logs, *group.pruned)]
            curves = {tuple(item.value for item in run.evals) for run in runs}
            if len(runs) > 2 and len(curves) == 1:  # one seed, not logged
                left_out += len(runs)
                continue
            for run in runs:
                identity = run.run_start_s, tuple(item.value for item in run.evals)
                if identity in seen:
                    left_out += 1
                elif len(run.evals) > 1:
                    results[group.folder].append(run)
                seen.add(identity)
    return {folder: runs for folder, runs in results.items() if len(runs) > 1}, left_out


def pairs(results: dict[Path, list[RunRecord]], most: int = 10**9) -> Iterator[tuple[RunRecord, RunRecord]]:
    draw = random.Random(1)
    for runs in results.values():
        every = list(itertools.combinations(runs, 2))
        yield from every if len(every) <= most else draw.sample(every, most)


def least(series: Series, other: Series) -> float:
    """The smallest p of two series over all shifts."""
    places = len(series.numbers) * len(other.numbers)
    shifts = range(1 - len(series.numbers), len(other.numbers))
    found = (find_similarity(series, other, shift, places) for shift in shifts)
    return min((item.p for item in found if item is not None), default=1.0)


def print_false_alarms(results: dict[Path, list[RunRecord]]) -> None:
    known = {id(run): build_series(run) for runs in results.values() for run in runs}
    for number, what in enumerate(("evaluations", "durations")):
        values = [least(known[id(a)][number], known[id(b)][number]) for a, b in pairs(results, MOST_PAIRS)]
        shares = ", ".join(f"p <= {level:g}: {sum(v <= level for v in values)}" for level in LEVELS)
        print(f"false alarms, {what}, {len(values)} pairs, all shifts: {shares}; smallest p {min(values):.1e}")
    alarms = 0
    for runs in results.values():
        index: RunIndex[RunRecord] = RunIndex()
        for run in runs:
            found = index.find_duplicate(build_series(run))
            if found is not None:
                alarms += 1
                print(f"  {run.path}: {found[1].text()} with {found[0].path}")
            index.add(run, build_series(run))
    print(f"false alarms as mlhpc check looks, at {FALSE_ALARMS:g} per run: {alarms}")


def print_closeness(results: dict[Path, list[RunRecord]]) -> None:
    """Share of all places at which n consecutive values are within x, beside the bound x to the power of n."""
    known = {id(run): build_series(run) for runs in results.values() for run in runs}
    for number, what in enumerate(("evaluations", "durations")):
        hits: dict[tuple[int, float], int] = defaultdict(int)
        total: dict[int, int] = defaultdict(int)
        for a, b in pairs(results, MOST_PAIRS):
            one, two = known[id(a)][number], known[id(b)][number]
            close = one.closeness(two, 0, one.overlap(two, 0)) if len(one.numbers) and len(two.numbers) else []
            for n in LENGTHS:
                worst = [max(close[at : at + n]) for at in range(len(close) - n + 1)]
                total[n] += len(worst)
                for x in CLOSE:
                    hits[n, x] += sum(item <= x for item in worst)
        print(
            f"{what}: share of places with n consecutive values within x (and x^n), by x = {', '.join(map(str, CLOSE))}"
        )
        for n in LENGTHS:
            row = " ".join(f"{hits[n, x] / max(total[n], 1):8.1e} ({x**n:.0e})" for x in CLOSE)
            print(f"  n = {n} of {total[n]:8}: {row}")


def print_power(results: dict[Path, list[RunRecord]]) -> None:
    print("copies found, of one copy of each run among the runs of its result:")
    for name, (by, seconds) in COPIES.items():
        found = total = 0
        draw = random.Random(2)
        for runs in results.values():
            index: RunIndex[RunRecord] = RunIndex()
            for run in runs:
                index.add(run, build_series(run))
            for run in runs[:20]:
                total += 1
                found += index.find_duplicate(build_series(changed(run, by, seconds, draw))) is not None
        print(f"  {name}: {found} of {total}")


def changed(run: RunRecord, by: float, seconds: float, draw: random.Random) -> RunRecord:
    """A copy of a run with other last digits and time stamps."""
    evals = tuple(
        MetricValue(
            item.epoch,
            item.value * (1.0 + draw.uniform(-by, by)),
            round(item.time_s + draw.uniform(-seconds, seconds), 3),
            item.line,
        )
        for item in run.evals
    )
    return replace(run, evals=evals)


if __name__ == "__main__":
    sys.exit(main())
