"""Reads power readings of an external meter from a CSV, and writes those of a run into its package.

PDU, IPMI, Redfish and sacct exports are CSV tables, or become one with a line of awk or jq. A YAML file names the
columns and describes the meter; docs/energy.md has an example for each. Tables of nvidia-smi, amd-smi, rocm-smi, jpwr
and sacct, and texts of IPMI and dcgmi dmon, are recognised by their head. Nothing else is guessed: a value that does
not fit is an InputError with file and line.
"""

from __future__ import annotations

import csv
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median, mode
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from mlhpc.plugins.exchange.power_text import MODULE, NODE, read_text
from mlhpc.suite.documents import Positive, YamlSource
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import decode_table, make_folder, read_bytes, render_duration, render_repr
from mlhpc.suite.log.energy.power_log import SCOPES, read_power_log, render_power_log
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.results_tree import RESULT

_LARGEST_FILE = 256 * 2**20
_MARGIN_S = 60.0  # of readings before and after a run, to show the idle power
_WATTS = {"uW": 1e-6, "mW": 1e-3, "W": 1.0, "kW": 1e3}
_JOULES = {"uJ": 1e-6, "mJ": 1e-3, "J": 1.0, "kJ": 1e3, "mWh": 3.6, "Wh": 3600.0, "kWh": 3.6e6}

Point = tuple[float, float]  # Unix seconds, watts
Share = Annotated[float, Meta(gt=0, le=1)]


