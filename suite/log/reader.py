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
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from io import BufferedReader
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from suite.files import LIMITS, byte_text, opened
from suite.log.decoding import LISTED_PROBLEMS, TOKEN_BYTES, Event, Found, Problem, decode_lines
from suite.log.limits import limits

__all__ = ["LISTED_PROBLEMS", "STEP_KEYS", "Event", "Log", "Problem", "read_events"]

STEP_KEYS = ("learning_rate", "train_accuracy", "train_loss")


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
        found: defaultdict[str, list[int]] = defaultdict(list)
        for index, key in enumerate(map(_KEY, self.events)):
            found[key].append(index)
        return dict(found)

    def first(self, key: str) -> Event | None:
        """The first event of a key."""
        places = self.places.get(key)
        return self.events[places[0]] if places else None

    def places_of(self, keys: Sequence[str]) -> Sequence[int]:
        """Indices of all events of some keys, ascending."""
        found = [self.places[key] for key in keys if key in self.places]
        return found[0] if len(found) == 1 else sorted(chain.from_iterable(found))

    def every(self, *keys: str) -> list[Event]:
        """All events of some keys, in file order."""
        events = self.events
        return [events[index] for index in self.places_of(keys)]

    def until(self, key: str) -> Log:
        """This log up to the first event of a key, that event included; the whole log if there is none."""
        end = self.places[key][0] + 1 if key in self.places else len(self.events)
        if end == len(self.events):
            return self
        log = Log(self.path, self.events[:end])
        before = {name: found for name, found in self.places.items() if found[0] < end}
        cut = {name: found[: bisect_left(found, end)] for name, found in before.items() if found[-1] >= end}
        log.__dict__["places"] = before | cut  # what the property would find
        return log


_KEY = itemgetter(0)  # of an event


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


_PIECE_BYTES = 2**17  # stays in the cache until all has been done with it


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
        yield _Piece(b"".join([*parts, memoryview(block)[:cut]]) if length else block[:cut])
        parts, length = [block[cut:]], len(block) - cut
    if length:
        yield _Piece(b"".join(parts))


def _rest_of_line(file: BufferedReader, begin: bytes, seen: Callable[[bytes], object] | None) -> tuple[bool, bytes]:
    """Read to the end of a line; returns whether it holds the MLLOG token, and the bytes read after it."""
    held, tail = TOKEN_BYTES in begin, begin[-len(TOKEN_BYTES) :]
    while block := file.read(_PIECE_BYTES):
        if seen is not None:
            seen(block)
        line, newline, after = block.partition(b"\n")
        held = held or TOKEN_BYTES in tail + line
        if newline:
            return held, after
        tail = (tail + line)[-len(TOKEN_BYTES) :]
    return held, b""


class _Parser:
    """Parses the pieces of one log, one after another."""

    def __init__(self, path: Path, steps: bool) -> None:
        self._path, self._steps, self._limits = path, steps, limits()
        self._found = Found()
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
        at, number, kept, numbers = 0, self._number, list[bytes](), list[int]()
        for block in () if self._steps or not any(key in data for key in _STEPS) else _step_blocks().finditer(data):
            begin, end = block.span()
            lines = data[begin : end - 1].split(b"\n")
            if len(lines) < 3 or (begin > 0 and data[begin - 1] != _NEWLINE) or not _rise(lines):
                continue
            kept.append(data[at : begin + len(lines[0]) + 1])
            after = number + kept[-1].count(b"\n")
            numbers += range(number, after)
            number = after + len(lines) - 2
            self._skipped += len(lines) - 2
            at = end - 1 - len(lines[-1])
        after = number + data.count(b"\n", at) + (not data.endswith(b"\n"))
        kept.append(data[at:])
        self._number = after
        decode_lines(
            b"".join(kept), [*numbers, *range(number, after)] if numbers else range(number, after), self._found
        )


def _rise(lines: Sequence[bytes]) -> bool:
    """True if the times of these lines rise. They have one length, so that their order is that of the numbers."""
    if lines == sorted(lines):  # as nearly always: lines begin with their times, and steps log their keys in this order
        return True
    times = [line[_TIME] for line in lines]
    return times == sorted(times)


_NEWLINE = 10
_STEPS = tuple(b'"key": "%b"' % key.encode() for key in STEP_KEYS)
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
