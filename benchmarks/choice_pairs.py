"""What choices save of a training step: interleaved pairs of blocks with and without each, in CPU seconds.

    OMP_NUM_THREADS=1 python benchmarks/choice_pairs.py [CHOICE ...] [--workload NAME ...] [--size mini] [--seconds 12]

`CHOICES` says what each one is, and which workloads ask for it. Both sides run as jobs of their own, with all other choices by
their rules. They train a block of steps by turns, in an order that alternates; one waits asleep while the other trains. A time is
user + system seconds of all ranks and threads. Printed: pairs n, the median of with / without, and an interval that holds the
median with at least 95 % (order statistics). The rule: a choice whose ratio is above 0.90 leaves. Needs the data sets
(data/<workload>-<size>, $MLHPC_DATA). Takes about six minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mlhpc.suite.machine.probes.processor import read_cpu

CHOICES: dict[str, tuple[int, str, str, tuple[str, ...]]] = {  # ranks, with, without, workloads
    # What precision: auto may choose
    "precision": (1, "precision=bfloat16", "precision=float32", ("cosmoflow", "deepcam", "moe_lm", "swinv2_moe")),
}
LEAST_PAIRS = 6  # fewer give no interval of 95 %
BLOCK_S = 0.4  # CPU seconds that a block lasts


class Job:
    """One side. It trains when it is asked to."""

    def __init__(self, workload: str, size: str, ranks: int, setting: str) -> None:
        mpiexec = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks)] if ranks > 1 else []
        words = [*mpiexec, sys.executable, __file__, "--worker", workload, size, setting]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def train(self, steps: int) -> float:
        """CPU seconds of a block."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        """End by the end of its input."""
        self._process.communicate()


def measure(choice: str, workload: str, size: str, seconds: float) -> str:
    """One line of the table."""
    ranks, *settings, _ = CHOICES[choice]
    sides = [Job(workload, size, ranks, str(setting)) for setting in settings]
    try:
        for each in sides:  # the first block builds what the others use
            each.train(2)
        steps = max(1, math.ceil(BLOCK_S / max(each.train(2) / 2 for each in sides)))
        pairs: list[list[float]] = []
        end = time.monotonic() + seconds
        while len(pairs) < LEAST_PAIRS or time.monotonic() < end:
            order = sides if len(pairs) % 2 == 0 else sides[::-1]
            took = {id(each): each.train(steps) / steps for each in order}
            pairs.append([took[id(each)] for each in sides])
    except (OSError, ValueError):
        return f"{choice:12} {workload:14} not measured: see above"
    finally:
        for each in sides:
            each.end()
    ratios = sorted(a / b for a, b in pairs)
    low, high = ratios[(k := rank_of_interval(len(ratios)))], ratios[-1 - k]
    with_ms, without_ms = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    text = f"{with_ms:9.2f} {without_ms:9.2f} {statistics.median(ratios):8.3f} [{low:.3f}, {high:.3f}]"
    return f"{choice:12} {workload:14} {ranks:5} {len(pairs):4} {text}"


def rank_of_interval(n: int) -> int:
    """The largest k for which values k and n - 1 - k enclose the median with at least 95 %; 0 for fewer than six values."""
    below, k = 0.5**n, 0
    while 2 * (below := below + math.comb(n, k + 1) * 0.5**n) <= 0.05:
        k += 1
    return k


def worker(workload: str, size: str, setting: str) -> int:
    """Train as many steps as each line of the input says; print the CPU seconds of all ranks."""
    from block import Fixed, Head, open_workload, trainer

    from mlhpc.suite.config import choose_default_data_root
    from mlhpc.suite.log.mllog import EventLog
    from mlhpc.suite.training.agreement import StopAgreement
    from mlhpc.suite.world import World

    world = World.create()
    opened, config = open_workload(workload, size, ["choices.measure=false", setting], world)
    data = opened.dataset("train", choose_default_data_root(workload, size))
    loop = trainer(opened, config, world, EventLog(None), Head(data, len(data)), None, seed=1)
    watch, epoch = StopAgreement(world, lambda: None), 0
    while steps := int(world.broadcast(sys.stdin.readline().strip() or 0 if world.is_first else None, Any)):
        loop.data, epoch = Fixed(Head(data, steps * config.global_batch_size), None), epoch + 1
        begin = time.process_time()
        loop.train_block(epoch, 0, watch)
        spent = sum(world.allgather(time.process_time() - begin))
        if world.is_first:
            print(json.dumps(spent), flush=True)
    return 0


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        return worker(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choices", nargs="*", metavar="CHOICE", help=f"default: {' '.join(CHOICES)}")
    parser.add_argument("--workload", action="append", default=[])
    parser.add_argument("--size", default="mini")
    parser.add_argument("--seconds", type=float, default=12, help="of pairs of each line")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cpu = read_cpu(Path("/"))
    print(f"{cpu.model}, {', '.join(cpu.simd)}; load average {os.getloadavg()[0]:.1f}")
    print(f"{args.size}, CPU-ms of a step, medians; with / without")
    print(f"{'choice':12} {'workload':14} ranks    n      with   without    ratio")
    for choice in args.choices or CHOICES:
        for workload in CHOICES[choice][3]:
            if not args.workload or workload in args.workload:
                print(measure(choice, workload, args.size, args.seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
