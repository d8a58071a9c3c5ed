"""CosmoFlow beside the benchmark's code (mlcommons/hpc): reader of exported data, network, loss, metric, optimizer, schedule.

The reference runs in a Python with TensorFlow, on one rank, with a stand-in for horovod that is not initialised. Its gradients are
taken with a pooling of this file: on a CPU TensorFlow gives a window's gradient to every voxel within 1e-5 of the largest
(MaxPool3DGrad in pooling_ops_3d.cc), which changed gradients by 6 %.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mlhpc.suite.config import load_config
from mlhpc.suite.world import World
from mlhpc.workloads.cosmoflow import DESCRIPTOR, generate
from mlhpc.workloads.cosmoflow.config import CosmoFlowConfig
from mlhpc.workloads.cosmoflow.cosmology import Simulation
from mlhpc.workloads.cosmoflow.schedule import learning_rate
from mlhpc.workloads.cosmoflow.workload import CosmoFlow
from tests.fixtures.export_cosmoflow import export_tfrecord

SIDE, SAMPLES, BATCH = 64, 4, 2  # the widths of full, on an eighth of its voxels
EPOCHS, FULL_BATCH = 30, 512
RATES = (0.02, 0.005)  # of two steps: the forms of momentum differ only where the rate changes
ROUNDED = 1e-2  # if in one of two million windows the two largest values are equal to rounding, and another is taken; else 1e-5
QUIET_ON_ONE_CORE = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

RUN = Path(__file__).with_name("cosmoflow_code.py")


@pytest.fixture
def data_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Universes of one sample each."""
    size = generate.DataSize(Simulation(SIDE, SIDE, 256.0, "2lpt"), SIDE, SAMPLES, SAMPLES, 2)
    monkeypatch.setitem(generate.SIZES, "full", size)
    generate.generate(tmp_path / "data", "full", seed=0, world=World.create(None))
    return tmp_path / "data"


def settings(own: CosmoFlowConfig) -> dict[str, Any]:
    """What the reference is configured with, in its names."""
    return {
        "data": {"sample_shape": [SIDE, SIDE, SIDE, 4], "batch_size": BATCH, "n_train": SAMPLES, "n_valid": SAMPLES},
        "model": {
            "name": "cosmoflow",
            "target_size": 4,
            "conv_size": own.conv_channels[0],
            "n_conv_layers": len(own.conv_channels),
            "l2": own.l2,
            "dropout": own.dropout,
        },
        "rates": RATES,
        "schedule": {
            "base_lr": own.base_learning_rate,
            "global_batch_size": FULL_BATCH,
            "base_batch_size": own.base_batch_size,
            "scaling": own.scaling,
            "n_warmup_epochs": own.warmup_epochs,
        },
        "decay": list(zip(own.decay_boundary_epochs, own.decay_factors, strict=True)),
        "epochs": EPOCHS,
    }


def keras_form(value: Tensor) -> NDArray[Any]:
    """A weight or gradient as Keras has it: the axes of space, then inputs, then outputs."""
    order = (*range(2, value.ndim), *range(min(value.ndim, 2))[::-1])
    return value.detach().permute(order).numpy().copy()


def relative(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """The norm of the difference over the norm."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.fixture
def workload() -> CosmoFlow:
    """Of size full but for the side of its samples, in single precision."""
    return CosmoFlow(load_config(DESCRIPTOR, "full", [f"hyperparameters.input_size={SIDE}", "precision=float32"]))


@pytest.fixture
def model(workload: CosmoFlow) -> nn.Module:
    """A network whose biases are not zero."""
    torch.manual_seed(1)
    made = workload.build_model(World.create(None)).train()
    for name, value in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(value, std=0.05)
    return made


@pytest.fixture
def found(
    reference: Callable[[str], Path],
    python_with: Callable[..., str],
    workload: CosmoFlow,
    model: nn.Module,
    data_set: Path,
    tmp_path: Path,
) -> dict[str, NDArray[Any]]:
    """What the reference reads and computes with the network's weights."""
    code, python = reference("mlcommons/hpc") / "cosmoflow", python_with("tensorflow", "keras", "numpy")
    export_tfrecord(data_set, tmp_path / "tfrecord")
    np.savez(tmp_path / "weights.npz", *map(keras_form, model.parameters()))
    given = json.dumps(settings(workload._settings))
    paths = [str(tmp_path / name) for name in ("weights.npz", "tfrecord", "found.npz")]
    subprocess.run(
        [python, RUN, str(code), given, *paths], env=os.environ | QUIET_ON_ONE_CORE, cwd=tmp_path, check=True
    )
    return dict(np.load(tmp_path / "found.npz"))


def test_the_reference_on_exported_data_is_ours(
    found: dict[str, NDArray[Any]],
    workload: CosmoFlow,
    model: nn.Module,
    data_set: Path,
    record: Callable[..., None],
) -> None:
    compare = partial(record, "cosmoflow")
    batches = {}
    for split, theirs in (("train", "train"), ("validation", "valid")):
        data = workload.dataset(split, data_set)
        batches[split] = [data.load(range(n, n + BATCH), seed=0, epoch=1) for n in range(0, SAMPLES, BATCH)]
        everything = data.load(range(SAMPLES), seed=0, epoch=1)
        x, y = torch.log1p(everything["x"].float()).numpy(), everything["y"].numpy()
        np.testing.assert_array_equal(found[f"{theirs}.y"], y)
        compare(f"data export read by the reference's reader: {split}", np.abs(found[f"{theirs}.x"] - x).max(), 1e-6)
    assert found["count"] == DESCRIPTOR.card().size("full").model_parameters

    totals: Counter[str] = Counter()
    with torch.no_grad():
        for batch in batches["validation"]:
            totals.update({name: float(value) for name, value in workload.eval_stats(model.eval(), batch).items()})
    compare("metric (MAE)", abs(workload.metrics(totals)["eval_error"] / found["mae"] - 1), 1e-6)

    first, before = batches["train"][0], [keras_form(value) for value in model.parameters()]
    compare(
        f"predictions, {SIDE}^3 voxels", relative(model.train()(first["x"]).detach().numpy(), found["predicted"]), 1e-5
    )
    loss = workload.loss(model, first)
    loss.backward()
    compare("loss, MSE and L2", abs(loss.item() / found["loss"] - 1), 1e-6)
    gradients = [keras_form(value.grad) for value in model.parameters() if value.grad is not None]
    assert len(gradients) == len(before)
    worst = max(relative(value, found[f"gradient.{n}"]) for n, value in enumerate(gradients))
    compare(f"gradients, largest of {len(gradients)} weights", worst, ROUNDED)

    optimizer = workload.build_optimizer(model, 1).optimizer
    for rate, batch in zip(RATES, batches["train"], strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
    changes = [
        relative(keras_form(value) - start, found[f"trained.{n}"] - start)
        for n, (value, start) in enumerate(zip(model.parameters(), before, strict=True))
    ]
    compare("change of a weight in two steps of SGD, the rate changed", max(changes), ROUNDED)
    rates = [learning_rate(workload._settings, FULL_BATCH, epoch) for epoch in range(1, EPOCHS + 1)]
    compare(f"learning rate of {EPOCHS} epochs", np.abs(rates / found["rates"] - 1).max(), 1e-12)
