"""CPU of the commands that a person types on a login node, as whole processes, interleaved with MLCommons' own checker.

    python benchmarks/startup.py [--rounds 9] [--log result_1.txt] [--instructions]

Median CPU seconds, and the median and quartiles of the ratio to the official checker in the same round. With ``--instructions``
valgrind, where there is one, counts those of one start each, twice: they are nearly the same on a noisy machine, and leave out what
the kernel does. The log is one of MLPerf HPC 3.0, which both check.
"""

from __future__ import annotations

import argparse
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
HELP = ("check", "score", "status", "package", "report")
OFFICIAL = "mlperf_logging.compliance_checker"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--log", type=Path, help="a result of MLPerf HPC 3.0; without it nothing is checked")
    parser.add_argument("--instructions", action="store_true")
    given = parser.parse_args()
    ours = [["--help"], ["workload", "list"], DRY_RUN, *([name, "--help"] for name in HELP)]
    commands = {f"mlhpc {' '.join(words if len(words) < 3 else words[:1])}": ["-m", "mlhpc", *words] for words in ours}
    first = next(iter(commands))
    if given.log is not None:
        log = str(given.log.resolve())
        first = "official checker LOG"
        official = ["-m", OFFICIAL, "--usage", "hpc", "--ruleset", "3.0.0", log]
        commands = {first: official, "mlhpc check LOG": ["-m", "mlhpc", "check", log], **commands}
    commands["python -c pass"] = ["-c", "pass"]
    with tempfile.TemporaryDirectory() as folder:  # the official checker writes into the working directory
        times: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(given.rounds + 1):
            for name, words in commands.items():
                seconds = cpu_s(words, folder)
                if number:  # the files are cached then
                    times[name].append(seconds)
        print(f"CPU seconds of {given.rounds} rounds; ratio to {first!r} in the same round, quartiles")
        for name, found in times.items():
            ratios = [mine / base for mine, base in zip(found, times[first], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"  {name:24s} {statistics.median(found):.3f}  {middle:5.2f} [{low:.2f}, {high:.2f}]")
        if given.instructions and shutil.which("valgrind") is None:
            print("no valgrind on PATH: instructions are not counted")
        elif given.instructions:
            print_instructions(commands, first, folder)


def print_instructions(commands: dict[str, list[str]], first: str, folder: str) -> None:
    """Print the instructions of one start of each command, counted twice, and the ratio to the first command's."""
    print(f"Millions of instructions of one start, counted twice; ratio to {first!r}")
    base = 0.0
    for name, words in commands.items():
        one, other = (instructions(words, folder) / 1e6 for _ in range(2))
        base = base or one
        print(f"  {name:24s} {one:6.0f} {other:6.0f}  {one / base:5.2f}")


def cpu_s(words: list[str], folder: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=folder, check=True, capture_output=True, env=environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def instructions(words: list[str], folder: str) -> float:
    """Instructions of one start, by valgrind's callgrind."""
    tool = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, *words]
    done = subprocess.run(tool, cwd=folder, check=True, capture_output=True, text=True, env=environment())
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return float(found[1])


def environment() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "HOME": "/nonexistent"}


if __name__ == "__main__":
    main()
