"""The peak memory of a rank in training beside what `mlhpc plan` predicts, each case in processes of its own.

    python benchmarks/plan_memory.py WORKLOAD --plan NAME --mesh MESH [--mesh MESH ...] [--case "KEY=VALUE ..." ...]
        [--recompute PATTERN] [--size SIZE] [--set KEY=VALUE ...] [--data ROOT] [--limit 0.1]

Each --case has the settings of one size. With --recompute each case runs without recomputation and with both policies for the
blocks of the pattern. Data are random ones of the shapes that the plan states, or of --data.

Two measurements of the same three steps, on every rank; the table has the rank with most:

- process: growth of the resident set (VmHWM after a reset of its mark) over what the process had after one step of the smallest
  size under the same mesh, so that libraries, gloo's buffers and threads are there before. It counts what operators take inside.
  glibc is told to give freed memory back (MALLOC_ARENA_MAX=1, MALLOC_MMAP_THRESHOLD_=131072): holes in its heap are its own;
- tensors: bytes of all storages that operators make, counted where torch dispatches, parameters and states included.

Exit code 1 if a process is further from the prediction than --limit.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from mlhpc.plugins.axes.apply import compute_shapes
from mlhpc.plugins.axes.predict import predict_largest_cost
from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.machine.probes.processor import read_cpu
from mlhpc.suite.training.counts.memory import LiveBytes
from mlhpc.suite.training.parallel.apply import apply
from mlhpc.suite.training.parallel.ddp import wrap
from mlhpc.suite.training.parallel.fsdp import local
from mlhpc.suite.training.parallel.mesh import ranks_of
from mlhpc.suite.training.parallel.meta_init import build_on_meta
from mlhpc.suite.training.parallel.parallel_dims import Parallel, cut
from mlhpc.suite.training.parallel.plan import find_plan
from mlhpc.suite.training.state import TrainingState
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World

MIB = 2.0**20
POLICIES = ("none", "selective", "full")


class OneBatch:
    """Random samples of the shapes that a plan states."""

    def __init__(self, parallel: Parallel, samples: int) -> None:
        self.batch: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in compute_shapes(parallel, samples, split=True).items():
            kind = getattr(torch, dtype)
            self.batch[name] = (
                torch.rand(shape, dtype=kind) if kind.is_floating_point else torch.ones(shape, dtype=kind)
            )


def status(field: str) -> int:
    """Bytes of this process, as /proc/self/status has them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def settle() -> int:
    """Give freed memory back, reset the mark of the most resident memory, and say how much is resident."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def train(world: World, config: RunConfig, parallel: Parallel, root: Path | None, *, steps: int, count: bool) -> int:
    """Take steps as the harness does. With ``count`` return the bytes of tensors at their most."""
    chosen = load_descriptor(config.workload)
    workload: Workload = load_workload(chosen)(config)
    samples = config.global_batch_size // parallel.mesh.data_size
    if root is None:
        batch: Any = OneBatch(parallel, samples).batch
    else:
        data = cut(workload.dataset("train", root), parallel.slabs(evaluation=False))
        batch = data.load(range(samples), seed=1, epoch=1)
    torch.manual_seed(1)
    model = workload.build_model(world)
    apply(parallel, model, workload, lambda: build_on_meta(chosen, config)[1])
    state = TrainingState.create(workload, model, steps, 1)
    wrapped = wrap(model, state.sharded, world, torch.device("cpu"))
    optimizer, most = state.optimization.optimizer, 0

    def step() -> None:
        wrapped.train()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
            loss = workload.loss(wrapped, batch) * parallel.loss_factor
        loss.backward()  # type: ignore[no-untyped-call]
        state.update(0, 1)

    for number in range(steps):
        if not count or number < 2:  # in the second step DDP makes its buckets anew
            step()
            continue
        states = [
            local(value)
            for each in optimizer.state.values()
            for value in each.values()
            if isinstance(value, torch.Tensor)
        ]
        held = [*map(local, model.parameters()), *model.buffers(), *states, *batch.values()]
        if state.averaged is not None:
            held += [*state.averaged.weights.values(), *state.averaged.buffers.values()]
        ddp = world.size > 1 and not parallel.is_sharded
        buckets = [each.grad for each in model.parameters() if each.grad is not None] if ddp else []
        base = sum(each.nbytes for each in (*held, *buckets))
        with LiveBytes((*held, *buckets)) as live:
            step()
        most = max(most, base + live.peak)
    return most


def worker(args: argparse.Namespace) -> None:
    """Measure one case on one rank; rank 0 prints the row."""
    torch.set_num_threads(1)
    world = World.create()
    world.init_torch(torch.device("cpu"))
    chosen, (mesh,), (case,) = load_descriptor(args.workload), args.mesh, args.case
    settings = [*args.overrides, *case.split(), f"plan={args.plan}", f"mesh={mesh}"]
    config = load_config(chosen, args.size, settings)
    parallel = Parallel.of(config, chosen, world.rank, world.size)
    small = load_config(chosen, "smoke", [f"plan={args.plan}", f"mesh={mesh}", *args.overrides])
    train(world, small, Parallel.of(small, chosen, world.rank, world.size), None, steps=1, count=False)
    world.barrier()
    before = settle()
    train(world, config, parallel, args.data, steps=3, count=False)
    process = status("VmHWM") - before
    world.barrier()
    settle()
    tensors = train(world, config, parallel, args.data, steps=3, count=True)
    rows = world.allgather((process, tensors))
    if world.is_first:
        cost = predict_largest_cost(chosen, config, parallel)
        process, tensors = max(row[0] for row in rows), max(row[1] for row in rows)
        print(
            json.dumps({"mesh": parallel.mesh.text(), "predicted": cost.memory, "process": process, "tensors": tensors})
        )


def measure(args: argparse.Namespace, plan: str, mesh: str, case: str) -> dict[str, Any]:
    """Start the ranks of one case."""
    ranks = ranks_of(mesh, rest=1)
    command = [
        str(Path(sys.executable).with_name("mpiexec")),
        "-n",
        str(ranks),
        sys.executable,
        __file__,
        args.workload,
    ]
    command += ["--worker", "--plan", plan, "--mesh", mesh, "--case", case, "--size", args.size]
    command += [word for each in args.overrides for word in ("--set", each)]
    command += ["--data", str(args.data)] if args.data else []
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        sys.exit(done.stdout + done.stderr)
    return dict(json.loads(rows[0]))


def policies(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The plan without recomputation and, with --recompute, files with both policies: name to plan."""
    if not args.recompute:
        return {"none": args.plan}
    path = find_plan(load_descriptor(args.workload), args.plan)
    found = {}
    for policy in POLICIES:
        content = yaml.safe_load(path.read_text()) | (
            {"recompute": {args.recompute: policy}} if policy != "none" else {}
        )
        own = folder / f"{policy}.yaml"
        own.write_text(yaml.safe_dump(content))
        found[policy] = str(own)
    return found


