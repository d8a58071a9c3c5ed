"""Computes how the time of a trial was spent, also if it was interrupted.

Goodput, or effective training time ratio (ETTR), is the share of time in which training was done that counts. The time
starts with the trial's first process. Training counts from run_start, without checkpoint stalls and without work that
an interruption lost.

Computes how often a run should save a checkpoint: the intervals of Young (1974) and Daly (2006).

The expected share of time that counts is that of Kokolis et al. (HPCA 2025, arXiv 2410.21680).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlhpc.suite.errors import InputError, explain_not_installed
from mlhpc.suite.files import render_duration, render_duration_range
from mlhpc.suite.launcher import BEGAN, ENDED
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Event, convert_to_float, read_events
from mlhpc.suite.log.run_folder import RunFolder

_RUN_BEGIN_KEYS = (mllog.RUN_RESUMED, mllog.RUN_START)


FEWEST_GAPS = 8  # failures: fewer seldom refute a constant rate
REFUTED = 0.05
LEAST_SHARE = 0.02  # an attempt ends with its last event, so the first ages are not known well


@dataclass(frozen=True)
class Interruption:
    """The cost of one interruption in seconds: lost training, time until the next process, and from there to
    run_start.
    """

    lost_s: float
    down_s: float
    restart_s: float


@dataclass(frozen=True)
class Goodput:
    """How one trial spent its time, in seconds.

    ``useful``: training and evaluation that counts. ``lost``: no checkpoint had it. ``stalled``: by checkpoints.
    ``starting``: from the process to run_start, in all attempts; ``restarting``: in all but the first, part of
    ``starting``. ``down``: between attempts. Without ``restarting`` they add up to ``wall``.

    ``saves``: checkpoints of all attempts; ``stall_s`` and ``write_s``: their mean costs, None without any. ``died``:
    the last attempt ended without run_stop, so its work after the last checkpoint is lost. ``ups``: how long each
    attempt ran; all but the last were interrupted, and the last one if it ``died``.
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
    each: tuple[Interruption, ...]
    died: bool = False
    ups: tuple[float, ...] = ()
    recoveries: tuple[dict[str, float | None], ...] = ()  # as the attempts logged them

    @property
    def up_s(self) -> float:
        """Time in which an attempt ran, and so could be interrupted."""
        return self.wall_s - self.down_s

    @property
    def ratio(self) -> float | None:
        """Useful share of the wall time; None without wall time."""
        return self.useful_s / self.wall_s if self.wall_s > 0.0 else None

    @property
    def interruptions(self) -> int:
        """How often an attempt ended early, whether it was continued, restarted or neither."""
        return len(self.each) + self.died

    def logged(self) -> dict[str, Any]:
        """Return the value of the event at a run's end."""
        seconds = ("wall_s", "useful_s", "lost_s", "stalled_s", "starting_s", "restarting_s", "down_s")
        each = [{"lost_s": one.lost_s, "down_s": one.down_s, "restart_s": one.restart_s} for one in self.each]
        values = {name: getattr(self, name) for name in seconds}
        checkpoint = {"saves": self.saves, "stall_s": self.stall_s, "write_s": self.write_s}
        return {"ratio": self.ratio, **values, "checkpoint": checkpoint, "interruptions": each}


def find_goodput(folder: RunFolder, trial: int) -> Goodput | None:
    """Decompose the time of a trial from the logs of its attempts.

    None if no log has an event; OSError if one cannot be read.
    """
    logs = _read_attempts(folder, trial)
    if not logs:
        return None
    ended = any(event.key == mllog.RUN_STOP for event in logs[-1])
    return compute_goodput(logs, folder.root, trial, died=not ended and trial not in folder.under_way())


