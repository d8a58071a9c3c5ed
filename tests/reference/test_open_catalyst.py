"""OpenCatalyst beside the benchmark's code (mlcommons/hpc): LMDB files both ways, DimeNet++ with transferred weights, loss, metric.

The reference runs in a Python with torch_geometric.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mlhpc.suite.config import load_config
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.world import World
from mlhpc.workloads.open_catalyst import DESCRIPTOR
from mlhpc.workloads.open_catalyst.convert import LmdbFile
from mlhpc.workloads.open_catalyst.workload import OpenCatalyst
from tests.fixtures.export_open_catalyst import export_lmdb
from tests.workloads.open_catalyst.conftest import random_structure
from tests.workloads.tiny import make

REPOSITORY = "mlcommons/hpc"

WRITE = """
import pickle, sys
import lmdb, numpy as np, torch
from torch_geometric.data import Data
fields, path = np.load(sys.argv[1]), sys.argv[2]
with lmdb.open(path, subdir=False, map_size=1 << 24) as environment, environment.begin(write=True) as put:
    for number in range(2):
        data = Data(
            pos=torch.tensor(fields["position"]), cell=torch.tensor(fields["cell"])[None], natoms=len(fields["number"]),
            atomic_numbers=torch.tensor(fields["number"]).float(), tags=torch.tensor(fields["tag"]),
            fixed=torch.tensor(fields["fixed"]).float(), force=torch.tensor(fields["force"]), y=float(fields["energy"]),
            sid=7, fid=number, edge_index=torch.zeros(2, 3, dtype=torch.long),
        )
        if number:
            data.get_all_tensor_attrs(), data.num_nodes, data.is_coalesced()  # what was asked for is kept in the object
        put.put(str(number).encode(), pickle.dumps(data, protocol=-1))
    put.put(b"length", pickle.dumps(2, protocol=-1))
"""

RUN = Path(__file__).with_name("open_catalyst_code.py")

LAYERS = {  # ours to theirs, in the names of weights
    "radial.frequency_K": "rbf.freq",
    "embedding.": "emb.",
    "outputs.": "output_blocks.",
    "interactions.": "interaction_blocks.",
    ".before_skip.": ".layers_before_skip.",
    ".after_skip.": ".layers_after_skip.",
}


def theirs(name: str) -> str:
    for ours, other in LAYERS.items():
        name = name.replace(ours, other)
    return name


def test_lmdb_files_of_todays_torch_geometric_are_read(
    python_with: Callable[..., str], record: Callable[..., None], tmp_path: Path
) -> None:
    python, made = python_with("torch_geometric", "lmdb", "numpy", "torch"), random_structure(5, atoms=9)
    fields = {name: getattr(made, name) for name in ("position", "cell", "number", "tag", "fixed", "force", "energy")}
    np.savez(tmp_path / "fields.npz", **fields)
    subprocess.run([python, "-c", WRITE, tmp_path / "fields.npz", tmp_path / "a.lmdb"], check=True)
    found = list(LmdbFile(tmp_path / "a.lmdb").structures(0, 2))
    assert [(each.trajectory, each.frame) for each in found] == [(7, 0), (7, 1)]
    worst = max(
        float(np.abs(getattr(each, name) - fields[name]).max()) for each in found for name in ("position", "force")
    )
    record("open_catalyst", "LMDB file that torch_geometric pickled", worst, 1e-12)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make("open_catalyst", tmp_path / "data", World.create(None))


def test_the_reference_on_exported_data_is_ours(
    reference: Callable[[str], Path],
    python_with: Callable[..., str],
    record: Callable[..., None],
    tiny: Path,
    tmp_path: Path,
) -> None:
    python = python_with("torch_geometric", "lmdb", "numpy", "torch", "matplotlib", "yaml")
    code, samples = reference(REPOSITORY), [0, 5, 2]
    export_lmdb(tiny, tmp_path / "lmdb")
    std = 2.0
    workload = OpenCatalyst(
        load_config(DESCRIPTOR, "smoke", [f"hyperparameters.target_std_ev={std}", "global_batch_size=3"])
    )
    own = workload._settings
    torch.manual_seed(0)
    model = workload.build_model(World.create(None)).double().train()
    for output in model.outputs:  # type: ignore[union-attr]
        torch.nn.init.normal_(output.lin.weight, std=0.1)
    shape = {
        "hidden_channels": own.hidden_channels,
        "out_emb_channels": own.output_channels,
        "num_blocks": own.blocks,
        "int_emb_size": own.triplet_channels,
        "basis_emb_size": own.basis_channels,
        "num_spherical": own.num_spherical,
        "num_radial": own.num_radial,
        "cutoff": own.cutoff_angstrom,
        "envelope_exponent": own.envelope_exponent,
        "num_before_skip": own.before_skip,
        "num_after_skip": own.after_skip,
        "num_output_layers": own.output_layers,
    }
    state = {theirs(name): value for name, value in model.state_dict().items()}
    torch.save({"shape": shape, "state": state, "samples": samples, "std": std}, tmp_path / "weights.pt")
    paths = [code, tmp_path / "weights.pt", tmp_path / "lmdb" / "train", tmp_path / "found.npz"]
    subprocess.run([python, RUN, *map(str, paths)], check=True)
    found = dict(np.load(tmp_path / "found.npz"))

    stored = ShardReader(tiny, "train").read(samples)
    assert found["length"] == len(ShardReader(tiny, "train"))
    names = {
        "pos": "atom.position",
        "force": "atom.force",
        "tags": "atom.tag",
        "fixed": "atom.fixed",
        "sid": "trajectory",
    }
    read = max(float(np.abs(found[name] - stored[other]).max()) for name, other in names.items())
    record("open_catalyst", "data export read by the reference's loader", read, 0)
    assert found["edge_index"].shape[1] == stored["edges"].sum()

    batch = {
        name: value.double() if value.is_floating_point() else value
        for name, value in workload.dataset("train", tiny).load(samples, seed=0, epoch=1).items()
    }
    energy, forces = model(batch)
    loss = workload.loss(model, batch)
    loss.backward()
    record("open_catalyst", "energy", relative(energy.detach().numpy(), found["energy"]), 1e-6)
    record("open_catalyst", "forces", relative(forces.detach().numpy(), found["forces"]), 1e-6)
    record("open_catalyst", "loss", abs(loss.item() / float(found["loss"]) - 1), 1e-6)
    gradients = [
        relative(value.grad.numpy(), found[f"grad.{theirs(name)}"])
        for name, value in model.named_parameters()
        if value.grad is not None and f"grad.{theirs(name)}" in found
    ]
    assert len(gradients) > 30
    record("open_catalyst", f"gradients, largest of {len(gradients)} weights", max(gradients), 1e-5)
    totals = {name: float(value) for name, value in workload.eval_stats(model.eval(), batch).items()}
    record(
        "open_catalyst",
        "metric (force MAE)",
        abs(workload.metrics(totals)["eval_error"] / float(found["mae"]) - 1),
        1e-6,
    )


def relative(ours: np.ndarray, other: np.ndarray) -> float:
    """The largest difference over the largest value."""
    return float(np.abs(ours - other.reshape(ours.shape)).max() / max(float(np.abs(other).max()), 1e-12))
