"""What holds of every workload: how samples are batched does not matter to its metric, and bfloat16 little to its loss."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mlhpc.suite.config import load_config
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World
from tests.workloads.tiny import TINY


@pytest.fixture(params=list(TINY))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(name: str, made_once: Callable[[str], Path]) -> Path:
    return made_once(name)


@pytest.fixture
def workload(name: str, root: Path) -> Workload:
    """The workload at its smoke size, made to fit the tiny data set."""
    overrides = TINY[name].overrides(read_manifest(root).attributes)
    chosen = load_descriptor(name)
    return load_workload(chosen)(load_config(chosen, "smoke", overrides))


@pytest.fixture
def model(workload: Workload, world: World) -> nn.Module:
    """With weights in the layers that start at zero, so that something is predicted."""
    torch.manual_seed(0)
    built = workload.build_model(world)
    for parameter in built.parameters():
        if not parameter.detach().any():
            nn.init.normal_(parameter, std=0.1)
    return built


def test_the_metric_does_not_depend_on_how_samples_are_batched(
    workload: Workload, model: nn.Module, root: Path
) -> None:
    """No sample is padded, repeated or left out, and averages are taken at the end."""
    data = workload.dataset("validation", root)
    numbers = list(range(len(data)))
    model.eval()
    results = []
    for pieces in ([numbers], [numbers[:2], numbers[2:]], [[number] for number in reversed(numbers)]):
        totals: dict[str, float] = {}
        for piece in pieces:
            with torch.no_grad():
                stats: dict[str, Tensor] = workload.eval_stats(model, data.load(piece, seed=0, epoch=0))
            totals = {key: totals.get(key, 0.0) + value.item() for key, value in stats.items()}
        results.append(workload.metrics(totals))
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[2] == pytest.approx(results[0], rel=1e-5)
    metric = load_descriptor(workload.config.workload).card().size("smoke").metric
    assert results[1][metric] == pytest.approx(results[0][metric], rel=1e-6)


def test_bfloat16_autocast_gives_nearly_the_same_loss_in_float32(
    name: str, workload: Workload, model: nn.Module, root: Path
) -> None:
    if name == "swinv2_moe":
        pytest.skip("other experts may be chosen")
    batch = workload.dataset("train", root).load([0, 1, 2, 3], seed=0, epoch=1)
    torch.manual_seed(0)  # of dropout
    exact = float(workload.loss(model, batch).detach())
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = workload.loss(model, batch)
        loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(exact, rel=0.02)
    assert all(bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None)
