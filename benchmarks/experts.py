"""Do experts help: a model with experts against its dense twin, which has the active parameters and FLOPs, in paired runs.

    python benchmarks/experts.py WORKLOAD [--size smoke] [--pairs 5] [--first-seed 200] [--epochs N] [--data DIR] [--set KEY=VALUE]
    python benchmarks/experts.py moe_lm --size mini_facts --epochs 4 --data A --next-data B     pairs on A and B in turn

Both runs of a pair have the same data, order of samples, schedule and seed; no target ends them. Prints the metric after each
epoch, then the mean difference with its 95 % interval (Student) and whether these pairs can tell. CPU time includes evaluation.
"""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path

from block import Head, open_workload, trainer
from workload_options import data_root, make_parser

from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.statistics import compute_t_quantile
from mlhpc.suite.training.checkpoint import Position
from mlhpc.suite.world import World

TWINS = {"experts": "hyperparameters.dense=false", "dense": "hyperparameters.dense=true"}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--next-data", type=Path, action="append", default=[], help="of the next pair; repeatable")
    args = parser.parse_args()
    roots = [data_root(args), *args.next_data]
    curves: dict[str, list[list[float]]] = {twin: [] for twin in TWINS}
    world = World.create()
    for pair in range(args.pairs):
        seed, root = args.first_seed + pair, roots[pair % len(roots)]
        for twin, override in TWINS.items():
            begin = time.process_time()
            overrides = [*args.overrides, f"max_epochs={args.epochs}", "instrumentation=false", override]
            curve, flops = train(args.workload, args.size, overrides, root, seed, world)
            curves[twin].append(curve)
            values = ", ".join(f"{value:.4f}" for value in curve)
            cost = f"{flops / 1e6:.2f} MFLOPs a sample, {time.process_time() - begin:.0f} CPU-s"
            print(f"{args.workload} {args.size}, seed {seed}, {twin:7}: {values}; {cost}", flush=True)
    direction = load_descriptor(args.workload).card().target(args.size).direction
    print(judge(curves["experts"], curves["dense"], better=1 if direction == "max" else -1))


def train(name: str, size: str, overrides: list[str], root: Path, seed: int, world: World) -> tuple[list[float], float]:
    """Train once. Returns the card's metric after each epoch and the model FLOPs of a training sample."""
    workload, config = open_workload(name, size, overrides, world)
    train_split, validation = workload.dataset("train", root), workload.dataset("validation", root)
    prepared = trainer(workload, config, world, EventLog(None), Head(train_split, len(train_split)), validation, seed)
    curve: list[float] = []
    prepared.records.log_value = lambda metric, value, where, metrics: curve.append(value)  # type: ignore[method-assign]
    prepared.run(Position(1, 0))
    return curve, workload.work().model_flops


def judge(experts: list[list[float]], dense: list[list[float]], *, better: int) -> str:
    """Render the mean difference after each epoch, experts less dense, and a verdict. ``better``: the sign of a gain."""
    lines, pairs = ["epoch  experts  dense    difference, 95 % interval"], len(experts)
    for epoch, (ours, theirs) in enumerate(zip(zip(*experts, strict=True), zip(*dense, strict=True), strict=True), 1):
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        mean = statistics.mean(differences)
        half = compute_t_quantile(0.975, pairs - 1) * statistics.stdev(differences) / math.sqrt(pairs)
        lines.append(
            f"{epoch:5}  {statistics.mean(ours):.4f}   {statistics.mean(theirs):.4f}   "
            f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"
        )
    better_one = "experts help" if mean * better > 0 else "the dense twin is better"
    verdict = better_one if abs(mean) > half else "inconclusive"
    return "\n".join([*lines, f"after the last epoch, {pairs} pairs: {verdict}"])


if __name__ == "__main__":
    main()
