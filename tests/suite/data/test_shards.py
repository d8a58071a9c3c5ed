"""Shards: deterministic files, any damage is found, and what is read is what was written."""

import json
import os
import re
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from mlhpc.suite.data.manifest import Manifest, compare_files, read_manifest, write_manifest
from mlhpc.suite.data.shards import (
    Compression,
    ShardReader,
    build_shard_path,
    count_read_bytes,
    list_page_runs,
    map_columns,
    read_shard_entry,
    write_shard,
)
from mlhpc.suite.errors import InputError

SAMPLES = (5, 5, 3)


def arrays(shard: int, samples: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(shard)
    return {
        "x": rng.integers(0, 20, (samples, 2, 8, 8, 8)).astype(np.int16),
        "y": rng.random((samples, 4)).astype(np.float32),
    }


def make(root: Path, compression: Compression = "none") -> Manifest:
    entries = tuple(
        write_shard(build_shard_path(root, "train", i), arrays(i, n), compression=compression)
        for i, n in enumerate(SAMPLES)
    )
    manifest = Manifest(workload="toy", size="smoke", seed=7, generator={"name": "test"}, splits={"train": entries})
    write_manifest(root, manifest)
    return manifest


@pytest.fixture(scope="module", params=["none", "gzip"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make(folder, request.param)
    return folder


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("kind", [">i2", ">f4", ">u8", ">c8", "V4"])
def test_a_shard_that_is_well_signed_and_wrong_is_one_line(tmp_path: Path, kind: str, compression: Compression) -> None:
    wrong = arrays(0, 3) | {"z": np.zeros((3, 400), kind)}
    with pytest.raises(
        InputError, match=rf"shard_00000.h5: 'z' is .{{0,2}}{kind.lstrip('>')}; expected a dataset in this"
    ):
        write_shard(build_shard_path(tmp_path, "train", 0), wrong, compression=compression)


def rewrite(path: Path, kind: str) -> None:
    """Write a shard that is well formed and no shard of ours, as a stranger may sign it."""
    rows = np.zeros((3, 400), np.int16)
    (other := path.with_name("other.h5")).write_bytes(path.read_bytes())
    with h5py.File(path, "w") as file:
        if kind == "scalar":
            file["y"] = 3
        elif kind == "empty":
            file["y"] = h5py.Empty("u1")
        elif kind == "group":
            file.create_group("y")
        elif kind == "no sample":
            file["y"] = rows[:0]
        elif kind == "link":
            file["y"] = h5py.SoftLink("/z")
        elif kind == "link to a file":
            file["y"] = h5py.ExternalLink("/dev/zero", "/y")
        elif kind == "values of a file":
            file.create_dataset("y", (3, 400), "i2", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])
        elif kind == "virtual":
            layout = h5py.VirtualLayout((5, 4), "f4")
            layout[:] = h5py.VirtualSource(str(other), "y", (5, 4))
            file.create_virtual_dataset("y", layout)
        elif kind == "offsets of another file":
            file.create_dataset("y.offsets", (1 << 40,), "i8", external=[("/dev/zero", 0, h5py.h5f.UNLIMITED)])
        elif kind == "offsets that inflate":
            file.create_dataset("y.offsets", (1 << 32,), "i8", chunks=(1 << 20,), compression="gzip")
        elif kind == "rows that inflate":
            file.create_dataset("y", (1 << 40, 4), "i2", chunks=(1, 4), compression="gzip")
        elif kind == "never written":
            file.create_dataset("y", (3, 4), "i2", chunks=(1, 4), compression="gzip")
        elif kind == "rows without a place":
            file.create_dataset("y", (3, 1 << 50), "i2")
        elif kind == "samples of nothing":
            file.create_dataset("y", (1 << 40, 0), "i2")
        elif kind == "shuffled":
            file.create_dataset("y", data=rows, chunks=(1, 400), compression="gzip", shuffle=True)
        elif kind == "texts":
            file["y"] = ["a", "b", "c"]
        elif kind == "objects":
            file["y"] = np.array([file.ref] * 3, h5py.ref_dtype)


KINDS = (
    *(
        "scalar",
        "empty",
        "group",
        "no sample",
        "link",
        "link to a file",
        "values of a file",
        "virtual",
        "texts",
        "objects",
    ),
    *("offsets of another file", "offsets that inflate", "rows that inflate", "never written", "rows without a place"),
    *("samples of nothing", "shuffled"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_strangers_shard_is_one_line_and_opens_no_other_file(tmp_path: Path, kind: str) -> None:
    make(tmp_path)
    path = build_shard_path(tmp_path, "train", 0)
    rewrite(path, kind)
    tracemalloc.start()
    with pytest.raises(InputError, match=r"shard_00000\.h5: [^\n]*\Z"):
        map_columns(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_a_sample_inflates_to_its_size_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("y", (1, 4), "i2", chunks=(1, 4), compression="gzip")
        made.id.write_direct_chunk((0, 0), zlib.compress(bytes(20_000_000)))
    column = map_columns(path)["y"]
    tracemalloc.start()
    with pytest.raises(InputError, match="sample 0 of '/y' is damaged"):
        column.sample(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6


def test_a_dataset_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    make(tmp_path)
    reader = ShardReader(tmp_path, "train")
    for look in (
        lambda: reader.read([0])["text"],
        lambda: reader.read([0], ["text"])["text"],
        lambda: reader.read_parts("text", [0], [[np.arange(1)]]),
    ):
        with pytest.raises(InputError, match="has no dataset 'text', only "):
            look()


@pytest.mark.parametrize(
    ("lay", "said"),
    [
        (Path.mkdir, "a folder lies there"),
        (os.mkfifo, "a named pipe lies there"),
        (lambda path: path.symlink_to("/dev/null"), "a device lies there"),
        (lambda path: path.symlink_to("nowhere"), "a link to nothing"),
        (lambda path: None, "missing"),
        (lambda path: path.write_bytes(b""), "truncated: 0 bytes"),
    ],
)
def test_verifying_says_what_lies_in_the_place_of_a_shard(
    tmp_path: Path, lay: Callable[[Path], object], said: str
) -> None:
    make(tmp_path)
    path = build_shard_path(tmp_path, "train", 1)
    path.rename(path.with_name("shard_00009.h5"))
    lay(path)
    for deep in (False, True):
        found = compare_files(tmp_path, deep=deep)
        assert found[0].startswith(f"{path}: {said}")
        assert found[1:] == [f"{path.with_name('shard_00009.h5')}: a shard that the manifest does not name"]
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"size":', '"size": "full",\n "size":'))
    assert compare_files(tmp_path, deep=False) == [f"{tmp_path}/manifest.json: has the key 'size' twice"]


def test_a_shard_that_is_named_twice_would_be_read_twice(tmp_path: Path) -> None:
    make(tmp_path)
    manifest = read_manifest(tmp_path)
    first = manifest.splits["train"][0]
    splits = manifest.splits | {"train": (first, *manifest.splits["train"])}
    write_manifest(tmp_path, structs.replace(manifest, splits=splits))
    said = f"{tmp_path}/manifest.json: names {first.file} 2 times; expected each shard once"
    assert compare_files(tmp_path, deep=True) == [said]


def test_a_shard_with_another_shape_is_named(tmp_path: Path) -> None:
    make(tmp_path)
    reader = ShardReader(tmp_path, "train")
    name = next(iter(reader.names))
    with pytest.raises(InputError, match=f"shard_00000.h5: dataset '{name}' is .*, expected "):
        reader.require({name: ((17,), "float64")})
    with pytest.raises(InputError, match="shard_00000.h5: has no dataset 'none', only "):
        reader.require({"none": ((), "uint8")})


def everything(root: Path) -> dict[str, np.ndarray]:
    parts = [arrays(i, n) for i, n in enumerate(SAMPLES)]
    return {name: np.concatenate([part[name] for part in parts]) for name in ("x", "y")}


@given(indices=st.lists(st.integers(0, sum(SAMPLES) - 1), min_size=1, max_size=20))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_indices_in_any_order_give_the_samples_that_were_written(root: Path, indices: list[int]) -> None:
    batch = ShardReader(root, "train").read(indices)
    for name, whole in everything(root).items():
        assert batch[name].dtype == whole.dtype
        np.testing.assert_array_equal(batch[name], whole[indices])


def test_parts_of_samples_are_those_of_the_whole_and_count_what_is_touched(root: Path) -> None:
    """A compressed sample is read whole, whatever part of it is wanted."""
    reader, chosen = ShardReader(root, "train"), [12, 0, 7]
    whole = reader.read(chosen)["x"]
    wanted = [np.array([1]), np.array([7, 0, 3]), np.arange(2, 4)]
    before = count_read_bytes()
    parts = reader.read_parts("x", chosen, [wanted] * 3)
    for part, sample in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(part, sample[1:2][:, [7, 0, 3]][:, :, 2:4])
    assert count_read_bytes() - before == (sum(part.nbytes for part in parts) if "none" in root.name else whole.nbytes)
    with pytest.raises(IndexError, match="expected one or more of"):
        reader.read_parts("x", [99], [wanted])


def test_what_was_read_belongs_to_the_reader(root: Path) -> None:
    reader = ShardReader(root, "train")
    reader.read([0])["x"][:] = 99
    np.testing.assert_array_equal(reader.read([0])["x"], everything(root)["x"][:1])


def test_threads_that_open_shards_at_once_read_the_same(root: Path) -> None:
    reader, whole = ShardReader(root, "train"), everything(root)["x"]
    results, gate = {}, threading.Barrier(4)

    def work(k: int) -> None:
        gate.wait()
        results[k] = [reader.read(np.random.default_rng(k).permutation(len(reader)))["x"] for _ in range(5)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for k, found in results.items():
        for batch in found:
            np.testing.assert_array_equal(batch, whole[np.random.default_rng(k).permutation(len(reader))])


@pytest.mark.parametrize("index", [-1, sum(SAMPLES)])
def test_a_sample_that_does_not_exist_is_refused(root: Path, index: int) -> None:
    with pytest.raises(IndexError, match=r"expected one or more of 0\.\.12"):
        ShardReader(root, "train").read([0, index])


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_the_same_arrays_give_the_same_bytes(tmp_path: Path, compression: Compression) -> None:
    first = write_shard(build_shard_path(tmp_path / "a", "train", 0), arrays(1, 4), compression=compression)
    second = write_shard(build_shard_path(tmp_path / "b", "train", 0), arrays(1, 4), compression=compression)
    assert first == second == read_shard_entry(build_shard_path(tmp_path / "a", "train", 0))
    assert first.file == "train/shard_00000.h5"
    assert not list(tmp_path.rglob("*.part"))


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_anywhere_is_found(root: Path, place: float, bit: int) -> None:
    path = build_shard_path(root, "train", 1)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[int(place * len(whole))] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        (problem,) = compare_files(root, deep=True)
    finally:
        path.write_bytes(whole)
    assert problem.startswith(f"{path}: damaged: crc32c ")
    assert compare_files(root, deep=True) == []


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated: "),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "too long: "),
    ],
)
def test_a_missing_or_cut_shard_is_named_by_verify_and_by_the_reader(
    tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    make(tmp_path)
    path = build_shard_path(tmp_path, "train", 1)
    harm(path)
    assert [problem.startswith(f"{path}: {message}") for problem in compare_files(tmp_path, deep=False)] == [True]
    reader = ShardReader(tmp_path, "train")
    reader.read([0])
    with pytest.raises(InputError, match=f"^{path}: {message}"):
        reader.read([0, 5])


def test_damage_that_keeps_the_size_ends_in_one_line_that_names_the_shard(tmp_path: Path) -> None:
    make(tmp_path, "gzip")
    path = build_shard_path(tmp_path, "train", 0)
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(InputError, match=f"^{path}: not a readable HDF5 file"):
        ShardReader(tmp_path, "train").read([0])


def test_a_damaged_compressed_sample_is_named(tmp_path: Path) -> None:
    make(tmp_path, "gzip")
    path = build_shard_path(tmp_path, "train", 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-200] + bytes(200))
    with pytest.raises(InputError, match=f"^{path}: sample 4 of '/x' is damaged"):
        ShardReader(tmp_path, "train").read([4])


def test_shards_of_different_sample_shapes_are_refused(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    other = write_shard(build_shard_path(tmp_path, "train", 1), {"x": np.zeros((5, 3)), "y": np.zeros((5, 4))})
    entries = (manifest.splits["train"][0], other)
    write_manifest(tmp_path, structs.replace(manifest, splits={"train": entries}))
    with pytest.raises(InputError, match=f"^{tmp_path}/train/shard_00001.h5: names or types differ"):
        ShardReader(tmp_path, "train").read([0, 6])
    more = structs.replace(entries[0], samples=entries[0].samples + 2)
    write_manifest(tmp_path, structs.replace(manifest, splits={"train": (more, other)}))
    said = f"^{tmp_path}/train/shard_00000.h5: has {more.samples - 2} samples, the manifest says {more.samples}"
    with pytest.raises(InputError, match=said):
        ShardReader(tmp_path, "train").read([0])
    found, *_ = compare_files(tmp_path, deep=True, read=map_columns)  # the checksums are right
    assert re.search(said, found)
    assert found not in compare_files(tmp_path, deep=False)


def test_arrays_of_different_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"found \{'x': 2, 'y': 3\}"):
        write_shard(build_shard_path(tmp_path, "train", 0), {"x": np.zeros((2, 3)), "y": np.zeros(3)})


def test_the_manifest_comes_back_and_names_the_data_by_every_byte(tmp_path: Path) -> None:
    manifest = make(tmp_path / "a")
    assert read_manifest(tmp_path / "a") == manifest
    assert make(tmp_path / "b").sha256 == manifest.sha256
    assert make(tmp_path / "c", "gzip").sha256 != manifest.sha256
    assert manifest.samples("train") == sum(SAMPLES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=0), "expected a manifest of version 1, found 0"),
        (lambda m: m.update(colour="red"), "unknown key 'colour'"),
        (
            lambda m: m["splits"]["train"][0].update(file="../../etc/passwd"),
            "splits.train.0: field file is '../../etc/passwd'; expected a relative path",
        ),
        (lambda m: m["splits"]["train"][0].update(bytes=-1), "splits.train.0.bytes = -1: "),
        (lambda m: m.pop("seed"), "missing key 'seed'"),
    ],
)
def test_a_manifest_that_is_not_one_says_file_key_and_value(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    make(tmp_path)
    path = tmp_path / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"^.*$") as caught:
        read_manifest(tmp_path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_no_manifest_means_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the manifest of the data set cannot be read: an incomplete data set or none"):
        read_manifest(tmp_path)
    with pytest.raises(InputError, match="the manifest of the data set cannot be read: the folder does not exist"):
        read_manifest(tmp_path / "absent")
    assert len(compare_files(tmp_path, deep=False)) == 1
    (tmp_path / "manifest.json").write_text('{"version": 1, "wor')
    with pytest.raises(InputError, match=r"manifest\.json: expected JSON"):
        read_manifest(tmp_path)


def test_an_unknown_split_is_answered_with_the_splits(root: Path) -> None:
    with pytest.raises(InputError, match="no split 'valid'; the data set has train"):
        ShardReader(root, "valid")


def ragged_arrays(shard: int, samples: int) -> dict[str, np.ndarray]:
    """Samples of 0 to 6 rows, the first of at least one; beside them one number per sample."""
    rng = np.random.default_rng(100 + shard)
    lengths = rng.integers(0, 7, samples)
    lengths[0] += 1
    rows = int(lengths.sum())
    return {
        "atom.offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "atom.position": rng.random((rows, 3)).astype(np.float32),
        "atom.number": rng.integers(1, 90, rows).astype(np.uint8),
        "energy": rng.random(samples),
    }


def make_ragged(root: Path, compression: Compression = "none") -> list[dict[str, np.ndarray]]:
    """Write three ragged shards; the samples as they were written."""
    parts = [ragged_arrays(i, n) for i, n in enumerate(SAMPLES)]
    entries = tuple(
        write_shard(build_shard_path(root, "train", i), part, compression=compression) for i, part in enumerate(parts)
    )
    write_manifest(root, Manifest(workload="toy", size="smoke", seed=7, generator={}, splits={"train": entries}))
    return [
        {
            "atom.position": part["atom.position"][begin:end],
            "atom.number": part["atom.number"][begin:end],
            "energy": part["energy"][place],
        }
        for part in parts
        for place, (begin, end) in enumerate(zip(part["atom.offsets"], part["atom.offsets"][1:], strict=False))
    ]


@pytest.fixture(scope="module", params=["none", "gzip"])
def ragged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, np.ndarray]]]:
    folder = tmp_path_factory.mktemp("ragged")
    return folder, make_ragged(folder, request.param)


