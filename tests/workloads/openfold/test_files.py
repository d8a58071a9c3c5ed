"""mmCIF, FASTA and A3M: what is read, and the one line that says what is wrong."""

import gzip
import hashlib
import io
import math
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from mlhpc.suite.data.manifest import compare_files
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import convert as converter
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.convert import convert, fetch, read_protein
from mlhpc.workloads.openfold.data import OpenFoldData
from mlhpc.workloads.openfold.mmcif import merge, read_a3m, read_chain, read_entry, read_fasta
from mlhpc.workloads.openfold.proteins import Families, make_proteins
from mlhpc.workloads.openfold.shard_form import convert_to_proteins
from tests.fixtures.structure_files import a3m_text, mmcif_text
from tests.workloads.openfold.conftest import SMALL_NET

# the form of the Protein Data Bank: quotes, a text field, two models, two places of one atom, a modified residue, water
ARCHIVE = """data_1ABC
#
_entry.id   1ABC
_struct.title 'A chain''s "title" # not a comment'
_struct.note
;text over
loop_ of lines
;
loop_
_entity_poly_seq.entity_id
_entity_poly_seq.num
_entity_poly_seq.mon_id
_entity_poly_seq.hetero
1 1 MSE n
1 2 GLY n
1 3 LEU n
2 1 ALA n
#
loop_
_atom_site.group_PDB
_atom_site.id
_atom_site.type_symbol
_atom_site.label_atom_id
_atom_site.label_alt_id
_atom_site.label_comp_id
_atom_site.label_asym_id
_atom_site.label_entity_id
_atom_site.label_seq_id
_atom_site.Cartn_x
_atom_site.Cartn_y
_atom_site.Cartn_z
_atom_site.occupancy
_atom_site.auth_asym_id
_atom_site.pdbx_PDB_model_num
HETATM 1 SE SE  . MSE A 1 1 1.0 2.0 3.0 1.00 H 1
HETATM 2 C  CA  . MSE A 1 1 1.5 2.5 3.5 1.00 H 1
ATOM   3 C  CA  A LEU A 1 3 9.0 9.0 9.0 0.30 H 1
ATOM   4 C  CA  B LEU A 1 3 4.0 5.0 6.0 0.70 H 1
ATOM   5 O  "O5'" . LEU A 1 3 4.0 5.0 6.0 0.70 H 1
ATOM   6 C  CA  . ALA B 2 1 7.0 8.0 9.0 1.00 L 1
HETATM 7 O  O   . HOH C 3 . 0.0 0.0 0.0 1.00 H 1
HETATM 8 C  CA  . MSE A 1 1 -1.5 -2.5 -3.5 1.00 H 2
#
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_chain_of_the_archive_is_read(tmp_path: Path) -> None:
    _, chain = read_chain(write(tmp_path / "1abc.cif", ARCHIVE))
    assert chain.name == "H"
    assert residues.decode(chain.aatype) == "MGL"
    known = [tuple(np.array(residues.ATOM_NAMES[t])[m > 0]) for t, m in zip(chain.aatype, chain.atom_mask, strict=True)]
    assert known == [("CA", "SD"), (), ("CA",)]  # a residue without atoms keeps its place
    assert chain.atoms[2, residues.CA].tolist() == [4.0, 5.0, 6.0]  # the higher occupancy
    assert chain.atoms[0, residues.CA].tolist() == [1.5, 2.5, 3.5]  # the first model
    assert residues.decode(read_chain(tmp_path / "1abc.cif", "L")[1].aatype) == "A"


def test_a_chain_is_found_by_the_author_s_name_before_the_file_s_own(tmp_path: Path) -> None:
    """As in an antibody: the author calls A what the file calls B, and H what the file calls A."""
    crossed = ARCHIVE.replace("9.0 1.00 L 1", "9.0 1.00 A 1")
    path = write(tmp_path / "1fab.cif", crossed)
    assert [(each.name, each.label) for each in read_entry(path).chains] == [("H", "A"), ("A", "B")]
    assert residues.decode(read_chain(path, "A")[1].aatype) == "A"
    assert residues.decode(read_chain(path, "H")[1].aatype) == "MGL"
    assert residues.decode(read_chain(path, "B")[1].aatype) == "A"  # no author's name, so the file's own
    write(tmp_path / "1fab_A.cif", crossed)
    assert residues.decode(read_protein(tmp_path / "1fab_A.cif").aatype) == "A"


def test_chains_come_in_the_order_of_their_molecules(tmp_path: Path) -> None:
    """The order of the benchmark's table, and so of its draws."""
    swapped = ARCHIVE.replace(
        "1 1 MSE n\n1 2 GLY n\n1 3 LEU n\n2 1 ALA n\n", "2 1 ALA n\n1 1 MSE n\n1 2 GLY n\n1 3 LEU n\n"
    )
    assert [each.name for each in read_entry(write(tmp_path / "a.cif", swapped)).chains] == ["L", "H"]
    assert [each.name for each in read_entry(write(tmp_path / "a.cif", ARCHIVE)).chains] == ["H", "L"]


