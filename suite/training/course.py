"""Measures, once per block of steps, the numbers by which a course of training is compared with healthy ones.

No step waits for them: norms of gradients are computed in a few steps and stay on the device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mlhpc.suite.training.parallel.fsdp import states_of
from mlhpc.suite.training.parallel.layout import find_away, slices, stages_of
from mlhpc.suite.world import World

MOST_STEPS = 256  # of a block, whose losses are compared with those of the block before
FEWEST_STEPS = 12
MEASURED_STEPS = 16  # of a block, in which the gradients' norm is measured


class CourseMeter:
    """Collects losses and norms of a block. All ranks make every call.

    Norms are measured only where every rank has all weights: then they need no exchange.
    """

    def __init__(self, model: nn.Module, sharded: Sequence[nn.Parameter]) -> None:
        weights = list(model.parameters())
        parts = sharded, list(slices(model)), states_of(model), stages_of(model), any(map(find_away, weights))
        divided = any(parts)
        self._weights = [] if divided else weights
        self._losses: list[float] = []
        self._norms: list[Tensor] = []  # of the gradient of each weight that has one
        self._sizes = torch.empty(0)
        self._before: list[float] = []
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether the gradients of a step (from 0) of a block of ``steps`` are measured."""
        every = max(1, steps // MEASURED_STEPS)
        return step % every == every - 1

    def add_gradients(self) -> None:
        """Measure the gradients that there are now, before they are clipped."""
        found = [each.grad for each in self._weights if each.grad is not None]
        if found:
            self._norms.append(torch.stack([each.float() for each in torch._foreach_norm(found)]))
            self._sizes = torch.tensor([float(each.numel()) for each in found], device=found[0].device)

    def add_losses(self, losses: Sequence[float]) -> None:
        """Add this rank's losses of the next steps of the block."""
        self._losses += losses[: MOST_STEPS - len(self._losses)]

    @torch.no_grad()
    def take(self, world: World, first_step: int, order: NDArray[np.int64]) -> dict[str, float]:
        """Return the numbers of the block that began with ``first_step``, and begin the next one.

        ``order``: this rank's samples, as they came.
        """
        found = {}
        if first_step == 0 and len(self._order) == len(order) > 0:
            found["same_order"] = float((self._order == order).mean())
        self._order = order if first_step == 0 else order[:0]
        if self._norms:
            norms = torch.stack(self._norms)
            found["gradient_norm"] = float(norms.norm(dim=1).log().mean().exp())
            moved = float((norms.sum(0) > 0.0).float() @ self._sizes)
            found["still_weights"] = 1.0 - moved / sum(each.numel() for each in self._weights)
        if self._weights:
            norms = torch.stack([each.float().norm() for each in self._weights])
            coarse = sum(int((each == each.bfloat16()).sum()) for each in self._weights)
            found["weight_norm"] = float(norms.norm())
            found["coarse_weights"] = coarse / sum(each.numel() for each in self._weights)
        sums = world.sum({str(step): loss for step, loss in enumerate(self._losses)})
        changes = [after - before for before, after in pairwise(sums.values())] if first_step == 0 else []
        if len(changes) >= FEWEST_STEPS and all(map(math.isfinite, changes)):
            mean = statistics.fmean(sums.values())
            found["loss_spread"] = statistics.pstdev(changes) / abs(mean) if mean else 0.0
            if len(self._before) == len(changes) and min(map(statistics.pstdev, (changes, self._before))) > 0.0:
                found["loss_repeat"] = statistics.correlation(changes, self._before)
        self._losses, self._norms, self._before = [], [], changes
        return {name: value for name, value in found.items() if math.isfinite(value)}
