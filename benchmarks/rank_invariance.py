"""Losses of the first steps and the metric of the same weights on 1 and on more ranks, same global batch, dropout off.

    python benchmarks/rank_invariance.py [--size smoke] [--ranks 2] [--data DIR]

Prints the largest relative difference of the global mean loss over the steps, and of the metric before training. Exit code 1
if the losses differ by more than 1e-5 or the metric by more than 1e-6. Above the edge of stability, where the shipped rate
is in the first steps, float32 rounding alone grows beyond that; --float64 shows that nothing else does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

LOSS_LIMIT, METRIC_LIMIT = 1e-5, 1e-6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="smoke")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--data", type=Path)
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
            found[ranks] = collect(out, ranks)
    (losses, metric), (other_losses, other_metric) = found[1], found[args.ranks]
    loss_difference = max(abs(a - b) / abs(a) for a, b in zip(losses, other_losses, strict=True))
    metric_difference = abs(metric - other_metric) / abs(metric)
    kind = "float64" if args.float64 else "float32"
    settings = f", {', '.join(args.overrides)}" if args.overrides else ""
    print(
        f"cosmoflow {args.size}, 1 against {args.ranks} ranks, {len(losses)} steps, {kind}, seed {args.seed}{settings}"
    )
    print(f"  loss of the first and last step: {losses[0]:.7f}, {losses[-1]:.7f}")
    print(f"  largest relative difference of the loss {loss_difference:.1e} (limit {LOSS_LIMIT:g})")
    print(
        f"  metric of the same weights: {metric:.9f}, relative difference {metric_difference:.1e} (limit {METRIC_LIMIT:g})"
    )
    return 0 if loss_difference <= LOSS_LIMIT and metric_difference <= METRIC_LIMIT else 1


def collect(out: Path, ranks: int) -> tuple[list[float], float]:
    """Mean over ranks of each step's loss; every rank kept a log of its own."""
    from suite.log_reader import read_events

    logs = [read_events(out / f"rank_{rank}.txt").events for rank in range(ranks)]
    losses = [[event.metadata["loss"] for event in log if event.key == "step_phases"] for log in logs]
    (metric,) = (event.value for event in logs[0] if event.key == "metric")
    return [sum(step) / ranks for step in zip(*losses, strict=True)], metric


def worker(args: argparse.Namespace) -> int:
    import torch
    from harness_overhead import Head

    from suite.config import load_config
    from suite.distributed import World
    from suite.mllog import EventLog
    from suite.train import StopWatch, Trainer, evaluate
    from suite.workload import descriptor

    world = World.create()
    torch.set_num_threads(1)
    if args.float64:
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double  # the model's own casts
    device = torch.device("cpu")
    world.init_torch(device)
    chosen = descriptor("cosmoflow")
    config = load_config(chosen, args.size, ["hyperparameters.dropout=0", "window_steps=1", *args.overrides])
    workload = chosen.load()(config)
    root = args.data or Path(f"data/cosmoflow-{args.size}")
    data = Head(workload.dataset("train", root), args.steps * config.global_batch_size)
    log = EventLog(args.worker / f"rank_{world.rank}.txt")
    torch.manual_seed(args.seed)
    model = workload.build_model(world)
    metric = evaluate(workload, model, workload.dataset("validation", root), config, world, device)
    log.event("metric", metric[chosen.card().size(args.size).metric])
    trainer = Trainer(
        workload, config, chosen.card().size(args.size), world, device, model, None,
        workload.build_optimizer(model, args.steps), lambda epoch: data, lambda epoch: data, log, args.seed,
        lambda: None, lambda at: None, lambda text: None,
    )  # fmt: skip
    trainer.train_block(1, 0, StopWatch(world, lambda: None))
    log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
