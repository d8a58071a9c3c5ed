"""The public forms come in whole, broken ones end in one line, and no pickle runs code."""

import lzma
import os
import pickle
import pickletools
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from msgspec import structs

from mlhpc.suite.commands.data import data
from mlhpc.suite.data.build import SPLITS
from mlhpc.suite.data.manifest import compare_files, read_manifest, write_manifest
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.open_catalyst import convert as converter
from mlhpc.workloads.open_catalyst.convert import (
    SYMBOLS,
    LmdbFile,
    convert,
    fetch,
    load_restricted,
    read_extxyz,
    read_record_fields,
)
from mlhpc.workloads.open_catalyst.structures import Structure
from tests.fixtures.export_open_catalyst import export_lmdb
from tests.workloads.open_catalyst.conftest import random_structure
from tests.workloads.tiny import make

EXTXYZ = """3
Lattice="6.0 0.0 0.0 0.0 7.0 0.0 0.0 0.0 20.0" Properties=species:S:1:pos:R:3:move_mask:L:1:tags:I:1:forces:R:3 \
energy=-3.5 free_energy=-3.6 pbc="T T T"
Cu 0.0 0.0 5.0 F 0 0.1 0.2 0.3
Pt 2.5 0.0 5.0 T 1 -0.1 0.25 0.0
O  2.5 0.5 7.0 T 2 0.0 0.0 -0.5
"""


def write_frames(path: Path, frames: int, text: str = EXTXYZ) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "wt") as file:
        file.write(text * frames)
    return path


VERSIONS = ("1.7", "2.0", "2.8")


def public_data(structure: Structure, *, version: str) -> Any:
    """What torch_geometric pickles, without it: attributes before 2.0, a store since, which in 2.8 names classes beside it."""
    fields = {
        "pos": torch.tensor(structure.position, dtype=torch.float32),
        "cell": torch.tensor(structure.cell, dtype=torch.float32)[None],
        "atomic_numbers": torch.tensor(structure.number, dtype=torch.float32), "natoms": len(structure.number),
        "edge_index": torch.zeros(2, 7, dtype=torch.int64), "force": torch.tensor(structure.force, dtype=torch.float32),
        "fixed": torch.tensor(structure.fixed, dtype=torch.float32), "tags": torch.tensor(structure.tag),
        "y": structure.energy, "sid": structure.trajectory, "fid": structure.frame,
    }  # fmt: skip
    data = sys.modules["torch_geometric.data.data"].Data()
    if version == "1.7":
        data.__dict__.update(fields)
        return data
    storage = sys.modules["torch_geometric.data.storage"]
    store = storage.GlobalStorage()
    store.__dict__.update(_mapping=fields, _parent=data)
    data.__dict__.update(_store=store)
    if version == "2.8":
        names = sys.modules["torch_geometric.data.data"]
        data.__dict__.update(_edge_attr_cls=names.DataEdgeAttr, _tensor_attr_cls=names.DataTensorAttr)
        kinds = defaultdict(set, {storage.AttrType("node"): {"pos", "force"}})  # once an attribute was asked for
        store.__dict__.update(_cached_attr=kinds)
    return data


