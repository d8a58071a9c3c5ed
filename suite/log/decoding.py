"""Decode lines of a log: those with the MLLOG token become an `Event` or a `Problem`. Nothing that they hold raises."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from suite.files import TwiceError, brief, each_name_once


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


LISTED_PROBLEMS = 100


class Found:
    """What is found in a log: events, the length of their lines, and of the problems their number and the first ones.

    Every few bytes of a damaged file may be a problem.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.event_bytes = 0
        self.problems: list[Problem] = []
        self.damaged = 0

    def problem(self, problem: Problem) -> None:
        """Count a problem, and keep it if it is one of the first."""
        self.damaged += 1
        if self.damaged <= LISTED_PROBLEMS:
            self.problems.append(problem)


_TOKEN = ":::MLLOG"
TOKEN_BYTES = _TOKEN.encode()
_HEAD = b":::MLLOG "
_JSON = len(_HEAD)
_PLAIN_HEAD = _HEAD + b'{"'
_NEXT_HEAD = b"\n" + _HEAD
_NEXT_SPACE = b"\n" + b" " * len(_HEAD)  # of one length with it, so that it is replaced in one pass
_NEXT = b"}\n" + _PLAIN_HEAD
_BOUNDARY = os.urandom(16).hex()  # what stands between two lines that are decoded together; no log can know it
_BETWEEN = f',"{_BOUNDARY}",'.encode()


def decode(data: bytes, number: int, found: Found) -> int:
    """Append the events and problems of these lines, the first of which is line ``number``. Returns the next line number."""
    after = number + data.count(b"\n") + (not data.endswith(b"\n"))
    decode_lines(data, range(number, after), found)
    return after


def decode_lines(data: bytes, numbers: Sequence[int], found: Found) -> None:
    """Append the events and problems of whole lines, whose numbers are given. Fewest calls are fastest."""
    global _decoded
    _decoded += len(data)
    if (
        data.startswith(_PLAIN_HEAD) and data.count(_NEXT) == len(numbers) - 1
    ):  # one event a line, as nearly all logs are
        ended = data.endswith(b"\n")
        found.event_bytes += len(data) - len(numbers) + (not ended)
        text = data[_JSON : -1 if ended else None]
        if not _decode_typed(text.replace(_NEXT_HEAD, _NEXT_SPACE), numbers, found, whole=True):
            _decode_together(text.split(_NEXT_HEAD), numbers, found)
        return
    plain, their = list[bytes](), list[int]()
    for line, raw in zip(numbers, data.split(b"\n"), strict=False):
        if raw.startswith(_PLAIN_HEAD):
            plain.append(raw[_JSON:])
            their.append(line)
        elif TOKEN_BYTES in raw:
            _decode_plain(b"\n".join(plain), their, found)
            plain, their = [], []
            found.event_bytes += len(raw)
            _decode_alone(raw, line, found)
    _decode_plain(b"\n".join(plain), their, found)


def _decode_plain(text: bytes, numbers: Sequence[int], found: Found) -> None:
    """Decode lines without their heads."""
    if not numbers:
        return
    found.event_bytes += len(text) + 1 + (_JSON - 1) * len(numbers)
    if not _decode_typed(text, numbers, found):
        _decode_together(text.split(b"\n"), numbers, found)


_WORTH = 2**19  # bytes: to decode fewer takes json less time than it takes to import msgspec
_decoded = 0  # bytes by this process


def _decode_typed(text: bytes, numbers: Sequence[int], found: Found, *, whole: bool = False) -> bool:
    """Decode lines by `suite.log.typed`. False, and nothing is appended, if it would not make the same of them as json.

    ``whole``: each line is known to begin and to end with a brace.
    """
    if _decoded < _WORTH:
        return False
    from suite.log import typed

    records = typed.decode(text, len(numbers), whole=whole)
    if records is None:
        return False
    metadata, values = list(map(_METADATA_OF, records)), list(map(_VALUE_OF, records))
    names = typed.NAMES * len(records) + sum(map(len, metadata))
    marks = text.translate(None, _NO_MARKS)
    if marks.count(b"{") != 2 * len(records) or marks.count(b"[") > _LISTS:
        try:  # there are other objects than events and metadata
            names += sum([_names(value) for value in values if type(value) in _NESTED])
            if names != marks.count(b":"):
                names += sum([_names(each) - len(each) for each in metadata])
        except RecursionError:
            return False
    if names != marks.count(b":") and (_loose(text) or names != text.count(b'":')):  # few texts have colons
        return False  # a name twice
    keys, times, types = (map(of, records) for of in _COLUMNS)
    found.events += map(_new, repeat(Event), zip(keys, values, times, types, metadata, numbers, strict=True))
    return True


