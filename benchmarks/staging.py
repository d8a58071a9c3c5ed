"""Staging throughput over that of `cp --reflink=never` of the same files: same cache state, both synced, interleaved.

    python benchmarks/staging.py [--gib 1] [--pairs 5] [--folder DIR] [--cold]
    mpiexec -n 2 python benchmarks/staging.py          two staging ranks on this node against one cp

Source and copies lie in DIR. Warm: the source is in the page cache. --cold: it is dropped from there before each copy
(posix_fadvise, no root needed). Staging verifies crc32c while copying and forces each shard to the disk; after either
copy the file system is synced inside the timed part. Prints each pair, the median ratio and its range.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from mlhpc.suite.data.manifest import Manifest, write_manifest
from mlhpc.suite.data.shards import build_shard_path, write_shard
from mlhpc.suite.data.staging import stage
from mlhpc.suite.world import World

LIMIT = 0.9
SHARD_MIB = 64


def make(root: Path, gib: float) -> Manifest:
    rng = np.random.default_rng(0)
    entries = tuple(
        write_shard(
            build_shard_path(root, "train", i), {"x": rng.integers(0, 256, (SHARD_MIB, 1 << 20), dtype=np.uint8)}
        )
        for i in range(max(1, round(gib * 1024 / SHARD_MIB)))
    )
    manifest = Manifest(workload="none", size="none", seed=0, generator={}, splits={"train": entries})
    write_manifest(root, manifest)
    return manifest


def set_cache(source: Path, *, cold: bool) -> None:
    """Bring every file of the source into the page cache, or out of it."""
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                if cold:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(8 << 20):
                        pass


def timed(world: World, target: Path, source: Path, cold: bool, copy: Callable[[], None]) -> float:
    """Seconds of ``copy`` and a sync, into a folder that does not exist; preparation and removal are not timed."""
    if world.is_first:
        shutil.rmtree(target, ignore_errors=True)
        os.sync()
        set_cache(source, cold=cold)
        os.sync()
    world.barrier()
    begin = time.perf_counter()
    copy()
    if world.is_first:
        os.sync()
    world.barrier()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    world = World.create()
    work = Path(world.broadcast(tempfile.mkdtemp(prefix="mlhpc-staging-", dir=args.folder) if world.is_first else None))
    source, target = work / "source", work / "target"
    size = make(source, args.gib).bytes if world.is_first else 0
    world.barrier()

    def cp() -> None:
        if world.is_first:
            subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)

    def staging() -> None:
        stage(source, target, world)

    try:
        for copy in (cp, staging):  # the first write to a disk that grows is slower than later ones
            timed(world, target, source, args.cold, copy)
        pairs = []
        for number in range(args.pairs):
            order = (cp, staging) if number % 2 == 0 else (staging, cp)
            seconds = {copy: timed(world, target, source, args.cold, copy) for copy in order}
            pairs.append((seconds[cp], seconds[staging]))
    finally:
        if world.is_first:
            shutil.rmtree(work)
    return report(pairs, size, world, cold=args.cold) if world.is_first else 0


def report(pairs: list[tuple[float, float]], size: int, world: World, *, cold: bool) -> int:
    kind = next(line.split()[2] for line in reversed(Path("/proc/mounts").read_text().splitlines()) if " / " in line)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M}Z  {platform.node()}  Python {platform.python_version()}  / is {kind}")
    print(
        f"{size / 2**30:.2f} GiB in shards of {SHARD_MIB} MiB, source {'cold' if cold else 'warm'}, {world.size} rank(s)"
    )
    print(f"load average at the end: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores\n")
    print("pair   cp --reflink=never + sync      stage + sync   staging/cp throughput")
    for number, (cp_s, stage_s) in enumerate(pairs, 1):
        rates = [f"{seconds:7.3f} s {size / seconds / 1e9:6.2f} GB/s" for seconds in (cp_s, stage_s)]
        print(f"{number:4d}   {rates[0]:>25s} {rates[1]:>21s}   {cp_s / stage_s:.3f}")
    ratios = sorted(cp_s / stage_s for cp_s, stage_s in pairs)
    median = statistics.median(ratios)
    verdict = "reached" if median >= LIMIT else "NOT reached"
    print(f"\nmedian ratio {median:.3f} (range {ratios[0]:.3f} to {ratios[-1]:.3f}); required {LIMIT}: {verdict}")
    return 0 if median >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
