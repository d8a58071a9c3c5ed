"""Grams of CO2 per kWh, only ever a user's: one number, or a CSV of hours. Nothing ships and nothing is assumed."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from suite.errors import InputError
from suite.files import brief, read_bytes

_LARGEST = 64 * 2**20
_FORM = "expected grams of CO2 per kWh, or a CSV with lines such as 2026-11-23T14:00:00Z,312"


@dataclass(frozen=True)
class Carbon:
    """A factor in g/kWh from each of ``hours`` (Unix seconds) on, up to the next; one hour before all time is a constant."""

    hours: Sequence[float]
    grams: Sequence[float]
    source: str

    def mean(self, start_s: float, stop_s: float) -> float:
        """The mean factor over a stretch. InputError if the hours do not reach so far."""
        if start_s < self.hours[0]:
            raise InputError(f"{self.source}: begins after the run")
        if len(self.hours) > 1 and stop_s > self.hours[-1] + 3600.0:
            raise InputError(f"{self.source}: ends before the run")
        index = bisect_right(self.hours, start_s) - 1
        total, at = 0.0, start_s
        while at < stop_s:
            until = min(stop_s, self.hours[index + 1]) if index + 1 < len(self.hours) else stop_s
            total += self.grams[index] * (until - at)
            at, index = until, index + 1
        return total / (stop_s - start_s) if stop_s > start_s else self.grams[index]


def read_carbon(text: str) -> Carbon:
    """Read ``--carbon``: a number, or the path of a CSV. InputError for anything else."""
    try:
        value = float(text)
    except ValueError:
        return _read_hours(Path(text))
    return Carbon((-math.inf,), (_checked(value, f"--carbon {text}"),), f"the factor given, {value:g} g/kWh")


def _checked(value: float, where: str) -> float:
    if not 0.0 <= value < 1e5:
        raise InputError(f"{where}: {_FORM}")
    return value


def _read_hours(path: Path) -> Carbon:
    try:
        rows = list(csv.reader(read_bytes(path, _LARGEST).decode("utf-8-sig").splitlines()))
    except OSError as error:
        raise InputError(f"--carbon {path}: {error.strerror}; {_FORM}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; {_FORM}") from None
    hours: list[float] = []
    grams: list[float] = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}:{number}"
        if not row or (number == 1 and not any(cell[:1].isdigit() for cell in row)):
            continue  # a heading
        try:
            time = datetime.fromisoformat(row[0].strip())
            value = float(row[1])
        except (ValueError, IndexError):
            raise InputError(f"{where}: {brief(','.join(row))}; {_FORM}") from None
        at = (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
        if hours and at <= hours[-1]:
            raise InputError(f"{where}: its hour is not after the line above")
        hours.append(at)
        grams.append(_checked(value, where))
    if len(hours) < 2:
        raise InputError(f"{path}: {len(hours)} hours; {_FORM}")
    return Carbon(tuple(hours), tuple(grams), str(path))
