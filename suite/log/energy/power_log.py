"""Reads a power log in the official form, one meter per file. Each line with the MLLOG token is a reading, a statement
or damage.

    results/<system>/.../<benchmark>/power/result_<i>/node_<k>.txt    the widest scope that was measured of node k
                                                      sw_<k>.txt      a switch: readings, or its estimated power
                                                      part_<k>_<scope>.txt    ours: a part of node k, never added to it

The file is read in pieces and only its readings stay: 24 bytes each. No content raises. Published logs have "" as
metadata, 0 as the first node or 1, and stop events with the time of the start. All are read, and the checker names
them.
"""

from __future__ import annotations

import errno
import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from mlhpc.suite.files import (
    LIMITS,
    DuplicateKeyError,
    open_regular_file,
    refuse_duplicate_keys,
    render_bytes,
    render_repr,
)
from mlhpc.suite.log.energy.keys import EFFICIENCY, ESTIMATE, READING, SCOPES, START, STOP
from mlhpc.suite.log.limits import read_limits
from mlhpc.suite.log.values import convert_to_float

LISTED_PROBLEMS = 20  # of damaged lines


@dataclass(frozen=True)
class PowerLogEvent:
    """A line that is no reading: its key, value, Unix milliseconds and place."""

    key: str
    value: Any
    time_ms: float
    line: int
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PowerLog:
    """The log of one meter.

    Readings are in file order: Unix milliseconds, watts, line. ``stated`` is what the file says of its meter. ``kind``
    is node, sw or part; ``index`` the number in the name (None: another name). ``damaged`` counts lines that should be
    readings and are not; ``problems`` lists the first of them.
    """

    path: Path
    kind: str
    index: int | None
    times_ms: array[float]
    watts: array[float]
    lines: array[int]
    statements: tuple[PowerLogEvent, ...] = ()
    stated: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[tuple[int, str], ...] = ()
    damaged: int = 0

    def first(self, key: str) -> PowerLogEvent | None:
        """Return the first statement of a key."""
        return next((item for item in self.statements if item.key == key), None)

    @property
    def efficiency(self) -> float | None:
        """The factor from the readings to the energy that counts: 1 unless stated, None if the stated value
        is no number.
        """
        last = next((item for item in reversed(self.statements) if item.key == EFFICIENCY), None)
        return 1.0 if last is None else convert_to_float(last.value)

    @property
    def estimate_w(self) -> float | None:
        """The estimated power of an interconnect, if the file states one instead of readings."""
        found = self.first(ESTIMATE)
        return None if found is None else convert_to_float(found.value)

    @property
    def scope(self) -> str:
        """What the meter measures. A node's file that states nothing means the node, as the rules ask."""
        said = self.stated.get("scope")
        return said if said in SCOPES else "node"

    @property
    def current(self) -> str | None:
        """AC or DC; None: not stated.

        Readings times a conversion efficiency below 1 are measured behind the supply: DC.
        """
        said = self.stated.get("measurement_type")
        if said not in ("AC", "DC"):
            return None
        return "DC" if said == "AC" and (self.efficiency or 1.0) < 1.0 else str(said)

    @property
    def counts(self) -> Sequence[object]:
        """The counter of joules at the start and the stop of measuring, in order of time, if the meter is a counter."""
        marks = sorted((item for item in self.statements if item.key in (START, STOP)), key=lambda item: item.time_ms)
        return [item.metadata["counter_j"] for item in marks if "counter_j" in item.metadata]

    @property
    def integrates(self) -> bool:
        """True if each reading is the mean since the previous one, as from a counter of joules. Sampling then loses
        nothing.
        """
        return self.stated.get("reads") == "mean"

    def number(self, name: str) -> float | None:
        """Return a number that the file states of its meter."""
        return convert_to_float(self.stated.get(name))


def read_power_log(path: Path) -> PowerLog:
    """Read one power log. OSError names the file if it cannot be read, or is larger than the limits allow."""
    reader = _Reader(path)
    try:
        with open_regular_file(path, read_limits().file) as file:
            for number, lines in _read_chunks(file, reader):
                reader.parse(lines, number)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return reader.log()


