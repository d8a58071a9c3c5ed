"""What a step waits with experts in files, against what `mlhpc plan --offload file` predicts from this machine's ceilings.

    python benchmarks/offload_wait.py [--rounds 3] [--folder DIR] > benchmarks/results/DATE-offload_wait.txt

`moe_lm` trains on one rank with and without offload, in turns. With offload it lies in a control group of version 1, whose limit
counts the page cache too, so that files are read from the disk. Exposed wait is the time of a step with, minus that without.
The prediction takes the compute rate that the runs without reach. Run it alone, as root. Needs the data set ($MLHPC_DATA).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.machine.probes.processor import read_cpu

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
LIMIT, CACHE = 1_100_000_000, 120_000_000
MODEL = {"layers": 6, "width": 256, "moe_every": 1, "moe.experts": 16, "moe.hidden": 1024, "moe.top_k": 2}
SETS = ["global_batch_size=16", "precision=float32", "window_steps=1", "submission.division=open"]
SETS += [f"hyperparameters.{name}={value}" for name, value in MODEL.items()]
STEPS, SKIPPED = 15, 3  # first steps: memory is taken, files are made


def in_group(words: list[str], group: Path | None) -> list[str]:
    """Return the words of a command of mlhpc, in a control group if one is given."""
    command = [sys.executable, "-m", "mlhpc", *words]
    return (
        command if group is None else ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group / "cgroup.procs"), *command]
    )


def call(*words: str | Path) -> str:
    """Run a command of mlhpc. Return what it prints."""
    done = subprocess.run(in_group([*map(str, words)], None), capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def with_sets(*more: str) -> list[str]:
    return [word for each in (*SETS, *more) for word in ("--set", each)]


def train(folder: Path, group: Path | None, *more: str) -> tuple[list[float], list[float]]:
    """Train STEPS steps. Return seconds and waits for loads of each, but the first ones."""
    words = [
        "run",
        "moe_lm",
        "--size",
        "smoke",
        "--ranks",
        "1",
        "--runs",
        "1",
        "-o",
        str(folder),
        "-q",
        *with_sets(*more),
    ]
    log = folder / "result_0.txt"
    process = subprocess.Popen(
        in_group(words, group), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    while not log.exists() or log.read_text().count(mllog.STEP_PHASES) < STEPS:
        if process.poll() is not None:
            sys.exit(
                f"{folder}: the run ended after {log.read_text().count(mllog.STEP_PHASES) if log.exists() else 0} steps"
            )
        time.sleep(0.2)
    process.terminate()
    process.wait()
    events = read_events(log).events
    steps = [event.value["step"] for event in events if event.key == mllog.STEP_PHASES][SKIPPED:STEPS]
    windows = [event.value for event in events if event.key == mllog.WINDOW_STATS][SKIPPED:STEPS]
    return steps, [window["offload"]["wait_s"] for window in windows if "offload" in window]


def make_group() -> Path:
    own = re.search(r"^\d+:memory:(\S+)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    if own is None:
        sys.exit("no control group of version 1 for memory")
    folder = Path(f"/sys/fs/cgroup/memory{own[1]}") / f"wait_{os.getpid()}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured [that of temporary files]")
    given = parser.parse_args()
    group = make_group()
    try:
        with tempfile.TemporaryDirectory(dir=given.folder) as name:
            place = Path(name)
            ceilings = place / "ceilings.json"
            call("ceilings", "--quick", "--directory", place, "-o", ceilings, "-q")
            tier = [
                f"hyperparameters.moe.offload.{each}"
                for each in ("tier=file", f"folder={place / 'experts'}", f"cache={CACHE}")
            ]
            seconds: dict[str, list[float]] = {"without": [], "with": []}
            waits = list[float]()
            for number in range(given.rounds):
                seconds["without"] += train(place / f"without-{number}", None)[0]
                found = train(place / f"with-{number}", group, *tier)
                seconds["with"] += found[0]
                waits += found[1]
            plan = [
                "plan",
                "moe_lm",
                "--size",
                "smoke",
                "--ceilings",
                ceilings,
                "--offload",
                "file",
                "--format",
                "json",
                *with_sets(),
            ]
            ideal = json.loads(call(*plan))["offload"]["compute_s"]
            base = statistics.median(seconds["without"])
            predicted = json.loads(call(*plan, "--reached", f"{100 * ideal / base:.6g}%"))["offload"]
            tier_gb, limit = predicted["tier_bytes"] / 1e9, LIMIT / 1e6
            print(f"{read_cpu(Path('/')).model}; moe_lm, {MODEL}, tier {tier_gb:.3g} GB, control group {limit:g} MB")
            for kind, found in seconds.items():
                ends = f"{min(found):.4g} to {max(found):.4g}, n = {len(found)}"
                print(f"{kind}: {statistics.median(found):.4g} s a step, {ends}")
            seen, wait_s = statistics.median(seconds["with"]) - base, predicted["wait_s"]
            load, store = (predicted["rates"][name]["value"] / 1e9 for name in ("load", "store"))
            print(
                f"exposed wait: {seen:.4g} s a step; predicted {wait_s:.4g} s ({load:.3g} GB/s read, {store:.3g}"
                f" written); seen / predicted {seen / wait_s:.3g}"
            )
            print(f"of it waited for loads, as logged: {statistics.median(waits):.4g} s")
    finally:
        group.rmdir()


if __name__ == "__main__":
    main()