def compute_goodput(logs: Sequence[Sequence[Event]], folder: Path, trial: int, *, died: bool = False) -> Goodput:
    """Decompose the time of a trial from the events of its attempts."""
    useful = lost = stalled = starting = restarting = 0.0
    each: list[Interruption] = []
    ups: list[float] = []
    before: float | None = None  # when the attempt before ended
    gone = 0.0  # what it lost
    for number, events in enumerate(logs):
        # Attempts that ended while they started say nothing of what was kept
        following = next((later for later in logs[number + 1 :] if any(e.key in _RUN_BEGIN_KEYS for e in later)), None)
        start, end = _find_run_times_ms(events)
        begin = events[0].time_ms - 1000 * _read_launch_s(events)
        begin = begin if before is None else min(max(begin, before), events[0].time_ms)
        if following is not None:
            kept = _find_kept_until_ms(events, following, start)
        else:
            kept = _find_saved_until_ms(events, start) if died or events is not logs[-1] else end
        stalls = 1000 * math.fsum(
            _read_seconds(e, "stall_s") for e in events if e.key == mllog.CHECKPOINT and e.time_ms <= kept
        )
        stalls = min(stalls, kept - start)
        useful += kept - start - stalls
        stalled += stalls
        lost += end - kept
        starting += start - begin
        ups.append((end - begin) / 1000)
        if before is not None:
            restarting += start - begin
            each.append(Interruption(gone / 1000, max(0.0, begin - before) / 1000, (start - begin) / 1000))
        before, gone = end, end - kept
    saved = [event for events in logs for event in events if event.key == mllog.CHECKPOINT]
    down_s = math.fsum(one.down_s for one in each)
    return Goodput(
        folder=folder,
        trial=trial,
        attempts=len(logs),
        wall_s=(useful + lost + stalled + starting) / 1000 + down_s,
        useful_s=useful / 1000,
        lost_s=lost / 1000,
        stalled_s=stalled / 1000,
        starting_s=starting / 1000,
        restarting_s=restarting / 1000,
        down_s=down_s,
        saves=len(saved),
        stall_s=_compute_mean([_read_seconds(event, "stall_s") for event in saved]),
        write_s=_compute_mean([_read_seconds(event, "write_s") for event in saved]),
        each=tuple(each),
        died=died,
        ups=tuple(ups),
        recoveries=tuple(
            event.value
            for events in logs
            for event in events
            if event.key == mllog.RECOVERY and _is_recovery(event.value)
        ),
    )


PHASES = ("replayed_s", "detection_s", "queue_s", "restart_s", "reload_s")  # of a recovery, in the order of time


