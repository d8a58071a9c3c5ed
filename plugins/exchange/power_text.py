"""Turns texts of power readings that are no CSV into rows: IPMI's DCMI readings one after another, dcgmi dmon.

Also nvidia-smi's own dmon and -q, Jetson's tegrastats, and sacct without -P, whose columns have fixed widths.

while sleep 1; do ipmitool dcmi power reading; done > ipmi.txt       (or: ipmi-dcmi --get-system-power-statistics)
dcgmi dmon -e 155 -d 1000 | ts %.s > dcgm.txt                        (it writes no times itself)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_repr

Row = tuple[int, dict[str, str | None]]
NODE = "dcmi.power [W]"  # the column of a node's power; a device's is nvidia-smi's, `power.draw [W]`

MODULE = "VDD_IN [mW]"  # tegrastats' name of what a Jetson's module takes

# What ipmitool and FreeIPMI call the same
_POWER = re.compile(r"\s*(?:Instantaneous power reading|Current Power)\s*:\s*(\d+)\s*(\w+)", re.IGNORECASE)
_TIME = re.compile(r"(?:IPMI timestamp|Time Stamp)\s*:\s*(.*?)(?:\s+Sampling period:.*)?$", re.IGNORECASE)
_STATE = re.compile(r"(?:Power reading state is|Power Measurement)\s*:\s*(\w.*?)\s*$", re.IGNORECASE)
_FORMS = ("%a %b %d %H:%M:%S %Y", "%m/%d/%y %H:%M:%S", "%m/%d/%Y %H:%M:%S", "%m/%d/%Y - %H:%M:%S")
_HOURS = {
    "UTC": 0,
    "GMT": 0,
    "WET": 0,
    "CET": 1,
    "BST": 1,
    "WEST": 1,
    "CEST": 2,
    "EET": 2,
    "EEST": 3,
    "JST": 9,
    "KST": 9,
}
_HOURS |= {"EST": -5, "EDT": -4, "CST": -6, "CDT": -5, "MST": -7, "MDT": -6, "PST": -8, "PDT": -7}
_ON = {"activated", "active", "available", "enabled", "on"}
_TEGRASTATS = re.compile(r"(\S+ \S+ )?RAM \d+/\d+MB ")
_MODULE = re.compile(r" (?:VDD_IN|POM_5V_IN) (\d+)(?:mW)?/")  # the moment, before the mean since the start
_SMI_DMON = re.compile(r"#\s*(?:Date\s+Time\s+)?gpu\s", re.IGNORECASE)
_DMON = re.compile(r"^(.*?)\s*#\s*Entity\s+(.*)$")


def read_text(path: Path, lines: Sequence[str]) -> tuple[list[str], list[Row]] | None:
    """Return the names of columns and the rows of a text of a known tool. None if it is none."""
    first = next((line for line in lines if line.strip()), "")
    if _POWER.match(first):
        return ["timestamp", NODE], list(_read_dcmi(path, lines))
    if head := _DMON.match(first):
        if not head[1]:
            raise InputError(f"{path}:1: dcgmi dmon writes no times; put them before: dcgmi dmon … | ts %.s")
        return ["timestamp", "index", "power.draw [W]"], list(_read_dmon(path, lines))
    if _SMI_DMON.match(first):
        return ["timestamp", "index", "power.draw [W]"], list(_read_smi_dmon(path, lines))
    if head := _TEGRASTATS.match(first):
        if not head[1]:
            raise InputError(f"{path}:1: this tegrastats writes no times; put them before: tegrastats | ts '%F %T'")
        return ["timestamp", MODULE], list(_read_tegrastats(path, lines))
    if "NVSMI LOG" in first:
        return ["timestamp", "index", "power.draw [W]"], list(_read_smi_report(lines))
    dashes = lines[1] if len(lines) > 1 else ""
    if first.lstrip().startswith("JobID") and re.fullmatch(r"(?:-+ ?)+", dashes):
        return _read_fixed(path, lines[0], dashes, lines[2:])
    return None


def _read_smi_dmon(path: Path, lines: Sequence[str]) -> Iterator[Row]:
    names = lines[0].lstrip("# ").lower().split()
    if not {"date", "time", "gpu", "pwr"} <= {*names}:
        lacking = ", ".join(sorted({"date", "time", "gpu", "pwr"} - {*names}))
        raise InputError(f"{path}:1: no column {lacking}; ask for it: nvidia-smi dmon -s p -o DT")
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and not line.startswith("#") and len(words) >= len(names):
            row = dict(zip(names, words, strict=False))
            power = "[N/A]" if row["pwr"] == "-" else row["pwr"]
            yield number, {"timestamp": f"{row['date']} {row['time']}", "index": row["gpu"], "power.draw [W]": power}


def _read_tegrastats(path: Path, lines: Sequence[str]) -> Iterator[Row]:
    before = ""
    for number, line in enumerate(lines, 1):
        if (head := _TEGRASTATS.match(line)) and head[1]:
            power = _MODULE.search(line)
            if power is None:
                raise InputError(
                    f"{path}:{number}: no VDD_IN, the power of the whole module; its other rails are parts of it"
                )
            day = re.sub(r"^(\d\d)-(\d\d)-(\d{4})$", r"\3-\1-\2", head[1].split()[0])
            time = f"{day} {head[1].split()[1]}"
            if time != before:  # asked more often than once in a second, which is all that it writes of times
                before = time
                yield number, {"timestamp": time, MODULE: power[1]}


def _read_smi_report(lines: Sequence[str]) -> Iterator[Row]:
    """Yield a row of each GPU of each report: the power of the moment, if the driver tells it apart from the mean."""
    time, gpu = "", ""
    found: dict[str, str] = {}
    for number, line in enumerate([*lines, "="], 1):
        name, _, value = (part.strip() for part in line.partition(" : "))
        if line.startswith(("GPU ", "=")):  # the next GPU, or the next report
            if found:
                power = found.get("Instantaneous Power Draw") or found.get("Power Draw") or next(iter(found.values()))
                reading = "[N/A]" if power == "N/A" else power
                yield min(number, len(lines)), {"timestamp": time, "index": gpu, "power.draw [W]": reading}
            gpu, found = name, {}
        elif name == "Timestamp":
            time = value
        elif name.endswith("Power Draw"):  # that of the GPU comes before those of its module and memory
            found.setdefault(name, value)


def _read_fixed(path: Path, head: str, dashes: str, lines: Sequence[str]) -> tuple[list[str], list[Row]]:
    spans = [match.span() for match in re.finditer("-+", dashes)]
    names = [head[begin:end].strip() for begin, end in spans]
    rows: list[Row] = []
    for number, line in enumerate(lines, 3):
        if any(line[end : end + 1].strip() for _, end in spans):
            raise InputError(f"{path}:{number}: a value is wider than its column; ask for sacct -P")
        if line.strip():
            rows.append(
                (number, {name: line[begin:end].strip() for name, (begin, end) in zip(names, spans, strict=True)})
            )
    return names, rows


def _read_dcmi(path: Path, lines: Sequence[str]) -> Iterator[Row]:
    starts = [number for number, line in enumerate(lines) if _POWER.match(line)]
    before = ""
    for start, end in pairwise([*starts, len(lines)]):
        where, block = f"{path}:{start + 1}", lines[start:end]
        power = _POWER.match(block[0])
        assert power is not None
        if power[2].lower() not in ("w", "watt", "watts"):
            raise InputError(f"{where}: the unit is {render_repr(power[2])}; expected Watts")
        stamp, state = ((next(filter(None, map(form.search, block)), None)) for form in (_TIME, _STATE))
        if state is not None and state[1].lower() not in _ON:
            said = render_repr(state[1].lower()).strip("'")
            raise InputError(f"{where}: the board says that its power reading is {said}: it measures nothing")
        if stamp is None:
            raise InputError(f"{where}: a reading without its time (IPMI timestamp)")
        time = _read_time(stamp[1], where)
        if before != time:  # asked more often than it measures
            before = time
            yield start + 1, {"timestamp": time, NODE: power[1]}


def _read_time(text: str, where: str) -> str:
    bare, _, zone = text.strip().rpartition(" ")
    hours = _HOURS.get(zone)
    for form in _FORMS:
        try:
            found = datetime.strptime(text.strip() if hours is None else bare, form)
        except ValueError:
            continue
        if found.year < 2000:
            raise InputError(f"{where}: the clock of the board was not set: {text.strip()}")
        zone_of = None if hours is None else timezone(timedelta(hours=hours))
        return found.replace(tzinfo=zone_of).isoformat()
    raise InputError(f"{where}: {render_repr(text.strip())} is no time that ipmitool or ipmi-dcmi writes")


def _read_dmon(path: Path, lines: Sequence[str]) -> Iterator[Row]:
    place, before = 0, 0  # words before the entity, columns before the power
    for number, line in enumerate(lines, 1):
        if head := _DMON.match(line):
            names, place = head[2].split(), len(head[1].split())
            if "POWER" not in names:
                raise InputError(f"{path}:{number}: no column POWER ({' '.join(names)}); ask for it: dcgmi dmon -e 155")
            before = names.index("POWER")
            continue
        words = line.split()
        if len(words) > place + 2 + before and words[place].startswith("GPU"):
            power = words[place + 2 + before]
            reading = power if power.replace(".", "").isdigit() else "[N/A]"
            yield (
                number,
                {
                    "timestamp": " ".join(words[:place]),
                    "index": " ".join(words[place : place + 2]),
                    "power.draw [W]": reading,
                },
            )
