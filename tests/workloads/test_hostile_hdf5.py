"""Converters and shards read no other file through an HDF5 file, wherever in it the way out lies."""

import ast
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from mlhpc.suite.data.shards import open_hdf5
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow.generate import convert as convert_cosmoflow
from mlhpc.workloads.deepcam.generate import convert as convert_deepcam
from tests.fixtures.warm import warm_python

ROOT = Path(__file__).resolve().parents[2]
CONVERTERS: dict[str, Callable[..., None]] = {"cosmoflow": convert_cosmoflow, "deepcam": convert_deepcam}
WAYS = ("external link", "soft link", "external values", "virtual", "virtual without end")


def write_source(workload: str, folder: Path) -> list[Path]:
    """Write a small source of a workload. Return one file of each kind."""
    random = np.random.default_rng(1)
    if workload == "cosmoflow":
        folder.mkdir()
        for number in range(2):
            with h5py.File(folder / f"univ_{number}.hdf5", "w") as file:
                file["full"], file["unitPar"] = np.ones((16, 16, 16, 4), "i2"), np.zeros(4, "f4")
        return [folder / "univ_0.hdf5", folder / "univ_1.hdf5"]
    for name in ("train", "validation"):
        (folder / name).mkdir(parents=True)
        with h5py.File(folder / name / "data-1996-06-01-00-0.h5", "w") as file:
            file["climate/data"] = random.normal(250, 50, (64, 96, 16)).astype("f4")
            file["climate/labels_0"] = np.zeros((64, 96), "u1")
    with h5py.File(folder / "stats.h5", "w") as file:
        for name, value in {"mean": 250.0, "sqmean": 65_000.0, "minval": 0.0, "maxval": 500.0}.items():
            file[f"climate/{name}"] = np.full(16, value, "f4")
        file["climate/count"] = 1
    return [folder / "train" / "data-1996-06-01-00-0.h5", folder / "stats.h5"]


def list_datasets(path: Path) -> list[str]:
    names: list[str] = []
    with h5py.File(path) as file:
        file.visititems(lambda name, found: names.append(name) if isinstance(found, h5py.Dataset) else None)
    return names


def lead_out(path: Path, name: str, way: str, other: Path) -> None:
    """Have a dataset of a file lie in ``other``, which has the same name, type and shape as the dataset."""
    with h5py.File(path, "r+") as file:
        was = file[name]
        shape, kind, values = was.shape, was.dtype, was[...]
        with h5py.File(other, "w") as secret:
            secret[name] = values
            offset = secret[name].id.get_offset() or 0
        del file[name]
        if way == "external link":
            file[name] = h5py.ExternalLink(str(other), name)
        elif way == "soft link":
            file["way"], file[name] = h5py.ExternalLink(str(other), "/"), h5py.SoftLink(f"/way/{name}")
        elif way == "external values":
            if not shape:
                pytest.skip("HDF5 keeps no single value elsewhere")
            file.create_dataset(name, shape, kind, external=[(str(other), offset, values.nbytes)])
        else:
            shape = shape or (1,)
            endless = way.endswith("end")
            made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            size = (0, *shape[1:]) if endless else shape
            space = h5py.h5s.create_simple(size, (h5py.h5s.UNLIMITED, *shape[1:]) if endless else shape)
            if endless:
                start, count = (0,) * len(shape), (h5py.h5s.UNLIMITED, *(1,) * (len(shape) - 1))
                space.select_hyperslab(start, count, None, (1, *shape[1:]))
            made.set_virtual(space, str(other).encode(), name.encode(), space)
            h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(kind), space, made)


@pytest.mark.parametrize("workload", CONVERTERS)
def test_no_dataset_of_a_source_may_lie_in_another_file(workload: str, tmp_path: Path, world: World) -> None:
    count = 0
    for path in write_source(workload, tmp_path / "source"):
        whole = path.read_bytes()
        for name in list_datasets(path):
            for way in WAYS:
                path.write_bytes(whole)
                try:
                    lead_out(path, name, way, tmp_path / "secret.h5")
                except pytest.skip.Exception:
                    continue
                with pytest.raises(InputError, match="is (a link|kept in another file)") as caught:
                    CONVERTERS[workload](tmp_path / "source", tmp_path / "made", world=world)
                assert str(caught.value).startswith(f"{path}: "), (name, way)
                assert not (tmp_path / "made" / "manifest.json").exists()
                count += 1
        path.write_bytes(whole)
    assert count >= 20
    CONVERTERS[workload](tmp_path / "source", tmp_path / "made", world=world)


OPENER = """
import sys
from pathlib import Path
from mlhpc.suite.data.shards import open_hdf5
from mlhpc.suite.errors import InputError
for name in sys.argv[1:]:
    try:
        with open_hdf5(Path(name)):
            print("opened")
    except InputError as error:
        print(error)
"""


def test_the_other_file_is_not_even_opened(tmp_path: Path) -> None:
    """It is a named pipe: who opens it waits for a writer, and the process does not end."""
    paths = []
    for way in WAYS:
        paths.append(write_source("cosmoflow", tmp_path / way)[0])
        lead_out(paths[-1], "full", way, other := tmp_path / f"{way}.h5")
        other.unlink()
        os.mkfifo(other)
    paths.append(other)
    command = [*warm_python(), "-c", OPENER, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths), done.stderr
    assert all("is a link" in line or "is kept in another file" in line for line in lines[:-1]), lines
    assert lines[-1].endswith("is no file; expected an HDF5 file")


def test_what_is_declared_must_have_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("deep/full", (1 << 20, 1 << 12, 4), "i2", chunks=(1, 1 << 12, 4), compression="gzip")
        file["deep/deeper"] = file["deep"]  # a group that holds itself
    with pytest.raises(InputError, match=r"'deep/full' is of 34,359,738,368 bytes, in a file of"), open_hdf5(path):
        pass


def test_only_the_one_opener_reads_hdf5() -> None:
    found = []
    for top in ("suite", "workloads", "plugins", "analysis", "src"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                call = ast.unparse(node) if isinstance(node, ast.Call) else ""
                if call.startswith(("h5py.File(", "partial(h5py.File", "File(")) and "mode='w'" not in call:
                    found.append(str(path.relative_to(ROOT)))
    assert found == ["suite/data/shards.py"]