def _is_recovery(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == set(PHASES)


def find_recovery(
    folder: RunFolder, trial: int, load_began_ms: float, reload_s: float, environ: Mapping[str, str] = os.environ
) -> dict[str, float | None] | None:
    """Split the time from the last step of a trial that counts to its next one, in seconds. None without two attempts.

    ``replayed``: what the attempt before did after its checkpoint. ``detection``: until its launcher saw its end; None
    if that ended too. ``queue``: until the next launcher began. ``reload``: reading the checkpoint. ``restart``: the rest.
    """
    logs = _read_attempts(folder, trial)
    if len(logs) < 2:
        return None
    before, now = logs[-2:]
    start, last = _find_run_times_ms(before)
    kept, begin = _find_kept_until_ms(before, now, start), _find_run_times_ms(now)[0]
    given = [_read_unix_ms(environ.get(name, "")) for name in (ENDED, BEGAN)]
    launched = min(max(given[1] or last, last), load_began_ms)
    ended = given[0] if last <= given[0] <= launched else None
    parts = (last - kept, None if ended is None else ended - last, launched - (ended or last))
    restart = begin - launched - 1000 * reload_s
    return {
        name: None if part is None else part / 1000
        for name, part in zip(PHASES, (*parts, restart, 1000 * reload_s), strict=True)
    }


def _read_unix_ms(text: str) -> float:
    """Read a variable with Unix seconds; 0 if there is none."""
    try:
        return max(0.0, 1000 * float(text))
    except ValueError:
        return 0.0


def _read_attempts(folder: RunFolder, trial: int) -> list[Sequence[Event]]:
    """Read the logs of a trial's attempts, in the order of time."""
    paths = [*folder.failed(trial), folder.result(trial), *folder.resumed(trial)]
    logs = [events for events in (read_events(path, steps=False).events for path in paths if path.exists()) if events]
    return sorted(logs, key=lambda events: events[0].time_ms)


def _find_run_times_ms(events: Sequence[Event]) -> tuple[float, float]:
    """Return when an attempt's run began and ended, in Unix milliseconds.

    An attempt without run_start is all start. One without an end ends with its last event.
    """
    latest = max(event.time_ms for event in events)
    start = next((event.time_ms for event in events if event.key == mllog.RUN_START), None)
    if start is None:
        return latest, latest
    return start, max(start, next((event.time_ms for event in events if event.key == mllog.RUN_STOP), latest))


def _read_launch_s(events: Sequence[Event]) -> float:
    """Return seconds from the slowest rank's process to the first event: interpreter and imports; 0 if not logged."""
    value = next((event.value for event in events if event.key == mllog.STARTUP), None)
    parts = [value.get(name) for name in ("interpreter", "imports")] if isinstance(value, dict) else []
    return math.fsum(max(0.0, convert_to_float(part.get("max")) or 0.0) for part in parts if isinstance(part, dict))


def _find_kept_until_ms(events: Sequence[Event], following: Sequence[Event], start: float) -> float:
    """Return until when an attempt's work counts: when the checkpoint was begun from which it was continued."""
    resumed = next((event for event in following if event.key == mllog.RUN_RESUMED), None)
    if resumed is None:
        return start
    step = resumed.metadata.get("next_step")
    return _find_saved_until_ms([event for event in events if event.metadata.get("next_step") == step], start)


def _find_saved_until_ms(events: Sequence[Event], start: float) -> float:
    """Return until when a checkpoint holds an attempt's work; its run_start without one.

    A checkpoint is logged when it is whole. It holds the work done before it stalled the training.
    """
    begun = [
        event.time_ms - 1000 * (_read_seconds(event, "write_s") + _read_seconds(event, "stall_s"))
        for event in events
        if event.key == mllog.CHECKPOINT
    ]
    return max(start, begun[-1]) if begun else start


def _read_seconds(event: Event, name: str) -> float:
    value = convert_to_float(event.value.get(name)) if isinstance(event.value, dict) else None
    return max(0.0, value or 0.0)


def _compute_mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def compute_young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Compute Young's interval: sqrt(2 w M). ``save_s`` is how long one checkpoint stalls the training."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def compute_daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Compute Daly's interval, first order: sqrt(2 w M) - w; M if a checkpoint costs 2 M or more."""
    return compute_young_interval_s(save_s, mtbf_s) - save_s if save_s < 2.0 * mtbf_s else mtbf_s


def compute_expected_ettr(save_s: float, restart_s: float, interval_s: float, mtbf_s: float) -> float:
    """Compute the expected ETTR of a long job: (1 - (R + interval / 2) / M) / (1 + w / interval), at least 0."""
    return max(0.0, (1.0 - (restart_s + interval_s / 2) / mtbf_s) / (1.0 + save_s / interval_s))


def estimate_mtbf_s(up_s: float, interruptions: int, confidence: float = 0.9) -> tuple[float, float, float]:
    """Estimate the mean time between interruptions, with its interval. Without interruptions the mean is infinite.

    The interval holds for independent interruptions at a constant rate.
    """
    try:
        from scipy import stats
    except ImportError:
        raise InputError(
            f"the time between failures cannot be estimated: {explain_not_installed('scipy')}; or state it with"
            " --mtbf-h"
        ) from None
    tail = (1.0 - confidence) / 2
    low = 2.0 * up_s / stats.chi2.ppf(1.0 - tail, 2 * interruptions + 2)
    high = 2.0 * up_s / stats.chi2.ppf(tail, 2 * interruptions) if interruptions else math.inf
    return (up_s / interruptions if interruptions else math.inf), float(low), float(high)


def compute_constant_rate_p(trials: Sequence[Goodput]) -> float | None:
    """Compute the p value of a constant rate of interruptions, against one that falls or grows with the time up.

    It is the test of the total time on test (MIL-HDBK-189): how much of all time up had passed, over all attempts, at
    the ages of the failures. None: fewer than `FEWEST_GAPS` failures say too little.
    """
    from scipy import stats

    ended = sorted(up for trial in trials for up in (trial.ups if trial.died else trial.ups[:-1]))
    ages = [up for trial in trials for up in trial.ups]
    oldest = max(ages, default=0.0)
    shares = [math.fsum(min(up, age) for up in ages) / math.fsum(ages) for age in ended if age < oldest]
    if len(shares) < FEWEST_GAPS:
        return None
    early = -2.0 * math.fsum(math.log(max(share, LEAST_SHARE)) for share in shares)
    return float(2.0 * min(stats.chi2.cdf(early, 2 * len(shares)), stats.chi2.sf(early, 2 * len(shares))))


def compute_advice(trials: Sequence[Goodput], mtbf_s: float | None) -> dict[str, Any]:
    """Compute the checkpoint interval from measured costs and the failure rate, and state its basis.

    ``mtbf_s``: mean time between failures; None: estimate it from the interruptions of the trials.
    """
    interruptions = sum(trial.interruptions for trial in trials)
    up_s = math.fsum(trial.up_s for trial in trials)  # nothing fails while no attempt runs
    advice: dict[str, Any] = {"interruptions": interruptions, "mtbf_s": mtbf_s, "mtbf_interval_s": None}
    if mtbf_s is None and interruptions and up_s > 0.0:
        learned = estimate_mtbf_s(up_s, interruptions)
        p = compute_constant_rate_p(trials)
        held = None if p is not None and p < REFUTED else learned[1:]
        advice |= {"mtbf_s": learned[0], "mtbf_interval_s": held, "constant_rate_p": p}
    costs = [(trial.stall_s, trial.write_s or 0.0, trial.saves) for trial in trials if trial.stall_s is not None]
    saves = sum(count for _, _, count in costs)
    save_s = math.fsum(stall * count for stall, _, count in costs) / max(1, saves)
    write_s = math.fsum(write * count for _, write, count in costs) / max(1, saves)
    advice["saves"] = saves
    if advice["mtbf_s"] is None or save_s == write_s == 0.0:
        return advice
    restarts = [trial.restarting_s / len(trial.each) for trial in trials if trial.each]
    starts = restarts or [trial.starting_s for trial in trials]
    restart_s = math.fsum(starts) / len(starts)
    # No checkpoint can begin while the one before is being written.
    interval_s = max(compute_daly_interval_s(save_s, advice["mtbf_s"]), save_s, write_s)
    return advice | {
        "save_s": save_s,
        "restart_s": restart_s,
        "young_s": compute_young_interval_s(save_s, advice["mtbf_s"]),
        "daly_s": compute_daly_interval_s(save_s, advice["mtbf_s"]),
        "interval_s": interval_s,
        "expected_ratio": compute_expected_ettr(save_s, restart_s, interval_s, advice["mtbf_s"]),
    }


def render_advice(advice: dict[str, Any]) -> str:
    """Write the advice as a sentence, or what is missing for one."""
    if advice["mtbf_s"] is None:
        return "no interruptions seen; for a checkpoint interval give --mtbf-h"
    if "interval_s" not in advice:
        why = "those saved cost no time" if advice["saves"] else "none was saved, so its cost is not known"
        return f"no advice on checkpoints: {why}"
    basis, p = "as stated", advice.get("constant_rate_p")
    if advice["mtbf_interval_s"] is not None:
        low, high = advice["mtbf_interval_s"]
        tested = "too few to test" if p is None else f"p = {p:.2g}"
        basis = (
            f"from {advice['interruptions']} seen, 90 % {render_duration_range(low, high)} if failures come at a "
            f"constant rate: {tested}"
        )
    elif p is not None:
        basis = f"from {advice['interruptions']} seen, not at a constant rate (p = {p:.2g}), so without an interval"
    return (
        f"checkpoint.interval_s={advice['interval_s']:.3g} (Daly; Young {advice['young_s']:.3g}) for a failure every"
        f" {render_duration(advice['mtbf_s'])} ({basis}), a checkpoint that stalls {render_duration(advice['save_s'])}"
        f" and a restart of {render_duration(advice['restart_s'])}; then {advice['expected_ratio']:.1%} would count"
        " (modelled)"
    )
