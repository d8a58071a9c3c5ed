"""Measures what a step waits for a tier: layers of a plan's sizes take steps in it, and only spin in place of products.

The cache, the files and the arithmetic of the update are those of a run. So what the CPU pays for them is in it: memory
that is touched first, checksums, conversions, the page cache, and cores and locks that the threads share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from mlhpc.plugins.offload.experts import VECTOR, Keeper
from mlhpc.suite.config import RunConfig
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.devices import compute_threads_per_rank
from mlhpc.suite.workload import ExpertLayer
from mlhpc.suite.world import World
from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.layer import MoELayer

STEPS = 3  # of each kind
SKIPPED = 2  # in the first step files are made, in the second the cache fills as it stays
SPUN = 256  # rows of the products of which a layer spins


class Waits(NamedTuple):
    """The seconds of one step in which the training thread waits: in both passes of each layer, and in the update."""

    forward: list[float]
    backward: list[float]
    update: float


def measure_waits(
    config: RunConfig,
    layers: Sequence[ExpertLayer],
    compute_s: float,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Waits], list[Waits]]:
    """Take steps that compute nothing, which show the tier's rates, and steps whose layers compute.

    ``compute_s``: of a layer's forward pass. InputError if the configuration names no folder.
    """
    settings = getattr(getattr(config.hyperparameters, "moe", None), "offload", None)
    if settings is None or settings.folder is None:
        raise InputError(
            "--measure needs the tier of a run: --set hyperparameters.moe.offload.tier=file, and its folder and cache"
        )
    world = World.create(None)
    torch.set_num_threads(compute_threads_per_rank(world))
    keeper = Keeper(settings, world, 1)
    try:
        for layer in layers:
            keeper(_make_layer(layer))
        weights = [weight for layer in keeper.layers for weight in layer.weights.values()]
        optimizer = torch.optim.AdamW(weights, fused=True)
        keeper.follow(optimizer)
        seconds = [0.0] * (SKIPPED + STEPS) + [compute_s] * STEPS
        found = list[Waits]()
        for each in seconds:
            tell(len(found), len(seconds))
            found.append(_take_step(keeper, optimizer, each))
        return found[SKIPPED:-STEPS], found[-STEPS:]
    finally:
        keeper.close()


def _make_layer(layer: ExpertLayer) -> MoELayer:
    """Make a layer whose experts have as many parameters, in two matrices."""
    hidden = VECTOR * max(1, round(math.sqrt(layer.parameters / 2) / VECTOR))
    width = max(1, round(layer.parameters / (2 * hidden)))
    return MoELayer(width, MoEConfig(experts=layer.experts, top_k=1, hidden=hidden, activation="relu"))


def _take_step(keeper: Keeper, optimizer: torch.optim.Optimizer, compute_s: float) -> Waits:
    cache = keeper.cache
    marks = [cache.wait_s]
    for layer in keeper.layers:
        layer.begin_forward(range(layer.experts))
        _spin(compute_s)
        layer.release()
        marks.append(cache.wait_s)
    for layer in reversed(keeper.layers):
        layer.begin_backward()
        _spin(2 * compute_s)
        for weight in layer.weights.values():
            weight.grad = torch.full(weight.shape, 1e-3)
            layer.take_gradient(weight)
        if not compute_s and layer.number == 0:
            cache.settle()  # the rate is that of all gradients
        marks.append(cache.wait_s)
    optimizer.step()
    waits = [after - before for before, after in pairwise([*marks, cache.wait_s])]
    cache.settle()  # the next step hides that
    count = len(keeper.layers)
    return Waits(waits[:count], waits[count:-1][::-1], waits[-1])


def _spin(seconds: float) -> None:
    """Compute for so long, with the other threads beside it: a core that others take makes it last longer."""
    square, end = torch.ones(SPUN, SPUN), time.thread_time() + seconds
    while time.thread_time() < end:
        square @ square