@pytest.fixture
def geometric(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names to pickle classes by. They are gone again when the pickles are read, as on a machine without the package."""
    for package in ("torch_geometric", "torch_geometric.data"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    classes = {"data": ("Data", "DataEdgeAttr", "DataTensorAttr"), "storage": ("GlobalStorage",)}
    for place, names in classes.items():
        fake = types.ModuleType(f"torch_geometric.data.{place}")
        for name in names:
            setattr(fake, name, type(name, (), {"__module__": fake.__name__}))
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    storage = sys.modules["torch_geometric.data.storage"]
    kinds = Enum("AttrType", {"NODE": "node"}, module=storage.__name__)
    monkeypatch.setattr(storage, "AttrType", kinds, raising=False)


def write_lmdb(path: Path, values: list[bytes], *, length: bool = True) -> Path:
    lmdb = pytest.importorskip("lmdb")
    path.parent.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(path), subdir=False, map_size=1 << 24) as environment, environment.begin(write=True) as put:
        for index, value in enumerate(values):
            put.put(str(index).encode(), value)
        if length:
            put.put(b"length", pickle.dumps(len(values)))
    return path


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("length", "protocol"), [(False, -1), (True, -1), (True, 2)])
def test_the_references_lmdb_files_are_read_without_torch_geometric(
    geometric: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, length: bool, protocol: int
) -> None:
    written = [random_structure(seed, atoms=4 + seed) for seed in range(3)]
    values = [pickle.dumps(public_data(s, version=version), protocol) for s in written]
    path = write_lmdb(tmp_path / "a.lmdb", values, length=length)
    for name in ("torch_geometric.data.data", "torch_geometric.data.storage"):
        monkeypatch.delitem(sys.modules, name)
    found = list(LmdbFile(path).structures(0, 3))
    for before, after in zip(written, found, strict=True):
        np.testing.assert_allclose(after.position, before.position, rtol=1e-6)
        np.testing.assert_allclose(after.cell, before.cell, rtol=1e-6)
        np.testing.assert_array_equal(after.number, before.number)
        np.testing.assert_array_equal(after.fixed, before.fixed)
        assert (after.energy, after.trajectory, after.frame) == (before.energy, before.trajectory, before.frame)


class Malicious:
    """What an attacker puts into a data file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["PWNED"],)


@pytest.fixture
def pwned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pwned"
    monkeypatch.setenv("PWNED", str(path))
    return path


def test_a_malicious_pickle_is_refused_and_runs_nothing(pwned: Path, tmp_path: Path) -> None:
    evil = pickle.dumps(Malicious())
    with pytest.raises(pickle.UnpicklingError, match=r"asks for posix\.mkdir, which data do not need: refused"):
        load_restricted(evil)
    path = write_lmdb(tmp_path / "evil.lmdb", [evil])
    with pytest.raises(InputError, match=rf"^{path}: structure 0: it asks for posix\.mkdir"):
        list(LmdbFile(path).structures(0, 1))
    assert not pwned.exists()


def test_a_pickle_hidden_inside_a_tensor_runs_nothing(pwned: Path) -> None:
    """Storages are bytes that torch.load unpickles: the second way in."""

    class Hidden:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.storage._load_from_bytes, (pickle.dumps(Malicious(), 2),)

    with pytest.raises(pickle.UnpicklingError):
        load_restricted(pickle.dumps(Hidden()))
    assert not pwned.exists()


@pytest.mark.parametrize("encoding", ["idna", "punycode", "rot13"])
def test_bytes_have_the_one_encoding_that_pickle_gives_them(encoding: str) -> None:
    text = pickle.dumps(b"\x80 bytes", 2)
    assert load_restricted(text) == b"\x80 bytes"
    with pytest.raises(pickle.UnpicklingError, match=rf"^bytes in the encoding '{encoding}': refused$"):
        load_restricted(
            text.replace(b"X\x06\x00\x00\x00latin1", b"X" + bytes([len(encoding), 0, 0, 0]) + encoding.encode())
        )


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ["builtins eval", "os system", "torch load", "subprocess Popen", "functools partial"])
def test_no_other_name_is_looked_up(name: str, protocol: int) -> None:
    module, attribute = name.split()
    text = pickle.dumps(getattr(__import__(module), attribute), protocol)
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        load_restricted(text)


def test_only_an_explicit_word_of_trust_lets_pickles_run(pwned: Path, tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "evil.lmdb", [pickle.dumps(Malicious())])
    with pytest.raises(InputError, match="no field 'pos'"):
        list(LmdbFile(path, trust_pickles=True).structures(0, 1))
    assert pwned.exists()


def test_the_command_line_has_the_word_of_trust(pwned: Path, tmp_path: Path) -> None:
    for split in ("train", "val_id"):
        (tmp_path / "source" / split).mkdir(parents=True)
        write_lmdb(tmp_path / "source" / split / "evil.lmdb", [pickle.dumps(Malicious())])
    words = ["convert", "open_catalyst", str(tmp_path / "source"), "-o", str(tmp_path / "data")]
    refused = CliRunner().invoke(data, words)
    assert "refused" in str(refused.exception)
    assert not pwned.exists()
    trusted = CliRunner().invoke(data, [*words, "--trust-pickles"])
    assert "no field 'pos'" in str(trusted.exception)
    assert pwned.exists()