_NO_MARKS = bytes(set(range(256)) - set(b"{[:"))
_COLUMNS = tuple(map(attrgetter, ("key", "time_ms", "event_type")))
_VALUE_OF, _METADATA_OF = attrgetter("value"), attrgetter("metadata")
_LISTS = 500  # nested more deeply they may be more than some decoder's stack holds
_new = tuple.__new__  # half the time of Event(), of which there are hundreds of thousands


def _decode_together(lines: Sequence[bytes], numbers: Sequence[int], found: Found) -> None:
    """Decode lines by json together, which is fast; if any is not exactly one JSON value, decode each by itself."""
    text = b"[" + _BETWEEN.join(lines) + b"]"
    try:
        together = json.loads(text.decode())
        if not _each_once(together[::2], text):
            together = []
    except (ValueError, RecursionError, KeyError, TypeError):  # TypeError: metadata is a number
        together = []
    records = together[::2]
    if len(records) != len(lines) or together[1::2] != [_BOUNDARY] * (len(lines) - 1):
        for line, number in zip(lines, numbers, strict=True):
            _decode_alone(_HEAD + line, number, found)
        return
    for record, number in zip(records, numbers, strict=True):
        try:
            key, value, at, kind, metadata = _FIELDS(record)
        except (KeyError, TypeError):
            key = None
        if type(key) is str and key and type(at) is int and 0 <= at < _LARGEST_MS and type(metadata) is dict:
            found.events.append(
                Event(key, value, float(at), kind if type(kind) is str else str(kind), metadata, number)
            )
        else:
            _append(_event(record, number), found)


def _loose(text: bytes) -> bool:
    """True if there is space between a name and its colon, which a count of names would miss; the format has none."""
    return b'" ' in text or (b"\t" in text and b'"\t' in text) or (b"\r" in text and b'"\r' in text)


def _each_once(records: Sequence[Any], text: bytes) -> bool:
    """True if no object in these JSON values, whose text is given, has a name twice: the text has as many names as the objects."""
    if _loose(text):
        return False
    metadata = list(map(_METADATA, records))
    if text.count(b"{") == 2 * len(records) and set(map(type, metadata)) <= {dict}:
        names = sum(map(len, records)) + sum(map(len, metadata))  # there are no other objects, as in most logs
    else:
        names = _names(records)
    return names == text.count(b'":')


def _names(value: Any) -> int:
    """Count the names in all objects of a JSON value."""
    if type(value) is dict:
        return len(value) + sum([_names(inner) for inner in value.values() if type(inner) in _NESTED])
    return sum([_names(inner) for inner in value if type(inner) in _NESTED])


_NESTED = (dict, list)


_METADATA = itemgetter("metadata")
_FIELDS = itemgetter("key", "value", "time_ms", "event_type", "metadata")
_LARGEST_MS = 2**53  # integers up to here are floats exactly
_DECODER = json.JSONDecoder(object_pairs_hook=each_name_once)


def _decode_alone(raw: bytes, number: int, found: Found) -> None:
    """Decode every record on a line. A launcher may have put a rank prefix before it; two ranks may have written to one line."""
    text = _Line(raw.decode("utf-8", "replace"))
    position = text.find(_TOKEN)
    while position >= 0:
        begin = position + len(_TOKEN)
        while begin < len(text) and text[begin] == " ":
            begin += 1
        try:
            record, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            found.problem(Problem(number, _reason(error)))
            end = begin
        else:
            _append(_event(record, number), found)
        position = text.find(_TOKEN, end)


class _Line(str):
    """One line of text. An error of the JSON decoder counts the lines before it, which took time with every bad token."""

    __slots__ = ()

    def count(self, *_: object) -> int:
        """Count no newlines: there are none."""
        return 0

    def rfind(self, *_: object) -> int:
        """Find no newline."""
        return -1


def _reason(error: Exception) -> str:
    if isinstance(error, TwiceError):
        return f"an object has {brief(str(error))} twice"
    reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too long a number"
    return f"not JSON after :::MLLOG: {reason}"


def _append(item: Event | Problem, found: Found) -> None:
    if isinstance(item, Event):
        found.events.append(item)
    else:
        found.problem(item)


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
