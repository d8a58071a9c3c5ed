"""The benchmark's OpenCatalyst code from a clone, in a Python with torch_geometric; as a program, one step with given weights.

    python open_catalyst_code.py CLONE WEIGHTS LMDB OUT

torch_scatter and torch_sparse, which are compiled for old versions, are stood in for by the few lines that it uses of them.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def module(name: str, **members: Any) -> types.ModuleType:
    made = sys.modules[name] = types.ModuleType(name)
    made.__dict__.update(members)
    return made


def scatter(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None) -> Tensor:
    rows = int(index.max()) + 1 if dim_size is None else dim_size
    return src.new_zeros(rows, *src.shape[1:]).index_add(dim, index, src)


class SparseTensor:
    """Rows of a matrix in the order of rows, then columns."""

    count: Tensor
    storage: types.SimpleNamespace

    def __init__(self, row: Tensor, col: Tensor, value: Tensor, sparse_sizes: tuple[int, int]) -> None:
        order = torch.argsort(row * sparse_sizes[1] + col, stable=True)
        self.row, self.col, self.value, self.sizes = row[order], col[order], value[order], sparse_sizes

    def __getitem__(self, rows: Tensor) -> SparseTensor:
        begin = torch.searchsorted(self.row, torch.arange(self.sizes[0] + 1))
        count = (begin[1:] - begin[:-1])[rows]
        part = SparseTensor.__new__(SparseTensor)
        part.count, row = count, torch.repeat_interleave(torch.arange(len(rows)), count)
        before = torch.repeat_interleave(begin[rows] - (count.cumsum(0) - count), count)
        taken = before + torch.arange(len(row))
        col, value = self.col[taken], self.value[taken]
        part.storage = types.SimpleNamespace(col=lambda: col, value=lambda: value, row=lambda: row)
        return part

    def set_value(self, _: Any) -> SparseTensor:
        return self

    def sum(self, dim: int) -> Tensor:
        return self.count


def load(clone: Path) -> types.SimpleNamespace:
    """The reference's data set, collater, network, loss and metric."""
    module("torch_scatter", scatter=scatter)
    module("torch_sparse", SparseTensor=SparseTensor)
    module("demjson")
    module("torch_geometric.nn.acts", swish=torch.nn.functional.silu)
    for package in ("ocpmodels", "ocpmodels.models", "ocpmodels.modules", "ocpmodels.datasets"):  # not what they import
        module(package, __path__=[str(clone / "open_catalyst" / package.replace(".", "/"))])
    from ocpmodels.datasets.trajectory_lmdb import TrajectoryLmdbDataset, data_list_collater
    from ocpmodels.models.dimenet_plus_plus import DimeNetPlusPlusWrap
    from ocpmodels.modules.evaluator import Evaluator
    from ocpmodels.modules.loss import DDPLoss

    return types.SimpleNamespace(
        data_set=TrajectoryLmdbDataset,
        collate=data_list_collater,
        network=DimeNetPlusPlusWrap,
        evaluator=Evaluator,
        loss=DDPLoss(torch.nn.L1Loss()),
    )


def network(code: types.SimpleNamespace, shape: dict[str, Any]) -> torch.nn.Module:
    """The reference's network, with forces as gradients of energies."""
    made: torch.nn.Module = code.network(None, None, 1, use_pbc=True, regress_forces=True, **shape)
    return made


def main() -> None:
    weights, lmdb, out = sys.argv[2:]
    code, given = load(Path(sys.argv[1])), torch.load(weights)
    model = network(code, given["shape"]).double()
    model.load_state_dict({name: given["state"][name] for name in model.state_dict()})
    data = code.data_set({"src": lmdb})
    batch = code.collate([data[number] for number in given["samples"]])
    names = ("pos", "force", "y", "sid", "fid", "tags", "fixed", "edge_index")
    found = {name: getattr(batch, name).numpy() for name in names}
    for name in ("pos", "cell", "force"):
        setattr(batch, name, getattr(batch, name).double())
    energy, forces = model(batch)
    free = batch.fixed == 0
    loss = 50 * code.loss(forces[free], batch.force[free] / given["std"])
    loss.backward()
    natoms = torch.tensor([int(free[batch.batch == n].sum()) for n in range(len(batch.natoms))])
    metric = code.evaluator("s2ef").eval(
        {"energy": energy.view(-1).detach(), "forces": given["std"] * forces[free].detach(), "natoms": batch.natoms},
        {"energy": batch.y.double(), "forces": batch.force[free], "natoms": natoms},
    )
    found |= {"energy": energy.detach().view(-1).numpy(), "forces": forces.detach().numpy(), "loss": loss.item()}
    found |= {f"grad.{name}": value.grad.numpy() for name, value in model.named_parameters() if value.grad is not None}
    np.savez(out, mae=metric["forces_mae"]["metric"], length=len(data), **found)


if __name__ == "__main__":
    main()
