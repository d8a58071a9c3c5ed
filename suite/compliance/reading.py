"""Reads a log to judge it: every line is proven to be an event, but the values of single training steps are not kept.

Nine tenths of the large published logs are losses and learning rates of steps, for which no rule and no score asks. A
block of such lines is matched by one pattern that accepts valid events only, and stands for itself by its first and last
event, so that the clock is judged as if all were there. Whatever the pattern does not accept is parsed like any line.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from suite.mllog import Event, Log, Problem, parse_line

STEP_KEYS = ("learning_rate", "train_accuracy", "train_loss")


def read_to_judge(path: Path, first_bytes: int = -1) -> Log:
    """The events of a log, or of its first bytes, without those of steps, and what is no event. Raises OSError only."""
    with path.open("rb") as file:
        data = file.read(first_bytes)
    events: list[Event] = []
    problems: list[Problem] = []
    at, number, skipped = 0, 1, 0
    for block in _STEPS.finditer(data):
        begin, end = block.span()
        lines = data[begin : end - 1].split(b"\n")
        times = [line[_TIME] for line in lines]  # of one length, so that their order is that of the numbers
        if len(lines) < 3 or (begin > 0 and data[begin - 1] != _NEWLINE) or times != sorted(times):
            continue
        _parse(data[at : begin + len(lines[0]) + 1], number, events, problems)
        number += data.count(b"\n", at, begin) + len(lines) - 1
        skipped += len(lines) - 2
        at = end - 1 - len(lines[-1])
    _parse(data[at:], number, events, problems)
    return Log(path, tuple(events), tuple(problems), skipped)


_NEWLINE = 10
_HEAD = rb':::MLLOG {"namespace": "", "time_ms": '
_TIME = slice(len(_HEAD), len(_HEAD) + 13)
_NUMBER = rb"-?(?:0|[1-9][0-9]{0,14}+)(?:\.[0-9]{1,20}+)?+(?:[eE][+-]?+[0-9]{1,2}+)?+"
_STEPS = re.compile(
    rb'(?:%b[1-9][0-9]{12}, "event_type": "[A-Z_]{1,40}+", "key": "(?:%b)", "value": %b, '
    rb'"metadata": \{"file": "[^"\\\x00-\x1f]{0,400}+"(?:, "[a-z_]{1,40}+": %b){0,9}+\}\}\n)++'
    % (re.escape(_HEAD), "|".join(STEP_KEYS).encode(), _NUMBER, _NUMBER)
)


def _parse(data: bytes, number: int, events: list[Event], problems: list[Problem]) -> None:
    """Append what stands in these lines, the first of which is line ``number``."""
    for line, raw in enumerate(data.split(b"\n"), start=number):
        event = _plain_event(raw, line) if raw.startswith(b":::MLLOG {") else None
        if event is not None:
            events.append(event)
        elif b":::MLLOG" in raw:
            for item in parse_line(raw, line):
                (events if isinstance(item, Event) else problems).append(item)  # type: ignore[arg-type]


_DECODER = json.JSONDecoder()
_FIELDS = frozenset({"key", "value", "time_ms", "event_type", "metadata"})
_LARGEST_MS = 2**53  # integers up to here are floats exactly


def _plain_event(raw: bytes, line: int) -> Event | None:
    """The event of a line that is nothing else, as nearly all are; None: `parse_line` must look at it."""
    try:
        text = raw.decode()
        record, end = _DECODER.raw_decode(text, 9)
    except (ValueError, RecursionError):
        return None
    if end != len(text) or not record.keys() >= _FIELDS:
        return None
    key, time_ms, metadata = record["key"], record["time_ms"], record["metadata"]
    if type(key) is not str or not key or type(time_ms) is not int or type(metadata) is not dict:
        return None
    if not 0 <= time_ms < _LARGEST_MS:
        return None
    return Event(key, record["value"], float(time_ms), str(record["event_type"]), metadata, line)