HEADER = """_entry.id 1ABC
_refine.ls_d_res_high 2.10
loop_
_reflns.entry_id
_reflns.d_resolution_high
1ABC 1.9
loop_
_pdbx_audit_revision_history.ordinal
_pdbx_audit_revision_history.revision_date
1 2011-07-13
2 2009-03-31
#
"""


def test_date_and_resolution_of_an_entry_are_read(tmp_path: Path) -> None:
    text = ARCHIVE.replace("_entry.id   1ABC\n", HEADER)
    entry = read_entry(write(tmp_path / "a.cif", text))
    assert (entry.name, entry.release_date, entry.resolution) == ("1abc", "2009-03-31", 2.1)
    (tmp_path / "a.cif.gz").write_bytes(gzip.compress(text.encode()))
    assert read_entry(tmp_path / "a.cif.gz").resolution == 2.1
    map_of = text.replace("_refine.ls_d_res_high 2.10", "_em_3d_reconstruction.resolution 3.4")
    assert read_entry(write(tmp_path / "a.cif", map_of)).resolution == 3.4
    assert math.isnan(read_entry(write(tmp_path / "a.cif", text.replace("2.10", "?"))).resolution)  # stated as unknown
    entry = read_entry(write(tmp_path / "a.cif", ARCHIVE))
    assert entry.release_date is None
    assert math.isnan(entry.resolution)
    with pytest.raises(
        InputError, match=r"_pdbx_audit_revision_history row 1: revision_date is '13-JUL-11', expected YYYY-MM-DD"
    ):
        read_entry(write(tmp_path / "a.cif", text.replace("2011-07-13", "13-JUL-11")))


def test_a_modified_residue_counts_as_the_parent_that_the_file_names(tmp_path: Path) -> None:
    text = ARCHIVE.replace("LEU", "SEP")
    assert residues.decode(read_chain(write(tmp_path / "a.cif", text))[1].aatype) == "MGX"
    named = "_pdbx_struct_mod_residue.id 1\n_pdbx_struct_mod_residue.label_comp_id SEP\n"
    named += "_pdbx_struct_mod_residue.parent_comp_id SER\n"
    assert (
        residues.decode(read_chain(write(tmp_path / "a.cif", text.replace("_entry.id", named + "_entry.id")))[1].aatype)
        == "MGS"
    )


def test_written_structures_are_read_back(tmp_path: Path) -> None:
    protein = make_proteins(Families(30, 30, 2), 0, range(1))[0]
    text = mmcif_text("made", protein.aatype, protein.atoms, protein.atom_mask)
    _, chain = read_chain(write(tmp_path / "made.cif", text))
    np.testing.assert_array_equal(chain.aatype, protein.aatype)
    np.testing.assert_array_equal(chain.atom_mask, protein.atom_mask)
    np.testing.assert_allclose(chain.atoms, protein.atoms, atol=6e-4)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1.5 2.5 3.5 1.00 H 1", "1.5 oops 3.5 1.00 H 1", "_atom_site row 2: Cartn_y is 'oops', expected a number"),
        (
            "1.5 2.5 3.5 1.00 H 1",
            "1.5 nan 3.5 1.00 H 1",
            "_atom_site row 2: Cartn_y is 'nan', expected a finite number",
        ),
        ("9.0 1.00 L 1", "9.0 1.00 L", "Wrong number of values in loop _atom_site.*"),
        ("lines\n;\n", "lines\n", "line 43: unterminated text field"),
        ("'A chain''s \"title\" # not a comment'", "'A chain", "line 4: unterminated 'string'"),
        ("LEU A 1 3 4.0", "LEU A 1 7 4.0", "_atom_site row 4: residue 7 of a sequence of 3"),
        ("_atom_site.Cartn_z\n", "_atom_site.elsewhere\n", "_atom_site has no Cartn_z"),
    ],
)
def test_broken_mmcif_is_one_line_with_file_and_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in ARCHIVE
    path = write(tmp_path / "broken.cif", ARCHIVE.replace(old, new))
    with pytest.raises(InputError) as raised:
        read_chain(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_that_are_no_structures_are_refused(tmp_path: Path) -> None:
    for text, problem in (
        ("", "no _atom_site loop"),
        ("HEADER a PDB file", r"line 1: expected block header \(data_\)"),
        ("data_x\n_entry.id x\n", "no _atom_site loop"),
    ):
        with pytest.raises(InputError, match=problem):
            read_chain(write(tmp_path / "no.cif", text))
    with pytest.raises(InputError, match="no chain 'Z' of amino acids"):
        read_chain(write(tmp_path / "1abc.cif", ARCHIVE), "Z")
    (tmp_path / "binary.cif").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        read_chain(tmp_path / "binary.cif")


def test_an_alignment_is_read_with_its_insertions(tmp_path: Path) -> None:
    msa, deletions = read_a3m(write(tmp_path / "a.a3m", "# hhblits\n>query one\nMK\nV\n>hit\nMabK-\n>last\n-XZc\n"))
    assert [residues.decode(row) for row in msa] == ["MKV", "MK-", "-XE"]
    assert deletions.tolist() == [[0, 0, 0], [0, 2, 0], [0, 0, 0]]


def test_alignments_of_one_chain_are_merged_without_repetitions() -> None:
    uniref = ">query\nMKV\n>a\nMxK-\n>again\nMK-\n"
    mgnify = ">query\nMKV\n>b\nMxxKV\n>c\nBUZ\n"
    msa, deletions = merge([("uniref90_hits.a3m", uniref), ("mgnify_hits.a3m", mgnify)])
    assert [residues.decode(row) for row in msa] == ["MKV", "MK-", "DCE"]
    assert deletions.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]  # of the first that has the letters
    with pytest.raises(InputError, match=r"^b: line 3: row 2 \(x\) has 2 columns, row 1 \(query\) has 3$"):
        merge([("a", uniref), ("b", ">query\nMKV\n>x\nMK\n")])
    with pytest.raises(InputError, match="^b: line 1: no row in it"):
        merge([("a", uniref), ("b", "")])


