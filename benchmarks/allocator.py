"""CPU time and peak memory of a training step, with freed memory kept (suite/training/devices.py) and not, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/allocator.py WORKLOAD/SIZE=DATA ... [--steps 20] [--blocks 10]

Two processes per subject, one with the C library's default, train in turns on the same samples; the first block warms up.
Printed: median CPU-ms of a step, the median of the ratios of neighbouring blocks with the extremes, and both peaks.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="+", metavar="WORKLOAD/SIZE=DATA")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--worker", choices=["default", "keep"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.subjects[0], args.worker == "keep", args.steps)
        return
    print(f"blocks of {args.steps} steps, {args.blocks} pairs; load average {os.getloadavg()[0]:.1f}")
    print(f"{'':22} {'CPU-ms default':>14} {'kept':>8} {'default / kept':>24} {'MiB default':>12} {'kept':>6}")
    for subject in args.subjects:
        name, row = subject.partition("=")[0], measured(subject, args.steps, args.blocks)
        print(f"{name:22} {row}", flush=True)


def measured(subject: str, steps: int, blocks: int) -> str:
    command = [sys.executable, __file__, subject, "--steps", str(steps), "--worker"]
    both = [
        subprocess.Popen([*command, way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for way in ("default", "keep")
    ]
    rows = [[ask(process) for process in both] for _ in range(1 + blocks)][1:]
    peaks = [float(process.communicate("\n")[0]) for process in both]
    default, kept = (1e3 * statistics.median(row[i] for row in rows) for i in (0, 1))
    ratios = [row[0] / row[1] for row in rows]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{default:14.1f} {kept:8.1f} {spread:>24} {peaks[0]:12.0f} {peaks[1]:6.0f}"


def ask(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def worker(subject: str, keep: bool, steps: int) -> None:
    """Train blocks as they are asked for; an empty line ends it."""
    import numpy as np
    import torch

    from mlhpc.suite.config import load_config
    from mlhpc.suite.descriptor import load_descriptor
    from mlhpc.suite.training.devices import keep_freed_memory
    from mlhpc.suite.workload import load_workload
    from mlhpc.suite.world import World

    torch.set_num_threads(1)
    if keep and not keep_freed_memory():
        raise SystemExit("this C library is not glibc")
    name, _, data = subject.partition("=")
    chosen, size = name.split("/")
    config = load_config(load_descriptor(chosen), size, [])
    workload = load_workload(load_descriptor(chosen))(config)
    model = workload.build_model(World.create(None))
    train = workload.dataset("train", Path(data))
    optimizer = workload.build_optimizer(model, steps).optimizer
    random = np.random.default_rng(0)
    for line in sys.stdin:
        if not line.strip():
            break
        begin = time.process_time()
        for _ in range(steps):
            batch = train.load(random.choice(len(train), config.global_batch_size, replace=False), seed=0, epoch=1)
            optimizer.zero_grad()
            workload.loss(model, batch).backward()
            optimizer.step()
        print((time.process_time() - begin) / steps, flush=True)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main()
