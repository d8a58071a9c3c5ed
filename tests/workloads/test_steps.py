"""What holds of a training step and an evaluation of every workload: no value is waited for, batches do not matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from suite.config import load_config
from suite.data.manifest import read_manifest
from suite.descriptor import descriptor
from suite.workload import Workload, load_workload
from suite.world import World
from tests.workloads.tiny import TINY

# What the host must wait for the device for: values, and shapes that depend on values
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "is_nonzero",
    "equal",
    "bincount",
}


class NothingIsWaitedFor(TorchDispatchMode):
    """Raises at an operator that would make the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in {"index", "index_put", "index_put_"} and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITING or masks:
            raise AssertionError(f"{func} would wait for the device")
        return func(*args, **(kwargs or {}))


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
    chosen = descriptor(name)
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


def test_no_step_waits_for_the_device(workload: Workload, model: nn.Module, root: Path) -> None:
    """The references read losses and metrics back in every step; each read empties the device's queue."""
    batch = workload.dataset("train", root).load(range(4), seed=1, epoch=1)
    workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]  # tables are made the first time
    with NothingIsWaitedFor():
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]


def test_no_evaluation_batch_waits_for_the_device(workload: Workload, model: nn.Module, root: Path) -> None:
    batch = workload.dataset("validation", root).load(range(3), seed=0, epoch=0)
    model.eval()
    with torch.no_grad(), NothingIsWaitedFor():
        workload.eval_stats(model, batch)


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
    metric = descriptor(workload.config.workload).card().size("smoke").metric
    assert results[1][metric] == pytest.approx(results[0][metric], rel=1e-6)
