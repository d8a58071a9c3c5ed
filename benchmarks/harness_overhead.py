"""Step time through the harness over that of a bare PyTorch loop: same model, data and batches, interleaved blocks.

    python benchmarks/harness_overhead.py [--size mini] [--blocks 24]                         one rank
    mpiexec -n 2 python benchmarks/harness_overhead.py                                        two ranks, DDP in both loops
    mpiexec -n 2 python benchmarks/harness_overhead.py --torchs-collectives                   the bare loop's by gloo

The bare loop is the best that a person would write: it keeps freed memory, loads batches as the harness does (ahead in threads, or
by itself where ranks compute on every core) and has the memory format, convolutions, threads and, if nothing else is said, what
carries collectives, as the harness chose them. Both loops train one model in turn: two equal models at different places in memory
differ by up to 2 %. With ``--torchs-collectives`` the bare loop has a copy of the model in DDP over gloo, which is what torch has
on a processor. The batch is the size's, and a block is an epoch: what an epoch begins and ends with counts as in a run.
``--global-batch-size`` sets another batch, ``--steps`` fewer steps.

Prints the geometric mean of the pairs' ratios with its 95 % interval (t on log ratios), by the wall clock and by CPU time,
which other processes disturb less. "inconclusive" when the interval holds the limit: it is printed, not passed.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from block import Head, open_workload, trainer
from torch.nn.parallel import DistributedDataParallel

from mlhpc.suite.config import choose_default_data_root
from mlhpc.suite.data.sampling import list_train_batches
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.machine.choice.chooser import make_chooser
from mlhpc.suite.statistics import compute_t_quantile
from mlhpc.suite.training.agreement import StopAgreement
from mlhpc.suite.training.batch_loading import BatchCopier, has_no_idle_core, load_with_prefetch
from mlhpc.suite.training.state import TrainingState
from mlhpc.suite.world import World

LIMIT = 1.01
UNREAD = 1_000_000  # steps between two readings of DDP's times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="mini")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--global-batch-size", type=int)
    parser.add_argument("--torchs-collectives", action="store_true")
    args = parser.parse_args()
    world = World.create()
    if args.torchs_collectives and world.size == 1:
        parser.error("--torchs-collectives needs several ranks: mpiexec -n 2 python benchmarks/harness_overhead.py …")
    stated = [f"global_batch_size={args.global_batch_size}"] if args.global_batch_size else []
    workload, config = open_workload("cosmoflow", args.size, stated, world)
    args.global_batch_size = config.global_batch_size
    whole = workload.dataset("train", args.data or choose_default_data_root("cosmoflow", args.size))
    epoch_steps = len(whole) // config.global_batch_size
    args.steps = min(args.steps or epoch_steps, epoch_steps)
    data = Head(whole, args.steps * args.global_batch_size)
    log = EventLog(Path(tempfile.mkdtemp()) / "log.txt" if world.is_first else None)
    through_harness = trainer(workload, config, world, log, data, data, seed=1)
    chosen = make_chooser(config, world, through_harness.device)  # as the trainer's model: from the cache
    workload.choose(through_harness.state.model, chosen)
    bare, optimization = through_harness.wrapped, through_harness.state.optimization
    if args.torchs_collectives:
        copied = copy.deepcopy(through_harness.state.model)
        bare = DistributedDataParallel(
            copied, process_group=dist.new_group(backend="gloo"), gradient_as_bucket_view=True
        )
        optimization = TrainingState.create(workload, copied, args.steps, 1).optimization
    set_rate = getattr(bare, "_set_ddp_runtime_logging_sample_rate", lambda steps: None)
    watch = StopAgreement(world, lambda: None)

    def harness_block(epoch: int) -> None:
        set_rate(1)
        through_harness.train_block(epoch, 0, watch)

    def bare_block(epoch: int) -> None:
        set_rate(UNREAD)
        bare.train()
        batches = list_train_batches(
            len(data), config.global_batch_size, seed=1, epoch=epoch, rank=world.rank, size=world.size
        )
        ahead = load_with_prefetch(
            lambda indices: data.load(indices, seed=1, epoch=epoch),
            batches,
            threads=config.loader_threads,
            feed=BatchCopier(through_harness.device, alone=has_no_idle_core(world)),
        )
        for step, (_, batch) in enumerate(ahead):
            for group in optimization.optimizer.param_groups:
                group["lr"] = optimization.learning_rate((epoch - 1) * args.steps + step, epoch)
            optimization.optimizer.zero_grad(set_to_none=True)
            loss = workload.loss(bare, batch)
            loss.backward()
            optimization.optimizer.step()

    for epoch in (1, 2):
        harness_block(epoch), bare_block(epoch)
    pairs = []
    for block in range(args.blocks):
        order = (harness_block, bare_block) if block % 2 else (bare_block, harness_block)
        times = {}
        for run in order:
            world.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            run(block + 3)
            spent = time.perf_counter() - wall, time.process_time() - cpu
            times[run] = spent[0], world.sum({"cpu": spent[1]})["cpu"]
        pairs.append((times[harness_block], times[bare_block]))
    if world.is_first:
        by = [dist.get_backend()] if world.size > 1 else []
        by += ["the bare loop's by gloo"] * args.torchs_collectives
        report(pairs, world.size, args, [*(choice.value for choice in chosen.choices.values()), *by])
    return 0


def report(pairs, ranks, args, chosen) -> None:
    print(
        f"harness overhead, cosmoflow {args.size}, {ranks} rank(s), {torch.get_num_threads()} thread(s) each, "
        f"{len(pairs)} interleaved pairs of {args.steps} steps, global batch {args.global_batch_size}, "
        f"load average {os.getloadavg()[0]:.1f}; chosen: {', '.join(chosen)}"
    )
    for clock, index in (("wall", 0), ("CPU of all ranks", 1)):
        logs = [math.log(harness[index] / bare[index]) for harness, bare in pairs]
        mean, spread = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
        half = compute_t_quantile(0.975, len(logs) - 1) * spread
        low, ratio, high = (math.exp(x) for x in (mean - half, mean, mean + half))
        verdict = "within the limit" if high <= LIMIT else "above the limit" if low > LIMIT else "inconclusive"
        for name, column in (("harness", 0), ("bare loop", 1)):
            step_ms = [1e3 * pair[column][index] / args.steps for pair in pairs]
            low_ms, high_ms = min(step_ms), max(step_ms)
            print(f"  {clock}: {name} step {statistics.median(step_ms):.3f} ms median, {low_ms:.3f} to {high_ms:.3f}")
        print(f"  {clock}: ratio {ratio:.4f} [{low:.4f}, {high:.4f}] (95 %); limit {LIMIT}: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