def test_alignments_are_written_as_they_are_read(tmp_path: Path) -> None:
    protein = make_proteins(Families(30, 30, 9), 1, range(1))[0]
    msa, deletions = read_a3m(write(tmp_path / "a.a3m", a3m_text(protein.msa, protein.deletions, "chain")))
    np.testing.assert_array_equal(msa, protein.msa)
    np.testing.assert_array_equal(deletions, protein.deletions)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (">q\nMKV\n>hit\nMKVL\n", r"line 3: row 2 \(hit\) has 4 columns, row 1 \(q\) has 3"),
        (">q\nMKV\n>hit\nM1V\n", "line 3: column 2: '1' is not an amino acid"),
        ("MKV\n", "line 1: expected '>' and a name before 'MKV'"),
        ("", "no row in it"),
        (">q\nM-V\n", "cannot have gaps"),
        (">q\n", "is empty"),
    ],
)
def test_broken_alignments_are_one_line_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"a\.a3m: .*{message}"):
        read_a3m(write(tmp_path / "a.a3m", text))


def test_a_fasta_file_without_a_sequence_is_refused(tmp_path: Path) -> None:
    assert read_fasta(write(tmp_path / "a.fasta", ">a b\nMK\nV\n>c\nG\n")) == [("a", "MKV"), ("c", "G")]
    with pytest.raises(InputError, match=r"a\.fasta: line 1: no sequence"):
        read_fasta(write(tmp_path / "a.fasta", "\n"))


def folder(root: Path, count: int = 4) -> Path:
    root.mkdir()
    for number, protein in enumerate(make_proteins(Families(12, 16, 5), 2, range(count))):
        write(root / f"p{number}.cif", mmcif_text("p", protein.aatype, protein.atoms, protein.atom_mask))
        write(root / f"p{number}.a3m", a3m_text(protein.msa, protein.deletions, "p"))
    return root


def test_a_folder_of_structures_becomes_a_data_set(tmp_path: Path, world: World) -> None:
    source, root = folder(tmp_path / "source"), tmp_path / "data"
    convert(source, root, world=world, size="mini")
    assert compare_files(root, deep=True) == []
    assert len(OpenFoldData(root, "train", SMALL_NET, 4)) == 3
    read = next(convert_to_proteins(ShardReader(root, "validation").read([0])))
    np.testing.assert_array_equal(read.msa, make_proteins(Families(12, 16, 5), 2, range(3, 4))[0].msa)
    assert OpenFoldData(root, "train", SMALL_NET, 4).load([0, 1], seed=0, epoch=1)["template_atom_mask"].sum() == 0


def test_one_rank_of_two_lists_the_files(tmp_path: Path, assert_one_rank_lists: Callable[..., None]) -> None:
    source = grouped(tmp_path / "source")
    assert_one_rank_lists(convert, source, r"expected a folder of \*\.cif files", converter, "_list_files")


