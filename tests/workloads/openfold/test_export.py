"""The exported layout holds what the data set holds: atoms by name, alignments, templates as hits, splits as dates."""

import csv
import json
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from mlhpc.suite.data.build import SPLITS
from mlhpc.suite.data.manifest import read_manifest, write_manifest
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.convert import convert
from mlhpc.workloads.openfold.features import Protein
from mlhpc.workloads.openfold.mmcif import read_a3m
from mlhpc.workloads.openfold.public.structures import ATOMS_37
from mlhpc.workloads.openfold.shard_form import convert_to_proteins
from tests.fixtures.export_openfold import (
    ALIGNMENTS,
    MOST_ENTRIES,
    RELEASED,
    STRUCTURES,
    entry_name,
    export_preprocessed,
)


@pytest.fixture
def exported(tiny_data: Path, tmp_path: Path) -> Path:
    export_preprocessed(tiny_data, tmp_path / "out")
    return tmp_path / "out"


def proteins(root: Path) -> list[tuple[str, int, Protein]]:
    found = []
    for split in SPLITS:
        reader = ShardReader(root, split)
        arrays = reader.read(range(len(reader)))
        found += [(split, int(n), each) for n, each in zip(arrays["family"], convert_to_proteins(arrays), strict=True)]
    return found


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / STRUCTURES / "chains.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def entry(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads((folder / STRUCTURES / "dicts" / name[1:3]).read_bytes())[name[:4]]
    return found


def atoms_by_name(found: dict[str, Any], position: int) -> dict[str, np.ndarray]:
    arrays = {}
    for name, dtype in (("all_atom_positions", np.float32), ("all_atom_mask", bool)):
        content, shape = found["atoms"]["A"][name]
        arrays[name] = np.frombuffer(zlib.decompress(content), dtype).reshape(shape)
    mask = arrays["all_atom_mask"][position]
    assert not arrays["all_atom_positions"][position][~mask].any()
    return {ATOMS_37[slot]: arrays["all_atom_positions"][position, slot] for slot in np.flatnonzero(mask)}