_CHUNK_BYTES = 2**19
_TOKEN = b":::MLLOG"
_READING_BYTES = 24
_READING = re.compile(
    rb'^:::MLLOG \{"namespace": ?"", ?"time_ms": ?(\d{1,15}), ?"event_type": ?"POINT_IN_TIME", ?"key": ?"power_reading", ?'
    rb'"value": ?(-?(?:0|[1-9]\d{0,14})(?:\.\d{1,20})?), ?"metadata": ?(?:""|\{\}|\{"[a-z_]{1,40}": ?"[\w.:-]{0,80}"\})\}\r?\n',
    re.MULTILINE,
)
_NAME = re.compile(r"(node|sw|part)_(\d{1,6})(?:_.*)?")


def _read_chunks(file: BufferedReader, reader: _Reader) -> Iterator[tuple[int, bytes]]:
    """Cut a file at ends of lines; yield each piece with the number of its first line.

    A line above the limit is damage.
    """
    number, rest = 1, b""
    while block := file.read(_CHUNK_BYTES):
        cut = block.rfind(b"\n") + 1
        if cut == 0:
            rest += block
            if len(rest) > read_limits().line:
                reader.damage(number, f"a line of more than {render_bytes(read_limits().line)}")
                rest = b""
            continue
        lines, rest = rest + block[:cut], block[cut:]
        yield number, lines
        number += lines.count(b"\n")
    if rest:
        yield number, rest


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._times, self._watts, self._lines = array("d"), array("d"), array("q")
        self._statements: list[PowerLogEvent] = []
        self._stated: dict[str, Any] = {}
        self._problems: list[tuple[int, str]] = []
        self._damaged = 0

    def damage(self, line: int, message: str) -> None:
        """Count a damaged line, and keep it if it is one of the first."""
        self._damaged += 1
        if self._damaged <= LISTED_PROBLEMS:
            self._problems.append((line, message))

    def parse(self, data: bytes, number: int) -> None:
        """Collect the readings and statements of whole lines; the first is line ``number``."""
        found = _READING.findall(data)
        if len(found) == data.count(b"\n") and data.endswith(b"\n"):
            self._times.extend([float(time) for time, _ in found])
            self._watts.extend([float(watts) for _, watts in found])
            self._lines.extend(range(number, number + len(found)))
        else:
            for line, raw in enumerate(data.split(b"\n"), start=number):
                self._parse_line(raw, line)
        if len(self._times) * _READING_BYTES + len(self._statements) * 1000 > read_limits().events:
            most = f"has more than {render_bytes(read_limits().events)} of readings ({LIMITS} raises the limit)"
            raise OSError(errno.EFBIG, most, str(self._path))

    def _parse_line(self, raw: bytes, line: int) -> None:
        fast = _READING.match(raw + b"\n")
        if fast is not None:
            self._add(float(fast[1]), float(fast[2]), line)
            return
        at = raw.find(_TOKEN)
        if at < 0:
            return
        try:
            record = json.loads(raw[at + len(_TOKEN) :], object_pairs_hook=refuse_duplicate_keys)
        except DuplicateKeyError as error:
            self.damage(line, f"an object has {render_repr(str(error))} twice")
            return
        except (ValueError, RecursionError):
            self.damage(line, "not JSON after :::MLLOG")
            return
        self._take(record, line)

    def _take(self, record: Any, line: int) -> None:
        if not isinstance(record, dict) or not isinstance(record.get("key"), str):
            self.damage(line, "expected an object with a key")
            return
        key, time_ms, value = record["key"], convert_to_float(record.get("time_ms")), record.get("value")
        if time_ms is None or not 0 <= time_ms < 2**53:
            self.damage(
                line,
                f"time_ms of {render_repr(key)} is {render_repr(record.get('time_ms'))}: expected Unix milliseconds",
            )
        elif key == READING:
            watts = convert_to_float(value)
            if watts is None:
                self.damage(line, f"power_reading = {render_repr(value)}: expected watts")
            else:
                self._add(time_ms, watts, line)
        elif key in (START, STOP, EFFICIENCY, ESTIMATE):
            given = record.get("metadata")
            metadata = given if isinstance(given, dict) else {}
            self._statements.append(PowerLogEvent(key, value, time_ms, line, metadata))
            self._stated.update(metadata)

    def _add(self, time_ms: float, watts: float, line: int) -> None:
        self._times.append(time_ms)
        self._watts.append(watts)
        self._lines.append(line)

    def log(self) -> PowerLog:
        """Return the log of everything collected."""
        name = _NAME.fullmatch(self._path.stem)
        return PowerLog(
            self._path,
            name[1] if name else "",
            int(name[2]) if name else None,
            self._times,
            self._watts,
            self._lines,
            tuple(self._statements),
            self._stated,
            tuple(self._problems),
            self._damaged,
        )
