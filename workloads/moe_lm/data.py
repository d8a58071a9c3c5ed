"""Loads batches of bytes: a random piece of each training row, whole evaluation rows."""

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
from mlhpc.workloads.moe_lm.config import MoELMConfig

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch


class TextData:
    """One split. A batch holds ``bytes``: uint8 (N, context + 1)."""

    def __init__(self, root: Path, split: str, config: MoELMConfig) -> None:
        self._reader = ShardReader(root, split)
        self._length = config.context + 1
        expected = config.row_bytes if split == "train" else self._length
        text = self._reader.read([0])["text"]
        if (text.shape[1:], str(text.dtype)) != ((expected,), "uint8"):
            raise InputError(
                f"{root}: {split} rows are {text.dtype} {text.shape[1:]}, the config expects {expected} bytes:"
                " the data are"
                " of another size"
            )

    def __len__(self) -> int:
        return len(self._reader)

    def load(self, indices: Sequence[int] | NDArray[np.integer], *, seed: int, epoch: int) -> Batch:
        """Load pieces of context + 1 bytes. The start of a training piece is a function of (seed, epoch, index)."""
        rows = self._reader.read(indices)["text"]
        choices = np.uint64(rows.shape[1] - self._length + 1)
        begins = (draws(seed, epoch, np.asarray(indices)) % choices).astype(np.int64)
        columns = begins[:, None] + np.arange(self._length)
        return {"bytes": torch.from_numpy(np.take_along_axis(rows, columns, axis=1))}
