"""The weights that training starts from."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mlhpc.suite.config import load_config
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import DESCRIPTOR
from mlhpc.workloads.openfold.checkpoint import load_checkpoint, save_checkpoint
from mlhpc.workloads.openfold.config import find_checkpoint
from mlhpc.workloads.openfold.workload import OpenFold


def build(size: str, *overrides: str) -> tuple[OpenFold, torch.nn.Module]:
    workload = OpenFold(load_config(DESCRIPTOR, size, overrides))
    return workload, workload.build_model(World.create(None))


@pytest.mark.parametrize("size", ["smoke", "mini"])
def test_small_sizes_start_from_the_file_that_the_card_names(size: str) -> None:
    workload, model = build(size)
    with np.load(find_checkpoint("start.npz")) as file:
        assert all(np.array_equal(value.numpy(), file[name]) for name, value in model.state_dict().items())
    rule = DESCRIPTOR.card().size(size).constraints["init_checkpoint_sha256sum"]
    assert workload.hyperparameters()["init_checkpoint_sha256sum"] == rule.equals


def test_without_a_file_the_seed_draws_the_weights_and_the_logged_sum_is_empty() -> None:
    torch.manual_seed(1)
    workload, first = build("smoke", "hyperparameters.init_checkpoint=null")
    torch.manual_seed(2)
    _, second = build("smoke", "hyperparameters.init_checkpoint=null")
    assert workload.hyperparameters()["init_checkpoint_sha256sum"] == ""
    assert any(not torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


def test_saved_weights_are_loaded_by_an_absolute_path(tmp_path: Path) -> None:
    _, model = build("smoke", "hyperparameters.init_checkpoint=null")
    save_checkpoint(model, tmp_path / "mine.npz")
    _, again = build("smoke", f"hyperparameters.init_checkpoint={tmp_path / 'mine.npz'}")
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_weights_of_another_network_name_what_differs() -> None:
    with pytest.raises(InputError, match=r"start\.npz: weights of another network: .* expected .*init_checkpoint=null"):
        build("smoke", "hyperparameters.pair_channels=32")
    with pytest.raises(InputError, match=r"is missing, expected \("):
        build("smoke", "hyperparameters.evoformer_blocks=2")


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 cut", b"\x80\x02}q\x00."])
def test_a_file_without_arrays_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "official.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"official\.pt: hyperparameters\.init_checkpoint expects a \.npz file"):
        load_checkpoint(torch.nn.Linear(1, 1), str(path))


def test_a_single_array_is_no_checkpoint(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"one\.npy: hyperparameters\.init_checkpoint expects a \.npz file"):
        load_checkpoint(torch.nn.Linear(1, 1), str(tmp_path / "one.npy"))
