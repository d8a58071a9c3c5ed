"""OpenFold beside mlcommons/hpc: the features of templates."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.reference.openfold_code import openfold_code
from workloads.openfold import residues
from workloads.openfold.config import OpenFoldConfig
from workloads.openfold.features import Protein, sample
from workloads.openfold.model import PSI, template_features
from workloads.openfold.proteins import Families, families

Reference = Callable[[str], Path]
Record = Callable[[str, str, float, float], None]
ATOMS_37 = 37


@pytest.fixture
def code(reference: Reference) -> Iterator[Any]:
    """Modules of the reference by the last part of their names."""
    names = ("data.residue_constants", "data.transforms", "model.alphafold")
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
    for seed, whole in enumerate(families(Families(60, 90, 4, 4), 3, range(3))):
        protein = damaged(whole, seed)
        arrays = sample(protein, settings, np.random.default_rng(seed), length=len(protein), training=False)
        ours = {name: torch.from_numpy(value)[None] for name, value in arrays.items()}
        pair, angle = template_features(ours)
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
