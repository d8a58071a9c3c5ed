"""CPU seconds from start to end of the commands a person types on a login node; median and range of several runs.

python benchmarks/startup.py [--runs 7]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 0.3
DRY_RUN = [
    "submit",
    "cosmoflow",
    "--system",
    "slurm-two-node",
    "--size",
    "mini",
    "--nodes",
    "2",
    "--runs",
    "2",
    "--dry-run",
]
COMMANDS = (["--help"], ["list"], ["check", "--help"], ["score", "--help"], ["status", "--help"], DRY_RUN)


def cpu_s(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "suite", *arguments], cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    print(f"CPU seconds of {runs} starts each; limit {LIMIT_S}")
    for arguments in COMMANDS:
        cpu_s(arguments)  # the files are cached now
        found = [cpu_s(arguments) for _ in range(runs)]
        name = "mlhpc " + " ".join(arguments[:1] if len(arguments) > 2 else arguments)
        print(f"  {name:22s} {statistics.median(found):.3f}  [{min(found):.3f}, {max(found):.3f}]")


if __name__ == "__main__":
    main()
