"""The field's own HDF5 form goes in and out without losing a bit; whatever is wrong with it is one line."""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.deepcam import generate as converter
from mlhpc.workloads.deepcam.climate import Statistics, read_snapshot, read_statistics
from mlhpc.workloads.deepcam.generate import convert, fetch
from tests.fixtures.export_deepcam import export_hdf5, write_snapshot, write_statistics

SHAPE = (64, 96)


def fields(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(250, 50, (*SHAPE, 16)).astype(np.float32)


def labels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 3, SHAPE)


def by_hand(path: Path, seed: int, name: str = "labels_0") -> None:
    """A file as the public data have it, written with h5py alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["climate/data"] = fields(seed)
        file[f"climate/{name}"] = labels(seed)


def statistics_by_hand(folder: Path) -> None:
    with h5py.File(folder / "stats.h5", "w") as file:
        for name, value in {"mean": 250.0, "sqmean": 65_000.0, "minval": 0.0, "maxval": 500.0}.items():
            file[f"climate/{name}"] = np.full(16, value, dtype=np.float32)
        file["climate/count"] = 3  # a scalar, as summarize_data.py of the reference writes it


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "All-Hist"
    for number in range(3):
        by_hand(folder / "train" / f"data-1996-06-0{number + 1}-00-0.h5", number)
    by_hand(folder / "validation" / "data-1997-01-01-00-0.h5", 10)
    by_hand(folder / "test" / "data-1998-01-01-00-0.h5", 20)
    statistics_by_hand(folder)
    return folder


def test_public_files_become_shards_bit_for_bit(source: Path, tmp_path: Path, world: World) -> None:
    root = tmp_path / "shards"
    convert(source, root, world=world)
    manifest = read_manifest(root)
    assert (manifest.workload, manifest.size) == ("deepcam", "smoke")
    train = ShardReader(root, "train")
    assert (len(train), len(ShardReader(root, "validation"))) == (3, 1)
    found = train.read([0, 1, 2])
    for number in range(3):
        np.testing.assert_array_equal(found["x"][number], fields(number))
        np.testing.assert_array_equal(found["y"][number], labels(number))
    assert found["y"].dtype == np.uint8
    assert manifest.attributes["statistics"]["maxval"] == [500.0] * 16  # the source's own, not recomputed


def test_shards_become_public_files_and_shards_again(source: Path, tmp_path: Path, world: World) -> None:
    convert(source, tmp_path / "one", world=world)
    export_hdf5(tmp_path / "one", tmp_path / "files")
    with h5py.File(tmp_path / "files" / "train" / "data-00000001.h5") as file:
        assert file["climate/data"].dtype == np.float32
        assert file["climate/labels_0"].dtype == np.int64
    convert(tmp_path / "files", tmp_path / "two", world=world)
    for split in ("train", "validation"):
        names = [tmp_path / which / split / "shard_00000.h5" for which in ("one", "two")]
        assert names[0].read_bytes() == names[1].read_bytes()
    first, second = (read_manifest(tmp_path / which).attributes for which in ("one", "two"))
    assert first == second


def test_one_rank_of_two_lists_the_files(source: Path, assert_one_rank_lists: Callable[..., None]) -> None:
    assert_one_rank_lists(convert, source, "expected a folder", converter, "_list_files")


def test_the_small_set_of_2019_has_one_folder_and_another_key(tmp_path: Path, world: World) -> None:
    folder = tmp_path / "small"
    for number in range(10):
        by_hand(folder / f"data-{number:02d}.h5", number, name="labels")
    statistics_by_hand(folder)
    convert(folder, tmp_path / "shards", world=world)
    train, validation = (ShardReader(tmp_path / "shards", split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (9, 1)
    np.testing.assert_array_equal(validation.read([0])["x"][0], fields(8))


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "a.h5", fields(1), labels(1).astype(np.uint8))
    x, y = read_snapshot(tmp_path / "a.h5")
    np.testing.assert_array_equal(x, fields(1))
    np.testing.assert_array_equal(y, labels(1))
    statistics = Statistics(5, (1.5,) * 16, (3.0,) * 16, (0.0,) * 16, (4.0,) * 16)
    write_statistics(tmp_path / "stats.h5", statistics)
    assert read_statistics(tmp_path / "stats.h5") == statistics


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            value = change(file[name][...])
            del file[name]
            file[name] = value

    return apply


def with_value(index: tuple[int, ...], value: float) -> Callable[[np.ndarray], np.ndarray]:
    def apply(array: np.ndarray) -> np.ndarray:
        array[index] = value
        return array

    return apply


def without(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            del file[name]

    return apply


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "nan": (changed("climate/data", with_value((5, 7, 1), np.nan)), r"climate/data\[5, 7, 1\] is nan \(U850\)"),
    "infinite": (changed("climate/data", with_value((0, 0, 0), np.inf)), r"\[0, 0, 0\] is inf \(TMQ\)"),
    "class": (changed("climate/labels_0", with_value((3, 4), 7)),
              r"labels_0\[3, 4\] is 7: unknown class; classes: 0 back"),
    "negative": (changed("climate/labels_0", with_value((3, 4), -1)), r"labels_0\[3, 4\] is -1: unknown class"),
    "channels": (changed("climate/data", lambda x: x[..., :3]), r"is \(64, 96, 3\) float32, expected \(H, W, 16\)"),
    "flat": (changed("climate/data", lambda x: x[0]), r"climate/data has shape \(96, 16\), expected 3 dimensions"),
    "labels": (changed("climate/labels_0", lambda y: y[:-1]), r"labels_0 is \(63, 96\), expected \(64, 96\)"),
    "other": (lambda path: [changed(name, lambda a: a[:32])(path) for name in ("climate/data", "climate/labels_0")],
              r"sample of \(32, 96\) pixels among samples of \(64, 96\)"),
    "no labels": (without("climate/labels_0"), r"no dataset climate/labels_0; found: data"),
    "no group": (without("climate"), r"no dataset climate/data; found: no group 'climate'"),
    "truncated": (truncated, "not a readable HDF5 file"),
    "text": (lambda path: path.write_text("hello"), "not a readable HDF5 file"),
    "empty": (lambda path: path.write_bytes(b""), "not a readable HDF5 file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_one_line_with_its_name(kind: str, source: Path, tmp_path: Path, world: World) -> None:
    damage, words = DAMAGE[kind]
    path = source / "train" / "data-1996-06-02-00-0.h5"
    damage(path)
    with pytest.raises(InputError, match=words) as caught:
        convert(source, tmp_path / "shards", world=world)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "shards" / "manifest.json").exists()


def no_range(path: Path) -> None:
    changed("climate/maxval", with_value((4,), 0.0))(path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "missing: inputs are normalised by its climate/minval"),
        (without("climate/minval"), "no dataset climate/minval; found: count, maxval, mean, sqmean"),
        (changed("climate/maxval", lambda v: v[:3]), "climate/maxval: expected 16 finite numbers"),
        (changed("climate/minval", with_value((2,), np.nan)), "climate/minval: expected 16 finite numbers"),
        (no_range, "channel VBOT has minval 0 and maxval 0: it cannot be normalised"),
        (truncated, "not a readable HDF5 file"),
    ],
)
def test_statistics_are_checked_before_anything_is_written(
    damage: Callable[[Path], None], words: str, source: Path, tmp_path: Path, world: World
) -> None:
    damage(source / "stats.h5")
    with pytest.raises(InputError, match=words) as caught:
        convert(source, tmp_path / "shards", world=world)
    assert str(caught.value).startswith(f"{source / 'stats.h5'}: ")
    assert not (tmp_path / "shards").exists()


def test_folders_that_hold_no_data_set_are_refused(source: Path, tmp_path: Path, world: World) -> None:
    with pytest.raises(InputError, match="expected a folder of"):
        convert(source / "stats.h5", tmp_path / "shards", world=world)
    for path in (source / "validation").iterdir():
        path.unlink()
    with pytest.raises(InputError, match=r"no \*.h5 file for the validation split"):
        convert(source, tmp_path / "shards", world=world)
    odd = tmp_path / "odd"
    for split in ("train", "validation"):
        write_snapshot(odd / split / "a.h5", fields(0)[:48], labels(0)[:48].astype(np.uint8))
    statistics_by_hand(odd)
    with pytest.raises(InputError, match="samples of 48 x 96 pixels; expected 64 x 96"):
        convert(odd, tmp_path / "shards", world=world)


def test_fetch_says_where_the_data_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Globus.*mlhpc data convert deepcam"):
        fetch(tmp_path)
