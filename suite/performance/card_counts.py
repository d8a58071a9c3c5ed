"""Counts what a card states of a size: builds the model, loads samples and runs one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec import structs

from mlhpc.suite.config import RunConfig
from mlhpc.suite.data.manifest import Manifest, read_manifest
from mlhpc.suite.data.shards import count_stored_bytes
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.counts.flops import count
from mlhpc.suite.training.trial import count_parameters
from mlhpc.suite.workload import Work, Workload, load_workload
from mlhpc.suite.world import World

SAMPLES = 8  # of one counted step
SEED = 0  # of weights and of the sampled order: counts do not depend on them


@dataclass(frozen=True)
class CardCounts:
    """The counts, named as in a card. FLOPs are per sample, the mean over the samples of one step.

    Forward FLOPs are those of the model's calls. Training FLOPs are everything that a step executes, losses included.
    ``counted_form`` is the closed form for these samples and their number in a batch. ``closed_form`` is that of a
    sample of mean size in the config's batch, as a card has it. ``sample_bytes`` is the mean of all stored training
    samples. ``means``, by name: the means that the config states of its data, and the data's own. ``uncovered``:
    operators without a formula; their FLOPs are missing.
    """

    train_samples: int
    eval_samples: int
    model_parameters: int
    forward_flops_per_sample: float
    training_flops_per_sample: float
    sample_bytes: int
    closed_form: Work
    counted_form: Work
    means: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    uncovered: tuple[str, ...] = ()


def count_size(descriptor: Descriptor, config: RunConfig, root: Path) -> CardCounts:
    """Count on this processor, on one rank, with the data set under ``root``. InputError if data and config differ."""
    load, world = load_workload(descriptor), World.create()
    if world.size > 1:
        raise InputError(
            f"mlhpc workload card: started on {world.size} ranks, but it counts on one; "
            "start it without mpiexec, srun or torchrun"
        )
    manifest = read_manifest(root)
    chosen = range(min(SAMPLES, manifest.samples("train")))
    # Work that a step does once (the optimizer) is divided by this number of samples.
    step = {"global_batch_size": len(chosen), "gradient_accumulation_steps": 1}
    workload: Workload = load(structs.replace(config, **step))
    torch.manual_seed(SEED)
    model = workload.build_model(world)
    train, validation = (workload.dataset(split, root) for split in ("train", "validation"))
    batch = train.load(chosen, seed=SEED, epoch=1)
    model.train()
    with torch.no_grad():
        forward = count(lambda: workload.loss(model, batch), model)
    training = count(lambda: workload.loss(model, batch).backward())  # type: ignore[no-untyped-call]
    return CardCounts(
        train_samples=len(train),
        eval_samples=len(validation),
        model_parameters=count_parameters(model, workload, world),
        # The module "" is the model itself: the loss outside of it does not count as forward FLOPs.
        forward_flops_per_sample=forward.by_module.get("", forward.flops) / len(chosen),
        training_flops_per_sample=training.flops / len(chosen),
        sample_bytes=round(_compute_stored_bytes(root, manifest)),
        closed_form=load(config).work(),
        counted_form=workload.work_of(batch),
        means=_collect_means(config, manifest),
        uncovered=tuple(sorted({*forward.uncovered, *training.uncovered})),
    )


def _compute_stored_bytes(root: Path, manifest: Manifest) -> float:
    """Return the mean size of a stored training sample. A loader may leave arrays out."""
    files = [root / entry.file for entry in manifest.splits["train"]]
    return sum(map(count_stored_bytes, files)) / manifest.samples("train")


def _collect_means(config: RunConfig, manifest: Manifest) -> dict[str, tuple[float, float]]:
    """Return the means (``mean_*``) that a config states of its data, with those of the manifest."""
    stated = structs.asdict(config.hyperparameters)
    return {
        name: (float(stated[name]), float(value))
        for name, value in manifest.attributes.items()
        if name.startswith("mean_") and isinstance(stated.get(name), int | float) and isinstance(value, int | float)
    }
