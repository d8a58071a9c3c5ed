"""Steps that `mlhpc plan` predicts beside measured ones, of CosmoFlow and DeepCAM, whole, in parts and in pieces.

    mlhpc ceilings --quick -o one.json; mlhpc ceilings --ranks 2 --quick -o two.json
    mlhpc moe --ranks 4 --ranks-per-node 2 --sweep-network -o sweep.json; mlhpc moe fit sweep.json --format json > network.json
    python benchmarks/plan_times.py --ceilings one.json two.json --network network.json [--blocks 9]

What part of the roof a step reaches is taken from one rank on size smoke: CPU time per step, from the lower to the upper
quartile of blocks. All other cases are predicted with it. Samples lie in memory, so nothing is read. Measured are the
median over blocks of the wall clock (slowest rank) and of the CPU time (busiest rank: waiting costs nothing).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import torch
from random_steps import Training

from mlhpc.plugins.axes.predict import Cost, predict_largest_cost
from mlhpc.plugins.axes.step_time import Estimate, predict_time, read_machine
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.world import World

MESHES = {
    "cosmoflow": (("spatial", "data=1"), ("spatial", "data=2"), ("spatial", "spatial=2x1x1"), ("sharded", "shard=2")),
    "deepcam": (("spatial", "data=1"), ("spatial", "data=2"), ("spatial", "spatial=2x1"), ("sharded", "shard=2")),
}
SIZES = ("smoke", "mini")
QUARTILES = 4


def settings(plan: str, mesh: str) -> list[str]:
    """What to override."""
    return [f"plan={plan}", f"mesh={mesh}", "channels_last=true"]


def measure(args: argparse.Namespace, workload: str, size: str, plan: str, mesh: str) -> list[dict[str, float]]:
    """Blocks of steps on the ranks of a mesh."""
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    ranks = 1 if mesh == "data=1" else 2
    case = json.dumps([workload, size, plan, mesh, args.blocks])
    command = [mpiexec, "-n", str(ranks), sys.executable, __file__, "--worker", case]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    rows: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def worker(case: str) -> None:
    """Measure on one rank."""
    workload, size, plan, mesh, blocks = json.loads(case)
    torch.set_num_threads(1)
    world = World.create()
    world.init_torch(torch.device("cpu"))
    training = Training(workload, size, settings(plan, mesh), world)
    training.steps(2)
    took = [asdict(training.steps(3)) for _ in range(blocks)]
    if world.is_first:
        print(json.dumps(took), flush=True)


def cost_of(workload: str, size: str, plan: str, mesh: str) -> Cost:
    """What a step costs by the plan."""
    chosen = load_descriptor(workload)
    config = load_config(chosen, size, settings(plan, mesh))
    return predict_largest_cost(chosen, config, Parallel.of(config, chosen, 0, 1 if mesh == "data=1" else 2))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ceilings", type=Path, nargs=2, metavar=("ONE", "TWO"), help="of one rank, of two")
    parser.add_argument("--network", type=Path)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        try:
            return worker(args.worker)
        except Exception:  # the other ranks wait for this one
            traceback.print_exc()
            os._exit(1)
    print(f"load {os.getloadavg()[0]:.1f}; {args.blocks} blocks of 3 steps; batch of the size's configuration\n")
    print(
        "| workload | size | plan, mesh | predicted | interval | wall clock (spread) | held | CPU time (spread) | held |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    held: list[tuple[bool, bool]] = []
    for workload, meshes in MESHES.items():
        reached: Estimate | None = None
        for size in SIZES:
            for plan, mesh in meshes:
                found = measure(args, workload, size, plan, mesh)
                cost = cost_of(workload, size, plan, mesh)
                ceilings = args.ceilings[cost.ranks - 1]
                if reached is None:
                    roof = read_machine(ceilings, args.network, "float32", None).flops.value
                    rates = statistics.quantiles([cost.flops / each["cpu_s"] / roof for each in found], n=QUARTILES)
                    reached = Estimate(rates[0], rates[1], rates[2])
                    print(
                        f"| {workload} | {size} | one rank | reaches {rates[0]:.3f} to {rates[2]:.3f} of the roof | | | | | |"
                    )
                    continue
                machine = replace(read_machine(ceilings, args.network, "float32", reached), storage=None)
                time = predict_time(machine, cost)
                high = float("inf") if time.high_s is None else time.high_s
                words, inside = [], []
                for name in ("wall_s", "cpu_s"):
                    values = [each[name] for each in found]
                    middle = statistics.median(values)
                    inside.append(time.low_s <= middle <= high)
                    spread = statistics.stdev(values) / statistics.fmean(values)
                    words.append(f"{1e3 * middle:.0f} ms ({100 * spread:.0f} %) | {'yes' if inside[-1] else '**no**'}")
                held.append((inside[0], inside[1]))
                between = f"{1e3 * time.low_s:.0f} to {1e3 * high:.0f}"
                print(
                    f"| {workload} | {size} | {plan}, {mesh} | {1e3 * time.total_s:.0f} ms | {between} | {' | '.join(words)} |",
                    flush=True,
                )
    wall, cpu = (sum(each[at] for each in held) for at in (0, 1))
    print(
        f"\nheld: {wall} of {len(held)} by the wall clock, {cpu} of {len(held)} by CPU time; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
