"""Reads a log: each line with the MLLOG token becomes an `Event` or a `Problem`. No content of a log raises.

A log may be a stranger's, damaged or hostile. So lines, files and kept events have limits, and time is at most
proportional to the length of the file. Whatever is not an event is counted as a problem with its line.

Converts JSON values from logs to a number or None, never an error. Computes with stretches of time.

Limits how much is read of a file that a stranger may have made. MLHPC_LIMITS changes single limits.
"""

from __future__ import annotations

import codecs
import errno
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import (
    LIMITS,
    DuplicateKeyError,
    open_regular_file,
    refuse_duplicate_keys,
    render_bytes,
    render_repr,
)

EXIT_CODE_BYTES = 64  # the largest file that is read as an exit code
HEAD_BYTES = 2**18  # the beginning of a log: enough for the events that name the ruleset and for run_start
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_FACTORS = {"": 1, "KiB": _KIB, "MiB": _MIB, "GiB": _GIB}


@dataclass(frozen=True)
class Limits:
    """Largest sizes in bytes.

    The largest published log has 20 MB, its longest line 2 kB; the largest manifest has a line per file. ``file``: any
    file, logs too. ``line``: a line of a log with the MLLOG token. ``events``: all lines of a log that are kept as
    events, which need about five times as much memory. ``json``: a system description or another small JSON file.
    """

    file: int = 4 * _GIB
    line: int = 4 * _MIB
    events: int = 64 * _MIB
    json: int = 4 * _MIB
    manifest: int = 64 * _MIB


def read_limits() -> Limits:
    """Return the limits of this process. InputError for a setting that is not like ``file=8GiB,line=16MiB``."""
    return _parse(os.environ.get(LIMITS, ""))


@cache
def _parse(text: str) -> Limits:
    known = [item.name for item in fields(Limits)]
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\w+)=(\d{1,15})(KiB|MiB|GiB|)", part)
        if match is None or match[1] not in known:
            raise InputError(f"{LIMITS}: {part!r}: expected SIZE=NUMBER[KiB|MiB|GiB], SIZE one of {', '.join(known)}")
        found[match[1]] = int(match[2]) * _FACTORS[match[3]]
    return Limits(**found)


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

    OSError, with the file's name, if it cannot be read, is no regular file or is above the limits
    (mlhpc.suite.log.reader).
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
    if not events and damaged > 1:
        # Not single damaged lines, but a file of another form: one line says which
        problems = [Problem(problems[0].line, f"no line of the file can be read; the first: {problems[0].message}")]
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
            told = _explain_text(text[begin : begin + _LONGEST], error.pos - begin)
            yield Problem(number, f"not JSON after :::MLLOG: {error.msg}{told}")
        except (ValueError, RecursionError):
            yield Problem(number, "not JSON after :::MLLOG: too deep or too long a number")
        position = text.find(token, end)


_LONGEST = 4096  # characters of a broken record that are looked at: a line may have many of them
# How what another program made of a record begins, and what that was
_FORMS = (
    (
        r'\{\\+"',
        "its quotes are escaped: a store of logs keeps lines as JSON (docker, journald); export the text alone",
    ),
    (r'\{""', "its quotes are doubled: a CSV export; take the column of the messages"),
    (r"\{\s*&quot;", "its quotes are those of HTML: save the page as text"),
    (r"\{\s*'", "it has single quotes: Python printed a dict; write json.dumps(record)"),
    (
        r"\{\s*[\u201c\u201d\u201e\u2018\u2019\u00ab]",
        "its quotes are typographic: a word processor or a mail changed the text",
    ),
)


def _explain_text(text: str, place: int) -> str:
    """Return what another program made of a record that is not JSON from ``place`` on. "" if that is not known."""
    found = next((why for form, why in _FORMS if re.match(form, text)), "")
    if (
        not found
        and len(text) < _LONGEST
        and text.startswith("{")
        and (place >= len(text.rstrip()) or '"' not in text[place + 1 :])
    ):
        found = "it ends within its line: a terminal or a mail wrapped it, or its end was lost"
    return f"; {found}" if found else ""


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


Span = tuple[float, float]  # begin and end in seconds


def convert_to_float(value: object) -> float | None:
    """Convert a JSON number to float. None for text, true, NaN, infinity and integers too large for a float."""
    if type(value) is float:  # nearly all
        return value if math.isfinite(value) else None
    if type(value) is bool or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def parse_float(value: object) -> float | None:
    """Convert as `convert_to_float`, and also a text that is a number: OpenFold's logs write their seed as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return convert_to_float(value)


def parse_int64(value: object) -> int | None:
    """Convert to an integer of at most 64 bits, also from text or from 512.0. None for anything else."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return None
    result = convert_to_float(value)
    return int(result) if result is not None and result == int(result) and abs(result) < 2.0**63 else None


def parse_int(value: object) -> int | None:
    """Convert as `parse_int64`, but to an integer of any size: seeds of more than 64 bits differ too."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
    return value if isinstance(value, int) and not isinstance(value, bool) else parse_int64(value)


def compute_spans_inside(spans: Sequence[Span], window: Span) -> list[Span]:
    """Return the parts of the spans inside the window, merged."""
    low, high = window
    clipped = [(max(low, begin), min(high, end)) for begin, end in spans]
    return merge_spans((begin, end) for begin, end in clipped if end > begin)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order; overlapping or touching ones become one."""
    ordered = sorted(spans)
    merged: list[Span] = []
    for begin, end in ordered:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def remove_holes(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Subtract the holes from the spans. Both must be merged: one pass over each is then enough."""
    if not holes:
        return list(spans)
    left: list[Span] = []
    first = 0
    for begin, end in spans:
        at = begin
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        for index in range(first, len(holes)):
            low, high = holes[index]
            if low >= end:
                break
            if low > at:
                left.append((at, low))
            at = max(at, high)
        if at < end:
            left.append((at, end))
    return left


def sum_lengths(spans: Iterable[Span]) -> float:
    """Return the length of all spans, summed exactly."""
    return math.fsum(end - begin for begin, end in spans)