def test_records_have_no_behaviour(geometric: None) -> None:
    record = load_restricted(pickle.dumps(public_data(random_structure(0), version="1.7")))
    assert read_record_fields(record)["natoms"] == 7
    assert type(record).__module__.startswith("mlhpc.workloads.")


def test_a_record_cannot_pose_as_an_array(geometric: None, tmp_path: Path) -> None:
    """numpy reads memory at the address that ``__array_interface__`` of an instance gives."""
    data = public_data(random_structure(0), version="1.7")
    data.pos = type(data)()
    data.pos.__dict__["__array_interface__"] = {"data": (8, False), "shape": (7, 3), "typestr": "<f8", "version": 3}
    path = write_lmdb(tmp_path / "a.lmdb", [pickle.dumps(data, -1)])
    with pytest.raises(InputError, match=f"^{path}: structure 0: no field 'pos'"):
        list(LmdbFile(path).structures(0, 1))


def test_lmdb_damage_is_one_line_with_file_and_index(geometric: None, tmp_path: Path) -> None:
    good = public_data(random_structure(0), version="1.7")
    path = write_lmdb(tmp_path / "a.lmdb", [pickle.dumps(good, -1), pickle.dumps(good, -1)[:-30]])
    with pytest.raises(InputError, match=rf"^{path}: structure 1: [^\n]*$"):
        list(LmdbFile(path).structures(0, 2))
    del good.force
    path = write_lmdb(tmp_path / "b.lmdb", [pickle.dumps(good, -1)])
    with pytest.raises(InputError, match=rf"^{path}: structure 0: no field 'force'"):
        list(LmdbFile(path).structures(0, 1))
    (tmp_path / "c.lmdb").write_bytes(b"nothing" * 1000)
    with pytest.raises(InputError, match=r"c\.lmdb: not a readable LMDB file"):
        LmdbFile(tmp_path / "c.lmdb")


@pytest.mark.parametrize("suffix", [".extxyz", ".extxyz.xz"])
def test_extended_xyz_is_read_with_its_text_file(tmp_path: Path, suffix: str) -> None:
    path = write_frames(tmp_path / f"0{suffix}", 2)
    (tmp_path / "0.txt").write_text("random77,frame5,-1.5\nrandom78,6,-2.5\n")
    first, second = read_extxyz(path, trajectory=9)
    assert (first.trajectory, first.frame, first.energy) == (77, 5, -2.0)
    assert (second.trajectory, second.frame, second.energy) == (78, 6, -1.0)
    assert first.number.tolist() == [29, 78, 8]
    assert first.tag.tolist() == [0, 1, 2]
    assert first.fixed.tolist() == [True, False, False]
    np.testing.assert_array_equal(first.cell, np.diag([6.0, 7.0, 20.0]))
    np.testing.assert_array_equal(first.force[1], [-0.1, 0.25, 0.0])


def test_files_that_ase_writes_are_read(tmp_path: Path) -> None:
    ase = pytest.importorskip("ase")
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.constraints import FixAtoms
    from ase.io import write

    made = random_structure(3)
    atoms = ase.Atoms(made.number, positions=made.position, cell=made.cell, pbc=True, tags=made.tag)
    atoms.set_constraint(FixAtoms(mask=made.fixed))
    atoms.calc = SinglePointCalculator(atoms, energy=made.energy, forces=made.force)
    write(tmp_path / "a.extxyz", [atoms, atoms])
    (found, again) = read_extxyz(tmp_path / "a.extxyz", trajectory=4)
    np.testing.assert_allclose(found.position, made.position, atol=1e-7)
    np.testing.assert_allclose(found.cell, made.cell, atol=1e-7)
    np.testing.assert_array_equal(found.fixed, made.fixed)
    np.testing.assert_array_equal(found.tag, made.tag)
    np.testing.assert_allclose(found.force[~made.fixed], made.force[~made.fixed], atol=1e-7)
    assert (found.trajectory, again.frame) == (4, 1)


