"""The data loader of the benchmark's OpenFold (mlcommons/hpc) reads exported data: structures, alignments, templates, splits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import generate, residues
from mlhpc.workloads.openfold.proteins import Families
from mlhpc.workloads.openfold.public.structures import ATOMS_37
from mlhpc.workloads.openfold.shard_form import convert_to_proteins
from tests.fixtures.export_openfold import ALIGNMENTS, RELEASED, STRUCTURES, export_preprocessed

# Biopython parses mmCIF text only; what is read here is preprocessed.
READ = """
import dataclasses, sys, types, dacite, numpy, pandas, torch
class Config(type(sys)):  # Python 3.11 refuses the defaults of the reference's configuration: objects without a hash
    dataclass = staticmethod(lambda cls: dataclasses.dataclass(unsafe_hash=True)(cls))
    def __getattr__(self, name): return getattr(dataclasses, name)
sys.modules["dataclasses"] = Config("dataclasses")
import openfold.config
sys.modules["dataclasses"] = dataclasses
for name in ("Bio", "Bio.PDB", "Bio.Data", "Bio.PDB.Model", "Bio.PDB.Structure"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["Bio"].PDB = sys.modules["Bio.PDB"]
sys.modules["Bio.Data"].SCOPData = None
sys.modules["Bio.PDB.Model"].Model = sys.modules["Bio.PDB.Structure"].Structure = object
from pathlib import Path
import numpy as np
from openfold.config import AlphaFoldConfig
from openfold.data.alignments import load_alignments
from openfold.data.features import create_mmcif_features, create_msa_features, create_template_features
from openfold.data.mmcif import load_mmcif_dict
from openfold.datasets import InitialTrainingDataset
structures, alignments, out, until = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
config = AlphaFoldConfig.from_preset(stage="initial_training", precision="fp32")
data = InitialTrainingDataset(
    structures / "chains.csv", structures / "dicts", structures / "obsolete.dat", alignments, until, config
)
data.template_hit_featurizer.shuffle_top_k_prefiltered = None  # in training it shuffles hits of equal worth
arrays = {"names": np.array([chain["pdb_chain_id"] for chain in data.mmcif_chains])}
arrays["weights"] = data.get_sampler_weights().numpy()
for number, chain in enumerate(data.mmcif_chains):
    entry = load_mmcif_dict(structures / "dicts", chain["pdb_id"])
    files = load_alignments(data.alignments_super_index, alignments, chain["pdb_chain_id"])
    raw = create_mmcif_features(entry, "A") | create_msa_features(chain["sequence"], [files["uniref90_hits.a3m"]])
    raw |= create_template_features(
        chain["sequence"], files["pdb70_hits.hhr"], data.template_hit_featurizer, chain["release_date"], chain["pdb_id"],
        60, None,
    )
    for name in ("aatype", "all_atom_positions", "all_atom_mask", "msa", "deletion_matrix_int", "template_aatype",
                 "template_all_atom_positions", "template_all_atom_mask"):
        arrays[f"{name}.{number}"] = raw[name]
arrays["crop"] = data[(0, 7)]["aatype"].numpy()
np.savez(out, **arrays)
"""


@pytest.fixture
def data_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Chains long enough for the reference to take templates, which cover too little of a chain to count as copies."""
    monkeypatch.setitem(generate.SIZES, "smoke", generate.DataSize(Families(40, 60, 6, 2), 6, 2, 2))
    generate.generate(tmp_path / "data", "smoke", seed=0, world=World.create(None))
    return tmp_path / "data"


def test_the_references_data_loader_reads_what_the_data_set_holds(
    reference: Callable[[str], Path],
    python_with: Callable[..., str],
    record: Callable[..., None],
    data_set: Path,
    tmp_path: Path,
) -> None:
    code, python = reference("mlcommons/hpc") / "openfold", python_with("dacite", "pandas", "numpy", "torch")
    export_preprocessed(data_set, tmp_path / "out")
    places = [str(tmp_path / "out" / each) for each in (STRUCTURES, ALIGNMENTS)]
    subprocess.run(
        [python, "-c", READ, *places, str(tmp_path / "read.npz"), RELEASED["train"]],
        env={"PYTHONPATH": str(code), "PATH": ""},
        check=True,
        cwd=tmp_path,
    )
    read = dict(np.load(tmp_path / "read.npz"))
    reader = ShardReader(data_set, "train")
    ours = list(convert_to_proteins(reader.read(range(len(reader)))))
    assert len(read["names"]) == len(ours)  # the validation split is released too late, templates are of no cluster
    assert read["crop"].shape[0] == 256
    differences, templates = {"structures": 0.0, "templates": 0.0, "alignments": 0.0}, 0
    for number, protein in enumerate(ours):
        np.testing.assert_array_equal(read[f"aatype.{number}"].argmax(-1), protein.aatype)
        atoms, mask = atom37(protein.aatype, protein.atoms, protein.atom_mask)
        found, known = read[f"all_atom_positions.{number}"], read[f"all_atom_mask.{number}"]
        differences["structures"] = max(
            differences["structures"], np.abs(found - atoms).max(), np.abs(known - mask).max()
        )
        _, rows = np.unique(protein.msa, axis=0, return_index=True)  # the reference leaves out rows that it has seen
        deleted = protein.deletions[np.sort(rows)] - read[f"deletion_matrix_int.{number}"]
        differences["alignments"] = max(differences["alignments"], np.abs(deleted).max())
        assert read[f"msa.{number}"].shape == (len(rows), len(protein))
        kinds = [
            k for k in range(2) if (protein.template_aatype[k] != residues.GAP).sum() <= 0.95 * len(protein)
        ]  # longer ones count as copies there
        assert len(read[f"template_aatype.{number}"]) == len(kinds)
        for place, k in enumerate(kinds):
            templates += 1
            atoms, mask = atom37(
                protein.template_aatype[k].clip(max=residues.UNKNOWN),
                protein.template_atoms[k],
                protein.template_mask[k],
            )
            atoms -= mask[..., None] * atoms[mask > 0].mean(0)  # as there, where templates are centred
            found = read[f"template_all_atom_positions.{number}"][place]
            differences["templates"] = max(differences["templates"], np.abs(found - atoms).max())
            np.testing.assert_array_equal(read[f"template_all_atom_mask.{number}"][place], mask)
    assert templates >= 6
    assert len(set(read["weights"])) == 1  # families are clusters of one chain each, and none is longer than 256
    for what, value in differences.items():
        record(
            "openfold", f"data export read by the reference's loader: {what}", value, 1e-5 if what == "templates" else 0
        )


def atom37(aatype: np.ndarray, atoms: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and mask by the 37 names of atoms, one atom at a time."""
    positions, known = np.zeros((len(aatype), 37, 3), np.float32), np.zeros((len(aatype), 37), np.float32)
    for residue, slot in zip(*np.nonzero(mask), strict=True):
        place = ATOMS_37.index(residues.ATOM_NAMES[aatype[residue]][slot])
        positions[residue, place], known[residue, place] = atoms[residue, slot], 1
    return positions, known
