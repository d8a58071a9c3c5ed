"""What a run logs of its course: norms, how losses of steps vary, and whether they repeat."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from mlhpc.suite.training.course import MOST_STEPS, CourseMeter
from mlhpc.suite.training.loop import StepWindow
from mlhpc.suite.world import World

ORDER = np.arange(12)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def test_norms_are_those_of_all_weights_and_of_the_gradients_seen() -> None:
    model = make_model()
    meter = CourseMeter(model, [])
    squares = []
    for factor in (1.0, 3.0):
        model.zero_grad()
        (factor * model(torch.ones(2, 3)).sum()).backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        squares.append(sum(float(gradient.square().sum()) for gradient in gradients))
        meter.add_gradients()
    found = meter.take(World.create(None), 0, ORDER)
    assert found["gradient_norm"] == pytest.approx(math.prod(squares) ** 0.25, rel=1e-6)
    weights = torch.cat([weight.flatten() for weight in model.parameters()])
    assert found["weight_norm"] == pytest.approx(float(weights.detach().norm()), rel=1e-6)
    assert found["still_weights"] == 0.0
    assert found["coarse_weights"] < 0.1
    assert "loss_spread" not in found
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    assert meter.take(World.create(None), 0, ORDER)["coarse_weights"] == 1.0


@pytest.mark.parametrize("steps", [20, 100, MOST_STEPS + 50])
def test_the_same_order_in_each_epoch_repeats_losses(steps: int) -> None:
    chance = random.Random(steps)
    meter, world = CourseMeter(make_model(), []), World.create(None)
    hard = [chance.gauss(1, 0.2) for _ in range(steps)]

    def epoch(losses: list[float], first_step: int = 0) -> dict[str, float]:
        meter.add_losses(losses[: steps // 2])
        meter.add_losses(losses[steps // 2 :])
        return meter.take(world, first_step, ORDER)

    first = epoch(hard)
    assert "loss_repeat" not in first
    assert first["loss_spread"] == pytest.approx(0.2 * math.sqrt(2), rel=0.5)
    assert epoch([loss - 0.1 + chance.gauss(0, 0.01) for loss in hard])["loss_repeat"] > 0.9
    assert abs(epoch(chance.sample(hard, steps))["loss_repeat"]) < 4 / math.sqrt(min(steps, MOST_STEPS))
    assert "loss_repeat" not in epoch(hard, first_step=3)  # a resumed epoch has other steps
    assert "loss_repeat" not in epoch([1.0] * steps)


def test_an_order_that_comes_again_is_counted() -> None:
    meter, world = CourseMeter(make_model(), []), World.create(None)
    drawn = np.random.default_rng(1)
    assert "same_order" not in meter.take(world, 0, ORDER)
    assert meter.take(world, 0, ORDER)["same_order"] == 1.0
    assert meter.take(world, 0, drawn.permutation(ORDER))["same_order"] < 0.5
    assert "same_order" not in meter.take(world, 2, ORDER[4:])  # a resumed epoch
    assert "same_order" not in meter.take(world, 0, ORDER)


def test_a_layer_without_a_gradient_is_counted() -> None:
    for frozen in (True, False):  # without a gradient, or with one that is zero
        model = make_model()
        meter = CourseMeter(model, [])
        for weight in model[0].parameters():  # type: ignore[index]
            weight.requires_grad_(not frozen)
        for _ in range(2):
            model[1](model[0](torch.ones(2, 3)) * (1.0 if frozen else 0.0)).sum().backward()  # type: ignore[index]
            meter.add_gradients()
        assert meter.take(World.create(None), 0, ORDER)["still_weights"] == pytest.approx(
            (16 if frozen else 16 + 4) / 21
        )


def test_weights_of_which_ranks_hold_parts_have_no_norms() -> None:
    model = make_model()
    assert CourseMeter(model, list(model[1].parameters())).take(World.create(None), 0, ORDER) == {}  # type: ignore[index]


def test_a_step_in_parts_has_one_loss() -> None:
    window = StepWindow(1, 0)
    for loss, ends in ((1.0, False), (2.0, True), (3.0, False), (4.0, True)):
        window.add(torch.tensor(loss), ends_step=ends)
    assert window.step_losses() == [3.0, 7.0]
    assert window.mean_loss() == 5.0
