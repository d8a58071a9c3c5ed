"""The metric after each epoch, for equal seeds on any number of ranks, with any settings: is a difference more than chance?

    python -m benchmarks.seeds train WORKLOAD -o FILE [--first 0] [--runs 12] [--set KEY=VALUE]    appends a line for each run
    mpiexec -n 2 python -m benchmarks.seeds train WORKLOAD -o FILE                                 the same on two ranks
    python -m benchmarks.seeds table FILE FILE ...                           each file, and its differences from the first one

Runs train all epochs. Run i has the seed --first + i, as `mlhpc run --seed` gives it.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks.workload_options import data_root, make_parser


def train(words: list[str]) -> None:
    """Train and write a line for each run: its seed and the metric after each epoch."""
    import torch

    from benchmarks.block import open_workload, train_epochs, trainer
    from mlhpc.suite.log.mllog import EventLog
    from mlhpc.suite.training.statement import SEED_BITS
    from mlhpc.suite.world import World

    parser = make_parser(__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args(words)
    world, root = World.create(), data_root(args)
    workload, config = open_workload(args.workload, args.size, ["choices.measure=false", *args.overrides], world)
    for seed in range(args.first, args.first + args.runs):
        splits = [workload.dataset(split, root) for split in ("train", "validation")]
        loop = trainer(workload, config, world, EventLog(None), *splits, seed=seed)
        torch.manual_seed(seed + (world.rank << SEED_BITS))  # as a run does after it has drawn the weights
        metrics = list(train_epochs(loop, config.max_epochs))
        if world.is_first:
            with args.output.open("a") as file:
                print(seed, *(f"{value:.4f}" for value in metrics), file=file)


def table(paths: list[str]) -> None:
    """Print mean and standard error after each epoch, then the paired differences of equal seeds from the first file."""
    found = {}
    for path in paths:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
        found[Path(path).name] = {int(seed): [float(value) for value in metrics] for seed, *metrics in lines}
    first = next(iter(found.values()))
    for name, runs in found.items():
        print(
            f"{name}, n = {len(runs)}: {_render([*runs.values()])}; best of each: "
            + " ".join(f"{max(metrics):.4f}" for metrics in runs.values())
        )
    for name, runs in found.items():
        pairs = [[a - b for a, b in zip(runs[seed], first[seed], strict=True)] for seed in runs if seed in first]
        if runs is not first:
            print(f"{name} less the first, {len(pairs)} pairs: {_render(pairs)}")


def _render(rows: list[list[float]]) -> str:
    return " ".join(
        f"{statistics.mean(column):.4f} +- {statistics.stdev(column) / len(column) ** 0.5:.4f}"
        for column in zip(*rows, strict=True)
    )


if __name__ == "__main__":
    {"train": train, "table": table}[sys.argv[1]](sys.argv[2:])
