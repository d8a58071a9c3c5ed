"""Computes the event `rank_stats`: quantities that each rank counts of itself, and their distribution over ranks.

A quantity is a name in `RankCounters.read`. A number of the distribution is a column of `compute_rank_distribution`.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlhpc.suite.data.shards import count_read_bytes

PROC_IO = Path("/proc/self/io")
# Above this, a log with one value per rank and quantity would grow with the machine.
MAX_LISTED_RANKS = 64


class RankCounters:
    """Counts what this rank read and communicated since the last `restart`.

    ``take_traffic`` returns the calls and bytes of collectives since it was last called. ``absent``: what this machine
    does not show, with the reason.
    """

    def __init__(self, device: torch.device, take_traffic: Callable[[], Mapping[str, float]]) -> None:
        self._device, self._take_traffic = device, take_traffic
        self.absent: dict[str, str] = {}
        self._begin = self._counts()

    def restart(self) -> None:
        """Start counting anew."""
        self._take_traffic()
        self._begin = self._counts()

    def read(self) -> dict[str, float]:
        """Return bytes read and communicated since the restart, and peaks of memory since the process began."""
        counts = {name: value - self._begin[name] for name, value in self._counts().items()}
        # Linux gives kibibytes.
        peaks = {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
        if self._device.type == "cuda":
            peaks["peak_device_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        return counts | dict(self._take_traffic()) | peaks

    def _counts(self) -> dict[str, float]:
        counts = {"loader_bytes": float(count_read_bytes())}
        try:
            # proc(5): read_bytes came from a block device. rchar is the sum of read calls, also from the page cache,
            # without reads through mapped files.
            text = PROC_IO.read_text()
        except OSError as error:
            self.absent["kernel_bytes"] = f"{PROC_IO}: {error.strerror}"
            return counts
        kernel = dict(line.split(": ") for line in text.splitlines())
        return counts | {"storage_bytes": float(kernel["read_bytes"]), "read_call_bytes": float(kernel["rchar"])}


def compute_rank_distribution(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Return each quantity's distribution over ranks and which ranks have the extremes; an absent quantity counts as 0.

    ``values`` lists every rank's value in rank order, up to 64 ranks.
    """
    summary: dict[str, dict[str, Any]] = {}
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    columns = {
        "min": table.min(0),
        "median": np.median(table, 0),
        "mean": table.mean(0),
        "max": table.max(0),
        "min_rank": table.argmin(0),
        "max_rank": table.argmax(0),
    }
    for position, quantity in enumerate(names):
        summary[quantity] = {name: column[position].item() for name, column in columns.items()}
        if len(rows) <= MAX_LISTED_RANKS:
            summary[quantity]["values"] = table[:, position].tolist()
    return summary
