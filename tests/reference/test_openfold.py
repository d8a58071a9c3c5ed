"""OpenFold beside mlcommons/hpc: what is read, selected and drawn, features, learning rate."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mlhpc.suite.data.sampling import list_train_batches
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.clusters import ClusterSampling, compute_weights, find_alignment
from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.convert import convert
from mlhpc.workloads.openfold.features import Protein, build_alignment, build_sample
from mlhpc.workloads.openfold.mmcif import Entry, read_entry
from mlhpc.workloads.openfold.model import PSI, compute_template_features
from mlhpc.workloads.openfold.proteins import Families, make_proteins
from mlhpc.workloads.openfold.public.selection import read_chains
from mlhpc.workloads.openfold.public.structures import MmcifFiles, PickleFiles, list_mmcif_files
from mlhpc.workloads.openfold.schedule import learning_rate
from mlhpc.workloads.openfold.shard_form import convert_to_proteins
from tests.fixtures.openfold_layouts import MadeEntry, entries, write_original, write_processed
from tests.reference.openfold_code import openfold_code

Reference = Callable[[str], Path]
Record = Callable[[str, str, float, float], None]
ATOMS_37 = 37


@pytest.fixture
def code(reference: Reference) -> Iterator[Any]:
    """Modules of the reference by the last part of their names."""
    names = (
        "data.residue_constants",
        "data.transforms",
        "model.alphafold",
        "data.mmcif",
        "datasets",
        "samplers",
        "lr_scheduler",
    )
    with openfold_code(reference("mlcommons/hpc")):
        yield SimpleNamespace(
            **{name.rpartition(".")[2]: importlib.import_module(f"openfold.{name}") for name in names}
        )


def in_37(code: Any, kinds: np.ndarray, atoms: np.ndarray, mask: np.ndarray) -> tuple[Tensor, Tensor]:
    """Atoms and mask in the reference's 37 slots of a residue."""
    wide = np.zeros((*kinds.shape, ATOMS_37, 3), np.float32)
    known = np.zeros((*kinds.shape, ATOMS_37), np.float32)
    for place in np.ndindex(*kinds.shape):
        for slot, name in enumerate(residues.ATOM_NAMES[min(kinds[place], residues.UNKNOWN)]):
            if name and mask[(*place, slot)]:
                wide[(*place, code.residue_constants.ATOM_ORDER[name])] = atoms[(*place, slot)]
                known[(*place, code.residue_constants.ATOM_ORDER[name])] = 1
    return torch.from_numpy(wide), torch.from_numpy(known)


def damaged(protein: Protein, seed: int) -> Protein:
    """With atoms missing, one residue of unknown type, and one template that lacks a CB and a whole backbone."""
    rng = np.random.default_rng(seed)
    kinds = protein.template_aatype.copy()
    mask = protein.template_mask * (rng.random(protein.template_mask.shape) > 0.05)
    kinds[:, 7] = residues.UNKNOWN
    mask[:, 7] *= residues.ATOM_MASK[residues.UNKNOWN].astype(np.int8)
    mask[0, 9, residues.CB], mask[0, 11, : residues.OXYGEN] = 0, 0
    atoms = protein.template_atoms * mask[..., None]
    return Protein(**(vars(protein) | {"template_aatype": kinds, "template_atoms": atoms, "template_mask": mask}))


