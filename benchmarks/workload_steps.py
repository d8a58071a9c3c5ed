"""What a training step of each workload costs through the harness: samples per second, phases, waiting for data, memory.

    OMP_NUM_THREADS=1 python benchmarks/workload_steps.py [WORKLOAD/SIZE ...] [--ranks 1] [--steps 40] [--blocks 4]

Each workload and size runs in processes of its own, on the first samples of its data set (data/<workload>-<size>, $MLHPC_DATA),
with the config it ships with, in blocks of --steps steps that are each followed by an evaluation of the whole validation split.
The first block warms up and does not count; "first s" is by how much it took longer, which --set compile=true makes long.
Printed: median over blocks of the phases' shares of the step (rank 0), of wall and CPU time per step, with the range; peak resident
memory of the largest rank, or of the device. Exit code 1 if the median share of waiting for data is above 5 % at a size that is not
"smoke".
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

DATA_WAIT_LIMIT = 0.05
WHAT_RUNS_HERE = tuple(
    f"{name}/{size}"
    for name in ("cosmoflow", "deepcam", "open_catalyst", "openfold", "moe_lm", "swinv2_moe")
    for size in ("smoke", "mini")
)
PHASES = ("data_wait", "forward_backward", "exposed_communication", "optimizer", "other")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="WORKLOAD/SIZE", help=f"default: {' '.join(WHAT_RUNS_HERE)}")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    print(
        f"{args.ranks} rank(s), blocks of {args.steps} steps, {args.blocks} counted; load average {os.getloadavg()[0]:.1f}"
    )
    print(
        f"{'':22} {'batch':>5} {'samples/s':>9} {'step ms (range)':>24} {'CPU-ms':>7} "
        + " ".join(f"{name:>8}" for name in ("data", "fwd+bwd", "comm", "optim", "other"))
        + f" {'eval s':>7} {'first s':>7} {'MiB':>6}"
    )
    slow = []
    for subject in args.subjects or WHAT_RUNS_HERE:
        with tempfile.TemporaryDirectory() as folder:
            mpiexec = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(args.ranks)] if args.ranks > 1 else []
            words = [
                sys.executable,
                __file__,
                subject,
                "--worker",
                folder,
                "--steps",
                args.steps,
                "--blocks",
                args.blocks,
            ]
            words += [word for text in args.overrides for word in ("--set", text)]
            done = subprocess.run([*mpiexec, *map(str, words)], capture_output=True, text=True)
            if done.returncode:
                print(f"{subject:22} not measured: {(done.stderr.strip().splitlines() or ['no output'])[-1][:120]}")
                continue
            wait = show(subject, args, Path(folder))
        if wait > DATA_WAIT_LIMIT and not subject.endswith("/smoke"):
            slow.append(subject)
    if slow:
        print(f"waiting for data takes more than {DATA_WAIT_LIMIT:.0%} of the step: {', '.join(slow)}")
    return 1 if slow else 0


def show(subject: str, args: argparse.Namespace, folder: Path) -> float:
    """One line; the median share of waiting for data."""
    from mlhpc.suite.log.reader import read_events

    log = read_events(folder / "log.txt").events
    facts = [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]
    windows = [event.value for event in log if event.key == "step_phases"]
    first_s, *seconds = [sum(window.get(name, 0.0) for name in PHASES) for window in windows]
    shares = {
        name: statistics.median(w.get(name, 0.0) / s for w, s in zip(windows[1:], seconds, strict=True))
        for name in PHASES
    }
    evals = [event.metadata["duration_s"] for event in log if event.key == "eval_stop"][1:]
    step_ms = [1e3 * each / args.steps for each in seconds]
    middle = statistics.median(step_ms)
    batch = facts[0]["global_batch_size"]
    cpu_ms = sum(fact["cpu_s_per_step"] for fact in facts) * 1e3
    print(
        f"{subject:22} {batch:5d} {1e3 * batch / middle:9.1f} "
        f"{f'{middle:.1f} ({min(step_ms):.1f} to {max(step_ms):.1f})':>24} {cpu_ms:7.1f} "
        + " ".join(f"{100 * share:7.1f}%" for share in shares.values())
        + f" {statistics.median(evals):7.2f} {max(0.0, first_s - statistics.median(seconds)):7.1f}"
        f" {max(fact['peak_mib'] for fact in facts):6.0f}"
    )
    return shares["data_wait"]


def worker(args: argparse.Namespace) -> int:
    import time

    import torch
    from block import Head, open_workload, trainer

    from mlhpc.suite.config import choose_default_data_root
    from mlhpc.suite.log.mllog import EventLog
    from mlhpc.suite.training.checkpoint import Position
    from mlhpc.suite.world import World

    name, _, size = args.subjects[0].partition("/")
    world = World.create()
    overrides = [f"max_epochs={args.blocks + 1}", f"window_steps={args.steps}", *args.overrides]
    workload, config = open_workload(name, size, overrides, world)
    root = choose_default_data_root(name, size)
    data = Head(workload.dataset("train", root), args.steps * config.global_batch_size)
    log = EventLog(args.worker / "log.txt" if world.is_first else None)
    prepared = trainer(workload, config, world, log, data, workload.dataset("validation", root), seed=1)
    step_cpu: list[float] = []
    train_block = prepared.train_block

    def timed_block(*arguments):
        begin = time.process_time()
        outcome = train_block(*arguments)
        step_cpu.append((time.process_time() - begin) / args.steps)
        return outcome

    prepared.train_block = timed_block
    prepared.run(Position(1, 0))
    log.close()
    device = prepared.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if device else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts = {
        "global_batch_size": config.global_batch_size,
        "cpu_s_per_step": statistics.median(step_cpu[1:]),
        "peak_mib": peak / 2**20,
    }
    (args.worker / f"rank_{world.rank}.json").write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
