"""Turns texts of power readings that are no tables into rows: IPMI's DCMI readings one after another, and dcgmi dmon.

while sleep 1; do ipmitool dcmi power reading; done > ipmi.txt       (or: ipmi-dcmi --get-system-power-statistics)
dcgmi dmon -e 155 -d 1000 | ts %.s > dcgm.txt                        (it writes no times itself)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_repr

Row = tuple[int, dict[str, str | None]]
NODE = "dcmi.power [W]"  # the column of a node's power; a device's is nvidia-smi's, `power.draw [W]`

# What ipmitool and FreeIPMI call the same; a name of the host may stand before it (xCAT)
_POWER = re.compile(r"(?:(\S+): +)?\s*(?:Instantaneous power reading|Current Power)\s*:\s*(\d+)\s*(\w+)", re.IGNORECASE)
_TIME = re.compile(r"(?:IPMI timestamp|Time Stamp)\s*:\s*(.*?)(?:\s+Sampling period:.*)?$", re.IGNORECASE)
_STATE = re.compile(r"(?:Power reading state is|Power Measurement)\s*:\s*(\w+)", re.IGNORECASE)
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
_OFF = {"deactivated", "notactive", "not", "inactive"}
_DMON = re.compile(r"^(.*?)\s*#\s*Entity\s+(.*)$")


def read_text(path: Path, lines: Sequence[str]) -> tuple[list[str], list[Row]] | None:
    """Return the names of columns and the rows of a text of a known tool. None if it is none."""
    first = next((line for line in lines if line.strip()), "")
    if _POWER.match(first):
        return ["timestamp", "host", NODE], list(_read_dcmi(path, lines))
    if head := _DMON.match(first):
        if not head[1]:
            raise InputError(f"{path}:1: dcgmi dmon writes no times; put them before: dcgmi dmon … | ts %.s")
        return ["timestamp", "index", "power.draw [W]"], list(_read_dmon(path, lines))
    return None


def _read_dcmi(path: Path, lines: Sequence[str]) -> Iterator[Row]:
    starts = [number for number, line in enumerate(lines) if _POWER.match(line)]
    before: dict[str | None, str] = {}
    for start, end in pairwise([*starts, len(lines)]):
        where, block = f"{path}:{start + 1}", lines[start:end]
        power = _POWER.match(block[0])
        assert power is not None
        if power[3].lower() not in ("w", "watt", "watts"):
            raise InputError(f"{where}: the unit is {render_repr(power[3])}; expected Watts")
        stamp, state = ((next(filter(None, map(form.search, block)), None)) for form in (_TIME, _STATE))
        if state is not None and state[1].lower() in _OFF:
            raise InputError(
                f"{where}: the board says that its power reading is {state[1].lower()}: it measures nothing"
            )
        if stamp is None:
            raise InputError(f"{where}: a reading without its time (IPMI timestamp)")
        time = _read_time(stamp[1], where)
        if before.get(power[1]) != time:  # asked more often than it measures
            before[power[1]] = time
            yield start + 1, {"timestamp": time, "host": power[1], NODE: power[2]}


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
        return found.replace(tzinfo=timezone(timedelta(hours=hours)) if hours else UTC).isoformat()
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
