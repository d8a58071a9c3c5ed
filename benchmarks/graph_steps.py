"""What ``graphs`` is worth in a training step of each workload, and what refuses it.

    OMP_NUM_THREADS=1 python benchmarks/graph_steps.py [WORKLOAD/SIZE ...] [--steps 20] [--set KEY=VALUE]

Per subject, on the first batches of its data set, by the harness's own steps: the shapes of batches (a graph is of one shape); ms
of a step without and with graphs, the share of it in which the device computes nothing, peak memory; whether losses and weights
after the same steps are the same bits. Where a capture fails, the line of this project that failed is named. Without a GPU: shapes,
and whether two runs of the same steps without a graph are the same bits, without which a comparison says nothing. Exit code 1: a
subject could not be measured.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from block import Head, open_workload, trainer
from torch import Tensor

from mlhpc.suite.config import choose_default_data_root
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.training.cuda_graphs import WARM_UPS
from mlhpc.suite.world import World

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("cosmoflow", "deepcam", "open_catalyst", "openfold", "moe_lm", "swinv2_moe")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="WORKLOAD/SIZE", default=[f"{name}/smoke" for name in NAMES])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{device}, torch {torch.__version__}, {args.steps} steps, load average {os.getloadavg()[0]:.1f}", flush=True)
    failed = 0
    for subject in args.subjects:
        try:
            print(f"{subject:22} {describe(subject, args.steps, args.overrides)}", flush=True)
        except Exception as error:  # the other subjects still count
            failed = 1
            print(f"{subject:22} not measured: {find_place(error)}", flush=True)
    return failed


def describe(subject: str, steps: int, overrides: list[str]) -> str:
    """Measure a subject; returns its line."""
    on_gpu = torch.cuda.is_available()
    plain = train(subject, steps, overrides)
    said = [f"{plain.shapes} shape(s) in {len(plain.seconds)} batches"]
    try:
        other = train(subject, steps, [*overrides, "graphs=true"] if on_gpu else overrides)
    except InputError as error:
        place = "" if error.__cause__ is None else f" ({find_place(error.__cause__)})"
        return ", ".join([*said, f"idle {plain.idle:.0%}", f"{error}{place}"])
    bits = all(torch.equal(a, b) for a, b in zip(plain.tensors, other.tensors, strict=True))
    said.append(f"bits {'the same' if bits else 'DIFFERENT'}")
    if on_gpu:
        old, new = (1e3 * statistics.median(each.seconds[WARM_UPS + 1 :]) for each in (plain, other))
        said.append(f"{old:.2f} ms, idle {plain.idle:.0%}, {plain.peak_mib:.0f} MiB")
        said.append(
            f"with a graph {new:.2f} ms, idle {other.idle:.0%}, {other.peak_mib:.0f} MiB: {old / new:.2f} times"
        )
    return ", ".join(said)


@dataclass
class Trained:
    """Seconds of steps, what they computed (losses and weights), and the share in which the device computed nothing."""

    seconds: list[float] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    shapes: int = 0
    idle: float = math.nan
    peak_mib: float = 0.0

    def add(self, loss: Tensor, *, ends_step: bool) -> None:
        """Keep a loss, as a window of steps does."""
        self.tensors.append(loss)


def train(subject: str, steps: int, overrides: list[str]) -> Trained:
    """Train on the first batches by the harness's own steps, from the same weights each time."""
    name, _, size = subject.partition("/")
    world, found = World.create(None), Trained()
    workload, config = open_workload(name, size, ["instrumentation=false", *overrides], world)
    root = choose_default_data_root(name, size)
    data = Head(workload.dataset("train", root), (steps + WARM_UPS) * config.global_batch_size)
    prepared = trainer(workload, config, world, EventLog(None), data, workload.dataset("validation", root), seed=1)
    device = prepared.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    prepared.wrapped.train()
    torch.manual_seed(1)
    shapes = set()
    for item, batch in prepared.batches(data, 0, len(data) // config.global_batch_size):
        shapes.add(tuple((key, tuple(value.shape)) for key, value in sorted(batch.items())))
        synchronise(device)
        begin = time.perf_counter()
        prepared.part(batch, item, found)
        synchronise(device)
        found.seconds.append(time.perf_counter() - begin)
    found.shapes = len(shapes)
    found.tensors += [each.detach().clone() for each in prepared.state.model.parameters()]
    found.idle = measure_idle(lambda: prepared.part(batch, item, Trained()), device)
    found.peak_mib = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    return found


def measure_idle(call: Callable[[], None], device: torch.device) -> float:
    """Measure in which share of a call's time the device computes nothing; NaN without a GPU."""
    if device.type != "cuda":
        return float("nan")
    from torch.profiler import DeviceType, ProfilerActivity, profile

    synchronise(device)
    begin = time.perf_counter()
    call()
    synchronise(device)
    whole = time.perf_counter() - begin  # the profiler slows launches, so the time is of a call without it
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        synchronise(device)
    events = [each.time_range for each in profiler.events() if each.device_type == DeviceType.CUDA]
    return max(0.0, 1 - sum_of_intervals((each.start, each.end) for each in events) / 1e6 / whole)


def sum_of_intervals(intervals: Iterable[tuple[float, float]]) -> float:
    """Sum the lengths of intervals; where they overlap, the time counts once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def find_place(error: BaseException) -> str:
    """Describe an error by the last line of this project in its traceback."""
    ours = [each for each in traceback.extract_tb(error.__traceback__) if str(ROOT) in each.filename]
    ours = [each for each in ours if ".venv" not in each.filename and Path(each.filename) != Path(__file__)] or ours
    place = f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}: " if ours else ""
    return f"{place}{type(error).__name__}: {error}".splitlines()[0][:200]


if __name__ == "__main__":
    sys.exit(main())
