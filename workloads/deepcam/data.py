"""Loads DeepCAM batches from memory-mapped shards, each channel scaled to [0, 1] by the data set's statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.workloads.deepcam.climate import Statistics, check_statistics
from mlhpc.workloads.deepcam.config import CHANNELS, DeepCamConfig

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch, Slab


class DeepCamData:
    """One split. Batches hold ``x``: float32 fields (N, H, W, C), normalised, and ``y``: uint8 classes (N, H, W).

    Nothing is random: the closed division has no augmentation.
    """

    def __init__(self, root: Path, split: str, config: DeepCamConfig) -> None:
        self._reader = ShardReader(root, split)
        shape = (config.height, config.width)
        self._reader.require({"x": ((*shape, len(CHANNELS)), "float32"), "y": (shape, "uint8")})
        statistics = read_input_statistics(self._reader, root)
        # repeated to a whole row: loops over 16 channels are too short to be fast
        low = np.tile(np.array(statistics.minval), config.width)
        high = np.tile(np.array(statistics.maxval), config.width)
        self._low = torch.from_numpy(low.astype(np.float32))
        self._scale = torch.from_numpy((1 / (high - low)).astype(np.float32))

    def __len__(self) -> int:
        return len(self._reader)

    def load(self, indices: Sequence[int] | NDArray[np.integer], *, seed: int, epoch: int) -> Batch:
        """Load the samples of ``indices``."""
        arrays = self._reader.read(indices)
        x = torch.from_numpy(arrays["x"])
        rows = x.view(*x.shape[:2], -1)
        rows.sub_(self._low).mul_(self._scale)
        return {"x": x, "y": torch.from_numpy(arrays["y"])}

    def load_slab(
        self, indices: Sequence[int] | NDArray[np.integer], slabs: Mapping[str, Slab], *, seed: int, epoch: int
    ) -> Batch:
        """Load what `load` does, of the tensors in ``slabs`` only these pixels."""
        read = {
            name: np.stack(
                self._reader.read_parts(name, indices, [[np.arange(*each) for each in slab[:2]]] * len(indices))
            )
            for name, slab in slabs.items()
        }
        rest = [name for name in ("x", "y") if name not in read]
        arrays = read | (self._reader.read(indices, rest) if rest else {})
        x = torch.from_numpy(arrays["x"])
        # the channels of a pixel lie together in a row
        columns = slice(*(len(CHANNELS) * each for each in slabs["x"][1])) if "x" in slabs else slice(None)
        x.view(*x.shape[:2], -1).sub_(self._low[columns]).mul_(self._scale[columns])
        return {"x": x, "y": torch.from_numpy(arrays["y"])}


def read_input_statistics(reader: ShardReader, root: Path) -> Statistics:
    """Read the training split's statistics from the manifest. InputError if absent or a channel has no range."""
    recorded = reader.manifest.attributes.get("statistics")
    if recorded is None:
        raise InputError(f"{root}: the manifest has no attribute 'statistics'; inputs cannot be normalised")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in recorded.items()
    }
    return check_statistics(Statistics(**values), str(root))
