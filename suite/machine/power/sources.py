"""Files of other meters, read as readings: CSV of PDU, IPMI or jpwr, text of ipmitool, Redfish JSON, Slurm's sacct, official logs.

A meter's file says neither what it sees nor how its clock stands against the run: the person who brings it states both. Nothing
is guessed: a file that fits no form, or a line that is no reading, is an InputError with file and line.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from suite.errors import InputError
from suite.files import brief, read_bytes
from suite.log.energy.keys import ESTIMATE, READING, START, STOP
from suite.log.energy.power_log import read_power_log

_LARGEST = 256 * 2**20
_UNITS = {"mw": 1e-3, "w": 1.0, "watts": 1.0, "kw": 1e3}
_LATEST_S = 1e11  # a number above is in milliseconds


@dataclass(frozen=True)
class Readings:
    """Readings of one meter: (Unix seconds, watts), rising in time. ``form`` is what the file is, ``reads`` what a reading is.

    ``reads``: mean since the reading before it, or moment. ``scope``: what the form itself says; None: the person must say it.
    """

    form: str
    points: tuple[tuple[float, float], ...]
    reads: str = "moment"
    scope: str | None = None


def read_readings(path: Path) -> Readings:
    """Read a file of readings, its form found from its content. InputError says what was expected where."""
    try:
        data = read_bytes(path, _LARGEST)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if b":::MLLOG" in data:
        return _official(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; {_FORMS}") from None
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    parse: Callable[[Path, Sequence[str]], Readings]
    if "ConsumedEnergyRaw" in first:
        parse = _slurm
    elif "Instantaneous power reading" in text:
        parse = _ipmitool
    elif first.lstrip().startswith(("{", "[")):
        parse = _redfish
    else:
        parse = _csv
    found = parse(path, lines)
    times = [time for time, _ in found.points]
    if len(times) < 2:
        raise InputError(f"{path}: {len(times)} readings; expected two or more")
    back = next((n for n in range(1, len(times)) if times[n] <= times[n - 1]), None)
    if back is not None:
        raise InputError(f"{path}: reading {back + 1}: its time {times[back]:.3f} is not after {times[back - 1]:.3f}")
    return found


_FORMS = (
    "expected a CSV with a column of times and one of watts (PDU, IPMI, jpwr), the text of ipmitool dcmi power reading, "
    "Redfish JSON, sacct -P --format=JobID,Start,End,ConsumedEnergyRaw, or an official power log"
)


def render_power_log(readings: Readings, stated: Mapping[str, object]) -> str:
    """The readings as a power log in the official form, with what is stated of the meter."""
    points = readings.points
    begin = points[0][0]
    said = {"source": readings.form, "reads": readings.reads, **stated}
    lines = [_line(START, None, begin, "INTERVAL_START", said)]
    lines += [_line(READING, watts, time, "POINT_IN_TIME", "") for time, watts in points]
    return "\n".join([*lines, _line(STOP, None, points[-1][0], "INTERVAL_END", "")]) + "\n"


def render_estimate(watts: float, time_s: float) -> str:
    """The estimated power of a network, in the official form."""
    return _line(ESTIMATE, watts, time_s, "POINT_IN_TIME", {"estimated": True}) + "\n"


def _line(key: str, value: object, time_s: float, kind: str, metadata: object) -> str:
    event = {"namespace": "", "time_ms": round(time_s * 1e3), "event_type": kind, "key": key, "value": value}
    return f":::MLLOG {json.dumps({**event, 'metadata': metadata})}"


def _official(path: Path) -> Readings:
    try:
        log = read_power_log(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if log.damaged:
        line, message = log.problems[0]
        raise InputError(f"{path}:{line}: {message}")
    if (log.efficiency or 0.0) != 1.0:
        raise InputError(f"{path}: has a conversion_eff; put the file into power/ as it is")
    points = tuple((time / 1e3, watts) for time, watts in zip(log.times_ms, log.watts, strict=True))
    reads = "mean" if log.integrates else "moment"
    return Readings("official", points, reads, log.scope if "scope" in log.stated else None)


def _csv(path: Path, lines: Sequence[str]) -> Readings:
    """A table: the first column whose name says time, and every column of watts, summed (jpwr has one per device)."""
    rows = csv.reader(lines, delimiter=_delimiter(lines))
    names = [name.strip().lower() for name in next(rows, [])]
    at = next((n for n, name in enumerate(names) if re.search(r"time|date", name)), None)
    jpwr = at is not None and any(re.fullmatch(r"(gpu|cpu|gh|module|amd|nvidia)\W?\d+.*", name) for name in names)
    columns = [(n, _unit(name)) for n, name in enumerate(names) if n != at and (_is_power(name) or (jpwr and name))]
    if at is None or not columns:
        raise InputError(f"{path}:1: columns {brief(', '.join(names))}; {_FORMS}")
    if len(columns) > 1 and not jpwr:
        told = ", ".join(names[n] for n, _ in columns)
        raise InputError(f"{path}:1: several columns of power ({told}); expected one")
    points = []
    for number, row in enumerate(rows, start=2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) < len(names):
            raise InputError(f"{path}:{number}: {len(row)} columns; expected {len(names)}")
        watts = sum(_number(row[n], f"{path}:{number}") * unit for n, unit in columns)
        points.append((_time(row[at], f"{path}:{number}"), watts))
    return Readings("jpwr" if jpwr else "csv", tuple(points), scope="device" if jpwr else None)


def _delimiter(lines: Sequence[str]) -> str:
    head = lines[0] if lines else ""
    return max(",;\t|", key=head.count)


def _is_power(name: str) -> bool:
    return bool(re.search(r"power|watt|\[[mk]?w\]|\([mk]?w\)|_[mk]?w$|^[mk]?w$", name))


def _unit(name: str) -> float:
    """Watts of one in a column of this name; watts if the name has no unit."""
    match = re.search(r"(?<![a-z])(mw|kw|watts|w)(?![a-z])", name)
    return _UNITS[match[1]] if match else 1.0


def _ipmitool(path: Path, lines: Sequence[str]) -> Readings:
    """``ipmitool dcmi power reading`` again and again: each has its power, and then the time of its board (UTC)."""
    points: list[tuple[float, float]] = []
    watts: float | None = None
    for number, line in enumerate(lines, start=1):
        if match := re.search(r"Instantaneous power reading:\s*(\S+)\s+Watts", line):
            watts = _number(match[1], f"{path}:{number}")
        if match := re.search(r"IPMI timestamp:\s*(.*?)\s*$", line):
            if watts is None:
                raise InputError(f"{path}:{number}: a time without a power reading before it")
            points.append((_time(match[1], f"{path}:{number}"), watts))
            watts = None
    if watts is not None:
        raise InputError(f"{path}: the last power reading has no IPMI timestamp")
    return Readings("ipmi", tuple(points), scope="node")


def _redfish(path: Path, lines: Sequence[str]) -> Readings:
    """A telemetry report (MetricValues), or a line of JSON per reading with PowerConsumedWatts and a time."""
    try:
        document = json.loads("\n".join(lines))
        records = document.get("MetricValues", [document]) if isinstance(document, dict) else document
        numbered = list(enumerate(records, start=1))
    except (ValueError, RecursionError):
        numbered = list(_json_lines(path, lines))
    points = []
    for number, record in numbered:
        if not isinstance(record, dict):
            raise InputError(f"{path}: reading {number}: expected a JSON object")
        watts = next(
            (record[name] for name in ("PowerConsumedWatts", "MetricValue", "Reading") if name in record), None
        )
        time = next((record[name] for name in ("Timestamp", "DateTime", "time") if name in record), None)
        where = f"{path}: reading {number}"
        points.append((_time(str(time), where), _number(str(watts), where)))
    return Readings("redfish", tuple(points), scope="node")


def _json_lines(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                raise InputError(f"{path}:{number}: not JSON; {_FORMS}") from None


def _slurm(path: Path, lines: Sequence[str]) -> Readings:
    """One number of joules for a whole job, all nodes together: a mean over its time, and no readings within the run."""
    rows = list(csv.DictReader(lines, delimiter=_delimiter(lines)))
    lacking = {"JobID", "Start", "End", "ConsumedEnergyRaw"} - set(rows[0] if rows else ())
    if lacking:
        raise InputError(f"{path}:1: no column {', '.join(sorted(lacking))}; {_FORMS}")
    row = next((row for row in rows if "." not in str(row["JobID"])), rows[0])
    where = f"{path}: job {row['JobID']}"
    if not str(row["ConsumedEnergyRaw"] or "").strip():
        row = next((each for each in rows if str(each["ConsumedEnergyRaw"] or "").strip()), row)
    joules = _number(str(row["ConsumedEnergyRaw"] or ""), where)
    if not 0.0 < joules < 2.0**60:  # plug-ins that failed leave 0, or all bits
        raise InputError(
            f"{where}: ConsumedEnergyRaw = {joules:g}: expected joules, more than 0 (is a plug-in configured?)"
        )
    start, stop = (_time(str(row[name]), where) for name in ("Start", "End"))
    if stop <= start:
        raise InputError(f"{where}: ends before it starts")
    mean = joules / (stop - start)
    return Readings("slurm", ((start, mean), (stop, mean)), reads="mean")


def _number(text: str, where: str) -> float:
    try:
        value = float(text.strip().removesuffix("W").strip())
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{where}: {brief(text)} is no number of watts or joules")
    return value


_DATES = ("%a %b %d %H:%M:%S %Y", "%m/%d/%Y %H:%M:%S", "%d.%m.%Y %H:%M:%S")


def _time(text: str, where: str) -> float:
    """Unix seconds of a number (seconds or milliseconds) or a date. A date without a zone is UTC."""
    text = text.strip()
    try:
        value = float(text)
    except ValueError:
        pass
    else:
        if math.isfinite(value) and value > 0.0:
            return value / 1e3 if value > _LATEST_S else value
        raise InputError(f"{where}: {brief(text)} is no time")
    for parse in (datetime.fromisoformat, *(_by(form) for form in _DATES)):
        try:
            found = parse(text)
        except ValueError:
            continue
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    raise InputError(f"{where}: {brief(text)} is no time; expected Unix seconds or 2026-11-23T14:00:00Z")


def _by(form: str) -> Callable[[str], datetime]:
    return lambda text: datetime.strptime(text, form)
