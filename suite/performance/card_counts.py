"""Counts what a card says of one size by building the model, loading samples and running one step: parameters, FLOPs, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from suite.config import RunConfig
from suite.data.shards import bytes_read
from suite.descriptor import Descriptor
from suite.errors import InputError
from suite.performance.flops import count
from suite.training.trial import count_parameters
from suite.workload import Work, Workload, load_workload
from suite.world import World

SAMPLES = 8  # of one counted step: enough for a mean where samples differ in size
SEED = 0


@dataclass(frozen=True)
class Counts:
    """What was counted, with the names of a card. FLOPs and bytes are per sample, the mean of the samples of one step.

    Forward FLOPs are those of the model's calls. Training FLOPs are all that a step executes, losses included: their closed form is
    ``closed_form.executed_flops``, where a card has ``model_flops``. ``uncovered`` names operators that have no formula: their
    FLOPs are missing.
    """

    train_samples: int
    eval_samples: int
    model_parameters: int
    forward_flops_per_sample: float
    training_flops_per_sample: float
    sample_bytes: int
    closed_form: Work
    uncovered: tuple[str, ...] = ()


def count_size(descriptor: Descriptor, config: RunConfig, root: Path) -> Counts:
    """Count on this processor, on one rank, with the data set under ``root``. InputError if the data do not fit the config."""
    workload: Workload = load_workload(descriptor)(config)
    world = World.create()
    if world.size > 1:
        raise InputError("mlhpc card fill counts on one rank: start it without a launcher")
    torch.manual_seed(SEED)
    model = workload.build_model(world)
    train, validation = (workload.dataset(split, root) for split in ("train", "validation"))
    chosen = range(min(SAMPLES, len(train)))
    before = bytes_read()
    batch = train.load(chosen, seed=SEED, epoch=1)
    read = bytes_read() - before
    model.train()
    with torch.no_grad():
        forward = count(lambda: workload.loss(model, batch), model)
    training = count(lambda: workload.loss(model, batch).backward())  # type: ignore[no-untyped-call]
    return Counts(
        train_samples=len(train),
        eval_samples=len(validation),
        model_parameters=count_parameters(model, workload, world),
        forward_flops_per_sample=forward.by_module.get("", forward.flops) / len(chosen),
        training_flops_per_sample=training.flops / len(chosen),
        sample_bytes=round(read / len(chosen)),
        closed_form=workload.work(),
        uncovered=tuple(sorted({*forward.uncovered, *training.uncovered})),
    )
