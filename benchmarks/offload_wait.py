"""What a step waits with experts in files, against what `mlhpc plan --offload file` predicts from this machine's ceilings.

    python benchmarks/offload_wait.py [--rounds 1] [--folder DIR] > benchmarks/results/DATE-offload_wait.txt

`moe_lm` trains on one rank without offload and with it, then `mlhpc plan --measure` takes its steps in the tier, in turns. What
has a tier lies in a control group of version 1, whose limit counts the page cache too, so that files are read from the disk.
Exposed wait is what the training thread waits for the tier, by the log. CPU seconds, of all threads and of the training thread,
stand beside: a step with offload is longer by both. Predictions take the compute rate that the runs without reach: one from the
rates of the disk alone, one from the measured steps. A round takes three minutes. Run it alone, as root. Needs the data set.
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
from contextlib import suppress
from pathlib import Path

import psutil

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


def call(*words: str | Path, group: Path | None = None) -> str:
    """Run a command of mlhpc. Return what it prints."""
    done = subprocess.run(in_group([*map(str, words)], group), capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def with_sets(*more: str) -> list[str]:
    return [word for each in (*SETS, *more) for word in ("--set", each)]


def read_cpu_s(pid: int) -> list[float]:
    """Return the CPU seconds of each thread of a process and its descendants, the busiest first."""
    found = list[float]()
    for process in [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]:
        with suppress(OSError):
            paths = Path(f"/proc/{process}/task").glob("*/schedstat")
            found += [int(path.read_text().split()[0]) / 1e9 for path in paths]
    return sorted(found, reverse=True)


def train(folder: Path, group: Path | None, *more: str) -> tuple[list[float], list[float], list[float]]:
    """Train STEPS steps. Return of each but the first its seconds and waits; then the mean CPU seconds by thread."""
    words = ["run", "moe_lm", "--size", "smoke", "--ranks", "1", "--runs", "1", "-o", str(folder), "-q"]
    log = folder / "result_0.txt"
    process = subprocess.Popen(
        in_group([*words, *with_sets(*more)], group),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    marks = list[list[float]]()
    for steps in (SKIPPED, STEPS):
        while not log.exists() or log.read_text().count(mllog.STEP_PHASES) < steps:
            if process.poll() is not None:
                sys.exit(f"{folder}: the run ended before step {steps}")
            time.sleep(0.05)
        marks.append(read_cpu_s(process.pid))
    process.terminate()
    process.wait()
    events = read_events(log).events
    steps_s = [event.value["step"] for event in events if event.key == mllog.STEP_PHASES][SKIPPED:STEPS]
    windows = [event.value for event in events if event.key == mllog.WINDOW_STATS][SKIPPED:STEPS]
    waits = [window["offload"]["wait_s"] for window in windows if "offload" in window]
    cpu = [(after - before) / (STEPS - SKIPPED) for before, after in zip(*marks, strict=False)]
    return steps_s, waits, cpu


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
    parser.add_argument("--rounds", type=int, default=1)
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
            cpu: dict[str, list[list[float]]] = {"without": [], "with": []}
            waits, tried = list[float](), list[float]()
            plan = ["plan", "moe_lm", "--size", "smoke", "--mesh", "data=1", "--ceilings", ceilings]
            plan += ["--offload", "file", "--format", "json"]
            ideal = json.loads(call(*plan, *with_sets()))["offload"]["compute_s"]
            for number in range(given.rounds):
                for kind, where, more in (("without", None, []), ("with", group, tier)):
                    steps, waited, busy = train(place / f"{kind}-{number}", where, *more)
                    seconds[kind] += steps
                    waits += waited
                    cpu[kind].append(busy)
                cpu_s = statistics.fmean(busy[0] for busy in cpu["without"])  # seconds, unless others take the core
                reached = ["--reached", f"{100 * ideal / cpu_s:.6g}%"]
                text = call(*plan, *reached, "--measure", *with_sets(*tier), group=group)
                measured = json.loads(text)["offload"]
                tried.append(measured["wait_s"])
            predicted = json.loads(call(*plan, *reached, *with_sets()))["offload"]
            tier_gb, limit = predicted["tier_bytes"] / 1e9, LIMIT / 1e6
            print(f"{read_cpu(Path('/')).model}; moe_lm, {MODEL}, tier {tier_gb:.3g} GB, control group {limit:g} MB")
            for kind, found in seconds.items():
                ends = f"{min(found):.4g} to {max(found):.4g}, n = {len(found)}"
                every, first = (
                    statistics.fmean(each) for each in zip(*((sum(busy), busy[0]) for busy in cpu[kind]), strict=True)
                )
                used = f"{every:.4g} CPU-s of all threads, {first:.4g} of the training thread"
                print(f"{kind}: {statistics.median(found):.4g} s a step, {ends}; {used}")
            seen, wait_s = statistics.median(waits), predicted["wait_s"]
            load, store = (predicted["rates"][name]["value"] / 1e9 for name in ("load", "store"))
            ends = f"{min(waits):.4g} to {max(waits):.4g}, n = {len(waits)}"
            print(f"exposed wait: {seen:.4g} s a step, {ends}")
            print(
                f"predicted from the disk alone {wait_s:.4g} s ({load:.3g} GB/s read, {store:.3g} written); "
                f"seen / predicted {seen / wait_s:.3g}"
            )
            path, ends = statistics.median(tried), f"{min(tried):.4g} to {max(tried):.4g}, n = {len(tried)}"
            print(
                f"predicted from steps in the tier {path:.4g} s, {ends}, of the last one {measured['update_s']:.4g} s in the"
                f" update; seen / predicted {seen / path:.3g}"
            )
    finally:
        group.rmdir()


if __name__ == "__main__":
    main()