def main() -> int:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--size", default="smoke")
    parser.add_argument("--plan", default="sharded")
    parser.add_argument("--mesh", action="append", required=True)
    parser.add_argument("--case", action="append")
    parser.add_argument("--recompute")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--limit", type=float, default=0.1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.case = args.case or [""]
    if args.worker:
        worker(args)
        return 0
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {read_cpu(Path('/')).model}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}; "
        f"{args.workload} {args.size} {' '.join(args.overrides)}; MiB of the rank with most"
    )
    print(
        f"{'case':<60} {'mesh':<24} {'recompute':<10} {'predicted':>10} {'process':>9} {'ratio':>6} {'tensors':>9} {'ratio':>6}"
    )
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for policy, plan in policies(args, Path(folder)).items():
            for case in args.case:
                for mesh in args.mesh:
                    row = measure(args, plan, mesh, case)
                    process, tensors = row["process"] / row["predicted"], row["tensors"] / row["predicted"]
                    good = good and abs(process - 1) <= args.limit
                    print(
                        f"{case or 'as it is':<60} {row['mesh']:<24} {policy:<10} {row['predicted'] / MIB:>10.1f} "
                        f"{row['process'] / MIB:>9.1f} {process:>6.3f} {row['tensors'] / MIB:>9.1f} {tensors:>6.3f}",
                        flush=True,
                    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
