"""Compares the GEMM ceiling of `mlhpc.suite.performance.ceilings.compute` with a plain loop over the same BLAS, in one run.

python benchmarks/ceilings.py [--rounds N]      threads: OMP_NUM_THREADS

The loop knows nothing of the suite's choices: other orders, shapes that are not square, scipy's BLAS beside torch's and numpy's.
Both are judged by their best and by their median repetition, since other load on the machine lowers each round by another amount.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import scipy.linalg.blas
import torch

from mlhpc.suite.performance.ceilings import compute
from mlhpc.suite.performance.ceilings.samples import QUICK
from mlhpc.suite.world import World

SHAPES = (
    (320, 320, 320),
    (640, 640, 640),
    (1024, 1024, 1024),
    (1536, 1536, 1536),
    (2304, 2304, 2304),
    (4096, 512, 1024),
    (512, 4096, 512),
)
LOOP_S = 0.25  # per shape, library and round


def gemms(dtype: str, m: int, n: int, k: int) -> Iterator[tuple[str, Callable[[], object]]]:
    a, b = torch.rand(m, k).to(getattr(torch, dtype)), torch.rand(k, n).to(getattr(torch, dtype))
    yield "torch", lambda: torch.mm(a, b)
    if dtype != "bfloat16":
        x, y = a.numpy(), b.numpy()
        yield "numpy", lambda: np.dot(x, y)
        routine = scipy.linalg.blas.sgemm if dtype == "float32" else scipy.linalg.blas.dgemm
        left, right = np.asfortranarray(x), np.asfortranarray(y)
        yield "scipy", lambda: routine(1.0, left, right)


def loop(dtype: str) -> dict[str, list[float]]:
    """FLOP/s of every single call, by library and shape."""
    rates: dict[str, list[float]] = {}
    for m, n, k in SHAPES:
        for library, call in gemms(dtype, m, n, k):
            call()
            end = time.perf_counter() + LOOP_S
            while time.perf_counter() < end:
                begin = time.perf_counter()
                call()
                rates.setdefault(f"{library} {m}x{n}x{k}", []).append(2.0 * m * n * k / (time.perf_counter() - begin))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    world, device = World.create(), torch.device("cpu")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {threads} threads, {rounds} rounds")
    ceilings: dict[str, list[tuple[float, float, str]]] = {}
    loops: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for roof in compute.measure(world, QUICK, device).roofs:
            if roof.mode == "burst" and roof.dtype:
                ceilings.setdefault(roof.dtype, []).append((roof.best, roof.value, f"{roof.library} {roof.shape}"))
        for dtype in compute.CPU_TYPES:
            for name, rates in loop(dtype).items():
                loops.setdefault(dtype, {}).setdefault(name, []).extend(rates)
    for dtype, found in ceilings.items():
        best, _, what = max(found)
        median = float(np.median([value for _, value, _ in found]))
        loop_best, loop_what = max((max(rates), name) for name, rates in loops[dtype].items())
        loop_median, _ = max((float(np.median(rates)), name) for name, rates in loops[dtype].items())
        print(
            f"{dtype:9} ceiling best {best / 1e9:7.1f} GFLOP/s ({what}), loop best {loop_best / 1e9:7.1f} ({loop_what}): "
            f"{best / loop_best:.3f}; medians {median / 1e9:.1f} / {loop_median / 1e9:.1f}: {median / loop_median:.3f}"
        )


if __name__ == "__main__":
    main()
