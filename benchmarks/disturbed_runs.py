"""What other programs on the CPUs do to the times of equal runs, and to the verdict of `mlhpc compare`.

    python benchmarks/disturbed_runs.py DATA [--runs 5] [--workload cosmoflow]

Runs of `smoke` on two ranks, quiet ones and ones beside two processes that burn a share of each CPU, by turns. A row is
a share: the share that the logs state, the time of these runs over that of the quiet ones, and the same of CPU seconds.
"different" says whether `compare --busy` calls the two unequal: they are the same machine and code.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.verdict import Standing, assess, judge_pair
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.statistics.comparison import compare_times

SHARES = (0.0, 0.1, 0.2, 0.5, 1.0)
PERIOD_S = 0.05


def burn(share: float) -> None:
    """Use a share of one CPU until the process is ended."""
    while True:
        begin = time.perf_counter()
        while time.perf_counter() - begin < share * PERIOD_S:
            pass
        time.sleep((1.0 - share) * PERIOD_S)


def run_beside(share: float, workload: str, data: Path, seed: int, folder: Path) -> float:
    """Run once beside two burning processes. Return the share of the CPUs that the log states."""
    others = [multiprocessing.Process(target=burn, args=(share,), daemon=True) for _ in range(2 if share else 0)]
    for other in others:
        other.start()
    words = ["run", workload, "--size", "smoke", "--ranks", "2", "--seed", str(seed), "--set", f"data={data}"]
    try:
        subprocess.run(
            [sys.executable, "-m", "mlhpc", *words, "-o", str(folder), "--quiet"], check=True, capture_output=True
        )
    finally:
        for other in others:
            other.terminate()
    found = summarise_log(read_events(folder / "result_0.txt", steps=False)).other_work
    return found.share if found is not None else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workload", default="cosmoflow")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        seen: dict[float, list[float]] = {share: [] for share in SHARES}
        for number in range(given.runs):
            for share in SHARES:
                folder = Path(root) / f"{share}" / f"{number}"
                seen[share].append(run_beside(share, given.workload, given.data.resolve(), number, folder))
        standings = {share: assess_together(Path(root) / f"{share}") for share in SHARES}
    print("| share of each CPU | logged share | time over quiet | CPU seconds over quiet | different |")
    print("| --- | --- | --- | --- | --- |")
    for share, standing in standings.items():
        verdict = judge_pair(standings[0.0], standing, any_runs=True, busy=True)
        by_cpu = compare_times(standings[0.0].cpu_runs, standing.cpu_runs)
        ratios = [f"{c.ratio:.3f} [{c.low:.3f}, {c.high:.3f}]" if c else "-" for c in (verdict.compared, by_cpu)]
        logged = sum(seen[share]) / len(seen[share])
        print(f"| {share:.0%} | {logged:.1%} | {ratios[0]} | {ratios[1]} | {verdict.outcome} |", flush=True)


def assess_together(folder: Path) -> Standing:
    """Take the runs of several run folders as one result."""
    parts = [assess(result) for result in check([folder]).results]
    first = parts[0]
    return Standing(
        *(first.task, first.round, first.division, first.system),
        tuple(run for part in parts for run in part.runs),
        tuple(run for part in parts for run in part.cpu_runs),
        *(0.001, len(parts), 0, None, None, first.disturbed),
    )


if __name__ == "__main__":
    main()