def grouped(root: Path) -> Path:
    """Two pairs of alike chains, the first of each among the first three names."""
    folder(root, 3)
    proteins = make_proteins(Families(40, 50, 5), 2, range(2))
    for number, protein in enumerate([proteins[0], proteins[0], proteins[1], proteins[1]]):
        write(root / f"q{number}.cif", mmcif_text("q", protein.aatype, protein.atoms, protein.atom_mask))
    return root


def test_alike_chains_are_one_family_and_stay_in_one_split(tmp_path: Path, world: World) -> None:
    convert(grouped(tmp_path / "source"), tmp_path / "data", world=world, size="mini")
    read = {split: ShardReader(tmp_path / "data", split) for split in ("train", "validation")}
    family = {split: each.read(range(len(each)))["family"].tolist() for split, each in read.items()}
    assert family == {"train": [0, 1, 2, 3, 3], "validation": [4, 4]}


def test_a_fold_that_leaks_into_validation_is_refused(tmp_path: Path, world: World) -> None:
    """By comparing the sequences, or by the file that says which are alike."""
    flat, source = grouped(tmp_path / "flat"), tmp_path / "source"
    for name, split in (("q0", "train"), ("q1", "validation"), ("q2", "train"), ("p0", "validation")):
        (source / split).mkdir(parents=True, exist_ok=True)
        (flat / f"{name}.cif").rename(source / split / f"{name}.cif")
    with pytest.raises(
        InputError, match="family 0 is in the training and in the validation split: its fold would leak"
    ):
        convert(source, tmp_path / "data", world=world)
    write(source / "clusters.txt", "q0 q2\nq1\nP0\n")
    convert(source, tmp_path / "listed", world=world)
    write(source / "clusters.txt", "q0 P0\nq1 q2\n")
    with pytest.raises(InputError, match="family 0 and 1 more are in the training and in the validation split"):
        convert(source, tmp_path / "data2", world=world)
    write(source / "clusters.txt", "q0 q1 q2\n")
    with pytest.raises(InputError, match=r"clusters\.txt: p0 is on no line, nor are 0 more"):
        convert(source, tmp_path / "data3", world=world)


def test_what_does_not_belong_together_is_refused(tmp_path: Path, world: World) -> None:
    source = folder(tmp_path / "source")
    write(source / "p1.a3m", ">q\nMKV\n")
    with pytest.raises(InputError, match=r"p1\.a3m: line 1: 3 residues, but \d+ in p1\.cif"):
        convert(source, tmp_path / "data", world=world)
    (source / "p1.a3m").unlink()
    sequence = residues.decode(read_protein(source / "p1.cif").aatype)
    wrong = ("A" if sequence[4] != "A" else "W").join((sequence[:4], sequence[5:]))
    write(source / "p1.fasta", f">q\n{wrong}\n")
    with pytest.raises(InputError, match=r"p1\.fasta: line 1: residue 5 is . but|p1\.fasta: line 1: residue 5 is"):
        read_protein(source / "p1.cif")
    with pytest.raises(InputError, match="no \\*.cif file for the train split"):
        convert(tmp_path, tmp_path / "data2", world=world)


def test_a_validation_chain_that_is_too_long_is_refused(tmp_path: Path, world: World) -> None:
    root = tmp_path / "data"
    convert(folder(tmp_path / "source"), root, world=world, size="mini")
    short = structs.replace(SMALL_NET, val_max_sequence_length=11)
    with pytest.raises(InputError, match="a validation chain has 1. residues, more than val_max_sequence_length 11"):
        OpenFoldData(root, "validation", short, 4)
    OpenFoldData(root, "train", short, 4)  # training crops


def test_the_sample_set_is_taken_from_the_archive_of_its_sha256_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="not downloaded here"):
        fetch(tmp_path)
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in converter.SAMPLES:
            member = tarfile.TarInfo(f"{converter.SAMPLE_ARCHIVE}/Tests/PDB/{name}.cif")
            member.size = len(ARCHIVE)
            tar.addfile(member, io.BytesIO(ARCHIVE.encode()))
    with pytest.raises(InputError, match=r"archive\.tar\.gz: sha256 is .*, expected 9aaa"):
        fetch(tmp_path / "out", source=str(archive))
    monkeypatch.setattr(converter, "SAMPLE_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    fetch(tmp_path / "out", source=str(archive))
    assert len(list((tmp_path / "out").glob("*.cif"))) == 13
    assert residues.decode(read_chain(tmp_path / "out" / "1A8O.cif")[1].aatype) == "MGL"
