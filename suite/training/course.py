"""Measures, once per block of steps, the numbers by which a course of training is compared with healthy ones.

No step waits for them: norms of gradients are computed in a few steps and stay on the device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mlhpc.suite.training.parallel.fsdp import states_of
from mlhpc.suite.training.parallel.layout import find_away, slices, stages_of
from mlhpc.suite.workload import Dataset
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch

MOST_STEPS = 256  # of a block, whose losses are compared with those of the block before
FEWEST_STEPS = 12
MEASURED_STEPS = 16  # of a block, in which the gradients' norm is measured
MARKED_VALUES = 512  # of a sample's tensor, by which it is told from others
MOST_MARKS = 1 << 16  # that are compared
LEAST_OWN = 0.9  # of samples; public data sets repeat a few per cent


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


class MarkedData:
    """A data set that finds samples which are copies of others: a split read in part and repeated takes every index.

    Only tensors whose first dimension is the sample count; without one nothing is said. Loading threads may share it.
    """

    def __init__(self, data: Dataset) -> None:
        self._data = data
        self._marks: dict[int, int] = {}  # by sample
        self._most = min(1.0, MOST_MARKS / max(1, len(data))) * 2.0**64  # of marks that are kept

    def __len__(self) -> int:
        return len(self._data)

    def load(self, indices: Sequence[int] | NDArray[np.int64], *, seed: int, epoch: int) -> Batch:
        """Load samples, and mark each."""
        batch = self._data.load(indices, seed=seed, epoch=epoch)
        for index, mark in zip(np.asarray(indices).tolist(), _mark_samples(batch, len(indices)), strict=False):
            if mark < self._most:
                self._marks[index] = mark
        return batch

    def find_copies(self, world: World, *, counts: bool = True) -> str | None:
        """Say how many samples have content of their own, if they are few. All ranks call it.

        ``counts``: this rank's samples are not those of another.
        """
        every = world.allgather(self._marks if counts else {}, dict[int, int])
        marks = {index: mark for part in every for index, mark in part.items()}
        own = len(set(marks.values()))
        if own >= LEAST_OWN * len(marks):
            return None
        return f"of {len(marks):,} samples only {own:,} differ: the data repeat, or load() gives other samples' content"


def _mark_samples(batch: Batch, samples: int) -> list[int]:
    """Compute a number from some values of each sample of a batch; none if no tensor's first dimension is the sample."""
    rows = []
    for tensor in batch.values():
        if tensor.ndim and len(tensor) == samples and tensor.numel():
            values = tensor.reshape(samples, -1)
            values = values[:, :: max(1, values.shape[1] // MARKED_VALUES)].contiguous()
            rows.append(values.view(torch.uint8).cpu().numpy())
    digests = (blake2b(b"".join(row[at].tobytes() for row in rows), digest_size=8) for at in range(samples))
    return [int.from_bytes(each.digest(), "big") for each in digests] if rows else []
