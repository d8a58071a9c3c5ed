"""What a CUDA graph of forward and backward pass would be worth in a training step of each workload, and what refuses it.

    OMP_NUM_THREADS=1 python benchmarks/graph_steps.py [WORKLOAD/SIZE ...] [--steps 20] [--set KEY=VALUE]

Per subject, on the first batches of its data set: the shapes of batches (a graph is of one shape); ms of a step (zeroed gradients,
forward, backward, optimizer) without and with a graph, and the share of it in which the device computes nothing; whether losses and
weights after the same steps are the same bits. The graph has the passes only: the optimizer gets another learning rate in each
step. Where a capture fails, the line of this project that failed is named. Without a GPU: shapes, and whether two runs of the same
steps without a graph are the same bits, without which a comparison says nothing. Exit code 1: a subject could not be measured.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from block import Head, open_workload, trainer
from torch import Tensor

from suite.config import choose_default_data_root
from suite.log.mllog import EventLog
from suite.training.loop import make_autocast
from suite.world import World

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("cosmoflow", "deepcam", "open_catalyst", "openfold", "moe_lm", "swinv2_moe")
WARM_UPS = 3  # steps before a capture: tables are made, and Triton and cuDNN choose
Batch = dict[str, Tensor]
Passes = Callable[[Batch], Tensor]


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
    name, _, size = subject.partition("/")
    world = World.create(None)
    workload, config = open_workload(name, size, ["instrumentation=false", *overrides], world)
    root = choose_default_data_root(name, size)
    data = Head(workload.dataset("train", root), (steps + WARM_UPS) * config.global_batch_size)
    prepared = trainer(workload, config, world, EventLog(None), data, workload.dataset("validation", root), seed=1)
    prepared.wrapped.train()
    wanted = min(steps, len(data) // config.global_batch_size)
    batches = [dict(batch) for _, batch in prepared.batches(data, 0, wanted)]
    shapes = {tuple((key, tuple(value.shape)) for key, value in sorted(batch.items())) for batch in batches}
    said = [f"{len(shapes)} shape(s) in {len(batches)} batches"]
    first = next(iter(shapes))
    same = [batch for batch in batches if tuple((k, tuple(v.shape)) for k, v in sorted(batch.items())) == first]

    def passes(batch: Batch) -> Tensor:
        with make_autocast(config, prepared.device):
            loss = workload.loss(prepared.wrapped, batch)
        loss.backward()
        return loss.detach()

    kept = copy.deepcopy((prepared.state.model.state_dict(), prepared.state.optimization.optimizer.state_dict()))

    def run(with_graph: bool) -> tuple[list[float], list[Tensor], float]:
        """Train on the batches from the beginning. Returns seconds of steps, losses and weights, and the idle share."""
        prepared.state.model.load_state_dict(copy.deepcopy(kept[0]))
        prepared.state.optimization.optimizer.load_state_dict(copy.deepcopy(kept[1]))
        torch.manual_seed(1)
        losses: list[Tensor] = []
        call = passes

        def step(number: int, batch: Batch) -> None:
            if call is passes:
                prepared.state.optimization.optimizer.zero_grad(set_to_none=True)
            losses.append(call(batch).clone())
            prepared.state.update(number, 1)

        for number in range(WARM_UPS):
            step(number, same[number % len(same)])
        if with_graph:
            call = captured(passes, prepared.state, same[0])
        seconds = []
        for number, batch in enumerate(same):
            synchronise(prepared.device)
            begin = time.perf_counter()
            step(WARM_UPS + number, batch)
            synchronise(prepared.device)
            seconds.append(time.perf_counter() - begin)
        found = [*losses, *(each.detach().clone() for each in prepared.state.model.parameters())]
        return seconds, found, measure_idle(lambda: step(WARM_UPS + len(same), same[0]), prepared.device)

    plain = run(with_graph=False)
    other = run(with_graph=prepared.device.type == "cuda")
    bits = all(torch.equal(a, b) for a, b in zip(plain[1], other[1], strict=True))
    said.append(f"bits {'the same' if bits else 'DIFFERENT'}")
    if prepared.device.type == "cuda":
        old, new = (1e3 * statistics.median(each[0]) for each in (plain, other))
        said.append(
            f"{old:.2f} ms, idle {plain[2]:.0%}; with a graph {new:.2f} ms, idle {other[2]:.0%}: {old / new:.2f} times"
        )
    return ", ".join(said)


def captured(passes: Passes, state: Any, batch: Batch) -> Passes:
    """Capture the passes of a batch's shape. The call copies a batch to where the graph reads it, and replays."""
    held = {name: value.clone() for name, value in batch.items()}
    optimizer = state.optimization.optimizer
    random, random_of_host = torch.cuda.get_rng_state(), torch.get_rng_state()
    # buffers such as batch normalisation's must not count the passes of the warm-up
    buffers = [buffer.clone() for buffer in state.model.buffers()]
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        optimizer.zero_grad(set_to_none=True)
        passes(held)
    torch.cuda.current_stream().wait_stream(aside)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = passes(held)
    for buffer, value in zip(state.model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    torch.cuda.set_rng_state(random)
    torch.set_rng_state(random_of_host)

    def call(batch: Batch) -> Tensor:
        for name, value in batch.items():
            held[name].copy_(value)
        graph.replay()
        return loss

    return call


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
