"""Compares the shards of a data set with the checksums that were recorded when they were written. Ranks share the work.

A run does it once before it trains, because a flipped bit would otherwise train to a result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from mlhpc.suite.data.manifest import ShardEntry, check_shard
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World

READ_BYTES = 256 << 10  # stays in the second-level cache between the read and the checksum


@dataclass(frozen=True)
class Verification:
    """The bytes and files that all ranks compared, and the seconds of the slowest rank."""

    bytes: int
    files: int
    seconds: float

    def value(self) -> dict[str, Any]:
        """Return the value of the ``data_verified`` event."""
        return asdict(self) | {"gb_per_s": self.bytes / self.seconds / 1e9}


def verify_shards(
    root: Path, shards: Sequence[ShardEntry], world: World, tick: Callable[[], None] = lambda: None
) -> Verification:
    """Compare the crc32c of every shard with its entry. All ranks call it, each reads its share.

    InputError, the same on every rank, names a shard that is missing, damaged or of another size. ``tick`` is called
    after every block read.
    """
    begin = time.monotonic()
    problem = None
    for entry in shards[world.rank :: world.size]:
        problem = check_crc32c(root, entry, tick)
        if problem is not None:
            break
    # The first damaged shard ends a rank's work: the data set cannot be used in any case.
    world.check_together(None if problem is None else InputError(problem))
    seconds = max(world.allgather(time.monotonic() - begin))
    return Verification(sum(entry.bytes for entry in shards), len(shards), seconds)


def check_crc32c(root: Path, entry: ShardEntry, tick: Callable[[], None] = lambda: None) -> str | None:
    """Return in one line how a shard differs from its entry: missing, of another size, damaged. None if not."""
    problem = check_shard(root, entry, deep=False)
    if problem is not None:
        return problem
    path = root / entry.file
    block, crc = np.empty(READ_BYTES, np.uint8), 0
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block.data):
                crc = google_crc32c.extend(crc, block[:count])
                tick()
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    if f"{crc:08x}" != entry.crc32c:
        return f"{path}: damaged: crc32c {crc:08x}, manifest says {entry.crc32c}"
    return None