class PowerColumns(Struct, frozen=True, forbid_unknown_fields=True):
    """Names the columns of a CSV and describes its meter. docs/energy.md explains each key."""

    scope: Literal["device", "package", "package+device", "node", "rack", "job"]
    current: Literal["AC", "DC"]
    time: str
    unit: Literal["uW", "mW", "W", "kW", "uJ", "mJ", "J", "kJ", "mWh", "Wh", "kWh"]
    power: str | list[str] | None = None  # several columns, such as one per device, are added
    energy: str | None = None  # a counter, or if `since` is named, the energy since the time in that column
    since: str | None = None
    wraps_at: Positive | None = None  # of `energy`: the value, in its unit, behind which the counter begins again at 0
    time_form: str = "iso"  # iso, one of `_COUNTED`, or a form of strptime
    node: str | None = None
    nodes: list[str] = []
    device: str | None = None  # its rows of one time are added: each device of a node has a row of its own
    rows: dict[str, str] = {}
    delimiter: Annotated[str, Meta(min_length=1, max_length=1)] = ","
    accuracy: Share | None = None
    rating_w: Positive | None = None
    reads: Literal["moment", "mean"] | None = None  # of `power`; an energy counter reads means
    duty: Share | None = None
    clock_offset_s: float | None = None
    clock_bound_s: Annotated[float, Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if (self.power is None) == (self.energy is None):
            raise ValueError("expected either power or energy")
        if self.unit not in (_WATTS if self.energy is None else _JOULES):
            raise ValueError(f"{self.unit} is no unit of {'power' if self.energy is None else 'energy'}")
        if self.reads is not None and self.energy is not None:
            raise ValueError("reads belongs to power")
        if self.wraps_at is not None and (self.energy is None or self.since is not None):
            raise ValueError("wraps_at belongs to an energy counter")
        if self.since is not None and self.energy is None:
            raise ValueError("since belongs to energy")
        if (self.node is None) != (not self.nodes):
            raise ValueError("node and nodes belong together")
        if (self.clock_offset_s is None) != (self.clock_bound_s is None):
            raise ValueError("clock_offset_s and clock_bound_s belong together")

    @property
    def columns(self) -> list[str]:
        """The names of all columns that are read."""
        power = [self.power] if isinstance(self.power, str) else self.power or []
        named = [self.time, *power, self.energy, self.since, self.node, self.device, *self.rows]
        return [name for name in named if name is not None]

    @property
    def stated(self) -> Mapping[str, object]:
        """What the power logs state of the meter."""
        known = {
            "source": "csv",
            "reads": (self.reads or "moment") if self.energy is None else "mean",
            "scope": self.scope,
            "measurement_type": self.current,
            "accuracy": self.accuracy,
            "rating_w": self.rating_w,
            "duty": self.duty,
            "clock_offset_s": self.clock_offset_s,
            "clock_bound_s": self.clock_bound_s,
        }
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class MeterReadings:
    """The readings of a CSV by node number, in order of time."""

    path: Path
    columns: PowerColumns
    by_node: Mapping[int, Sequence[Point]]
    lacks_zone: bool = False  # of its times, which are then taken for UTC

    def check_zone(self, start_s: float, stop_s: float, folder: Path) -> None:
        """Raise InputError if this run and those beside it in ``folder`` do not show that times without a zone are UTC.

        A table of hours fits a run in several zones. It does not matter if the power of the run is the same in all.
        """
        if not self.lacks_zone or self.columns.clock_offset_s is not None:
            return
        points, windows = self.by_node[0], [(start_s, stop_s), *_list_windows(folder)]
        fitting = [offset for offset in _ZONES if _covers(points, offset, windows)]
        watts = {offset: _find_mean_watts(points, offset, windows) for offset in fitting}
        share = self.columns.accuracy or _ACCURACY
        others = [each for each in fitting if 0 not in watts or abs(watts[each] - watts[0]) > share * watts[0]]
        if not others:
            return
        meets = "fits the runs, and as" if 0 in fitting else "does not fit the runs, but as"
        power = f" ({watts[others[0]]:.4g} W, not {watts[0]:.4g} W)" if 0 in fitting else ""
        more = f" and {len(others) - 1} others" if len(others) > 1 else ""
        raise InputError(
            f"{self.path}: its times have no zone; as UTC the table {meets} {_render_zone(others[0])}{power}{more}; "
            f"state clock_offset_s and clock_bound_s in --power-columns: 0 for UTC, "
            f"{others[0]} for {_render_zone(others[0])}"
        )

    def during(self, start_s: float, stop_s: float) -> dict[int, list[Point]]:
        """Return the readings between two times of the run's clock. InputError if a node has fewer than two.

        Includes the last reading before and the first one after, which show how far the others reach.
        """
        offset = self.columns.clock_offset_s or 0.0
        found = {}
        for node, points in self.by_node.items():
            times = [time + offset for time, _ in points]
            inside = list(points[max(bisect_left(times, start_s) - 1, 0) : bisect_right(times, stop_s) + 1])
            if len(inside) < 2:
                raise InputError(
                    f"{self.path}: no readings of node {node} from {_render_iso_time(start_s)} "
                    f"to {_render_iso_time(stop_s)}; they are "
                    f"from {_render_iso_time(points[0][0])} to {_render_iso_time(points[-1][0])} (is the time"
                    " zone right?)"
                )
            if self.columns.device is None:  # a few bursts of a long table
                _refuse_bursts(self.path, self.columns, [time for time, _ in inside])
            found[node] = inside
        return found


# Seconds to add to the times of each zone: UTC+14 to UTC-12 in steps of a quarter of an hour
_ZONES = sorted(range(-14 * 3600, 12 * 3600 + 1, 900), key=abs)
_LATE = 0.1
_ACCURACY = 0.05  # of a reading, unless stated (docs/energy.md)


@cache
def _list_windows(folder: Path) -> list[tuple[float, float]]:
    """List begin and end of every run whose log lies in a folder."""
    logs = (path for path in folder.glob("*") if re.fullmatch(RESULT, path.name))
    records = [summarise_log(read_events(path)) for path in logs]
    ends = [(record.run_start_s, record.run_stop_s) for record in records]
    return [(start, stop) for start, stop in ends if start is not None and stop is not None]


def _covers(points: Sequence[Point], offset: float, windows: Sequence[tuple[float, float]]) -> bool:
    """Return True if the readings are of all of the runs, but for a tenth: a meter may begin late."""
    first, last = points[0][0] + offset, points[-1][0] + offset
    return all(
        first <= start + _LATE * (stop - start) and stop - _LATE * (stop - start) <= last for start, stop in windows
    )


def _find_mean_watts(points: Sequence[Point], offset: float, windows: Sequence[tuple[float, float]]) -> float:
    times: list[float] = [time + offset for time, _ in points]
    found: list[Point] = []
    for start, stop in windows:
        begin, end = bisect_left(times, start), bisect_right(times, stop)
        # Without a reading inside, the power is that of the readings around it
        found += points[begin:end] or points[max(begin - 1, 0) : end + 1]
    return math.fsum(watts for _, watts in found) / len(found)


def _render_zone(offset: int) -> str:
    minutes = abs(offset) // 60
    return f"UTC{'-' if offset > 0 else '+'}{minutes // 60}:{minutes % 60:02}"


def read_power_columns(path: Path) -> PowerColumns:
    """Read the YAML file that names the columns. InputError says what was expected."""
    return YamlSource.read(path).convert(PowerColumns)


@dataclass(frozen=True)
class _Table:
    """The rows of a CSV by stripped names, each with its line. A head that comes again, as after a restart, is
    left out.
    """

    path: Path
    names: list[str]
    rows: list[tuple[int, dict[str, str | None]]]
    delimiter: str = ","

    @staticmethod
    def read(path: Path, delimiter: str | None) -> _Table:
        """Read a file. Without a delimiter it is the one that the head has most of."""
        content = _read_content(path)
        lines = content.splitlines()
        whole = not lines or lines[-1] != content[-len(lines[-1]) :]
        labelled = _split_labels(lines)
        if not labelled:
            return _Table._parse(path, lines, delimiter, whole=whole)
        numbers = {label: [number for number, _ in parts] for label, parts in labelled.items()}
        tables = {
            label: _Table._parse(
                Path(f"{path} (lines of {label})"), [line for _, line in parts], delimiter,
                whole=whole or numbers[label][-1] < len(lines),
            )
            for label, parts in labelled.items()
        }  # fmt: skip
        first, *others = tables.values()
        for other in others:
            if other.names != first.names:
                raise InputError(f"{other.path}: has another head than {first.path}; expected one head for all labels")
        rows = [
            (numbers[label][line - 1], {**row, LABEL: label})
            for label, table in tables.items()
            for line, row in table.rows
        ]
        return _Table(path, [*first.names, LABEL], sorted(rows, key=lambda row: row[0]), first.delimiter)

    @staticmethod
    def _parse(path: Path, lines: Sequence[str], delimiter: str | None, *, whole: bool) -> _Table:
        """Parse the lines of a file, or of one label. The last line may be a part of one unless the text is whole."""
        if text := read_text(path, lines):
            return _Table(path, *text)
        above = _count_remarks(lines)
        delimiter = delimiter or max(_DELIMITERS, key="".join(lines[above : above + 1]).count)
        table = csv.reader(lines[above:], delimiter=delimiter, skipinitialspace=True)
        names = [name.strip() for name in next(table, [])]
        if _are_readings(names):
            raise InputError(
                f"{path}:{above + 1}: no head: the first line holds readings; write it again without noheader"
                ", or write the names of its columns above it"
            )
        rows = []
        for cells in table:
            values = [cell.strip() for cell in cells]
            if values and values != names:
                filled = {**dict.fromkeys(names), **dict(zip(names, values, strict=False))}
                rows.append((above + table.line_num, filled))
        if rows and not whole and len(values) < len(names):
            rows.pop()  # a meter that was killed leaves a part of a line without an end
        return _Table(path, names, rows, delimiter)


def _read_content(path: Path) -> str:
    """Return the text of a file: UTF-8, or the UTF-16 that PowerShell writes."""
    try:
        return decode_table(path, read_bytes(path, _LARGEST_FILE))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None


LABEL = "label of the line"  # the column that names the node of a line where a tool ran on several
_LABEL = re.compile(r"\s*((?:P\d+ )?[\w.-]+):(?: |$)")


def _split_labels(lines: Sequence[str]) -> dict[str, list[tuple[int, str]]]:
    """Split lines that all begin with labels, as those of srun --label, pdsh and xCAT: (number, rest) by label.

    Empty for other lines. The labels are in the order of their numbers: n2 comes before n10.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines, 1):
        match = _LABEL.match(line)
        if match is None and line.strip():
            return {}
        if match is not None:
            found.setdefault(match[1], []).append((number, line[match.end() :]))
    return {label: found[label] for label in sorted(found, key=_split_digits)}


def _split_digits(text: str) -> list[tuple[str, int]]:
    return [("", int(word)) if word.isdigit() else (word, 0) for word in re.split(r"(\d+)", text)]


def _count_remarks(lines: Sequence[str]) -> int:
    """Count the lines of remarks and the empty ones above the head."""
    return next((at for at, line in enumerate(lines) if line.strip() and not line.startswith("#")), 0)


def _are_readings(cells: Sequence[str]) -> bool:
    """Return True if the cells of a head are readings: a time, and a number with or without a unit."""
    words = cells[0].split() if len(cells) == 1 else cells
    time = next((at for at, word in enumerate(words) if _is_time(word)), None)
    return time is not None and any(_READING.fullmatch(word) for at, word in enumerate(words) if at != time)


_READING = re.compile(r"-?\d+(?:[.,]\d+)?(?: ?[mk]?(?:W|J|Wh))?")


def _is_time(text: str) -> bool:
    """Return True for a date, or for a time of this century that counts from 1970."""
    if re.fullmatch(r"\d+(?:\.\d+)?", text) and float(text) > 1e9:
        return True
    return any(_fits(text, form) for form in _TIME_FORMS)


def _fits(text: str, form: str) -> bool:
    try:
        _parse_time(text, form, "")
    except InputError:
        return False
    return True


_DELIMITERS = (",", "|", ";", "\t")
_GAPS = frozenset(
    {"[n/a]", "n/a", "[not supported]", "[unknown error]", "[gpu requires reset]", "[insufficient permissions]"}
)


def read_power_csv(path: Path, columns: PowerColumns) -> MeterReadings:
    """Read a CSV of readings. InputError names the line of a bad value, or says what is missing."""
    return _read_rows(_Table.read(path, columns.delimiter), columns)


def _read_rows(table: _Table, columns: PowerColumns) -> MeterReadings:
    path = table.path
    if LABEL in table.names and columns.node is None:
        labels = sorted({row[LABEL] or "" for _, row in table.rows}, key=_split_digits)
        columns = structs.replace(columns, node=LABEL, nodes=labels)
    missing = [name for name in columns.columns if name not in table.names]
    if missing:
        raise InputError(
            f"{path}:1: no column {', '.join(missing)}; the columns are {render_repr(', '.join(table.names))}"
        )
    by_node: dict[int, list[Point]] = {number: [] for number in range(len(columns.nodes) or 1)}
    jobs: dict[int, dict[str, list[Point]]] = {}  # of each node: the readings of each component of a job
    before: dict[int, Point] = {}  # time and counter of the row before, by node
    sweeps: dict[int, list[dict[str | None, Point]]] = {}  # of each node: a reading of each of its devices
    seen: dict[tuple[int, str | None], list[float]] = {}  # times of each node and device
    lacks_zone = False
    early: InputError | None = None  # of times that do not rise: bursts explain it better
    for line, row in table.rows:
        where = f"{path}:{line}"
        if not all(_is_row_of(row[name], value) for name, value in columns.rows.items()):
            continue
        if columns.node is not None and row[columns.node] not in columns.nodes:
            continue  # another outlet of the same PDU
        node = 0 if columns.node is None else columns.nodes.index(row[columns.node] or "")
        cells = [(row[name] or "").lower().partition(" (") for name in columns.columns]
        if any(cell in _GAPS for cell, *_ in cells):
            continue  # the tool says that it has no reading, and perhaps why: N/A (Secondary die)
        time = _parse_time(row[columns.time], columns.time_form, where)
        points = by_node[node]
        lacks_zone = lacks_zone or _lacks_zone(row[columns.time], columns.time_form)
        if columns.since is not None:
            assert columns.energy is not None
            start = _parse_time(row[columns.since], columns.time_form, where)
            joules = _parse_number(_expand_prefix(row[columns.energy]), where, columns.unit) * _JOULES[columns.unit]
            # Slurm's plug-ins leave 0 or 2**64 - 2 where they failed.
            if not 0.0 < joules < 2.0**60:
                raise InputError(f"{where}: {columns.energy} is {joules:g} J; expected more than 0")
            if time <= start:
                raise InputError(f"{where}: {columns.time} is not after {columns.since}")
            found = [(start, joules / (time - start)), (time, joules / (time - start))]
            part = ", ".join(row[name] or "" for name in columns.rows)
            points = jobs.setdefault(node, {}).setdefault(part, [])
        elif columns.energy is not None:
            joules = _parse_number(row[columns.energy], where, columns.unit) * _JOULES[columns.unit]
            earlier = before.get(node)
            before[node] = (time, joules)
            if earlier is None:
                continue  # the counter's first value belongs to no interval
            if time <= earlier[0]:
                raise InputError(f"{where}: its time is not above that of the row before")
            added = joules - earlier[1]
            if added < 0.0:
                if columns.wraps_at is None:
                    raise InputError(
                        f"{where}: {columns.energy} is below that of the row before; if the counter began again at 0, "
                        "state `wraps_at` in --power-columns (RAPL: the number in max_energy_range_uj)"
                    )
                added += columns.wraps_at * _JOULES[columns.unit]
                if added < 0.0:
                    raise InputError(f"{where}: {columns.energy} was above wraps_at in the row before")
            found = [(time, added / (time - earlier[0]))]
        else:
            names = [columns.power] if isinstance(columns.power, str) else columns.power or []
            watts = sum(_parse_number(row[name], where, columns.unit) for name in names) * _WATTS[columns.unit]
            device = None if columns.device is None else row[columns.device]
            seen.setdefault((node, device), []).append(time)
            if columns.device is not None:
                known = sweeps.setdefault(node, [{}])
                if row[columns.device] in known[-1]:
                    known.append({})
                known[-1][row[columns.device]] = time, watts
                continue
            found = [(time, watts)]
        if points and found[0][0] <= points[-1][0]:
            early = early or InputError(
                f"{where}: its time {_render_iso_time(found[0][0])} is not after that of the row before; "
                "sort the rows by time, and if the file has several meters or outlets, state as `node` or `device`"
                " the column that differs between them"
            )
        points += found
    for times in seen.values():
        _refuse_bursts(path, columns, times)
    if early is not None:
        raise early
    for node, known in sweeps.items():
        by_node[node] += _add_devices(path, known)
    for node, parts in jobs.items():
        by_node[node] = _add_components([*parts.values()])
    empty = [number for number, points in by_node.items() if len(points) < 2]
    if empty:
        raise InputError(f"{path}: {len(by_node[empty[0]])} readings of node {empty[0]}; expected two or more")
    return MeterReadings(path, columns, by_node, lacks_zone)


_WINDOW_ROWS = 64  # in which bursts are looked for: a file may begin with one device and go on with several
_MOST_DEVICES = 16  # of a node whose tool may leave out which one it read; longer bursts are sessions of one meter
_LEAST_BURSTS = 3
_FEW_BURSTS = 8  # fewer may be chance unless their gaps differ more
_RATIO, _RATIO_OF_FEW = 4.0, 16.0  # no gap in between: a rounded time or a lost row makes a gap of twice the usual one
_STRAY_SHARE = 0.05  # of gaps that are neither short nor long, per burst


def _refuse_bursts(path: Path, columns: PowerColumns, times: Sequence[float]) -> None:
    """Raise InputError if the rows of what is taken for one device come in bursts: they are those of several."""
    # A counter of several devices goes back; two rows with one unique name are of one device
    if columns.power is None or columns.device in _UNIQUE:
        return
    for start in range(0, max(len(times) - _WINDOW_ROWS // 2, 1), _WINDOW_ROWS // 2):
        window = times[start : start + _WINDOW_ROWS]
        if (found := _find_bursts(window)) is None:
            continue
        rows, period_s = found
        known = [columns.power] if isinstance(columns.power, str) else columns.power
        asked = any(name.startswith("power.draw") for name in known)  # by nvidia-smi --query-gpu
        remedy = "write a column that does, and state it as `device` or `node`"
        if asked and columns.device in _DEVICES:  # another node has a device of this number too
            remedy = "query uuid too, and state it as `device`; if they are on several nodes, state `node`"
        elif asked:
            remedy = "query index too"
        lacks = "no column tells" if columns.device is None else f"column {render_repr(columns.device)} does not tell"
        raise InputError(
            f"{path}: several devices ({rows} rows every {period_s:.3g} s) and {lacks} them apart: " + remedy
        )


def _find_bursts(times: Sequence[float]) -> tuple[int, float] | None:
    """Find the rows of a burst, and the seconds from one to the next. None if the times are those of one device.

    Gaps within bursts are far shorter than those between them, and bursts have as many rows as their neighbours.
    """
    gaps = [max(after - before, 0.0) for before, after in pairwise(times)]
    ordered = sorted(gaps)
    for shorter, long in pairwise(ordered):  # `long` may be the shortest gap between bursts
        if shorter >= long / 2:
            continue
        starts = [0, *(place for place, gap in enumerate(gaps, 1) if gap >= long)]
        sizes = [stop - start for start, stop in pairwise([*starts, len(times)])]
        # The table may begin and end within a burst
        if len(sizes) > 1 and sizes[0] < sizes[1]:
            del sizes[0], starts[0]
        if len(sizes) > 1 and sizes[-1] < sizes[-2]:
            del sizes[-1]
        if len(sizes) < _LEAST_BURSTS:
            continue
        ratio = _RATIO if len(sizes) >= _FEW_BURSTS else _RATIO_OF_FEW
        stray = bisect_left(ordered, long) - bisect_right(ordered, long / ratio)
        rows = mode(sizes)
        alike = sum(size in (rows, before) for before, size in pairwise([rows, *sizes]))
        most = _STRAY_SHARE * len(sizes)
        if 2 <= rows <= _MOST_DEVICES and stray <= most and max(sizes.count(1), len(sizes) - alike) <= 2 * most:
            return rows, median(after - before for before, after in pairwise([times[start] for start in starts]))
    return None


def _is_row_of(found: str | None, wanted: str) -> bool:
    """Return True for a value, and for a component of a job: 7+1 is one of job 7."""
    return found == wanted or (found is not None and re.fullmatch(rf"{re.escape(wanted)}\+\d+", found) is not None)


def _add_components(parts: Sequence[Sequence[Point]]) -> list[Point]:
    """Add the components of a job, each two points per row: its begin and end with the mean power between them."""
    if len(parts) == 1:
        return list(parts[0])
    times = sorted({time for points in parts for time, _ in points})
    added: list[Point] = []
    for start, stop in pairwise(times):
        rows = (row for points in parts for row in zip(points[::2], points[1::2], strict=True))
        watts = math.fsum(power for (begin, power), (end, _) in rows if begin <= start and stop <= end)
        added += [(stop, watts)] if added else [(start, watts), (stop, watts)]
    return added


def _add_devices(path: Path, sweeps: Sequence[Mapping[str | None, Point]]) -> list[Point]:
    """Add the devices of each sweep. One that lacks a device, which has a gap there, is left out."""
    devices = {name for sweep in sweeps for name in sweep}
    points: list[Point] = []
    for sweep in sweeps:
        if len(sweep) < len(devices):
            continue
        time = max(each for each, _ in sweep.values())
        if points and time <= points[-1][0]:
            raise InputError(
                f"{path}: a device has two rows of {_render_iso_time(time)}, or rows that are not in the order of time;"
                " sort them, and state as `device` a column that differs between all devices"
            )
        points.append((time, sum(watts for _, watts in sweep.values())))
    return points


_TIMES = ("timestamp", "timestamps", "time", "date", "datetime", "ts", "epoch", "unix_time", "time_of_day_seconds")
_TIME_FORMS = (
    *(
        "iso",
        "%Y%m%d %H:%M:%S",
        "%Y/%m/%d %H:%M:%S.%f",
        "%Y/%m/%d %H:%M:%S",
        "%Y-%m-%d-%H:%M:%S",
        "%Y%m%d-%H:%M:%S",
        "%d.%m.%Y %H:%M:%S",
    ),
    *("%a %b %d %H:%M:%S %Y", "%d-%b-%Y %H:%M:%S"),
)
_DEVICE_POWER = (  # what tools of GPUs call the power of a device, the best first
    *(r"power\.draw\.instant(?: \[(\w+)\])?", r"power\.draw(?: \[(\w+)\])?", r"power\.draw\.average(?: \[(\w+)\])?"),
    *(r"(?:Average|Current Socket) Graphics Package Power \((\w+)\)", r"(?:current_)?socket_power(?:_(\w+))?"),
    r"average_socket_power(?:_(\w+))?",
)
# Of any tool whose table has a column of the device: gpu,power_usage or DeviceId, GPU Power (W)
_ANY_POWER = r"(?:gpu[ _])?(?:power|pwr)(?:[ _](?:usage|draw))?(?: [(\[](\w+)[)\]])?"
_DEVICES = (
    "index",
    "gpu",
    "device",
    "uuid",
    "gpu_uuid",
    "pci.bus_id",
    "gpu_bus_id",
    "gpu_id",
    "gpu_index",
    "card",
    "serial",
    "DeviceId",
)
_UNIQUE = ("uuid", "gpu_uuid", "serial")  # among the devices of all nodes
_JPWR = re.compile(r"(?:gpu|gcd|rocm|gh|gc|cpu|hip|xpu)\w*:\d+", re.IGNORECASE)


def recognise(path: Path) -> PowerColumns:
    """Recognise the table of a tool by its head. InputError if it is no known one."""
    return _recognise(_Table.read(path, None))


def _recognise(table: _Table) -> PowerColumns:
    names, first = table.names, table.rows[0][1] if table.rows else {}
    delimiter = table.delimiter
    job = "JobIDRaw" if "JobIDRaw" in names else "JobID"
    if any("+" in (row.get("JobID") or "") for _, row in table.rows):
        job = "JobID"  # only it tells which components are one job
    energy = "ConsumedEnergyRaw" if "ConsumedEnergyRaw" in names else "ConsumedEnergy"
    if {job, "Start", "End", energy} <= {*names}:
        parts = {row[job] or "" for _, row in table.rows if "." not in (row[job] or ".")}
        jobs = sorted({part.partition("+")[0] for part in parts})
        if len(jobs) == 1 and parts != set(jobs) and (len(parts) < 2 or parts != _list_components(jobs[0], len(parts))):
            raise InputError(
                f"{table.path}: has {render_repr(', '.join(sorted(parts)))}, not every component of the heterogeneous"
                f" job {jobs[0]}; their energy is not that of the job; expected the rows of all: sacct -j {jobs[0]}"
            )
        if len(jobs) != 1:
            raise InputError(
                f"{table.path}: has {len(jobs)} jobs ({render_repr(', '.join(jobs))}); expected one: sacct -j"
            )
        form = _find_time_form(first.get("End"))
        return PowerColumns(
            scope="job", current="AC", time="End", since="Start", energy=energy, unit="J", time_form=form,
            rows={job: jobs[0]}, delimiter=delimiter,
        )  # fmt: skip
    if NODE in names:
        return PowerColumns(scope="node", current="AC", time="timestamp", power=NODE, unit="W")
    if MODULE in names:
        return PowerColumns(scope="node", current="DC", time="timestamp", power=MODULE, unit="mW")
    if "PkgWatt" in names and "Time_Of_Day_Seconds" in names:  # turbostat, whose rows of all processors have a dash
        return PowerColumns(
            scope="package", current="DC", time="Time_Of_Day_Seconds", unit="W", time_form="s", delimiter=delimiter,
            power=[name for name in ("PkgWatt", "RAMWatt") if name in names],
            rows={name: "-" for name in ("Package", "Node", "Die", "Core", "CPU") if first.get(name) == "-"},
        )  # fmt: skip
    time = next((name for name in names if re.split(r"[ (\[]", name.lower())[0] in _TIMES), None)
    power: str | list[str] | None = None
    unit = "W"
    device = next((name for name in _DEVICES if name in names), None)
    for form in (*_DEVICE_POWER, *([_ANY_POWER] if device else [])):
        for name in names:
            if power is None and (match := re.fullmatch(form, name, re.IGNORECASE)):
                power, unit = name, next((known for known in _WATTS if known.lower() == (match[1] or "W").lower()), "?")
    if power is None and time is not None:
        power = [name for name in names if _JPWR.fullmatch(name)] or None
    if power is None or time is None or unit == "?":
        lacking = "time" if power is not None and unit != "?" else "power of a known tool"
        raise InputError(
            f"{table.path}:1: the head has no column with the {lacking}"
            f" ({render_repr(', '.join(names), longest=120)}); known are"
            " nvidia-smi, amd-smi, rocm-smi, xpu-smi, jpwr, sacct, turbostat, dcgmi dmon and IPMI; for other tables"
            " give --power-columns (docs/energy.md)"
        )
    return PowerColumns(
        scope="device", current="DC", time=time, power=power, unit=unit, time_form=_find_time_form(first.get(time)),  # type: ignore[arg-type]
        device=device, delimiter=delimiter,
    )  # fmt: skip


def _list_components(job: str, count: int) -> set[str]:
    return {f"{job}+{number}" for number in range(count)}


def _find_time_form(text: str | None) -> str:
    """Return the form of a time. One that is none gets the first form, which refuses it with its line."""
    try:
        number = float(text or "")
    except ValueError:
        pass
    else:
        return next((form for form, factor in _COUNTED.items() if number < 1e11 * factor), "ns")
    return next((form for form in _TIME_FORMS if _fits(text or "", form)), "iso")


def read_meter(path: Path, columns: Path | None) -> Callable[[RunRecord, Path], None]:
    """Read a CSV and the YAML file of its columns. Return what writes the readings of a run into a folder.

    Without such a file, or if it does not name the column of the time, the head says what the table is.
    """
    if columns is None:
        known = recognise(path)
    elif "time" in (stated := YamlSource.read(columns)).data:
        known = stated.convert(PowerColumns)
    else:
        found = {name: value for name, value in structs.asdict(recognise(path)).items() if value is not None}
        known = YamlSource(columns, {**found, **stated.data}, stated.lines).convert(PowerColumns)
    return partial(write_readings, read_power_csv(path, known))


def write_readings(meter: MeterReadings, record: RunRecord, target: Path) -> None:
    """Write the readings of each node. The run's own readings have a narrower scope and stay as readings of a part.

    InputError if the meter has no readings of the run, or if its scope is not wider than the run's own.
    """
    start, stop = record.run_start_s, record.run_stop_s
    if start is None or stop is None:
        raise InputError(
            f"{record.path}: no run_start or no run_stop, so readings cannot be assigned to it; leave this run out"
        )
    if record.path is not None:
        meter.check_zone(start, stop, record.path.parent)
    # Stretches count from run_start, so staging before it begins below 0.
    staging_s = min((begin for parts in record.stretches.values() for begin, _ in parts), default=0.0)
    scope = meter.columns.scope
    if meter.columns.node == LABEL and record.nodes not in (None, len(meter.by_node)):
        # Tasks of one node that each print its readings would count them more than once.
        raise InputError(
            f"{meter.path}: its lines have {len(meter.by_node)} labels"
            f" ({render_repr(', '.join(meter.columns.nodes), longest=60)}), number_of_nodes of the run is {record.nodes};"
            " expected one label per node: start the tool once on each (srun --ntasks-per-node=1 --label)"
        )
    for node, points in meter.during(start + min(staging_s, 0.0) - _MARGIN_S, stop + _MARGIN_S).items():
        path = target / f"node_{node}.txt"
        if path.exists():
            own = read_power_log(path).scope
            if SCOPES.index(own) >= SCOPES.index(scope):
                measured = f"{own} of node {node} was measured beside the run"
                raise InputError(
                    f"{record.path}: {measured}; expected a meter of a wider scope than {own}, not {scope}"
                )
            path.rename(target / f"part_{node}_{own}.txt")
        make_folder(target)
        path.write_text(render_power_log(points, meter.columns.stated), encoding="utf-8")


def _expand_prefix(text: str | None) -> str | None:
    """Write sacct's 20.54M out, which counts in thousands."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP])", text or "")
    return text if match is None else f"{match[1]}e{3 * ('KMGTP'.index(match[2]) + 1)}"


def _parse_number(text: str | None, where: str, unit: str = "") -> float:
    """Parse a number, which may be followed by ``unit``."""
    number = (text or "").strip()
    if unit:
        number = re.sub(rf"(?<=[\d.])\s*{unit}(?:atts?)?\Z", "", number)
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{where}: {render_repr(text)} is not a number")
    return value


def _parse_time(text: str | None, form: str, where: str) -> float:
    """Return Unix seconds. A date without a zone is UTC (`check_zone`)."""
    if form in _COUNTED:
        return _parse_number(text, where) / _COUNTED[form]
    try:
        found = datetime.fromisoformat(text or "") if form == "iso" else datetime.strptime(text or "", form)
    except ValueError:
        raise InputError(f"{where}: {render_repr(text)} is no time of the form {form!r} (time_form)") from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


_COUNTED = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # forms of time that count from 1970


def _lacks_zone(text: str | None, form: str) -> bool:
    """Return True for a time that `_parse_time` took for UTC because it states no zone."""
    if form == "iso":
        return datetime.fromisoformat(text or "").tzinfo is None
    return form not in _COUNTED and "%z" not in form


def _render_iso_time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return render_duration(seconds)
