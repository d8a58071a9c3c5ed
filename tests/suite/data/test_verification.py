"""Verification: every shard is compared with its checksum once, and what is wrong is one line that names the shard."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlhpc.suite.data.manifest import READ_BYTES, ShardEntry, check_crc32c, verify_shards
from mlhpc.suite.data.shards import build_shard_path, write_shard
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World


@pytest.fixture
def shards(tmp_path: Path) -> list[ShardEntry]:
    rng = np.random.default_rng(1)
    return [
        write_shard(
            build_shard_path(tmp_path, "train", i), {"x": rng.integers(0, 255, (3 + i, 100_000)).astype(np.uint8)}
        )
        for i in range(3)
    ]


def test_intact_shards_are_all_read(tmp_path: Path, shards: list[ShardEntry]) -> None:
    blocks = []
    found = verify_shards(tmp_path, shards, World.create(), lambda: blocks.append(1))
    assert (found.files, found.bytes) == (3, sum(entry.bytes for entry in shards))
    assert len(blocks) == sum(-(-entry.bytes // READ_BYTES) for entry in shards)
    assert found.value()["gb_per_s"] == pytest.approx(found.bytes / found.seconds / 1e9)


def flip(where: float) -> Callable[[Path], object]:
    def harm(path: Path) -> object:
        content = bytearray(path.read_bytes())
        content[int(where * (len(content) - 1))] ^= 0x10
        return path.write_bytes(content)

    return harm


@pytest.mark.parametrize(
    ("harm", "message"),
    [(flip(where), "damaged: crc32c ") for where in (0, 0.1, 0.5, 0.999, 1)]
    + [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "too long"),
        (lambda path: path.write_bytes(b""), "truncated"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "damaged: crc32c "),
        (lambda path: path.unlink(), "missing"),
        (lambda path: (path.unlink(), path.mkdir()), ""),
    ],
)
def test_a_shard_that_is_not_what_was_written_is_named(
    tmp_path: Path, shards: list[ShardEntry], harm: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / shards[1].file
    harm(path)
    with pytest.raises(InputError, match=f"^{path}: .*{message}"):
        verify_shards(tmp_path, shards, World.create())
    assert check_crc32c(tmp_path, shards[0]) is None
