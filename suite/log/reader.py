"""Read a log: every line with the MLLOG token becomes an `Event` or a `Problem`. The content of a log never raises.

Nine tenths of a large published log are losses and learning rates of single steps, which no rule, score or table uses. With
``steps=False`` one regular expression matches whole blocks of such lines and only the first and last event of a block are
kept, which is enough to check that time stamps rise. Lines that the expression does not match are decoded as usual.

A file is read in pieces, so memory is that of the events kept plus 10 MB, however long the log. Time grows with its length
and no faster, whatever it holds.
"""

from __future__ import annotations

import codecs
import errno
import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from io import BufferedReader
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from suite.files import LIMITS, TwiceError, brief, byte_text, each_name_once, opened
from suite.log.limits import limits

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
    """The events of a log in file order, the first lines that could not be read, and the number of step events not kept.

    ``damaged`` counts all problems, of which ``problems`` has the first `LISTED_PROBLEMS`.
    """

    path: Path
    events: tuple[Event, ...]
    problems: tuple[Problem, ...] = ()
    skipped: int = 0
    damaged: int = 0

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


LISTED_PROBLEMS = 100


def read_events(
    path: Path, *, steps: bool = True, first_bytes: int | None = None, seen: Callable[[bytes], object] | None = None
) -> Log:
    """Read the events of a log file, or of about its first bytes. No content raises.

    With ``steps`` false only the first and last event of a block of consecutive step events are kept. ``seen`` is called with
    every piece of the file in order, as to compute a checksum.

    OSError that names the file if it cannot be read, is no regular file or is larger than the limits (suite.log.limits).
    """
    try:
        with opened(path, limits().file) as file:
            return _Parser(path, steps).read(_pieces(file, first_bytes, seen))
    except OSError as error:
        error.filename = error.filename or str(path)  # a read that fails names no file
        raise


class _Piece(NamedTuple):
    """Some whole lines of a file. ``too_long``: a single line whose bytes are left out; true if it holds the MLLOG token."""

    lines: bytes
    too_long: bool = False


_PIECE_BYTES = 2**19


def _pieces(file: BufferedReader, most: int | None, seen: Callable[[bytes], object] | None) -> Iterator[_Piece]:
    """Cut a file at ends of lines. A line above the limit is read and dropped; its piece is one newline."""
    longest, parts, length, at = limits().line, list[bytes](), 0, 0
    while (most is None or at < most) and (block := file.read(_PIECE_BYTES)):
        at += len(block)
        if seen is not None:
            seen(block)
        cut = block.rfind(b"\n") + 1
        if cut == 0:
            parts.append(block)
            length += len(block)
            if length > longest:
                held, block = _rest_of_line(file, b"".join(parts), seen)
                yield _Piece(b"\n", too_long=held)
                cut = block.rfind(b"\n") + 1
                if cut:
                    yield _Piece(block[:cut])
                parts, length = [block[cut:]], len(block) - cut
            continue
        yield _Piece(b"".join([*parts, block[:cut]]))
        parts, length = [block[cut:]], len(block) - cut
    if length:
        yield _Piece(b"".join(parts))


def _rest_of_line(file: BufferedReader, begin: bytes, seen: Callable[[bytes], object] | None) -> tuple[bool, bytes]:
    """Read to the end of a line; returns whether it holds the MLLOG token, and the bytes read after it."""
    held, tail = _TOKEN_BYTES in begin, begin[-len(_TOKEN_BYTES) :]
    while block := file.read(_PIECE_BYTES):
        if seen is not None:
            seen(block)
        line, newline, after = block.partition(b"\n")
        held = held or _TOKEN_BYTES in tail + line
        if newline:
            return held, after
        tail = (tail + line)[-len(_TOKEN_BYTES) :]
    return held, b""