def test_features_of_templates(code: Any, record: Record) -> None:
    """Bit for bit, also where atoms are unknown and in the middle of a chain."""
    settings = OpenFoldConfig(max_templates=4, num_recycling_iters=0, crop_size=40)
    pair_error = angle_error = 0.0
    for seed, whole in enumerate(make_proteins(Families(60, 90, 4, 4), 3, range(3))):
        protein = damaged(whole, seed)
        arrays = build_sample(protein, settings, np.random.default_rng(seed), length=len(protein), training=False)
        ours = {name: torch.from_numpy(value)[None] for name, value in arrays.items()}
        pair, angle = compute_template_features(ours)
        wide, known = in_37(code, protein.template_aatype, protein.template_atoms, protein.template_mask)
        theirs = {
            "template_aatype": torch.from_numpy(protein.template_aatype).long(),
            "template_all_atom_positions": wide,
            "template_all_atom_mask": known,
        }
        theirs = code.transforms.make_pseudo_beta("template_")(theirs)
        theirs = code.transforms.atom37_to_torsion_angles("template_")(theirs)
        config = code.alphafold.AlphaFoldConfig
        for number in range(len(protein.template_aatype)):
            expected = code.alphafold._build_template_pair_feat(
                {name: value[number][None] for name, value in theirs.items()},
                min_bin=config.template_pair_feat_distogram_min_bin,
                max_bin=config.template_pair_feat_distogram_max_bin,
                num_bins=config.template_pair_feat_distogram_num_bins,
                use_unit_vector=config.template_pair_feat_use_unit_vector,
                inf=config.template_pair_feat_inf,
                eps=config.template_pair_feat_eps,
            )
            pair_error = max(pair_error, float((pair[0, number] - expected[0]).abs().max()))
        expected = code.alphafold._build_template_angle_feat(theirs)
        angle_error = max(angle_error, float((angle[0] - expected).abs().max()))
        assert torch.equal(ours["template_angle_mask"][0][..., PSI], theirs["template_torsion_angles_mask"][..., 2])
        assert float(pair.abs().sum()) > 0
    record("openfold", "template pair features, 88 channels", pair_error, 0.0)
    record("openfold", "template torsion features, 57 channels", angle_error, 0.0)


@pytest.fixture(scope="module")
def made() -> list[MadeEntry]:
    return entries()


def difference(code: Any, ours: Entry, theirs: Any) -> float:
    """Compare an entry; returns the largest difference of a coordinate, angstrom."""
    assert (ours.name, ours.release_date) == (theirs["pdb_id"], theirs["release_date"])
    assert ours.resolution == theirs["resolution"] or np.isnan([ours.resolution, theirs["resolution"]]).all()
    assert [chain.name for chain in ours.chains] == theirs["author_chain_ids"]
    labels, worst = theirs["mmcif_chain_id_to_author_chain_id"], 0.0
    for chain in ours.chains:
        assert residues.decode(chain.aatype) == theirs["sequences"][chain.name]
        assert set(chain.labels) == {label for label, author in labels.items() if author == chain.name}
        wide, known = in_37(code, chain.aatype, chain.atoms, chain.atom_mask)
        expected, there = (theirs["atoms"][chain.name][f"all_atom_{name}"] for name in ("positions", "mask"))
        has_slot = [{*names, ""} for names in (residues.ATOM_NAMES[kind] for kind in chain.aatype)]
        kept = np.array([[name in names for name in code.residue_constants.ATOM_TYPES] for names in has_slot])
        assert np.array_equal(known.numpy() > 0, there & kept)  # atoms that its residue type has not are not kept
        worst = max(worst, float(np.abs(wide.numpy() - expected * (there & kept)[..., None]).max()))
    return worst


def test_structures_and_table(code: Any, record: Record, made: list[MadeEntry], tmp_path: Path) -> None:
    """Our reader and our preprocessed fixture beside the reference's own preprocessing of the original fixture."""
    raw = write_original(tmp_path / "original", made) / "pdb_mmcif/original/raw"
    paths = list_mmcif_files(raw)
    files = MmcifFiles(raw, paths)
    dictionaries = PickleFiles(write_processed(tmp_path / "processed", made) / "pdb_mmcif/processed/dicts")
    rows = {each.name: each for each in read_chains(tmp_path / "processed/pdb_mmcif/processed/chains.csv")}
    worst = 0.0
    for path in paths:
        theirs = code.mmcif.parse_mmcif_string(code.mmcif.load_mmcif_gz_file(path))
        for entry in (files.entry(theirs["pdb_id"]), dictionaries.entry(theirs["pdb_id"])):
            worst = max(worst, difference(code, entry, theirs))
            for chain in entry.chains:
                row = rows[f"{entry.name}_{chain.name}"]
                assert (row.sequence, set(row.labels)) == (theirs["sequences"][chain.name], set(chain.labels))
    record("openfold", "atoms of chains read from mmCIF and dictionaries, angstrom", worst, 0.0)


