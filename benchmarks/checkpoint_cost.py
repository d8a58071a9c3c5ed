"""CPU time of saving and loading a checkpoint by its parts: copy to memory, write, commit, load. Nine times, the first not counted.

    python benchmarks/checkpoint_cost.py WORKLOAD SIZE [KEY=VALUE ...]          one rank; under mpiexec several

Prints one line: the medians of rank 0 in ms, the bytes of all files, and the peak memory of the process. For another commit set
PYTHONPATH to its folder.
"""

from __future__ import annotations

import itertools
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.parallel.apply import build
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World


def main(name: str, size: str, *overrides: str) -> None:
    """Measure on every rank."""
    torch.set_num_threads(1)
    world = World.create()
    world.init_torch(torch.device("cpu"))
    descriptor = load_descriptor(name)
    config = load_config(descriptor, size, list(overrides))
    parallel = Parallel.of(config, descriptor, world.rank, world.size)
    workload = load_workload(descriptor)(config)
    model = build(parallel, workload, descriptor, world, torch.device("cpu"), 1)
    state = TrainingState.create(workload, model, 10, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimization.optimizer.step()
    folder = Path(world.broadcast(tempfile.mkdtemp() if world.is_first else None))
    checkpoint = Checkpoint(folder / "trial_0.pt", {}, parallel.mesh)
    rows, stored = [], 0
    for step in range(9):
        world.barrier()
        times = [time.process_time()]
        snapshot = checkpoint.snapshot(world, state, Position(1, step))
        times.append(time.process_time())
        written = snapshot.write()
        times.append(time.process_time())
        every = world.gather(written, bytes)
        if every is not None:
            stored = snapshot.commit(every)
            checkpoint.remove_others(snapshot.token)
        times.append(time.process_time())
        world.barrier()
        checkpoint.load(world, state)
        times.append(time.process_time())
        rows.append([1e3 * (after - before) for before, after in itertools.pairwise(times)])
    if world.is_first:
        median = [round(statistics.median(column), 1) for column in zip(*rows[1:], strict=True)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"copy, write, commit, load [ms]": median, "bytes": stored, "peak [MiB]": round(peak)}))
    world.barrier()
    if world.is_first:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
