"""Losses of the first steps and the metric of the same weights on 1 and on more ranks, same global batch.

    python benchmarks/rank_invariance.py WORKLOAD [--size smoke] [--ranks 2] [--data DIR]

Prints the largest relative difference of the global mean loss over the steps, and of the metric before training. Exit code 1
if the losses differ by more than --loss-limit or the metric by more than 1e-6. Above the edge of stability, where the shipped
rate is in the first steps, float32 rounding alone grows beyond that; --float64 shows that nothing else does. Dropout, where a
size has it, must be set to 0: ranks draw their own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from workload_options import data_root, make_parser

METRIC_LIMIT = 1e-6
# What makes a batch one batch on several ranks, where the workload's default does not
JOINED = {"deepcam": ["hyperparameters.batchnorm_group_size={ranks}"]}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loss-limit", type=float, default=1e-5)
    parser.add_argument("--float64", action="store_true", help="all arithmetic of the model in double precision")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, args.ranks):
            out = Path(folder) / str(ranks)
            out.mkdir()
            mpiexec = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks)] if ranks > 1 else []
            subprocess.run([*mpiexec, sys.executable, __file__, *sys.argv[1:], "--worker", str(out)], check=True)
            found[ranks] = collect(out)
    (losses, metric), (other_losses, other_metric) = found[1], found[args.ranks]
    differences = [abs(a - b) / abs(a) for a, b in zip(losses, other_losses, strict=True)]
    loss_difference = max(differences)
    within = next((step for step, value in enumerate(differences) if value > args.loss_limit), len(losses))
    metric_difference = abs(metric - other_metric) / abs(metric)
    kind = "float64" if args.float64 else "float32"
    settings = f", {', '.join(args.overrides)}" if args.overrides else ""
    print(
        f"{args.workload} {args.size}, 1 against {args.ranks} ranks, {len(losses)} steps, {kind}, seed {args.seed}{settings}"
    )
    print(f"  loss of the first and last step: {losses[0]:.7f}, {losses[-1]:.7f}")
    print(
        f"  largest relative difference of the loss {loss_difference:.1e} (limit {args.loss_limit:g}), of the first step "
        f"{differences[0]:.1e}; the first {within} of {len(losses)} steps are within the limit"
    )
    print(
        f"  metric of the same weights: {metric:.9f}, relative difference {metric_difference:.1e} (limit {METRIC_LIMIT:g})"
    )
    return 0 if loss_difference <= args.loss_limit and metric_difference <= METRIC_LIMIT else 1


def collect(out: Path) -> tuple[list[float], float]:
    """Each step's loss, the mean over ranks, and the metric before training."""
    from mlhpc.suite.log.reader import read_events

    events = read_events(out / "log.txt").events
    (metric,) = (event.value for event in events if event.key == "metric")
    return [event.metadata["loss"] for event in events if event.key == "step_phases"], metric


def worker(args: argparse.Namespace) -> int:
    import torch
    from block import Head, open_workload, trainer

    from mlhpc.suite.log.mllog import EventLog
    from mlhpc.suite.training.checkpoint import Position
    from mlhpc.suite.training.loop import run_evaluation
    from mlhpc.suite.world import World

    world = World.create()
    dtype = None
    if args.float64:
        torch.set_default_dtype(dtype := torch.float64)
        torch.Tensor.float = torch.Tensor.double  # the model's own casts
    joined = [text.format(ranks=world.size) for text in JOINED.get(args.workload, [])]
    overrides = ["max_epochs=1", "window_steps=1", *joined, *args.overrides]
    workload, config = open_workload(args.workload, args.size, overrides, world)
    root = data_root(args)
    data = Head(workload.dataset("train", root), args.steps * config.global_batch_size, dtype)
    whole = workload.dataset("validation", root)
    validation = Head(whole, len(whole), dtype)
    log = EventLog(args.worker / "log.txt" if world.is_first else None)
    prepared = trainer(workload, config, world, log, data, validation, args.seed)
    before = run_evaluation(workload, prepared.state.model, validation, config, world, prepared.device)
    log.event("metric", before[prepared.target.metric])
    prepared.run(Position(1, 0))
    log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
