"""The fused optimizers of all workloads compute what torch's plain loop over parameters does."""

import copy
from typing import Any

import pytest
import torch

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.parallel.clipping import Clipping
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("deepcam", ["hyperparameters.optimizer=AdamW"]),
        ("deepcam", ["hyperparameters.optimizer=Adam"]),
        ("openfold", []),
        ("open_catalyst", []),
        ("moe_lm", []),
        ("swinv2_moe", []),
    ],
)
def test_a_fused_optimizer_equals_the_plain_one(name: str, sets: list[str]) -> None:
    chosen = load_descriptor(name)
    workload = load_workload(chosen)(load_config(chosen, "smoke", sets))
    torch.manual_seed(0)
    models = [workload.build_model(World.create(None)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fused, plain = (workload.build_optimizer(model, 10).optimizer for model in models)
    assert all(group["fused"] for group in fused.param_groups)
    for group in plain.param_groups:
        group["fused"], group["foreach"] = False, False
    for step in range(4):
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            generator = torch.Generator().manual_seed(step)
            gradient = torch.randn(parameters[0].shape, generator=generator, dtype=torch.float64)
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter).copy_(gradient)  # in the parameter's layout, as autograd's
        for optimizer in (fused, plain):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 / (step + 1)
            optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_clipping_of_all_gradients_at_once_equals_one_by_one() -> None:
    models: list[Any] = [torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)) for _ in range(2)]
    for model in models:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    Clipping(models[0], (), 0.1)()
    torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.1, foreach=False)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=0)


def test_moments_of_another_memory_format_are_laid_out_as_the_weights_are() -> None:
    """Fused kernels on a processor walk memory and not positions: they would mix up the moments, and say nothing."""
    chosen = load_descriptor("deepcam")
    workload = load_workload(chosen)(load_config(chosen, "smoke", ["hyperparameters.optimizer=AdamW"]))
    world = World.create(None)
    contiguous, channels_last = (workload.build_model(world) for _ in range(2))
    contiguous.lay_out(False)
    channels_last.load_state_dict(contiguous.state_dict())
    optimizers = [workload.build_optimizer(model, 10).optimizer for model in (contiguous, channels_last)]
    for steps in range(2):
        for number, parameters in enumerate(zip(contiguous.parameters(), channels_last.parameters(), strict=True)):
            gradient = torch.randn(parameters[0].shape, generator=torch.Generator().manual_seed(number))
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
        if steps:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(contiguous.parameters(), channels_last.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