@given(indices=st.lists(st.integers(0, sum(SAMPLES) - 1), min_size=1, max_size=20))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ragged_samples_come_back_in_any_order_with_their_own_offsets(
    ragged: tuple[Path, list[dict[str, np.ndarray]]], indices: list[int]
) -> None:
    root, written = ragged
    batch = ShardReader(root, "train").read(indices)
    offsets = batch["atom.offsets"]
    assert len(offsets) == len(indices) + 1
    assert offsets[-1] == len(batch["atom.position"]) == len(batch["atom.number"])
    for place, index in enumerate(indices):
        here = slice(offsets[place], offsets[place + 1])
        for name in ("atom.position", "atom.number"):
            assert batch[name].dtype == written[index][name].dtype
            np.testing.assert_array_equal(batch[name][here], written[index][name])
        assert batch["energy"][place] == written[index]["energy"]


def test_only_the_datasets_asked_for_are_read(ragged: tuple[Path, list[dict[str, np.ndarray]]]) -> None:
    reader = ShardReader(ragged[0], "train")
    chosen, everything = reader.read([3, 1], names={"energy", "atom.number"}), reader.read([3, 1])
    assert set(chosen) == {"energy", "atom.number"}
    for name, values in chosen.items():
        np.testing.assert_array_equal(values, everything[name])


