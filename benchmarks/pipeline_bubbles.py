"""Idle time of torch's pipeline schedules, measured with stages that sleep, against what `mlhpc plan` predicts.

    python benchmarks/pipeline_bubbles.py [--ranks 4] [--microbatches 8] [--milliseconds 50] [--steps 3]

Forward pass, gradients of inputs and of weights of a stage sleep equally long, so ranks do not compete for processors. For
each schedule: idle time over working time as predicted and as measured, and the step's time over the predicted one (median of the
steps). Exit code 1 if a step's time is more than 5 % off.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from multiprocessing import Manager
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.multiprocessing.spawn import spawn

from mlhpc.plugins.axes.bubbles import plan_timeline
from mlhpc.suite.training.parallel.plan import SINGLE_STAGE, V_SCHEDULE, PipelinePlan, Schedule

LIMIT = 0.05


class _Sleep(torch.autograd.Function):
    """Gives its input back. The backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient.clone(), None


class Sleeper(nn.Module):
    """A stage whose three passes sleep equally long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and return the input."""
        time.sleep(self.seconds)
        taken, held = (_Sleep.apply(each, self.seconds) for each in (x, self.weight))  # type: ignore[no-untyped-call]
        result: Tensor = taken + held
        return result


def run_rank(rank: int, args: argparse.Namespace, folder: str, found: Any) -> None:
    """Run every schedule on one rank; rank 0 appends name and seconds of the steps to ``found``."""
    torch.set_num_threads(1)
    ranks, parts = args.ranks, args.microbatches
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    device = torch.device("cpu")
    for name in get_args(Schedule):
        plan = PipelinePlan(blocks="blocks", between=((),), schedule=name)
        each, total = plan.stages_per_rank, plan.stages_per_rank * ranks
        mine = [rank + turn * ranks for turn in range(each)] if name != V_SCHEDULE else [rank, total - 1 - rank]
        meta = torch.empty(1, 4, device="meta", requires_grad=True)
        stages = [PipelineStage(Sleeper(args.milliseconds / 1e3 / each), i, total, device, meta, meta) for i in mine]
        kind = get_schedule_class(name)
        schedule = kind(stages[0] if name in SINGLE_STAGE else stages, parts, lambda out, target: (out * target).sum())
        times = []
        for _ in range(args.steps + 1):  # the first connects the ranks
            dist.barrier()
            begin = time.perf_counter()
            given = (torch.ones(parts, 4, requires_grad=True),) if rank == 0 else ()
            schedule.step(*given, target=torch.ones(parts, 4), return_outputs=False)
            dist.barrier()
            times.append(time.perf_counter() - begin)
        if rank == 0:
            found.append((name, times[1:]))
    dist.destroy_process_group()


def main() -> int:
    """Measure, and print one line per schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="of one pass of a rank's stages")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = Manager().list()
        spawn(run_rank, (args, folder, found), nprocs=args.ranks)  # type: ignore[no-untyped-call]
        rows = list(found)
    print(
        f"{args.ranks} ranks, {args.microbatches} microbatches, passes of {args.milliseconds:g} ms, torch {torch.__version__}"
    )
    print(f"{'schedule':<24} {'predicted':>10} {'measured':>9} {'time / predicted':>17}")
    work, good = 3 * args.microbatches * args.milliseconds / 1e3, True
    for name, times in rows:
        bubble = float(
            plan_timeline(PipelinePlan(blocks="b", between=((),), schedule=name), args.ranks, args.microbatches).bubble
        )
        seconds = statistics.median(times)
        ratio = seconds / (work * (1 + bubble))
        good = good and abs(ratio - 1) <= LIMIT
        print(f"{name:<24} {bubble:>10.4f} {seconds / work - 1:>9.4f} {ratio:>17.4f}")
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
