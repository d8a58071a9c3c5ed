"""Step time of a run that measures itself over one with `instrumentation: false`: two trainers of one workload, interleaved blocks.

    python benchmarks/instrumentation.py [--workload cosmoflow --size mini] [--rounds 8 --blocks 6]       one rank
    mpiexec -n 2 python benchmarks/instrumentation.py --workload moe_lm --size smoke --set hyperparameters.moe.expert_parallel=true

A block is 50 steps with everything a run does for them, what ranks tell each other at its end included. Where a trainer's memory
happens to lie can cost more than measuring does, so each round builds both anew, in turns. Prints the geometric mean of the
rounds' ratios with its 95 % interval (t on log ratios, n = rounds), by the wall clock and by the CPU time of rank 0, which
other processes disturb less. "inconclusive" when the interval holds the limit: it is printed, not passed. The last line is CPU
time of the same calls without any training, which a busy machine disturbs least; it holds no hook of DDP and no MoE layer.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from block import Head, open_workload, trainer

from mlhpc.suite.config import choose_default_data_root
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.statistics import compute_t_quantile
from mlhpc.suite.training.agreement import StopAgreement
from mlhpc.suite.training.instrument import compute_rank_distribution
from mlhpc.suite.training.loop import Trainer
from mlhpc.suite.training.step_timing import PHASES
from mlhpc.suite.world import World

LIMIT = 1.01
STEPS = 50
KINDS = {"measured": "true", "not measured": "false"}
CLOCKS = {"wall": time.perf_counter, "CPU of rank 0": time.process_time}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="cosmoflow")
    parser.add_argument("--size", default="mini")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=8, help="how often both trainers are built anew; at least 3")
    parser.add_argument("--blocks", type=int, default=6, help="pairs of blocks in a round")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    world = World.create()
    rounds = []
    for number in range(args.rounds):
        pairs, measured = one_round(args, world, number)
        rounds.append(pairs)
    alone_us = calls_alone_us(measured)
    if world.is_first:
        report(rounds, world.size, args)
        spread = f"{alone_us[0]:.1f} to {alone_us[-1]:.1f}, n = {len(alone_us)}"
        print(f"  calls alone: {statistics.median(alone_us):.1f} us of CPU per step (median of blocks, {spread})")
    return 0


def one_round(args: argparse.Namespace, world: World, number: int) -> tuple[list[list[list[float]]], Trainer]:
    """Seconds of each pair's blocks by kind and clock, of two new trainers; and the one that measures."""
    built = sorted(KINDS, reverse=number % 2 == 0)
    trainers = {kind: build(args, world, [*args.overrides, f"instrumentation={KINDS[kind]}"]) for kind in built}
    watch = StopAgreement(world, lambda: None)

    def run(kind: str, block: int) -> list[float]:
        chosen = trainers[kind]
        world.barrier()
        with chosen.instruments.counting() if chosen.instruments else nullcontext():
            begin = [clock() for clock in CLOCKS.values()]
            chosen.train_block(block, 0, watch)
            return [clock() - then for clock, then in zip(CLOCKS.values(), begin, strict=True)]

    pairs = []
    for block in range(1, args.blocks + 2):
        order = sorted(KINDS, reverse=block % 2 == 0)
        times = {kind: run(kind, block) for kind in order}
        if block > 1:  # the first warms up
            pairs.append([times[kind] for kind in KINDS])
    return pairs, trainers["measured"]


def calls_alone_us(measured: Trainer, blocks: int = 100) -> list[float]:
    """Sorted CPU microseconds per step of what a block's marks, counters and events take; every rank calls."""
    instruments, used_us = measured.instruments, []
    for _ in range(blocks):
        begin = time.process_time()
        instruments.timer.restart()
        instruments.meters.restart()
        for _ in range(STEPS):
            for phase in PHASES:
                instruments.timer.mark(phase)
        phases = instruments.timer.flush()
        instruments.energy.meter.sample()
        measured.log.event("step_phases", phases)
        measured.log.event(
            "rank_stats", compute_rank_distribution(instruments.world.allgather(phases | instruments.meters.read()))
        )
        used_us.append((time.process_time() - begin) / STEPS * 1e6)
    return sorted(used_us)


def build(args: argparse.Namespace, world: World, overrides: list[str]) -> Trainer:
    """A trainer whose blocks, its epochs, are 50 steps."""
    workload, config = open_workload(args.workload, args.size, overrides, world)
    data = workload.dataset("train", args.data or choose_default_data_root(args.workload, args.size))
    log = EventLog(Path(tempfile.mkdtemp()) / "log.txt" if world.is_first else None)
    made = trainer(workload, config, world, log, Head(data, STEPS * config.global_batch_size), data, seed=1)
    made.size_card = replace(made.size_card, eval_every_steps=STEPS)
    return made


def report(rounds: list[list[list[list[float]]]], ranks: int, args: argparse.Namespace) -> None:
    more = f", {' '.join(args.overrides)}" if args.overrides else ""
    print(
        f"instrumentation, {args.workload} {args.size}{more}, {ranks} rank(s), {torch.get_num_threads()} thread(s) each, "
        f"{len(rounds)} rounds of {args.blocks} interleaved pairs of {STEPS} steps"
    )
    for index, clock in enumerate(CLOCKS):
        for column, name in enumerate(KINDS):
            step_ms = sorted(1e3 * pair[column][index] / STEPS for pairs in rounds for pair in pairs)
            print(
                f"  {clock}: {name} step {statistics.median(step_ms):.3f} ms median, {step_ms[0]:.3f} to {step_ms[-1]:.3f}"
            )
        logs = [statistics.fmean(math.log(pair[0][index] / pair[1][index]) for pair in pairs) for pairs in rounds]
        mean = statistics.fmean(logs)
        half = compute_t_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        low, ratio, high = (math.exp(x) for x in (mean - half, mean, mean + half))
        verdict = "within the limit" if high <= LIMIT else "above the limit" if low > LIMIT else "inconclusive"
        print(f"  {clock}: ratio {ratio:.4f} [{low:.4f}, {high:.4f}] (95 %); limit {LIMIT}: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
