"""Reads and writes power logs in the official form, one meter per file. Each line with the MLLOG token is a reading, a
statement or damage.

    results/<system>/.../<benchmark>/power/result_<i>/node_<k>.txt    the widest scope that was measured of node k
                                                      sw_<k>.txt      a switch: readings, or its estimated power
                                                      part_<k>_<scope>.txt    ours: a part of node k, never added to it

The file is read in pieces and only its readings stay: 24 bytes each. No content raises. Published logs have "" as
metadata, 0 as the first node or 1, and stop events with the time of the start. All are read, and the checker names
them.

Integrates the readings of one meter. Pure functions of a power log, without extrapolation.

By the rules (training_policies, power_measurement.adoc) energy is the sum of each reading times the time since the
previous reading.

Names the keys of a power log, as MLCommons' logging package does. Imports nothing: the sampler starts with it.
"""

from __future__ import annotations

import cmath
import errno
import json
import math
import re
import statistics
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import accumulate, pairwise
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
from mlhpc.suite.log.reader import convert_to_float, read_limits
from mlhpc.suite.statistics import compute_t_quantile

START, READING, STOP = "power_measurement_start", "power_reading", "power_measurement_stop"
EFFICIENCY, ESTIMATE = "conversion_eff", "interconnect_power_est"
JOB = "job"  # the scope of a count for all nodes of a job: it has joules and no score
SCOPES = ("device", "package", "package+device", "node", "rack", JOB)  # what a meter sees, the widest last


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
    rb'^:::MLLOG \{"namespace": ?"", ?"time_ms": ?(\d{1,15}), ?"event_type": ?"POINT_IN_TIME", ?"key":'
    rb' ?"power_reading", ?'
    rb'"value": ?(-?(?:0|[1-9]\d{0,14})(?:\.\d{1,20})?), ?"metadata": ?(?:""|\{\}|\{"[a-z_]{1,40}":'
    rb' ?"[\w.:-]{0,80}"\})\}\r?\n',
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


CONFIDENCE = 0.95
UNSTATED_ACCURACY = 0.05  # of a reading: the most that the rules allow a meter at one reading a second
GAP_S = 2.0  # between readings, and between an end of the run and the nearest one
PHASE_LOCK_LIMIT = 0.5  # `measure_phase_lock` above which readings count as in step
RULE_OF_THREE = 3.0  # what none of n readings shows is less than 3 / n of the time, with 95 % confidence
_RANDOM_TIMES_FACTOR = 2.5  # times 1 / sqrt(n): as near to the marks of a clock as readings at random times rarely are
MIN_READINGS = 4  # readings of an interval
_MOST_FREEDOM = 5000
_MOST_STEPS = 200  # that are looked at for a step
_CLOCK_STEPS = 4


def render_power_log(points: Sequence[tuple[float, float]], stated: Mapping[str, object]) -> str:
    """Render readings of one node, (Unix seconds, watts), as a power log."""
    begin, end = points[0][0], points[-1][0]
    lines = [_render_line(START, None, begin, "INTERVAL_START", stated)]
    lines += [_render_line(READING, watts, time, "POINT_IN_TIME", "") for time, watts in points]
    return "\n".join([*lines, _render_line(STOP, None, end, "INTERVAL_END", "")]) + "\n"


def render_estimate(watts: float, time_s: float) -> str:
    """Render the estimated power of a network as a power log."""
    return _render_line(ESTIMATE, watts, time_s, "POINT_IN_TIME", {"estimated": True}) + "\n"


def _render_line(key: str, value: object, time_s: float, kind: str, metadata: object) -> str:
    event: dict[str, Any] = {"namespace": "", "time_ms": round(time_s * 1e3), "event_type": kind, "key": key}
    return f":::MLLOG {json.dumps({**event, 'value': value, 'metadata': metadata})}"


