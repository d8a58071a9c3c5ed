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
from suite.machine.choice.store import Store
from suite.transport import Alone
from suite.workload import Workload
from suite.world import World

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"
WORTH = 0.9  # of float32's time


def choose_precision(
    chooser: Chooser,
    config: RunConfig,
    make: Callable[[RunConfig], Workload],
    tick: Callable[[], None] = lambda: None,
) -> RunConfig:
    """The configuration with its precision chosen if it is ``auto``; else as it is. Every rank calls.

    Each rank times passes of a network of its own, in each precision as a run would compute in it, its other choices made.
    ``make`` constructs the workload, ``tick`` is called before each pass. float32 where the workload has no example of a batch
    whose pass needs no other rank, and under a plan.
    """
    if config.precision != AUTO:
        return config
    settled = {name: config.model_copy(update={"precision": name}) for name in (FLOAT32, BFLOAT16)}
    samples = config.samples_per_pass(chooser.ranks)
    mine = {"global_batch_size": samples, "gradient_accumulation_steps": 1}
    passes = {name: _Pass(chooser, each.model_copy(update=mine), make, tick) for name, each in settled.items()}
    unmeasured = "" if passes[FLOAT32].example(samples) is not None else "no batch is made up for it"
    shape = {
        **{"workload": config.workload, "samples": samples, "network": asdict(config.hyperparameters)},
        **{"channels_last": config.channels_last, "compile": config.compile, "pinned": config.choices.pinned},
    }
    question = Question(
        name="precision",
        shape=shape,
        rule=FLOAT32,
        ways=lambda: {name: each.run for name, each in passes.items()},
        possible=settled.__contains__,
        decide=_decide,
        wall=chooser.device.type == "cpu"
        and chooser.threads > 1,  # not beside other work: the runs of a result should agree
        unmeasured=unmeasured if config.plan is None else "a plan",
    )
    with torch.random.fork_rng(devices=[] if chooser.device.type == "cpu" else [chooser.device]):
        return settled[chooser.choose(question)]


class _Pass:
    """Forward and backward passes of a network of this rank alone, which is built when the first one is asked for."""

    def __init__(
        self, chooser: Chooser, config: RunConfig, make: Callable[[RunConfig], Workload], tick: Callable[[], None]
    ) -> None:
        self._chooser, self._config, self._tick = chooser, config, tick
        self._workload = make(config)
        self._built: tuple[torch.nn.Module, Mapping[str, torch.Tensor], ProcessWide] | None = None

    def example(self, samples: int) -> Mapping[str, torch.Tensor] | None:
        """A batch."""
        return self._workload.example(samples)

    def run(self) -> object:
        """Run one."""
        self._tick()
        before, device = ProcessWide.now(), self._chooser.device
        try:
            self._built = self._built or self._build()
            model, batch, process = self._built
            process.restore()
            with torch.enable_grad():
                with torch.autocast(device.type, torch.bfloat16, enabled=self._config.precision == BFLOAT16):
                    loss = self._workload.loss(model, batch)
                wanted = [each for each in model.parameters() if each.requires_grad]
                return torch.autograd.grad(loss, wanted, allow_unused=True)
        finally:
            before.restore()

    def _build(self) -> tuple[torch.nn.Module, Mapping[str, torch.Tensor], ProcessWide]:
        """The network, laid out as a run would choose it, its batch, and what that sets for the whole process."""
        chooser, device = self._chooser, self._chooser.device
        torch.manual_seed(0)
        alone = World("none", 0, 1, 0, 1, 0, 1, chooser.world.node_names[:1], Alone(), Alone())
        model = self._workload.build_model(alone).to(device).train()
        # kept nowhere: other ranks compute beside it, and the run asks again
        self._workload.choose(model, Chooser(alone, device, measure=True, store=Store(None), pinned=chooser.pinned))
        example = self._workload.example(self._config.global_batch_size)
        assert example is not None
        return model, {name: each.to(device) for name, each in example.items()}, ProcessWide.now()


def _decide(seconds: Mapping[str, float]) -> str:
    return BFLOAT16 if seconds.get(BFLOAT16, math.inf) <= WORTH * seconds.get(FLOAT32, math.inf) else FLOAT32
