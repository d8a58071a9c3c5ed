"""Data sets that give this rank a part of each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlhpc.suite.workload import Dataset, Slab, SlabDataset

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mlhpc.suite.workload import Batch


def cut(data: Dataset, slabs: Mapping[str, Slab]) -> Dataset:
    """The data set with only these positions of its tensors. One that cannot read parts is read whole and cut."""
    return _Cut(data, slabs) if slabs else data


@dataclass(frozen=True)
class _Cut:
    data: Dataset
    slabs: Mapping[str, Slab]

    def __len__(self) -> int:
        return len(self.data)

    def load(self, indices: Sequence[int] | NDArray[np.int64], *, seed: int, epoch: int) -> Batch:
        """Load this rank's part of samples."""
        if isinstance(self.data, SlabDataset):
            return self.data.load_slab(indices, self.slabs, seed=seed, epoch=epoch)
        batch = self.data.load(indices, seed=seed, epoch=epoch)
        return {
            name: x[(slice(None), *(slice(*each) for each in self.slabs.get(name, ())))] for name, x in batch.items()
        }