@dataclass(frozen=True)
class PowerCurve:
    """The readings of a meter in order of time. ``energy_j`` is the energy up to each of ``times_s`` (Unix seconds).

    The first reading counts from ``begin_s``: the stated start of measuring, or the first reading if no earlier start
    is stated.
    """

    times_s: Sequence[float]
    watts: Sequence[float]
    energy_j: Sequence[float]
    begin_s: float

    @property
    def end_s(self) -> float:
        """The time of the last reading."""
        return self.times_s[-1] if self.times_s else self.begin_s

    def up_to(self, at_s: float) -> float:
        """Return joules from the first reading to a time.

        A time outside of the readings gives their first or last sum.
        """
        index = bisect_left(self.times_s, at_s)
        if at_s <= self.begin_s or not self.times_s:
            return 0.0
        if index == len(self.times_s):
            return self.energy_j[-1]
        return self.energy_j[index] - self.watts[index] * (self.times_s[index] - at_s)

    def between(self, start_s: float, stop_s: float) -> float:
        """Return joules of the measured part of a stretch."""
        return self.up_to(stop_s) - self.up_to(start_s)

    def uncovered_s(self, start_s: float, stop_s: float) -> float:
        """Return seconds of a stretch that no reading covers: before the first and after the last."""
        return max(stop_s - start_s, 0.0) - max(min(stop_s, self.end_s) - max(start_s, self.begin_s), 0.0)

    def largest_gap_s(self, start_s: float, stop_s: float) -> float:
        """Return the longest time without a reading in a stretch, its ends included."""
        low, high = bisect_right(self.times_s, start_s), bisect_left(self.times_s, stop_s)
        marks = [start_s if low == 0 else self.times_s[low - 1], *self.times_s[low:high]]
        marks.append(stop_s if high == len(self.times_s) else self.times_s[high])
        return max(b - a for a, b in pairwise(marks))

    def rate_hz(self, start_s: float, stop_s: float) -> float:
        """Return readings per second in a stretch."""
        count = bisect_right(self.times_s, stop_s) - bisect_left(self.times_s, start_s)
        return count / (stop_s - start_s) if stop_s > start_s else 0.0

    def within(self, start_s: float, stop_s: float, *, hold: bool = False) -> Iterable[tuple[float, float]]:
        """Yield (seconds, watts) for each reading in a stretch: the time since the previous reading, as far as it is
        inside.

        With ``hold`` the last reading inside counts to the end of the stretch: the next one may be of an idle node.
        """
        low, high = bisect_right(self.times_s, start_s), bisect_left(self.times_s, stop_s)
        before = max(start_s, self.begin_s)
        for index in range(low, min(high + 1, len(self.times_s))):
            now = min(self.times_s[index], stop_s)
            held = hold and index > low and self.times_s[index] > stop_s
            yield max(now - before, 0.0), self.watts[index - 1 if held else index]
            before = max(before, now)

    def cut_intervals(self, start_s: float, stop_s: float) -> Iterable[tuple[float, float, float, float]]:
        """Yield the intervals that an end of a stretch cuts: (seconds inside, seconds, watts, watts of the next reading
        inside).
        """
        first, last = bisect_right(self.times_s, start_s), bisect_left(self.times_s, stop_s)
        for index, inside, edge in ((first, first + 1, start_s), (last, last - 1, stop_s)):
            if not 0 <= index < len(self.times_s):
                continue
            since = self.times_s[index - 1] if index else self.begin_s
            part = self.times_s[index] - edge if edge == start_s else edge - since
            if 0.0 < part < self.times_s[index] - since:
                near = self.watts[inside if first <= inside <= last - 1 else index]
                yield part, self.times_s[index] - since, self.watts[index], near

    def clock_error_j(self, start_s: float, stop_s: float, bound_s: float) -> float:
        """Return joules by which a stretch's energy may change if the clock is off by up to ``bound_s`` at each end."""
        shifts = [bound_s * step / _CLOCK_STEPS for step in range(-_CLOCK_STEPS, _CLOCK_STEPS + 1)]
        return math.fsum(max(abs(self.between(end, end + shift)) for shift in shifts) for end in (start_s, stop_s))


def build_curve(log: PowerLog, offset_s: float = 0.0) -> PowerCurve:
    """Return the readings of a log in order of time.

    ``offset_s`` is added to their times: how far the meter's clock was behind.
    """
    order = sorted(range(len(log.times_ms)), key=log.times_ms.__getitem__)
    times = [log.times_ms[index] / 1e3 + offset_s for index in order]
    watts = [log.watts[index] for index in order]
    start = log.first(START)
    stated = start.time_ms / 1e3 + offset_s if start is not None else math.inf
    begin = min(stated, times[0]) if times else 0.0
    steps = (w * (b - a) for a, b, w in zip([begin, *times], times, watts, strict=False))
    return PowerCurve(times, watts, list(accumulate(steps)), begin)


