"""Forward and backward of CosmoFlow with one, two and four samples in one thread; one sample also as torch computes it.

`python benchmarks/single_sample.py`: CPU milliseconds, medians, interleaved, channels last.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.devices import keep_freed_memory
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow.model import Convolution


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=["smoke", "mini", "small"])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    print(f"{'':8}{'1, torch':>10}{'1':>10}{'2':>10}{'4':>10}  samples; CPU-ms, median of {arguments.rounds}")
    for size in arguments.sizes:
        times = measured(size, arguments.rounds)
        print(f"{size:8}" + "".join(f"{1e3 * statistics.median(seconds):10.2f}" for seconds in times), flush=True)


def measured(size: str, rounds: int) -> list[list[float]]:
    """CPU seconds of each way in each round; the first round, which warms up, is left out."""
    chosen = load_descriptor("cosmoflow")
    config = load_config(chosen, size, ["channels_last=true"])
    side = config.hyperparameters.input_size  # type: ignore[attr-defined]
    model = load_workload(chosen)(config).build_model(World.create(None)).train()
    ways = ((1, nn.Conv3d.forward), (1, Convolution.forward), (2, Convolution.forward), (4, Convolution.forward))
    batches = [torch.randint(0, 30, (samples, side, side, side, 4), dtype=torch.int16) for samples, _ in ways]
    times: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for (_, forward), batch, seconds in zip(ways, batches, times, strict=True):
            for each in model.modules():
                if isinstance(each, Convolution):
                    each.forward = forward.__get__(each)  # type: ignore[method-assign]
            begin = time.process_time()
            model.zero_grad()
            model(batch).square().mean().backward()
            if number:
                seconds.append(time.process_time() - begin)
    return times


if __name__ == "__main__":
    main()
