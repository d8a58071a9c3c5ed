"""Integrate the readings of one meter. Pure functions of a power log, without extrapolation.

The rules (training_policies, power_measurement.adoc): energy is the sum of each reading times the time since the
reading before it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from suite.log.energy.keys import START
from suite.log.energy.power_log import PowerLog
from suite.statistics import student_t

CONFIDENCE = 0.95
UNSTATED_ACCURACY = 0.05  # of a reading: the most that the rules allow a meter at one reading a second
DUTY_BATCH_S = 10.0  # a board that looks a part of the time sees the phases of a load at random over so long
_FEWEST_BATCHES = 4
_MOST_BATCHES = 5000


@dataclass(frozen=True)
class Curve:
    """The readings of a meter in order of time. ``energy_j`` is what was counted up to each of ``times_s`` (Unix
    seconds).

    The first reading counts from ``begin_s``: the stated start of measuring, or the reading itself if none is stated
    before it.
    """

    times_s: Sequence[float]
    watts: Sequence[float]
    energy_j: Sequence[float]
    begin_s: float

    @property
    def end_s(self) -> float:
        """The last reading."""
        return self.times_s[-1] if self.times_s else self.begin_s

    def up_to(self, at_s: float) -> float:
        """Joules from the first reading to a time within the readings; beyond them what was counted at their end."""
        index = bisect_left(self.times_s, at_s)
        if at_s <= self.begin_s or not self.times_s:
            return 0.0
        if index == len(self.times_s):
            return self.energy_j[-1]
        return self.energy_j[index] - self.watts[index] * (self.times_s[index] - at_s)

    def between(self, start_s: float, stop_s: float) -> float:
        """Joules of the part of a stretch that was measured."""
        return self.up_to(stop_s) - self.up_to(start_s)

    def uncovered_s(self, start_s: float, stop_s: float) -> float:
        """Seconds of a stretch that no reading covers: before the first, and after the last."""
        return max(stop_s - start_s, 0.0) - max(min(stop_s, self.end_s) - max(start_s, self.begin_s), 0.0)

    def largest_gap_s(self, start_s: float, stop_s: float) -> float:
        """The longest time without a reading within a stretch, its ends included."""
        low, high = bisect_right(self.times_s, start_s), bisect_left(self.times_s, stop_s)
        marks = [start_s if low == 0 else self.times_s[low - 1], *self.times_s[low:high]]
        marks.append(stop_s if high == len(self.times_s) else self.times_s[high])
        return max(b - a for a, b in pairwise(marks))

    def rate_hz(self, start_s: float, stop_s: float) -> float:
        """Readings per second of a stretch."""
        count = bisect_right(self.times_s, stop_s) - bisect_left(self.times_s, start_s)
        return count / (stop_s - start_s) if stop_s > start_s else 0.0

    def within(self, start_s: float, stop_s: float) -> Iterable[tuple[float, float]]:
        """(seconds, watts) of each reading in a stretch: the part of the time since the reading before it that is
        inside.
        """
        low, high = bisect_right(self.times_s, start_s), bisect_left(self.times_s, stop_s)
        before = max(start_s, self.begin_s)
        for index in range(low, min(high + 1, len(self.times_s))):
            now = min(self.times_s[index], stop_s)
            yield max(now - before, 0.0), self.watts[index]
            before = max(before, now)


def curve(log: PowerLog, offset_s: float = 0.0) -> Curve:
    """The readings of a log in order of time.

    ``offset_s`` is added to their times: the meter's clock was behind by so much.
    """
    order = sorted(range(len(log.times_ms)), key=log.times_ms.__getitem__)
    times = [log.times_ms[index] / 1e3 + offset_s for index in order]
    watts = [log.watts[index] for index in order]
    start = log.first(START)
    stated = start.time_ms / 1e3 + offset_s if start is not None else math.inf
    begin = min(stated, times[0]) if times else 0.0
    steps = (w * (b - a) for a, b, w in zip([begin, *times], times, watts, strict=False))
    return Curve(times, watts, list(accumulate(steps)), begin)


def sampling_halfwidth_j(
    readings: Iterable[tuple[float, float]], *, duty: float = 1.0, integrates: bool = False
) -> float | None:
    """Half the 95 % interval of an integral for what happened between the readings. None for too few of them.

    The model: a reading is the power of a moment, taken at a time that has nothing to do with the load. Differences of
    consecutive readings then show the spread between them, and a slow change of the load does not count twice. A meter
    that ``integrates`` misses nothing. A board that looks a part ``duty`` of the time sees a load of its own period in
    the same phase for a while, so its readings are taken together over `DUTY_BATCH_S`.
    """
    if integrates:
        return 0.0
    batches = _batches(readings, DUTY_BATCH_S if duty < 1.0 else 0.0)
    if len(batches) < _FEWEST_BATCHES:
        return None
    means = [joules / seconds for seconds, joules in batches]
    spread = math.fsum((b - a) ** 2 for a, b in pairwise(means)) / (2 * (len(means) - 1))
    error = math.sqrt(spread * math.fsum(seconds**2 for seconds, _ in batches))
    return student_t.quantile(0.5 + CONFIDENCE / 2, _freedom(len(means))) * error


def _freedom(batches: int) -> float:
    """Degrees of freedom of a variance from differences of neighbours: two thirds of those of one from the mean."""
    return max(1.0, float(min(batches - 1, _MOST_BATCHES) * 2 // 3))


def _batches(readings: Iterable[tuple[float, float]], least_s: float) -> list[tuple[float, float]]:
    """(seconds, joules) of groups of consecutive readings that are at least so long together; the last may be longer."""
    found: list[tuple[float, float]] = []
    seconds = joules = 0.0
    for each_s, watts in readings:
        seconds, joules = seconds + each_s, joules + watts * each_s
        if seconds > 0.0 and seconds >= least_s:
            found.append((seconds, joules))
            seconds = joules = 0.0
    if found and seconds > 0.0:
        found[-1] = (found[-1][0] + seconds, found[-1][1] + joules)
    return found
