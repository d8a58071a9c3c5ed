"""Croissant of a data set: checksums as in the manifest, fields as in the shards, and nothing that is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlhpc.plugins.exchange.croissant import render_croissant
from mlhpc.suite.data.manifest import Manifest, read_manifest, write_manifest
from mlhpc.suite.data.shards import write_shard
from mlhpc.suite.errors import InputError
from tests.fixtures.cli import mlhpc

OFFSETS = np.array([0, 2, 5, 9])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three samples with fixed and ragged datasets, then two of the other split."""
    folder = tmp_path / "data"
    entries = {}
    for split, rows, count in (("train", OFFSETS, 2), ("validation", OFFSETS[:3], 1)):
        samples = len(rows) - 1
        arrays = {
            "x": np.zeros((samples, 4, 6, 2), np.int16),
            "y": np.ones(samples, np.float64),
            "flag": np.zeros((samples, 3), np.bool_),
            "atom.offsets": rows,
            "atom.position": np.zeros((rows[-1], 3), np.float32),
            "atom.number": np.zeros(rows[-1], np.uint8),
        }
        entries[split] = tuple(write_shard(folder / split / f"shard_{n:05d}.h5", arrays) for n in range(count))
    write_manifest(
        folder, Manifest(workload="toy", size="mini", seed=3, generator={"name": "r", "version": 2}, splits=entries)
    )
    return folder


def described(root: Path) -> dict[str, Any]:
    found = json.loads(render_croissant(root, read_manifest(root), "About."))
    assert isinstance(found, dict)
    return found


def test_every_shard_is_a_file_with_the_checksum_of_the_manifest(root: Path) -> None:
    manifest, found = read_manifest(root), described(root)
    files = [each for each in found["distribution"] if each["@type"] == "cr:FileObject"]
    assert [(each["contentUrl"], each["sha256"], each["contentSize"]) for each in files] == [
        (entry.file, entry.sha256, f"{entry.bytes} B") for entry in manifest.shards
    ]
    assert found["identifier"] == f"sha256:{manifest.sha256}"
    assert (found["name"], found["version"], found["conformsTo"]) == (
        "toy-mini",
        "2.0.0",
        "http://mlcommons.org/croissant/1.1",
    )


def test_the_fields_are_the_datasets_of_the_shards(root: Path) -> None:
    train, validation = described(root)["recordSet"]
    shapes = {each["name"]: (each["dataType"], each.get("arrayShape")) for each in train["field"]}
    assert shapes == {
        "x": ("cr:Int16", "4,6,2"),
        "y": ("cr:Float64", None),
        "flag": ("sc:Boolean", "3"),
        "atom.position": ("cr:Float32", "-1,3"),
        "atom.number": ("cr:UInt8", "-1"),
    }
    assert all(each.get("isArray", False) == ("arrayShape" in each) for each in train["field"])
    assert all(each["source"]["fileSet"] == {"@id": "train-shards"} for each in train["field"])
    assert [each["name"] for each in validation["field"]] == [each["name"] for each in train["field"]]
    assert train["description"].startswith("The 6 samples")
    assert "atom.offsets" in next(each for each in train["field"] if each["name"] == "atom.number")["description"]


def test_every_identifier_is_there_once_and_every_source_exists(root: Path) -> None:
    found = described(root)
    fields = [each for records in found["recordSet"] for each in records["field"]]
    names = [each["@id"] for each in (*found["distribution"], *found["recordSet"], *fields)]
    assert len(names) == len(set(names))
    assert {each["source"]["fileSet"]["@id"] for each in fields} <= set(names)
    assert not {"license", "datePublished", "citeAs"} & set(found), "nobody has told them"
    assert str(root) not in json.dumps(found)


def test_no_data_are_read(root: Path) -> None:
    """The second shard is gone: only the header of the first of each split is needed."""
    before = described(root)
    (root / "train" / "shard_00001.h5").unlink()
    assert described(root) == before


@pytest.mark.parametrize("damage", [b"", b"no HDF5", None])
def test_a_shard_that_cannot_be_read_is_named(root: Path, damage: bytes | None) -> None:
    path = root / "validation" / "shard_00000.h5"
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    with pytest.raises(InputError, match="validation/shard_00000.h5"):
        described(root)


def test_a_dataset_of_texts_is_refused(tmp_path: Path) -> None:
    entry = write_shard(tmp_path / "train" / "shard_00000.h5", {"name": np.array([b"abc", b"def"])})
    write_manifest(tmp_path, Manifest(workload="toy", size="mini", seed=0, generator={}, splits={"train": (entry,)}))
    with pytest.raises(InputError, match=r"shard_00000.h5: dataset 'name' has type \|S3"):
        described(tmp_path)


def test_the_command_writes_beside_the_manifest_and_never_over_anything_else(root: Path) -> None:
    for _ in range(2):
        done = mlhpc("data", "describe", root)
        assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((root / "croissant.json").read_text())["description"].startswith("Data of toy, size mini.")
    (root / "croissant.json").write_text("mine")
    done = mlhpc("data", "describe", root)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "exists already with other content" in done.stderr
    assert (root / "croissant.json").read_text() == "mine"
    assert mlhpc("data", "describe", root, "-o", root.parent / "other.json").returncode == 0
    assert mlhpc("data", "verify", root, "--deep").returncode == 0


@pytest.mark.parametrize("what", ["nothing", "empty", "manifest"])
def test_what_is_no_data_set_is_one_line(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "data"
    if what != "nothing":
        folder.mkdir()
    if what == "manifest":
        (folder / "manifest.json").write_text('{"version": 7}')
    done = mlhpc("data", "describe", folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert str(folder) in done.stderr