def test_real_structures(code: Any, reference: Reference, record: Record) -> None:
    """Of Biopython's own tests, those that the reference accepts: chains, order, sequences, dates, resolutions, atoms."""
    worst, compared = 0.0, 0
    files = sorted((reference("biopython/biopython") / "Tests" / "PDB").glob("[0-9]???.cif"))
    for path in [path for path in files if path.stat().st_size]:  # copies of the repository may lack its largest files
        text = code.mmcif.load_mmcif_file(path)
        if "_pdbx_audit_revision_history.revision_date" in text and "_entry.id" in text:
            worst = max(worst, difference(code, read_entry(path), code.mmcif.parse_mmcif_string(text)))
            compared += 1
    assert compared >= 3
    record("openfold", f"atoms of {compared} real structures, angstrom", worst, 0.0)


class OurAligner:
    """In place of the program that the reference calls."""

    def __init__(self, **_: Any) -> None: ...

    def align(self, sequences: list[str]) -> str:
        one, other = (residues.encode(each) for each in sequences)
        rows, at = ["", ""], [0, 0]
        for pair in [*find_alignment(one, other).tolist(), [len(one), len(other)]]:
            for side, until in enumerate(pair):
                piece = sequences[side][at[side] : until]
                rows[side] += piece
                rows[1 - side] += "-" * len(piece)
                at[side] = until + 1
            if pair != [len(one), len(other)]:
                rows = [rows[side] + sequences[side][pair[side]] for side in (0, 1)]
        return f">a\n{rows[0]}\n>b\n{rows[1]}\n"


