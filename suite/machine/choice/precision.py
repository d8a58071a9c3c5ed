"""Chooses between float32 and bfloat16 for a run that leaves it open (``precision: auto``), by training passes of its network.

Precision changes more than rounding, so it is never chosen unless the configuration asks for it, and bfloat16 has to be worth it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch

from suite.config import RunConfig
from suite.machine.choice.chooser import Chooser, Question
from suite.machine.choice.layout import ProcessWide
from suite.machine.choice.race import Way
from suite.workload import Workload
from suite.world import World

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"
WORTH = 0.9  # of float32's time


def choose_precision(
    chooser: Chooser, config: RunConfig, world: World, make: Callable[[RunConfig], Workload]
) -> RunConfig:
    """The configuration with its precision chosen if it is ``auto``; else as it is. Every rank calls.

    Each precision is timed as the run would compute in it, its other choices made. ``make`` constructs the workload. float32 where
    the workload has no example of a batch, and under a plan.
    """
    if config.precision != AUTO:
        return config
    settled = {name: config.model_copy(update={"precision": name}) for name in (FLOAT32, BFLOAT16)}
    samples = config.samples_per_pass(world.size)
    possible = config.plan is None and make(settled[FLOAT32]).example(samples) is not None

    def ways() -> Mapping[str, Way]:
        return {name: _training_pass(chooser, each, world, make, samples) for name, each in settled.items() if possible}

    shape = {
        "workload": config.workload,
        "samples": samples,
        "ranks": world.size,
        "network": asdict(config.hyperparameters),
    }
    question = Question(
        name="precision",
        shape=shape,
        rule=FLOAT32,
        ways=ways,
        possible=settled.__contains__,
        decide=_decide,
        together=world.size > 1,
    )
    with torch.random.fork_rng(devices=[] if chooser.device.type == "cpu" else [chooser.device]):
        return settled[chooser.choose(question)]


def _training_pass(
    chooser: Chooser, config: RunConfig, world: World, make: Callable[[RunConfig], Workload], samples: int
) -> Way:
    """A forward and backward pass of a network of its own."""
    device, before = chooser.device, ProcessWide.now()
    torch.manual_seed(0)
    workload = make(config)
    model = workload.build_model(world).to(device).train()
    workload.choose(model, Chooser(world, device, measure=True, store=chooser.store, pinned=chooser.pinned))
    during = ProcessWide.now()
    before.restore()
    example = workload.example(samples)
    assert example is not None
    batch = {name: each.to(device) for name, each in example.items()}
    wanted = [each for each in model.parameters() if each.requires_grad]

    def run() -> object:
        during.restore()
        try:
            with torch.enable_grad():
                with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == BFLOAT16):
                    loss = workload.loss(model, batch)
                return torch.autograd.grad(loss, wanted, allow_unused=True)
        finally:
            before.restore()

    return run


def _decide(seconds: Mapping[str, float]) -> str:
    return BFLOAT16 if seconds.get(BFLOAT16, math.inf) <= WORTH * seconds.get(FLOAT32, math.inf) else FLOAT32
