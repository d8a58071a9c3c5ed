"""Reads a log: each line with the MLLOG token becomes an `Event` or a `Problem`. No content of a log raises.

A log may be a stranger's, damaged or hostile. So lines, files and kept events have limits, and time is at most
proportional to the length of the file. Whatever is not an event is counted as a problem with its line.
"""

from __future__ import annotations

import codecs
import errno
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from mlhpc.suite.files import (
    LIMITS,
    DuplicateKeyError,
    open_regular_file,
    refuse_duplicate_keys,
    render_bytes,
    render_repr,
)
from mlhpc.suite.log.limits import read_limits

STEP_KEYS = frozenset({"learning_rate", "train_accuracy", "train_loss"})
LISTED_PROBLEMS = 100  # of a log; every few bytes of a damaged file may be a problem


class Event(NamedTuple):
    """One log event. ``time_ms`` is Unix time in milliseconds; ``line`` is the file's own line number."""

    key: str
    value: Any
    time_ms: float
    event_type: str
    metadata: Mapping[str, Any]
    line: int


@dataclass(frozen=True)
class Problem:
    """A line with the MLLOG token that is not a valid event."""

    line: int
    message: str


@dataclass(frozen=True)
class Log:
    """The events of a log in file order, its first problems, and the number of skipped step events.

    ``damaged`` counts all problems; ``problems`` has the first `LISTED_PROBLEMS`.
    """

    path: Path
    events: tuple[Event, ...]
    problems: tuple[Problem, ...] = ()
    skipped: int = 0
    damaged: int = 0

    @cached_property
    def places(self) -> Mapping[str, Sequence[int]]:
        """Indices of the events of each key, ascending. Keys are in the order of their first event."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for index, event in enumerate(self.events):
            found[event.key].append(index)
        return dict(found)

    @property
    def cut_line(self) -> int | None:
        """The number of the last line if only that is broken, since the process was killed while it wrote.

        Else None.
        """
        if len(self.problems) != 1 or self.damaged > 1:
            return None
        line = self.problems[0].line
        return line if all(event.line < line for event in self.events[-1:]) else None

    def first(self, key: str) -> Event | None:
        """Find the first event of a key."""
        places = self.places.get(key)
        return self.events[places[0]] if places else None

    def every(self, *keys: str) -> list[Event]:
        """List all events of some keys, in file order."""
        places = sorted(chain.from_iterable(self.places.get(key, ()) for key in keys))
        return [self.events[index] for index in places]

    def until(self, key: str) -> Log:
        """Return this log up to and including the first event of a key; the whole log if there is none."""
        end = self.places[key][0] + 1 if key in self.places else len(self.events)
        return self if end == len(self.events) else Log(self.path, self.events[:end])


def read_events(path: Path, *, steps: bool = True, first_bytes: int | None = None) -> Log:
    """Read the events of a log file, or of about its first bytes. No content raises.

    Nine tenths of a large published log are losses and learning rates of single steps, which no rule, score or table
    uses. With ``steps`` false only the first and the last of consecutive step events are kept. They still show times
    that go back.

    OSError, with the file's name, if it cannot be read, is no regular file or is above the limits (mlhpc.suite.log.limits).
    """
    most = read_limits()
    events: list[Event] = []
    problems: list[Problem] = []
    damaged = skipped = alike = kept_bytes = 0
    utf16 = False
    try:
        with open_regular_file(path, most.file) as file:
            for number, line in enumerate(_read_lines(file, most.line, first_bytes), start=1):
                utf16 = utf16 or (number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)))
                if _TOKEN not in line:
                    continue
                kept = len(events)
                for item in _decode_line(line, number, most.line):
                    if isinstance(item, Problem):
                        damaged += 1
                        if damaged <= LISTED_PROBLEMS:
                            problems.append(item)
                        continue
                    if not steps and item.key in STEP_KEYS and events and _is_next_step(events[-1], item):
                        alike += 1
                    else:
                        alike = 0
                    if alike > 1:  # the event between two steps tells nothing
                        events[-1] = item
                        skipped += 1
                    else:
                        events.append(item)
                if len(events) > kept:
                    kept_bytes += len(line)
                if kept_bytes > most.events:
                    text = f"has more than {render_bytes(most.events)} of events ({LIMITS} raises the limit)"
                    raise OSError(errno.EFBIG, text, str(path))
    except OSError as error:
        error.filename = error.filename or str(path)  # a read that fails names no file
        raise
    if utf16 and not events:
        damaged += 1
        problems.append(Problem(1, "the file is UTF-16; a log is UTF-8"))
    return Log(path, tuple(events), tuple(problems[:LISTED_PROBLEMS]), skipped, damaged)


_TOKEN = b":::MLLOG"
_PLAIN = _TOKEN + b" {"  # as a line begins that this suite or mlcommons/logging wrote


def _read_lines(file: BufferedReader, longest: int, first_bytes: int | None) -> Iterator[bytes]:
    """Yield the lines.

    A line above the limit is read in pieces and never held. A line that is too long is yielded in its place.
    """
    while first_bytes is None or file.tell() < first_bytes:
        line = file.readline(longest + 1)
        if not line:
            return
        if len(line) > longest and not line.endswith(b"\n"):
            has_token, tail = _TOKEN in line, line[-len(_TOKEN) :]
            while not tail.endswith(b"\n") and (piece := file.readline(2**16)):
                has_token = has_token or _TOKEN in tail + piece
                tail = (tail + piece)[-len(_TOKEN) :]
            line = _TOKEN.ljust(longest + 1) if has_token else b""
        yield line


def _is_next_step(last: Event, event: Event) -> bool:
    """Return True if a step follows another: no earlier, and with the same names in metadata, as rules ask."""
    return last.key in STEP_KEYS and last.time_ms <= event.time_ms and last.metadata.keys() == event.metadata.keys()


class _Record(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An event as this suite and mlcommons/logging write it: these names, each once."""

    namespace: str
    time_ms: float
    event_type: str
    key: Annotated[str, msgspec.Meta(min_length=1)]
    value: Any
    metadata: dict[str, Any]


