"""Loads CosmoFlow batches from memory-mapped shards and augments a whole batch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from mlhpc.suite.data.sampling import draws
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.workloads.cosmoflow.config import REDSHIFTS, TARGETS, CosmoFlowConfig

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch, Slab

# largest difference of the configured input means from those of the data, in standard deviations
INPUT_TOLERANCE = 0.05

_PERMUTATIONS = np.array(list(permutations(range(3))))
_FLIPS = np.array([[(flip >> axis) & 1 for axis in range(3)] for flip in range(8)], dtype=bool)


class CosmoFlowData:
    """One split. Batches hold ``x``: int16 counts (N, D, H, W, 4) and ``y``: float32 targets (N, 4)."""

    def __init__(self, root: Path, split: str, config: CosmoFlowConfig) -> None:
        self._reader = ShardReader(root, split)
        self._augment = config.augmentation and split == "train"
        self._size = config.input_size
        check_data(self._reader, root, config)

    def __len__(self) -> int:
        return len(self._reader)

    def load(self, indices: Sequence[int] | NDArray[np.integer], *, seed: int, epoch: int) -> Batch:
        """Load the samples of ``indices``. Training samples are augmented, as a function of (seed, epoch, index)."""
        arrays = self._reader.read(indices)
        x = arrays["x"]
        if self._augment:
            x = augment(x, draws(seed, epoch, np.asarray(indices)))
        return {"x": torch.from_numpy(x), "y": torch.from_numpy(arrays["y"])}

    def load_slab(
        self, indices: Sequence[int] | NDArray[np.integer], slabs: Mapping[str, Slab], *, seed: int, epoch: int
    ) -> Batch:
        """Load what `load` does, but of ``x`` only the slab; augmented, it comes from all over the stored sample."""
        chosen, slab = np.asarray(indices), slabs["x"][:3]
        size = self._size
        moves = choose_transforms(draws(seed, epoch, chosen), size) if self._augment else None
        parts, turns = [], []
        for sample in range(len(chosen)):
            order, walks = ((0, 1, 2), [np.arange(size)] * 3) if moves is None else moves.of(sample)
            # the shards are read along source axes; the transpose below restores the output axes
            wanted = [walk[low:high] for walk, (low, high) in zip(walks, slab, strict=True)]
            parts.append([wanted[order.index(axis)] for axis in range(3)])
            turns.append(order)
        read = self._reader.read_parts("x", chosen, parts)
        x = np.stack([box.transpose(*order, 3) for box, order in zip(read, turns, strict=True)])
        y = self._reader.read(chosen, ["y"])["y"]
        return {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}


def check_data(reader: ShardReader, root: Path, config: CosmoFlowConfig) -> None:
    """Check shapes, input means and, if the config augments, periodicity. InputError if they do not fit."""
    volume = (*(config.input_size,) * 3, len(REDSHIFTS))
    reader.require({"x": (volume, "int16"), "y": ((len(TARGETS),), "float32")})
    attributes = reader.manifest.attributes
    if config.augmentation and not attributes.get("periodic", False):
        raise InputError(
            f"{root}: the samples are not periodic, and hyperparameters.augmentation true shifts periodic boxes; "
            "set it to false"
        )
    if config.input_mean is not None and config.input_std is not None:
        error = np.abs(np.subtract(config.input_mean, attributes["log1p_mean"])) / config.input_std
        if error.max() > INPUT_TOLERANCE:
            raise InputError(
                f"{root}: log1p(x) has mean {np.round(attributes['log1p_mean'], 3).tolist()} per channel, "
                f"hyperparameters.input_mean says {list(config.input_mean)}: other data than the config is for"
            )


def augment(x_NDHWC: NDArray[np.int16], draws_N: NDArray[np.uint64]) -> NDArray[np.int16]:
    """Transform each sample by one of the 48 symmetries of the cube and a periodic shift.

    Its random number chooses both.

    This is one gather of the whole batch. The position of a voxel's source is a sum of one table entry per axis. The
    four int16 channels move as one 64-bit word.
    """
    n_samples, n = x_NDHWC.shape[:2]
    assert x_NDHWC.shape[1:] == (n, n, n, 4)
    moves = choose_transforms(draws_N, n)
    strides = np.array([n * n, n, 1])
    a, b, c = (along * strides[moves.order[:, axis], None] for axis, along in enumerate(moves.walks))
    a += np.arange(n_samples)[:, None] * n**3
    source = (a[:, :, None, None] + b[:, None, :, None]) + c[:, None, None, :]
    words = np.ascontiguousarray(x_NDHWC).reshape(-1).view(np.uint64)
    moved: NDArray[np.int16] = words.take(source.reshape(-1)).view(np.int16).reshape(x_NDHWC.shape)
    return moved


@dataclass(frozen=True)
class SampleTransforms:
    """Where augmented samples come from.

    Along output axis a, position i is position ``walks[a][sample, i]`` of source axis ``order[sample, a]``.
    """

    order: NDArray[np.int64]
    walks: list[NDArray[np.int64]]

    def of(self, sample: int) -> tuple[tuple[int, ...], list[NDArray[np.int64]]]:
        """Return the source axis and positions per output axis of one sample."""
        return tuple(self.order[sample].tolist()), [walk[sample] for walk in self.walks]


def choose_transforms(draws_N: NDArray[np.uint64], n: int) -> SampleTransforms:
    """Return the symmetry and the periodic shift that each random number chooses, for cubes of n^3 voxels."""
    # one random number holds it all: 48 symmetries, then n shifts along each axis
    rest, symmetry = np.divmod(draws_N, np.uint64(48))
    order = _PERMUTATIONS[(symmetry // np.uint64(8)).astype(np.intp)]  # output axis a walks along source axis order[a]
    flip = _FLIPS[(symmetry % np.uint64(8)).astype(np.intp)]
    walk = np.arange(n)
    walks = []
    for axis in range(3):
        rest, shift = np.divmod(rest, np.uint64(n))
        along = np.where(flip[:, axis, None], n - 1 - walk, walk) + shift[:, None].astype(np.int64)
        walks.append(along % n)
    return SampleTransforms(order, walks)
