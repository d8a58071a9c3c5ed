"""What a workload computes on the device of $MLHPC_TEST_DEVICE (cpu, or cuda on a machine with a GPU), beside float64 on the CPU.

OpenFold's structure module computes in float32 whatever the rest does: beside it stands float32 on the CPU, on a GPU only.
"""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mlhpc.suite.config import load_config
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.devices import use_precision
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World
from tests.workloads.tiny import TINY

DEVICE = torch.device(os.environ.get("MLHPC_TEST_DEVICE", "cpu"))
LIMITS = (1e-5, 1e-3)  # relative to the loss, and to the norm of all gradients
SINGLE = ("openfold",)
BACK_END = {"swinv2_moe": ["hyperparameters.moe.backend=auto"]}  # grouped_mm has no float64


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    use_precision("float32", DEVICE)
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(params=[name for name in TINY if DEVICE.type == "cuda" or name not in SINGLE])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workload(name: str, made_once: Callable[[str], Path]) -> Workload:
    overrides = TINY[name].overrides(read_manifest(made_once(name)).attributes)
    chosen = load_descriptor(name)
    return load_workload(chosen)(
        load_config(chosen, "smoke", [*overrides, *BACK_END.get(name, ()), f"device={DEVICE.type}"])
    )


@pytest.fixture
def model(name: str, workload: Workload, world: World) -> nn.Module:
    """Evaluation mode: dropout draws other numbers on another device. Weights that start at zero are drawn."""
    torch.manual_seed(0)
    built = workload.build_model(world)
    for parameter in built.parameters():
        if not parameter.detach().any():
            nn.init.normal_(parameter, std=0.1)
    return built.train(name == "open_catalyst")  # it has no dropout, and forces have gradients in training only


def reference(name: str) -> torch.dtype:
    return torch.float32 if name in SINGLE else torch.float64


@contextmanager
def numbers(dtype: torch.dtype) -> Iterator[torch.dtype]:
    """Constants that a model makes have this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield dtype
    finally:
        torch.set_default_dtype(before)


def to(batch: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        key: value.to(device, dtype) if value.is_floating_point() else value.to(device) for key, value in batch.items()
    }


def gradients(workload: Workload, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss = workload.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return loss.detach().double().cpu(), torch.cat([grad.double().cpu().flatten() for grad in found])


def test_loss_and_gradients_equal_those_of_float64(
    name: str, workload: Workload, model: nn.Module, made_once: Callable[[str], Path]
) -> None:
    batch = workload.dataset("train", made_once(name)).load(range(4), seed=1, epoch=1)
    with numbers(reference(name)) as dtype:
        exact_loss, exact = gradients(workload, copy.deepcopy(model).to(dtype), to(batch, torch.device("cpu"), dtype))
    loss, found = gradients(workload, model.to(DEVICE), to(batch, DEVICE, torch.float32))
    assert exact.norm() > 0
    assert (loss - exact_loss).abs() <= LIMITS[0] * exact_loss.abs()
    assert (found - exact).norm() <= LIMITS[1] * exact.norm()


def test_an_evaluation_equals_that_of_float64(
    name: str, workload: Workload, model: nn.Module, made_once: Callable[[str], Path]
) -> None:
    batch = workload.dataset("validation", made_once(name)).load(range(4), seed=0, epoch=0)
    results = []
    for device, chosen in ((torch.device("cpu"), reference(name)), (DEVICE, torch.float32)):
        with torch.no_grad(), numbers(chosen) as dtype:
            stats = workload.eval_stats(copy.deepcopy(model).to(device, dtype), to(batch, device, dtype))
            results.append(workload.metrics({key: float(value) for key, value in stats.items()}))
    metric = load_descriptor(name).card().size("smoke").metric
    assert results[1][metric] == pytest.approx(results[0][metric], rel=LIMITS[1], abs=LIMITS[1])