_decode_record = msgspec.json.Decoder(_Record).decode
_NAMES = len(_Record.__struct_fields__)


def _decode_line(line: bytes, number: int, longest: int) -> Iterable[Event | Problem]:
    """Decode a line with the token: one event, or what `_decode_unusual` finds."""
    if len(line) > longest and not line.endswith(b"\n"):
        return [Problem(number, f"a line of more than {render_bytes(longest)} ({LIMITS} raises the limit)")]
    if line.startswith(_PLAIN):
        text = line[len(_TOKEN) :]
        try:
            record = _decode_record(text)
            names = _NAMES + len(record.metadata)
            if text.count(b"{") > 2 or b"[" in text:
                names = _NAMES + _count_names(record.value, 1) + _count_names(record.metadata, 1)
        except (ValueError, RecursionError):  # NaN, a lone surrogate, a number out of range: json may still take it
            names = -1
        # msgspec takes the last of two values with one name, which would hide the first. Each name has one colon, so
        # with as many colons as names none is there twice. A text with a colon is counted too, and decoded the other
        # way.
        if names == text.count(b":"):
            return [Event(record.key, record.value, record.time_ms, record.event_type, record.metadata, number)]
    return _decode_unusual(line, number)


def _count_names(value: Any, depth: int = 0) -> int:
    """Count the names in all objects of a JSON value. RecursionError if it is nested deeper than `_MAX_DEPTH`."""
    if depth > _MAX_DEPTH:
        raise RecursionError
    names = 0
    if type(value) is dict:
        names = len(value)
        value = value.values()
    elif type(value) is not list:
        return 0
    for item in value:
        if type(item) is dict or type(item) is list:
            names += _count_names(item, depth + 1)
    return names


_MAX_DEPTH = 100  # what uses a value later would fail at about 1,000, depending on its caller


_json_value = json.JSONDecoder(object_pairs_hook=refuse_duplicate_keys)
_MAX_SHOWN = 2**12  # characters


def _decode_unusual(line: bytes, number: int) -> Iterator[Event | Problem]:
    """Yield every record on a line.

    A launcher may have put a rank before it; two ranks may have written to one line.
    """
    text, token = line.removesuffix(b"\n").decode("utf-8", "replace"), _TOKEN.decode()
    position = text.find(token)
    while position >= 0:
        # Json counts the newlines before the place of an error, so that many errors on one line would take ever longer.
        if position > _MAX_SHOWN:
            text, position = text[position:], 0
        begin = position + len(token)
        while begin < len(text) and text[begin] == " ":
            begin += 1
        end = begin
        try:
            record, end = _json_value.raw_decode(text, begin)
            _count_names(record)
            yield _make_event(record, number)
        except DuplicateKeyError as error:
            yield Problem(number, f"an object has {render_repr(str(error))} twice")
        except json.JSONDecodeError as error:
            yield Problem(number, f"not JSON after :::MLLOG: {error.msg}")
        except (ValueError, RecursionError):
            yield Problem(number, "not JSON after :::MLLOG: too deep or too long a number")
        position = text.find(token, end)


def _make_event(record: object, number: int) -> Event | Problem:
    """Check a record, and make an event of it."""
    if not isinstance(record, dict):
        return Problem(number, f"expected a JSON object after :::MLLOG, found {type(record).__name__}")
    missing = [name for name in ("key", "value", "time_ms", "metadata") if name not in record]
    if missing:
        return Problem(number, f"event without {', '.join(missing)}")
    key, time_ms, metadata = record["key"], record["time_ms"], record["metadata"]
    if not isinstance(key, str) or not key:
        return Problem(number, f"key must be a non-empty string, found {render_repr(key)}")
    try:
        finite = isinstance(time_ms, int | float) and not isinstance(time_ms, bool) and math.isfinite(time_ms)
    except OverflowError:  # an integer that no float holds
        finite = False
    if not finite:
        return Problem(number, f"time_ms of {key!r} must be a finite number, found {render_repr(time_ms)}")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        return Problem(number, f"metadata of {key!r} must be an object, found {render_repr(metadata)}")
    return Event(key, record["value"], float(time_ms), str(record.get("event_type")), metadata, number)
