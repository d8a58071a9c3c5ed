"""The gradient of a side's step against float64: an honest one is within its bound, a fault in a drawn weight is not."""

from __future__ import annotations

import random

import pytest
import torch

from mlhpc.plugins.tune.error import measure_error
from mlhpc.plugins.tune.sides import Side
from mlhpc.plugins.tune.space import StepError
from mlhpc.suite.config import load_config
from mlhpc.suite.data.build import find_data
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.training.parallel.recompute import recompute_blocks
from mlhpc.suite.training.statement import TrialPlan
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.world import World

ROOM = 1e6


@pytest.fixture(scope="module")
def side(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Side:
    chosen, run = load_descriptor("swinv2_moe"), RunFolder(tmp_path_factory.mktemp("run"))
    noisy = ["hyperparameters.drop_path=0.5", "hyperparameters.moe.gate_noise=1.0", "gradient_accumulation_steps=2"]
    config = load_config(chosen, "smoke", [*settings, *noisy, "instrumentation=true"])
    world = World("none", 0, 1, 0, 1, 0, 1, ("here",), SingleProcessTransport(), SingleProcessTransport())
    place, root = run.checkpoint(0), config.data
    assert root is not None
    place.parent.mkdir(parents=True)
    manifest = find_data(root, config.workload, config.size)
    made = Side.create(
        TrialPlan(chosen, config, run, 0, base_seed=1), world, torch.device("cpu"), root, place, manifest.sha256
    )
    made.block(0, 1, restored=False)  # weights that begin at 0 would hide what lies behind them
    return made


def test_an_honest_step_is_within_its_bound_and_changes_nothing(side: Side) -> None:
    before = {name: value.clone() for name, value in side.trainer.state.model.named_parameters()}
    found = measure_error(side, 3, ROOM)
    assert found.error is not None
    assert not found.is_wrong, found.render()
    assert 0 < found.error < 1e-4
    assert all(torch.equal(before[name], value) for name, value in side.trainer.state.model.named_parameters())
    recompute_blocks(side.trainer.state.model, {random.choice(["stages.?.?", "stages.0.?", "stages.?.1"]): "full"})
    assert measure_error(side, 3, ROOM) == found


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["scaled", "lost", "mirrored", "in bfloat16"])
def test_a_fault_in_a_drawn_weight_is_refused(side: Side, kind: str) -> None:
    weights = dict(side.trainer.state.model.named_parameters())
    name = random.choice(sorted(name for name, weight in weights.items() if weight.ndim > 1 and "experts" not in name))
    changes = {
        "scaled": lambda gradient: 1.01 * gradient,
        "lost": torch.zeros_like,
        "mirrored": lambda gradient: gradient.flip(0),
        "in bfloat16": lambda gradient: gradient.bfloat16().float(),
    }
    handle = weights[name].register_hook(changes[kind])
    try:
        found = measure_error(side, 3, ROOM)
    finally:
        handle.remove()
    assert found.is_wrong, (name, found)
    assert "refused" in found.render()


def test_what_cannot_be_compared_has_its_reason(side: Side) -> None:
    found = measure_error(side, 3, 1e15)
    assert (found.error, found.is_wrong) == (None, False)
    assert found.render() == "not compared with float64: a whole model in float64 takes too much memory"
    assert StepError(float("nan"), 1.0).is_wrong
