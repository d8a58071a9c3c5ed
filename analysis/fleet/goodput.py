"""Where the time of a run that was interrupted went, and how often it should save a checkpoint.

Goodput, or effective training time ratio (ETTR): the part of the time between a trial's first and last event in which training was
done that counts: from run_start, without checkpoint stalls, and without what an interruption lost. Formulas: Young (1974), Daly
(2006), and for the expected ratio Kokolis et al. (HPCA 2025, arXiv 2410.21680).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from suite.log import mllog
from suite.log.reader import Event, read_events
from suite.log.run_folder import RunFolder
from suite.log.values import finite


@dataclass(frozen=True)
class Goodput:
    """One trial. Seconds: ``useful`` training and evaluation that counts, ``lost`` because no checkpoint had it, ``stalled`` by
    checkpoints, ``starting`` before run_start of all attempts, ``restarting`` that of all but the first, ``down`` between attempts.

    They add up to ``wall`` (``restarting`` is part of ``starting``). ``saves`` are the checkpoints of all attempts,
    ``stall_s`` and ``write_s`` what one takes on average; None without any.
    """

    folder: Path
    trial: int
    attempts: int
    wall_s: float
    useful_s: float
    lost_s: float
    stalled_s: float
    starting_s: float
    restarting_s: float
    down_s: float
    saves: int
    stall_s: float | None
    write_s: float | None

    @property
    def ratio(self) -> float:
        """Useful part of the wall time."""
        return self.useful_s / self.wall_s if self.wall_s > 0.0 else math.nan

    @property
    def interruptions(self) -> int:
        """How often it was continued."""
        return self.attempts - 1


def find_goodput(folder: RunFolder, trial: int) -> Goodput | None:
    """Decompose the time of a trial from the logs of its attempts. None if none has an event."""
    paths = [*folder.failed(trial), folder.result(trial), *folder.resumed(trial)]
    logs = [events for events in (read_events(path).events for path in paths if path.exists()) if events]
    if not logs:
        return None
    logs.sort(key=lambda events: events[0].time_ms)
    useful = lost = stalled = starting = restarting = down = 0.0
    saved = [event for events in logs for event in events if event.key == mllog.CHECKPOINT]
    for number, events in enumerate(logs):
        following = logs[number + 1] if number + 1 < len(logs) else None
        begin, end = events[0].time_ms, max(event.time_ms for event in events)
        start = next((event.time_ms for event in events if event.key == mllog.RUN_START), end)
        kept = _kept_until(events, following, start, end)
        stalls = 1000 * math.fsum(
            _seconds(e, "stall_s") for e in events if e.key == mllog.CHECKPOINT and e.time_ms <= kept
        )
        stalls = min(stalls, kept - start)
        useful += kept - start - stalls
        stalled += stalls
        lost += end - kept
        starting += start - begin
        restarting += start - begin if number else 0.0
        down += max(0.0, following[0].time_ms - end) if following else 0.0
    return Goodput(
        folder=folder.root,
        trial=trial,
        attempts=len(logs),
        wall_s=(useful + lost + stalled + starting + down) / 1000,
        useful_s=useful / 1000,
        lost_s=lost / 1000,
        stalled_s=stalled / 1000,
        starting_s=starting / 1000,
        restarting_s=restarting / 1000,
        down_s=down / 1000,
        saves=len(saved),
        stall_s=_mean([_seconds(event, "stall_s") for event in saved]),
        write_s=_mean([_seconds(event, "write_s") for event in saved]),
    )


def _kept_until(events: Sequence[Event], following: Sequence[Event] | None, start: float, end: float) -> float:
    """Until when what an attempt did counts: its end, or when the checkpoint was taken from which it was continued."""
    if following is None:
        return end
    resumed = next((event for event in following if event.key == mllog.RUN_RESUMED), None)
    if resumed is None:
        return start
    step = resumed.metadata.get("next_step")
    taken = [
        event.time_ms - 1000 * _seconds(event, "write_s")
        for event in events
        if event.key == mllog.CHECKPOINT and event.metadata.get("next_step") == step
    ]
    return max(start, taken[-1]) if taken else start


def _seconds(event: Event, name: str) -> float:
    value = finite(event.value.get(name)) if isinstance(event.value, dict) else None
    return max(0.0, value or 0.0)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def young_s(save_s: float, mtbf_s: float) -> float:
    """Interval between checkpoints after Young: sqrt(2 w M). ``save_s`` is what one costs the training."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """After Daly, first order: sqrt(2 w M) - w; M if a checkpoint costs 2 M or more."""
    return young_s(save_s, mtbf_s) - save_s if save_s < 2.0 * mtbf_s else mtbf_s


def best_interval_s(save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Of the best availability, with restarts: w + sqrt(2 (M + R) w + w^2) between beginnings (arXiv 2410.18124)."""
    return save_s + math.sqrt(2.0 * (mtbf_s + restart_s) * save_s + save_s**2)


def expected_ratio(save_s: float, restart_s: float, interval_s: float, mtbf_s: float) -> float:
    """Expected ETTR of a long job: (1 - (R + interval / 2) / M) / (1 + w / interval), at least 0."""
    return max(0.0, (1.0 - (restart_s + interval_s / 2) / mtbf_s) / (1.0 + save_s / interval_s))


def job_mtbf_h(nodes: int, failures_per_1000_node_days: float) -> float:
    """Hours between failures of a job, if nodes fail independently at that rate.

    An extrapolation: of jobs of 1,024 GPUs (128 nodes) on RSC-1 it says 28.8 h, and 7.9 h were measured.
    """
    return 24.0 / (nodes * failures_per_1000_node_days / 1000.0)


def learned_mtbf_s(wall_s: float, interruptions: int, confidence: float = 0.9) -> tuple[float, float, float]:
    """Mean time between interruptions and its interval, for independent ones at one rate; the mean is infinite without any."""
    tail = (1.0 - confidence) / 2
    low = 2.0 * wall_s / stats.chi2.ppf(1.0 - tail, 2 * interruptions + 2)
    high = 2.0 * wall_s / stats.chi2.ppf(tail, 2 * interruptions) if interruptions else math.inf
    return (wall_s / interruptions if interruptions else math.inf), float(low), float(high)
