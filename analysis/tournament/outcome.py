"""What one run of a tournament gave: its time if it reached the target within its budget, and what it needed for it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from analysis.tournament.folder import CPU, Tournament
from analysis.tournament.race import Turn
from suite.log import mllog
from suite.log.reader import Log, read_events
from suite.log.record import RunRecord, first_reaching, summarise
from suite.log.values import finite

NO_RUN = "left no log"


@dataclass(frozen=True)
class Outcome:
    """A run that was started. ``value`` is the objective in seconds, infinite if the run did not finish, then ``why`` says so.

    ``joules`` by counter, summed over the run; empty if no counter is readable. ``log_sha256`` is None without a log.
    """

    turn: Turn
    value: float
    why: str = ""
    record: RunRecord | None = None
    log: Log | None = field(default=None, repr=False)
    log_sha256: str | None = None
    joules: Mapping[str, float] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """True if it reached the target within its budget."""
        return math.isfinite(self.value)


def read_outcome(tournament: Tournament, turn: Turn) -> Outcome:
    """Read what the run of a turn left. Nothing that is in the folder raises: a run that cannot be read did not finish."""
    folder = tournament.run(turn.block, turn.entry)
    path = folder.result(0)
    if any(each.is_symlink() for each in (path, folder.root, folder.root.parent)):
        return Outcome(turn, math.inf, "is a symbolic link, which is not followed")
    if not path.is_file():
        return Outcome(turn, math.inf, NO_RUN)
    total = hashlib.sha256()
    try:
        log = read_events(path, steps=False, seen=total.update)
    except OSError as error:
        return Outcome(turn, math.inf, f"its log cannot be read: {error.strerror}")
    target = tournament.target
    record = summarise(log, target.metric)
    value, why = _value(tournament, log, record)
    return Outcome(turn, value, why, record, log, total.hexdigest(), _joules(log))


def _value(tournament: Tournament, log: Log, record: RunRecord) -> tuple[float, str]:
    """The objective, or infinity and the reason."""
    limit_s, seconds = tournament.settings.run_limit_s, record.time_to_train_s
    if record.run_start_s is None:
        return math.inf, "never began"
    if record.run_stop_s is None or seconds is None:
        return math.inf, "has no end"
    if first_reaching(record, tournament.target) is None:
        return math.inf, "missed the target"
    if record.status != "success":
        return math.inf, f"ended with status {record.status}"
    if record.resumed:
        return math.inf, "was continued"
    if not 0.0 < seconds <= limit_s:
        return math.inf, f"took {seconds:.6g} s; the budget is {limit_s:.6g} s"
    if tournament.settings.objective == CPU:
        cpu_s = cpu_seconds(log)
        return (cpu_s, "") if cpu_s else (math.inf, "its log has no CPU seconds of the ranks")
    return seconds, ""


def cpu_seconds(log: Log) -> float | None:
    """CPU seconds of the ranks from run_start to run_stop, summed over nodes; None if the log does not list every node."""
    event = log.first(mllog.OTHER_WORK)
    if event is None or not isinstance(event.value, list) or len(event.value) != event.metadata.get("nodes"):
        return None
    each = [finite(node.get("own_s")) if isinstance(node, dict) else None for node in event.value]
    seconds = [number for number in each if number is not None and number > 0]
    return math.fsum(seconds) if seconds and len(seconds) == len(each) else None


def _joules(log: Log) -> dict[str, float]:
    found: dict[str, float] = {}
    for event in log.until(mllog.RUN_STOP).every(mllog.ENERGY):
        for counter, entry in event.value.items() if isinstance(event.value, dict) else ():
            joules = finite(entry.get("joules")) if isinstance(entry, dict) else None
            if joules is not None and joules >= 0:
                found[counter] = found.get(counter, 0.0) + joules
    return found
