"""Loads image batches from memory-mapped shards and augments them by symmetries of the square and periodic shifts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from mlhpc.suite.data.sampling import draws
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.workloads.swinv2_moe.config import SwinV2MoEConfig

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch


class ImageData:
    """One split. Batches hold ``image``: uint8 (N, P, P) and ``label``: uint8 (N,)."""

    def __init__(self, root: Path, split: str, config: SwinV2MoEConfig) -> None:
        self._reader = ShardReader(root, split)
        self._augment = config.augmentation and split == "train"
        self._reader.require({"image": ((config.pixels,) * 2, "uint8"), "label": ((), "uint8")})
        classes = self._reader.manifest.attributes.get("classes", ())
        if tuple(classes) != config.classes:
            raise InputError(
                f"{root}: the data have the classes {', '.join(classes)}; hyperparameters.classes expects "
                f"{', '.join(config.classes)}"
            )

    def __len__(self) -> int:
        return len(self._reader)

    def load(self, indices: Sequence[int] | NDArray[np.integer], *, seed: int, epoch: int) -> Batch:
        """Load the samples of ``indices``. Training samples are augmented, as a function of (seed, epoch, index)."""
        arrays = self._reader.read(indices)
        image = arrays["image"]
        if self._augment:
            image = augment(image, draws(seed, epoch, np.asarray(indices)))
        return {"image": torch.from_numpy(image), "label": torch.from_numpy(arrays["label"])}


def augment(image_NPP: NDArray[np.uint8], draws_N: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Transform each periodic image by one of the 8 symmetries of the square and a shift.

    Its random number chooses both.
    """
    n_images, n = image_NPP.shape[:2]
    # one random number holds it all: 8 symmetries, then n shifts along each axis
    rest, symmetry = np.divmod(draws_N, np.uint64(8))
    walk = np.arange(n)
    along = []
    for axis in range(2):
        rest, shift = np.divmod(rest, np.uint64(n))
        backwards = (symmetry >> np.uint64(axis)) & np.uint64(1)
        along.append((np.where(backwards[:, None], n - 1 - walk, walk) + shift[:, None].astype(np.int64)) % n)
    swapped = (symmetry >= 4)[:, None, None]
    row, column = along[0][:, :, None], along[1][:, None, :]
    source = np.where(swapped, row + n * column, n * row + column)
    flat = np.ascontiguousarray(image_NPP).reshape(n_images, -1)
    return np.take_along_axis(flat, source.reshape(n_images, -1), axis=1).reshape(image_NPP.shape)
