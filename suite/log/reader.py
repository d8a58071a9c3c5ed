"""Read a log: every line with the MLLOG token becomes an `Event` or a `Problem`. The content of a log never raises.

Nine tenths of a large published log are losses and learning rates of single steps, which no rule, score or table uses. With
``steps=False`` one regular expression matches whole blocks of such lines and only the first and last event of a block are
kept, which is enough to check that time stamps rise. Lines that the expression does not match are decoded as usual.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from suite.files import brief

STEP_KEYS = ("learning_rate", "train_accuracy", "train_loss")


class Event(NamedTuple):
    """One log event. ``time_ms`` is Unix time in milliseconds; ``line`` is the file's own line number."""

    key: str
    value: Any
    time_ms: float
    event_type: str
    metadata: Mapping[str, Any]
    line: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A line with the MLLOG token that is not a valid event."""

    line: int
    message: str


@dataclass(frozen=True)
class Log:
    """The events of a log in file order, the lines that could not be read, and the number of step events not kept."""

    path: Path
    events: tuple[Event, ...]
    problems: tuple[Problem, ...] = ()
    skipped: int = 0

    @cached_property
    def places(self) -> Mapping[str, Sequence[int]]:
        """Indices of the events of each key, ascending. Keys are in the order of their first event."""
        found: dict[str, list[int]] = {}
        for index, event in enumerate(self.events):
            if event[0] in found:
                found[event[0]].append(index)
            else:
                found[event[0]] = [index]
        return found

    def first(self, key: str) -> Event | None:
        """The first event of a key."""
        places = self.places.get(key)
        return self.events[places[0]] if places else None

    def every(self, *keys: str) -> list[Event]:
        """All events of some keys, in file order."""
        events = self.events
        if len(keys) == 1:
            return [events[index] for index in self.places.get(keys[0], ())]
        return [events[index] for index in sorted(index for key in keys for index in self.places.get(key, ()))]

    def until(self, key: str) -> Log:
        """This log up to the first event of a key, that event included; the whole log if there is none."""
        end = self.places[key][0] + 1 if key in self.places else len(self.events)
        return self if end == len(self.events) else Log(self.path, self.events[:end])


def read_events(path: Path, *, steps: bool = True, first_bytes: int = -1) -> Log:
    """Read the events of a log file, or of its first bytes. OSError if the file cannot be read; no content raises."""
    try:
        with path.open("rb") as file:
            data = file.read(first_bytes)
    except OSError as error:
        error.filename = error.filename or str(path)  # a read that fails names no file
        raise
    return events_of(data, path, steps=steps)


def events_of(data: bytes, path: Path, *, steps: bool = True) -> Log:
    """Parse the events in the bytes of a log. Never raises.

    With ``steps`` false only the first and last event of a block of consecutive step events are kept.
    """
    events: list[Event] = []
    problems: list[Problem] = []
    at, number, skipped = 0, 1, 0
    for block in () if steps else _step_blocks().finditer(data):
        begin, end = block.span()
        lines = data[begin : end - 1].split(b"\n")
        times = [line[_TIME] for line in lines]  # of one length, so that their order is that of the numbers
        if len(lines) < 3 or (begin > 0 and data[begin - 1] != _NEWLINE) or times != sorted(times):
            continue
        number = _decode(data[at : begin + len(lines[0])], number, events, problems) + len(lines) - 2
        skipped += len(lines) - 2
        at = end - 1 - len(lines[-1])
    _decode(data[at:], number, events, problems)
    if not events and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        problems.append(Problem(1, "the file is UTF-16; a log is UTF-8"))
    return Log(path, tuple(events), tuple(problems), skipped)


_NEWLINE = 10
_HEAD = b':::MLLOG {"namespace": "", "time_ms": '
_TIME = slice(len(_HEAD), len(_HEAD) + 13)


@cache
def _step_blocks() -> re.Pattern[bytes]:
    """Match consecutive lines that each hold one step event, in the form mlcommons/logging writes with three more metadata.

    The first line is matched in full. In the following lines the constant parts are back references to the first, which is
    three times as fast as matching them again.
    """
    keys = rb"(?:%b)" % "|".join(STEP_KEYS).encode()
    value = rb"-?(?:0|[1-9]\d{0,14}+)(?:\.\d{1,20}+)?+(?:[eE][+-]?+\d{1,2}+)?+"
    count = rb"(?:0|[1-9]\d{0,14}+)"
    pieces = [
        re.escape(_HEAD),
        rb', "event_type": "[A-Z_]++", "key": "',
        rb'", "value": ',
        rb', "metadata": \{"file": "[^"\\\x00-\x1f\x7f-\xff]++", "[a-z_]++": ',
        *(rb', "[a-z_]++": ',) * 2,
        rb"\}\}\n",
    ]
    between = [rb"[1-9]\d{12}", keys, value, count, count, count, b""]
    first = b"".join(b"(%b)%b" % pair for pair in zip(pieces, between, strict=True))
    other = b"".join(b"\\%d%b" % pair for pair in enumerate(between, start=1))
    return re.compile(b"%b(?:%b)++" % (first, other))


_TOKEN = ":::MLLOG"
_PLAIN_HEAD = b':::MLLOG {"'
_BOUNDARY = secrets.token_hex(16)  # what stands between two lines that are decoded together; no log can know it
_BETWEEN = f',"{_BOUNDARY}",'.encode()


def _decode(data: bytes, number: int, events: list[Event], problems: list[Problem]) -> int:
    """Append the events and problems of these lines, the first of which is line ``number``. Returns the next line number."""
    plain: list[bytes] = []  # lines that are one event from their first byte, as nearly all are
    numbers: list[int] = []
    for line, raw in enumerate(data.split(b"\n"), start=number):
        if raw.startswith(_PLAIN_HEAD):
            plain.append(raw)
            numbers.append(line)
        elif b":::MLLOG" in raw:
            _decode_plain(plain, numbers, events, problems)
            plain, numbers = [], []
            _decode_alone(raw, line, events, problems)
    _decode_plain(plain, numbers, events, problems)
    return number + data.count(b"\n") + 1


def _decode_plain(lines: Sequence[bytes], numbers: Sequence[int], events: list[Event], problems: list[Problem]) -> None:
    """Decode lines together, which is fast; if any is not exactly one JSON value, decode each by itself."""
    text = b"[" + _BETWEEN.join([line[_JSON:] for line in lines]) + b"]"
    try:
        together = json.loads(text.decode()) if _each_once(text, len(lines)) else []
        if _names(together) != text.count(b'":') or any(gap in text for gap in _GAPS):
            together = []  # some name is perhaps given twice, in whatever object
    except (ValueError, RecursionError):
        together = []
    records = together[::2]
    if len(records) != len(lines) or together[1::2] != [_BOUNDARY] * (len(lines) - 1):
        for raw, number in zip(lines, numbers, strict=True):
            _decode_alone(raw, number, events, problems)
        return
    for record, number in zip(records, numbers, strict=True):
        try:
            key, value, at, kind, metadata = _FIELDS(record)
        except (KeyError, TypeError):
            key = None
        if type(key) is str and key and type(at) is int and 0 <= at < _LARGEST_MS and type(metadata) is dict:
            events.append(Event(key, value, float(at), kind if type(kind) is str else str(kind), metadata, number))
        else:
            _append(_event(record, number), events, problems)


def _each_once(text: bytes, events: int) -> bool:
    """True if no event repeats a JSON key we read; otherwise the slower decoder that detects repeats is used."""
    return b"\\u" not in text and all(text.count(name) == events for name in (b'"key"', b'"value"', b'"time_ms"'))


_GAPS = (b'" ', b'"\t', b'"\r')  # what can stand between a name and its colon; the format has none of it


def _names(records: Sequence[Any]) -> int:
    """Count the names in all objects of some JSON values; the text has more if one is given twice."""
    count = 0
    for record in records:
        if type(record) is dict:
            count += len(record)
            for item in record.values():
                if type(item) is dict:  # written out for metadata, which every event has
                    count += len(item)
                    count += _names([inner for inner in item.values() if type(inner) in _NESTED])
                elif type(item) is list:
                    count += _names(item)
        elif type(record) is list:
            count += _names(record)
    return count


_NESTED = (dict, list)


class TwiceError(ValueError):
    """A JSON object has one key twice: some readers take the first value, others the last."""


def each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for json.loads. TwiceError if a name is given twice."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise TwiceError(next(name for name in names if names.count(name) > 1))
    return record


_JSON = len(":::MLLOG ")
_FIELDS = itemgetter("key", "value", "time_ms", "event_type", "metadata")
_LARGEST_MS = 2**53  # integers up to here are floats exactly
_DECODER = json.JSONDecoder(object_pairs_hook=each_name_once)


def _decode_alone(raw: bytes, number: int, events: list[Event], problems: list[Problem]) -> None:
    """Decode every record on a line. A launcher may have put a rank prefix before it; two ranks may have written to one line."""
    text = raw.decode("utf-8", "replace")
    position = text.find(_TOKEN)
    while position >= 0:
        begin = position + len(_TOKEN)
        while begin < len(text) and text[begin] == " ":
            begin += 1
        try:
            record, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            problems.append(Problem(number, _reason(error)))
            end = begin
        else:
            _append(_event(record, number), events, problems)
        position = text.find(_TOKEN, end)


def _reason(error: Exception) -> str:
    if isinstance(error, TwiceError):
        return f"an object has {brief(str(error))} twice"
    reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too long a number"
    return f"not JSON after :::MLLOG: {reason}"


def _append(item: Event | Problem, events: list[Event], problems: list[Problem]) -> None:
    if isinstance(item, Event):
        events.append(item)
    else:
        problems.append(item)


def _event(record: object, number: int) -> Event | Problem:
    if not isinstance(record, dict):
        return Problem(number, f"expected a JSON object after :::MLLOG, found {type(record).__name__}")
    missing = [name for name in ("key", "value", "time_ms", "metadata") if name not in record]
    if missing:
        return Problem(number, f"event without {', '.join(missing)}")
    key, time_ms, metadata = record["key"], record["time_ms"], record["metadata"]
    if not isinstance(key, str) or not key:
        return Problem(number, f"key must be a non-empty string, found {brief(key)}")
    try:
        finite = isinstance(time_ms, int | float) and not isinstance(time_ms, bool) and math.isfinite(time_ms)
    except OverflowError:
        finite = False
    if not finite:
        return Problem(number, f"time_ms of {key!r} must be a finite number, found {brief(time_ms)}")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        return Problem(number, f"metadata of {key!r} must be an object, found {brief(metadata)}")
    return Event(key, record["value"], float(time_ms), str(record.get("event_type")), metadata, number)