def ours_by_name(aatype: int, atoms: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    return {residues.ATOM_NAMES[aatype][slot]: atoms[slot] for slot in np.flatnonzero(mask)}


def same_atoms(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_chains_have_the_sequence_atoms_and_cluster_of_the_data(tiny_data: Path, exported: Path) -> None:
    chains = [row for row in rows(exported) if row["pdb_cluster_id"] != "-1"]
    for (split, family, protein), row in zip(proteins(tiny_data), chains, strict=True):
        found = entry(exported, row["pdb_id"])
        assert row["sequence"] == found["sequences"]["A"] == residues.decode(protein.aatype)
        assert int(row["pdb_cluster_id"]) == family
        assert (row["release_date"] <= RELEASED["train"]) == (split == "train")
        assert row["release_date"] == found["release_date"]
        for position, kind in enumerate(protein.aatype.tolist()):
            ours = ours_by_name(kind, protein.atoms[position], protein.atom_mask[position])
            assert same_atoms(atoms_by_name(found, position), ours)


def test_alignments_are_where_the_index_says(tiny_data: Path, exported: Path, tmp_path: Path) -> None:
    index = json.loads((exported / ALIGNMENTS / "super.index").read_text())
    chains = [row["pdb_chain_id"] for row in rows(exported) if row["pdb_cluster_id"] != "-1"]
    assert list(index) == chains
    for (_, _, protein), name in zip(proteins(tiny_data), chains, strict=True):
        files = {file: (begin, size) for file, begin, size in index[name]["files"]}
        begin, size = files["uniref90_hits.a3m"]
        text = (exported / ALIGNMENTS / index[name]["db"]).read_bytes()[begin : begin + size]
        (tmp_path / "a.a3m").write_bytes(text)
        msa, deletions = read_a3m(tmp_path / "a.a3m")
        np.testing.assert_array_equal(msa, protein.msa)
        np.testing.assert_array_equal(deletions, protein.deletions)


def test_a_template_is_a_hit_and_an_entry_released_before(tiny_data: Path, exported: Path) -> None:
    index = json.loads((exported / ALIGNMENTS / "super.index").read_text())
    known = {row["pdb_chain_id"]: row for row in rows(exported)}
    chains = [name for name, row in known.items() if row["pdb_cluster_id"] != "-1"]
    for (_, _, protein), name in zip(proteins(tiny_data), chains, strict=True):
        begin, size = next((begin, size) for file, begin, size in index[name]["files"] if file == "pdb70_hits.hhr")
        text = (exported / ALIGNMENTS / index[name]["db"]).read_bytes()[begin : begin + size].decode()
        query = re.findall(r"^Q query {9} +(\d+) ([A-Z-]+) +(\d+) \(\d+\)$", text, re.MULTILINE)
        hits = re.findall(r"^T (\w+) +1 ([A-Z-]+) +\d+ \(\d+\)$", text, re.MULTILINE)
        assert len(hits) == len(query) == len(protein.template_aatype) == 2
        for number, ((template, letters), (first, _, last)) in enumerate(zip(hits, query, strict=True)):
            kinds = protein.template_aatype[number]
            assert residues.decode(kinds[int(first) - 1 : int(last)]) == letters
            assert not (np.delete(kinds, np.r_[int(first) - 1 : int(last)]) != residues.GAP).any()
            found, covered = entry(exported, template), np.flatnonzero(kinds != residues.GAP)
            assert found["release_date"] < known[name]["release_date"]
            for position, place in enumerate(covered.tolist()):
                ours = ours_by_name(
                    kinds[place], protein.template_atoms[number, place], protein.template_mask[number, place]
                )
                assert same_atoms(atoms_by_name(found, position), ours)


def test_conversion_reads_what_was_exported(tiny_data: Path, exported: Path, tmp_path: Path, world: World) -> None:
    convert(exported, tmp_path / "again", world=world)
    for (split, family, before), (_, cluster, after) in zip(
        proteins(tiny_data), proteins(tmp_path / "again"), strict=True
    ):
        for name in ("aatype", "residue_index", "atoms", "atom_mask"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name), err_msg=f"{split} {name}")
        assert (cluster, after.resolution) == (family, pytest.approx(before.resolution))
        first = np.sort(np.unique(before.msa, axis=0, return_index=True)[1])  # rows that were seen are left out
        np.testing.assert_array_equal(after.msa, before.msa[first])


def test_lines_of_hits_have_the_columns_that_readers_count(exported: Path) -> None:
    """Readers of HHsearch's output take the first 17 characters of a line for its name."""
    (path,) = sorted((exported / ALIGNMENTS).glob("0.db"))
    lines = [line for line in path.read_text().splitlines() if line.startswith(("Q ", "T "))]
    assert lines
    assert all(re.fullmatch(r" *\d+ [A-Z-]+ +\d+ \(\d+\)", line[17:]) for line in lines)


def test_names_of_entries_are_all_different_and_files_of_dicts_follow_each_other() -> None:
    names = [entry_name(number) for number in range(2000)]
    assert len({*names, entry_name(MOST_ENTRIES - 1)}) == 2001
    assert [name[1:3] for name in names] == sorted(name[1:3] for name in names)
    assert all(re.fullmatch(r"[1-9][a-z][0-9a-z]{2}", name) for name in (*names, entry_name(MOST_ENTRIES - 1)))


def test_no_name_can_be_read_as_a_number(exported: Path) -> None:
    """pandas made numbers of names without a letter, and of some with an e; the reference's loader then failed."""
    for name in [row["pdb_id"] for row in rows(exported)] + [
        entry_name(number) for number in range(0, MOST_ENTRIES, 997)
    ]:
        with pytest.raises(ValueError, match="could not convert"):
            float(name)


def test_pickles_hold_plain_values_only(exported: Path) -> None:
    """They load where numpy is another version, and no name is looked up in them."""

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name}")

    for path in (exported / STRUCTURES / "dicts").iterdir():
        with path.open("rb") as file:
            assert Plain(file).load()


def test_data_of_another_workload_are_not_exported(tiny_data: Path, tmp_path: Path) -> None:
    write_manifest(tiny_data, structs.replace(read_manifest(tiny_data), workload="cosmoflow"))
    with pytest.raises(InputError, match=f"^{tiny_data}: holds data of cosmoflow, not of openfold$"):
        export_preprocessed(tiny_data, tmp_path / "out")


def test_more_entries_than_names_are_refused_and_leave_no_table(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fixtures.export_openfold.MOST_ENTRIES", 4)
    with pytest.raises(InputError, match=r"^there are names of PDB entries for 4 chains and templates, and no more$"):
        export_preprocessed(tiny_data, tmp_path / "out")
    assert not (tmp_path / "out" / STRUCTURES / "chains.csv").exists()
