"""Universes per second and core of the CosmoFlow generator, and two MPI ranks against two independent processes.

    python benchmarks/generator.py [--size smoke] [--pairs 3]

Both sides generate the same universes on two cores: two ranks of one `mpiexec` write one data set; two processes write a
data set of half the universes each. Time is from the moment both are ready (interpreter and imports done) until both
have written their shards and manifests. Pairs are interleaved and start with either side in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOAL = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="smoke")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--worker", nargs=2, metavar=("ROOT", "SHARE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        root, share = arguments.worker
        worker(Path(root), arguments.size, int(share))
        return
    for key in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[key] = "1"
    measure_core(arguments.size)
    measure_pairs(arguments.size, arguments.pairs)


def measure_core(size: str) -> None:
    """CPU time of the physics alone, without files."""
    from mlhpc.workloads.cosmoflow.cosmology import make_universe
    from mlhpc.workloads.cosmoflow.generate import SIZES

    simulation = SIZES[size].simulation
    make_universe(simulation, 0, 0)
    begin, made = time.process_time(), 0
    while time.process_time() - begin < 2:
        made += 1
        make_universe(simulation, 0, made)
    seconds = (time.process_time() - begin) / made
    print(f"{size}: {simulation.particles}^3 particles on {simulation.mesh}^3 voxels, {simulation.steps}")
    print(f"one core: {1 / seconds:.1f} universes/s ({seconds * 1e3:.2f} CPU-ms each)")


def measure_pairs(size: str, pairs: int) -> None:
    """Interleaved pairs; the ratio is the median of the ratios of the pairs."""
    ratios = []
    for pair in range(pairs):
        seconds = {}
        for side in ("ranks", "processes") if pair % 2 == 0 else ("processes", "ranks"):
            with tempfile.TemporaryDirectory() as folder:
                seconds[side] = run(side, size, Path(folder))
        ratios.append(seconds["processes"] / seconds["ranks"])
        print(f"pair {pair + 1}: 2 ranks {seconds['ranks']:.2f} s, 2 processes {seconds['processes']:.2f} s")
    ratio = statistics.median(ratios)
    verdict = "reached" if ratio >= GOAL else "not reached"
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(
        f"throughput of 2 ranks / 2 independent processes: {ratio:.3f} (median of {pairs}; {spread}); {GOAL} {verdict}"
    )


def run(side: str, size: str, folder: Path) -> float:
    """Seconds from the moment both workers are ready until both are done."""
    command = [sys.executable, __file__, "--size", size, "--worker"]
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    if side == "ranks":
        commands = [[mpiexec, "-n", "2", *command, str(folder / "both"), "1"]]
    else:  # under mpiexec too: on a busy machine the kernel shares cores by session, and each mpiexec opens its own
        commands = [[mpiexec, "-n", "1", *command, str(folder / str(i)), "2"] for i in range(2)]
    for process in [subprocess.Popen(c, stdin=subprocess.DEVNULL) for c in commands]:
        if process.wait():
            sys.exit(f"{' '.join(commands[0])}: exit code {process.returncode}")
    times = [tuple(map(float, path.read_text().split())) for path in folder.glob("*.times")]
    return max(end for _, end in times) - max(begin for begin, _ in times)


def worker(root: Path, size: str, share: int) -> None:
    """Generate 1/share of the universes of a size and note beside the data set when this began and ended."""
    from mlhpc.suite.world import World
    from mlhpc.workloads.cosmoflow import generate as generator
    from mlhpc.workloads.cosmoflow.cosmology import make_universe

    full = generator.SIZES[size]
    generator.SIZES[size] = dataclasses.replace(
        full, train_universes=full.train_universes // share, validation_universes=full.validation_universes // share
    )
    make_universe(full.simulation, 0, 0)  # wave vectors and FFT plans are cached from here on
    world = World.create()
    world.barrier()
    begin = time.time()
    generator.generate(root, size, seed=int(root.name == "1"), world=world)
    root.with_name(f"{os.getpid()}.times").write_text(f"{begin} {time.time()}")


if __name__ == "__main__":
    main()
