"""Building a data set: an interrupted build is continued and leaves nothing behind."""

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from mlhpc.suite.data.build import Arrays, DataSetPlan, ShardPlan, build_data_set
from mlhpc.suite.data.manifest import compare_files
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World


def plan(make: Callable[[int], Arrays]) -> DataSetPlan[int]:
    return DataSetPlan(
        workload="toy",
        size="smoke",
        seed=1,
        recipe={"name": "test"},
        pieces=[ShardPlan("train", shard, lambda shard=shard: make(shard)) for shard in range(2)],  # type: ignore[misc]
        summarise=lambda arrays: len(arrays["x"]),
        attributes=lambda summaries: {"samples": sum(summaries["train"])},
    )


def make(shard: int) -> Arrays:
    return {"x": np.full((3, 4), shard, np.float32)}


def fail_at_one(shard: int) -> Arrays:
    if shard == 1:
        raise InputError("interrupted")
    return make(shard)


def test_a_completed_build_removes_the_part_files_of_killed_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="interrupted"):
        build_data_set(tmp_path, plan(fail_at_one), World.create())
    for name in ("train/.shard_00001.h5.other.99.part", ".manifest.json.other.99.part"):
        (tmp_path / name).touch()
    build_data_set(tmp_path, plan(make), World.create())
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "manifest.json",
        "train",
        "train/shard_00000.h5",
        "train/shard_00001.h5",
    ]
    assert compare_files(tmp_path, deep=True) == []


def test_a_build_that_was_killed_before_its_first_file_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / ".generation.json.other.99.part").touch()
    build_data_set(tmp_path, plan(make), World.create())
    assert json.loads((tmp_path / "manifest.json").read_text())["attributes"] == {"samples": 6}
    assert not list(tmp_path.rglob("*.part"))


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match="has files but no data set"):
        build_data_set(tmp_path, plan(make), World.create())


def interrupted(root: Path) -> None:
    with pytest.raises(InputError, match="interrupted"):
        build_data_set(root, plan(fail_at_one), World.create())


def test_shards_of_an_interrupted_build_are_kept(tmp_path: Path) -> None:
    interrupted(tmp_path)
    shard = tmp_path / "train/shard_00000.h5"
    kept = shard.stat().st_ino
    build_data_set(tmp_path, plan(make), World.create())
    assert shard.stat().st_ino == kept
    assert not list(tmp_path.glob("written.*"))


@pytest.mark.parametrize("harm", ["flip", "cut", "no record", "torn record", "another's record"])
def test_a_shard_of_an_interrupted_build_that_is_not_what_was_written_is_made_again(tmp_path: Path, harm: str) -> None:
    interrupted(tmp_path)
    shard = tmp_path / "train/shard_00000.h5"
    (record,) = tmp_path.glob("written.*.jsonl")
    content = bytearray(shard.read_bytes())
    if harm == "flip":
        content[-3] ^= 1  # in the samples: HDF5 sees nothing wrong
        shard.write_bytes(content)
    elif harm == "cut":
        shard.write_bytes(content[:-3])
    elif harm == "no record":
        record.unlink()
    elif harm == "torn record":
        record.write_bytes(record.read_bytes()[:-20])
    else:
        record.write_text(record.read_text().replace("shard_00000", "shard_00007"))
    kept = shard.stat().st_ino
    build_data_set(tmp_path, plan(make), World.create())
    assert shard.stat().st_ino != kept
    assert compare_files(tmp_path, deep=True) == []
    with h5py.File(shard) as file:
        assert np.array_equal(file["x"][...], make(0)["x"])


def test_a_second_build_into_one_folder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    def second(shard: int) -> Arrays:
        with pytest.raises(InputError, match=rf"^{tmp_path}/generation.lock: this data set is in use by process"):
            build_data_set(tmp_path, plan(make), World.create())
        return make(shard)

    build_data_set(tmp_path, plan(second), World.create())
    assert not (tmp_path / "generation.lock").exists()
    build_data_set(tmp_path, plan(make), World.create())


def test_a_complete_data_set_needs_no_lock(tmp_path: Path) -> None:
    build_data_set(tmp_path, plan(make), World.create())
    (tmp_path / "generation.lock").touch()  # would refuse
    build_data_set(tmp_path, plan(make), World.create())
