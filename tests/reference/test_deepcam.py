"""DeepCAM beside the benchmark's code (mlcommons/hpc): network with transferred weights, loss, metric, reader of exported data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mlhpc.suite.config import load_config
from mlhpc.suite.world import World
from mlhpc.workloads.deepcam import DESCRIPTOR
from mlhpc.workloads.deepcam.config import CHANNELS, LOSS_WEIGHTS
from mlhpc.workloads.deepcam.data import DeepCamData
from mlhpc.workloads.deepcam.metric import compute_metrics, compute_statistics
from mlhpc.workloads.deepcam.model import DeepLabV3Plus
from mlhpc.workloads.deepcam.workload import DeepCam
from tests.fixtures.export_deepcam import export_hdf5
from tests.workloads.tiny import make

REPOSITORY, CODE = "mlcommons/hpc", "deepcam/src/deepCam"
GLOBAL, PROJECT = "bottleneck.global_branch.", "bottleneck.project."


@pytest.fixture
def code(reference: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """The function that loads a module of the reference from its file, without the packages beside it."""
    folder = reference(REPOSITORY) / CODE

    def load(path: str) -> ModuleType:
        spec = spec_from_file_location(f"reference_{Path(path).stem}", folder / path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def layers(model: nn.Module, x: Tensor) -> list[tuple[str, nn.Module]]:
    """The modules that hold weights themselves, in the order in which a forward pass calls them."""
    called: list[tuple[str, nn.Module]] = []
    hooks = [
        module.register_forward_hook(lambda module, _, __, name=name: called.append((name, module)))
        for name, module in model.named_modules()
        if list(module.parameters(recurse=False))
    ]
    with torch.no_grad():
        model.eval()(x)
    for hook in hooks:
        hook.remove()
    return called


def weights(pairs: list[Any]) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Our weights and theirs, of equal shapes, layer by layer."""
    for (_, mine), (_, given) in pairs:
        for value, source in zip(mine.parameters(recurse=False), given.parameters(recurse=False), strict=True):
            assert value.shape == source.shape
            yield value, source


def test_the_network_with_the_references_weights_is_the_reference(
    code: Callable[[str], ModuleType], record: Callable[..., None]
) -> None:
    torch.manual_seed(0)
    config: Any = load_config(DESCRIPTOR, "full").hyperparameters
    theirs = code("architecture/deeplab_xception.py").DeepLabv3_plus(len(CHANNELS), 3, _print=False)
    ours = DeepLabV3Plus(config, channels_last=False)
    theirs.bottleneck.tiles = (1, 1, 3, 4)  # of 1152 x 768 pixels there
    x = torch.rand(2, len(CHANNELS), 48, 64)
    own = layers(ours, x.permute(0, 2, 3, 1))
    everywhere = [each for each in own if each[0].startswith(GLOBAL)]  # the reference pools last, we pool first
    rest = [each for each in own if not each[0].startswith(GLOBAL)]
    at = next(place for place, (name, _) in enumerate(rest) if name.startswith(PROJECT))
    own = [*rest[:at], *everywhere, *rest[at:]]
    pairs = list(zip(own, layers(theirs, x), strict=True))
    with torch.no_grad():
        for value, source in weights(pairs):
            value.copy_(source)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    logits, expected = ours.train()(x.permute(0, 2, 3, 1)), theirs.train()(x)
    scale = expected.abs().max()
    record(
        "deepcam",
        f"logits of {len(pairs)} layers, training mode",
        ((logits - expected).abs().max() / scale).item(),
        1e-5,
    )
    y = torch.randint(3, (2, 48, 64))
    loss = torch.nn.functional.cross_entropy(logits, y, torch.tensor(LOSS_WEIGHTS), reduction="sum") / y.numel()
    loss.backward()
    criterion = code("utils/losses.py").FPLoss(LOSS_WEIGHTS)
    expected_loss = criterion(expected, y)
    expected_loss.backward()
    record("deepcam", "loss", abs(loss.item() / expected_loss.item() - 1), 1e-6)
    worst = 0.0
    for value, source in weights(pairs):
        assert value.grad is not None
        assert source.grad is not None
        worst = max(worst, ((value.grad - source.grad).norm() / source.grad.norm().clamp(min=1e-12)).item())
    record("deepcam", "gradients, largest relative difference of a layer", worst, 1e-4)


def test_the_loss_of_the_workload_and_its_metric_are_the_references(
    code: Callable[[str], ModuleType], record: Callable[..., None]
) -> None:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(3, (4, 32, 48), generator=generator)
    y[0] = 0
    logits = torch.randn(4, 3, 32, 48, generator=generator, dtype=torch.float64)
    workload = DeepCam(load_config(DESCRIPTOR, "smoke", ["hyperparameters.height=32", "hyperparameters.width=48"]))
    ours = workload.loss(lambda x: logits, {"x": logits, "y": y.to(torch.uint8)})  # type: ignore[arg-type]
    weights = code("utils/losses.py").FPLoss(LOSS_WEIGHTS).double()
    record("deepcam", "loss of given logits, float64", abs(ours.item() / weights(logits, y).item() - 1), 1e-6)
    predicted = logits.argmax(1)
    predicted[0] = 0  # classes that are in neither count 1
    score = code("utils/metric.py").compute_score(predicted, y, 3).item()
    found = compute_metrics(
        {name: float(value) for name, value in compute_statistics(predicted, y.to(torch.uint8)).items()}
    )
    record("deepcam", "metric (mean IoU)", abs(found["eval_accuracy"] - score), 1e-6)


def test_the_references_reader_reads_exported_data(
    code: Callable[[str], ModuleType], record: Callable[..., None], tmp_path: Path
) -> None:
    root = make("deepcam", tmp_path / "data", World.create(None))
    export_hdf5(root, tmp_path / "hdf5")
    config: Any = load_config(
        DESCRIPTOR, "smoke", ["hyperparameters.height=32", "hyperparameters.width=48"]
    ).hyperparameters
    ours, worst = DeepCamData(root, "train", config), 0.0
    theirs = code("data/cam_hdf5_dataset.py").CamDataset(
        str(tmp_path / "hdf5" / "train"), str(tmp_path / "hdf5" / "stats.h5"), list(range(len(CHANNELS)))
    )
    assert len(theirs) == len(ours)
    for number in range(len(ours)):
        batch, (data, label, _) = ours.load([number], seed=0, epoch=1), theirs[number]
        np.testing.assert_array_equal(label, batch["y"][0])
        worst = max(worst, float(np.abs(data.transpose(1, 2, 0) - batch["x"][0].numpy()).max()))
    record("deepcam", "data export read by the reference's loader, fields in [0, 1]", worst, 1e-6)