class _Parser:
    """Parses the pieces of one log, one after another."""

    def __init__(self, path: Path, steps: bool) -> None:
        self._path, self._steps, self._limits = path, steps, limits()
        self._found = _Found()
        self._number, self._skipped = 1, 0

    def read(self, pieces: Iterator[_Piece]) -> Log:
        """Parse all pieces. OSError if more would be kept than the limit allows."""
        found, utf16 = self._found, False
        for index, (lines, too_long) in enumerate(pieces):
            utf16 = utf16 or (index == 0 and lines.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)))
            if too_long:
                longest = byte_text(self._limits.line)
                found.problem(Problem(self._number, f"a line of more than {longest} ({LIMITS} raises the limit)"))
            self._parse(lines)
            if found.event_bytes > self._limits.events:
                most = f"has more than {byte_text(self._limits.events)} of events ({LIMITS} raises the limit)"
                raise OSError(errno.EFBIG, most, str(self._path))
        if not found.events and utf16:
            found.problem(Problem(1, "the file is UTF-16; a log is UTF-8"))
        return Log(self._path, tuple(found.events), tuple(found.problems), self._skipped, found.damaged)

    def _parse(self, data: bytes) -> None:
        """Append the events and problems of whole lines."""
        at, number = 0, self._number
        for block in () if self._steps else _step_blocks().finditer(data):
            begin, end = block.span()
            lines = data[begin : end - 1].split(b"\n")
            times = [line[_TIME] for line in lines]  # of one length, so that their order is that of the numbers
            if len(lines) < 3 or (begin > 0 and data[begin - 1] != _NEWLINE) or times != sorted(times):
                continue
            number = _decode(data[at : begin + len(lines[0])], number, self._found) + len(lines) - 2
            self._skipped += len(lines) - 2
            at = end - 1 - len(lines[-1])
        _decode(data[at:], number, self._found)
        self._number += data.count(b"\n")


class _Found:
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
_TOKEN_BYTES = _TOKEN.encode()
_PLAIN_HEAD = b':::MLLOG {"'
_BOUNDARY = secrets.token_hex(16)  # what stands between two lines that are decoded together; no log can know it
_BETWEEN = f',"{_BOUNDARY}",'.encode()


def _decode(data: bytes, number: int, found: _Found) -> int:
    """Append the events and problems of these lines, the first of which is line ``number``. Returns the next line number."""
    plain: list[bytes] = []  # lines that are one event from their first byte, as nearly all are
    numbers: list[int] = []
    for line, raw in enumerate(data.split(b"\n"), start=number):
        if raw.startswith(_PLAIN_HEAD):
            found.event_bytes += len(raw)
            plain.append(raw)
            numbers.append(line)
        elif _TOKEN_BYTES in raw:
            _decode_plain(plain, numbers, found)
            plain, numbers = [], []
            found.event_bytes += len(raw)
            _decode_alone(raw, line, found)
    _decode_plain(plain, numbers, found)
    return number + data.count(b"\n") + 1


def _decode_plain(lines: Sequence[bytes], numbers: Sequence[int], found: _Found) -> None:
    """Decode lines together, which is fast; if any is not exactly one JSON value, decode each by itself."""
    text = b"[" + _BETWEEN.join([line[_JSON:] for line in lines]) + b"]"
    try:
        together = json.loads(text.decode())
        if not _each_once(together[::2], text):
            together = []
    except (ValueError, RecursionError, KeyError, TypeError):  # TypeError: metadata is a number
        together = []
    records = together[::2]
    if len(records) != len(lines) or together[1::2] != [_BOUNDARY] * (len(lines) - 1):
        for raw, number in zip(lines, numbers, strict=True):
            _decode_alone(raw, number, found)
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


def _each_once(records: Sequence[Any], text: bytes) -> bool:
    """True if no object in these JSON values, whose text is given, has a name twice: the text has as many names as the objects."""
    if b'" ' in text or (b"\t" in text and b'"\t' in text) or (b"\r" in text and b'"\r' in text):
        return False  # space between a name and its colon, which this count would miss; the format has none
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


_JSON = len(":::MLLOG ")
_METADATA = itemgetter("metadata")
_FIELDS = itemgetter("key", "value", "time_ms", "event_type", "metadata")
_LARGEST_MS = 2**53  # integers up to here are floats exactly
_DECODER = json.JSONDecoder(object_pairs_hook=each_name_once)


def _decode_alone(raw: bytes, number: int, found: _Found) -> None:
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


def _append(item: Event | Problem, found: _Found) -> None:
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
