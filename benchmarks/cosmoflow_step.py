"""The CosmoFlow training step on this machine's CPU in several formulations, in interleaved blocks, with ratios.

    OMP_NUM_THREADS=1 python benchmarks/cosmoflow_step.py [--size mini] [--batch 16] [--blocks 12] [--steps 8]

Times are CPU-seconds of the process, so that a busy machine disturbs little. The ratio of a formulation is the median
over blocks of (its time / time of the shipped config's formulation in the same block), with its quartiles.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from interleaved import compare, timed
from msgspec import structs

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow import DESCRIPTOR
from mlhpc.workloads.cosmoflow import generate as generator
from mlhpc.workloads.cosmoflow.workload import CosmoFlow

# name: (channels_last, torch.compile, bfloat16 autocast)
FORMULATIONS: dict[str, tuple[bool, bool, bool]] = {
    "channels_last_3d": (True, False, False),
    "NCDHW": (False, False, False),
    "channels_last_3d, torch.compile": (True, True, False),
    "NCDHW, torch.compile": (False, True, False),
    "channels_last_3d, bfloat16 autocast": (True, False, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="mini")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    config = load_config(DESCRIPTOR, arguments.size, [f"global_batch_size={arguments.batch}"])
    print(f"{arguments.size}, batch {arguments.batch}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    steps = {}
    for name, choices in FORMULATIONS.items():
        try:
            steps[name] = build(config, *choices)
        except Exception as error:  # a compiler that is missing or fails is a result, and the others still count
            print(f"{name}: not possible here: {str(error).splitlines()[0][:100]}")
    compare("formulation", steps, blocks=arguments.blocks, repeats=arguments.steps)
    loading(config, timed(next(iter(steps.values())), arguments.steps))


def build(config: RunConfig, channels_last: bool, compiled: bool, bfloat16: bool) -> Callable[[], None]:
    """One training step on fixed random counts, warmed up."""
    workload = CosmoFlow(structs.replace(config, channels_last=channels_last))
    torch.manual_seed(0)
    model = workload.build_model(World.create(None))
    optimizer = workload.build_optimizer(model, 1).optimizer
    net = torch.compile(model) if compiled else model
    side, samples = workload.config.hyperparameters.input_size, config.global_batch_size  # type: ignore[attr-defined]
    counts = torch.poisson(torch.full((samples, side, side, side, 4), 8.0)).to(torch.int16)
    batch = {"x": counts, "y": torch.rand(samples, 4) * 2 - 1}

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = workload.loss(net, batch)
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def loading(config: RunConfig, step_s: float) -> None:
    """CPU time of loading and augmenting one batch from shards in the page cache, against the step."""
    size = generator.SIZES[config.size]
    generator.SIZES["sample"] = type(size)(size.simulation, size.cube, 128, 16, 64)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "d"
        generator.generate(root, "sample", seed=0, world=World.create(None))
        relaxed = {"input_norm": "log1p", "input_mean": None, "input_std": None}
        own = structs.replace(config.hyperparameters, **relaxed)
        data = CosmoFlow(structs.replace(config, hyperparameters=own)).dataset("train", root)
        order = np.random.default_rng(0).permutation(128)[: config.global_batch_size]
        seconds = min(timed(lambda: data.load(order, seed=0, epoch=1), 20) for _ in range(5))
    print(f"loading and augmenting one batch: {1e3 * seconds:.2f} CPU-ms, {seconds / step_s:.3f} of a step")


if __name__ == "__main__":
    main()
