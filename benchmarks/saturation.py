"""How many initialisations of CosmoFlow's network saturate in their first steps, for several rates of the first epoch.

    OMP_NUM_THREADS=1 python benchmarks/saturation.py [--size mini] [--data ROOT] [--seeds 100] [--steps 60] 0.02 0.01

The output is 1.2 tanh: where all of a batch sits at its ends, no gradient is left and the run stays as it is. A seed counts as
saturated if after the steps more than half of the outputs for 200 training samples lie beyond 0.99 of 1.2. Prints for each
rate the saturated seeds and how many of how many, with the 95 % interval of the share (Clopper-Pearson).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from mlhpc.suite.config import choose_default_data_root, load_config
from mlhpc.suite.data.sampling import list_train_batches
from mlhpc.suite.statistics.intervals import compute_share_interval
from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow import DESCRIPTOR
from mlhpc.workloads.cosmoflow.model import OUTPUT_SCALE
from mlhpc.workloads.cosmoflow.workload import CosmoFlow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="mini")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("rates", type=float, nargs="+")
    arguments = parser.parse_args()
    root = arguments.data or choose_default_data_root("cosmoflow", arguments.size)
    for rate in arguments.rates:
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        stuck = [seed for seed in seeds if saturates(arguments.size, root, seed, rate, arguments.steps)]
        low, high = compute_share_interval(len(stuck), len(seeds), 0.95)
        share = f"{len(stuck)} of {len(seeds)} [{low:.3f}, {high:.3f}]"
        print(f"{arguments.size}, rate {rate:g}, {arguments.steps} steps: {share} saturate: {stuck}", flush=True)


def saturates(size: str, root: Path, seed: int, rate: float, steps: int) -> bool:
    """Train one rank for ``steps`` at a constant rate; tell whether most outputs then sit at an end of the tanh."""
    workload = CosmoFlow(load_config(DESCRIPTOR, size, ["channels_last=true"]))
    data = workload.dataset("train", root)
    torch.manual_seed(seed)
    model = workload.build_model(World.create(None))
    optimizer = workload.build_optimizer(model, steps).optimizer
    for group in optimizer.param_groups:
        group["lr"] = rate
    batches = list_train_batches(len(data), workload.config.global_batch_size, seed=seed, epoch=1, rank=0, size=1)
    for _, indices in zip(range(steps), batches, strict=False):
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model, data.load(indices, seed=seed, epoch=1)).backward()
        optimizer.step()
    with torch.no_grad():
        outputs = model(data.load(range(200), seed=seed, epoch=1)["x"])
    return bool((outputs.abs() > 0.99 * OUTPUT_SCALE).float().mean() > 0.5)


if __name__ == "__main__":
    main()
