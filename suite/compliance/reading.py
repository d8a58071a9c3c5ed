"""Reads a log to judge it: every line is proven to be an event, but the values of single training steps are not kept.

Nine tenths of the large published logs are losses and learning rates of steps, for which no rule and no score asks. A
block of such lines is matched by one pattern that accepts valid events only, and stands for itself by its first and last
event, so that the clock is judged as if all were there. Whatever the pattern does not accept is parsed like any line.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from suite.mllog import Event, Log, Problem, parse_line

STEP_KEYS = ("learning_rate", "train_accuracy", "train_loss")


def read_to_judge(path: Path) -> Log:
    """The events of a log without those of steps, and what could not be read. Raises OSError only."""
    data = path.read_bytes()
    events: list[Event] = []
    problems: list[Problem] = []
    at, number, skipped = 0, 1, 0
    for block in _STEPS.finditer(data):
        begin, end = block.span()
        times = [int(time) for time in _TIME.findall(data, begin, end)]
        if len(times) < 3 or (begin > 0 and data[begin - 1] != _NEWLINE) or any(a > b for a, b in pairwise(times)):
            continue
        first, last = data.index(b"\n", begin) + 1, data.rindex(b"\n", begin, end - 1) + 1
        number = _parse(data[at:first], number, events, problems) + len(times) - 2
        skipped += len(times) - 2
        at = last
    _parse(data[at:], number, events, problems)
    return Log(path, tuple(events), tuple(problems), skipped)


_NEWLINE = 10
_NUMBER = rb"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,2})?"
_STEPS = re.compile(
    rb'(?::::MLLOG \{"namespace": "", "time_ms": [1-9][0-9]{0,14}, "event_type": "[A-Z_]{1,40}", "key": "(?:%b)", "value": %b, '
    rb'"metadata": \{"file": "[^"\\\x00-\x1f]{0,400}+"(?:, "[a-z_]{1,40}": %b){0,9}+\}\}\n)++'
    % ("|".join(STEP_KEYS).encode(), _NUMBER, _NUMBER)
)
_TIME = re.compile(rb'^:::MLLOG \{"namespace": "", "time_ms": ([0-9]+)', re.MULTILINE)


def _parse(data: bytes, number: int, events: list[Event], problems: list[Problem]) -> int:
    """Append what stands in these lines, the first of which is line ``number``; returns the number of the line after."""
    lines = data.split(b"\n")
    for line, raw in enumerate(lines, start=number):
        if b":::MLLOG" in raw:
            for item in parse_line(raw, line):
                (events if isinstance(item, Event) else problems).append(item)  # type: ignore[arg-type]
    return number + len(lines) - 1
