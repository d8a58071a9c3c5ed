"""The public data in their layouts: what is selected, which templates are found, how chains are drawn, what is refused."""

import gzip
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from mlhpc.suite.data.sampling import list_train_batches
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.clusters import (
    compute_needed_identity,
    compute_weights,
    find_alignment,
    group_by_similarity,
    is_similar,
    read_clusters,
)
from mlhpc.workloads.openfold.convert import convert
from mlhpc.workloads.openfold.data import OpenFoldData
from mlhpc.workloads.openfold.features import Protein
from mlhpc.workloads.openfold.public import layout
from mlhpc.workloads.openfold.public.selection import (
    ChainRecord,
    Dates,
    read_targets,
    select_training_chains,
    select_validation_chains,
)
from mlhpc.workloads.openfold.public.structures import read_hits
from mlhpc.workloads.openfold.shard_form import convert_to_proteins
from tests.fixtures.openfold_layouts import NO_ATOMS, SELENIUM, MadeEntry, entries, write_original, write_processed
from tests.workloads.openfold.conftest import SMALL_NET

TRAINED = ["1aaa_H", "1aaa_A", "6fff_A", "6fff_B"]
EVALUATED = ["7ggg_X", "7hhh_A"]


@pytest.fixture(scope="module")
def made() -> list[MadeEntry]:
    return entries()


