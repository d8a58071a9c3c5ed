"""LAMB is FusedLAMB step for step; the schedules are those of the benchmark without the reference's off-by-ones."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from mlhpc.suite.config import RunConfig
from mlhpc.suite.world import World
from mlhpc.workloads.deepcam.config import DeepCamConfig
from mlhpc.workloads.deepcam.optimizer import Lamb, build_optimizer
from mlhpc.workloads.deepcam.schedule import learning_rate
from mlhpc.workloads.deepcam.workload import DeepCam

SHAPES = [(4, 3), (5,), (2, 2, 3)]


def parameters(scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(scale * torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]


def gradients(step: int, scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def slow_lamb(w: list[np.ndarray], rates: list[float], decay: float, grad_scale: float) -> list[np.ndarray]:
    """apex FusedLAMB written out: one number at a time where it matters."""
    b1, b2, eps = 0.9, 0.95, 1e-6
    m, v = [np.zeros_like(a) for a in w], [np.zeros_like(a) for a in w]
    for t, rate in enumerate(rates, start=1):
        g = [each.numpy() for each in gradients(t, grad_scale)]
        norm = math.sqrt(sum(float((each**2).sum()) for each in g))
        g = [each / (norm if norm > 1.0 else 1.0) for each in g]
        for i in range(len(w)):
            m[i] = b1 * m[i] + (1 - b1) * g[i]
            v[i] = b2 * v[i] + (1 - b2) * g[i] ** 2
            step = (m[i] / (1 - b1**t)) / (np.sqrt(v[i] / (1 - b2**t)) + eps) + decay * w[i]
            w_norm, step_norm = np.linalg.norm(w[i]), np.linalg.norm(step)
            trust = w_norm / step_norm if decay and w_norm > 0 and step_norm > 0 else 1.0
            w[i] = w[i] - rate * trust * step
    return w


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("grad_scale", [0.01, 10.0])  # below and above the clipping norm of 1
def test_lamb_is_the_slow_one(decay: float, grad_scale: float) -> None:
    rates = [0.1, 0.05, 0.2, 0.01]
    w = parameters()
    expected = slow_lamb([p.detach().numpy().copy() for p in w], rates, decay, grad_scale)
    optimizer = Lamb(w, lr=1.0, betas=(0.9, 0.95), weight_decay=decay)
    for t, rate in enumerate(rates, start=1):
        for p, g in zip(w, gradients(t, grad_scale), strict=True):
            p.grad = g
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    for p, e in zip(w, expected, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), e, rtol=1e-10)


def test_a_zero_weight_takes_the_unscaled_step() -> None:
    w = parameters(scale=0.0)
    optimizer = Lamb(w, lr=0.1)
    for p, g in zip(w, gradients(1, 0.1), strict=True):
        p.grad = g
    optimizer.step()
    assert all(torch.isfinite(p).all() and p.abs().min() > 0.09 for p in w)  # the first step of Adam is lr * sign(g)


def test_lamb_without_decay_and_clipping_is_adam() -> None:
    mine, theirs = parameters(), parameters()
    pair = (Lamb(mine, lr=0.01, weight_decay=0.0), torch.optim.Adam(theirs, lr=0.01, eps=1e-6))
    for t in range(1, 5):
        for w, optimizer in zip((mine, theirs), pair, strict=True):
            for p, g in zip(w, gradients(t, 0.01), strict=True):
                p.grad = g
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_reloaded_lamb_continues() -> None:
    def steps(optimizer: Lamb, w: list[nn.Parameter], begin: int, end: int) -> None:
        for t in range(begin, end):
            for p, g in zip(w, gradients(t, 1.0), strict=True):
                p.grad = g
            optimizer.step()

    w = parameters()
    optimizer = Lamb(w, lr=0.1)
    steps(optimizer, w, 1, 4)
    twin = [nn.Parameter(p.detach().clone()) for p in w]
    resumed = Lamb(twin, lr=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(optimizer, w, 4, 6)
    steps(resumed, twin, 4, 6)
    assert all(torch.equal(a, b) for a, b in zip(w, twin, strict=True))


def own(**values: object) -> DeepCamConfig:
    common = {"height": 32, "width": 32, "optimizer": "AdamW", "learning_rate": 0.004, "schedule": "multistep"}
    return DeepCamConfig(**{**common, **values})


@pytest.mark.parametrize(("name", "kind"), [("Adam", torch.optim.Adam), ("AdamW", torch.optim.AdamW), ("LAMB", Lamb)])
def test_the_config_names_the_optimizer(name: str, kind: type) -> None:
    optimizer = build_optimizer(parameters(), own(optimizer=name, weight_decay=0.02, betas=(0.8, 0.9)))
    group = optimizer.param_groups[0]
    assert type(optimizer) is kind
    assert (group["eps"], group["weight_decay"], tuple(group["betas"])) == (1e-6, 0.02, (0.8, 0.9))


def test_multistep_after_warm_up_of_the_reference_point_at_batch_512() -> None:
    """100 steps of warm-up, then milestones 2048 and 4096 counted from its end; the reference is one step late."""
    config = own(warmup_steps=100, milestones=(2048, 4096))
    rates = [learning_rate(config, step) for step in range(5000)]
    assert rates[0] == pytest.approx(0.004 / 100)  # never a step at rate zero
    assert rates[49] == pytest.approx(0.002)
    assert rates[99] == rates[100] == rates[100 + 2047] == pytest.approx(0.004)
    assert rates[100 + 2048] == rates[100 + 4095] == pytest.approx(0.0004)
    assert rates[100 + 4096] == pytest.approx(0.00004)


def test_a_warm_up_factor_multiplies_the_rate() -> None:
    config = own(warmup_steps=10, warmup_factor=8.0)
    assert learning_rate(config, 0) == pytest.approx(0.004 * 1.7)
    assert learning_rate(config, 9) == learning_rate(config, 999) == pytest.approx(0.032)
    assert learning_rate(own(warmup_factor=8.0), 0) == pytest.approx(0.032)


def test_cosine_annealing_is_that_of_torch() -> None:
    config = own(schedule="cosine_annealing", t_max=40, eta_min=1e-4)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.004)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=1e-4)
    for step in range(100):  # past t_max, where it rises again
        assert learning_rate(config, step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        scheduler.step()
    warmed = own(schedule="cosine_annealing", t_max=40, eta_min=1e-4, warmup_steps=7)
    assert [learning_rate(warmed, step + 7) for step in range(50)] == [
        learning_rate(config, step) for step in range(50)
    ]


def test_a_training_step_never_waits_for_a_value(
    monkeypatch: pytest.MonkeyPatch, tiny_config: Callable[..., RunConfig]
) -> None:
    """`.item()` and its kin stop a GPU's queue; loss, backward and LAMB do without."""

    def refuse(self: torch.Tensor, *arguments: object) -> None:
        raise AssertionError("a tensor was read back")

    workload = DeepCam(tiny_config("hyperparameters.optimizer=LAMB"))
    model = workload.build_model(World.create(None))
    optimizer = workload.build_optimizer(model, 1).optimizer
    batch = {"x": torch.rand(2, 32, 48, 16), "y": torch.zeros(2, 32, 48, dtype=torch.uint8)}
    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    workload.loss(model, batch).backward()
    optimizer.step()