def test_a_ragged_shard_counts_samples_not_rows_and_is_found_again(tmp_path: Path) -> None:
    path = build_shard_path(tmp_path, "train", 0)
    entry = write_shard(path, ragged_arrays(1, 9))
    assert entry.samples == 9
    assert read_shard_entry(path) == entry
    assert write_shard(build_shard_path(tmp_path / "again", "train", 0), ragged_arrays(1, 9)) == entry


def test_an_axis_on_which_no_sample_of_a_shard_has_rows_is_written_and_read(tmp_path: Path) -> None:
    """Another shard of the split may have some: all of a split's shards have the same datasets."""
    empty = {"a.offsets": np.zeros(3, np.int64), "a.x": np.empty((0, 4, 3), np.float32)}
    some = {"a.offsets": np.array([0, 0, 2]), "a.x": np.ones((2, 4, 3), np.float32)}
    entries = [write_shard(build_shard_path(tmp_path, "train", n), each) for n, each in enumerate((empty, some))]
    write_manifest(tmp_path, Manifest(workload="t", size="s", seed=0, generator={}, splits={"train": tuple(entries)}))
    read = ShardReader(tmp_path, "train").read([1, 0, 3])
    assert read["a.offsets"].tolist() == [0, 0, 0, 2]
    np.testing.assert_array_equal(read["a.x"], some["a.x"])


