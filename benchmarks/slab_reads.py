"""What a rank reads from storage under the plans ``spatial``: bytes per sample, for each way to split a sample.

    python benchmarks/slab_reads.py [--folder DIR] [--samples 8]

Writes samples of random numbers at the extents of size full (CosmoFlow 128^3 x 4 int16, DeepCAM 768 x 1152 x 16 float32) to
DIR, which must be on a disk. Each rank of each split is a process of its own: it opens the data set, the shards leave the page
cache (posix_fadvise, no root needed), and it loads its slab of the samples as a training run does. "storage" is what the kernel
counts in /proc/self/io, the least of three times, because it also counts what memory pressure made the process read again;
"values" what the slab holds; both in MiB per sample, of the rank that reads most. "augmented" slabs
come from other places of the stored sample, along any of its axes. Exit code 1 if a split along whole pages, of samples that are
not augmented, reads more than 2 % above its part, or if less is read than the slab holds.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlhpc.suite.config import load_config
from mlhpc.suite.data.manifest import Manifest, write_manifest
from mlhpc.suite.data.shards import build_shard_path, count_read_bytes, write_shard
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.machine.probes.processor import read_cpu
from mlhpc.suite.training.parallel.mesh import part_of
from mlhpc.suite.training.parallel.parallel_dims import cut
from mlhpc.suite.workload import load_workload

MIB = 1 << 20
MARGIN = 1.02
TRIES = 3
CUBES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (4, 2, 1), (4, 4, 1), (1, 1, 2), (2, 2, 2))
IMAGES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2))


class Case(NamedTuple):
    """Samples of a workload as they are read: their first tensor's extents that are split, and how."""

    workload: str
    extents: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...]
    overrides: tuple[str, ...] = ()
    augmented: bool = False

    def whole_pages(self, split: tuple[int, ...]) -> bool:
        """Whether no part of this split begins inside a page: none of the last dimension, whose rows are a page or less."""
        return split[-1] == 1 and not self.augmented


CASES = (
    Case("cosmoflow", (128, 128, 128), CUBES),
    Case("cosmoflow", (128, 128, 128), CUBES, ("hyperparameters.augmentation=true",), augmented=True),
    Case("deepcam", (768, 1152), IMAGES),
)


def write_data(root: Path, case: Case, samples: int) -> None:
    """Write a training split of ``samples`` and two more: one is read when the data set is opened, and the kernel reads on."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    attributes: dict[str, object] = {"periodic": True}
    if case.workload == "cosmoflow":
        arrays["x"] = rng.integers(0, 99, (samples + 2, *case.extents, 4), dtype=np.int16)
        arrays["y"] = rng.random((samples + 2, 4), dtype=np.float32)
    else:
        arrays["x"] = rng.random((samples + 2, *case.extents, 16), dtype=np.float32)
        arrays["y"] = rng.integers(0, 3, (samples + 2, *case.extents), dtype=np.uint8)
        channels = {"mean": 0.5, "sqmean": 0.3, "minval": 0.0, "maxval": 1.0}
        attributes["statistics"] = {"count": 1} | {name: [value] * 16 for name, value in channels.items()}
    shard = write_shard(build_shard_path(root, "train", 0), arrays)
    write_manifest(
        root,
        Manifest(
            workload=case.workload, size="full", seed=0, generator={}, splits={"train": (shard,)}, attributes=attributes
        ),
    )
    os.sync()


def read_slabs(root: Path, case: Case, split: tuple[int, ...], place: tuple[int, ...], samples: int) -> tuple[int, int]:
    """Bytes that one rank takes from storage, and that its values have, for ``samples`` samples."""
    described = load_descriptor(case.workload)
    data = load_workload(described)(load_config(described, "full", case.overrides)).dataset("train", root)
    slab = tuple(part_of(n, parts, index) for n, parts, index in zip(case.extents, split, place, strict=True))
    slabs = {"x": (*slab, (0, 4))} if case.workload == "cosmoflow" else {"x": (*slab, (0, 16)), "y": slab}
    part = cut(data, slabs)
    part.load([0], seed=1, epoch=1)  # what Python and numpy read for themselves
    time.sleep(0.5)  # until the kernel has read on
    with build_shard_path(root, "train", 0).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = _storage(), count_read_bytes()
    part.load(list(range(2, samples + 2)), seed=1, epoch=1)
    return _storage() - before[0], count_read_bytes() - before[1]


def _storage() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def print_case(root: Path, case: Case, samples: int) -> bool:
    """Print a line for each split; whether each reads its part and no more."""
    good, whole = True, math.nan
    for split in case.splits:
        ranks = []
        for place in product(*map(range, split)):
            with multiprocessing.get_context("fork").Pool(
                1
            ) as pool:  # what is imported is there, so only samples are read
                tries = [pool.apply(read_slabs, (root, case, split, place, samples)) for _ in range(TRIES)]
            ranks.append(min(tries))
        storage, values = (max(column) / samples / MIB for column in zip(*ranks, strict=True))
        whole = values if math.prod(split) == 1 else whole
        expected = 1 / math.prod(split)
        wrong = ""
        if case.whole_pages(split) and storage / whole > expected * MARGIN:
            wrong = "  MORE THAN ITS PART"
        if storage < values / MARGIN:
            wrong = "  THE PAGE CACHE WAS NOT EMPTY"
        good &= not wrong
        name = f"{case.workload}{', augmented' if case.augmented else ''}"
        row = f"{name:<22} {'x'.join(map(str, split)):<8} {math.prod(split):>5} {values:>9.3f} {storage:>9.3f}"
        print(f"{row} {storage / whole:>9.4f} {expected:>9.4f}{wrong}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M}Z, {read_cpu(Path('/')).model}, load {os.getloadavg()[0]:.1f}; {args.samples} samples, "
        "page cache dropped\nMiB per sample, of the rank that reads most\n"
    )
    print(f"{'workload':<22} {'split':<8} {'ranks':>5} {'values':>9} {'storage':>9} {'of whole':>9} {'1/ranks':>9}")
    good = True
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="mlhpc-slabs-", dir=args.folder) as folder:
            write_data(Path(folder), case, args.samples)
            good &= print_case(Path(folder), case, args.samples)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
