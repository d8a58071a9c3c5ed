"""Names the largest losses of runs by their measured parts, each with the setting to try and what it can gain."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mlhpc.suite.log.record import RunRecord

LEAST_SHARE = 0.03  # of the time to train; smaller ones are not worth a try
MOST_LOSSES = 3


class Loss(NamedTuple):
    """A part of the time to train that a setting may shorten. ``share`` is the mean over the runs."""

    what: str
    share: float
    remedy: str

    def render(self) -> str:
        """Render as ``waiting for data 12 %: --set loader_threads=4 gains at most that``."""
        return f"{self.what} {100 * self.share:.2g} %: try {self.remedy}, which gains at most that"


def find_largest_losses(records: Sequence[RunRecord], cores: int) -> list[Loss]:
    """Find the largest losses that every run shows. ``cores``: those that the ranks of a node share.

    Only of runs that ended, with measured phases. A loss without a setting that may shorten it is none.
    """
    ended = [each for each in records if each.shares is not None and each.shares.run_s > 0 and each.config]
    found = []
    for what, measure, remedy in _PARTS:
        seconds = [measure(each) for each in ended]
        shares = [
            part / each.shares.run_s
            for part, each in zip(seconds, ended, strict=True)
            if part is not None and each.shares is not None
        ]
        tried = remedy(ended[0], cores) if ended else ""
        if tried and len(shares) == len(ended) and min(shares) >= LEAST_SHARE / 2:
            found.append(Loss(what, statistics.fmean(shares), tried))
    large = [loss for loss in found if loss.share >= LEAST_SHARE]
    return sorted(large, key=lambda loss: -loss.share)[:MOST_LOSSES]


def render_losses(records: Sequence[RunRecord], cores: int) -> Iterator[str]:
    """Yield one line for each loss; nothing if the data show none."""
    yield from (f"  loss: {loss.render()}" for loss in find_largest_losses(records, cores))


def _find_setting(record: RunRecord, name: str, default: int) -> int:
    value = (record.config or {}).get(name, default)
    return value if type(value) is int and value > 0 else default


def _choose_loader_threads(record: RunRecord, cores: int) -> str:
    """More threads help only while cores are left for them."""
    threads, ranks = (
        _find_setting(record, "loader_threads", 1),
        max(1, (record.ranks or 1) // max(1, record.nodes or 1)),
    )
    return f"--set loader_threads={2 * threads}" if 2 * threads * ranks <= 2 * cores else ""


def _choose_eval_batch(record: RunRecord, cores: int) -> str:
    """A larger batch helps only while a rank has more samples than one."""
    size, samples = _find_setting(record, "eval_batch_size", 64), (record.eval_samples or 0) / (record.ranks or 1)
    return f"--set eval_batch_size={2 * size}" if size < samples else ""


def _choose_exchange(record: RunRecord, cores: int) -> str:
    workload = (record.config or {}).get("workload")
    return f"mlhpc tune {workload} --size {record.size} (ranks, threads and plans)" if (record.ranks or 1) > 1 else ""


def _choose_staging(record: RunRecord, cores: int) -> str:
    overlap = (record.staging_stats or {}).get("overlapped")
    return "" if overlap else "--set staging.overlap=true"


def _choose_checkpoints(record: RunRecord, cores: int) -> str:
    interval = (record.config or {}).get("checkpoint", {}).get("interval_s")
    return f"--set checkpoint.interval_s={2 * interval:g}" if isinstance(interval, int | float) else ""


Measure = Callable[[RunRecord], float | None]
_PARTS: tuple[tuple[str, Measure, Callable[[RunRecord, int], str]], ...] = (
    ("waiting for data", lambda run: run.mean_phases.data_wait_s if run.mean_phases else None, _choose_loader_threads),
    (
        "waiting for other ranks",
        lambda run: run.mean_phases.exposed_communication_s if run.mean_phases else None,
        _choose_exchange,
    ),
    ("evaluation", lambda run: run.shares.eval_s if run.shares else None, _choose_eval_batch),
    ("staging", lambda run: run.shares.staging_exposed_s if run.shares else None, _choose_staging),
    ("saving checkpoints", lambda run: sum(stop - start for start, stop in run.checkpoints), _choose_checkpoints),
)