@pytest.fixture(scope="module")
def sources(made: list[MadeEntry], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("public")
    return {
        "original": write_original(root / "original", made),
        "processed": write_processed(root / "processed", made),
    }


@pytest.fixture(scope="module")
def data(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both layouts, converted."""
    roots = {name: tmp_path_factory.mktemp(name) / "data" for name in sources}
    for name, source in sources.items():
        convert(source, roots[name], world=World.create(None))
    return roots


def proteins(root: Path, split: str) -> list[Protein]:
    reader = ShardReader(root, split)
    return list(convert_to_proteins(reader.read(range(len(reader)))))


def made_chain(made: list[MadeEntry], name: str) -> Protein:
    entry, _, author = name.partition("_")
    chains = next(each for each in made if each.name == entry).chains
    return next(each.protein for each in chains if each.author == author)


@pytest.mark.parametrize("layout", ["original", "processed"])
def test_the_benchmark_s_chains_are_selected_and_read(
    data: dict[str, Path], made: list[MadeEntry], layout: str
) -> None:
    """Left out: 2bbb of 9 angstrom, 3ccc of the day after, 4ddd of alanine, 5eee in no cluster."""
    for split, names in (("train", TRAINED), ("validation", EVALUATED)):
        read = proteins(data[layout], split)
        assert len(read) == len(names)
        for protein, name in zip(read, names, strict=True):
            truth = made_chain(made, name)
            np.testing.assert_array_equal(protein.aatype, truth.aatype)
            np.testing.assert_array_equal(protein.atom_mask, truth.atom_mask)
            np.testing.assert_allclose(protein.atoms, truth.atoms, atol=1e-5)
            assert protein.atom_mask[NO_ATOMS].sum() == 0
            assert residues.LETTERS[protein.aatype[SELENIUM]] == "M"
            if name != "6fff_B":
                np.testing.assert_array_equal(protein.msa, truth.msa[[0, 1, 6, 2, 3, 4, 5]])  # merged, nothing twice
                np.testing.assert_array_equal(protein.deletions, truth.deletions[[0, 1, 6, 2, 3, 4, 5]])
    assert [p.resolution for p in proteins(data[layout], "train")][:2] == [2.0, 2.0]
    assert all(math.isnan(p.resolution) for p in proteins(data[layout], "train")[2:])
    reader = ShardReader(data[layout], "train")
    assert reader.read(range(4))["family"].tolist() == [0, 4, 2, 2]
    facts = reader.manifest.attributes
    assert (facts["chains"], facts["validation_in_training_clusters"]) == (10, 1)
    assert {key: facts[key] for key in Dates().stated()} == Dates().stated()


def test_both_layouts_give_the_same_arrays(data: dict[str, Path]) -> None:
    for split in ("train", "validation"):
        one, other = (ShardReader(data[name], split).read([0, 1]) for name in ("original", "processed"))
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_several_ranks_see_the_same_chains(sources: dict[str, Path], tmp_path: Path, data: dict[str, Path]) -> None:
    """Each rank reads a part of the structures; the table is the same on all."""
    from mlhpc.workloads.openfold.public.selection import build_chain_table
    from mlhpc.workloads.openfold.public.structures import list_mmcif_files

    paths = list_mmcif_files(sources["original"] / "pdb_mmcif/original/raw")
    whole = build_chain_table(paths, {}, World.create(None))
    parts: list[object] = []

    class Half:
        size = 2

        def __init__(self, rank: int) -> None:
            self.rank, self.is_first = rank, rank == 0

        def gather(self, mine: object, kind: object) -> object:
            parts.append(mine)
            return [parts[0], mine] if self.is_first else None

        def broadcast(self, value: object, kind: object) -> object:
            return value

    build_chain_table(paths, {}, Half(1))  # type: ignore[arg-type]
    # As text: a resolution that is not known is not a number, which differs from itself.
    assert repr(build_chain_table(paths, {}, Half(0))) == repr(whole)  # type: ignore[arg-type]
    assert len(whole.chains) == 10


def test_one_rank_of_two_lists_the_files(sources: dict[str, Path], assert_one_rank_lists: Callable[..., None]) -> None:
    listings = "list_mmcif_files", "list_alignment_folders"
    assert_one_rank_lists(convert, sources["original"], r"expected a folder of \*\.cif files", layout, *listings)


def test_templates_are_the_acceptable_hits_best_first(data: dict[str, Path], made: list[MadeEntry]) -> None:
    target, other = proteins(data["processed"], "validation")
    assert target.template_aatype.shape == (4, len(target))
    assert other.template_aatype.size == 0
    chains = [made_chain(made, name) for name in ("6fff_A", "1aaa_H", "1aaa_A", "1aaa_H")]
    # the place in the chain where each hit begins, and where in the template; hit 4 has a gap on either side
    for number, (chain, mine, theirs) in enumerate(zip(chains, (5, 2, 1, 0), (3, 0, 5, 0), strict=True)):
        known = chain.atom_mask > 0
        centred = (chain.atoms - chain.atoms[known].mean(0)) * known[..., None]
        np.testing.assert_allclose(
            target.template_atoms[number, mine : mine + 8], centred[theirs : theirs + 8], atol=1e-4
        )
        np.testing.assert_array_equal(
            target.template_mask[number, mine : mine + 8], chain.atom_mask[theirs : theirs + 8]
        )
        np.testing.assert_array_equal(
            target.template_aatype[number, mine : mine + 8], chain.aatype[theirs : theirs + 8]
        )
        assert (target.template_aatype[number, :mine] == residues.GAP).all()
    gaps = target.template_aatype[1, 2:30] == residues.GAP  # of hit 4: a residue that the template lacks
    assert gaps.tolist() == [n == 8 for n in range(28)]
    np.testing.assert_array_equal(target.template_aatype[3, :20], chains[3].aatype[:20])
    assert target.template_aatype[3, 20] == chains[3].aatype[20]  # the structure's residue, not the hit's


def test_the_filters_are_those_of_the_supplement() -> None:
    good = ChainRecord("1abc", "A", ("A",), "2021-09-16", 8.99, 3, "ACDEFACDEF")
    assert (
        select_training_chains(
            [good, replace(good, resolution=math.nan), replace(good, sequence="AAAAAAAACD")], Dates()
        )
        != []
    )
    for change in (
        {"release_date": "2021-09-17"},
        {"resolution": 9.0},
        {"sequence": "AAAAAAAAAC"},
        {"sequence": ""},
        {"cluster": -1},
    ):
        assert select_training_chains([replace(good, **change)], Dates()) == []
    assert len(select_training_chains([good, replace(good, sequence="AAAAAAAACD")], Dates())) == 2  # 80 % is allowed


def test_a_target_names_a_label_and_only_then_an_author_s_chain() -> None:
    crossed = [
        ChainRecord("1fab", "H", ("A", "C"), "2021-12-01", 2.0, 0, "M" * 700),
        ChainRecord("1fab", "A", ("B",), "2021-12-01", 2.0, 0, "G"),
        ChainRecord("2fab", "L", ("D",), "2021-12-01", 2.0, 0, "G"),
        ChainRecord("3fab", "A", ("A",), "2021-12-01", 2.0, 0, "G" * 701),
    ]
    targets = {"2021-09-16": ["2fab_D"], "2021-09-17": ["1fab_A", "2fab_X"], "2021-12-11": ["3fab_A"]}
    assert [each.name for each in select_validation_chains(crossed, targets, Dates())] == ["1fab_H"]
    assert [each.name for each in select_validation_chains(crossed, {"2021-10-01": ["2fab_L"]}, Dates())] == ["2fab_L"]


def test_targets_are_read_as_data(tmp_path: Path) -> None:
    path = tmp_path / "cameo_targets.py"
    path.write_text('# a comment\nCAMEO_TARGETS = {\n    "2021-09-18": [\n        "7BGG [A]",\n    ],\n}\n')
    assert read_targets(path) == {"2021-09-18": ["7bgg_A"]}
    path.write_text('CAMEO_TARGETS = {"a": __import__("os").getcwd()}')
    with pytest.raises(InputError, match="expected days with lists of targets"):
        read_targets(path)


def test_chains_are_weighted_by_length_and_cluster() -> None:
    got = compute_weights(np.array([100, 256, 384, 900]), np.array([7, 7, 7, 1]))
    np.testing.assert_array_equal(got, [*(share * (1 / math.sqrt(3)) for share in (0.5, 0.5, 0.75)), 1.0])


@pytest.mark.parametrize("balanced", [False, True])
def test_training_draws_chains_with_replacement_in_the_reference_s_order(data: dict[str, Path], balanced: bool) -> None:
    """Over epochs, from one generator of the run's seed; whatever the number of ranks."""
    chains = proteins(data["processed"], "train")
    likely = torch.tensor([0.5, 0.5, 0.5 / math.sqrt(2), 0.5 / math.sqrt(2)], dtype=torch.float64)
    seed, batch = 12, 2
    drawn = torch.multinomial(likely, 12, replacement=True, generator=torch.Generator().manual_seed(seed)).tolist()
    settings = structs.replace(SMALL_NET, crop_size=60, max_templates=0, balanced_batches=balanced)
    for ranks in (1, 2):
        opened = OpenFoldData(data["processed"], "train", settings, batch)
        seen: list[list[str]] = []
        for epoch in (1, 2, 3):
            per_rank = [list_train_batches(4, batch, seed=seed, epoch=epoch, rank=r, size=ranks) for r in range(ranks)]
            for parts in zip(*per_rank, strict=True):
                loaded = [opened.load(part, seed=seed, epoch=epoch) for part in parts]
                sequences = [
                    residues.decode(row[mask > 0].numpy())
                    for each in loaded
                    for row, mask in zip(each["aatype"], each["mask"], strict=True)
                ]
                seen.append(sorted(sequences))
        expected = [sorted(residues.decode(chains[c].aatype) for c in drawn[n : n + 2]) for n in range(0, 12, 2)]
        assert seen == expected
    assert len(set(drawn[:4])) < 4  # one epoch has a chain twice


def test_a_chain_that_is_drawn_twice_is_another_sample(data: dict[str, Path]) -> None:
    opened = OpenFoldData(data["processed"], "train", SMALL_NET, 2)
    rows = opened.load(range(4), seed=12, epoch=1)
    same = [
        (i, j) for i in range(4) for j in range(i) if torch.equal(rows["residue_index"][i], rows["residue_index"][j])
    ]
    hidden = rows["hidden_mask"]
    assert all(not torch.equal(hidden[i], hidden[j]) for i, j in same)
    whole = OpenFoldData(data["processed"], "validation", SMALL_NET, 2).load([0, 1], seed=12, epoch=0)
    assert whole["mask"].sum(1).tolist() == [57, 46]  # evaluation takes every chain once


def test_clusters_are_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "clusters.txt"
    path.write_text("1ABC_1 2def_1\n3GHI_2\n")
    assert read_clusters(path) == {"1ABC_1": 0, "2DEF_1": 0, "3GHI_2": 1}
    path.write_text("1ABC_1\n1abc_1\n")
    with pytest.raises(InputError, match="line 2: 1ABC_1 is on line 1 too"):
        read_clusters(path)


def random_chain(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, 20, length).astype(np.int8)


def relative(rng: np.random.Generator, chain: np.ndarray, identity: float) -> np.ndarray:
    """A chain with this share of equal residues and a piece left out."""
    changed = np.where(rng.random(len(chain)) < identity, chain, (chain + rng.integers(1, 20, len(chain))) % 20)
    return np.delete(changed, slice(30, 36)).astype(np.int8)


def test_similar_chains_are_one_cluster_and_others_are_not() -> None:
    rng = np.random.default_rng(5)
    ancestors = [random_chain(rng, length) for length in (150, 120, 100, 200, 90)]
    chains = [
        *ancestors,
        *(relative(rng, each, 0.6) for each in ancestors),
        *(random_chain(rng, 80) for _ in range(10)),
    ]
    assert group_by_similarity(chains) == [*range(5), *range(5), *range(5, 15)]
    assert group_by_similarity([chains[0][:3], chains[0][:3], chains[1][:4]]) == [0, 0, 1]
    # what relatives with less than the threshold are
    assert not is_similar(ancestors[0], relative(rng, ancestors[0], 0.2))


def test_short_chains_need_more_identity() -> None:
    assert compute_needed_identity(12) == pytest.approx(0.987, abs=0.002)
    assert compute_needed_identity(50) == pytest.approx(0.418, abs=0.002)
    assert compute_needed_identity(300) == 0.4


def test_alignment_pairs_places_and_leaves_out_what_one_lacks() -> None:
    one, other = residues.encode("MKVLAAGIVGLW"), residues.encode("PPMKVLAGIVGL")
    pairs = find_alignment(one, other).tolist()
    assert [residues.LETTERS[one[a]] for a, _ in pairs] == list("MKVLAGIVGL")
    assert all(one[a] == other[b] for a, b in pairs)


def copied(source: Path, target: Path) -> Path:
    import shutil

    shutil.copytree(source, target)
    return target


ALIGNMENTS = "open_protein_set/processed/pdb_alignments"


class Harmful:
    """Unpickled, it would make a folder."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return Path.mkdir, (Path("never"),)  # type: ignore[return-value]


def break_pickle(root: Path) -> None:
    (root / "pdb_mmcif/processed/dicts/aa").write_bytes(pickle.dumps({"1aaa": Harmful()}))


def cut_database(root: Path) -> None:
    for path in (root / ALIGNMENTS).glob("*.db"):
        path.write_bytes(path.read_bytes()[:200])


def break_index(root: Path) -> None:
    index = json.loads((root / ALIGNMENTS / "super.index").read_text())
    index["1aaa_H"] = {"db": "0.db", "files": [["x.a3m", 0]]}
    (root / ALIGNMENTS / "super.index").write_text(json.dumps(index))


def declare_much(root: Path) -> None:
    index = json.loads((root / ALIGNMENTS / "super.index").read_text())
    for entry in index.values():
        entry["files"] = [[name, start, 1 << 62] for name, start, _ in entry["files"]]
    (root / ALIGNMENTS / "super.index").write_text(json.dumps(index))


def break_table(root: Path) -> None:
    path = root / "pdb_mmcif/processed/chains.csv"
    path.write_text(path.read_text().replace("2009-03-31", "31-MAR-09", 1))


def leak(root: Path) -> None:
    (root / "cameo_targets.json").write_text('{"2021-10-02": ["1aaa [A]"]}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_pickle, r"dicts/aa: not a pickle of plain data: it asks for .*mkdir, which could run code"),
        (cut_database, r"\.db: \w+\.a3m of \w+ ends beyond the file: cut off"),
        (declare_much, r"\.db: \w+\.a3m of \w+ ends beyond the file: cut off"),
        (break_index, r"super\.index: chain 1aaa_H: expected db and files"),
        (break_table, r"chains\.csv: line 2: not a chain of the benchmark's table: .*31-MAR-09"),
        (leak, r"chain 1aaa_H is in both splits, with 0 more: it would leak"),
        (lambda root: (root / "cameo_targets.json").unlink(), "no cameo_targets.json: .* they are the validation set"),
        (lambda root: (root / ALIGNMENTS / "super.index").unlink(),
         "no alignments: expected open_protein_set/original/pdb"),
        (lambda root: (root / "pdb_mmcif/processed/chains.csv").unlink(),
         "no structures: expected pdb_mmcif/original/raw"),
        (lambda root: (root / "cameo_targets.json").write_text("{}"),
         "no chain for the validation split: of 10 chains 0"),
    ],
)  # fmt: skip
def test_what_is_missing_or_damaged_is_one_line(
    sources: dict[str, Path], tmp_path: Path, world: World, damage: Callable[[Path], object], message: str
) -> None:
    source = copied(sources["processed"], tmp_path / "source")
    damage(source)
    with pytest.raises(InputError, match=message) as raised:
        convert(source, tmp_path / "data", world=world)
    assert "\n" not in str(raised.value)
    assert not Path("never").exists()


def test_original_files_that_cannot_be_read_are_left_out_and_counted(
    sources: dict[str, Path], tmp_path: Path, world: World
) -> None:
    source = copied(sources["original"], tmp_path / "source")
    (source / "pdb_mmcif/original/clusters-by-entity-40.txt").unlink()  # then chains are compared
    path = source / "pdb_mmcif/original/raw/ee/5eee.cif.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:3000]))
    convert(source, tmp_path / "data", world=world)
    manifest = ShardReader(tmp_path / "data", "train").manifest
    assert manifest.attributes["unreadable_structures"] == 1
    assert "5eee.cif.gz: line" in manifest.attributes["first_unreadable"]
    families = ShardReader(tmp_path / "data", "train").read(range(manifest.samples("train")))["family"]
    assert families[-1] == families[-2]  # the two chains of 6fff are alike
    assert len(set(families.tolist())) == len(families) - 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Sum_probs=25.5", "Sum=25.5", "expected a hit's name like >1abc_A and its Aligned_cols and Sum_probs"),
        (">1aaa_H", ">nothing", "expected a hit's name"),
        ("T 1aaa_H            1 ", "T 1aaa_H            x ", "not a row of an alignment"),
        ("No 10\n", "No 10", "hit is cut off|expected a hit's name"),
    ],
)
def test_broken_hits_are_one_line_with_its_number(made: list[MadeEntry], old: str, new: str, message: str) -> None:
    text = "\n".join(made[-2].hits)
    assert len(read_hits(text, "x.hhr")) == 10
    assert old in text
    with pytest.raises(InputError, match=rf"x\.hhr: line \d+: .*({message})"):
        read_hits(text.replace(old, new), "x.hhr")
