"""The clocks of a log: which events the times of a run are read from, and which of them go back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from suite.compliance.rules.base import epoch_num
from suite.log import mllog
from suite.log.reader import Event

CLOCKS_DIFFER_S = 0.01  # processes of one run that write into one log are rarely further apart
_EVALUATION = frozenset({mllog.EVAL_START, mllog.EVAL_STOP, mllog.EVAL_ERROR, mllog.EVAL_ACCURACY})
_STEMS = (mllog.INIT, mllog.STAGING, mllog.RUN, mllog.EPOCH, mllog.BLOCK)
AFTER = _EVALUATION | {f"{stem}_{side}" for stem in (mllog.EPOCH, mllog.BLOCK) for side in ("start", "stop")}
_CLOCK = _EVALUATION | {f"{stem}_{side}" for stem in _STEMS for side in ("start", "stop")}


def of_the_clock(events: Iterable[Event]) -> Iterator[Event]:
    """The events that times are read from, in file order; of those that several ranks wrote alike, the first."""
    seen = set()
    for event in events:
        if event.key not in _CLOCK:
            continue
        place = event.key, epoch_num(event)
        if place not in seen or event.key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
            seen.add(place)
            yield event


def backwards(events: Iterable[Event]) -> Iterator[tuple[int, float, str]]:
    """(line, seconds, message) for every event that is earlier than the latest event before it."""
    latest = None
    for event in events:
        if latest is not None and event.time_ms < latest.time_ms:
            seconds = (latest.time_ms - event.time_ms) / 1e3
            yield event.line, seconds, f"{event.key} is {seconds:.3f} s earlier than {latest.key} before it"
        else:
            latest = event
