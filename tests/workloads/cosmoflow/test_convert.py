"""The public data's forms become shards, and shards the reference's folder, without losing a count."""

import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from mlhpc.suite.data.manifest import compare_files, read_manifest
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow import convert as converter
from mlhpc.workloads.cosmoflow.convert import read_tfrecord
from mlhpc.workloads.cosmoflow.generate import convert, fetch
from tests.fixtures.export_cosmoflow import export_tfrecord, write_tfrecord


@pytest.fixture(autouse=True)
def small_cubes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of 8^3 voxels, so that a universe of 16^3 has eight."""
    monkeypatch.setitem(converter.SIZE_OF_CUBE, 8, ("smoke", "none"))
    monkeypatch.setattr(converter, "PUBLIC_CUBE", 8)


def write_universe(path: Path, seed: int, side: int = 16) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    counts = random.poisson(1, (side,) * 3 + (4,)).astype(np.int16)
    targets = random.uniform(-1, 1, 4).astype(np.float32)
    with h5py.File(path, "w") as file:
        file["full"], file["unitPar"] = counts, targets
        file["namePar"] = np.array(["Omega_m", "sigma_8", "N_spec", "H_0"], dtype="S")
        file["physPar"], file["redshifts"] = targets, np.array([3, 1.5, 0.5, 0])
    return counts, targets


def test_universes_become_cubes_split_by_universe(tmp_path: Path, world: World) -> None:
    source = tmp_path / "hdf5"
    source.mkdir()
    universes = [write_universe(source / f"univ_ics_2019-03_a{i:08d}.hdf5", i) for i in range(3)]
    convert(source, tmp_path / "d", world=world)
    assert compare_files(tmp_path / "d", deep=True) == []
    train, validation = (ShardReader(tmp_path / "d", split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (16, 8)
    data = train.read(range(16))
    np.testing.assert_array_equal(data["x"][0], universes[0][0][:8, :8, :8])
    np.testing.assert_array_equal(data["x"][15], universes[1][0][8:, 8:, 8:])
    np.testing.assert_array_equal(data["y"], np.repeat([universes[0][1], universes[1][1]], 8, axis=0))
    manifest = read_manifest(tmp_path / "d")
    assert manifest.attributes["periodic"] is False
    assert (manifest.size, manifest.generator["form"]) == ("smoke", "hdf5")


def test_export_and_conversion_are_inverse(tiny_data: Path, tmp_path: Path, world: World) -> None:
    export_tfrecord(tiny_data, tmp_path / "tf")
    files = sorted((tmp_path / "tf").rglob("*.tfrecord"))
    assert len(files) == 17
    assert files[0].parent.name == "train"
    assert len(list(read_tfrecord(files[0]))) == 1
    convert(tmp_path / "tf", tmp_path / "back", world=world)
    for split, n in (("train", 12), ("validation", 5)):
        before, after = (ShardReader(root, split).read(range(n)) for root in (tiny_data, tmp_path / "back"))
        np.testing.assert_array_equal(before["x"], after["x"])
        np.testing.assert_array_equal(before["y"], after["y"])
    first, second = read_manifest(tiny_data).attributes, read_manifest(tmp_path / "back").attributes
    assert first == second  # a box per sample, so still periodic


def test_cubes_of_one_universe_in_both_splits_are_refused(tmp_path: Path, world: World) -> None:
    sample = (np.ones((8, 8, 8, 4), np.int16), np.zeros(4, np.float32))
    for split, name in (("train", "univ_a_000"), ("train", "univ_b_000"), ("validation", "univ_a_001")):
        (tmp_path / "tf" / split).mkdir(parents=True, exist_ok=True)
        write_tfrecord(tmp_path / "tf" / split / f"{name}.tfrecord", [sample])
    with pytest.raises(InputError, match="universe 0 is in the training and in the validation split"):
        convert(tmp_path / "tf", tmp_path / "d", world=world)


def test_one_rank_of_two_lists_the_files(tmp_path: Path, assert_one_rank_lists: Callable[..., None]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(9):
        write_universe(source / f"univ_{number}.hdf5", number)
    assert_one_rank_lists(convert, source, "expected a folder of", converter, "_list_files")


def test_a_folder_without_splits_is_split_by_universe(tmp_path: Path, world: World) -> None:
    (tmp_path / "tf").mkdir()
    for universe in range(10):
        for cube in range(2):
            x = np.full((8, 8, 8, 4), universe, np.int16)
            write_tfrecord(tmp_path / "tf" / f"univ_{universe}_{cube:03d}.tfrecord", [(x, np.zeros(4, np.float32))])
    convert(tmp_path / "tf", tmp_path / "d", world=world)
    validation = ShardReader(tmp_path / "d", "validation")
    assert validation.read(range(len(validation)))["x"][:, 0, 0, 0, 0].tolist() == [8, 8]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "truncated"),
        (
            lambda path: write_tfrecord(path, [(np.zeros((4, 4, 4, 4), np.int16), np.zeros(4, np.float32))]),
            r"4\^3 voxels among",
        ),
        (lambda path: path.write_bytes(b"not a record at all"), "offset 0"),
    ],
)
def test_a_damaged_file_is_named_and_no_manifest_is_left(tmp_path: Path, world: World, damage, words: str) -> None:
    (tmp_path / "tf").mkdir()
    for universe in range(4):
        path = tmp_path / "tf" / f"univ_{universe}_000.tfrecord"
        write_tfrecord(path, [(np.ones((8, 8, 8, 4), np.int16), np.zeros(4, np.float32))])
    damage(tmp_path / "tf" / "univ_2_000.tfrecord")
    with pytest.raises(InputError, match=rf"univ_2_000\.tfrecord: .*{words}"):
        convert(tmp_path / "tf", tmp_path / "d", world=world)
    assert not (tmp_path / "d" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.pop("unitPar"), "no dataset 'unitPar'; datasets: full"),
        (lambda f: (f.pop("full"), f.create_dataset("full", data=np.zeros((16, 16, 8, 4), np.int16))), "expected"),
        (lambda f: (f.pop("unitPar"), f.create_dataset("unitPar", data=[0.0, np.nan, 0, 0])), "finite"),
        (lambda f: f["full"].__setitem__((0, 0, 0, 0), -1), "counts from -1"),
    ],
)
def test_a_universe_of_another_form_is_named(tmp_path: Path, world: World, change, words: str) -> None:
    (tmp_path / "h").mkdir()
    for i in range(2):
        write_universe(tmp_path / "h" / f"univ_{i}.hdf5", i)
    with h5py.File(tmp_path / "h" / "univ_1.hdf5", "a") as file:
        change(file)
    with pytest.raises(InputError, match=rf"univ_1\.hdf5: .*{words}"):
        convert(tmp_path / "h", tmp_path / "d", world=world)


def test_nothing_to_convert_is_an_error(tmp_path: Path, world: World) -> None:
    with pytest.raises(InputError, match=r"no \*\.tfrecord and no \*\.hdf5"):
        convert(tmp_path, tmp_path / "d", world=world)


def test_fetch_says_where_the_data_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no internet.*portal\.nersc\.gov") as caught:
        fetch(tmp_path / "public")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python unpacks no stranger's archive")
def test_fetch_checks_and_unpacks_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("data")
    archive = tmp_path / "small.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "a.txt", "train/a.txt")
    sums = archive.with_name("small.tgz.sha256")
    with pytest.raises(InputError, match="write it with sha256sum"):
        fetch(tmp_path / "public", source=str(archive))
    sums.write_text("0" * 64 + "  small.tgz\n")
    with pytest.raises(InputError, match="sha256 is"):
        fetch(tmp_path / "public", source=str(archive))
    assert not (tmp_path / "public").exists()
    sums.write_text(hashlib.sha256(archive.read_bytes()).hexdigest() + "  small.tgz\n")
    fetch(tmp_path / "public", source=str(archive))
    assert (tmp_path / "public" / "train" / "a.txt").read_text() == "data"


def test_an_old_python_unpacks_no_archive_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "small.tgz"
    with tarfile.open(archive, "w:gz"):
        pass
    archive.with_name("small.tgz.sha256").write_text(hashlib.sha256(archive.read_bytes()).hexdigest() + "  small.tgz\n")
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    with pytest.raises(InputError, match=r"expected 3\.11\.4 or newer: unpack it yourself into .*public"):
        fetch(tmp_path / "public", source=str(archive))


def test_fetch_copies_and_checks_a_folder(tmp_path: Path) -> None:
    (tmp_path / "from" / "train").mkdir(parents=True)
    (tmp_path / "from" / "train" / "a").write_text("data")
    digest = hashlib.sha256(b"data").hexdigest()
    (tmp_path / "from" / "SHA256SUMS").write_text(f"{digest}  ./train/a\n")
    fetch(tmp_path / "public", source=str(tmp_path / "from"))
    assert (tmp_path / "public" / "train" / "a").read_text() == "data"
    (tmp_path / "from" / "train" / "a").write_text("dat4")
    with pytest.raises(InputError, match="sha256 is"):
        fetch(tmp_path / "again", source=str(tmp_path / "from"))
    assert not (tmp_path / "again" / "train" / "a").exists()
