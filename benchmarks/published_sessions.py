"""How much the sessions of published results differ: what a pause changes, and whether intervals by sessions hold.

    python benchmarks/published_sessions.py PATH...        clones of mlcommons/hpc_results_v*

The first table is of runs in a row: the distance of their seconds per epoch (of logs) over the root mean square of those of the
same result after pauses below an hour. Of independent normal runs the median is 0.67. The second is of results with several
sessions: the spread of a session's seconds per epoch that their runs do not explain (analysis of variance; 0 if none), and the
largest over the smallest. The third compares each session of a result with two or more others of it: 5 % are stated to differ.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from mlhpc.analysis.drawing.view import list_ordered_runs
from mlhpc.analysis.study import Study, read_study
from mlhpc.suite.statistics.comparison import compute_ratio
from mlhpc.suite.statistics.sessions import GAP_S, TimedRun, find_sessions

HOUR_S = 3600.0
CLASSES_H = ((1, 2), (2, 4), (4, 8), (8, 24), (24, math.inf))

Session = list[tuple[float, float]]  # seconds and seconds per epoch of each run


def list_results(study: Study) -> Iterator[tuple[str, list[TimedRun], list[float]]]:
    """List the label, the runs and their seconds per epoch of each result that reports a time and was not carried over."""
    rows = study.results
    for row in rows[(rows["mode"] == "strong") & rows["carried_over_from"].isna()].to_dict("records"):
        known = list_ordered_runs(study, row["group"])
        known = known[known["tau_s"] > 0]
        if len(known) > 2:
            pairs = zip(known["begin_s"], known["run_s"], strict=True)
            yield f"{row['label']} {row['benchmark']}", [TimedRun(*each) for each in pairs], known["tau_s"].tolist()


def divide(runs: Sequence[TimedRun], epochs: Sequence[float]) -> list[Session]:
    """Divide runs and their seconds per epoch into sessions."""
    left = list(zip((run.time_s for run in runs), epochs, strict=True))
    return [[left.pop(0) for _ in session] for session in find_sessions(runs)]


def estimate_spread(logs: Sequence[Sequence[float]]) -> float:
    """Estimate the spread of sessions beyond that of their runs, from logs by session."""
    every = [log for session in logs for log in session]
    means = [statistics.fmean(session) for session in logs]
    inside = sum((log - mean) ** 2 for session, mean in zip(logs, means, strict=True) for log in session)
    between = sum(
        len(session) * (mean - statistics.fmean(every)) ** 2 for session, mean in zip(logs, means, strict=True)
    )
    runs = (len(every) - sum(len(session) ** 2 for session in logs) / len(every)) / (len(logs) - 1)
    noise = inside / (len(every) - len(logs)) if len(every) > len(logs) else 0.0
    return math.sqrt(max(0.0, between / (len(logs) - 1) - noise) / runs)


def print_pauses(results: Sequence[tuple[str, list[TimedRun], list[float]]]) -> None:
    """Print how runs in a row differ, by the pause between them."""
    print("| pause, h | pairs of runs | results | median distance |\n| --- | --- | --- | --- |")
    found: dict[tuple[float, float], list[tuple[str, float]]] = {each: [] for each in CLASSES_H}
    for label, runs, epochs in results:
        pauses = [(later.begin_s - run.begin_s - run.time_s) / HOUR_S for run, later in pairwise(runs)]
        apart = [abs(math.log(later / epoch)) for epoch, later in pairwise(epochs)]
        usual = [each for pause, each in zip(pauses, apart, strict=True) if pause < 1]
        if len(usual) > 1 and max(usual) > 0:
            unit = math.sqrt(statistics.fmean(each**2 for each in usual))
            for (low, high), into in found.items():
                into += [(label, d / unit) for pause, d in zip(pauses, apart, strict=True) if low <= pause < high]
    for (low, high), pairs in found.items():
        median = statistics.median(distance for _, distance in pairs)
        print(f"| {low} to {high} | {len(pairs)} | {len({label for label, _ in pairs})} | {median:.2f} |")


def print_sessions(results: Sequence[tuple[str, list[TimedRun], list[float]]]) -> None:
    """Print how sessions of one result differ, and how often one is called different from the others."""
    print(
        "| result | runs of each session | spread of sessions, % | largest over smallest |\n| --- | --- | --- | --- |"
    )
    spreads, called = [], {"time": [0, 0], "seconds per epoch": [0, 0]}
    for label, runs, epochs in results:
        sessions = divide(runs, epochs)
        if len(sessions) < 2:
            continue
        logs = [[math.log(epoch) for _, epoch in session] for session in sessions]
        means = [statistics.fmean(session) for session in logs]
        spreads.append(100 * estimate_spread(logs))
        sizes = ", ".join(str(len(session)) for session in sessions)
        print(f"| {label} | {sizes} | {spreads[-1]:.1f} | {math.exp(max(means) - min(means)):.3f} |")
        for place in range(len(sessions) if len(sessions) > 2 else 0):
            for column, counts in enumerate(called.values()):
                times = [[run[column] for run in session] for session in sessions]
                found = compute_ratio(times[:place] + times[place + 1 :], [times[place]])
                counts[0] += not found.low <= 1.0 <= found.high
                counts[1] += 1
    few = statistics.quantiles(spreads, n=10, method="inclusive")
    print(f"\n{len(spreads)} results with several sessions; {sum(each <= 5.0 for each in spreads)} spread by 5 % or less; "
          f"median {statistics.median(spreads):.1f} %, nine in ten at most {few[-1]:.1f} %")  # fmt: skip
    print("| a session against the others of its result | compared | called different |\n| --- | --- | --- |")
    for what, (wrong, count) in called.items():
        print(f"| {what} | {count} | {wrong} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    results = list(list_results(read_study(parser.parse_args().paths, {})))
    print(
        f"{len(results)} results, {sum(len(runs) for _, runs, _ in results)} runs; a pause of {GAP_S / HOUR_S:g} h ends a session"
    )
    print_pauses(results)
    print_sessions(results)


if __name__ == "__main__":
    main()
