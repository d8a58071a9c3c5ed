"""What a rank counts of itself, and the distribution over ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mlhpc.suite.data.manifest import Manifest, write_manifest
from mlhpc.suite.data.shards import ShardReader, build_shard_path, write_shard
from mlhpc.suite.training.instrument import MAX_LISTED_RANKS, RankCounters, compute_rank_distribution


def test_reads_are_counted_by_the_loader_and_by_the_kernel(tmp_path: Path) -> None:
    entry = write_shard(build_shard_path(tmp_path, "train", 0), {"x": np.zeros((8, 100), np.float32)})
    write_manifest(tmp_path, Manifest(workload="t", size="s", seed=0, generator={}, splits={"train": (entry,)}))
    reader, meters = ShardReader(tmp_path, "train"), RankCounters(torch.device("cpu"), dict)
    reader.read([0])
    meters.restart()
    reader.read([1, 2, 3])
    Path(tmp_path / "manifest.json").read_bytes()
    counts = meters.read()
    assert counts["loader_bytes"] == 3 * 400
    assert counts["read_call_bytes"] >= (tmp_path / "manifest.json").stat().st_size
    assert counts["peak_resident_bytes"] > 50e6
    assert meters.absent == {}


def test_a_kernel_that_does_not_tell_is_absent_and_not_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlhpc.suite.training.instrument.PROC_IO", tmp_path / "io")
    meters = RankCounters(torch.device("cpu"), dict)
    assert "storage_bytes" not in meters.read()
    assert meters.absent == {"kernel_bytes": f"{tmp_path}/io: No such file or directory"}


def test_the_slow_rank_is_the_one_that_waits_least() -> None:
    rows = [{"wait_s": wait, "a2a_bytes": 8.0} if wait else {"wait_s": wait} for wait in (3.0, 0.0, 1.0, 2.0)]
    summary = compute_rank_distribution(rows)
    assert summary["wait_s"] == {
        **{"min": 0.0, "median": 1.5, "mean": 1.5, "max": 3.0, "min_rank": 1, "max_rank": 0},
        "values": [3.0, 0.0, 1.0, 2.0],
    }
    assert summary["a2a_bytes"]["values"] == [8.0, 0.0, 8.0, 8.0]
    assert "values" not in compute_rank_distribution([{"x": 1.0}] * (MAX_LISTED_RANKS + 1))["x"]