def compute_sampling_halfwidth_j(
    readings: Iterable[tuple[float, float]],
    *,
    duty: float = 1.0,
    integrates: bool = False,
    most_w: float | None = None,
) -> float | None:
    """Compute half the 95 % interval of an integral, for what happened between the readings.

    None for too few readings, and for readings in step if ``most_w`` is not known: nothing bounds what these hide.

    A meter that ``integrates`` misses nothing. Any other reading is the power of a moment. Between readings the power
    may be anything from 0 to ``most_w``, by default the highest reading.

    If the readings come in step, they show only one phase of a load in step with them. The interval then holds all that
    such a load could hide. If not, consecutive readings show the spread, and the rarest load that they would still show
    bounds the rest. A board that measures only a part ``duty`` of the time sees nothing of the rest.
    """
    if integrates:
        return 0.0
    found = [(seconds, watts) for seconds, watts in readings if seconds > 0.0]
    if len(found) < MIN_READINGS:
        return None
    steps, watts = [seconds for seconds, _ in found], [each for _, each in found]
    most = max(watts) if most_w is None else max(most_w, *watts)
    hidden = _compute_largest_error_j(found, most)
    locked = measure_phase_lock(steps[1:-1])  # the first and the last are cut
    if locked > PHASE_LOCK_LIMIT:
        return None if most_w is None else hidden  # all readings may be of the low phase of a load
    spread = math.fsum((b - a) ** 2 for a, b in pairwise(watts)) / (2 * (len(watts) - 1))
    phases = (1.0 + locked) / (1.0 - locked)  # so many readings tell as much as one at a random phase
    error = math.sqrt(spread * phases * math.fsum(seconds**2 for seconds in steps))
    rare = min(1.0, RULE_OF_THREE * phases / len(watts)) * max(most - max(watts), min(watts)) * math.fsum(steps)
    gap_s = max(GAP_S, 3.0 * statistics.median(steps))
    gaps = _compute_largest_error_j([(seconds, each) for seconds, each in found if seconds > gap_s], most)
    half = compute_t_quantile(0.5 + CONFIDENCE / 2, _estimate_degrees_of_freedom(len(watts))) * error
    return min(half + rare + gaps + (1.0 - duty) * hidden, hidden)


def _compute_largest_error_j(readings: Sequence[tuple[float, float]], most_w: float) -> float:
    """Return the largest error of an integral in joules, if power between the readings was from 0 to ``most_w``."""
    joules, seconds = math.fsum(s * w for s, w in readings), math.fsum(s for s, _ in readings)
    return max(joules, most_w * seconds - joules)


def measure_phase_lock(steps_s: Sequence[float]) -> float:
    """Measure how much readings with these time steps are in step: 1 if some load would show only one phase.

    Tries loads with periods from a tenth of the usual step to slightly more than it. Finds two kinds: steps of one
    length, and readings near the marks of a clock (`_measure_grid_lock`).
    """
    usual = statistics.median(steps_s)
    some = steps_s[:: len(steps_s) // _MOST_STEPS + 1]
    turns = [2j * math.pi * step / usual for step in some]
    lengths = max(abs(sum(cmath.exp(turn * k / 10) for turn in turns)) / len(turns) for k in range(9, 101, 2))
    return max(lengths, _measure_grid_lock(steps_s))


def _measure_grid_lock(steps_s: Sequence[float]) -> float:
    """Return how near the readings are to the marks of a clock; 0 if no nearer than at random times."""
    usual = math.fsum(steps_s) / len(steps_s)
    times = list(accumulate(steps_s))
    some = times[:: len(times) // _MOST_STEPS + 1]
    near = max(abs(sum(cmath.exp(2j * math.pi * k * at / usual) for at in some)) / len(some) for k in range(1, 11))
    return 0.0 if near < _RANDOM_TIMES_FACTOR / math.sqrt(len(some)) else 1.0 if near > PHASE_LOCK_LIMIT / 2 else near


def _estimate_degrees_of_freedom(readings: int) -> float:
    """Return degrees of freedom of a variance from neighbours' differences: two thirds of the degrees of a variance
    from the mean.
    """
    return max(1.0, float(min(readings - 1, _MOST_FREEDOM) * 2 // 3))


def estimate_resolution_w(watts: Sequence[float]) -> float:
    """Return the largest power of ten that divides all readings; 0 if it is not known, as for equal readings."""
    if len(set(watts)) < 2:
        return 0.0
    for exponent in range(3, -3, -1):
        unit = 10.0**exponent
        if all(abs(each / unit - round(each / unit)) < 1e-6 for each in watts):
            return unit
    return 0.0
