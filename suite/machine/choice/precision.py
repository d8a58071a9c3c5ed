"""Chooses float32 or bfloat16 for a run with ``precision: auto``, by timing training passes of its network.

Precision changes more than rounding. So it is chosen only if the configuration asks for it, and bfloat16 must be worth
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from msgspec import structs
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig
from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.machine.choice.chooser import Candidate, ChoiceCache, Chooser, Question, make_threshold_rule
from mlhpc.suite.machine.choice.layout import ProcessSettings, keep_process_settings, run_training_pass
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.workload import Workload
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"
MAX_TIME_RATIO = 0.9  # of float32's time
_decide = make_threshold_rule(BFLOAT16, FLOAT32, MAX_TIME_RATIO)


def choose_precision(
    chooser: Chooser,
    config: RunConfig,
    make: Callable[[RunConfig], Workload],
    tick: Callable[[], None] = lambda: None,
) -> RunConfig:
    """Return the configuration with ``precision: auto`` replaced by the choice. Every rank calls it.

    Each rank builds its own network. It times passes in float32 and bfloat16 after all other choices are fixed.
    ``make`` constructs the workload; ``tick`` is called before each pass. The choice is float32 under a plan, and if
    the workload has no example batch or its pass needs other ranks.
    """
    if config.precision != AUTO:
        return config
    settled = {name: structs.replace(config, precision=name) for name in (FLOAT32, BFLOAT16)}
    samples = config.samples_per_pass(chooser.ranks)
    batch = make(settled[FLOAT32]).example(samples)

    def ways() -> Mapping[str, Candidate]:
        mine = {"global_batch_size": samples, "gradient_accumulation_steps": 1}
        alone = {name: structs.replace(each, **mine) for name, each in settled.items()}
        if batch is None:
            return {}
        return {name: _TrainingPass(chooser, each, make, batch, tick).run for name, each in alone.items()}

    shape = {
        **{"workload": config.workload, "samples": samples, "network": convert_to_plain_data(config.hyperparameters)},
        **{"channels_last": config.channels_last, "compile": config.compile, "pinned": config.choices.pinned},
    }
    no_batch = "no batch is made up for it" if batch is None else ""
    question = Question(
        name="precision",
        shape=shape,
        rule=FLOAT32,
        ways=ways,
        possible=settled.__contains__,
        decide=_decide,
        # with several threads the wall clock counts, and not beside other work: the runs of a result should agree
        wall=chooser.device.type == "cpu" and chooser.threads > 1,
        unmeasured=no_batch if config.plan is None else "a plan",
    )
    with torch.random.fork_rng(devices=[] if chooser.device.type == "cpu" else [chooser.device]):
        return settled[chooser.choose(question)]


@dataclass
class _TrainingPass:
    """Runs forward and backward passes of this rank's own network, which the first pass builds."""

    chooser: Chooser
    config: RunConfig
    make: Callable[[RunConfig], Workload]
    batch: Batch
    tick: Callable[[], None]

    def run(self) -> object:
        """Run one pass."""
        self.tick()
        with keep_process_settings():
            model, loss, process = self._built
            process.restore()
            return run_training_pass(model, loss, self.chooser.device, self.config.precision == BFLOAT16)

    @cached_property
    def _built(self) -> tuple[nn.Module, Callable[[], Tensor], ProcessSettings]:
        """The network with a run's choices, its loss, and the process-wide settings of these choices."""
        device = self.chooser.device
        # it asks again, since each precision has its own choices
        workload, model = build_network(self.chooser, self.config, self.make, measure=True, pinned=self.chooser.pinned)
        batch = {name: each.to(device) for name, each in self.batch.items()}
        return model, lambda: workload.loss(model, batch), ProcessSettings.now()


def build_network(
    chooser: Chooser,
    config: RunConfig,
    make: Callable[[RunConfig], Workload],
    *,
    measure: bool,
    pinned: Mapping[str, str],
) -> tuple[Workload, nn.Module]:
    """Build a network of this rank's own on its device, with its choices made, to time passes of it."""
    torch.manual_seed(0)
    alone = World(
        "none", 0, 1, 0, 1, 0, 1, chooser.world.node_names[:1], SingleProcessTransport(), SingleProcessTransport()
    )
    workload = make(config)
    model = workload.build_model(alone).to(chooser.device).train()
    # kept nowhere: other ranks compute beside it
    workload.choose(model, Chooser(alone, chooser.device, measure=measure, store=ChoiceCache(None), pinned=pinned))
    return workload, model