@pytest.fixture
def their_data(code: Any, made: list[MadeEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The reference's data sets of the preprocessed fixture, and ours converted from it."""
    root = write_processed(tmp_path / "public", made)
    archive = root / "pdb_mmcif/processed"
    templates = importlib.import_module("openfold.data.templates")
    monkeypatch.setattr(templates, "Kalign", OurAligner)
    targets = importlib.import_module("openfold.data.cameo_targets")
    monkeypatch.setattr(code.datasets, "CAMEO_TARGETS", json.loads((root / "cameo_targets.json").read_text()))
    assert targets.CAMEO_TARGETS
    common = {
        "pdb_mmcif_chains_filepath": archive / "chains.csv",
        "pdb_mmcif_dicts_dirpath": archive / "dicts",
        "pdb_obsolete_filepath": archive / "obsolete.dat",
        "pdb_alignments_dirpath": root / "open_protein_set/processed/pdb_alignments",
        "alphafold_config": code.alphafold.AlphaFoldConfig(),
    }
    train = code.datasets.InitialTrainingDataset(max_pdb_release_date="2021-09-16", **common)
    validation = code.datasets.ValidationDataset(
        min_cameo_submission_date="2021-09-17",
        max_cameo_submission_date="2021-12-11",
        max_sequence_length=700,
        **common,
    )
    convert(root, tmp_path / "data", world=World.create(None))
    return SimpleNamespace(train=train, validation=validation, root=tmp_path / "data")


def test_selected_chains_their_features_and_the_order_of_training(code: Any, their_data: Any, record: Record) -> None:
    shape = {"train": their_data.train, "validation": their_data.validation}
    atoms = templates = 0.0
    captured: dict[str, Any] = {}

    def capture(raw_features: dict[str, Any], **_: Any) -> dict[str, Any]:
        captured.update(raw_features)
        return {}

    code.datasets.process_features = capture
    for split, theirs in shape.items():
        reader = ShardReader(their_data.root, split)
        ours = list(convert_to_proteins(reader.read(range(len(reader)))))
        assert len(ours) == len(theirs)
        for number, protein in enumerate(ours):
            theirs[number, 5]
            assert np.array_equal(captured["aatype"].argmax(-1), protein.aatype)
            to_ours = np.array(code.residue_constants.MAP_HHBLITS_AATYPE_TO_OUR_AATYPE)
            assert np.array_equal(to_ours[captured["msa"]], protein.msa)
            assert np.array_equal(captured["deletion_matrix_int"], protein.deletions)
            assert np.allclose(captured["resolution"], protein.resolution, equal_nan=True)
            wide, known = in_37(code, protein.aatype, protein.atoms, protein.atom_mask)
            assert np.array_equal(known.numpy(), captured["all_atom_mask"])
            atoms = max(atoms, float(np.abs(wide.numpy() - captured["all_atom_positions"]).max()))
            order = np.argsort(-captured["template_sum_probs"].ravel(), kind="stable")  # training shuffles
            assert len(order) == (len(protein.template_aatype) if protein.template_aatype.size else 0)
            if len(order):
                wide, known = in_37(code, protein.template_aatype, protein.template_atoms, protein.template_mask)
                assert np.array_equal(known.numpy(), captured["template_all_atom_mask"][order])
                kinds = to_ours[captured["template_aatype"].argmax(-1)][order]
                assert np.array_equal(kinds, protein.template_aatype)
                difference = np.abs(wide.numpy() - captured["template_all_atom_positions"][order])
                templates = max(templates, float(difference.max()))
    record("openfold", "atoms of training and validation chains, angstrom", atoms, 0.0)
    record("openfold", "atoms of templates found in hhr files, angstrom", templates, 1e-5)

    opened = ShardReader(their_data.root, "train")
    read = opened.read(range(len(opened)), ["residue.offsets", "family"])
    ours_weights = compute_weights(np.diff(read["residue.offsets"]), read["family"])
    assert np.array_equal(ours_weights, their_data.train.get_sampler_weights().numpy())
    different = 0
    for ranks in (1, 2):
        for rank in range(ranks):
            sampler = code.samplers.InitialTrainingSampler(
                their_data.train, 2 // ranks, 2, 6, 77, ranks > 1, rank, ranks, num_prev_iters=0
            )
            drawn = ClusterSampling(ours_weights, 2)
            mine = [
                int(chain)
                for epoch in (1, 2, 3)
                for places in list_train_batches(len(opened), 2, seed=77, epoch=epoch, rank=rank, size=ranks)
                for chain in drawn.chains(places, seed=77, epoch=epoch)
            ]
            different += sum(a != b for a, (b, _) in zip(mine, sampler, strict=True))
    record("openfold", "chains drawn in another order, of 24", different, 0)


def test_clusters_of_an_alignment(code: Any, record: Record) -> None:
    protein = make_proteins(Families(50, 50, 30), 4, range(1))[0]
    settings = OpenFoldConfig(max_msa_clusters=6, max_extra_msa=12, masked_msa_fraction=0.3)
    ours = build_alignment(protein.msa, protein.deletions, settings, np.random.default_rng(3))
    order = [int(np.flatnonzero((protein.msa == row).all(1))[0]) for row in ours["true_msa"]]
    others = [number for number in range(len(protein.msa)) if number not in order]
    theirs = {
        "msa": torch.from_numpy(ours["msa"]).long(),
        "deletion_matrix": torch.from_numpy(protein.deletions[order]).float(),
        "extra_msa": torch.from_numpy(protein.msa[others]).long(),
        "extra_deletion_matrix": torch.from_numpy(protein.deletions[others]).float(),
    }
    theirs |= {f"{side}msa_mask": torch.ones(theirs[f"{side}msa"].shape) for side in ("", "extra_")}
    theirs = code.transforms.summarize_clusters()(code.transforms.nearest_neighbor_clusters()(theirs))
    error = np.abs(ours["cluster_profile"] - theirs["cluster_profile"].numpy()).max()
    record("openfold", "profiles of alignment clusters", float(error), 1e-5)
    error = np.abs(ours["cluster_deletions"] - theirs["cluster_deletion_mean"].numpy()).max()
    record("openfold", "mean deletions of alignment clusters", float(error), 1e-5)


def test_warm_up(code: Any, record: Record) -> None:
    worst = 0.0
    for steps in (0, 1, 2, 10, 37):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = code.lr_scheduler.OpenFoldBenchmarkLRScheduler(1e-3, 1e-5, steps, optimizer)
        own = OpenFoldConfig(learning_rate=1e-3, warmup_init=1e-5, warmup_steps=steps)
        for step in range(45):
            scheduler(step + 1)
            worst = max(worst, abs(optimizer.param_groups[0]["lr"] - learning_rate(own, step)))
    record("openfold", "learning rate of 45 steps, five warm-ups", worst, 0.0)