def test_symbols_are_those_of_the_periodic_table() -> None:
    assert len(SYMBOLS) == 95
    data = pytest.importorskip("ase.data")
    assert data.chemical_symbols[:95] == SYMBOLS


BROKEN = [
    (("6.0 0.0 0.0", "nan 0.0 0.0"), r"cell has nan at \[0, 0\]"),
    (("0.0 0.0 20.0", "0.0 0.0 0.0"), "has no volume"),
    (("2.5 0.5 7.0 T 2 0.0", "2.5 0.5 7.0 T 2 inf"), r"force has inf at \[2, 0\]"),
    (("Pt 2.5 0.0 5.0", "Pt nan 0.0 5.0"), r"position has nan at \[1, 0\]"),
    (("energy=-3.5", "energy=nan"), "energy has nan"),
    (("O  2.5", "Xx 2.5"), "unknown element 'Xx'"),
    (("T 2 0.0", "T 7 0.0"), "tag has values from 0 to 7, expected 0 to 2"),
    ((" T ", " F "), "all atoms are fixed"),
    (("Pt 2.5 0.0 5.0", "Pt 0.0 0.0 5.0"), "have the same position"),
    (("Cu 0.0 0.0 5.0", "Cu 0.0 0.0"), "atom 0 has 8 columns, Properties say 9"),
    ((":forces:R:3", ""), "atom 0 has 9 columns"),
    (('Lattice="6.0 0.0 0.0 0.0 7.0 0.0 0.0 0.0 20.0"', ""), "no 'Lattice'"),
    (("3\n", "4\n"), "expected a number of atoms|ends inside it|columns"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_structure_is_one_line_with_file_and_index(
    tmp_path: Path, world: World, change: tuple[str, str], message: str
) -> None:
    source = tmp_path / "source"
    write_frames(source / "validation" / "0.extxyz", 1)
    path = write_frames(source / "train" / "0.extxyz", 1, EXTXYZ + EXTXYZ.replace(*change))
    with pytest.raises(InputError, match=rf"^{path}: structure 1: [^\n]*({message})"):
        convert(source, tmp_path / "data", world=world)
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_structure_without_an_edge_is_refused(tmp_path: Path, world: World) -> None:
    lonely = EXTXYZ.replace("6.0 0.0 0.0 0.0 7.0", "90.0 0.0 0.0 0.0 90.0").replace("3\n", "1\n", 1)
    lonely = "\n".join(lonely.splitlines()[:2]) + "\nCu 0.0 0.0 5.0 T 0 0.1 0.2 0.3\n"
    for split in ("train", "val_id"):
        write_frames(tmp_path / "source" / split / "0.extxyz", 1, lonely)
    with pytest.raises(InputError, match=r"0\.extxyz: structure 0: no edge: no two of the 1 atoms within 6 angstrom"):
        convert(tmp_path / "source", tmp_path / "data", world=world)


def test_conversion_gives_a_complete_data_set_of_both_forms(geometric: None, tmp_path: Path, world: World) -> None:
    source = tmp_path / "source"
    written = [random_structure(seed, atoms=5) for seed in range(3)]
    write_lmdb(source / "train" / "a.lmdb", [pickle.dumps(public_data(each, version="2.8"), -1) for each in written])
    write_frames(source / "val_id" / "0.extxyz.xz", 2)
    convert(source, tmp_path / "data", world=world)
    manifest = read_manifest(tmp_path / "data")
    assert (manifest.samples("train"), manifest.samples("validation")) == (3, 2)
    assert compare_files(tmp_path / "data", deep=True) == []
    batch = ShardReader(tmp_path / "data", "train").read([2, 0])
    np.testing.assert_allclose(batch["atom.position"][5:], written[0].position, rtol=1e-6)
    assert batch["trajectory"].tolist() == [2, 0]
    stored = sum(entry.bytes for entry in manifest.shards)
    assert stored < 200_000


def test_one_rank_of_two_lists_the_files(tmp_path: Path, assert_one_rank_lists: Callable[..., None]) -> None:
    source = tmp_path / "source"
    export_lmdb(make("open_catalyst", tmp_path / "tiny", World.create(None)), source)
    write_frames(source / "train" / "0.extxyz.xz", 2)
    assert_one_rank_lists(convert, source, "train data are missing", converter, "_list_files")


def test_export_and_conversion_are_inverse(tiny_data: Path, tmp_path: Path, world: World) -> None:
    export_lmdb(tiny_data, tmp_path / "lmdb")
    convert(tmp_path / "lmdb", tmp_path / "again", world=world)
    assert compare_files(tmp_path / "again", deep=True) == []
    for split in SPLITS:
        before, after = ShardReader(tiny_data, split), ShardReader(tmp_path / "again", split)
        written, found = before.read(range(len(before))), after.read(range(len(after)))
        assert written.keys() == found.keys()
        for name in written.keys() - {"edges", "triplets"}:  # of another neighbourhood after conversion
            np.testing.assert_array_equal(found[name], written[name], err_msg=name)


def test_an_exported_sample_is_data_of_torch_geometric_with_the_edges_of_the_data_set(
    tiny_data: Path, tmp_path: Path
) -> None:
    lmdb = pytest.importorskip("lmdb")
    export_lmdb(tiny_data, tmp_path / "lmdb")
    (path, *_) = sorted((tmp_path / "lmdb" / "val_id").iterdir())
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as environment, environment.begin() as found:
        value, length = found.get(b"1"), pickle.loads(found.get(b"length"))
    named = {text for code, text, _ in pickletools.genops(value) if code.name in ("GLOBAL", "STACK_GLOBAL")}
    tensors = {"torch._utils _rebuild_tensor_v2", "torch.storage _load_from_bytes", "collections OrderedDict"}
    assert named == {"torch_geometric.data.data Data", *tensors}
    reader, fields = ShardReader(tiny_data, "validation"), read_record_fields(load_restricted(value))
    stored = reader.read([1])
    assert fields["edge_index"].shape == (2, stored["edges"][0])
    assert length == read_manifest(tiny_data).splits["validation"][0].samples
    source, target = fields["edge_index"]
    vector = fields["pos"][source] + fields["cell_offsets"] @ fields["cell"][0] - fields["pos"][target]
    cutoff = read_manifest(tiny_data).attributes["cutoff_angstrom"]
    assert 0.5 < np.linalg.norm(vector, axis=1).min() < np.linalg.norm(vector, axis=1).max() <= cutoff + 1e-5


def test_data_of_another_workload_are_not_exported(tiny_data: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tiny_data)
    write_manifest(tiny_data, structs.replace(manifest, workload="cosmoflow"))
    with pytest.raises(InputError, match=f"^{tiny_data}: holds data of cosmoflow, not of open_catalyst"):
        export_lmdb(tiny_data, tmp_path / "lmdb")


def test_a_source_without_splits_or_files_is_refused(tmp_path: Path, world: World) -> None:
    with pytest.raises(InputError, match="no folder 'train' in it: train data are missing"):
        convert(tmp_path, tmp_path / "data", world=world)
    (tmp_path / "train").mkdir()
    with pytest.raises(InputError, match=r"train: no \*\.lmdb and no \*\.extxyz"):
        convert(tmp_path, tmp_path / "data", world=world)


def test_frames_of_one_system_in_both_splits_are_refused(tmp_path: Path, world: World) -> None:
    for split in ("train", "val_id"):
        write_frames(tmp_path / "source" / split / "0.extxyz", 1)
        (tmp_path / "source" / split / "0.txt").write_text("random77,5,-1.5\n")
    with pytest.raises(InputError, match="trajectory 77 is in the training and in the validation split"):
        convert(tmp_path / "source", tmp_path / "data", world=world)


def test_fetch_says_where_the_data_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="s2ef_train_2M"):
        fetch(tmp_path)