def test_large_ragged_samples_are_read_whole(tmp_path: Path) -> None:
    lengths = np.array([50_000, 1, 70_000])
    values = np.arange(lengths.sum(), dtype=np.float64)
    entry = write_shard(
        build_shard_path(tmp_path, "train", 0),
        {"t.offsets": np.concatenate([[0], np.cumsum(lengths)]), "t.value": values},
    )
    write_manifest(tmp_path, Manifest(workload="t", size="s", seed=0, generator={}, splits={"train": (entry,)}))
    batch = ShardReader(tmp_path, "train").read([2, 0])
    assert batch["t.offsets"].tolist() == [0, 70_000, 120_000]
    np.testing.assert_array_equal(batch["t.value"], np.concatenate([values[50_001:], values[:50_000]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"atom.offsets": np.array([0, 3, 2, 6])}, "expected int64 offsets that rise from 0"),
        ({"atom.offsets": np.array([1, 3, 6])}, "expected int64 offsets that rise from 0"),
        ({"atom.offsets": np.array([0.0, 3.0, 6.0])}, "expected int64 offsets that rise from 0"),
        ({"atom.offsets": np.array([0, 3, 7])}, "'atom.x' has 6 rows; expected 7"),
        ({"energy": np.zeros(3)}, "found {'atom.offsets': 2, 'atom.x': 2, 'energy': 3}"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, np.ndarray], message: str) -> None:
    good = {"atom.offsets": np.array([0, 3, 6]), "atom.x": np.zeros(6), "energy": np.zeros(2)}
    path = build_shard_path(tmp_path, "train", 0)
    with pytest.raises(InputError, match=r"^.*$") as caught:
        write_shard(path, good | change)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_offsets_damaged_in_the_file_end_in_one_line(tmp_path: Path) -> None:
    make_ragged(tmp_path)
    path = build_shard_path(tmp_path, "train", 0)
    offsets = ragged_arrays(0, SAMPLES[0])["atom.offsets"].tobytes()
    whole = path.read_bytes()
    assert whole.count(offsets) == 1
    path.write_bytes(whole.replace(offsets, b"\xff" * len(offsets)))
    with pytest.raises(InputError, match=f"^{path}: dataset '/atom.offsets' is int64 "):
        ShardReader(tmp_path, "train").read([0])


@given(
    begin=st.integers(0, 9000),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60)),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60)
def test_the_pages_of_a_part_are_those_that_its_bytes_lie_on(begin: int, shape: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    part = [rng.permutation(n)[: rng.integers(1, n + 1)] for n in shape[:2]]
    part.append(np.arange(*sorted(rng.choice(shape[2] + 1, 2, replace=False))))
    runs = list_page_runs(begin, part, (*shape, 8))
    rows = [begin + 8 * ((a * shape[1] + b) * shape[2] + part[2][0]) for a in part[0] for b in part[1]]
    pages = {page for row in rows for page in range(row // 4096, (row + 8 * len(part[2]) - 1) // 4096 + 1)}
    assert [page for low, length in runs for page in range(low // 4096, (low + length) // 4096)] == sorted(pages)
    assert all(a + b < c for (a, b), (c, _) in pairwise(runs))  # runs that touch are one
